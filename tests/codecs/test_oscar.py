"""Facts of OSCAR's basis for keys: whose eigenvectors, and in which order."""

import pytest
import torch

import packedkv
from packedkv.codec import Sample, Site
from packedkv.codecs.hessian import HessianRotated, hessian_rotation, second_moment
from packedkv.codecs.oscar import OscarRotated
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.files.caches import load_layers, save_layers
from packedkv.fitting.fit import fit_model
from packedkv.ops.hadamard import block_hadamard
from tests.cli.tiny import TEXT, tiny_loaded

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


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_scores_stay_and_a_token_alone_gives_the_bits_of_a_prefill(dim):
    codec = OscarRotated(SawInt4())
    params = fitted(codec, dim)
    k, q = normal(2, 2, 40, dim, seed=5).half().float(), normal(2, 2, 5, dim, seed=6)
    k[0, 0, 3] *= 1e3
    code = codec.to_code(k, params)
    torch.testing.assert_close(codec.from_code(code, params), k, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(codec.query_to_code(q, params) @ code.mT, q @ k.mT, rtol=1e-4, atol=2e-2)
    whole = codec.encode(code, params)
    for n in (0, 3, 39):
        one = codec.encode(codec.to_code(k[:, :, n : n + 1], params), params)
        assert all(torch.equal(x, whole[name][:, :, n : n + 1]) for name, x in one.items())


def test_a_fit_on_a_model_serves_a_cache_that_is_saved(tmp_path):
    spec = "saw-int4:oscar=true"
    params = fit_model(tiny_loaded(), spec, TEXT, windows=2, window_tokens=96)[0]
    assert list(params) == ["key"]
    heads, dim = params["key"]["rotation"].shape[1:3]
    one = packedkv.LayerCache(packedkv.get(spec), params=params)
    k, v = normal(1, heads, 20, dim, seed=1).half(), normal(1, heads, 20, dim, seed=2).half()
    one.append(k, v)
    save_layers(tmp_path / "c.safetensors", [one], {})
    (loaded,), _ = load_layers(tmp_path / "c.safetensors")
    assert loaded.scheme == one.scheme
    for a, b in zip(one.decode(), loaded.decode(), strict=True):
        assert torch.equal(a, b)


def test_the_option():
    scheme = packedkv.get("saw-int4:oscar=true")
    assert (scheme.key, scheme.value) == (OscarRotated(SawInt4()), SawInt4(1))
    assert packedkv.from_json(scheme.to_json()) == scheme
