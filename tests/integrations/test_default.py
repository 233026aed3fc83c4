"""Fast without being asked: a preset's name is the only option, and generation attends over packed bytes."""

import copy
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, pipeline

import packedkv
from packedkv.integrations.transformers.argument import passing
from tests.conftest import tiny_model
from tests.integrations.test_generate import prompt
from tests.serve.engines import tokenizer_of_words

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(params=["saw-int4", "ghost-4"])
def spec(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    model = tiny_model("llama-gqa")
    yield model
    packedkv.restore_attention(model)


def expected(model: Any, spec: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Tokens of the reference cache."""
    cache = packedkv.cache_for(model, spec, attention="decoded")
    tokens: torch.Tensor = model.generate(ids, **passing(model, cache), **GREEDY | options)
    return tokens


def by_kernels(cache: Any) -> bool:
    return cache.options["attention"] == "fused" and "fused" in cache.report()["paths"]


def test_generate_and_its_log(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama-gqa")
    with caplog.at_level(logging.INFO, "packedkv"):
        caches = [packedkv.cache_for(model, f"{spec}:window=3") for _ in range(2)]
    said = [
        r.getMessage() for r in caplog.records if r.name == "packedkv" and "fused attention serves" in r.getMessage()
    ]
    assert said[0].endswith("attention 'sdpa' is now 'packedkv', restore_attention(model) undoes it")
    assert len(said) == 2  # the second one has set nothing
    ids = prompt(1)
    assert torch.equal(
        model.generate(ids, **passing(model, caches[0]), **GREEDY), expected(model, f"{spec}:window=3", ids)
    )
    assert by_kernels(caches[0])
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        packedkv.restore_attention(one)
        assert one.config._attn_implementation == "sdpa"


def test_pipeline(model: Any, spec: str, tmp_path: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer_of_words())
    cache = packedkv.cache_for(pipe.model, spec)
    text = " ".join(f"t{i}" for i in prompt(1)[0].tolist())
    said = pipe(text, return_tensors=True, **passing(model, cache), **GREEDY)[0]["generated_token_ids"]
    assert said == expected(model, spec, prompt(1))[0].tolist()
    assert by_kernels(cache)


def test_streamer_in_a_thread(model: Any, spec: str) -> None:
    tokenizer, cache, ids = tokenizer_of_words(), packedkv.cache_for(model, spec), prompt(1)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    arguments = {"input_ids": ids, "streamer": streamer, **passing(model, cache), **GREEDY}
    thread = threading.Thread(target=model.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(expected(model, spec, ids)[0, ids.shape[1] :]).split()
    assert by_kernels(cache)


def test_six_turns_of_a_chat(model: Any, spec: str) -> None:
    chats = []
    for attention in (None, "decoded"):
        cache, ids = packedkv.cache_for(model, spec, attention=attention), prompt(1, 30)
        for turn in range(6):
            ids = torch.cat([model.generate(ids, **passing(model, cache), **GREEDY), prompt(1, 7, seed=turn)], 1)
        chats.append(ids)
        assert by_kernels(cache) == (attention is None)
    assert torch.equal(*chats)


def test_custom_generate(model: Any, spec: str) -> None:
    def loop(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        """A decoding loop of one's own, over the cache that ``generate`` hands on."""
        given.pop("generation_config", None)
        given, ids = {name: given[name] for name in passing(model, None)}, input_ids
        step = ids
        for _ in range(NEW):
            step = model(step, **given).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
        return ids

    cache, ids = packedkv.cache_for(model, spec), prompt(1)
    with torch.no_grad():
        found = model.generate(ids, custom_generate=loop, **passing(model, cache), **GREEDY)
    assert torch.equal(found, expected(model, spec, ids))
    assert by_kernels(cache)


def test_assisted_decoding(model: Any, spec: str) -> None:
    assistant, ids = tiny_model("llama-mha"), prompt(1)
    cache = packedkv.cache_for(model, spec)
    found = model.generate(ids, assistant_model=assistant, **passing(model, cache), **GREEDY)
    assert torch.equal(found, expected(model, spec, ids))
    assert by_kernels(cache)
    assert assistant.config._attn_implementation == "sdpa"


def test_two_models_in_turn(model: Any, spec: str) -> None:
    models = [model, tiny_model("qwen3")]
    ids, caches = prompt(1), [packedkv.cache_for(one, spec) for one in models]
    wanted = [expected(one, spec, ids) for one in models]
    for _ in range(2):
        for one, cache, tokens in zip(models, caches, wanted, strict=True):
            assert torch.equal(one.generate(ids, **passing(one, cache), **GREEDY), tokens)
            cache.reset()
    plain = models[1].generate(ids, **GREEDY)  # transformers' own cache on the same model
    packedkv.restore_attention(models[1])
    assert torch.equal(models[1].generate(ids, **GREEDY), plain)


def test_a_recording_in_progress_is_kept(model: Any) -> None:
    """``cache_for`` while another block records the model: the block sees the calls, and leaves the attention set."""
    from packedkv.integrations.transformers.attention_hooks import implementation_of, watched

    one, seen = tiny_model("llama-gqa"), []
    with watched(one, lambda *call: seen.append(call)):
        cache = packedkv.cache_for(one, "saw-int4")
        one.generate(prompt(1), **passing(one, cache), **GREEDY)
    assert seen
    assert implementation_of(one.config) == "packedkv"
    packedkv.restore_attention(one)
    assert implementation_of(one.config) == "sdpa"
