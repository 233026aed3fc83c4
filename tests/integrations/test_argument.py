"""The argument by which a model takes its cache, under any transformers: the signature decides."""

from typing import Any

import pytest
import torch
import transformers

from packedkv.integrations.transformers import KVCache, cache_for
from packedkv.integrations.transformers.argument import cache_argument, passing
from tests.conftest import tiny_model
from tests.integrations.test_generate import prompt

NEWER = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


def test_the_name_is_that_of_this_version() -> None:
    model = tiny_model("llama-gqa")
    assert cache_argument(model) == ("cache" if NEWER else "past_key_values")
    assert cache_argument(model.get_decoder()) == cache_argument(model)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_gets_its_cache_by_the_name_that_it_knows(name: str) -> None:
    """Both names, whatever the version: that of a model's own code may differ from transformers'."""
    model = tiny_model("llama-gqa")
    forward = model.forward
    seen: list[Any] = []

    def by_cache(input_ids: Any = None, cache: Any = None) -> Any:
        seen.append(cache)
        return forward(input_ids, **given)

    def by_past(input_ids: Any = None, past_key_values: Any = None) -> Any:
        seen.append(past_key_values)
        return forward(input_ids, **given)

    packed = cache_for(model, "saw-int4")
    given = passing(model, packed)
    model.forward = {"cache": by_cache, "past_key_values": by_past}[name]
    assert passing(model, packed) == {name: packed}
    with torch.no_grad():
        model(prompt(2, 9), **passing(model, packed))
    assert seen == [packed]
    assert int(packed.get_seq_length()) == 9
    assert cache_for(model, "saw-int4").report()["model"] == type(model).__name__


def test_generate_returns_the_cache_that_it_was_given() -> None:
    model = tiny_model("llama-gqa")
    cache = cache_for(model, "saw-int4")
    out = model.generate(
        prompt(1, 9), **passing(model, cache), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    returned = out["cache" if NEWER else "past_key_values"]
    assert returned is cache
    assert isinstance(returned, KVCache)
    assert int(cache.get_seq_length()) == 11


def test_a_call_as_the_readme_shows_it_works_and_says_at_most_that_the_name_is_old() -> None:
    """The older name, which all versions take."""
    model = tiny_model("llama-gqa")
    cache = cache_for(model, "saw-int4")
    if NEWER:
        with pytest.warns(FutureWarning, match="Use `cache` instead"):
            model.generate(prompt(1, 9), past_key_values=cache, max_new_tokens=3, do_sample=False)
    else:
        model.generate(prompt(1, 9), past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert int(cache.get_seq_length()) == 11
