"""Rotations fitted on queries: the Hessian-aware one of SAW-INT4, App. A.3, and OSCAR's."""

import pytest
import torch

from packedkv.codec import Sample, Site, roundtrip
from packedkv.codecs.hessian import HessianRotated, OscarRotated, hessian_rotation, second_moment
from packedkv.codecs.innerq import InnerQ
from packedkv.codecs.kmeans_residual import KMeansResidual
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.ops.hadamard import block_hadamard

from .support import normal


def anisotropic(*shape: int, seed: int = 0) -> torch.Tensor:
    """Queries whose second moment has decaying eigenvalues in a random basis."""
    dim = shape[-1]
    basis = torch.linalg.qr(normal(dim, dim, seed=seed + 1)).Q
    return (normal(*shape, seed=seed) * torch.logspace(1, -2, dim)) @ basis.T


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


def test_the_code_basis_is_hadamard_first_then_the_rotation_of_unrotated_queries():
    queries = anisotropic(1, 4, 300, 64)
    codec = HessianRotated(SawInt4())
    params = codec.fit(Site(0, "key", 2, 64), Sample(normal(1, 2, 8, 64), queries))
    expected = block_hadamard(normal(1, 2, 9, 64), 64).double() @ hessian_rotation(second_moment(queries))
    torch.testing.assert_close(codec.to_code(normal(1, 2, 9, 64), params), expected.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("codec", "inner"),
    [(HessianRotated(InnerQ(3, norm=True)), "inner.norm"), (KMeansResidual(HessianRotated(SawInt4()), 4), "centroids")],
    ids=["innerq", "kmeans"],
)
def test_constants_nest_under_the_names_that_files_hold(codec, inner):
    """A basis that is not orthogonal has another dual: scores stay."""
    sample, queries = normal(1, 2, 50, 64) * 3, anisotropic(1, 4, 50, 64)
    params = codec.fit(Site(0, "key", 2, 64), Sample(sample, queries))
    rotation = "rotation" if inner == "inner.norm" else "inner.rotation"
    shapes = {rotation: (1, 1, 64, 64), inner: (1, 2, 64) if inner == "inner.norm" else (1, 2, 4, 64)}
    assert {n: tuple(p.shape) for n, p in params.items()} == shapes
    assert {"tensor", "queries"} <= codec.needs
    q, k = normal(1, 2, 4, 64, seed=1), normal(1, 2, 9, 64, seed=2)
    scores = codec.query_to_code(q, params) @ codec.to_code(k, params).mT
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-4, atol=1e-4)
    settled = codec.settle([params, params])
    assert all(torch.equal(settled[1][n], params[n]) for n in params)


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


def test_the_code_basis_of_oscar_is_eigenvectors_of_a_heads_own_queries_then_the_hadamard():
    """Two query heads to each KV head, every KV head with a basis of its own."""
    queries, k = torch.cat([anisotropic(1, 2, 300, 64, seed=10 * h) for h in range(2)], 1), normal(1, 2, 9, 64)
    codec = OscarRotated(SawInt4())
    found = codec.to_code(k, codec.fit(Site(0, "key", 2, 64), Sample(normal(1, 2, 8, 64), queries)))
    for head in range(2):
        rotation = hessian_rotation(second_moment(queries[:, 2 * head : 2 * head + 2]))
        expected = block_hadamard(k[:, head].double() @ rotation, 64).float()
        torch.testing.assert_close(found[:, head], expected, rtol=0, atol=2e-6)
