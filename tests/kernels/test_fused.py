"""FusedLayerCache on the CUDA engine, emulated, against LayerCache: steps, and attention of many query tokens."""

import importlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import packedkv
from packedkv.attention import Partial, Seen, merge, with_sinks
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Dense
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.octopus import OctopusQJL
from packedkv.codecs.outliers import Med
from packedkv.description import kernels_for
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention import _read_mask, packedkv_attention
from packedkv.integrations.transformers.layers import PackedCacheLayer
from packedkv.kernels.choose import choose, refusal
from packedkv.kernels.cuda import basis, prefill
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.flash import score
from packedkv.kernels.mean import most_pairs
from packedkv.scheme import KVScheme
from tests.conftest import tiny_model
from tests.integrations.test_generate import padded, prompt
from tests.kernels import gpu_cases
from tests.kernels.conftest import normal
from tests.kernels.test_basis import into_codes

DIM, HEADS, BATCH = 64, 1, 2
CPU = torch.device("cpu")


class Reference(LayerCache):
    """The reference, its roles leaving the window together as in the fused cache."""

    @property
    def together(self) -> int:  # type: ignore[override]
        return math.lcm(*(self.scheme.codec(role).block_tokens for role in ROLES))


def scheme(spec: str, sink: int = 0, window: int = 0) -> KVScheme:
    return replace(packedkv.get(spec), sink=sink, window=window, spec="")


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return normal(2, BATCH, HEADS, tokens, DIM, seed=seed).half()


def same(fused: FusedLayerCache, reference: LayerCache, seed: int = 1, **options: Any) -> None:
    """Both hold the same tokens, give the same attention, and count their bytes."""
    q = normal(reference.batch, 2 * HEADS, 1, DIM, seed=seed)
    torch.testing.assert_close(fused.attend(q, **options), reference.attend(q, **options), rtol=0, atol=4e-3)
    assert len(fused) == len(reference)
    sizes = fused.nbytes()
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in fused.tensors()}
    assert sum(sizes.values()) == sum(held.values())


WINDOWED = {
    "kivi": scheme("kivi-2", 0, 5),
    "innerq": scheme("innerq-hybrid", 3, 6),
    "octopus": scheme("octopus-3", 0, 4),
    "hqmq": scheme("hqmq-s24_r3"),
    "sinks": scheme("int-8", 2, 3),
}


