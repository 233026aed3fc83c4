"""Tiny models on disk; engines in this process share its import of vLLM, servers start side by side."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.serve.engines import ENVIRONMENT, WORDS, Biased, save_model

os.environ.update(ENVIRONMENT)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.serve)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own


@pytest.fixture(autouse=True)
def _nan_filled_memory() -> None:
    """vLLM's operators know no deterministic mode."""


class Model(NamedTuple):
    """A model, and where it is."""

    folder: Path
    model: Any


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Factory of models on disk, each made once."""
    made: dict[str, Model] = {}

    def make(name: str, **changed: Any) -> Model:
        key = f"{name} {sorted(changed.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = Model(folder, save_model(folder, name, **changed))
        return made[key]

    return make


@pytest.fixture(scope="session")
def llama(saved: Any) -> Model:
    """Six layers, so that two at each end may be dense and two are packed."""
    made: Model = saved("llama-gqa", num_hidden_layers=6)
    return made


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin says in the log."""
    said: list[str] = []
    for level in ("info", "warning"):
        logger = logging.getLogger("vllm.packedkv")  # of all its modules
        monkeypatch.setattr(logger, level, lambda text, *given: said.append(text % given))
    return said


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Biased:
    """A Qwen2 with large biases in all channels of its keys, the largest in a slowly turning pair."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("biased")
    model = save_model(folder, "qwen2", vocab_size=WORDS)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            bias = layer.self_attn.k_proj.bias
            bias.copy_(20 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(i)))
            bias[61] = 400.0
            layer.self_attn.q_proj.weight.mul_(4)
    model.save_pretrained(folder)
    return Biased(folder, model, PreTrainedTokenizerFast.from_pretrained(folder))
