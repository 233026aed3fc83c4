"""Facts of the UltraQuant paper: E2M1 and UE8M0, bytes, distortion over c, saturation, dense layers, FP8 queries."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import roundtrip
from packedkv.codecs.ultraquant import (
    UltraQuant,
    decode_e2m1,
    encode_e2m1,
    nearest_ue8m0,
    ue8m0_reciprocal,
    ue8m0_value,
)
from packedkv.ops.bitpack import unpack

from .support import error
from .support import tokens as normal

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
OCTAVE = [2 ** (i / 8) for i in range(8)]


@lru_cache
def gaussian_error(c, scale="pow2", factor=1.0):
    """Relative MSE of 16384 Gaussian groups of 32, times ``factor``."""
    x = normal(8192) * factor
    return error(UltraQuant(False, c, scale), x)


def any_magnitude(c):
    """Mean over log-uniform magnitudes."""
    return sum(gaussian_error(c, "pow2", f) for f in OCTAVE) / len(OCTAVE)


# -- the formats ---------------------------------------------------------------------------------------------------


def test_every_code_comes_back():
    codes = torch.arange(16)
    values = decode_e2m1(codes)
    assert values[:8].tolist() == GRID.tolist()
    assert torch.equal(values[8:], -values[:8])
    again = encode_e2m1(values)
    again[8] = 8  # minus zero has no sign to compare
    assert again.tolist() == codes.tolist()


def test_ue8m0_is_a_rounded_logarithm():
    y = torch.cat([torch.logspace(-30, 30, 3999, 2.0, dtype=torch.float64), 2.0 ** torch.arange(-100.0, 100).double()])
    assert torch.equal(nearest_ue8m0(y).long() - 127, y.log2().round().long())
    edges = torch.tensor([0.0, 2.0**-127, 2.0**-200, 2.0**127, 2.0**300], dtype=torch.float64)
    assert nearest_ue8m0(edges).tolist() == [0, 0, 0, 254, 254]  # 255 is NaN


def test_ue8m0_values_are_exact():
    byte = torch.arange(255, dtype=torch.uint8)
    expected = 2.0 ** (byte.double() - 127)
    assert torch.equal(ue8m0_value(byte).double(), expected)
    assert torch.equal(ue8m0_reciprocal(byte).double(), 1 / expected)


# -- layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["pow2", "real"])
@pytest.mark.parametrize("dim", [64, 80])
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(
    seed=st.integers(0, 2**16), power=st.integers(-10, 10), coarse=st.booleans(), c=st.sampled_from([0.156, 0.195, 0.5])
)
def test_codes_are_the_nearest_of_all_sixteen(scale, dim, seed, power, coarse, c):
    """From the definition: 16 values tried at the held scale; a tie goes to the even code, and a zero has its sign."""
    x = normal(8, dim, seed=seed)
    x = ((x * 4).round() / 4 if coarse else x) * 2.0**power
    codec = UltraQuant(False, c, scale)
    payload = codec.encode(x, {})
    largest = torch.stack([g.abs().amax(-1) for g in x.split(32, -1)], -1).double()
    if scale == "pow2":
        exponent = (c * largest).log2().round().clamp(-127, 127)
        assert torch.equal(payload["scale"].int(), torch.where(largest > 0, exponent + 127, 0).int())
        held = 2.0 ** (payload["scale"].double() - 127)
    else:
        held = payload["scale"].double()
        torch.testing.assert_close(held, c * largest, rtol=6e-4, atol=2.0**-24)
    u = x.double() / held.repeat_interleave(32, -1)[..., :dim]
    code = torch.arange(16)
    values = torch.cat([GRID, -GRID]).double()
    distance = (u[..., None] - values).abs()
    # first the distance, then the sign (it tells 0 from -0), then evenness
    worse = 1e-9 * ((code >= 8) != (u[..., None] < 0)) + 1e-10 * (code % 2)
    best = (distance + worse).sort(-1)
    sure = torch.ones_like(u, dtype=torch.bool)
    if scale == "real":  # x / S is rounded to float32: near ties aside
        sure = best.values[..., 2] - best.values[..., 0] > 1e-5
    codes = unpack(payload["codes"], 4, dim).long()
    assert torch.equal(codes[sure], best.indices[..., 0][sure])
    assert float(sure.float().mean()) > 0.5


# -- rotation and queries ------------------------------------------------------------------------------------------


def test_fp8_queries_are_rotated_then_rounded_and_saturate():
    q = normal(64, 128) * 20
    exact, fp8 = UltraQuant(), UltraQuant(queries="fp8")
    rotated, rounded = exact.query_to_code(q, {}), fp8.query_to_code(q, {})
    assert torch.equal(rotated, exact.to_code(q, {}))
    assert torch.equal(rounded.to(torch.float8_e4m3fn).float(), rounded)
    error = (rounded - rotated).abs()
    assert 0 < float((error / rotated.abs().clamp_min(2.0**-6)).max()) <= 2.0**-4
    huge = torch.zeros(1, 1, 1, 64)
    huge[..., 0] = -65504.0
    assert torch.equal(fp8.query_to_code(huge, {}), torch.full((1, 1, 1, 64), -448.0))
    # keys know nothing of it
    assert torch.equal(fp8.to_code(q, {}), rotated)
    a, b = (codec.encode(rotated, {}) for codec in (exact, fp8))
    assert all(torch.equal(a[name], b[name]) for name in a)


# -- distortion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "real", "pow2", "d64", "d128"),
    [
        (0.140, 0.014207, 0.022115, 0.025403, 0.018889),
        (0.156, 0.010412, 0.016820, 0.017811, 0.015866),
        (1 / 6, 0.010220, 0.014644, 0.014748, 0.014516),
        (0.185, 0.013003, 0.012764, 0.012657, 0.012862),
        (0.195, 0.015801, 0.012517, 0.012458, 0.012573),
        (0.215, 0.013362, 0.012980, 0.012740, 0.013223),
        (0.250, 0.011511, 0.014202, 0.013914, 0.014487),
        (1.0, 0.115617, 0.129914, 0.119171, 0.140642),
    ],
    ids=lambda v: f"{v:.3f}",
)
def test_error_over_c(c, real, pow2, d64, d128):
    """Gaussian groups: real scales; powers of two at any magnitude, and at variance 1/64 and 1/128."""
    assert gaussian_error(c, "real") == pytest.approx(real, rel=0.01)
    assert any_magnitude(c) == pytest.approx(pow2, rel=0.01)
    assert gaussian_error(c, "pow2", 64**-0.5) == pytest.approx(d64, rel=0.015)
    assert gaussian_error(c, "pow2", 128**-0.5) == pytest.approx(d128, rel=0.015)


def test_the_best_c_is_0_195_for_stored_scales_and_0_1625_for_real_ones():
    stored = {c: any_magnitude(c) for c in (0.175, 0.185, 0.195, 0.205, 0.215)}
    assert min(stored, key=stored.get) == 0.195
    real = {c: gaussian_error(c, "real") for c in (0.150, 0.156, 0.1625, 0.169, 0.175)}
    assert min(real, key=real.get) == 0.1625
    assert real[0.1625] == pytest.approx(0.010110, rel=0.01)


@pytest.mark.parametrize(
    ("dim", "deployed", "best"), [(64, 0.0184, 0.0125), (128, 0.0156, 0.0126), (256, 0.0179, 0.0125)], ids=str
)
def test_error_on_the_unit_sphere(dim, deployed, best):
    x = normal(524_288 // dim, dim, seed=3)
    x = x / x.norm(dim=-1, keepdim=True)
    for c, expected in ((0.156, deployed), (0.195, best)):
        error = float((roundtrip(UltraQuant(True, c), x, {}) - x).square().sum(-1).mean())
        assert error == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize(("c", "share"), [(0.156, 0.595), (0.195, 0.273), (1.0, 0.0)], ids=str)
def test_share_of_groups_whose_largest_element_saturates(c, share):
    codec, found = UltraQuant(False, c), []
    for factor in OCTAVE:
        x = normal(4096) * factor
        payload = codec.encode(x, {})
        largest = x.unflatten(-1, (-1, 32)).abs().amax(-1)
        found.append((largest > 6 * ue8m0_value(payload["scale"])).float().mean())
    assert float(torch.stack(found).mean()) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("scale", ["pow2", "real"])
def test_without_shrinkage_three_levels_are_left(scale):
    """At c = 1 nothing is above one step (sqrt 2 steps where the scale was rounded down)."""
    codec = UltraQuant(False, 1.0, scale)
    used = unpack(codec.encode(normal(2048), {})["codes"], 4, 64) & 7
    assert int(used.max()) == (3 if scale == "pow2" else 2)
    assert float((used <= 2).float().mean()) > 0.99


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_real_scales_stay_in_range_where_a_rotation_gathers_everything(dim):
    x = torch.full((1, 1, 1, dim), 65504.0)
    codec = UltraQuant(scale="real", c=1.0)
    payload = codec.encode(codec.to_code(x, {}), {})
    assert float(payload["scale"].max()) <= 65504
    torch.testing.assert_close(codec.from_code(codec.decode(payload, {}), {}), x, rtol=1e-3, atol=0)


# -- recipe --------------------------------------------------------------------------------------------------------


def test_attention_reads_queries_as_the_kernel_multiplies_them():
    """Rotated with a dense matrix, rounded to E4M3, multiplied with the codes; far from exact queries by about 2^-4."""
    k, v, q = normal(50, heads=2), normal(50, heads=2, seed=1), normal(3, heads=4, seed=2)
    outs = {}
    for queries in ("exact", "fp8"):
        cache = packedkv.LayerCache(packedkv.get(f"ultraquant:queries={queries}"))
        cache.append(k, v)
        outs[queries] = cache.attend(q)
    keys, values = cache.decode()
    h = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]) / 8
    rounded = (q @ h).to(torch.float8_e4m3fn).float()
    scores = rounded @ (keys @ h).repeat_interleave(2, 1).mT / 8
    hidden = torch.ones(3, 50).triu(48).bool()
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values.repeat_interleave(2, 1)
    torch.testing.assert_close(outs["fp8"], expected, rtol=1e-4, atol=1e-4)
    difference = float((outs["fp8"] - outs["exact"]).norm() / outs["exact"].norm())
    assert 1e-3 < difference < 2**-4
