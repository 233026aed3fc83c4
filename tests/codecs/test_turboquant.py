"""Facts of TurboQuant-MSE: exact distortions, levels, Table 1 of OCTOPUS."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packedkv.codec import roundtrip
from packedkv.codecs.turboquant import TurboQuant
from packedkv.ops.bitpack import unpack
from packedkv.ops.lloyd_max import block_norm_density, distortion

from .support import by_definition, fitted, key_batches, nearest, normal, rotated_unit, score_errors, unit_keys

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
