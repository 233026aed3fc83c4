"""Products with exact sums: against Python's integers, and in any order of terms."""

import pytest
import torch

from packedkv.errors import ShapeError
from packedkv.ops.exact import KERNEL_BITS, ROTATION_BITS, cut_rotation, dot_bits, rotate_exactly, to_grid

DIMS = (64, 80, 96, 128, 192, 256)


def gauss(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation_of(dim: int, bits: int = ROTATION_BITS) -> torch.Tensor:
    return cut_rotation(torch.linalg.qr(gauss(dim, dim).double()).Q, bits)


@pytest.mark.parametrize("scale", [2.0**-147, 2.0**-60, 1.0, 2.0**127], ids=lambda s: f"{s:.0e}")
def test_a_grid_is_a_power_of_two_below_the_largest_component(scale):
    x = torch.tensor([[1.0, -0.25, 0.0], [0.0, 0.0, 0.0]]) * scale
    whole, unit = to_grid(x, 24)
    assert torch.equal(whole, whole.round())
    assert 2**23 <= float(whole[0].abs().max()) <= 2**24
    assert torch.equal(torch.frexp(unit).mantissa, torch.full_like(unit, 0.5))
    torch.testing.assert_close(whole * unit, x.double(), rtol=0, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_two_rows_on_grids_have_an_exact_product(dim):
    bits = dot_bits(dim)
    assert dim * 2 ** (2 * bits) <= 2**53
    a, b = (to_grid(gauss(dim, seed=i), bits)[0] for i in (1, 2))
    a[0], b[0] = 2.0**bits, 2.0**bits
    assert int(a @ b) == sum(int(p) * int(q) for p, q in zip(a.tolist(), b.tolist(), strict=True))


@pytest.mark.parametrize(("dim", "bits"), [*((dim, ROTATION_BITS) for dim in DIMS), (128, KERNEL_BITS)])
def test_a_rotation_equals_that_of_integers(dim, bits):
    rotation = rotation_of(dim, bits=bits)
    x = gauss(3, dim, seed=1) * torch.tensor([[1.0], [1e-6], [1e4]])
    x[2, 5] = 65504.0
    whole, unit = to_grid(x, bits)
    matrix = [[int(v * 2**bits) for v in row] for row in rotation.tolist()]
    found = rotate_exactly(x, rotation, bits)
    for row, u, got in zip(whole.tolist(), unit.flatten().tolist(), found, strict=True):
        sums = [sum(int(v) * matrix[i][j] for i, v in enumerate(row)) for j in range(dim)]
        assert max(abs(s) for s in sums) < 2**53
        expected = torch.tensor([s * u * 2.0**-bits for s in sums], dtype=torch.float64).float()
        assert torch.equal(got, expected)


def test_zeros_come_out_positive():
    x = torch.zeros(2, 64)
    x[1] = -0.0
    assert not torch.signbit(rotate_exactly(x, rotation_of(64))).any()


@pytest.mark.parametrize("dim", DIMS)
def test_a_cut_rotation_is_orthogonal_to_float32(dim):
    rotation = rotation_of(dim)
    assert rotation.dtype == torch.float32
    wide = rotation.double() * 2**24
    assert torch.equal(wide, wide.round())
    product = rotation.double() @ rotation.double().T
    assert float((product - torch.eye(dim)).abs().max()) < 2.0**-22


def test_a_dimension_whose_sums_are_not_exact_is_refused():
    with pytest.raises(ShapeError, match="head_dim=2048 is above 1024"):
        rotate_exactly(torch.zeros(1, 2048), torch.eye(2048))
