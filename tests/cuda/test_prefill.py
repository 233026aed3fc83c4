"""Attention of many query tokens: unpacked pages, and a fused cache against the reference; kernels on the emulator."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcodec
from kvcodec import staged
from kvcodec.attention import attend
from kvcodec.codec import ROLES
from kvcodec.cuda import attention, prefill, sides
from kvcodec.cuda.prefill import Scored, Seen, join, score
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.fused import FusedLayerCache
from kvcodec.integrations.attention import CAUSAL, _only_causal
from kvcodec.integrations.transformers import cache_for
from kvcodec.scheme import KVScheme
from tests.conftest import tiny_model
from tests.cuda.test_fused import Reference, scheme
from tests.cuda.test_operators import fill
from tests.integrations.test_generate import padded, prompt

SPECS = (
    # each number of hqmq's products and of its radii once: the other presets read both as these do
    *(s for s in kvcodec.presets() if not s.startswith("hqmq")),
    *("hqmq-s24_r3", "hqmq-s48_r4", "hqmq-s96_r6", "hqmq-s192_r4"),
    *("dense:dtype=bfloat16", "saw-int4:rotate=kv", "saw-int4:rotate=kv,zero=float", "int-4:group=32"),
    *("int-3:symmetric=true", "fp8:scale=none", "innerq-base:symmetric=full", "ultraquant:scale=real"),
    "hqmq-s24_r3:outliers=3",
)
DIMS = (64, 96, 128, 256)


def readers() -> Iterator[Any]:
    """Every pairing that is read, at one head_dim in turn; the others are for wide runs."""
    turn = 0
    for spec in SPECS:
        made = kvcodec.get(spec)
        pairs = {dim: attention.pair_for(made.key, made.value, dim, 64) for dim in DIMS}
        found = [dim for dim, pair in pairs.items() if not isinstance(pair, str) and pair.key.queries == 1]
        for dim in found:
            yield pytest.param(spec, dim, marks=[] if dim == found[turn % len(found)] else [pytest.mark.wide])
        turn += bool(found)


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("spec", "dim"), readers())
def test_unpacked_pages_are_what_the_codec_decodes(spec: str, dim: int, machine: dict[str, Any]) -> None:
    made, heads, tokens = kvcodec.get(spec), 2, 128
    pair = attention.pair_for(made.key, made.value, dim, 64)
    assert not isinstance(pair, str)
    store, params, (k, v) = fill(made.key, made.value, dim, heads, [tokens, tokens], 64)
    key, value = (
        sides.tensors_for(side, params[role], heads, dim)
        for side, role in zip((pair.key, pair.value), ROLES, strict=True)
    )
    constants = {"pair": attention.text_of(pair), "key": key, "value": value}
    for first, count in ((0, tokens), (32, 77)):
        found = prefill.unpack(store.pages, store.table, first, count, **constants)
        part = slice(first, first + count)
        # the products with every unit vector are the keys themselves
        units = prefill.into_codes(torch.eye(dim).expand(2, heads, dim, dim), key).float()
        assert far((units @ found[0].float().mT).mT, k[:, :, part]) < 1e-3
        assert far(prefill.out_of_codes(found[1], value), v[:, :, part]) < 1e-3
        short = prefill.unpack(store.pages, store.table, first, count, **constants, dtype=torch.bfloat16)
        for a, b in zip(short, found, strict=True):
            assert a.dtype == torch.bfloat16
            assert far(a.float(), b.float()) < 8e-3
    grid, threads, _, early = machine["kv_unpack"].launches[1]
    assert (grid, threads, early) == ((-(-77 // (prefill.tile_tokens(pair) * 4)), heads, 2), 128, False)


def test_a_range_that_the_pages_do_not_hold_is_refused(machine: dict[str, Any]) -> None:
    made = kvcodec.get("kivi-2")
    store, params, _ = fill(made.key, made.value, 64, 1, [64], 64)
    pair = attention.pair_for(made.key, made.value, 64, 64)
    key, value = (sides.tensors_for(s, params[r], 1, 64) for s, r in zip((pair.key, pair.value), ROLES, strict=True))
    for first, count in ((16, 10), (-32, 10), (32, 33)):
        with pytest.raises(ShapeError, match="must be a multiple of 32 and the tokens lie inside"):
            prefill.unpack(store.pages, store.table, first, count, pair=attention.text_of(pair), key=key, value=value)


# -- sums over parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 77, 300])
@pytest.mark.parametrize("cuts", [(), (100,), (1, 30, 31, 120, 290), (350, 399)])
def test_parts_in_any_order_are_causal_attention(n: int, cuts: tuple[int, ...]) -> None:
    tokens, gen = 400, torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, h, t, 32, generator=gen) for h, t in ((6, n), (2, tokens), (2, tokens)))
    seen = Seen(q, 0.2)
    edges = [0, *cuts, tokens]
    for i in torch.randperm(len(edges) - 1, generator=gen).tolist():
        part = slice(edges[i], edges[i + 1])
        seen.add(k[:, :, part], v[:, :, part], edges[i] - (tokens - n))
    hidden = torch.ones(n, tokens, dtype=torch.bool).triu(tokens - n + 1)
    both = (x.double().repeat_interleave(3, 1) for x in (k, v))
    keys, values = both
    s = (q.double() @ keys.mT * 0.2).masked_fill(hidden, -torch.inf)
    found = seen.result()
    torch.testing.assert_close(found.out.double(), s.softmax(-1) @ values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), s.logsumexp(-1), rtol=0, atol=1e-5)


def test_attention_over_nothing() -> None:
    q = torch.randn(1, 2, 3, 8)
    nothing = Seen(q, 1.0).result()
    assert bool((nothing.lse == -torch.inf).all())
    assert not nothing.out.any()
    some = score(q, torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8), 1.0)
    for a, b in ((nothing, some), (some, nothing)):
        assert torch.equal(join(a, b).out, some.out)
    assert bool((join(nothing, nothing).lse == -torch.inf).all())
    assert isinstance(nothing, Scored)


# -- caches ------------------------------------------------------------------------------------------------------------

WINDOWED = {
    "kivi": scheme("kivi-2", 0, 5),
    "innerq": scheme("innerq-hybrid", 3, 6),
    "octopus": scheme("octopus-3", 0, 40),
    "hqmq": scheme("hqmq-s24_r3"),
    "sinks": scheme("int-8", 2, 3),
    "turboquant": scheme("turboquant-3", 4, 0),
    "dense values": KVScheme(key=kvcodec.get("fp8").key, value=kvcodec.get("dense").value, window=17),
}


def rows(batch: int, heads: int, tokens: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Any:
    return torch.randn(2, batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("name", "capacity"), [*((name, 0) for name in WINDOWED), *((name, 320) for name in ("innerq", "octopus", "hqmq"))]
)
def test_chunks_of_a_prompt_attend_as_the_reference(
    name: str, capacity: int, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through sink, blocks and window, several tokens at a time, unpacked in one part and in many."""
    heads, group, dim = 2, 3, 64
    k, v = rows(2, heads, 260, dim)
    fused, reference = FusedLayerCache(WINDOWED[name], capacity=capacity), Reference(WINDOWED[name])
    logits, gen = torch.linspace(-1, 2, heads * group), torch.Generator().manual_seed(1)
    at = 0
    for n in (2, 16, 77, 1, 31, 2, 77, 16, 3):
        for cache in (fused, reference):
            cache.append(k[:, :, at : at + n], v[:, :, at : at + n])
        at += n
        if n == 1:
            continue
        q = torch.randn(2, n, heads * group, dim, generator=gen).transpose(1, 2)
        for staging, queries in ((1 << 30, 1 << 28), (64 * 2 * heads * dim * 4, 1)):
            monkeypatch.setattr(prefill, "STAGING_BYTES", staging)
            monkeypatch.setattr(prefill, "QUERY_BYTES", queries)
            monkeypatch.setattr(prefill, "REFERENCE_ROWS", 256 if queries > 1 else 7)
            for sinks in (None, logits):
                got = fused.attend(q, sinks=sinks, scale=0.2)
                want = reference.attend(q, sinks=sinks, scale=0.2)
                torch.testing.assert_close(got, want, rtol=0, atol=4e-3)
    assert machine["kv_unpack"].launches
    monkeypatch.setattr(prefill, "STAGING_BYTES", 1 << 30)  # one part, which begins inside a tile
    if not capacity:
        for cache in (fused, reference):
            cache.evict(53)
        q = torch.randn(2, heads * group, 5, dim, generator=gen)
        torch.testing.assert_close(fused.attend(q), reference.attend(q), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_have_the_dtype_of_the_queries(dtype: torch.dtype, machine: dict[str, Any]) -> None:
    k, v = rows(1, 1, 90, 64, dtype=dtype)
    made = scheme("innerq-base", 0, 8)
    fused, reference = FusedLayerCache(made), Reference(made)
    for cache in (fused, reference):
        cache.append(k, v)
    q = torch.randn(1, 4, 20, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    got, want = fused.attend(q), reference.attend(q)
    assert got.dtype == dtype
    assert got.shape == q.shape
    limit = 2e-2 if dtype == torch.bfloat16 else 4e-3  # bf16: a bit of the output, and of decoded tokens
    torch.testing.assert_close(got, want, rtol=0, atol=limit)


def test_a_whole_prompt_attends_to_itself(machine: dict[str, Any]) -> None:
    k, v = rows(2, 1, 100, 64)
    made = scheme("octopus-2", 4, 11)
    fused, reference = FusedLayerCache(made), Reference(made)
    for cache in (fused, reference):
        cache.append(k, v)
    q = torch.randn(2, 2, 100, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(fused.attend(q), reference.attend(q), rtol=0, atol=4e-3)
    with pytest.raises(ShapeError, match="101 queries over 100 tokens"):
        fused.attend(torch.randn(2, 2, 101, 64))


def test_what_is_not_served_says_why(machine: dict[str, Any]) -> None:
    k, v = rows(1, 1, 40, 64)
    fused = FusedLayerCache(scheme("int-8"))
    assert staged.refusal(fused) == "the cache is empty"
    fused.append(k, v)
    q = torch.randn(1, 2, 8, 64)
    assert staged.refusal(fused) == ""
    refused = (
        ({"mask": torch.ones(1, 1, 8, 40, dtype=torch.bool)}, "a mask"),
        ({"start": torch.zeros(1, dtype=torch.int32)}, "start"),
        ({"causal": False}, "not causal"),
        ({"softcap": 30.0}, "no soft cap"),
    )
    for options, why in refused:
        with pytest.raises(UnsupportedError, match=why):
            fused.attend(q, **options)
    keys = kvcodec.get("turboquant-qjl-3")
    sketched = FusedLayerCache(keys)
    sketched.append(k, v)
    assert staged.refusal(sketched) == "keys with a sketch are not unpacked"
    with pytest.raises(UnsupportedError, match="a sketch"):
        sketched.attend(q)
    pair = attention.pair_for(keys.key, keys.value, 64, 64)
    with pytest.raises(UnsupportedError, match="keys with a sketch are not unpacked"):
        prefill.program(pair)
    assert attend(q, sketched).shape == q.shape


def test_the_bound_of_the_workspace_counts_what_is_staged(machine: dict[str, Any]) -> None:
    k, v = rows(1, 1, 96, 64)
    fused = FusedLayerCache(scheme("int-8"))
    q = torch.randn(1, 2, 8, 64).half()
    assert staged.workspace_bytes(fused, q) == 0
    fused.append(k, v)
    assert staged.workspace_bytes(fused, q) >= 96 * 2 * 2 * 64
    assert staged.workspace_bytes(fused, q.float()) >= staged.workspace_bytes(fused, q)


# -- models ------------------------------------------------------------------------------------------------------------


def chunked(model: Any, attention: str, spec: Any, ids: Tensor, cuts: tuple[int, ...], **options: Any) -> Any:
    """Logits of a prompt given in chunks, and the paths that ran."""
    cache = cache_for(model, spec, attention=attention, probe=False, max_len=options.pop("max_len", None))
    mask = options.pop("mask", None)
    logits, at = [], 0
    with torch.no_grad():
        for end in (*cuts, ids.shape[1]):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            logits.append(model(ids[:, at:end], past_key_values=cache, **given).logits)
            at = end
    return torch.cat(logits, 1), cache.report()["paths"]


def kvcodec_model(name: str) -> Any:
    model = tiny_model(name)
    model.set_attn_implementation("kvcodec")
    return model


@pytest.mark.parametrize("max_len", [None, 96])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa"])
def test_a_prompt_in_chunks_takes_the_staged_path(name: str, max_len: int | None, machine: dict[str, Any]) -> None:
    model, ids, made = kvcodec_model(name), prompt(2, 60), scheme("int-8", 2, 7)
    cuts = (20, 22, 50, 51)
    wanted, _ = chunked(model, "streamed", made, ids, cuts)
    found, paths = chunked(model, "fused", made, ids, cuts, max_len=max_len)
    layers = model.config.num_hidden_layers
    assert paths == {"exact": layers, "fused": layers, "staged": 3 * layers}
    assert float((found - wanted).abs().max()) < 0.05 * float(wanted.std())


def test_learned_sinks_beside_a_sliding_window(machine: dict[str, Any]) -> None:
    """The full layers of GPT-OSS are staged, those with a sliding window streamed; both give their part."""
    model, ids, made = kvcodec_model("gpt-oss"), prompt(1, 60), scheme("int-8")
    wanted, _ = chunked(model, "streamed", made, ids, (25, 40))
    found, paths = chunked(model, "fused", made, ids, (25, 40))
    kinds = model.config.layer_types
    assert paths["staged"] == 2 * kinds.count("full_attention")
    assert paths["streamed"] == 2 * kinds.count("sliding_attention") > 0
    assert float((found - wanted).abs().max()) < 0.05 * float(wanted.std())


def test_left_padding_is_streamed(machine: dict[str, Any]) -> None:
    model, made = kvcodec_model("llama-gqa"), scheme("int-8", 0, 4)
    ids, mask = padded(40, 31)
    wanted, _ = chunked(model, "streamed", made, ids, (20,), mask=mask)
    found, paths = chunked(model, "fused", made, ids, (20,), mask=mask)
    layers = model.config.num_hidden_layers
    assert paths == {"exact": layers, "streamed": layers}
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-3)
    _, paths = chunked(model, "fused", made, ids, (20,), mask=torch.ones_like(mask))
    assert paths == {"exact": layers, "staged": layers}


def test_keys_with_a_sketch_are_streamed(machine: dict[str, Any]) -> None:
    model, made = kvcodec_model("llama-gqa"), scheme("turboquant-qjl-3")
    found, paths = chunked(model, "fused", made, prompt(1, 40), (20,))
    layers = model.config.num_hidden_layers
    assert paths == {"exact": layers, "streamed": layers}
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_only_the_causal_mask_is_taken_for_one(dtype: torch.dtype) -> None:
    visible = torch.ones(1, 1, 5, 12, dtype=torch.bool).tril(7)
    for b, i, j, value in ((0, 0, 3, None), (0, 4, 3, False), (0, 0, 0, False), (0, 2, 11, True), (0, 4, 11, False)):
        seen = visible.clone()
        if value is not None:
            seen[b, 0, i, j] = value
        mask = (
            seen
            if dtype == torch.bool
            else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min).to(dtype)
        )
        assert _only_causal(mask, mask) == (value is None)
        assert getattr(mask, CAUSAL) == {12: value is None}
    biased = torch.zeros(1, 1, 5, 12).masked_fill(~visible, -torch.inf)
    assert _only_causal(biased, biased.clone())
    biased[0, 0, 0, 2] = -0.5
    assert not _only_causal(biased, biased.clone())