@pytest.mark.parametrize("name", ["kivi", "hqmq", "sinks"])
def test_a_static_cache_is_filled_again_without_reading_lengths(
    name: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each reading waits, in every layer of a prefill."""
    k, v = rows(60)
    fused, reference = FusedLayerCache(WINDOWED[name], capacity=128), Reference(WINDOWED[name])
    fused.append(k, v)
    fused.reset()
    with monkeypatch.context() as patched:
        for read in ("tolist", "item", "__int__"):
            patched.setattr(torch.Tensor, read, lambda x: pytest.fail("a length was read"))
        fused.append(k[:, :, :50], v[:, :, :50], flag=torch.zeros(1, dtype=torch.int32))
    reference.append(k[:, :, :50], v[:, :, :50])
    for cache in (fused, reference):
        cache.append(k[:, :, 50:51], v[:, :, 50:51])
    same(fused, reference)


def test_a_full_static_cache_with_a_window_says_so(machine: dict[str, Any]) -> None:
    """And takes tokens after a first append that did not fit."""
    k, v = rows(100)
    cache, reference = FusedLayerCache(WINDOWED["sinks"], capacity=64), Reference(WINDOWED["sinks"])
    with pytest.raises(ShapeError, match="do not fit"):
        cache.append(k, v)
    assert len(cache) == 0
    for first, last in ((0, 1), (1, 68), (68, 69)):
        for each in (cache, reference):
            each.append(k[:, :, first:last], v[:, :, first:last])
    same(cache, reference)
    cache.check()
    cache.append(k[:, :, 69:70], v[:, :, 69:70])
    with pytest.raises(ShapeError, match="is full"):
        cache.check()


def test_what_a_cache_cannot_do_is_refused_with_the_way_out(machine: dict[str, Any]) -> None:
    k, v = rows(80)
    cache = FusedLayerCache(scheme("kivi-2", 0, 2))
    cache.append(k, v)
    with pytest.raises(UnsupportedError, match=r"crop\(40\) cuts a block of 32 tokens.*crop to 32"):
        cache.crop(40)
    cache.crop(66)
    cache.crop(32)
    assert len(cache) == 32
    made = packedkv.get("int-4:outliers=3")  # which no kernel encodes
    fused, reference = FusedLayerCache(made), Reference(made)
    for part in (slice(0, 60), slice(60, 80)):
        for each in (fused, reference):
            each.append(k[:, :, part], v[:, :, part])
    same(fused, reference)
    assert fused.kernels() == {"decode": "cuda", "encode.key": "torch", "encode.value": "torch"}
    with pytest.raises(UnsupportedError, match="would synchronise in every step; leave max_len out"):
        FusedLayerCache(made, capacity=64).append(k, v)


def test_refusals_name_the_reason() -> None:
    other = torch.device("meta")
    assert refusal(scheme("kivi-2"), 128, other) == "device meta is not a CUDA GPU"
    assert "no CUDA kernel reads Additive" in refusal(scheme("additive-k48_r4"), 128, other)
    assert "the kernels sketch at head_dim 64, 128, 256 and 512, not 96" in refusal(
        KVScheme(key=OctopusQJL(), value=Dense()), 96, other
    )
    assert "head_dim 64, 80, 96, 128, 192, 256, 512, not 72" in refusal(scheme("kivi-2"), 72, other)
    assert "page_tokens=48 is not a multiple of 32" in refusal(scheme("kivi-2"), 128, other, 48)
    with pytest.raises(UnsupportedError, match=r"no CPU kernel reads E8.*\. Use attention='decoded' or 'streamed'"):
        FusedLayerCache(scheme("e8-2")).append(*rows(3))


@pytest.mark.parametrize("size", [66_000.0, -3e5])
@pytest.mark.parametrize("spec", ["saw-int4", "int-8"])
def test_a_token_beyond_fp16_is_flagged(spec: str, size: float, machine: dict[str, Any]) -> None:
    """A decode step does not stop for a number that no codec holds: the row is zeros, and ``check`` says so."""
    for place in range(2):
        new = [x.bfloat16() for x in rows(4)]
        cache = FusedLayerCache(scheme(spec))
        cache.append(*(x[:, :, :3] for x in new))
        cache.check()
        new[place][1, 0, 3, 17] = size
        cache.append(*(x[:, :, 3:] for x in new))
        with pytest.raises(ValueError, match="above 65504"):
            cache.check()
        with pytest.raises(ValueError, match="above 65504"):
            cache.decode()
        cache.bad.zero_()
        assert (cache.decode()[place][:, 0, 3] == 0).all(-1).tolist() == [False, True]


def test_kernels_are_listed_as_they_are_chosen(machine: dict[str, Any]) -> None:
    """What `packedkv list` says of a preset is what a cache would use on a GPU."""
    for spec in packedkv.presets():
        made, listed = packedkv.get(spec), packedkv.describe(spec)["kernels"]
        if listed["decode"] == "cuda":
            engine = choose(made, 128, CPU)
            assert {engine.written_by(role) for role in ROLES} == {listed["encode"]}, spec
            assert all(isinstance(choose(made.for_layer(i, 4), 128, CPU), CudaEngine) for i in range(4)), spec
        else:
            assert listed == {"encode": "none", "decode": "none"}, spec
            assert refusal(made, 128, CPU), spec


ROTATED = ("turboquant-4", "ultra-tq", "hqmq-s24_r3", "octopus-3", "saw-int4")
"""Their queries are rounded to fp16 after a rotation, or their levels are no numbers of few bits."""


@pytest.mark.parametrize("spec", ROTATED)
def test_large_queries_lose_less_than_keys_in_bf16(spec: str, machine: dict[str, Any]) -> None:
    """Rows of equal values and scores of hundreds, where the rounding of keys to bf16 moves weights by percents."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 2, 130, 1, generator=generator).expand(-1, -1, -1, -1, DIM).bfloat16().contiguous()
    q = (100 * torch.randn(4, 16, 1, DIM, generator=generator)).bfloat16().float()
    fused, reference = FusedLayerCache(packedkv.get(spec)), LayerCache(packedkv.get(spec))
    for cache in (fused, reference):
        cache.append(*x)
    k, v = (y.double().repeat_interleave(8, 1) for y in reference.decode(dtype=torch.float32))
    want = scaled_dot_product_attention(q.double(), k, v)
    rounded = scaled_dot_product_attention(q.double(), k.bfloat16().double(), v)
    ours, theirs = (float((y - want).square().mean().sqrt()) for y in (fused.attend(q), rounded))
    assert ours < theirs / 10


@pytest.mark.parametrize("spec", ["turboquant-4", "hqmq-s24_r3", "saw-int4"])
def test_outputs_saturate_in_fp16(spec: str, machine: dict[str, Any]) -> None:
    """Numbers near 65504 may be decoded to larger ones; their weighted mean stays finite, and NaN stays NaN."""
    generator = torch.Generator().manual_seed(3)
    signs = torch.randn(2, BATCH, HEADS, 130, DIM, generator=generator).sign()
    for x in (signs, signs.abs()):
        fused, reference = FusedLayerCache(packedkv.get(spec)), LayerCache(packedkv.get(spec))
        for cache in (fused, reference):
            cache.append(*(65504 * x).half())
        q = (1e-4 * torch.randn(BATCH, 2 * HEADS, 1, DIM, generator=generator)).half()
        out = fused.attend(q)
        assert out.isfinite().all()
        torch.testing.assert_close(out.float(), attend(q, reference).float(), rtol=0, atol=300)
        q[0, 0, 0, 5] = torch.nan
        assert fused.attend(q)[0, 0].isnan().all()


SPECS = (
    # each number of hqmq's products and of its radii once: the other presets read both as these do
    *(s for s in packedkv.presets() if not s.startswith("hqmq")),
    *("hqmq-s24_r3", "hqmq-s48_r4", "hqmq-s96_r6", "hqmq-s192_r4"),
    *("dense:dtype=bfloat16", "saw-int4:rotate=kv", "saw-int4:rotate=kv,zero=float", "int-4:group=32"),
    *("int-3:symmetric=true", "fp8:scale=none", "innerq-base:symmetric=full", "ultraquant:scale=real"),
    "hqmq-s24_r3:outliers=3",
    *(KVScheme(codec, codec) for codec in (Med(GroupInt(bits, 0), 1.5) for bits in (2, 3, 4, 8))),
)
DIMS = (64, 96, 128, 256, 512)


WITH_MEAN = (
    *("saw-int4", "int-4:group=32", "fp8", "turboquant-4", "octopus-3", "octopus-qjl-2", "ultraquant", "ultra-tq"),
    *("hqmq-s24_r3:outliers=3", "innerq-base"),
)


def readers() -> Iterator[Any]:
    """Every pairing that is read, at one head_dim in turn; the others are for wide runs."""
    turn = 0
    for spec, less in (*((spec, False) for spec in SPECS), *((spec, True) for spec in WITH_MEAN)):
        found = [dim for dim in DIMS if kernels_for(packedkv.get(spec), dim)["decode"] == "cuda"]
        for dim in found:
            marks = [] if dim == found[turn % len(found)] else [pytest.mark.wide]
            yield pytest.param(spec, dim, less, marks=marks, id=f"{spec}-{dim}{'-less' * less}")
        turn += bool(found)
    # 80 channels are no whole runs of 32, and 40 pairs no whole products
    yield pytest.param("saw-int4", 80, True, marks=[pytest.mark.wide], id="saw-int4-80-less")


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("spec", "dim", "less"), readers())
def test_unpacked_pages_are_what_the_codec_decodes(
    spec: str | KVScheme, dim: int, less: bool, device: torch.device
) -> None:
    """Also keys that are held without their mean, at near and far positions."""
    heads, tokens, rng, gen = 2, 128, random.Random(1), torch.Generator(device).manual_seed(1)
    mean = gpu_cases.mean_of(most_pairs(dim), dim, rng, gen, 2, heads, tokens) if less else None
    page = packedkv.get(spec).page_layout(dim).page_tokens
    layer = gpu_cases.fill(gpu_cases.Combination(spec, dim, page), rng, gen, 2, heads, tokens, mean, kernels=False)
    for first, count in ((0, tokens), (32, 77)):
        found = prefill.unpack(layer.packed, first, count)
        part = slice(first, first + count)
        # the products with every unit vector are the keys themselves
        units = into_codes(torch.eye(dim, device=device).expand(2, heads, dim, dim), layer.key).float()
        assert far((units @ found[0].float().mT).mT, layer.keys[:, :, part]) < 1e-3
        assert far(basis.out_of_codes(found[1], layer.value), layer.values[:, :, part]) < 1e-3
        short = prefill.unpack(layer.packed, first, count, torch.bfloat16)
        for a, b in zip(short, found, strict=True):
            assert a.dtype == torch.bfloat16
            assert far(a.float(), b.float()) < 8e-3


