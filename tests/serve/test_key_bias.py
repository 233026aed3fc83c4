"""A preset that breaks on the model's key biases: the engine does not start, unless it is told to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcodec.errors import BrokenPresetError
from tests.serve.engines import engine, generate, prompts, save_model


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 on disk with a bias in a slowly turning channel of its keys."""
    folder = tmp_path_factory.mktemp("biased")
    model = save_model(folder, "qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[61] = 400.0
            layer.self_attn.q_proj.weight.mul_(4)
    model.save_pretrained(folder)
    return folder


def test_it_is_refused_at_the_start(one: Path) -> None:
    sentence = (
        r"kvcodec: saw-int4:mean=none breaks on the key biases of .*channel 61, 400 .*'saw-int4:mean=pre'.*"
        r"'kivi-4:window=0'.*\"probe\": \"warn\""
    )
    with pytest.raises(BrokenPresetError, match=sentence), engine(one, {"preset": "saw-int4:mean=none"}):
        pass


@pytest.mark.parametrize(
    "options",
    [{"preset": "saw-int4:mean=none", "probe": "warn"}, {"preset": "kivi-4", "window": 0}, {"preset": "saw-int4"}],
    ids=lambda options: str(options["preset"]),
)
def test_it_starts_when_told_and_what_holds_starts(options: dict[str, Any], one: Path) -> None:
    with engine(one, options, max_num_batched_tokens=64) as llm:
        assert len(generate(llm, prompts(40))[0]) > 0
