"""Lloyd-Max against closed forms and against independently computed codebooks (6 digits)."""

import pytest
import torch

from packedkv.codecs.octopus import coordinate_density
from packedkv.ops.lloyd_max import block_norm_density, distortion, lloyd_max, midpoints, nearest_level

XI = {
    1: [0.5],
    2: [0.275060, 0.724940],
    3: [0.143009, 0.383984, 0.616016, 0.856991],
    4: [0.072157, 0.202192, 0.323773, 0.441564, 0.558436, 0.676227, 0.797808, 0.927843],
    5: [0.036160, 0.104518, 0.169687, 0.232399, 0.293327, 0.353058, 0.412073, 0.470727],
}
XI_DISTORTION = {1: 0.0700606, 2: 0.0194625, 3: 0.0050790, 4: 0.0012828, 5: 0.00032153, 6: 0.00008044}
RHO = {
    (128, 1): [0.100736, 0.197145],
    (128, 2): [0.070077, 0.124664, 0.178623, 0.247353],
    (128, 3): [0.047801, 0.081948, 0.111174, 0.139237, 0.168139, 0.199942, 0.238161, 0.292587],
    (64, 1): [0.142566, 0.277268],
    (64, 2): [0.099079, 0.175784, 0.250945, 0.345367],
    (64, 3): [0.067536, 0.115643, 0.156669, 0.195888, 0.236057, 0.279947, 0.332192, 0.405535],
}
RHO_DISTORTION = {1: 0.0511826, 2: 0.0158575, 3: 0.0045145, 4: 0.0012148, 5: 0.0003160, 6: 0.0000807}
COORDINATE = {
    (128, 1): [0.070662],
    (128, 2): [0.039992, 0.133042],
    (128, 3): [0.021604, 0.066586, 0.118140, 0.188397],
    (128, 4): [0.011302, 0.034152, 0.057772, 0.082828, 0.110288, 0.141805, 0.180836, 0.237664],
    (64, 4): [0.015919, 0.048090, 0.081312, 0.116487, 0.154926, 0.198856, 0.252914, 0.330796],
}


def gauss(x):
    return torch.exp(-x * x / 2)


@pytest.mark.parametrize("levels", [1, 2, 3, 7, 32], ids=lambda n: f"L{n}")
def test_a_flat_density_gives_cell_centres(levels):
    centroids = lloyd_max(torch.ones_like, levels, -1.0, 3.0)
    torch.testing.assert_close(centroids, -1 + 4 * (torch.arange(levels).double() + 0.5) / levels, rtol=0, atol=1e-12)
    assert distortion(torch.ones_like, centroids, -1.0, 3.0) == pytest.approx((4 / levels) ** 2 / 12, rel=1e-10)


def test_gauss_gives_max_1960():
    # J. Max 1960, Table I: N = 4 and N = 8, printed to 4 digits
    four = lloyd_max(gauss, 4, -10.0, 10.0, symmetric=True)
    assert four[2:].tolist() == pytest.approx([0.4528, 1.510], abs=5e-4)
    assert distortion(gauss, four, -10.0, 10.0) == pytest.approx(0.1175, abs=5e-5)
    eight = lloyd_max(gauss, 8, -10.0, 10.0, symmetric=True)
    assert eight[4:].tolist() == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=5e-4)
    assert distortion(gauss, eight, -10.0, 10.0) == pytest.approx(0.03454, abs=5e-5)


@pytest.mark.parametrize("bits", sorted(XI_DISTORTION), ids=lambda b: f"b{b}")
def test_octahedral_codebooks(bits):
    centroids = lloyd_max(coordinate_density, 2**bits, -1.0, 1.0, symmetric=True)
    if bits in XI:
        half = centroids[2 ** (bits - 1) :].tolist()
        assert [round(c, 6) for c in half[: len(XI[bits])]] == XI[bits]
    assert torch.equal(centroids, -centroids.flip(0)), "the sign trick of a kernel needs exact symmetry"
    positive = centroids[2 ** (bits - 1) :]
    torch.testing.assert_close(positive, 1 - positive.flip(0), rtol=0, atol=1e-12)  # f(a) = f(1 - a)
    half_a_digit = 5.1e-8 if bits < 5 else 5.1e-9
    found = distortion(coordinate_density, centroids, -1.0, 1.0)
    assert found == pytest.approx(XI_DISTORTION[bits], abs=half_a_digit)


