"""The octahedral map: a bijection, its density, its conventions at the seams."""

import pytest
import torch

from packedkv.codecs.octopus import coordinate_density, from_square, to_square


def directions(n, seed=0):
    v = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return v / v.norm(dim=-1, keepdim=True)


def test_from_square_inverts_to_square():
    n = directions(100_000)
    xi, eta = to_square(*n.unbind(-1))
    assert float(xi.abs().max()) <= 1
    assert float(eta.abs().max()) <= 1
    torch.testing.assert_close(from_square(xi, eta), n, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("vector", "square"),
    [
        ((0, 0, 1), (0, 0)),
        ((1, 0, 0), (1, 0)),
        ((0, -1, 0), (0, -1)),
        ((0, 0, -1), (1, 1)),  # sign(0) = +1: the south pole goes to one corner of the four
        ((0.0, -0.0, -1), (1, 1)),
        ((-1, 0, -1), (-1, 0.5)),
        ((0, 0, 0), (0, 0)),
    ],
    ids=str,
)
def test_points_on_axes_map_to_fixed_points_of_the_square(vector, square):
    x, y, z = torch.tensor(vector, dtype=torch.float64)[:, None].unbind(0)
    assert tuple(float(c) for c in to_square(x, y, z)) == square


def test_density_integrates_to_one_and_fits_samples():
    edges = torch.linspace(-1, 1, 21, dtype=torch.float64)
    unit = (torch.arange(1000).double() + 0.5) / 1000
    x = edges[:-1, None] + edges.diff()[:, None] * unit
    mass = coordinate_density(x).mean(1) * edges.diff()
    assert float(mass.sum()) == pytest.approx(1, abs=1e-6)
    n = 400_000
    for coordinate in to_square(*directions(n, 3).unbind(-1)):
        share = torch.histogram(coordinate, edges)[0] / n
        # binomial standard error at p = 1/20 is 3.4e-4
        torch.testing.assert_close(share, mass, rtol=0, atol=1.5e-3)
