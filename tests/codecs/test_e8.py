"""E8: the codebook counted, every choice against all 2^16 points, and NexusQuant's quantizer beside it."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given

from packedkv.codecs.e8 import E8, points
from packedkv.codecs.turboquant import TurboQuant

from .support import MARGIN, by_definition, error, hadamard, key_batches, normal


def by_counting() -> np.ndarray:
    """The 2^16 points from their definition: 256 patterns, signs of an even sum, plus and minus 1/4."""
    words = [np.array(w) for w in product((0.5, 1.5, 2.5), repeat=8)]
    patterns = [w for w in words if (w * w).sum() <= 10] + [w for w in words if (w * w).sum() == 12][:29]
    signs = np.array(list(product((1.0, -1.0), repeat=8)))
    halves = np.concatenate([signs * w for w in patterns])
    halves = halves[halves.sum(1) % 2 == 0]
    return np.concatenate([halves + 0.25, halves - 0.25])


CODEBOOK = by_counting()


def every_code() -> torch.Tensor:
    """All 2^16 codes, ``[65536, 2]``."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).view(-1, 2)


def test_each_code_is_a_point_and_each_point_has_a_code():
    decoded = points(every_code()).double().numpy()
    assert len(np.unique(decoded, axis=0)) == 1 << 16
    assert {tuple(p) for p in decoded} == {tuple(p) for p in CODEBOOK}


@by_definition
@given(x=key_batches(tokens=3))
def test_codes_are_the_nearest_of_all_points(x):
    matrix, codec = hadamard(x.shape[-1]).numpy(), E8()
    payload = codec.encode(codec.to_code(x, {}), {})
    for row, codes, scale in zip(x[0, 0].double().numpy(), payload["codes"][0, 0], payload["scale"][0, 0], strict=True):
        y = row @ matrix
        exact, held = 0.96 * np.sqrt((y * y).mean()), float(scale)
        assert abs(held - exact) <= max(exact * 2.0**-11 * 1.001, 2.0**-25), "not fp16(0.96 rms)"
        if not held:
            continue
        chosen = points(codes).double().numpy().reshape(-1, 8)
        for z, p in zip((y / held).reshape(-1, 8), chosen, strict=True):
            away = ((z - CODEBOOK) ** 2).sum(1)
            assert ((z - p) ** 2).sum() <= away.min() + MARGIN * max(1, away.min())


def nexusquant(x: torch.Tensor) -> torch.Tensor:
    """NexusQuant 0.6.3, ``quantize_perhead``, in units of max |x| / 2: whole numbers of even sum, or any halves."""
    z = x.double() / (x.double().abs().amax(-1, keepdim=True) / 2)
    z = z.unflatten(-1, (-1, 8))
    whole = z.round()
    off = z - whole
    odd = whole.sum(-1, keepdim=True) % 2 != 0
    other = torch.nn.functional.one_hot(off.abs().argmax(-1), 8) * torch.where(off >= 0, 1.0, -1.0)
    whole = torch.where(odd, whole + other, whole)
    half = (z - 0.5).round() + 0.5
    nearer = ((z - half) ** 2).sum(-1, keepdim=True) < ((z - whole) ** 2).sum(-1, keepdim=True)
    return torch.where(nearer, half, whole).clamp(-2, 2).flatten(-2)


def test_nexusquants_points_need_18_bits_and_are_farther_from_normal_values():
    x = normal(1, 4, 2048, 128)
    p = nexusquant(x)
    unit = x.double().abs().amax(-1, keepdim=True) / 2
    assert float((p * unit - x).square().sum() / x.double().square().sum()) == pytest.approx(0.137, rel=0.01)
    even = sum(sum(w) % 2 == 0 for w in product(range(-2, 3), repeat=8))
    assert even + 4**8 == 260_849
    assert (even + 4**8 - 1).bit_length() == 18
    assert error(E8(), x) == pytest.approx(0.0900, rel=0.01)
    assert error(TurboQuant(2), x) == pytest.approx(0.1160, rel=0.01)