@pytest.mark.parametrize(("dim", "bits"), sorted(RHO), ids=lambda v: str(v))
def test_triplet_norm_codebooks(dim, bits):
    centroids = lloyd_max(block_norm_density(dim, 3), 2**bits, 0.0, 1.0)
    assert [round(c, 6) for c in centroids.tolist()] == RHO[dim, bits]


@pytest.mark.parametrize("bits", sorted(RHO_DISTORTION), ids=lambda b: f"b{b}")
def test_triplet_norm_distortion(bits):
    density = block_norm_density(128, 3)
    centroids = lloyd_max(density, 2**bits, 0.0, 1.0)
    found = distortion(density, centroids, 0.0, 1.0) * 128 / 3
    assert found == pytest.approx(RHO_DISTORTION[bits], abs=1e-7)


@pytest.mark.parametrize(("dim", "bits"), COORDINATE)
def test_coordinate_codebooks(dim, bits):
    """Distortions are in ``codecs/test_turboquant.py``."""
    centroids = lloyd_max(block_norm_density(dim, 1), 2**bits, -1.0, 1.0, symmetric=True)
    assert [round(c, 6) for c in centroids[2 ** (bits - 1) :].tolist()] == COORDINATE[dim, bits]


@pytest.mark.parametrize("levels", [2, 16, 64], ids=lambda n: f"L{n}")
def test_fixed_point(levels):
    """One more plain Lloyd round, integrated by another rule, changes nothing."""
    density = block_norm_density(256, 3)
    centroids = lloyd_max(density, levels, 0.0, 1.0)
    edges = torch.cat([torch.zeros(1), midpoints(centroids), torch.ones(1)]).double()
    unit = (torch.arange(20_000).double() + 0.5) / 20_000  # midpoint rule
    x = edges[:-1, None] + edges.diff()[:, None] * unit
    mass = density(x)
    torch.testing.assert_close((x * mass).sum(1) / mass.sum(1), centroids, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 2, 3, 8, 32, 5000], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nearest_level_is_bucketize(levels, dtype):
    generator = torch.Generator().manual_seed(levels)
    centroids = torch.randn(levels, generator=generator, dtype=dtype).sort().values
    cuts = midpoints(centroids)
    x = torch.cat([torch.randn(20_000, generator=generator, dtype=dtype) * 1.5, centroids, torch.tensor([-1e30, 1e30])])
    around = [cuts, torch.nextafter(cuts, cuts + 1), torch.nextafter(cuts, cuts - 1)]
    x = torch.cat([x.to(dtype), *around])
    assert torch.equal(nearest_level(centroids)(x), torch.bucketize(x, cuts))
    assert nearest_level(centroids)(x[:6].reshape(2, 3)).shape == (2, 3)


def test_nonsense_is_refused():
    for levels, low, high in ((0, 0.0, 1.0), (4, 1.0, 1.0), (4, 1.0, 0.0)):
        with pytest.raises(ValueError, match="expected levels >= 1 and low < high"):
            lloyd_max(torch.ones_like, levels, low, high)
    for dim, block in ((4, 3), (8, 0)):
        with pytest.raises(ValueError, match="expected block >= 1"):
            block_norm_density(dim, block)


def test_no_fixed_point_says_so():
    with pytest.raises(ArithmeticError, match="give an interval on which the density is positive"):
        lloyd_max(lambda x: (x > 2.0).double(), 4, 0.0, 1.0)
