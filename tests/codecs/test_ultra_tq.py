"""Facts of Ultra-TQ (TQ4/4): the production table, distortion on the sphere, calibration, norms, bytes."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import packedkv
from packedkv.codec import Sample, Site
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.ops.bitpack import unpack
from packedkv.ops.lloyd_max import block_norm_density, distortion, normal_levels, sample_levels, unit_levels

from . import support
from .support import error
from .support import tokens as normal


def unit(n, dim, seed=0):
    x = normal(n, dim, seed=seed)
    return x / x.norm(dim=-1, keepdim=True)


def fitted(codec, dim=64, sample=None):
    return support.fitted(codec, dim, sample=sample)


# -- tables --------------------------------------------------------------------------------------------------------


def test_levels_at_d_64():
    positive = [0.016049, 0.048506, 0.082095, 0.117793, 0.157029, 0.202256, 0.258627, 0.341574]
    levels = fitted(UltraTQ())["levels"]
    assert levels.shape == (1, 16)
    assert torch.equal(levels, -levels.flip(1))
    torch.testing.assert_close(levels[0, 8:] / 8, torch.tensor(positive), rtol=0, atol=6e-7)
    sphere = fitted(UltraTQ(table="sphere"))["levels"]
    torch.testing.assert_close(sphere / 8, unit_levels(64, 16)[None].float())


def test_the_production_table_is_the_gaussian_one():
    """The paper names the law of a unit vector's coordinate, and prints 0.342."""
    assert round(float(normal_levels(16)[-1]) / 8, 3) == 0.342
    assert round(float(unit_levels(64, 16)[-1]), 3) == 0.331
    assert packedkv.get("ultra-tq").key.table == "gaussian"


def test_what_the_gaussian_table_loses_on_the_sphere():
    """1.427e-4 against 1.433e-4 per coordinate at d = 64."""
    density = block_norm_density(64, 1)
    found = [distortion(density, levels / 8, -1.0, 1.0) for levels in (8 * unit_levels(64, 16), normal_levels(16))]
    assert found == pytest.approx([1.427e-4, 1.433e-4], abs=5e-8)
    x = unit(8192, 64)
    assert error(UltraTQ(table="sphere"), x) < error(UltraTQ(), x) < 1.01 * error(UltraTQ(table="sphere"), x)


# -- calibration ---------------------------------------------------------------------------------------------------


def test_calibration_finds_the_law_that_keys_have():
    x = unit(8192, 64)
    levels = fitted(UltraTQ(table="calibrated"), sample=x)["levels"]
    assert torch.equal(levels, -levels.flip(1))
    torch.testing.assert_close(levels[0].double(), unit_levels(64, 16) * 8, rtol=0, atol=0.03)
    assert error(UltraTQ(table="calibrated"), x, x) == pytest.approx(error(UltraTQ(table="sphere"), x), rel=2e-3)


