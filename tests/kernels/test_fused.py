"""FusedLayerCache on the CUDA engine against LayerCache, step by step; the kernels run on the emulated machine."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import ROLES, Dense
from packedkv.codecs.octopus import OctopusQJL
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import choose, refusal
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.scheme import KVScheme
from tests.kernels.conftest import normal

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
