"""Facts of OSCAR's basis for keys: whose eigenvectors, and in which order."""

import torch

from packedkv.codec import Sample, Site
from packedkv.codecs.hessian import HessianRotated, OscarRotated, hessian_rotation, second_moment
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.ops.hadamard import block_hadamard

from .draws import normal
from .test_hessian import anisotropic


def queries_of(heads, dim):
    """Two query heads to each KV head, every KV head with a basis of its own."""
    return torch.cat([anisotropic(1, 2, 300, dim, seed=10 * h) for h in range(heads)], 1)


def fitted(codec, dim=64, heads=2):
    return codec.fit(Site(0, "key", heads, dim), Sample(normal(1, heads, 8, dim), queries_of(heads, dim)))


def test_each_kv_head_has_the_eigenvectors_of_its_own_queries():
    queries, rotation = queries_of(2, 64), fitted(OscarRotated(SawInt4()))["rotation"]
    assert rotation.shape == (1, 2, 64, 64)
    for head in range(2):
        moment = second_moment(queries[:, 2 * head : 2 * head + 2])
        turned = rotation[0, head].double().T @ moment @ rotation[0, head].double()
        torch.testing.assert_close(turned, turned.diag().diag(), rtol=0, atol=1e-6 * float(turned.max()))
        assert torch.equal(turned.diag().argsort(descending=True), torch.arange(64))


def test_the_code_basis_is_the_eigenvectors_first_then_the_hadamard():
    queries, k = queries_of(2, 64), normal(1, 2, 9, 64)
    found = OscarRotated(SawInt4()).to_code(k, fitted(OscarRotated(SawInt4())))
    for head in range(2):
        rotation = hessian_rotation(second_moment(queries[:, 2 * head : 2 * head + 2]))
        expected = block_hadamard(k[:, head].double() @ rotation, 64).float()
        torch.testing.assert_close(found[:, head], expected, rtol=0, atol=2e-6)


def test_behind_it_every_channel_weighs_the_same_in_the_scores():
    """What the order is for: in the code basis the queries' second moment has equal entries on its diagonal."""
    queries = queries_of(2, 64)
    for codec, even in ((OscarRotated(SawInt4()), True), (HessianRotated(SawInt4()), False)):
        code = codec.query_to_code(queries.unflatten(1, (2, 2)).flatten(2, 3), fitted(codec))
        weight = code.double().square().mean(2)
        assert bool((weight.amax(-1) < 1.0001 * weight.amin(-1)).all()) == even
