"""The 1-bit residual: Hadamard matrices of every order, signs, the closed forms of its mean and its error."""

from math import pi

import pytest
import torch

from packedkv.codec import Site
from packedkv.ops.bitpack import unpack
from packedkv.ops.hadamard import random_signs
from packedkv.ops.qjl import estimate, hadamard_matrix, sketch

DIMS = (64, 80, 96, 128, 192, 256)


def signs_of(dim, heads=1, seed=0):
    return random_signs(Site(0, "key", heads, dim, seed), stream=1)


def residuals(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 8


@pytest.mark.parametrize("order", [*range(8, 177, 8), 192, 256, 320, 576])
def test_rows_of_a_hadamard_matrix_are_orthogonal(order):
    matrix = hadamard_matrix(order)
    assert matrix.abs().eq(1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("dim", DIMS)
def test_signs_and_lengths_are_the_definition(dim):
    r, signs = residuals(1, 3, 20, dim), signs_of(dim, 3)
    sigma, g = sketch(r, signs)
    dense = hadamard_matrix(dim) / dim**0.5
    projected = torch.einsum("jd,bhnd->bhnj", dense, signs.double().unsqueeze(2) * r)
    plus = unpack(sigma, 1, dim) == 1
    assert torch.equal(plus, projected > 0)
    assert torch.equal(g, r.norm(dim=-1, keepdim=True).half())
    vector = torch.einsum("jd,bhnj->bhnd", dense, plus.double() * 2 - 1) * signs.unsqueeze(2)
    expected = (pi / (2 * dim)) ** 0.5 * g.double() * vector
    torch.testing.assert_close(estimate(sigma, g, signs).double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dim", [64, 80])
def test_a_sum_of_zero_is_positive(dim):
    """r is a row of M less another one: orthogonal to all the rest, whose sums are exactly zero."""
    matrix = hadamard_matrix(dim)
    r = ((matrix[3] - matrix[5]) / 16 + 0.0).view(1, 1, 1, dim)
    sigma, _ = sketch(r, torch.ones(1, 1, dim))
    assert unpack(sigma, 1, dim).flatten().tolist() == [int(j != 5) for j in range(dim)]


def test_a_sum_that_floats_cannot_settle_does_not_hang_on_their_order():
    """.1 + .2 - .3 is 6e-17 or 3e-17, by the order of additions; in units of 2^-30 it is zero, hence positive."""
    r = torch.zeros(1, 1, 2, 64, dtype=torch.float64)
    r[..., 0, :3] = torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64)
    r[..., 1, :3] = -r[..., 0, :3]
    sigma, _ = sketch(r, torch.ones(1, 1, 64))
    assert unpack(sigma, 1, 64)[0, 0, :, 0].tolist() == [1, 1]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("loud", [1, 30], ids=["even", "one-loud-block"])
def test_the_mean_over_seeds_is_the_residual(dim, loud):
    """Blocks of unequal energy are what a block-diagonal sketch would get wrong: by 17 to 27 % here."""
    r = residuals(1, 1, 64, dim)
    r[..., : dim // 4] *= loud
    r /= r.norm(dim=-1, keepdim=True)
    mean = torch.zeros_like(r)
    for seed in range(64):
        signs = signs_of(dim, seed=seed)
        mean += estimate(*sketch(r, signs), signs) / 64
    assert float((mean * r).sum() / r.square().sum()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dim", DIMS)
def test_lengths_and_errors_are_the_closed_forms(dim):
    """|r^|^2 = (pi / 2) |r|^2, every time; |r - r^|^2 = (pi/2 - 1) |r|^2, on average."""
    r, signs = residuals(1, 4, 500, dim), signs_of(dim, 4)
    back = estimate(*sketch(r, signs), signs)
    torch.testing.assert_close(
        back.double().norm(dim=-1), (pi / 2) ** 0.5 * r.norm(dim=-1), rtol=2**-10, atol=0, check_dtype=False
    )
    energy = (back - r).square().sum(-1) / r.square().sum(-1)
    assert float(energy.mean()) == pytest.approx(pi / 2 - 1, rel=0.02)


def test_a_residual_of_one_coordinate_comes_out_too_long():
    """The limit of the nearly normal: r^ = sqrt(pi / 2) r."""
    r = torch.zeros(1, 1, 1, 64, dtype=torch.float64)
    r[..., 7] = 1
    back = estimate(*sketch(r, signs_of(64)), signs_of(64))
    torch.testing.assert_close(back.double(), r * (pi / 2) ** 0.5, rtol=1e-6, atol=1e-7)
