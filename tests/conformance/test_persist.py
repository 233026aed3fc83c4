"""Save and load: the same object comes back, and a file that is not right says what is wrong."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.files import container
from packedkv.files.caches import KIND, load_layers, save_layers
from packedkv.kernels.choose import refusal
from packedkv.ops.rope import Rotary
from packedkv.store.site import LayerSite, MeanRemoval

from .conftest import CALIBRATED, SPECS, beside_presets, in_turn
from .support import (
    DTYPES,
    assert_alike,
    block_of,
    cache_of,
    contents,
    dim_of,
    edge_lengths,
    fit,
    gaussian,
    given_params,
    kv,
    same_bits,
    signed,
    site_of,
)


@in_turn("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_saved_caches_come_back_and_go_on_the_same(spec, dtype, tmp_path):
    scheme = packedkv.get(spec)
    dim, n = dim_of(scheme), scheme.sink + scheme.window + 3 * block_of(scheme) + 5
    layers = [cache_of(scheme.for_layer(i, 4), dim=dim, layer=i, seed=3) for i in range(3)]
    for i, layer in enumerate(layers):
        layer.append(*kv(n, dim=dim, seed=i, dtype=dtype))
    layers[1].evict(2, keep=scheme.sink)
    layers[1].crop(n - 5)
    layers[2].select(torch.tensor([1, 0, 1]))
    path = tmp_path / "cache.safetensors"
    save_layers(path, layers, {"model": "tiny", "spec": spec})
    back, meta = load_layers(path)
    assert meta == {"model": "tiny", "spec": spec}
    for old, new in zip(layers, back, strict=True):
        assert_alike(old, new)
        more = kv(n, batch=old.batch, dim=dim, seed=9, dtype=dtype)
        for cache in (old, new):
            cache.append(*more)
            cache.evict(3)
        assert_alike(old, new)
        q = gaussian(old.batch, 4, 1, dim, dtype=dtype)
        assert same_bits(old.attend(q), new.attend(q))


def test_saving_twice_gives_the_same_bytes_and_empty_layers_stay_empty(spec, tmp_path):
    scheme = packedkv.get(spec)
    cache = cache_of(scheme, dim=dim_of(scheme))
    save_layers(tmp_path / "a", [cache], {})
    assert [len(c) for c in load_layers(tmp_path / "a")[0]] == [0]
    cache.append(*kv(40, dim=dim_of(scheme)))
    save_layers(tmp_path / "b", [cache], {})
    save_layers(tmp_path / "c", load_layers(tmp_path / "b")[0], {})
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_free_pages_are_not_written_and_forgotten_tokens_are_wiped(spec, tmp_path):
    scheme = packedkv.get(spec)
    dim, n = dim_of(scheme), scheme.sink + scheme.window + 2 * block_of(scheme) + 64
    roomy = cache_of(scheme, dim=dim, capacity=100_000)
    roomy.append(*kv(n, dim=dim))
    save_layers(tmp_path / "roomy", [roomy], {})
    pages = load_file(tmp_path / "roomy")["0.pages"]
    page = roomy.store.layout
    slots = max(scheme.encoded_tokens(role, n) for role in ("key", "value"))
    assert pages.shape == (2 * -(-slots // page.page_tokens), 2, page.page_bytes)
    assert load_layers(tmp_path / "roomy")[0][0].store.capacity == roomy.store.capacity

    roomy.crop(scheme.sink + block_of(scheme))
    save_layers(tmp_path / "short", [roomy], {})
    roomy.reset()
    roomy.append(*(x[:, :, : scheme.sink + block_of(scheme)] for x in kv(n, dim=dim)))
    if not scheme.window:
        save_layers(tmp_path / "fresh", [roomy], {})
        assert load_file(tmp_path / "short").keys() == load_file(tmp_path / "fresh").keys()
        assert torch.equal(load_file(tmp_path / "short")["0.pages"], load_file(tmp_path / "fresh")["0.pages"])


@beside_presets(*CALIBRATED)
def test_given_constants_are_saved_once_and_survive_reset(spec, tmp_path):
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    given = {role: {**fit(scheme.codec(role), site_of(role, dim=dim))} for role in ("key", "value")}
    layers = [packedkv.LayerCache(scheme, layer=i, params=given) for i in range(3)]
    for layer in layers:
        layer.append(*kv(scheme.sink + scheme.window + block_of(scheme), dim=dim))
    save_layers(tmp_path / "c", layers, {})
    names = [n for n in load_file(tmp_path / "c") if n.startswith("params.")]
    assert len(names) <= sum(len(p) for p in given.values()), "constants shared by three layers are written once"
    back, _ = load_layers(tmp_path / "c")
    for old, new in zip(layers, back, strict=True):
        assert_alike(old, new)
        for role in ("key", "value"):
            assert all(same_bits(new.site.fitted[role][n], t) for n, t in given[role].items())


# -- files that are not right: one codec is enough, the file is the same for all ---------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A good file of one small layer."""
    spec = packedkv.presets()[-1]
    scheme = packedkv.get(spec)
    cache = cache_of(scheme, dim=dim_of(scheme))
    cache.append(*kv(scheme.sink + scheme.window + block_of(scheme), dim=dim_of(scheme)))
    path = tmp_path / "cache.safetensors"
    save_layers(path, [cache], {"note": "good"})
    return path


def held_of(header) -> dict:
    return header["layers"][0]["held"]


def relabelled(header, change: int) -> None:
    held_of(header)["roles"]["key"]["layout_version"] += change