# -- sums over parts ---------------------------------------------------------------------------------------------------


def test_attention_over_nothing() -> None:
    q = torch.randn(1, 2, 3, 8)
    nothing = score(q, q[:, :1, :0], q[:, :1, :0], 1.0)
    assert bool((nothing.lse == -torch.inf).all())
    assert not nothing.out.any()
    some = score(q, torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8), 1.0)
    for a, b in ((nothing, some), (some, nothing)):
        assert torch.equal(merge(a, b).out, some.out)
    assert bool((merge(nothing, nothing).lse == -torch.inf).all())
    for lse in (-torch.inf, torch.inf):  # either stands for no token
        alone = with_sinks(Partial(nothing.out, torch.full_like(nothing.lse, lse)), torch.zeros(2))
        assert torch.equal(alone, nothing.out)


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_have_the_dtype_of_the_queries(dtype: torch.dtype, machine: dict[str, Any]) -> None:
    k, v = normal(2, 1, 1, 90, 64).to(dtype)
    made = scheme("innerq-base", 0, 8)
    fused, reference = FusedLayerCache(made), Reference(made)
    for cache in (fused, reference):
        cache.append(k, v)
    q = normal(1, 4, 20, 64, seed=2).to(dtype)
    got, want = fused.attend(q), reference.attend(q)
    assert got.dtype == dtype
    assert got.shape == q.shape
    limit = 2e-2 if dtype == torch.bfloat16 else 4e-3  # bf16: a bit of the output, and of decoded tokens
    torch.testing.assert_close(got, want, rtol=0, atol=limit)


