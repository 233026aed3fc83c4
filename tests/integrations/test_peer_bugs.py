"""Bugs that other systems had with packed caches and that have no other home here; each test is named after one."""

import pytest
import torch

import packedkv

SPECS = ("dense", "fp8", "int-4", "kivi-2:window=8", "octopus-3:window=8", "saw-int4")


def kv(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("spec", SPECS)
def test_wide_stride_views_give_the_right_bytes(spec: str) -> None:
    """K and V as slices of one fused projection, heads and tokens exchanged: strides as attention modules make them."""
    fused = torch.randn(2, 70, 3 * 2 * 64, generator=torch.Generator().manual_seed(0))
    _, k, v = (x.view(2, 70, 2, 64).transpose(1, 2) for x in fused.chunk(3, -1))
    assert not k.is_contiguous()
    strided, plain = packedkv.LayerCache(packedkv.get(spec)), packedkv.LayerCache(packedkv.get(spec))
    strided.append(k, v)
    plain.append(k.contiguous(), v.contiguous())
    for a, b in zip(strided.tensors(), plain.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dim", [512, 576])
def test_wide_heads_are_not_corrupted(spec: str, dim: int) -> None:
    """Heads of 512 beside 256 in one model, rows of 576: every codec decodes them as it does 64."""
    errors = []
    for width in (64, 256, dim):
        k, v = kv(1, 2, 96, width)
        k_hat, v_hat = packedkv.fake_quant(spec, k, v)
        errors.append(max((a - b).square().mean().item() for a, b in ((k, k_hat), (v, v_hat))))
    assert errors[-1] <= 2.0 * errors[0] + 1e-6, errors


def test_reported_saving_is_resident_bytes() -> None:
    """A printed ratio with the 16-bit history still alive is a fake saving: count every tensor that the cache holds."""
    k, v = (x.to(torch.bfloat16) for x in kv(1, 2, 1024, 64))
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    cache.append(k, v)
    alive = sum(t.untyped_storage().nbytes() for t in cache.tensors())
    assert alive == sum(cache.nbytes().values())
    assert alive < (k.nbytes + v.nbytes) / 3.5
