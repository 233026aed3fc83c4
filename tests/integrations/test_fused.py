"""attention="fused" inside generate: on the emulated machine, and on a GPU where there is one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.fused_cases import CASES
from tests.kernels.emulation import machine

__all__ = ["machine"]

ROOT = Path(__file__).parents[2]
EMULATED = (
    "greedy",
    "growing_and_static",
    "left_padding",
    "holes_are_not_attended",
    "static_overflow_is_refused",
    "second_turn_crop_and_select",
    "sink_and_window",
    "full_static_cache_is_flagged",
)


@pytest.mark.parametrize("case", EMULATED)
def test_fused_case_on_the_emulated_machine(case: str, machine: dict[str, Any]) -> None:
    CASES[case]("cpu")
    assert "kv_encode" in machine or case == "static_overflow_is_refused"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_fused_case_on_the_gpu(case: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.fused_cases", "cuda", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok {case}" in done.stdout
