"""Files with a right checksum and false contents: refused at loading, or of finite numbers; never a crash.

A checksum is no signature: whoever changes a file signs it again. A seed says what is changed: a value of the header,
or bits, shape or dtype of a tensor.
"""

import copy
import json
import random

import pytest
import torch

import packedkv
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Codec
from packedkv.files import caches, params
from packedkv.files.params import FittedParams, ModelIdentity, read_params
from packedkv.registry import LayerChoice, read_choices, write_recipe

from .support import block_of, contents, dim_of, fit, gaussian, kv, signed, site_of

NUMBERS = -1, 0, 1, 7, 2**31 - 1, 2**63, 10**30, 0.5, float("nan")
FORGED = (*NUMBERS, "", "key", None, True, [], [0], {}, [[5, 1], [0, 9]])
SAMPLE = 12
"""Files of each preset in every run; the others are nightly."""


def saved_cache(path, spec) -> LayerCache:
    scheme = packedkv.get(spec)
    n = scheme.sink + scheme.window + block_of(scheme) + 70
    cache = LayerCache(scheme, page_tokens=None if block_of(scheme) > 64 else 64)
    cache.append(*kv(max(n, cache.site.fit_tokens + 8), dim=dim_of(scheme)))
    cache.evict(3, keep=scheme.sink + 2)
    caches.save_layers(path, [cache], {"note": 1})
    return cache


def saved_params(path, spec) -> None:
    scheme, dim = packedkv.get(spec), dim_of(packedkv.get(spec))
    fitted = {role: fit(scheme.codec(role), site_of(role, dim=dim)) for role in ROLES}
    model = ModelIdentity("tiny", "llama", (0,), 2, dim, {"weight": (3, 0.5, 0.25)})
    FittedParams(scheme, model, {0: fitted}, 0, False, 9, 1, 9).save(path)


