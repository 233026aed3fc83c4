"""The soak of ``benchmarks/soak.py``, short: it passes, and it finds a planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.engines import ENVIRONMENT

SOAK = Path(__file__).parents[2] / "benchmarks/soak.py"


def soak(model: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a run of 20 seconds."""
    command = [sys.executable, str(SOAK), "--model", str(model), "--out", str(out), "--seconds", "20", *options]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert out.is_file(), done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["saw-int4", "octopus-3"])
def test_every_answer_is_that_of_its_prompt_alone(preset: str, llama: Any, tmp_path: Path) -> None:
    status, found = soak(llama.folder, tmp_path / "soak.json", "--preset", preset)
    assert (status, found["failures"], found["wrong"]) == (0, [], [])
    assert min(found[key] for key in ("equal", "preemptions", "prefix_hit_tokens", "cancelled")) > 0


@pytest.mark.nightly
def test_exchanged_pages_are_found(llama: Any, tmp_path: Path) -> None:
    status, found = soak(llama.folder, tmp_path / "soak.json", "--plant", "pages")
    assert status == 1
    assert found["wrong"]
