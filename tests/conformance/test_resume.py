"""Save, load, go on: a loaded cache holds the bytes of the saved one after any further tokens, and after a reset."""

import itertools
from dataclasses import replace

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.files.caches import load_layers, save_layers
from packedkv.kernels.choose import refusal
from packedkv.ops.rope import Rotary
from packedkv.store.site import LayerSite, MeanRemoval

from .conftest import SPECS
from .support import assert_alike, dim_of, edge_lengths, gaussian, kv

LENGTHS = (0, 1, 3, 5, 63, 65, 127, 128, 129, 131, 133, 300, 511, 512, 513, 515, 516, 517, 600)
MORE = 530
"""Tokens that follow: enough for every fit."""
MEANS = ("none", "pre", "post", "given")
KINDS = {
    "reference": LayerCache,
    "growing": FusedLayerCache,
    "static": lambda site: FusedLayerCache(site, capacity=2048),
}


def new_site(spec: str, mean: str, most: int | None = None) -> LayerSite:
    """A site as a model makes it: keys' mean, energies of queries, the reach of a sliding window."""
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    kind = "pre" if mean == "given" else mean
    rotary = Rotary(1e4 ** -(torch.arange(dim // 2) / (dim // 2)))
    given = gaussian(1, 2, dim, seed=8).float() if mean == "given" else None
    source = "first tokens" if given is None else "weights"
    removal = None if mean == "none" else MeanRemoval(kind, None if mean == "post" else rotary, given, source)
    energy = (4 * gaussian(1, 2, dim, seed=9).double()).square()
    return LayerSite(replace(scheme, mean=kind), 2, 3, mean=removal, most=most, energy=energy, first_head=4)


def held(cache: LayerCache) -> list[torch.Tensor]:
    return [x.contiguous() for x in cache.decode()] if cache.store is not None else []


def resumes(path, spec: str, mean: str, kind: str, n: int, most: int | None = None) -> None:
    site = new_site(spec, mean, most)
    dim = dim_of(site.scheme)
    if kind != "reference" and refusal(site.scheme, dim, torch.device("cpu"), static=kind == "static"):
        return
    where = f"{spec}, mean={mean}, {kind}, {n} tokens, most={most}"
    cache = KINDS[kind](site)
    keys, values = kv(n + MORE, dim=dim, seed=5)
    keys = keys + 3 * gaussian(1, 2, 1, dim, seed=6)
    if n:
        cache.append(keys[:, :, :n], values[:, :, :n])
    save_layers(path, [cache], {})
    loaded = load_layers(path)[0][0]
    loaded.site.mean = site.mean  # how keys are rotated is in the model
    if loaded.mean is None and site.mean is not None:
        loaded.mean = site.mean.given
    assert_alike(cache, loaded, where)
    for first, last in ((n, n + 1), (n + 1, n + MORE)):
        for each in (cache, loaded):
            each.append(keys[:, :, first:last], values[:, :, first:last])
        assert_alike(cache, loaded, f"{where}, then {last}")
    if n:
        fresh = KINDS[kind](site)
        loaded.reset()
        for each in (fresh, loaded):
            each.append(keys[:, :, :MORE], values[:, :, :MORE])
        assert_alike(fresh, loaded, f"{where}, reset")


def cases(spec: str) -> list[tuple[str, str, int]]:
    scheme = packedkv.get(spec)
    lengths = sorted({*LENGTHS, *(n for n in edge_lengths(scheme) if n >= 0)})
    return list(itertools.product(MEANS, KINDS, lengths))


def test_a_loaded_cache_goes_on_as_the_saved_one(spec, tmp_path):
    every = cases(spec)
    at = SPECS.index(spec)
    for i in range(3):
        resumes(tmp_path / "c", spec, *every[(at * 37 + i * 101) % len(every)])


@pytest.mark.parametrize("n", [5, 131, 300, 516])
@pytest.mark.parametrize("mean", ["pre", "none"])
def test_a_cache_that_waits_for_its_fit_goes_on_as_the_saved_one(mean, n, tmp_path):
    resumes(tmp_path / "c", "ghost-3", mean, "reference", n)


@pytest.mark.parametrize("most", [64, 200])
def test_a_sliding_layer_goes_on_as_the_saved_one(most, tmp_path):
    resumes(tmp_path / "c", "ghost-3:sink=0", "none", "reference", 40, most)


@pytest.mark.nightly
def test_every_length_goes_on_as_the_saved_one(spec, tmp_path):
    for mean, kind, n in cases(spec):
        resumes(tmp_path / "c", spec, mean, kind, n)


@pytest.mark.parametrize("mean", MEANS)
def test_a_remembering_cache_reads_what_is_left_after_evictions(mean):
    site = new_site("int-8", mean)
    remembering, plain = LayerCache(site, remember=True), LayerCache(site)
    keys, values = kv(300, dim=64, seed=7)
    for cache in (remembering, plain):
        cache.append(keys[:, :, :250], values[:, :, :250])
    for first, last, evicted, keep in ((41, 64, 41, 0), (0, 90, 30, 20), (60, 70, 64, 64)):
        for cache in (remembering, plain):
            cache.decode(first, last)
            cache.evict(evicted, keep)
            cache.append(keys[:, :, 250:260], values[:, :, 250:260])
        for a, b in zip(held(remembering), held(plain), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        assert remembering.nbytes() == plain.nbytes()