def leaves(value, at=()) -> list[tuple]:
    """Paths of everything in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(leaf for key, own in inner for leaf in leaves(own, (*at, key)))]


def forge_header(header, choose: random.Random) -> str:
    """Change one value of a header, or leave it out."""
    *above, last = choose.choice(leaves(header))
    at = header
    for key in above:
        at = at[key]
    value = at[last]
    if isinstance(at, dict) and choose.random() < 0.15:
        del at[last]
        return f"{above} without {last}"
    own = [value + 1, value - 1, value * 3] if type(value) is int else []
    at[last] = choose.choice([*FORGED, *own, *own])
    return f"{above} {last}: {value!r:.60} -> {at[last]!r}"


def forge_tensor(tensors, choose: random.Random) -> str:
    """Change bits, numbers, shape or dtype of one tensor."""
    name = choose.choice([name for name, x in sorted(tensors.items()) if x.numel()])
    x = tensors[name].clone()
    how = choose.choice(["bits", "bits", "bits", "NaN", "bytes", "cut", "cut first", "dtype", "flat", "doubled"])
    raw = x.flatten().view(torch.uint8)
    if how == "bits":
        for _ in range(choose.choice((1, 3, 50))):
            raw[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
    elif how == "bytes":
        raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(choose.randrange(1000))))
    changed = {
        "NaN": lambda: x.fill_(torch.nan) if x.is_floating_point() else x.fill_(127),
        "cut": lambda: x[..., : x.shape[-1] // 2],
        "cut first": lambda: x[:-1],
        "dtype": lambda: x.double() if x.is_floating_point() else x.long(),
        "flat": lambda: x.flatten(),
        "doubled": lambda: torch.cat([x, x]),
    }
    tensors[name] = changed[how]() if how in changed else x
    return f"{name} {how}"


def finite(*tensors: torch.Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def use(layer: LayerCache, dim: int) -> None:
    """Read and go on with a loaded cache: numbers are finite, or an error is ours."""
    if layer.store is None:
        return
    q = gaussian(layer.batch, 4, 2, dim, seed=3).float()
    assert finite(*layer.decode()), "decoded"
    if len(layer) > 2:
        assert finite(layer.attend(q.to(layer.dtype))), "attended"
    layer.append(*(x.to(layer.dtype) for x in kv(70, batch=layer.batch, dim=dim, seed=4)))
    assert finite(*layer.decode()), "went on"


def forged_caches(path, spec, seeds) -> None:
    saved_cache(path, spec)
    header, tensors = contents(path, caches.KIND)
    for seed in seeds:
        choose, own, changed = random.Random(f"{spec} {seed}"), copy.deepcopy(header), dict(tensors)
        what = forge_header(own, choose) if choose.random() < 0.6 else forge_tensor(changed, choose)
        signed(path, caches.KIND, own, changed)
        try:
            layers = caches.load_layers(path)[0]
        except packedkv.FormatError:
            continue
        try:
            for layer in layers:
                use(layer, dim_of(packedkv.get(spec)))
        except packedkv.KVError:
            pass
        except Exception as error:
            raise AssertionError(f"{spec}, seed {seed}, {what}: {error!r}") from error


def forged_params(path, spec, seeds) -> None:
    saved_params(path, spec)
    header, tensors = contents(path, params.KIND)
    scheme, dim = packedkv.get(spec), dim_of(packedkv.get(spec))
    for seed in seeds:
        choose, own, changed = random.Random(f"{spec} {seed}"), copy.deepcopy(header), dict(tensors)
        what = forge_tensor(changed, choose) if tensors and choose.random() < 0.6 else forge_header(own, choose)
        signed(path, params.KIND, own, changed)
        try:
            given = read_params(path)
            given.check(ModelIdentity("tiny", "llama", (0,), 2, dim), scheme)
            cache = LayerCache(scheme, params=given.get(0))
            cache.append(*kv(scheme.sink + scheme.window + block_of(scheme) + 70, dim=dim))
        except packedkv.KVError:
            continue
        except Exception as error:
            raise AssertionError(f"{spec}, seed {seed}, {what}: {error!r}") from error
        numbers = *cache.decode(), cache.attend(gaussian(2, 4, 1, dim, seed=3))
        declared = all(type(scheme.codec(role)).constants is not Codec.constants for role in ROLES)
        assert finite(*numbers) or not declared, f"{spec}, seed {seed}, {what}"


@pytest.mark.parametrize("forge", [forged_caches, forged_params])
@pytest.mark.parametrize(
    "seeds", [range(SAMPLE), pytest.param(range(SAMPLE, 2000), marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_forged_files_are_refused_or_finite(spec, forge, seeds, tmp_path):
    forge(tmp_path / "file", spec, seeds)


def flipped(path, read, choose: random.Random, times: int) -> None:
    """Bits flipped and not signed again."""
    raw = path.read_bytes()
    for _ in range(times):
        at = choose.randrange(len(raw))
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << choose.randrange(8)]) + raw[at + 1 :])
        with pytest.raises(packedkv.FormatError):
            read(path)


def cut(path, read) -> None:
    """Cut at every boundary of a tensor, and beside it; and with a byte more."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    ends = {end for name, own in entries.items() if name != "__metadata__" for end in own["data_offsets"]}
    for end in {0, 1, 7, 8, 9, length, 8 + length, *(8 + length + end + more for end in ends for more in (-1, 0, 1))}:
        if end < len(raw):
            path.write_bytes(raw[:end])
            with pytest.raises(packedkv.FormatError):
                read(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(packedkv.FormatError):
        read(path)


@pytest.mark.parametrize("times", [10, pytest.param(2000, marks=pytest.mark.nightly)])
def test_flipped_bits_and_cuts_are_refused(spec, tmp_path, times):
    path = tmp_path / "file"
    for save, read in ((saved_cache, caches.load_layers), (saved_params, read_params)):
        save(path, spec)
        whole = path.read_bytes()
        flipped(path, read, random.Random(times), times)
        path.write_bytes(whole)
        cut(path, read)


@pytest.mark.parametrize("times", [300, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_a_forged_recipe_is_refused_or_a_scheme(tmp_path, times):
    path, choose = tmp_path / "r.json", random.Random(times)
    write_recipe(path, [LayerChoice("int-8", "hqmq-s96_r4"), LayerChoice("kivi-4", "dense", 4, 64)], {"tokens": 9})
    text, whole = path.read_text(), json.loads(path.read_text())
    for _ in range(times):
        if choose.random() < 0.5:
            forged = copy.deepcopy(whole)
            forge_header(forged, choose)
            path.write_text(json.dumps(forged))
        else:
            at = choose.randrange(len(text))
            path.write_text(text[:at] + chr(choose.randrange(1, 128)) + text[at + choose.randrange(3) :])
        try:
            assert read_choices(path)[0]
            packedkv.get(str(path))
        except packedkv.KVError:
            continue
