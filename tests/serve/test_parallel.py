"""Two processes with half of the heads each generate what one does: constants go by the model's head numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packedkv.registry import LayerChoice, write_recipe
from tests.serve.engines import ENVIRONMENT, Biased, engine, generate, library, prompts

SCRIPT = """
import json, sys
from tests.serve.engines import engine, generate
if __name__ == "__main__":
    folder, given, ids, block = json.loads(sys.argv[1])
    with engine(folder, given, tensor_parallel_size=2, block_size=block) as llm:
        print("TOKENS", json.dumps(generate(llm, ids)))
"""


IDS = prompts(40, 7)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["turboquant-4", "hqmq-s24_r3"])
def test_two_processes_generate_what_one_does(preset: str, llama: Any, tmp_path: Path) -> None:
    """Both presets draw constants for every head."""
    found = by_two(llama.folder, {"preset": preset}, tmp_path)
    assert found == [library(llama.model, preset, own) for own in IDS]


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["kivi-2", "recipe"])
def test_groups_and_recipes(preset: str, llama: Any, tmp_path: Path) -> None:
    """Slots of unfinished groups are those of a process's own heads; layers have pages of several sizes."""
    given = {"preset": preset, "window": 0}
    if preset == "recipe":
        kinds = "kivi-2:window=0", "turboquant-4"
        write_recipe(tmp_path / "recipe.json", [LayerChoice(kinds[i % 2], kinds[i % 2]) for i in range(6)])
        given = {"preset": str(tmp_path / "recipe.json")}
    found = by_two(llama.folder, given, tmp_path, 32)
    with engine(llama.folder, given, block_size=32) as llm:
        assert found == generate(llm, IDS)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["saw-int4", "ghost-3"])
def test_each_process_has_the_means_of_its_heads(preset: str, biased: Biased, tmp_path: Path) -> None:
    file = tmp_path / "fitted.safetensors"
    fitted = biased.fitted(preset, file) if "ghost" in preset else None
    found = by_two(biased.folder, {"preset": preset, **({"params": str(file)} if fitted else {})}, tmp_path)
    assert found == [library(biased.model, preset, own, params=fitted) for own in IDS]


def by_two(folder: Path, options: dict[str, Any], tmp_path: Path, block: int = 16) -> Any:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([str(folder), options, IDS, block])],
        env=environment, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if "TOKENS" in line]
    assert found, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(found[0].split("TOKENS", 1)[1])