def test_calibration_gains_where_keys_have_lighter_tails():
    """Rotated coordinates drawn uniformly: the table shrinks and beats both theoretical ones."""
    codec = UltraTQ(table="calibrated")
    rotated = torch.rand(1, 1, 4096, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x = codec.from_code(rotated, {})
    fit_on, test_on = x[:, :, ::2], x[:, :, 1::2]
    assert fitted(codec, sample=fit_on)["levels"].max() < 0.75 * normal_levels(16)[-1]
    assert error(codec, test_on, fit_on) < 0.6 * min(error(UltraTQ(), test_on), error(UltraTQ(table="sphere"), test_on))


def test_a_fit_satisfies_lloyds_two_conditions():
    x = normal(1024, 64, seed=5).flatten().double()
    levels = sample_levels(x, normal_levels(16))
    mirrored = torch.cat([x, -x])
    nearest = (mirrored[:, None] - levels).abs().argmin(1)
    means = torch.stack([mirrored[nearest == j].mean() for j in range(16)])
    torch.testing.assert_close(means, levels, rtol=0, atol=1e-3)
    before, after = ((mirrored[:, None] - c).abs().amin(1).square().mean() for c in (normal_levels(16), levels))
    assert after < before


def test_calibration_on_keys_of_zeros():
    zeros = fitted(UltraTQ(table="calibrated"), sample=torch.zeros(1, 1, 8, 64))["levels"]
    assert torch.equal(zeros, fitted(UltraTQ())["levels"])


def test_calibration_ignores_zero_keys_and_magnitudes():
    codec, x = UltraTQ(table="calibrated"), normal(256)
    padded = torch.cat([x * 2.0**6, torch.zeros_like(x)], 2)
    assert torch.equal(fitted(codec, sample=padded)["levels"], fitted(codec, sample=x)["levels"])


def test_a_cache_calibrates_on_its_prefill():
    scheme = packedkv.get("ultra-tq:table=calibrated")
    k, v = normal(96, heads=2), normal(96, heads=2, seed=1)
    packed = packedkv.compress(scheme, k, v)
    assert packed.key.params["levels"].shape == (1, 16)
    assert not torch.equal(packed.key.params["levels"][0].double(), normal_levels(16))
    assert torch.equal(
        packed.key.params["levels"], packed.key.codec.fit(Site(0, "key", 2, 64), Sample(k.half()))["levels"]
    )


# -- which layers keep their own levels ------------------------------------------------------------------------------


def calibrated(codec, tails):
    """Constants of layers whose rotated keys are normal times a factor of spread ``t``: heavier tails for larger t."""
    fitted = []
    for layer, t in enumerate(tails):
        rotated = normal(512, seed=layer) * (normal(512, seed=100 + layer) * t).exp()
        x = codec.from_code(rotated, {})
        fitted.append(codec.fit(Site(layer, "key", 1, 64), Sample(x, x)))
    return fitted


def test_the_error_that_decides_is_that_of_the_gaussian_table():
    codec, x = UltraTQ(table="calibrated"), unit(512, 64)
    params = codec.fit(Site(0, "key", 1, 64), Sample(x, x))
    assert params.keys() == {"levels", "error"}
    assert params["error"].shape == (1, 1)
    # every unit vector counts alike, so the mean over coordinates is the relative error
    assert float(params["error"]) == pytest.approx(error(UltraTQ(), x), rel=1e-3)
    assert torch.equal(params["levels"], fitted(codec, sample=x)["levels"])
    empty = codec.fit(Site(0, "key", 1, 64), Sample(torch.zeros(1, 1, 8, 64), x))
    assert float(empty["error"]) == 0


@pytest.mark.parametrize(
    ("refit", "kept"), [(0.0, []), (0.1, [3]), (0.2, [3]), (0.21, [1, 3]), (0.5, [1, 3, 4]), (1.0, [0, 1, 2, 3, 4])]
)
def test_the_worst_layers_keep_their_own_levels(refit, kept):
    """ceil(refit n) of them, and only one table is held per layer."""
    codec = UltraTQ(table="calibrated", refit=refit)
    before = calibrated(codec, [0.0, 0.6, 0.1, 0.9, 0.3])
    after = codec.settle(before)
    gaussian = fitted(UltraTQ())["levels"]
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new.keys() == {"levels"}
        assert not torch.equal(old["levels"], gaussian)
        assert torch.equal(new["levels"], old["levels"] if layer in kept else gaussian)


def test_seven_percent_of_a_hundred_layers_is_seven_and_ties_go_to_the_first():
    codec = UltraTQ(table="calibrated", refit=0.07)
    levels = fitted(UltraTQ())["levels"] * 2
    settled = codec.settle([{"levels": levels, "error": torch.ones(1, 1)}] * 100)
    assert [torch.equal(p["levels"], levels) for p in settled] == [True] * 7 + [False] * 93


# -- codes and norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["token", "block"])
@pytest.mark.parametrize("dim", [64, 80, 128, 192])
@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(seed=st.integers(0, 2**16), power=st.integers(-10, 10), uneven=st.booleans(), table=st.booleans())
def test_codes_are_the_nearest_of_all_levels(norm, dim, seed, power, uneven, table):
    codec, x = UltraTQ(norm), normal(32, dim, seed=seed) * 2.0**power
    if uneven:
        x[..., 3::7] *= 50
        x[:, :, ::5] = 0
    params = {"levels": torch.linspace(-3, 3, 16)[None]} if table else fitted(codec, dim)
    y = codec.to_code(x, params)
    payload = codec.encode(y, params)
    codes = unpack(payload["codes"], 4, dim).long()
    size = dim if norm == "token" else 32
    for first in range(0, dim, size):
        part = y[..., first : first + size].double()
        held = payload["norm"][..., first // size, None].double()
        if norm == "block":  # held over 2^r
            held = held * (2 if dim in (64, 128, 192) else 1)
        torch.testing.assert_close(held, part.square().mean(-1, keepdim=True).sqrt(), rtol=6e-4, atol=2.0**-23)
        u = torch.where(held > 0, part / held, 0.0)
        distance = (u[..., None] - params["levels"][0].double()).abs()
        nearest = distance.sort(dim=-1, stable=True)
        clear = nearest.values[..., 1] - nearest.values[..., 0] > 1e-6
        assert torch.equal(codes[..., first : first + size][clear], nearest.indices[..., 0][clear])
        assert bool(
            (distance.gather(-1, codes[..., first : first + size, None])[..., 0] < nearest.values[..., 0] + 1e-6).all()
        )


@pytest.mark.parametrize(("dim", "token", "block"), [(64, 0.450, 0.283), (128, 0.592, 0.283)], ids=str)
def test_a_key_of_equal_channels_is_the_worst_case(dim, token, block):
    """Pitfall 1: no signs, so it rotates into one spike."""
    x = torch.ones(1, 1, 1, dim)
    assert (error(UltraTQ("token"), x), error(UltraTQ("block"), x)) == pytest.approx((token, block), abs=2e-3)


@lru_cache
def loud_keys():
    x = normal(2048, 128)
    x[..., [3, 20, 41, 64, 90, 111]] *= 8
    return x


def test_rotation_is_what_makes_a_table_work():
    """Even a table fitted to plain keys leaves about 2.3x the rotated error (paper, Sec. 4.1)."""
    x = loud_keys()
    rotated = error(UltraTQ(table="calibrated"), x, x)
    u = x / x.square().mean(-1, keepdim=True).sqrt()
    levels = sample_levels(u.flatten().double(), normal_levels(16)).float()
    nearest = levels[(u[..., None] - levels).abs().argmin(-1)]
    plain = float((nearest - u).square().sum() / u.square().sum())
    assert 2 < plain / rotated < 3


def test_block_norms_are_better_and_cost_more():
    """Table 3: per-block adaptation is the load-bearing change."""
    x = unit(4096, 128)
    assert error(UltraTQ("block"), x) == pytest.approx(0.96 * error(UltraTQ("token"), x), rel=0.01)
    assert error(UltraTQ("block"), loud_keys()) < error(UltraTQ("token"), loud_keys())
    assert UltraTQ("block").layout(128).effective_bits == UltraTQ().layout(128).effective_bits + 16 * 3 / 128
