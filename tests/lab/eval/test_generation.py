"""Greedy generation: the text is ``generate``'s, and speed is that of one-token steps."""

from types import SimpleNamespace

import pytest
import torch

import kvcodec
from kvcodec_lab.eval import generation
from kvcodec_lab.eval.generation import (
    CUDNN_OFF,
    Generation,
    attention_backends,
    greedy,
    uncompressed,
    uncompressed_cache,
)
from tests.lab.eval.tiny import tiny_llama


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


@pytest.mark.parametrize(("with_cudnn", "without", "counts"), [(0.06, 0.03, 0.03), (0.02, 0.03, 0.02)])
def test_the_uncompressed_cache_is_timed_both_ways_on_a_gpu_and_the_faster_counts(
    monkeypatch, with_cudnn, without, counts
):
    def timed(model, prompt, new_tokens, cache):
        on = torch.backends.cuda.cudnn_sdp_enabled()
        return Generation([1] if on else [2], [with_cudnn if on else without], 0.0)

    monkeypatch.setattr(generation, "greedy", timed)
    monkeypatch.setattr(generation, "uncompressed_cache", lambda model: None)
    found = uncompressed(SimpleNamespace(device=torch.device("cuda")), torch.arange(3), 1)
    assert found.step_seconds == [counts]
    assert found.tokens == [1]  # what a user gets
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert uncompressed(SimpleNamespace(device=torch.device("cpu")), torch.arange(3), 1).step_seconds == [with_cudnn]


def test_a_backend_that_is_off_stays_off():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        for form in ("as torch chooses", CUDNN_OFF):
            with attention_backends(form):
                assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
