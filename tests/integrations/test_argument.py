"""The argument by which a model takes its cache, under any transformers: the signature decides."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from packedkv.integrations.transformers import cache_for
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


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_both_names_and_returns_the_cache(name: str) -> None:
    """The older name works in all versions; newer ones say that it is old."""
    if name == "cache" and not NEWER:
        pytest.skip("this version knows the older name only")
    model = tiny_model("llama-gqa")
    cache = cache_for(model, "saw-int4")
    old = NEWER and name != "cache"
    with pytest.warns(FutureWarning, match="Use `cache` instead") if old else nullcontext():
        out = model.generate(
            prompt(1, 9), **{name: cache}, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
    assert out["cache" if NEWER else "past_key_values"] is cache
    assert int(cache.get_seq_length()) == 11
