"""Greedy generation: the text is ``generate``'s, and speed is that of one-token steps."""

from types import SimpleNamespace

import pytest
import torch

import packedkv
from packedkv.cli.measure import generation
from packedkv.cli.measure.caches import generating_cache
from packedkv.cli.measure.generation import (
    CUDNN_OFF,
    Generation,
    attention_backends,
    fill,
    greedy,
    in_turns,
    long_context,
    uncompressed,
    uncompressed_cache,
)
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.kernels.cpu import library
from tests.cli.tiny import tiny_llama
from tests.conftest import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.mark.parametrize("spec", [None, "int-4", "kivi-2:window=32"], ids=["uncompressed", "int-4", "kivi-2"])
def test_tokens_are_those_of_generate(model, spec):
    prompt = torch.randint(0, 256, (70,))

    def cache():
        return uncompressed_cache(model) if spec is None else packedkv.cache_for(model, spec, probe=False)

    expected = model.generate(
        prompt[None], **passing(model, cache()), do_sample=False, max_new_tokens=12, pad_token_id=0,
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


# -- which path --------------------------------------------------------------------------------------------------------


def test_generation_is_by_the_kernels_where_they_serve(model):
    if reason := library.refusal(torch.device("cpu")):
        pytest.skip(reason)
    prompt, own = torch.randint(0, 256, (70,)), model.config._attn_implementation
    texts = []
    for spec, path in (
        ("int-4", "fused"),
        ("e8-2", "decoded"),
        ("ultraquant:queries=fp8,dense_layers=0,mean=post", "streamed"),
    ):
        cache, attention = generating_cache(model, spec)
        assert model.config._attn_implementation == own
        with implementation(model, attention):
            texts.append(greedy(model, prompt, 5, cache).tokens)
        report = cache.report()
        assert report["attention"] == path
        assert bool(report["unfused"]) == (path != "fused")
        assert path in report["paths"]
    cache = packedkv.cache_for(model, "int-4", attention="decoded", probe=False)
    assert greedy(model, prompt, 5, cache).tokens == texts[0]


# -- behind a long context ---------------------------------------------------------------------------------------------


def test_a_context_of_one_window_is_a_prefill(model):
    ids = torch.randint(0, 256, (90,))
    whole = uncompressed_cache(model)
    with torch.no_grad():
        model(input_ids=ids[None], **passing(model, whole), use_cache=True)
    found = long_context(model, ids, 90)
    assert len(found) == len(whole.layers)
    for (keys, values), layer in zip(found, whole.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys)
        torch.testing.assert_close(values, layer.values)


def test_windows_stand_at_their_own_positions(model):
    """The first layer's keys depend on a token and its position alone."""
    ids = torch.randint(0, 256, (90,))
    (one, _), *_ = long_context(model, ids, 90)
    (parts, _), *_ = long_context(model, ids, 40)
    assert parts.shape == one.shape
    torch.testing.assert_close(parts, one)


@pytest.mark.parametrize("spec", [None, "int-4", "saw-int4:mean=pre", "kivi-2"])
def test_a_filled_cache_goes_on_as_after_a_prefill(model, spec):
    ids = torch.randint(0, 256, (300,))

    def cache():
        return (uncompressed_cache(model), model.config._attn_implementation) if spec is None else generating_cache(
            model, spec
        )  # fmt: skip

    (filled, attention), (other, _) = cache(), cache()
    fill(filled, long_context(model, ids[:-1], 300))
    with implementation(model, attention), torch.no_grad():
        model(input_ids=ids[None, :-1], **passing(model, other), use_cache=True)
    found = in_turns(model, int(ids[-1]), {"filled": (filled, attention), "other": (other, attention)}, 4)
    assert found["filled"].tokens == found["other"].tokens
    assert [len(made.tokens) for made in found.values()] == [5, 5]
    assert [len(made.step_seconds) for made in found.values()] == [4, 4]


def test_a_model_of_sliding_windows_has_no_long_context():
    with pytest.raises(UnsupportedError, match="does not hold the keys and values of all tokens"):
        long_context(tiny_model("gemma3"), torch.randint(0, 256, (20,)), 20)
