"""The K-outlier probe: refuses, or warns, where the codec breaks, and only there."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.errors import BrokenPresetError, PackedKVWarning
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.argument import passing
from packedkv.probe import channel_error, outlier_ratio
from tests.conftest import tiny_config
from tests.integrations.test_generate import prompt


def keys(bias: float, tokens: int = 200, dim: int = 128) -> Tensor:
    """Ordinary keys; with ``bias``, a constant on a few channels, as Qwen2's K bias puts there."""
    k = torch.randn(1, 2, tokens, dim)
    k[..., 5::64] += bias
    return k


def prefill(spec: str, k: Tensor, **options: Any) -> Any:
    cache = cache_for(tiny_config("llama-gqa", head_dim=k.shape[-1]), spec, **options)
    for layer in range(2):
        cache.update(k, torch.randn_like(k), layer)
    return cache


@pytest.mark.parametrize("spec", ["int-4", "int-2", "int-3"])
def test_naive_int_on_biased_keys_warns_once_and_names_a_preset_that_holds(spec: str) -> None:
    with pytest.warns(
        PackedKVWarning, match=rf"{spec} breaks on this model's keys: in layer 0 .* Use '.+' instead"
    ) as seen:
        cache = prefill(spec, keys(60.0), probe="warn")
    assert len(seen) == 1
    named = str(seen[0].message).split("Use '")[1].split("'")[0]
    found = cache.report()["keys"][0]
    assert found["channel_error"] > 0.5
    assert found["outlier_ratio"] > 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        better = prefill(named, keys(60.0))
    assert better.report()["keys"][0]["channel_error"] < found["channel_error"] / 3


@pytest.mark.parametrize("name", ["llama-gqa", "mistral"])
def test_refused_prefill_leaves_the_cache_empty_and_is_refused_again(name: str) -> None:
    cache = cache_for(tiny_config(name, head_dim=128), "int-4", prefill="decoded")
    ordinary, biased = keys(0.0), keys(60.0)
    for _ in range(2):
        cache.update(ordinary, ordinary, 0)
        with pytest.raises(BrokenPresetError, match=r"int-4 breaks on this model's keys: in layer 1 .*probe='warn'"):
            cache.update(biased, biased, 1)
        assert [len(layer.cache) for layer in cache.packed_layers] == [0, 0]
        assert cache.report()["keys"] == {}
        assert all(layer.get_seq_length() == 0 for layer in cache.packed_layers)
    for layer in range(2):
        cache.update(ordinary, ordinary, layer)
    assert int(cache.get_seq_length()) == 200


def test_what_is_merely_coarse_is_warned_of_not_refused() -> None:
    """Two bits of a method that has them lose much of ordinary keys too; that is what was asked for."""
    with pytest.warns(PackedKVWarning, match="int-2 breaks"):
        prefill("int-2", keys(8.0))


HOLDING = [*((spec, 60.0) for spec in ("saw-int4", "kivi-2", "kivi-4", "octopus-4", "int-8", "fp8", "dense")),
           *((spec, 0.0) for spec in ("int-4", "int-3", "saw-int4", "kivi-2", "octopus-3", "octopus-2"))]  # fmt: skip


@pytest.mark.parametrize(("spec", "bias"), HOLDING)
def test_codecs_that_hold_do_not_warn(spec: str, bias: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = prefill(spec, keys(bias)).report()["keys"].values()
    assert bias or all(x["channel_error"] < 0.5 and x["outlier_ratio"] < 5 for x in found)


def test_a_config_alone_leaves_it_to_the_prefill(tiny: Any) -> None:
    """A Qwen2 whose K bias is large on a few channels; without the weights nothing is known before."""
    model = tiny("qwen2")
    with torch.no_grad():
        with pytest.raises(BrokenPresetError, match="int-4 breaks on this model's keys"):
            model(prompt(2), **passing(model, cache_for(model.config, "int-4")))
        with pytest.warns(PackedKVWarning, match="int-4 breaks"):
            model(prompt(2), **passing(model, cache_for(model.config, "int-4", probe="warn")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(prompt(2), **passing(model, cache_for(model.config, "saw-int4", probe=True)))
            model(prompt(2), **passing(model, cache_for(model, "int-4", probe=False)))
            model(prompt(2), **passing(model, cache_for(model, "int-4", probe="off")))


def test_too_few_tokens_are_not_judged() -> None:
    assert prefill("int-2", keys(60.0, tokens=8)).report()["keys"] == {}


def test_a_constant_shift_of_the_keys_is_no_error() -> None:
    """Softmax does not see what is the same for every token."""
    k = keys(0.0)
    assert float(channel_error(k, k + 3.0)) == pytest.approx(0.0, abs=1e-9)
    assert float(channel_error(k, k.mean(2, keepdim=True).expand_as(k))) == pytest.approx(1.0)
    assert float(outlier_ratio(torch.ones(1, 1, 4, 8))) == pytest.approx(1.0)
