"""A codec's declaration of its constants: what it fits is as declared; anything else is refused before its use."""

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.checks import check_constants
from packedkv.codec import Codec, Params, Sample, Site
from packedkv.errors import FitError
from packedkv.kernels import choose
from packedkv.store.site import LayerSite

from .conftest import CALIBRATED
from .support import HEAD_DIMS, dim_of, gaussian, kv, sides, site_of, supported_dims

SIZES = (1.0, 0.0, 1e-30, 6e4)


def fitted(codec: Codec, site: Site, size: float) -> Params:
    x = (gaussian(3, site.num_heads, max(codec.fit_tokens, 256), site.head_dim, seed=1).float() * size).clamp(-6e4, 6e4)
    if "queries" in codec.needs:
        return codec.fit(site, Sample(x, gaussian(*x.shape, seed=2).float()))
    return codec.fit(site, Sample(x))


def test_what_is_fitted_is_what_is_declared(spec):
    for role, codec in sides(packedkv.get(spec)):
        for dim in supported_dims(codec)[:: len(HEAD_DIMS) - 1]:
            for size in SIZES if "tensor" in codec.needs and dim == 64 else (1.0,):
                check_constants(codec, site_of(role, dim=dim), fitted(codec, site_of(role, dim=dim), size), 3)


@pytest.mark.parametrize("of_queries", CALIBRATED)
def test_what_is_calibrated_is_what_is_declared(of_queries):
    for role, codec in sides(packedkv.get(of_queries)):
        for size in SIZES:
            check_constants(codec, site_of(role), fitted(codec, site_of(role), size), 3)


def refusal(codec: Codec, site: Site, params: Params) -> str:
    with pytest.raises(FitError) as error:
        check_constants(codec, site, params, 3)
    return str(error.value)


def lies(name: str, x: torch.Tensor, codec: Codec, site: Site) -> dict[str, torch.Tensor]:
    """Tensors that are not the constant of this name."""
    declared, x = codec.constants(site)[name], x.contiguous()
    found = {
        "cut": x[..., : x.shape[-1] // 2],
        "longer": torch.cat([x, x], -1),
        "an axis less": x[0],
        "another dtype": x.to(torch.int32 if x.is_floating_point() else torch.float32),
    }
    if x.is_floating_point():
        found |= {
            "NaN": x.clone(),
            "infinite": x.clone(),
        }
        found["NaN"].flatten()[-1], found["infinite"].flatten()[0] = torch.nan, torch.inf
    if float(declared.high) < (torch.finfo if x.is_floating_point() else torch.iinfo)(x.dtype).max:
        found["too large"] = x.clone()
        found["too large"].flatten()[0] = declared.high * 1.5 + 1
    if declared.rule is not None:
        found["one repeated"] = x.clone()
        found["one repeated"][..., 0] = x[..., 1] + (x[..., 0] == x[..., 1]).to(x.dtype)
    return found


@pytest.mark.parametrize("spec", ["ghost-3", "rope-pairs-3", "innerq-base", "turboquant-3", "octopus-3", *CALIBRATED])
def test_anything_else_is_refused_and_the_text_names_the_constant(spec):
    for role, codec in sides(packedkv.get(spec)):
        site = site_of(role)
        params = dict(fitted(codec, site, 1.0))
        for name, x in params.items():
            for lie, wrong in lies(name, x, codec, site).items():
                why = refusal(codec, site, {**params, name: wrong})
                assert f"{role} constants of layer 0: {name} " in why, f"{name}: {lie}"
            assert f"'{name}'" in refusal(codec, site, {n: p for n, p in params.items() if n != name})
        assert "'stranger'" in refusal(codec, site, {**params, "stranger": torch.ones(1)})


def caches_of(scheme, dim: int, params=None) -> list[packedkv.LayerCache]:
    """A cache of the reference, and of the CPU kernels where they serve the scheme."""
    served = not choose.refusal(scheme, dim, torch.device("cpu"))
    site = LayerSite(scheme, fitted=params)
    return [packedkv.LayerCache(site), *([FusedLayerCache(site)] if served else [])]


def test_every_way_in_checks_the_constants_given(spec):
    """LayerCache, FusedLayerCache and compress: a short constant does not reach a codec or a kernel."""
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    k, v = kv(40, dim=dim)
    for role, codec in sides(scheme):
        params = fitted(codec, site_of(role, dim=dim), 1.0)
        wrong = {role: {name: x[..., :1] if x.shape[-1] > 1 else x[..., :0] for name, x in params.items()}}
        if not params:
            wrong = {role: {"stranger": torch.ones(1, 2, dim)}}
        for cache in caches_of(scheme, dim, params=wrong):
            with pytest.raises(FitError, match=f"the {role} constants"):
                cache.append(k, v)
            assert len(cache) == 0
        with pytest.raises(FitError, match=f"the {role} constants"):
            packedkv.compress(scheme, k, v, params=wrong)


@pytest.mark.parametrize("params", [5, "", "file", [1], {"key": 5}, {"keys": {}}, {0: {}}, {0: 5}])
def test_params_of_another_form_are_refused(params):
    scheme, (k, v) = packedkv.get("ghost-3"), kv(40)
    for call in (packedkv.LayerCache, lambda scheme, params: packedkv.compress(scheme, k, v, params=params)):
        with pytest.raises(packedkv.SpecError, match=r"pass \{'key': Params, 'value': Params\}"):
            call(scheme, params=params)


def test_constants_of_another_batch_are_refused():
    scheme = packedkv.get("ghost-3")
    params = {role: codec.fit(site_of(role), Sample(gaussian(3, 2, 512, 64).float())) for role, codec in sides(scheme)}
    cache = packedkv.LayerCache(scheme, params=params)
    with pytest.raises(FitError, match="of 3 sequences, the cache has 2"):
        cache.append(*kv(40))
    cache.append(*kv(40, batch=3))


@pytest.mark.parametrize("shape", [(2, 0, 5, 64), (2, 2, 5, 0)], ids=["no heads", "no channels"])
def test_tensors_without_heads_or_channels_are_refused(spec, shape):
    scheme = packedkv.get(spec)
    x = torch.zeros(shape)
    for call in (packedkv.LayerCache(scheme).append, lambda k, v: packedkv.compress(scheme, k, v)):
        with pytest.raises(packedkv.ShapeError):
            call(x, x)
    cache = packedkv.LayerCache(scheme)
    with pytest.raises(packedkv.ShapeError):
        cache.append(x, x)
    cache.append(*kv(5, dim=dim_of(scheme)))
    assert len(cache) == 5, "the refused tokens left nothing"


def test_a_batch_of_zero_is_empty(spec):
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    x = torch.zeros(0, 2, 40, dim)
    for cache in caches_of(scheme, dim):
        cache.append(x, x)
        assert cache.decode()[0].shape == (0, 2, 40, dim)
        assert cache.attend(torch.zeros(0, 4, 1, dim)).shape == (0, 4, 1, dim)
