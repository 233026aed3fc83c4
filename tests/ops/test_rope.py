"""RoPE with fixed frequencies: the definition in float64, its inverse, and positions of long contexts."""

import pytest
import torch
from torch import Tensor

from packedkv.ops.rope import Rotary

FREQUENCIES = 10000.0 ** (-torch.arange(0, 24, 2).float() / 24)


def defined(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """The definition as complex numbers, one pair at a time."""
    out, width = x.double().expand(*x.shape[:2], positions.shape[1], -1).clone(), 2 * len(rotary.frequencies)
    for i, w in enumerate(rotary.frequencies.double()):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + width // 2)
        z = torch.complex(out[..., a], out[..., b]) * rotary.scaling
        z = z * torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, None] * w)
        out[..., a], out[..., b] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [24, 40], ids=["all channels", "some channels"])
@pytest.mark.parametrize("scaling", [1.0, 1.27])
def test_definition_and_inverse(interleaved: bool, dim: int, scaling: float) -> None:
    rotary = Rotary(FREQUENCIES, scaling, interleaved)
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 99, 1000, 50_000, 131_071]])
    turned = rotary.turn(x, positions)
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.double(), defined(x, positions, rotary), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(rotary.turn_back(turned, positions), x, atol=2e-6, rtol=1e-6)


def test_one_row_stands_for_all_tokens() -> None:
    rotary, positions = Rotary(FREQUENCIES), torch.arange(9)[None]
    x = torch.randn(1, 2, 1, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotary.turn(x, positions), rotary.turn(x.expand(1, 2, 9, 32), positions))
    assert torch.equal(rotary.turn(x, torch.zeros(1, 1)), x)
