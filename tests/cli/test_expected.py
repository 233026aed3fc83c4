"""Bytes foretold are the bytes that the real cache reports."""

from dataclasses import replace

import pytest
import torch

import packedkv
from packedkv.cli.advise.expected import cache_bytes
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.plan import plan_for
from packedkv.recipe import LayerChoice
from packedkv.registry import scheme_of
from packedkv.scheme import mix_of
from tests.conftest import tiny_config

SPECS = ("dense", "int-4", "kivi-2", "octopus-4", "innerq-hybrid", "hqmq-s24_r3:outliers=3", "ultraquant", "fp8")


def held(config, spec, tokens, dtype, batch=1):
    cache = cache_for(config, spec, probe=False, prefill="decoded")
    heads = config.num_key_value_heads
    k, v = torch.randn(2, batch, heads, tokens, config.head_dim, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(k, v, layer)
    return cache


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("tokens", "batch", "dtype"), [(1, 1, "float32"), (100, 2, "bfloat16"), (777, 1, "float16")])
def test_every_byte_of_a_prefill_is_foretold(spec, tokens, batch, dtype):
    config, dtype = tiny_config("llama-gqa"), getattr(torch, dtype)
    found = held(config, spec, tokens, dtype, batch).report()["total_bytes"]
    assert cache_bytes(spec, plan_for(config, "decoded"), tokens, dtype, batch=batch) == found


@pytest.mark.parametrize("spec", ["int-4", "kivi-4", "innerq-base"])
@pytest.mark.parametrize("tokens", [4096, 4097, 8300])
def test_a_long_prefill_that_comes_in_parts_is_foretold_as_well(spec, tokens):
    config = tiny_config("llama-mqa", num_hidden_layers=1)
    found = held(config, spec, tokens, torch.float32).report()["total_bytes"]
    assert cache_bytes(spec, plan_for(config, "decoded"), tokens, torch.float32) == found


def test_a_mixture_is_the_sum_of_its_layers():
    config = tiny_config("llama-gqa")
    plan = plan_for(config, "decoded")
    mix = mix_of([scheme_of(LayerChoice("kivi-4", "int-3")), scheme_of(LayerChoice("dense", "fp8"))])
    assert cache_bytes(mix, plan, 500, torch.float32) == held(config, mix, 500, torch.float32).report()["total_bytes"]


@pytest.mark.parametrize("spec", ["int-4", "kivi-2"])
def test_pages_that_grow_token_by_token_stay_below_the_stated_most(spec):
    config = tiny_config("llama-mqa", num_hidden_layers=1)
    plan, cache = plan_for(config, "decoded"), held(config, spec, 50, torch.float32)
    for n in range(51, 400):
        cache.update(*torch.randn(2, 1, 1, 1, 64), 0)
        if n % 7 == 0:
            assert cache.report()["total_bytes"] <= cache_bytes(spec, plan, n, torch.float32, grown=True)


@pytest.mark.parametrize("tokens", [100, 777, 4200])
def test_age_tiers_are_foretold_to_a_page_of_the_newer_one(tokens):
    config, spec = tiny_config("llama-mqa", num_hidden_layers=1), "kivi-2:window=200,sink=4,recent=int-8"
    found = held(config, spec, tokens, torch.float32).report()["total_bytes"]
    page = packedkv.get("int-8").page_layout(64).page_bytes + 4
    assert 0 <= found - cache_bytes(spec, plan_for(config, "decoded"), tokens, torch.float32) <= page


def test_sliding_layers_hold_their_window_alone():
    config = tiny_config("mistral")
    plan = plan_for(config, "decoded")
    found = held(config, "int-4", 400, torch.float32).report()["total_bytes"]
    page = packedkv.get("int-4").page_layout(64).page_bytes * config.num_key_value_heads
    assert abs(cache_bytes("int-4", plan, 400, torch.float32) - found) <= config.num_hidden_layers * (page + 4)
    assert cache_bytes("int-4", plan, 400, torch.float32) == cache_bytes("int-4", plan, 10**6, torch.float32)


@pytest.mark.parametrize("hidden", [True, False], ids=["not stated", "layers differ"])
def test_a_config_that_hides_its_sizes_is_refused(hidden):
    plan = plan_for(tiny_config("llama-gqa" if hidden else "gemma4"), "decoded")
    if hidden:
        plan = replace(plan, layers=tuple(replace(layer, heads=None) for layer in plan.layers))
    with pytest.raises(UnsupportedError, match="one number of KV heads and one head_dim of all layers"):
        cache_bytes("int-4", plan, 10, torch.float32)
