"""Facts of PolarQuant: Table 1 of OCTOPUS, lengths kept, laws of the angles, other trees."""

from math import pi, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import roundtrip
from packedkv.codecs.polarquant import PolarQuant, angle_levels, tree
from packedkv.ops.bitpack import unpack

from .support import by_definition, fitted, key_batches, nearest, normal, unit_keys

DIMS = (64, 80, 96, 128, 192, 256)


def angles_of(y):
    """All D - 1 angles by arctangent, level after level, with the laws' (m, n): the definition."""
    spans, radii, first = [1] * y.shape[-1], list(y.double().unbind(-1)), True
    angles, laws = [], []
    while len(radii) > 1:
        pairs = range(0, len(radii) - 1, 2)
        angles += [torch.atan2(radii[j + 1], radii[j]) % (2 * pi if first else 9) for j in pairs]
        laws += [(spans[j], spans[j + 1]) for j in pairs]
        odd = len(radii) % 2
        radii = [torch.hypot(radii[j], radii[j + 1]) for j in pairs] + radii[len(radii) - odd :]
        spans = [spans[j] + spans[j + 1] for j in pairs] + spans[len(spans) - odd :]
        first = False
    return torch.stack(angles, -1), laws


def levels_of(law, bits):
    if law == (1, 1):
        return (torch.arange(2**bits, dtype=torch.float64) + 0.5) * 2 * pi / 2**bits
    return angle_levels(*law, bits)


def mean_cosine(m, n, bits):
    """E cos(psi - psi^) of one angle, by the midpoint rule."""
    if m == n == 1:
        half = pi / 2**bits
        return float(torch.sin(torch.tensor(half)) / half)
    psi = (torch.arange(200_000, dtype=torch.float64) + 0.5) * (pi / 2 / 200_000)
    mass = (2**0.5 * psi.cos()) ** (m - 1) * (2**0.5 * psi.sin()) ** (n - 1)
    levels = angle_levels(m, n, bits)
    nearest = levels[torch.bucketize(psi, (levels[1:] + levels[:-1]) / 2)]
    return float((mass * (psi - nearest).cos()).sum() / mass.sum())


@pytest.mark.parametrize(
    ("bits", "cosine", "mse", "ip", "exact"),
    [(2, 0.8902, 0.21955, 4.207, 0.21960), (3, 0.9715, 0.05706, 2.142, 0.05708), (4, 0.9928, 0.01446, 1.077, 0.01447)],
    ids=["b2", "b3", "b4"],
)
def test_table_1(bits, cosine, mse, ip, exact):
    codec, x, q = PolarQuant(bits, "fp32"), normal(1, 8, 1024, 128), normal(1, 8, 64, 128, seed=2)
    y = roundtrip(codec, x, fitted(codec, heads=8))
    found = float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean())
    assert found == pytest.approx(cosine, abs=5e-4)  # 8192 keys: a standard error of 1.3e-4 at b = 2
    assert float((x - y).pow(2).mean()) == pytest.approx(mse, rel=0.01)
    assert float((q @ (x - y).transpose(2, 3)).abs().mean()) == pytest.approx(ip, rel=0.01)
    closed = prod([mean_cosine(1, 1, bits), *(mean_cosine(m, n, bits) for ((_, m, n),) in tree(128))])
    assert 2 * (1 - closed) == pytest.approx(exact, abs=1e-5)
    assert found == pytest.approx(closed, abs=5e-4)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [2, 4])
def test_lengths_are_kept_and_mse_is_two_minus_two_cosines(dim, bits):
    codec, x = PolarQuant(bits, "fp32"), unit_keys(512, dim)
    y = roundtrip(codec, x, fitted(codec, dim))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    cosine = float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean())
    assert float((x - y).pow(2).mean()) == pytest.approx(2 * (1 - cosine), rel=1e-3)


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_trees_of_other_head_dims_do_as_well(dim):
    """The law of unequal partners: the error is that of D = 128 within 3 percent, not that of a misfit."""
    codec, x = PolarQuant(3), unit_keys(2048, dim)
    assert float((roundtrip(codec, x, fitted(codec, dim)) - x).pow(2).mean()) == pytest.approx(0.0571, rel=0.03)


@given(x=key_batches((64, 80, 96)), bits=st.sampled_from([2, 3, 4, 6]))
@by_definition
def test_codes_are_the_nearest_angles(x, bits):
    """The encoder has no arctangent; the definition has. atan2(0, 0) = 0."""
    codec, dim = PolarQuant(bits), x.shape[-1]
    params = fitted(codec, dim)
    y = codec.to_code(x, params)
    codes = unpack(codec.encode(y, params)["codes"], bits, dim - 1).long()
    psi, laws = angles_of(y)
    for i, law in enumerate(laws):
        expected, clear = nearest(psi[..., i], levels_of(law, bits))
        assert torch.equal(codes[..., i][clear], expected[clear]), f"angle {i} of law {law}"


@pytest.mark.parametrize("dim", [64, 80, 96])
def test_decoded_angles_are_the_levels_of_the_codes(dim):
    codec, y = PolarQuant(3), normal(1, 1, 50, dim)
    params = fitted(codec, dim)
    payload = codec.encode(y, params)
    codes = unpack(payload["codes"], 3, dim - 1).long()
    (again, laws), (psi, _) = angles_of(codec.decode(payload, params)), angles_of(y)
    held = torch.stack([levels_of(law, 3)[codes[..., i]] for i, law in enumerate(laws)], -1)
    torch.testing.assert_close(again, held, rtol=0, atol=2e-6)
    clear = [nearest(psi[..., i], levels_of(law, 3))[1].double().mean() for i, law in enumerate(laws)]
    assert min(clear) > 0.95, "or the test above would compare nothing"


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_angle_levels_follow_sin_2_psi(n):
    """Samples of the angle between norms of n Gaussians: each level is the mean of its cell."""
    a, b = (normal(40_000, n, seed=s).double().norm(dim=1) for s in (1, 2))
    psi, levels = torch.atan2(b, a), angle_levels(n, n, 2)
    cell = torch.bucketize(psi, (levels[1:] + levels[:-1]) / 2)
    means = torch.stack([psi[cell == i].mean() for i in range(4)])
    torch.testing.assert_close(means, levels, rtol=0, atol=0.02 / n**0.5)
    torch.testing.assert_close(levels + levels.flip(0), torch.full((4,), pi / 2, dtype=torch.float64))


def test_ties_take_the_lower_sector_and_level():
    """Axes and diagonals of the plane lie between sectors; equal radii between the two middle levels."""
    codec, params = PolarQuant(3), fitted(PolarQuant(3), 8)
    ends = {(1, 0): 0, (1, 1): 0, (0, 1): 1, (-1, 1): 2, (-1, 0): 3, (-1, -1): 4, (0, -1): 5, (1, -1): 6}
    for (a, b), sector in ends.items():
        y = torch.tensor([a, b] * 4, dtype=torch.float32).view(1, 1, 1, 8)
        codes = unpack(codec.encode(y, params)["codes"], 3, 7).flatten().tolist()
        assert codes == [sector] * 4 + [3] * 3, (a, b)
