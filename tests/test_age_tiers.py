"""Age tiers (``recent=``): the newest tokens in one codec, decoded and encoded by another when they age."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import packedkv
from packedkv import LayerCache, SpecError, UnsupportedError
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import attend
from packedkv.codec import ROLES, roundtrip
from packedkv.integrations.transformers import cache_for, load_cache
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels import choose
from packedkv.registry import LayerChoice, from_json, write_recipe
from tests.conftest import tiny_model
from tests.integrations.test_serving import refusal

SPECS = (
    "saw-int4:window=24,recent=int-8",
    "kivi-2:window=24,sink=3,recent=int-8",
    "octopus-3:window=24,recent=fp8",
    "hqmq-s24_r4:window=17,recent=fp8",
    "turboquant-3:window=24,recent=int-8,mean=post",
    "innerq-hybrid:sink=4,window=24,recent=int-8",
    "kvarn-k4v2:group=64,sink=8,window=24,recent=saw-int4",
)
LENGTH = 200


def scheme(spec: str) -> packedkv.KVScheme:
    return packedkv.get(spec).for_layer(3, 8)


def tokens(n: int = LENGTH, batch: int = 2) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, 2, n, 64, generator=torch.Generator().manual_seed(7))
    return k + 2 * torch.linspace(-1, 1, 64), v


def filled(spec: str, n: int = LENGTH, first: int = 140) -> LayerCache:
    cache, (k, v) = LayerCache(scheme(spec)), tokens()
    cache.append(k[:, :, :first], v[:, :, :first])
    if n > first:
        cache.append(k[:, :, first:n], v[:, :, first:n])
    return cache


def equal(a: LayerCache, b: LayerCache) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.decode(), b.decode(), strict=True))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "mean" not in spec])
def test_aged_tokens_are_encoded_from_what_the_newer_tier_decodes_to(spec: str) -> None:
    own, cache = scheme(spec), filled(spec)
    for role, x, decoded in zip(ROLES, tokens(), cache.decode(), strict=True):
        state, newest = cache.roles[role], cache.recent.roles[role]
        end = own.sink + own.encoded_tokens(role, LENGTH)
        held = roundtrip(newest.codec, x.half(), newest.params).half()
        twice = roundtrip(state.codec, held[:, :, own.sink : end], state.params)
        once = roundtrip(state.codec, x[:, :, own.sink : end].half(), state.params)
        assert torch.equal(decoded[:, :, : own.sink], x[:, :, : own.sink].half().float())
        assert torch.equal(decoded[:, :, own.sink : end], twice)
        assert torch.equal(decoded[:, :, end:].half(), held[:, :, end:])
        if newest.codec.layout(64).nominal_bits == 8:  # encoding twice costs little beside encoding once
            error, single = ((y - x[:, :, own.sink : end]).square().mean() for y in (twice, once))
            assert error < 1.05 * single


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_counted(spec: str) -> None:
    cache = filled(spec)
    parts = cache.nbytes()
    assert sum(parts.values()) == sum(x.untyped_storage().nbytes() for x in cache.tensors())
    assert not {"key.window", "value.window"} & parts.keys()  # an unfinished block is held by the newer tier as well
    own = scheme(spec)
    for role in ROLES:
        per_token = own.recent.codec(role).layout(64).token_bytes
        assert parts[f"{role}.recent"] == 2 * 2 * own.recent_tokens(role, LENGTH) * per_token


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("saw-int4:recent=int-8", "which is 0; give both, e.g. recent=int-8,window=1024"),
        ("saw-int4:window=64,recent=kivi-4", "encodes tokens in groups.* give a preset that does none of it"),
        ("saw-int4:window=64,recent=ghost-4", "is fitted on data"),
        ("saw-int4:window=64,recent=int-9", "int-9"),
        ("dense:window=64,recent=int-8", "use recent=none"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        packedkv.get(spec)


def test_what_has_no_tiers_says_so(tiny: Any) -> None:
    own, (k, v), model = scheme(SPECS[0]), tokens(8), tiny("llama-gqa")
    model.set_attn_implementation("packedkv")
    assert "age tiers" in choose.refusal(own, 64, torch.device("cpu"))
    for fused in (lambda: FusedLayerCache(own).append(k, v), lambda: cache_for(model, SPECS[0], attention="fused")):
        with pytest.raises(UnsupportedError, match=r"age tiers.* Use attention='decoded' or 'streamed'"):
            fused()
    left_open = cache_for(model, SPECS[0]).report()
    assert left_open["attention"] == "decoded"
    assert "age tiers" in left_open["unfused"]
    with pytest.raises(UnsupportedError, match="use LayerCache or cache_for"):
        packedkv.compress(SPECS[0], k, v)
    assert 'pages that requests share must not change; give "window": 0' in refusal(own, 64)


def test_refused_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (k, v) = filled(SPECS[0], 140), tokens()
    before = cache.decode()

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_encode", full)  # the newer tier has the tokens by then
        with pytest.raises(MemoryError):
            cache.append(k[:, :, 140:], v[:, :, 140:])
    with pytest.raises(ValueError, match="keys"):
        cache.append(torch.full_like(k, torch.nan), v)
    assert all(torch.equal(x, y) for x, y in zip(before, cache.decode(), strict=True))
    cache.append(k[:, :, 140:], v[:, :, 140:])
    assert equal(cache, filled(SPECS[0]))


def test_kernels_read_both_tiers() -> None:
    cache, plain = filled(SPECS[1]), LayerCache(scheme("kivi-2"))
    plain.append(*tokens())
    assert cache.unfused() == plain.unfused()  # empty where the kernels are compiled


def test_spec_scheme_and_description() -> None:
    own = packedkv.get("saw-int4:recent=int-8,sink=4,window=256")
    assert str(own) == "saw-int4:sink=4,window=256,recent=int-8"
    assert from_json(own.to_json()) == own
    assert "recent" not in json.loads(packedkv.get("saw-int4").to_json())
    assert own != replace(own, recent=None)
    assert own.without_windows() == packedkv.get("saw-int4")
    assert packedkv.describe(str(own))["recent"] == "int-8"
    assert packedkv.describe("saw-int4")["recent"] is None
    assert packedkv.get("saw-int4:window=256,recent=none") == packedkv.get("saw-int4:window=256")
    outer = packedkv.get("octopus-4:window=64,recent=int-8").for_layer(0, 8)  # keys of outer layers are dense
    assert type(outer.recent.key).__name__ == "Dense"


def test_recipes_take_each_roles_own(tmp_path: Path) -> None:
    choices = [
        LayerChoice("saw-int4:window=64,recent=int-8", "octopus-3"),
        LayerChoice("dense", "turboquant-3:window=32,recent=fp8"),
        LayerChoice("saw-int4:window=64,recent=int-8", "int-4", window=0),
    ]
    mix = write_recipe(tmp_path / "r.json", choices)
    first, second, third = mix.layers
    assert first.window == 64
    assert [type(first.recent.codec(role)).__name__ for role in ROLES] == ["GroupInt", "Dense"]
    assert [type(second.recent.codec(role)).__name__ for role in ROLES] == ["Dense", "Fp8"]
    assert third.recent is None
    assert from_json(mix.to_json()) == mix
    cache = LayerCache(first)
    cache.append(*tokens())
    assert cache.nbytes()["value.recent"] > cache.nbytes()["key.recent"] > 0


@pytest.mark.parametrize("family", ["llama-gqa", "mistral"])
def test_model_generates_and_reports(family: str, tiny: Any, tmp_path: Path) -> None:
    model = tiny(family)
    ids = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    caches = [cache_for(model, "saw-int4:window=8,recent=int-8", attention="decoded") for _ in range(2)]
    with torch.no_grad():
        for part in (ids[:, :30], ids[:, 30:]):
            model(part, **passing(model, caches[0]))
        for part in (ids[:, :30], *ids[:, 30:].split(1, 1)):
            model(part, **passing(model, caches[1]))
    for a, b in zip(*(cache.layer_caches for cache in caches), strict=True):
        assert len(a) == len(b)
    report = caches[0].report()
    assert report["bytes"]["key.recent"] > 0
    assert "tokens in int-8" in report["layers"][0]["note"]
    caches[0].save(tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert all(equal(a, b) for a, b in zip(caches[0].layer_caches, loaded.layer_caches, strict=True))


def test_either_tier_may_ask_for_keys_without_their_mean(tmp_path: Path) -> None:
    model, ids = tiny_model("qwen2"), torch.arange(1, 101)[None]
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("k_proj.bias"):
                x.zero_()[61::64] = 400.0  # a pair that turns slowly
        found = {}
        for spec in ("kivi-4:window=8", "kivi-4:window=8,recent=int-8", "kivi-4:window=8,recent=saw-int4"):
            found[spec] = cache_for(model, spec, attention="decoded").report()["mean"]
        assert list(found.values()) == ["none", "pre", "pre"]  # groups along tokens lose nothing by such a bias
        cache = cache_for(model, "saw-int4:window=8,recent=int-8", attention="decoded")
        model(ids[:, :80], **passing(model, cache))
        cache.save(tmp_path / "cache.safetensors")
        loaded = load_cache(tmp_path / "cache.safetensors", model)
        logits = [model(ids[:, 80:], **passing(model, one)).logits for one in (cache, loaded)]
    assert torch.equal(*logits)
    assert "keys without their mean before RoPE" in loaded.report()["layers"][0]["note"]
    tiers = loaded.layer_caches[0]
    q = torch.randn(1, 2, 1, 64)
    torch.testing.assert_close(tiers.attend(q), attend(q, tiers), rtol=1e-4, atol=1e-4)
