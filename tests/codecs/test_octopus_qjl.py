"""Facts of OCTOPUS-QJL: Table 1's score errors, no bias, the residual's energy, its bits, the stage underneath."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packedkv
from packedkv.codec import roundtrip
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.octopus import Octopus, unpack_split
from packedkv.codecs.octopus_qjl import OctopusQJL, octopus_qjl
from packedkv.errors import ShapeError, SpecError
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


def test_a_sum_of_zero_is_positive():
    """Zeros, triplets that all decode to one constant, plain H: what is left projects to one number and zeros."""
    codec = OctopusQJL(3, 1)
    params = fitted(codec, 64) | {"directions": torch.full((1, 64, 3), 0.25), "sketch": torch.ones(1, 1, 64)}
    payload = codec.encode(torch.zeros(1, 1, 1, 64), params)
    assert unpack(payload["signs"], 1, 64).flatten().tolist() == [0] + [1] * 63
    assert not codec.decode(payload, params).any()


def test_signs_of_the_sketch_are_drawn_apart():
    params = fitted(OctopusQJL(), heads=4)
    rows = [tuple(row) for name in ("signs", "sketch") for row in params[name][0].tolist()]
    assert len(set(rows)) == 8
    assert set(params["sketch"].unique().tolist()) == {-1.0, 1.0}


def test_half_of_the_signs_are_positive():
    """No sign is wasted: each is a fair bit, and neighbours agree half of the time."""
    codec = OctopusQJL(3, 1)
    params = fitted(codec, heads=4)
    payload = codec.encode(codec.to_code(normal(1, 4, 1024, 128), params), params)
    plus = unpack(payload["signs"], 1, 128).double()
    torch.testing.assert_close(plus.mean((0, 1, 2)), torch.full((128,), 0.5, dtype=torch.float64), rtol=0, atol=0.04)
    assert float((plus[..., 1:] == plus[..., :-1]).double().mean()) == pytest.approx(0.5, abs=0.005)


def test_a_key_alone_gives_the_bytes_it_gives_in_a_batch():
    """Longer than one piece of the sketch, and of the triplets."""
    codec, x = OctopusQJL(3, 1), normal(2, 2, 600, 128)
    params = fitted(codec, heads=2)
    y = codec.to_code(x, params)
    together = codec.encode(y, params)
    parts = [codec.encode(y[:, :, a:b], params) for a, b in ((0, 1), (1, 300), (300, 599), (599, 600))]
    for name, field in together.items():
        assert torch.equal(torch.cat([part[name] for part in parts], 2), field), name


@pytest.mark.parametrize(
    ("spec", "dim", "nbytes", "bits"),
    [
        ("octopus-qjl-1", 128, 37, 2.3125),
        ("octopus-qjl-2", 128, 58, 3.625),
        ("octopus-qjl-3", 128, 74, 4.625),
        ("octopus-qjl-4", 128, 90, 5.625),
        ("octopus-qjl-2:norm=fp32", 128, 60, 3.75),
        ("octopus-qjl-4:norm=fp32", 128, 92, 5.75),
        ("octopus-qjl-2:split=plus", 128, 63, 3.9375),
        ("octopus-qjl-4:split=plus", 128, 96, 6.0),
        ("octopus-qjl-2", 64, 32, 4.0),
        ("octopus-qjl-2", 80, 38, 3.8),
    ],
)
def test_bytes_of_a_key(spec, dim, nbytes, bits):
    codec = packedkv.get(spec).key
    assert (codec.layout(dim).block_bytes, codec.layout(dim).effective_bits) == (nbytes, bits)
    payload = codec.encode(normal(1, 1, 3, dim), fitted(codec, dim))
    assert sum(field.nbytes for field in payload.values()) == 3 * nbytes


def test_at_equal_bits_plain_octopus_has_the_smaller_error():
    sketched, plain = OctopusQJL(3, 1), Octopus(4, 2)
    assert plain.layout(128).effective_bits < sketched.layout(128).effective_bits
    assert score_errors(plain, 32)[0] < 0.75 * score_errors(sketched, 32)[0]


def test_recipe_is_octopus_with_other_keys():
    for bits in (1, 2, 3, 4):
        ours, plain = packedkv.get(f"octopus-qjl-{bits}"), packedkv.get(f"octopus-{bits}")
        assert isinstance(ours.key, OctopusQJL)
        assert vars(ours.key) == vars(plain.key)
        for name in ("value", "sink", "window", "dense_key_layers", "dense_value_layers"):
            assert getattr(ours, name) == getattr(plain, name), name
    changed = packedkv.get("octopus-qjl-3:rounding=full,split=plus,window=0,group=16,dense_keys=2,norm=fp32")
    assert changed.key == OctopusQJL(4, 3, "full", "fp32")
    assert (changed.value, changed.window, changed.dense_key_layers) == (GroupInt(3, 16, "channels"), 0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5 is not allowed; use 1, 2, 3 or 4"),
        ({"split": "even"}, "split='even' is not allowed; use paper"),
        ({"rounding": "3x3"}, "rounding='3x3' is not allowed; use scalar, local_2x2, local_3x3 or full"),
        ({"norm": "bf16"}, "norm='bf16' is not allowed; use fp16 or fp32"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(SpecError, match=message):
        octopus_qjl(**options)


@pytest.mark.parametrize(
    ("dim", "message"), [(100, "head_dim=100 is not a multiple of 8"), (184, "head_dim=184 has no Hadamard matrix")]
)
def test_head_dims_that_are_refused(dim, message):
    with pytest.raises(ShapeError, match=message):
        OctopusQJL().layout(dim)
