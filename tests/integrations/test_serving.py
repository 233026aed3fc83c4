"""What an engine's pages can serve, and a layer over pages that it owns. The engine itself: tests/serve."""

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import pytest
import torch

import packedkv
from packedkv.attention import Seen, partial
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES
from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.vllm.flash import flash_for
from packedkv.integrations.vllm.layer import EngineLayer
from packedkv.integrations.vllm.options import read_options
from packedkv.integrations.vllm.servable import PAGE_STEP, check_layer, group_tokens, page_step
from packedkv.kernels.flash import Ragged, ragged_attention
from packedkv.kernels.tokens import Rules
from packedkv.ops.rope import Rotary
from packedkv.scheme import mix_of
from packedkv.store.pages import sink_rows
from packedkv.store.site import LayerSite, MeanRemoval
from tests.fuzz.oracle import attention64, causal

CPU = torch.device("cpu")
HEADS, DIM, TOKENS, BLOCK = 2, 64, 70, 16


def refusal(scheme: packedkv.KVScheme, *given: Any, **options: Any) -> str:
    """Return the message of ``check_layer``, or ``""`` if a server does serve it."""
    try:
        check_layer(scheme, *given, **options)
    except UnsupportedError as error:
        return str(error)
    return ""


REFUSALS = {name: refusal(packedkv.get(name)) for name in packedkv.presets()}
SERVED = [name for name, why in REFUSALS.items() if not why]
SPECS = ("saw-int4", "fp8", "hqmq-s24_r3", "octopus-3:window=0", "octopus-qjl-2:window=0", "ultra-tq", "q4_0", "dense")


def made(spec: str, **options: Any) -> EngineLayer:
    scheme = packedkv.get(spec).for_layer(3, 8)
    given = {"layer": 3, "heads": HEADS, "head_dim": DIM, "dtype": torch.float16, "device": CPU, **options}
    return EngineLayer(scheme, **given)


def rows(heads: int = HEADS, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, tokens, heads, DIM, generator=torch.Generator().manual_seed(0)).half()
    return k, v


def pool(layer: EngineLayer, blocks: int = 12) -> torch.Tensor:
    """Blocks as vLLM allocates them, full of bytes that nobody wrote."""
    return torch.full((blocks, layer.heads, BLOCK, layer.token_bytes(BLOCK)), 0xFF, dtype=torch.uint8)


ROW = torch.tensor([7, 2, 11, 5, 9], dtype=torch.int32)