def renamed(header) -> None:
    header["schemes"][0] = re.sub(r'"codec": "\w+"', '"codec": "NeverWritten"', header["schemes"][0])


def moved(header) -> None:
    """As many tokens, behind the pages."""
    for role in held_of(header)["roles"].values():
        role["runs"] = [[first + 4096, last + 4096] for first, last in role["runs"]]


DISAGREE = {"length": 3}, {"heads": 5}, {"page_bytes": 16}, {"roles": {}}, {"dtype": "nonsense"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda h: h.update(version=2, packedkv="9.9"), r"version 2, written by packedkv 9\.9.*Update packedkv"),
        (lambda h: relabelled(h, 1), "update packedkv"),
        (lambda h: relabelled(h, -1), "load it with the packedkv that wrote it"),
        (renamed, "unknown codec class 'NeverWritten'"),
        (moved, "expected ranges in order"),
        *((lambda h, own=own: held_of(h).update(own), "cache.safetensors") for own in DISAGREE),
    ],
)
def test_a_header_that_says_something_else_is_refused(saved, change, text):
    header, tensors = contents(saved, KIND)
    change(header)
    signed(saved, KIND, header, tensors)
    with pytest.raises(packedkv.FormatError, match=text):
        load_layers(saved)


def test_constants_drawn_differently_are_noticed(tmp_path, monkeypatch):
    """A codec whose draw changed must not decode old bytes with new constants, silently wrong."""
    for spec in packedkv.presets():
        scheme = packedkv.get(spec)
        if given_params(scheme) or not fit(scheme.key, site_of(dim=dim_of(scheme))):
            continue
        cache = cache_of(scheme, dim=dim_of(scheme))
        cache.append(*kv(scheme.sink + scheme.window + block_of(scheme), dim=dim_of(scheme)))
        save_layers(tmp_path / "c", [cache], {})
        drawn = type(scheme.key).fit
        monkeypatch.setattr(
            type(scheme.key), "fit", lambda self, *a, d=drawn: {n: t.flip(-1) * 3 for n, t in d(self, *a).items()}
        )
        with pytest.raises(packedkv.FormatError, match="are not those the file"):
            load_layers(tmp_path / "c")
        monkeypatch.undo()


@pytest.mark.parametrize("content", ["tensors", "text", "empty"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "other.safetensors"
    if content == "tensors":
        save_file({"weight": torch.ones(3)}, path, metadata={"format": "pt"})
    else:
        path.write_text("hello, this is not a cache\n" * 3 if content == "text" else "")
    with pytest.raises(packedkv.FormatError, match="not a packedkv cache"):
        load_layers(path)


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(container, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write .*no space left"):
        save_layers(saved, load_layers(saved)[0], {})
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name], "the half-written file stays behind"


def test_paths_that_cannot_be_written_say_why(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        save_layers(tmp_path / "no" / "c", [], {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        save_layers(tmp_path / "file" / "c", [], {})
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        save_layers(tmp_path, [], {})
    monkeypatch.setattr(container.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="is not writable"):
        save_layers(tmp_path / "c", [], {})


def test_paths_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="was not found"):
        load_layers(tmp_path / "no")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_layers(tmp_path)


def test_meta_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="pass strings, numbers"):
        save_layers(tmp_path / "c", [], {"tensor": torch.ones(1)})
    assert not list(tmp_path.iterdir())


LENGTHS = (0, 1, 3, 5, 63, 65, 127, 128, 129, 131, 133, 300, 511, 512, 513, 515, 516, 517, 600)
MORE = 530
"""Tokens that follow: enough for every fit."""
MEANS = ("none", "pre", "post", "given")
KINDS = LayerCache, FusedLayerCache


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


def resumes(path, spec: str, mean: str, kind: type[LayerCache], n: int, most: int | None = None) -> None:
    site = new_site(spec, mean, most)
    dim = dim_of(site.scheme)
    if kind is FusedLayerCache and refusal(site.scheme, dim, torch.device("cpu")):
        return
    where = f"{spec}, mean={mean}, {kind}, {n} tokens, most={most}"
    cache = kind(site)
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
        fresh = kind(site)
        loaded.reset()
        for each in (fresh, loaded):
            each.append(keys[:, :, :MORE], values[:, :, :MORE])
        assert_alike(fresh, loaded, f"{where}, reset")


def cases(spec: str) -> list[tuple[str, type[LayerCache], int]]:
    scheme = packedkv.get(spec)
    lengths = sorted({*LENGTHS, *(n for n in edge_lengths(scheme) if n >= 0)})
    return list(itertools.product(MEANS, KINDS, lengths))


def test_a_loaded_cache_goes_on_as_the_saved_one(spec, tmp_path):
    every = cases(spec)
    at = SPECS.index(spec)
    for i in range(3):
        resumes(tmp_path / "c", spec, *every[(at * 37 + i * 101) % len(every)])


@pytest.mark.parametrize(
    ("spec", "mean", "n", "most"),
    [
        *(("ghost-3", mean, n, None) for mean in ("pre", "none") for n in (5, 131, 300, 516)),
        *(("ghost-3:sink=0", "none", 40, most) for most in (64, 200)),
    ],
)
def test_a_cache_that_waits_for_its_fit_goes_on_as_the_saved_one(spec, mean, n, most, tmp_path):
    """Also in a sliding layer."""
    resumes(tmp_path / "c", spec, mean, LayerCache, n, most)


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