KINDS = {
    "window": Seen(window=13),
    "wide window": Seen(window=80),
    "padding": Seen(start=(17, 0)),
    "padding of new tokens": Seen(start=(100, 3)),
    "padding and window": Seen(window=21, start=(90, 60)),
    "chunks": Seen(chunk=24, place=5),
    "all": Seen(causal=False),
    "soft cap": Seen(softcap=0.5),
    "soft cap and window": Seen(softcap=0.5, window=30, start=(40, 0)),
    "mask": Seen(mask=torch.rand(2, 1, 40, 118, generator=torch.Generator().manual_seed(9)) < 0.6),
    "weights": Seen(mask=normal(2, 1, 1, 118, seed=9), softcap=2.0),
}


def mask_of(seen: Seen, n: int, held: int) -> Tensor:
    """Which tokens the newest n queries see."""
    own, keys = torch.arange(held - n, held)[:, None], torch.arange(held)
    mask = (keys <= own) | (not seen.causal)
    if seen.window:
        mask &= keys > own - seen.window
    if seen.chunk:
        mask &= (keys + seen.place) // seen.chunk == (own + seen.place) // seen.chunk
    return mask & (keys >= torch.tensor(seen.start or (0,))[:, None, None, None])


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((n, "int-8") for n in KINDS),
        *(("padding and window", "turboquant-qjl-3"), ("soft cap", "saw-int4"), ("chunks", "octopus-qjl-2")),
    ],
)
def test_queries_see_the_same_tokens_as_in_the_reference(
    name: str, spec: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, left padding, chunks, soft caps and masks; unpacked in one part and in many, with and without sinks."""
    n, held, seen = 40, 118, KINDS[name]
    k, v = normal(2, 2, 2, held, 64).half()
    made = scheme(spec, 3, 9)
    fused, reference = FusedLayerCache(made), Reference(made)
    for cache in (fused, reference):
        cache.append(k, v)
    assert isinstance(fused.engine, CudaEngine)
    q = normal(2, 4, n, 64, seed=3)
    mask = mask_of(seen, n, held) if seen.mask is None else seen.mask
    for sinks in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
        want = attend(q, reference, mask=mask, sinks=sinks, softcap=seen.softcap, scale=0.2)
        for staging, queries in ((1 << 30, 1 << 28), (4 * 64 * 2 * 2 * 64 * 2, 1)):
            monkeypatch.setattr(prefill, "STAGING_BYTES", staging)
            monkeypatch.setattr(prefill, "QUERY_BYTES", queries)
            monkeypatch.setattr(prefill, "REFERENCE_ROWS", 256 if queries > 1 else 7)
            found = fused.attend_chunk(q, scale=0.2, sinks=sinks, seen=seen)
            assert far(found, want) < 1.5e-3
    # no more is unpacked than what is seen
    if name == "window":
        grids = [grid[0] for grid, *_ in machine["kv_unpack"].launches]
        assert max(grids) == 1  # 64 tokens: 52 and what lies before them in a tile


def test_what_is_not_served_says_why(machine: dict[str, Any]) -> None:
    k, v = normal(2, 1, 1, 40, 64).half()
    fused, q, mask = FusedLayerCache(scheme("int-8")), torch.randn(1, 2, 8, 64), torch.ones(1, 1, 8, 40).bool()
    with pytest.raises(ShapeError, match="the cache is empty"):
        fused.attend(q)
    fused.append(k, v)
    with pytest.raises(UnsupportedError, match="no mask of a single query token"):
        fused.attend(q[:, :, :1], mask=mask[:, :, :1])
    for seen in (Seen(start=(1, 2)), Seen(window=3, causal=False)):
        with pytest.raises(ShapeError, match="one start for each of 1 sequences"):
            fused.attend_chunk(q, seen=seen)
    with pytest.raises(ShapeError, match=r"mask \(1, 1, 8, 39\) does not fit 8 queries over 40 tokens"):
        fused.attend_chunk(q, seen=Seen(mask=mask[..., :39]))


def test_the_bound_of_the_workspace_counts_what_is_staged(machine: dict[str, Any]) -> None:
    k, v = normal(2, 1, 1, 96, 64).half()
    fused = FusedLayerCache(scheme("int-8"))
    q = torch.randn(1, 2, 8, 64).half()
    assert fused.chunk_workspace_bytes(q) == 0
    fused.append(k, v)
    assert fused.chunk_workspace_bytes(q) >= 96 * 2 * 2 * 64
    scores = 4 * 2 * 8 * 96
    assert fused.chunk_workspace_bytes(q, flash=False) >= fused.chunk_workspace_bytes(q) - (1 << 20) + scores


# -- models ------------------------------------------------------------------------------------------------------------


def chunked(model: Any, attention: str, spec: Any, ids: Tensor, cuts: tuple[int, ...], **options: Any) -> Any:
    """Logits of a prompt given in chunks, and the paths that ran."""
    mask = options.pop("mask", None)
    cache = cache_for(model, spec, attention=attention, probe=False, **options)
    logits, at = [], 0
    with torch.no_grad():
        for end in (*cuts, ids.shape[1]):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            logits.append(model(ids[:, at:end], **passing(model, cache), **given).logits)
            at = end
    return torch.cat(logits, 1), cache.report()["paths"]


def packedkv_model(name: str, **changed: Any) -> Any:
    model = tiny_model(name, **changed)
    model.set_attn_implementation("packedkv")
    return model


@pytest.mark.parametrize(
    ("name", "spec", "way", "options"),
    [
        *(("llama-gqa", "int-8", "staged", {}), ("llama-mqa", "int-8", "staged", {"max_len": 96})),
        *(("mistral", "int-8", "staged", {}), ("gemma3", "int-8", "staged", {}), ("llama4", "int-8", "staged", {})),
        ("mistral", "int-8", "staged", {"prefill": "decoded"}),
        *(("gpt-oss", spec, "staged", {}) for spec in ("turboquant-qjl-3", "saw-int4")),
        *(("gemma2", "int-8", "scored", {}), ("gemma2-full", "int-8", "scored", {"max_len": 96})),
    ],
)
def test_a_prompt_in_chunks_is_as_without_kernels(
    name: str, spec: str, way: str, options: dict[str, Any], machine: dict[str, Any]
) -> None:
    """Chunks shorter and longer than windows of 12, learned sinks, soft caps; in caches that grow and fixed ones."""
    changed = {"layer_types": ["full_attention"] * 2} if name == "gemma2-full" else {}
    model, ids, made = packedkv_model(name.partition("-full")[0], **changed), prompt(2, 70), scheme(spec, 0, 3)
    cuts, exact = (20, 25, 26, 60), "prefill" not in options
    wanted, _ = chunked(model, "streamed", made, ids, cuts, **{x: options[x] for x in options if x == "prefill"})
    found, paths = chunked(model, "fused", made, ids, cuts, **options)
    layers = model.config.num_hidden_layers
    assert paths == {"fused": layers, **({"exact": layers} if exact else {}), way: (4 - exact) * layers}
    if name == "gpt-oss":  # another expert may be chosen for a token
        assert far(found, wanted) < 0.01
    else:
        assert float((found - wanted).abs().max()) < 0.05 * float(wanted.std())


@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "llama4"])
def test_left_padding(name: str, machine: dict[str, Any]) -> None:
    """Also before windows; chunks count from a sequence's first token, so padding takes them out of step."""
    model, made = packedkv_model(name), scheme("int-8", 0, 4)
    ids, mask = padded(40, 31)
    wanted, _ = chunked(model, "streamed", made, ids, (20,), mask=mask)
    found, paths = chunked(model, "fused", made, ids, (20,), mask=mask)
    layers = model.config.num_hidden_layers
    scored = list(getattr(model.config, "layer_types", None) or ()).count("chunked_attention")
    kinds = {"exact": layers, "staged": layers - scored, "scored": scored}
    assert paths == {path: count for path, count in kinds.items() if count}
    limit = 0.05 * float(wanted.std())
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=0, atol=limit)
    _, paths = chunked(model, "fused", made, ids, (20,), mask=torch.ones_like(mask))
    assert paths == {"exact": layers, "staged": layers}