def slots(first: int, last: int) -> torch.Tensor:
    at = torch.arange(first, last)
    return ROW[at // BLOCK].long() * BLOCK + at % BLOCK


@pytest.mark.parametrize("name", packedkv.presets())
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_page_has_no_gaps(name: str, dim: int) -> None:
    """So a token costs whole bytes, which is how engines count."""
    scheme = packedkv.get(name)
    if (name, dim) in (("q4_0", 80), ("ghost-3", 80)):
        pytest.skip(f"{name} refuses head_dim 80")
    layouts = [scheme.codec(role).layout(dim) for role in ROLES]
    step = math.lcm(PAGE_STEP, *(layout.block_tokens for layout in layouts))
    page = scheme.page_layout(dim, step)
    assert page.page_bytes == sum(step // layout.block_tokens * layout.block_bytes for layout in layouts)


def test_which_presets_are_served() -> None:
    assert {"saw-int4", "int-4", "int-8", "fp8", "ultraquant", "ultra-tq", "turboquant-4", "hqmq-s24_r3"} <= set(SERVED)
    assert {"kivi-tq-4", "kivi-tq-3"} <= set(SERVED)
    windowed = {n for n in REFUSALS if n[:4] in ("octo", "kivi")} - {"kivi-tq-4", "kivi-tq-3"}
    assert {n for n, why in REFUSALS.items() if '"window": 0' in why} == windowed
    assert {n for n, why in REFUSALS.items() if "packedkv fit" in why} >= {
        "innerq-base",
        "innerq-small",
        "innerq-hybrid",
    }
    bare = ("kivi-2:window=0", "kivi-sink-2:window=0,sink=0", "innerq-base:norm=false,window=0,sink=0")
    assert {refusal(packedkv.get(spec)) for spec in bare} == {""}
    for why in filter(None, REFUSALS.values()):
        assert why.count("; ") == 1
        assert why.endswith(".")


def test_refusals_of_schemes_say_what_to_do() -> None:
    assert "run packedkv fit" in refusal(packedkv.get("hqmq-s24_r3:outliers=3"))
    assert refusal(packedkv.get("hqmq-s24_r3:outliers=3"), fitted=True) == ""
    assert refusal(packedkv.get("q4_0"), 80).startswith("packedkv: q4_0: q4_0: head_dim=80")
    assert "pages are multiples of 16 tokens" in refusal(packedkv.get("fp8"), 64, 24)
    kivi = packedkv.get("kivi-4:window=0")
    assert refusal(kivi, 64, 96) == ""
    assert "encodes 32 tokens together and pages are multiples of 32 tokens" in refusal(kivi, 64, 48)
    long = packedkv.get("kivi-tq-4")
    assert refusal(long, 96, 128) == ""
    assert "encodes 128 tokens together and pages are multiples of 128 tokens" in refusal(long, 96, 64)
    assert "at head_dim=80 128 tokens take 10816 bytes, and engines count whole bytes for each token" in refusal(
        long, 80
    )


def test_pages_of_groups_and_of_mixtures() -> None:
    assert [page_step(packedkv.get(s)) for s in ("saw-int4", "kivi-2", "kivi-2:group=24")] == [16, 32, 48]
    mixed = mix_of([packedkv.get("saw-int4"), packedkv.get("innerq-base"), packedkv.get("kivi-2:group=24")])
    assert (group_tokens(mixed), page_step(mixed)) == (96, 96)


def test_options_are_read_from_additional_config_and_dtype() -> None:
    assert read_options({}) is None
    assert read_options({"other": 1}, "fp8") is None
    found = read_options({"packedkv": {"preset": "octopus-3", "window": 0, "seed": 5}})
    assert (found.scheme.window, found.seed, found.probe) == (0, 5, "refuse")
    named = read_options({}, "packedkv:saw-int4")
    assert str(named.scheme) == "saw-int4"
    for given, dtype, sentence in (
        ({"preset": "fp8"}, "packedkv:saw-int4", "name one preset"),
        ({"preset": "fp8", "seed": True}, "auto", "seed=True"),
        ({"preset": "octopus-3", "window": 3}, "auto", "only 0 is supported"),
        ({"preset": 4}, "auto", "preset=4"),
        ({"preset": "fp8", "probe": "yes"}, "auto", "packedkv: probe='yes': expected one of refuse, warn, off"),
        ([], "auto", r"expected an object"),
        ({"preset": "fp8", "sinks": 0}, "auto", "Did you mean 'sink'"),
        ({}, "packedkv", "preset=''"),
    ):
        with pytest.raises(SpecError, match=sentence):
            read_options({"packedkv": given}, dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_written_pages_are_the_librarys(spec: str) -> None:
    """In any order of tokens, whichever blocks they get; tokens without a slot leave no trace."""
    layer = made(spec)
    cache, (k, v) = pool(layer), rows()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    where = slots(0, TOKENS)[order]
    for part in order.split(23):
        own = torch.cat([where[: len(part)], torch.tensor([-1])])
        where = where[len(part) :]
        padded = torch.cat([part, part[:1]])
        layer.write(k[padded], v[padded], cache, own)
    library = LayerCache(layer.scheme, layer=3, page_tokens=BLOCK)
    library.append(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    whole = TOKENS // BLOCK
    assert torch.equal(cache.flatten(2)[ROW[:whole].long()], library.store.pages[:whole])
    untouched = [i for i in range(12) if i not in ROW.tolist()]
    assert bool((cache[untouched] == 0xFF).all())
    q = torch.randn(5, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(2)).half()
    sinks = torch.tensor([0.3, -0.5, 1.0, 0.0])
    found = layer.attend(q, cache, ROW, TOKENS, Rules(0.2, sinks=sinks))
    wanted = library.attend(q.transpose(0, 1)[None], scale=0.2, sinks=sinks)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), atol=2e-3, rtol=2e-3)  # of fp16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [2, 5, TOKENS])
def test_first_tokens_are_dense_as_the_librarys(length: int, dtype: torch.dtype) -> None:
    """Those of a request that is shorter than its sink too; a window that has passed some of them."""
    layer = made("saw-int4:sink=4", dtype=dtype)
    cache, (k, v) = pool(layer), (x.to(dtype) for x in rows())
    k[0] *= 30.0  # what 4 bits cannot hold
    layer.write(k[:length], v[:length], cache, slots(0, length))
    library = LayerCache(LayerSite(packedkv.get("saw-int4:sink=4"), 3))
    library.append(k[:length].transpose(0, 1)[None], v[:length].transpose(0, 1)[None])
    n = min(5, length)
    q = torch.randn(n, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = layer.attend(q, cache, ROW, length, Rules(0.2))
    wanted = library.attend(q.transpose(0, 1)[None], scale=0.2)[0].transpose(0, 1)
    torch.testing.assert_close(found.float(), wanted.float(), atol=2e-3, rtol=1e-2)
    bare = made("saw-int4", dtype=dtype)
    coded = pool(bare)
    bare.write(k[:length], v[:length], coded, slots(0, length))
    assert (bare.attend(q, coded, ROW, length, Rules(0.2)) - found).abs().max() > 0.05
    if length == TOKENS:
        dense_k, dense_v = (x[0].transpose(0, 1) for x in library.decode())
        windowed = layer.attend(q[:1], cache, ROW, length, Rules(0.2, Seen(window=length - 2)))
        torch.testing.assert_close(
            windowed, plain(q[:1], dense_k, dense_v, Rules(0.2, Seen(window=length - 2))).to(dtype), atol=2e-2, rtol=0
        )


def test_rows_in_16_bit_of_what_cannot_be_held_are_zeros() -> None:
    layer = made("saw-int4:sink=2", dtype=torch.float32)
    cache, (k, v) = pool(layer), (x.float() for x in rows())
    k[0, 1, 3], v[1, 0, 2] = torch.nan, 1e6
    layer.write(k, v, cache, slots(0, TOKENS))
    held = sink_rows(*layer.pages(cache), 2, torch.float16)[7]
    assert not held[1, 0, 0].any()
    assert not held[0, 1, 1].any()
    assert torch.equal(held[0, 0], k[:2, 0].half())
    assert bool((cache[0] == 0xFF).all())


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Attention of the newest queries in float64, with the window, cap and sinks of ``rules``."""
    rows, seen = (x.transpose(0, 1)[None] for x in (q, k, v)), causal(len(q), len(k), rules.seen.window)
    return attention64(*rows, seen, scale=rules.scale, sinks=rules.sinks, softcap=rules.seen.softcap)[0].transpose(0, 1)


RULES = {
    "plain": Rules(0.125),
    "window": Rules(0.125, Seen(window=9)),
    "capped": Rules(0.5, Seen(softcap=2.0)),
    "all": Rules(0.5, Seen(window=20, softcap=3.0), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.parametrize("n", [1, 30, TOKENS])
@pytest.mark.parametrize("rules", RULES)
def test_windows_caps_and_sinks(rules: str, n: int) -> None:
    layer = made("dense")
    cache, (k, v) = pool(layer), rows()
    layer.write(k, v, cache, slots(0, TOKENS))
    row = ROW.clone()
    if n == 1 and RULES[rules].seen.window:
        row[:2] = 0  # the engine has freed what no query sees
    q = torch.randn(n, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(3)).half()
    found = layer.attend(q, cache, row, TOKENS, RULES[rules])
    torch.testing.assert_close(found.double(), plain(q, k, v, RULES[rules]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("spec", ["turboquant-4", "hqmq-s24_r3", "saw-int4", "additive-k48_r4"])
def test_half_of_the_heads_write_the_same_bytes(spec: str) -> None:
    """Tensor parallelism: a process has some of the heads, and constants of their numbers in the model."""
    (k, v), both = rows(4), made(spec, heads=4)
    whole = pool(both)
    both.write(k, v, whole, slots(0, TOKENS))
    for first in (0, 2):
        part = made(spec, first_head=first)
        cache, own = pool(part), slice(first, first + 2)
        part.write(k[:, own], v[:, own], cache, slots(0, TOKENS))
        assert torch.equal(cache, whole[:, own])


@pytest.mark.parametrize("spec", ["saw-int4", "fp8", "ultra-tq", "hqmq-s24_r3"])
def test_rows_that_cannot_be_stored_are_zero_bytes(spec: str) -> None:
    layer = made(spec)
    (k, v), cache = rows(), pool(layer)
    k, v = k.float(), v.float()
    k[5, 1, 3], v[6, 0, 2] = torch.nan, 1e6
    layer.write(k, v, cache, slots(0, TOKENS))
    clean, (ck, cv) = pool(layer), rows()
    layer.write(ck, cv, clean, slots(0, TOKENS))
    _, pages = layer.pages(cache)
    _, wanted = layer.pages(clean)
    layout = layer.layout(BLOCK)
    for plane in layout.planes:
        found, want = layout.view_plane(pages, plane), layout.view_plane(wanted, plane).clone()
        token, head = (5, 1) if plane.role == "key" else (6, 0)
        want[7, head, token] = 0
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_blocks_in_another_order_are_refused() -> None:
    layer = made("saw-int4")
    token_major = torch.zeros(12, BLOCK, HEADS, layer.token_bytes(BLOCK), dtype=torch.uint8).transpose(1, 2)
    with pytest.raises(UnsupportedError, match="layout LBHNC"):
        layer.pages(token_major)
    with pytest.raises(UnsupportedError, match="layout LBHNC"):
        layer.pages(torch.zeros(12, HEADS, BLOCK, 9, dtype=torch.uint8))


def test_on_a_gpu_nothing_falls_back_to_the_reference() -> None:
    layer = made("polarquant-3")
    layer.device = torch.device("cuda")
    with pytest.raises(UnsupportedError, match=r"polarquant-3: no CUDA kernel reads PolarQuant"):
        layer.find_kernels(64)
    assert layer.unserved == ""


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_layer_takes_another_mean_in_place(kind: Literal["pre", "post"]) -> None:
    """As one that was made with it, in tensors that keep their addresses; another kind needs another layer."""

    def removal(seed: int) -> MeanRemoval:
        mean = 20 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
        return MeanRemoval(kind, Rotary(torch.logspace(0, -4, DIM // 2)) if kind == "pre" else None, mean, "weights")

    k, v = rows()
    layer, fresh = (made("saw-int4", mean=removal(seed)) for seed in (1, 2))
    address = layer.mean.data_ptr()
    found, want = pool(layer), pool(layer)
    for own, cache in ((layer, found), (fresh, want)):
        own.encode(k, v, cache, slots(0, TOKENS), torch.arange(TOKENS)[None].int())
    assert not torch.equal(found, want)
    assert layer.renew(removal(2))
    layer.encode(k, v, found, slots(0, TOKENS), torch.arange(TOKENS)[None].int())
    assert torch.equal(found, want)
    assert layer.mean.data_ptr() == address
    other = MeanRemoval("post" if kind == "pre" else "pre", Rotary(torch.ones(8)), layer.mean.clone(), "weights")
    assert [layer.renew(None), layer.renew(other), made("saw-int4").renew(other)] == [False] * 3
    assert made("saw-int4").renew(None)


# -- vLLM's flash attention; a module of the same name stands for it, as it needs a GPU --------------------------------

NAME = "vllm.v1.attention.backends.fa_utils"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names that are imported, with version 3."""
    for i in range(1, NAME.count(".") + 2):
        name = ".".join(NAME.split(".")[:i])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[NAME]
    module.get_flash_attn_version = lambda head_size: 3
    module.flash_attn_varlen_func = varlen
    flash_for.cache_clear()
    yield module
    flash_for.cache_clear()


def varlen(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int, cu_seqlens_k: torch.Tensor, softmax_scale: float, causal: bool, return_softmax_lse: bool,
    fa_version: int, out: torch.Tensor, window_size: list[int] | None, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``[n, HQ, D]`` over ``[t, H, D]``: the mask ends at the last key; sums ``[HQ, n]``. A window without itself."""
    assert causal
    assert return_softmax_lse
    assert fa_version == (2 if softcap else 3)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    window = window_size[0] + 1 if window_size else 0
    ragged = Ragged(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window)
    return out, ragged_attention(q, k, v, ragged, softmax_scale, softcap, out)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (3, 2.0)])
def test_each_sequences_newest_queries_over_all_its_keys(window: int, softcap: float, engine: Any) -> None:
    if softcap:  # which PyTorch's version 2 has not, but vLLM's
        engine.get_flash_attn_version = lambda head_size: 2
    generator = torch.Generator().manual_seed(1)
    queries, keys = [0, 1, 2, 7, 16], [0, 1, 10, 19, 28]
    q = torch.randn(queries[-1], 4, 64, generator=generator).half()
    k, v = torch.randn(2, keys[-1], 2, 64, generator=generator).half()
    flash = flash_for(64, softcap > 0)
    ragged = Ragged(*(torch.tensor(x, dtype=torch.int32) for x in (queries, keys)), 9, 9, window)
    out = torch.empty_like(q)
    lse = flash(q, k, v, ragged, 0.125, softcap, out)
    assert lse.shape == (4, len(q))
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        n, t = b - a, d - c
        hidden = torch.full((n, t), -torch.inf).triu(t - n + 1)
        if window:
            hidden += torch.full((n, t), -torch.inf).tril(t - n - window)
        rows, own_k, own_v = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        want = partial(rows, own_k, own_v, 0.125, hidden, softcap)
        torch.testing.assert_close(out[a:b].transpose(0, 1)[None].float(), want.out, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse[None, :, a:b], want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [2, None])
def test_there_is_none_without_version_3(version: int | None, engine: Any) -> None:
    engine.get_flash_attn_version = lambda head_size: version
    assert flash_for(64) is None
