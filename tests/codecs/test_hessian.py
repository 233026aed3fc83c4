"""Facts of the Hessian-aware rotation of SAW-INT4, App. A.3: what R is, what it keeps, and what it is good for."""

import pytest
import torch

import packedkv
from packedkv.codec import Dense, Sample, Site, roundtrip
from packedkv.codecs.hessian import HessianRotated, hessian_rotation, second_moment
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import FitError, SpecError
from packedkv.ops.hadamard import block_hadamard
from tests.codecs.draws import normal
from tests.codecs.filled import check_filled_and_saved

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    """Queries whose second moment has decaying eigenvalues in a random basis."""
    dim = shape[-1]
    basis = torch.linalg.qr(normal(dim, dim, seed=seed + 1)).Q
    return (normal(*shape, seed=seed) * torch.logspace(1, -2, dim)) @ basis.T


def fitted(codec: HessianRotated, dim: int, heads: int = 2, seed: int = 0):
    return codec.fit(
        Site(0, "key", heads, dim), Sample(normal(1, heads, 8, dim), anisotropic(2, 2 * heads, 300, dim, seed=seed))
    )


def test_the_rotation_diagonalises_the_mean_outer_product_of_all_query_heads():
    queries = anisotropic(2, 4, 200, 64) + 1.0  # not centred
    moment = second_moment(queries)
    rows = queries.double().reshape(-1, 64)
    torch.testing.assert_close(moment, torch.einsum("ni,nj->ij", rows, rows) / len(rows))
    rotation = hessian_rotation(moment)
    turned = rotation.T @ moment @ rotation
    values = turned.diag()
    assert torch.equal(values.argsort(descending=True), torch.arange(64))
    torch.testing.assert_close(turned, values.diag(), rtol=0, atol=1e-9 * float(values[0]))


def test_signs_are_canonical_the_first_largest_entry_is_positive():
    rotation = hessian_rotation(second_moment(anisotropic(1, 2, 500, 64)))
    at = rotation.abs().argmax(0)
    assert bool((rotation[at, torch.arange(64)] > 0).all())
    # equal magnitudes: (1, -1) / sqrt 2, not (-1, 1) / sqrt 2
    exact = hessian_rotation(torch.tensor([[2.0, -1.0], [-1.0, 2.0]]))
    torch.testing.assert_close(exact[:, 0], torch.tensor([1.0, -1.0]).double() / 2**0.5)


def test_damping_moves_eigenvalues_and_not_the_rotation():
    moment = second_moment(anisotropic(1, 2, 500, 64))
    plain = torch.linalg.eigh(moment).eigenvectors.flip(-1)
    overlap = (plain * hessian_rotation(moment)).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("inner", [SawInt4(1), SawInt4(), SawInt4(16)], ids=["alone", "bdr", "bdr16"])
def test_scores_stay_and_vectors_come_back(inner, dim):
    codec = HessianRotated(inner)
    params = fitted(codec, dim)
    k, q = normal(2, 2, 40, dim, seed=5), normal(2, 2, 5, dim, seed=6)
    code = codec.to_code(k, params)
    assert float((codec.from_code(code, params) - k).abs().max()) < 1e-5
    scores = codec.query_to_code(q, params) @ code.mT
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-4, atol=1e-4)
    # outputs of values: probabilities mix in the code basis, R is undone once
    weights = normal(2, 2, 3, 40, seed=7).softmax(-1)
    torch.testing.assert_close(codec.from_code(weights @ code, params), weights @ k, rtol=1e-5, atol=1e-5)


def test_the_code_basis_is_hadamard_first_then_the_rotation_of_unrotated_queries():
    queries = anisotropic(1, 4, 300, 64)
    codec = HessianRotated(SawInt4())
    params = codec.fit(Site(0, "key", 2, 64), Sample(normal(1, 2, 8, 64), queries))
    expected = block_hadamard(normal(1, 2, 9, 64), 64).double() @ hessian_rotation(second_moment(queries))
    torch.testing.assert_close(codec.to_code(normal(1, 2, 9, 64), params), expected.float(), rtol=0, atol=2e-6)


