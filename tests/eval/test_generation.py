"""Greedy generation: the text is ``generate``'s, and speed is that of one-token steps."""

import pytest
import torch

import kvcodec
from kvcodec.eval.generation import Generation, greedy, uncompressed_cache
from tests.eval.tiny import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.mark.parametrize("spec", [None, "int-4", "kivi-2:window=32"], ids=["uncompressed", "int-4", "kivi-2"])
def test_tokens_are_those_of_generate(model, spec):
    prompt = torch.randint(0, 256, (70,))

    def cache():
        return uncompressed_cache(model) if spec is None else kvcodec.cache_for(model, spec, probe=False)

    expected = model.generate(
        prompt[None], past_key_values=cache(), do_sample=False, max_new_tokens=12, pad_token_id=0,
        attention_mask=torch.ones(1, 70, dtype=torch.long),
    )  # fmt: skip
    made = greedy(model, prompt, 12, cache())
    assert made.tokens == expected[0, 70:].tolist()
    assert len(made.step_seconds) == 11


def test_speed_is_the_median_step_without_the_prompt():
    made = Generation([1, 2, 3, 4], [0.1, 9.0, 0.1], prompt_seconds=50.0)
    assert made.tokens_per_s == pytest.approx(10)


def test_agreement_counts_leading_tokens():
    a = Generation([1, 2, 3, 4], [1.0], 1.0)
    assert a.agreement(Generation([1, 2, 9, 4], [1.0], 1.0)) == 2
    assert a.agreement(a) == 4