def test_a_mask_of_any_shape_is_scored(machine: dict[str, Any]) -> None:
    """A mask of four axes with holes, as an own sampler may give it."""
    model, ids, made = packedkv_model("llama-gqa"), prompt(1, 40), scheme("int-8")
    seen = torch.ones(1, 1, 20, 40, dtype=torch.bool).tril(20)
    seen[..., 7] = False
    outs = {}
    for way in ("streamed", "fused"):
        cache = cache_for(model, made, attention=way, probe=False)
        with torch.no_grad():
            model(ids[:, :20], **passing(model, cache))
            outs[way] = model(ids[:, 20:], **passing(model, cache), attention_mask=seen).logits
    layers = model.config.num_hidden_layers
    assert cache.report()["paths"] == {"exact": layers, "scored": layers}
    assert float((outs["fused"] - outs["streamed"]).abs().max()) < 0.05 * float(outs["streamed"].std())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_is_taken_for_what_it_says(dtype: torch.dtype) -> None:
    def given(seen: Tensor) -> Tensor:
        if dtype == torch.bool:
            return seen
        return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min).to(dtype)

    for rules in (Seen(), Seen(window=4), Seen(chunk=5, place=3)):
        for start in ((0, 0), (3, 0), (9, 12)):
            mask = mask_of(rules._replace(start=start), 5, 12)
            read = _read_mask(given(mask), rules)
            assert read is not None
            assert torch.equal(mask_of(read, 5, 12).expand_as(mask), mask)
            assert bool(read.start) == any(s > read.first(0, 5, 12) for s in start)
            for b, i, j in ((0, 4, 11), (1, 0, 7), (1, 3, 9), (0, 2, 11), (1, 4, 0)):
                wrong = mask.clone()
                wrong[b, 0, i, j] = ~wrong[b, 0, i, j]
                other = _read_mask(given(wrong), rules)
                assert other is None or torch.equal(mask_of(other, 5, 12).expand_as(wrong), wrong)
    assert _read_mask(given(mask).expand(2, 3, 5, 12), Seen()) is None
    biased = torch.zeros(1, 1, 5, 12).masked_fill(~mask_of(Seen(), 5, 12), -torch.inf)
    assert _read_mask(biased, Seen()) == Seen()
    biased[0, 0, 0, 2] = -0.5
    assert _read_mask(biased, Seen()) is None


def test_a_compiled_call_takes_several_tokens(machine: dict[str, Any]) -> None:
    """As ``generate(prefill_chunk_size=...)`` does with a static cache: graphs leave out what the host decides."""
    module, (k, v) = torch.nn.Module(), normal(2, 1, 2, 80, 64)
    q = normal(1, 4, 80, 64, seed=3)
    module.num_key_value_groups = 2  # type: ignore[assignment]
    outs, torch_dynamo = [], importlib.import_module("torch._dynamo")
    for compiled in (False, True):
        layer = PackedCacheLayer(FusedLayerCache(scheme("int-8"), capacity=96), 0, "fused", "exact")

        def call(first: int, last: int, layer: PackedCacheLayer = layer) -> Tensor:
            part = slice(first, last)
            keys, values = layer.update(k[:, :, part], v[:, :, part])
            return packedkv_attention(module, q[:, :, part], keys, values, None)[0]

        torch_dynamo.reset()
        run = torch.compile(call, backend="eager") if compiled else call
        with torch.no_grad():
            outs.append(torch.cat([run(*part) for part in ((0, 32), (32, 64), (64, 80))], 1))
        assert layer.calls["staged"] == 2
        assert layer.calls["streamed"] == 0
    torch.testing.assert_close(*outs)
