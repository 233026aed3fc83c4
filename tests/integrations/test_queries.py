"""Energies of a model's queries, from a run on random tokens."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.errors import PackedKVWarning
from packedkv.integrations.transformers.queries import SKIPPED, TOKENS, query_energies
from tests.conftest import tiny_model
from tests.test_key_bias import biased


def by_hand(model: Any, layer: int) -> torch.Tensor:
    """Mean squares before RoPE over each pair, from the layer's own input: ``[H, D / 2]``."""
    inputs: list[torch.Tensor] = []
    attention = model.model.layers[layer].self_attn
    hook = attention.q_proj.register_forward_hook(lambda _, __, out: inputs.append(out))
    tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, use_cache=False)
    hook.remove()
    heads, dim = model.config.num_key_value_heads, attention.head_dim
    squares = inputs[0][0, SKIPPED:].double().view(TOKENS - SKIPPED, heads, -1, dim).square().mean((0, 2))
    return (squares[:, : dim // 2] + squares[:, dim // 2 :]) / 2


@pytest.mark.parametrize("make", [lambda: tiny_model("llama-gqa"), biased])
def test_they_are_of_the_queries_of_each_group_whatever_rope_does(make: Any) -> None:
    model = make()
    own = model.config._attn_implementation
    found = query_energies(model)
    assert sorted(found) == list(range(model.config.num_hidden_layers))
    for layer, energy in found.items():
        low, high = energy[0].chunk(2, -1)
        torch.testing.assert_close((low + high) / 2, by_hand(model, layer), rtol=1e-4, atol=0)
    assert model.config._attn_implementation == own


def test_a_model_runs_once_until_its_weights_change() -> None:
    model, runs = tiny_model("llama-gqa"), []
    model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    first = query_energies(model)
    assert query_energies(model) is first
    assert len(runs) == 1
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert len(runs) == 1
    torch.testing.assert_close(query_energies(model)[0], 4 * first[0])
    assert len(runs) == 2


def test_only_constants_that_wait_for_tokens_ask_for_them() -> None:
    model = tiny_model("llama-gqa")
    runs: list[int] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: runs.append(1))
    packedkv.cache_for(model, "saw-int4")
    assert not runs
    cache = packedkv.cache_for(model, "ghost-3")
    assert runs == [1]
    found = query_energies(model)
    assert all(torch.equal(one.site.energy, found[i]) for i, one in enumerate(cache.layer_caches))


def test_a_model_without_weights_has_none_and_one_that_does_not_run_says_so() -> None:
    assert query_energies(tiny_model("llama-gqa").to("meta")) == {}
    model = tiny_model("llama-gqa")

    def refuse(*_: Any) -> None:
        raise ValueError("pixel_values are missing")

    model.get_decoder().register_forward_pre_hook(refuse)
    with pytest.warns(PackedKVWarning, match=r"did not run on tokens alone \(pixel_values are missing\)"):
        assert query_energies(model) == {}
