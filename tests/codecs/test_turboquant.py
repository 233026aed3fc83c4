"""Facts of TurboQuant, and of both codecs with a sketch: exact distortions, Table 1 of OCTOPUS, no bias, signs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import roundtrip
from packedkv.codecs.octopus import Octopus, OctopusQJL, unpack_split
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.ops.bitpack import unpack
from packedkv.ops.lloyd_max import block_norm_density, distortion

from .support import (
    MARGIN,
    by_definition,
    fitted,
    key_batches,
    nearest,
    normal,
    rotated_unit,
    score_errors,
    sylvester,
    unit_keys,
)

EXACT = {
    64: {1: 0.358387, 2: 0.114526, 3: 0.033391, 4: 0.009132},
    128: {1: 0.360889, 2: 0.116000, 3: 0.033966, 4: 0.009315},
    256: {1: 0.362136, 2: 0.116740, 3: 0.034256, 4: 0.009408},
}


@pytest.mark.parametrize(("dim", "bits"), [(dim, bits) for dim in EXACT for bits in EXACT[dim]])
def test_distortion_is_the_exact_one(dim, bits):
    """Section 2 of the table: by quadrature from the codebook, and on keys."""
    codec = TurboQuant(bits, "fp32")
    params = fitted(codec, dim)
    by_law = dim * distortion(block_norm_density(dim, 1), params["levels"][0].double(), -1.0, 1.0)
    assert by_law == pytest.approx(EXACT[dim][bits], abs=1.1e-6)
    x = unit_keys(2048, dim)
    assert float((roundtrip(codec, x, params) - x).pow(2).mean()) == pytest.approx(EXACT[dim][bits], rel=0.01)


@pytest.mark.parametrize(
    ("bits", "cosine", "mse", "ip"),
    [(2, 0.9406, 0.11590, 3.057), (3, 0.9831, 0.03391, 1.652), (4, 0.9954, 0.00930, 0.862)],
)
def test_table_1_mse(bits, cosine, mse, ip):
    codec, x = TurboQuant(bits, "fp32"), normal(1, 4, 2048, 128)
    y = roundtrip(codec, x, fitted(codec, heads=4))
    assert float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean()) == pytest.approx(cosine, abs=2e-4)
    assert float((x - y).pow(2).mean()) == pytest.approx(mse, rel=0.01)
    assert score_errors(codec, 32)[0] == pytest.approx(ip, rel=0.01)


@given(x=key_batches(), bits=st.integers(1, 6))
@by_definition
def test_codes_are_the_nearest_levels(x, bits):
    codec, dim = TurboQuant(bits), x.shape[-1]
    params = fitted(codec, dim)
    payload = codec.encode(codec.to_code(x, params), params)
    u = rotated_unit(x, params["signs"].unsqueeze(2))
    codes, clear = nearest(u, params["levels"][0].double())
    assert torch.equal(unpack(payload["codes"], bits, dim).long()[clear], codes[clear])
    norms = x.double().norm(dim=-1, keepdim=True) / dim**0.5
    torch.testing.assert_close(payload["norm"].double(), norms, rtol=2**-10, atol=2**-24)


# -- sketches: TurboQuant-QJL and OCTOPUS-QJL --------------------------------------------------------------------------


SPLIT = {2: (3, 1), 3: (4, 2), 4: (5, 3)}


def octopus(bits, rounding="scalar"):
    """OCTOPUS-QJL and its stage."""
    return OctopusQJL(*SPLIT[bits], rounding, "fp32"), Octopus(*SPLIT[bits], rounding, "fp32")


def turboquant(bits):
    """TurboQuant-QJL and its stage."""
    return TurboQuantQJL(bits, "fp32"), TurboQuant(bits - 1, "fp32")


both = pytest.mark.parametrize("make", [octopus, turboquant])
every_bits = pytest.mark.parametrize("bits", [2, 3, 4])


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        *[(octopus(2)[0], 2.017), (octopus(3)[0], 1.082), (octopus(4)[0], 0.566)],  # printed: 2.015, 1.084, .565
        *[
            (octopus(2, "local_3x3")[0], 1.943),
            (octopus(3, "local_3x3")[0], 1.047),
            (octopus(4, "local_3x3")[0], 0.548),
        ],
        *[(TurboQuantQJL(2), 4.056), (TurboQuantQJL(3), 2.293), (TurboQuantQJL(4), 1.235)],
        *[(TurboQuantQJL(bits, variant="printed"), error) for bits, error in ((2, 5.436), (3, 3.075), (4, 1.663))],
    ],
    ids=str,
)
def test_score_errors_of_table_1(codec, error):
    assert score_errors(codec, 32)[0] == pytest.approx(error, rel=0.01)


@every_bits
def test_the_printed_qjl_carries_nothing_of_the_residual(bits):
    printed, stage = TurboQuantQJL(bits, variant="printed"), TurboQuant(bits - 1)
    assert score_errors(printed, 32)[0] == pytest.approx(1.006 * score_errors(stage, 32)[0], rel=0.005)


@pytest.mark.parametrize(
    ("whole", "plain", "short"),
    [
        *[(*octopus(bits), short) for bits, short in ((2, -0.0685), (3, -0.0203), (4, -0.0057))],
        *[(TurboQuantQJL(b), TurboQuant(b), short) for b, short in ((2, -0.116000), (3, -0.033966), (4, -0.009315))],
    ],
    ids=str,
)
def test_scores_are_not_short_and_those_without_a_sketch_are(whole, plain, short):
    assert abs(score_errors(whole, 32)[1]) < 0.003
    assert score_errors(plain, 32)[1] == pytest.approx(
        short, rel=0.03, abs=4e-4 if isinstance(whole, OctopusQJL) else 0
    )


@both
@pytest.mark.parametrize("dim", [80, 96, 128, 192])
@pytest.mark.parametrize("loud", [1, 30], ids=["even", "loud-channel"])
def test_the_mean_of_keys_over_seeds_is_the_key(make, dim, loud):
    """Where the rotation is in blocks too: in a sketch of the same blocks, scores at D = 80 were short by .24."""
    codec, k = make(2)[0], normal(1, 1, 64, dim)
    k[..., 3] *= loud
    mean = sum(roundtrip(codec, k, fitted(codec, dim, seed=seed)) for seed in range(32)) / 32
    assert abs(float(((mean - k) * k).sum() / k.square().sum())) < (0.01 if make is octopus else 0.02)


@both
@every_bits
def test_the_error_has_57_percent_of_the_energy_of_its_stage(make, bits):
    x = normal(1, 8, 1024, 128)
    after, before = (float((roundtrip(codec, x, fitted(codec, heads=8)) - x).pow(2).mean()) for codec in make(bits))
    assert after / before == pytest.approx(0.753**2, rel=0.01)


@pytest.mark.parametrize("pair", [octopus(3), octopus(3, "local_3x3"), turboquant(3)], ids=str)
def test_the_stage_is_the_codec_without_a_sketch(pair):
    """So the cosine and MSE columns of Table 1 are those of OCTOPUS, whose tests have them."""
    (codec, stage), x = pair, normal(1, 2, 40, 128)
    params = fitted(codec, heads=2)
    for name, constant in fitted(stage, heads=2).items():
        assert torch.equal(params[name], constant)
    y = codec.to_code(x, params)
    ours, plain = codec.encode(y, params), stage.encode(y, params)
    assert list(ours) == [*plain, "signs", "residual"]
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    silent = {**ours, "residual": torch.zeros_like(ours["residual"])}
    assert torch.equal(codec.decode(silent, params), stage.decode(plain, params))


def held_by(codec, payload, params, dim):
    """u^ of the codes that are held, from the definition: rho n, or levels."""
    if isinstance(codec, TurboQuantQJL):
        return params["levels"][0].double()[unpack(payload["codes"], codec.bits - 1, dim).long()]
    codes = unpack_split(payload, codec.code_bits, -(-dim // 3), codec.low_bits).long()
    n, rho = params["directions"][0][codes >> codec.norm_bits], params["rho"][0][codes & 2**codec.norm_bits - 1]
    return (n * rho[..., None]).flatten(-2)[..., :dim].double()


@pytest.mark.parametrize(
    "codec",
    [*(OctopusQJL(*split) for split in ((1, 1), (3, 1), (4, 2), (5, 4))), *map(TurboQuantQJL, (2, 3, 4))],
    ids=str,
)
@given(x=key_batches((64, 128)))
@by_definition
def test_signs_are_those_of_the_sketch_of_what_is_left(codec, x):
    """From the definition: r = u - u^ of the codes that are held, through R' = H diag(s') as a matrix."""
    dim = x.shape[-1]
    params = fitted(codec, dim)
    payload = codec.encode(codec.to_code(x, params), params)
    r = rotated_unit(x, params["signs"].unsqueeze(2)) - held_by(codec, payload, params, dim)
    projected = (r * params["sketch"].double().unsqueeze(2)) @ sylvester(dim) / dim**0.5
    clear = projected.abs() > MARGIN
    assert clear.double().mean() > 0.8
    assert torch.equal((unpack(payload["signs"], 1, dim) == 1)[clear], (projected > 0)[clear])
    torch.testing.assert_close(payload["residual"].double(), r.norm(dim=-1, keepdim=True), rtol=2**-10, atol=MARGIN)


@both
def test_a_key_alone_gives_the_bytes_it_gives_in_a_batch(make):
    """Longer than one piece of the sketch, and of the triplets."""
    codec, x = make(2)[0], normal(2, 2, 600, 128)
    params = fitted(codec, heads=2)
    y = codec.to_code(x, params)
    together = codec.encode(y, params)
    parts = [codec.encode(y[:, :, a:b], params) for a, b in ((0, 1), (1, 300), (300, 599), (599, 600))]
    for name, field in together.items():
        assert torch.equal(torch.cat([part[name] for part in parts], 2), field), name


def test_both_variants_write_the_same_bytes():
    x = normal(1, 2, 8, 128)
    a, b = (
        codec.encode(x, fitted(codec, heads=2)) for codec in (TurboQuantQJL(3), TurboQuantQJL(3, variant="printed"))
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_at_equal_bits_plain_octopus_has_the_smaller_error():
    sketched, plain = OctopusQJL(3, 1), Octopus(4, 2)
    assert plain.layout(128).effective_bits < sketched.layout(128).effective_bits
    assert score_errors(plain, 32)[0] < 0.75 * score_errors(sketched, 32)[0]