def test_a_rotation_of_rotated_queries_cancels_the_hadamard():
    queries, k = anisotropic(1, 4, 300, 64), normal(1, 2, 9, 64).double()
    alone = k @ hessian_rotation(second_moment(queries))
    wrong = hessian_rotation(second_moment(block_hadamard(queries, 64)))
    composed = block_hadamard(k, 64).double() @ wrong
    torch.testing.assert_close(composed.abs(), alone.abs(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [1, None], ids=["alone", "bdr"])
def test_the_score_error_falls_against_plain_int4(block):
    # one loud channel makes every step wide; the queries' eigenvectors mix it with the others
    queries = anisotropic(1, 4, 1000, 128)
    k = normal(1, 2, 2000, 128, seed=3)
    k[..., 17] += 30.0
    moment = second_moment(queries)

    def loss(codec, params):
        error = (roundtrip(codec, k, params) - k).double()
        return float(torch.einsum("bhni,ij,bhnj->", error, moment, error))

    codec = HessianRotated(SawInt4(block))
    params = codec.fit(Site(0, "key", 2, 128), Sample(k, queries))
    assert loss(codec, params) < 0.5 * loss(SawInt4(1), {})


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_token_alone_gives_the_bits_of_a_prefill(dim):
    codec = HessianRotated(SawInt4())
    params = fitted(codec, dim)
    x = normal(3, 2, 65, dim).half().float()
    x[0, 0, 3] *= 1e3
    x[1, :, 7, 2] = 65504.0
    code = codec.to_code(x, params)
    back = codec.from_code(code, params)
    for n in (0, 3, 7, 64):
        assert torch.equal(codec.to_code(x[:, :, n : n + 1], params), code[:, :, n : n + 1])
        assert torch.equal(codec.from_code(code[:, :, n : n + 1].contiguous(), params), back[:, :, n : n + 1])
    assert torch.equal(codec.to_code(x[1:2], params), code[1:2])
    assert torch.equal(codec.to_code(x[:, 1:], params), code[:, 1:])


def test_constants_of_the_inner_codec_lie_under_their_own_name():
    codec = HessianRotated(InnerQ(3, norm=True))
    sample, queries = normal(1, 2, 50, 64) * 3, anisotropic(1, 4, 50, 64)
    params = codec.fit(Site(0, "key", 2, 64), Sample(sample, queries))
    assert {n: tuple(p.shape) for n, p in params.items()} == {"rotation": (1, 1, 64, 64), "inner.norm": (1, 2, 64)}
    # a basis that is not orthogonal has another dual
    q, k = normal(1, 2, 4, 64, seed=1), normal(1, 2, 9, 64, seed=2)
    scores = codec.query_to_code(q, params) @ codec.to_code(k, params).mT
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-4, atol=1e-4)
    assert "tensor" in codec.needs
    assert "queries" in codec.needs
    assert "tensor" not in HessianRotated(SawInt4()).needs


def test_calibration_is_reproducible_and_the_same_for_keys_and_values():
    queries = anisotropic(1, 4, 100, 64)
    codec = HessianRotated(SawInt4())
    found = [codec.fit(Site(3, role, 2, 64), Sample(normal(1, 2, 9, 64), queries)) for role in ("key", "value")]
    assert torch.equal(found[0]["rotation"], found[1]["rotation"])


SPECS = ("saw-int4:hessian=true", "saw-int4:rotate=kv,hessian=true", "saw-int4:rotate=none,hessian=true")


def params_of(scheme):
    k, v, q = normal(1, 2, 80, 64, seed=20), normal(1, 2, 80, 64, seed=21), anisotropic(1, 4, 80, 64)
    return {r: scheme.codec(r).fit(Site(0, r, 2, 64), Sample(x, q)) for r, x in (("key", k), ("value", v))}


@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_filled_token_by_token_is_the_prefilled_one_and_can_be_saved(spec, tmp_path):
    scheme = packedkv.get(spec)
    k, v = normal(2, 2, 70, 64, seed=1).half(), normal(2, 2, 70, 64, seed=2).half()
    check_filled_and_saved(scheme, params_of(scheme), k, v, tmp_path)


@pytest.mark.parametrize("spec", SPECS)
def test_attention_over_the_packed_cache_is_that_of_the_decoded_one(spec):
    scheme = packedkv.get(spec)
    cache = packedkv.LayerCache(scheme, params=params_of(scheme))
    cache.append(normal(2, 2, 70, 64, seed=1), normal(2, 2, 70, 64, seed=2))
    q = normal(2, 4, 1, 64, seed=3)
    k, v = (x.repeat_interleave(2, 1) for x in cache.decode())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(cache.attend(q), expected, rtol=1e-3, atol=1e-3)


def test_a_scheme_survives_json():
    for spec in SPECS:
        scheme = packedkv.get(spec)
        assert packedkv.from_json(scheme.to_json()) == scheme


def test_bytes_are_those_of_the_inner_codec():
    assert HessianRotated(SawInt4()).layout(128) == SawInt4().layout(128)
    assert HessianRotated(Dense()).for_dtype(torch.bfloat16).layout(64).fields[0].dtype == "bfloat16"


def test_what_cannot_be_fitted_says_how_to():
    codec, site = HessianRotated(SawInt4()), Site(0, "key", 2, 64)
    with pytest.raises(FitError, match='packedkv fit MODEL "saw-int4:hessian=true" --text FILE -o PARAMS'):
        packedkv.compress("saw-int4:hessian=true", normal(1, 2, 9, 64), normal(1, 2, 9, 64))
    with pytest.raises(FitError, match="pass params"):
        packedkv.LayerCache(packedkv.get("saw-int4:hessian=true")).append(normal(1, 2, 9, 64), normal(1, 2, 9, 64))
    with pytest.raises(FitError, match=r"got queries \(1, 4, 0, 64\) for head_dim=64; .* longer text"):
        codec.fit(site, Sample(normal(1, 2, 9, 64), normal(1, 4, 0, 64)))
    with pytest.raises(FitError, match=r"got queries \(1, 4, 9, 128\) for head_dim=64"):
        codec.fit(site, Sample(normal(1, 2, 9, 64), normal(1, 4, 9, 128)))
    with pytest.raises(FitError, match="the queries of layer 0 are not finite"):
        codec.fit(site, Sample(normal(1, 2, 9, 64), normal(1, 4, 9, 64) * float("inf")))
    with pytest.raises(SpecError, match=r"HessianRotated: inner='saw-int4' is not a codec; pass one"):
        HessianRotated("saw-int4")  # type: ignore[arg-type]
