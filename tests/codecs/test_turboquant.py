"""Facts of TurboQuant: exact distortions, Table 1 of OCTOPUS, unbiased QJL scores, and what the printed QJL did."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import Site, roundtrip
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.ops.bitpack import unpack
from packedkv.ops.lloyd_max import block_norm_density, distortion
from tests.codecs.draws import fitted, loud_channel_cost, normal, score_errors, unit_keys

from .definitions import MARGIN, by_definition, key_batches, nearest, rotated_unit, sylvester

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
    ("dim", "levels"),
    [
        (128, [0.011302, 0.034152, 0.057772, 0.082828, 0.110288, 0.141805, 0.180836, 0.237664]),
        (64, [0.015919, 0.048090, 0.081312, 0.116487, 0.154926, 0.198856, 0.252914, 0.330796]),
    ],
)
def test_levels_are_those_of_the_sphere(dim, levels):
    found = fitted(TurboQuant(4), dim)["levels"]
    torch.testing.assert_close(found[0, 8:], torch.tensor(levels), rtol=0, atol=6e-7)
    assert torch.equal(found, -found.flip(1))


@pytest.mark.parametrize(
    ("bits", "cosine", "mse", "ip"),
    [(2, 0.9406, 0.11590, 3.057), (3, 0.9831, 0.03391, 1.652), (4, 0.9954, 0.00930, 0.862)],
)
def test_table_1_mse(bits, cosine, mse, ip):
    codec, x = TurboQuant(bits, "fp32"), normal(1, 4, 2048, 128)
    y = roundtrip(codec, x, fitted(codec, heads=4))
    assert float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean()) == pytest.approx(cosine, abs=2e-4)
    assert float((x - y).pow(2).mean()) == pytest.approx(mse, rel=0.01)
    assert score_errors(codec, 16)[0] == pytest.approx(ip, rel=0.01)


@pytest.mark.parametrize(("bits", "ip"), [(2, 4.056), (3, 2.293), (4, 1.235)])
def test_score_error_of_a_correct_qjl(bits, ip):
    assert score_errors(TurboQuantQJL(bits), 16)[0] == pytest.approx(ip, rel=0.01)


@pytest.mark.parametrize(("bits", "ip"), [(2, 5.436), (3, 3.075), (4, 1.663)])
def test_the_printed_qjl_carries_nothing_of_the_residual(bits, ip):
    printed = score_errors(TurboQuantQJL(bits, variant="printed"), 16)[0]
    assert printed == pytest.approx(ip, rel=0.01)
    assert printed == pytest.approx(1.006 * score_errors(TurboQuant(bits - 1), 16)[0], rel=0.005)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_qjl_scores_are_unbiased_and_mse_scores_are_not(bits):
    assert abs(score_errors(TurboQuantQJL(bits), 16)[1]) < 0.003
    short = score_errors(TurboQuant(bits), 16)[1]
    assert short == pytest.approx(-EXACT[128][bits], rel=0.03)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_qjl_lowers_the_energy_of_its_stage_by_pi_over_2_minus_1(bits):
    x = unit_keys(2048, heads=4)
    stage, whole = TurboQuant(bits - 1, "fp32"), TurboQuantQJL(bits, "fp32")
    before, after = (float((roundtrip(codec, x, fitted(codec, heads=4)) - x).pow(2).mean()) for codec in (stage, whole))
    assert after / before == pytest.approx(0.753**2, rel=0.01)


def test_both_variants_write_the_same_bytes():
    x = normal(1, 2, 8, 128)
    correct, printed = TurboQuantQJL(3), TurboQuantQJL(3, variant="printed")
    a, b = (codec.encode(x, fitted(codec, heads=2)) for codec in (correct, printed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@given(x=key_batches(), bits=st.integers(1, 6))
@by_definition
def test_codes_are_the_nearest_levels(x, bits):
    """From the definition, by brute force over levels."""
    codec, dim = TurboQuant(bits), x.shape[-1]
    params = fitted(codec, dim)
    payload = codec.encode(codec.to_code(x, params), params)
    u = rotated_unit(x, params["signs"].unsqueeze(2))
    codes, clear = nearest(u, params["levels"][0].double())
    assert torch.equal(unpack(payload["codes"], bits, dim).long()[clear], codes[clear])
    norms = x.double().norm(dim=-1, keepdim=True) / dim**0.5
    torch.testing.assert_close(payload["norm"].double(), norms, rtol=2**-10, atol=2**-24)


@given(x=key_batches((64, 128)), bits=st.sampled_from([2, 3, 4]))
@by_definition
def test_qjl_signs_are_those_of_the_sketch_of_the_residual(x, bits):
    """From the definition: the residual of the codes that are held, through R' = H diag(s') as a matrix."""
    codec, dim = TurboQuantQJL(bits), x.shape[-1]
    params = fitted(codec, dim)
    payload = codec.encode(codec.to_code(x, params), params)
    codes = unpack(payload["codes"], bits - 1, dim).long()
    u, levels = rotated_unit(x, params["signs"].unsqueeze(2)), params["levels"][0].double()
    nearest_codes, sure = nearest(u, levels)
    assert torch.equal(codes[sure], nearest_codes[sure])
    r = u - levels[codes]
    projected = (r * params["sketch"].double().unsqueeze(2)) @ sylvester(dim) / dim**0.5
    clear = projected.abs() > MARGIN
    assert torch.equal((unpack(payload["signs"], 1, dim) == 1)[clear], (projected > 0)[clear])
    torch.testing.assert_close(payload["residual"].double(), r.norm(dim=-1, keepdim=True), rtol=2**-10, atol=MARGIN)


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_qjl_is_unbiased_where_the_rotation_is_in_blocks(dim):
    """A channel 30 times as loud as the others: in a sketch of the same blocks, scores at D = 80 were short by .24."""
    codec = TurboQuantQJL(2, "fp32")
    k = normal(1, 1, 32, dim)
    k[..., 3] *= 30
    mean = sum(roundtrip(codec, k, codec.fit(Site(0, "key", 1, dim, seed))) for seed in range(64)) / 64
    assert abs(float(((mean - k) * k).sum() / k.square().sum())) < 0.02


def test_ties_take_the_lower_level_and_the_positive_sign():
    """Zero lies between the two inner levels; under plain H, the constant residual of zeros projects to zeros."""
    codec, x = TurboQuantQJL(3), torch.zeros(1, 1, 2, 64)
    x[0, 0, 0, 9] = 1
    params = fitted(codec, 64) | {"sketch": torch.ones(1, 1, 64)}
    payload = codec.encode(x, params)
    assert payload["signs"][0, 0, 1].tolist() == [255] * 8
    codes = unpack(payload["codes"], 2, 64)[0, 0]
    assert codes[0].tolist() == [1] * 9 + [3] + [1] * 54
    assert codes[1].tolist() == [1] * 64
    assert not codec.decode(payload, params)[0, 0, 1].any()


def test_a_loud_channel_costs_nothing():
    assert loud_channel_cost(TurboQuant(4), normal(1, 1, 1024, 128)) < 1.3
