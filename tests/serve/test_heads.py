"""Heads that draft from the model's own hidden states: tokens are those of plain decoding, however wrong the drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.serve.engines import engine, generate, layers, metric, prompts, save_model
from tests.serve.heads import add_mtp, save_eagle

pytestmark = pytest.mark.nightly
IDS = prompts(89, 56, 71)
NEW = 24
GIVEN: dict[str, dict[str, Any]] = {
    "saw-int4": {},
    "turboquant-4:sink=3": {"draft": "int-8"},
    "kivi-2": {"window": 0},
}


@pytest.fixture(scope="module", params=["eagle", "eagle3", "mtp"])
def head(request: pytest.FixtureRequest, llama: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model and the options of its head."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        return add_mtp(folder, save_model(folder, "qwen2", num_hidden_layers=6).config), {
            "method": "mtp",
            "num_speculative_tokens": 1,
        }
    path = save_eagle(folder, llama.model.config, request.param)
    return llama.folder, {"method": request.param, "model": str(path), "num_speculative_tokens": 3}


@pytest.mark.parametrize("preset", GIVEN)
def test_a_head_changes_no_token(preset: str, head: Any) -> None:
    """Prompts in chunks, together and again from the prefix cache; the head's layer is dense unless told otherwise."""
    folder, speculative = head
    given = {"preset": preset, "probe": "off", **GIVEN[preset]}
    sizes = {"block_size": 32, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    with engine(folder, given, **sizes) as llm:
        want = generate(llm, IDS, NEW)
    with engine(folder, given, **sizes, speculative_config=speculative) as llm:
        assert generate(llm, IDS, NEW) == want
        assert generate(llm, IDS, NEW) == want
        drafted, accepted = (metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
        assert drafted > accepted + NEW
        assert metric(llm, "prefix_cache_hits") > 0
        *model, own = (layer.impl.packed.scheme for layer in layers(llm).values())
        assert str(own) == given.get("draft", "dense")
        assert len(model) == 6
        assert all(str(scheme).startswith(preset.split(":")[0]) for scheme in model)
