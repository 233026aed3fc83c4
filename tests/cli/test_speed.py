"""What is timed is what is advised: its tokens per second are those through its own cache."""

from dataclasses import replace

import pytest
import torch

import packedkv
from packedkv.cli.advise import speed as module
from packedkv.cli.measure import generation
from packedkv.cli.measure.generation import Generation
from tests.cli.tiny import tiny_loaded


def test_each_figure_is_of_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, scheme = tiny_loaded().model, packedkv.get("int-4")
    filled, greedy = [], module.greedy

    def timed(model, prompt, new_tokens, cache):
        greedy(model, prompt, new_tokens, cache)
        filled.append(cache)
        return Generation([], [1 / len(filled)], 0.0)

    monkeypatch.setattr(module, "greedy", timed)
    monkeypatch.setattr(generation, "greedy", timed)
    found = module.speed(model, scheme, torch.arange(3, 60), 0)
    packed, plain = filled
    assert {layer.cache.scheme for layer in packed.layers} == {replace(scheme, mean="none")}  # decided for this model
    assert packed.get_seq_length() == plain.get_seq_length() == 41 + module.NEW_TOKENS - 1
    assert not isinstance(plain, type(packed))
    assert (found["tokens_per_s"], found["uncompressed_tokens_per_s"], found["prompt_tokens"]) == (1.0, 2.0, 41)
