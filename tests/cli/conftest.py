"""The tiny llama, made once per file: with its tokenizer, and alone."""

import pytest
from transformers import LlamaForCausalLM

from packedkv.models.loading import LoadedModel
from tests.cli.tiny import tiny_loaded


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def llama(model: LoadedModel) -> LlamaForCausalLM:
    return model.model
