"""Facts of OCTOPUS-QJL: Table 1's score errors, no bias, the residual's energy, its bits, the stage underneath."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import roundtrip
from packedkv.codecs.octopus import Octopus, unpack_split
from packedkv.codecs.octopus_qjl import OctopusQJL
from packedkv.ops.bitpack import unpack
from tests.codecs.draws import fitted, normal, score_errors

from .definitions import MARGIN, by_definition, key_batches, rotated_unit, sylvester

SPLIT = {2: (3, 1), 3: (4, 2), 4: (5, 3)}


@pytest.mark.parametrize(
    ("rounding", "bits", "error"),
    [
        ("scalar", 2, 2.017),
        ("scalar", 3, 1.082),
        ("scalar", 4, 0.566),
        ("local_3x3", 2, 1.943),
        ("local_3x3", 3, 1.047),
        ("local_3x3", 4, 0.548),
    ],
)
def test_score_errors_of_table_1(rounding, bits, error):
    """Printed, for scalar: 2.015, 1.084, .565."""
    assert score_errors(OctopusQJL(*SPLIT[bits], rounding, "fp32"), 32)[0] == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize(("bits", "short"), [(2, -0.0685), (3, -0.0203), (4, -0.0057)])
def test_scores_are_not_short_and_those_of_the_stage_are(bits, short):
    assert abs(score_errors(OctopusQJL(*SPLIT[bits], "scalar", "fp32"), 32)[1]) < 0.003
    assert score_errors(Octopus(*SPLIT[bits], "scalar", "fp32"), 32)[1] == pytest.approx(short, rel=0.03, abs=4e-4)


@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("loud", [1, 30], ids=["even", "loud-channel"])
def test_the_mean_of_keys_over_seeds_is_the_key(dim, loud):
    codec, k = OctopusQJL(3, 1, "scalar", "fp32"), normal(1, 1, 64, dim)
    k[..., 3] *= loud
    mean = sum(roundtrip(codec, k, fitted(codec, dim, seed=seed)) for seed in range(32)) / 32
    assert abs(float(((mean - k) * k).sum() / k.square().sum())) < 0.01


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_has_57_percent_of_the_energy_of_its_stage(bits):
    x = normal(1, 8, 1024, 128)
    stage, whole = Octopus(*SPLIT[bits], "scalar", "fp32"), OctopusQJL(*SPLIT[bits], "scalar", "fp32")
    before, after = (float((roundtrip(codec, x, fitted(codec, heads=8)) - x).pow(2).mean()) for codec in (stage, whole))
    assert after / before == pytest.approx(0.753**2, rel=0.01)


@pytest.mark.parametrize("rounding", ["scalar", "local_3x3"])
def test_the_stage_is_octopus(rounding):
    """So the cosine and MSE columns of Table 1 are those of OCTOPUS, whose tests have them."""
    codec, stage, x = OctopusQJL(4, 2, rounding), Octopus(4, 2, rounding), normal(1, 2, 40, 128)
    params = fitted(codec, heads=2)
    for name, constant in fitted(stage, heads=2).items():
        assert torch.equal(params[name], constant)
    y = codec.to_code(x, params)
    ours, plain = codec.encode(y, params), stage.encode(y, params)
    assert list(ours) == [*plain, "signs", "residual"]
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    silent = {**ours, "residual": torch.zeros_like(ours["residual"])}
    assert torch.equal(codec.decode(silent, params), stage.decode(plain, params))


@given(x=key_batches((64, 128)), split=st.sampled_from([(1, 1), (3, 1), (4, 2), (5, 4)]))
@by_definition
def test_signs_are_those_of_the_sketch_of_what_is_left(x, split):
    """From the definition: r = u - rho n of the codes that are held, through R' = H diag(s') as a matrix."""
    codec, dim = OctopusQJL(*split), x.shape[-1]
    params = fitted(codec, dim)
    payload = codec.encode(codec.to_code(x, params), params)
    codes = unpack_split(payload, codec.code_bits, -(-dim // 3), codec.low_bits).long()
    n, rho = params["directions"][0][codes >> split[1]], params["rho"][0][codes & 2 ** split[1] - 1]
    held = (n * rho[..., None]).flatten(-2)[..., :dim].double()
    r = rotated_unit(x, params["signs"].unsqueeze(2)) - held
    projected = (r * params["sketch"].double().unsqueeze(2)) @ sylvester(dim) / dim**0.5
    clear = projected.abs() > MARGIN
    assert clear.double().mean() > 0.8
    assert torch.equal((unpack(payload["signs"], 1, dim) == 1)[clear], (projected > 0)[clear])
    torch.testing.assert_close(payload["residual"].double(), r.norm(dim=-1, keepdim=True), rtol=2**-10, atol=MARGIN)


def test_score_is_the_papers_sum():
    """Sec. 3.6: the stage's score plus gamma sqrt(pi / 2D) g <R' R q, sigma>, which decoded keys give by themselves."""
    codec, k, q = OctopusQJL(3, 1, norm="fp32"), normal(1, 1, 50, 128), normal(1, 1, 50, 128, seed=9)
    params = fitted(codec)
    payload = codec.encode(codec.to_code(k, params), params)
    turned = codec.query_to_code(q, params)
    sigma = unpack(payload["signs"], 1, 128) * 2.0 - 1
    twice = (turned.double() * params["sketch"].unsqueeze(2)) @ sylvester(128) / 128**0.5
    residual = (torch.pi / 256) ** 0.5 * payload["residual"].double() * (twice * sigma).sum(-1, keepdim=True)
    stage = (turned * codec.look_up(payload, params)).sum(-1, keepdim=True)
    score = payload["norm"] * 128**0.5 * (stage + residual)
    decoded = codec.from_code(codec.decode(payload, params), params)
    torch.testing.assert_close(score.double(), (q * decoded).sum(-1, keepdim=True).double(), rtol=1e-4, atol=1e-4)


def test_at_equal_bits_plain_octopus_has_the_smaller_error():
    sketched, plain = OctopusQJL(3, 1), Octopus(4, 2)
    assert plain.layout(128).effective_bits < sketched.layout(128).effective_bits
    assert score_errors(plain, 32)[0] < 0.75 * score_errors(sketched, 32)[0]


def test_a_key_alone_gives_the_bytes_it_gives_in_a_batch():
    """Longer than one piece of the sketch, and of the triplets."""
    codec, x = OctopusQJL(3, 1), normal(2, 2, 600, 128)
    params = fitted(codec, heads=2)
    y = codec.to_code(x, params)
    together = codec.encode(y, params)
    parts = [codec.encode(y[:, :, a:b], params) for a, b in ((0, 1), (1, 300), (300, 599), (599, 600))]
    for name, field in together.items():
        assert torch.equal(torch.cat([part[name] for part in parts], 2), field), name
