"""attention="fused" inside generate: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = (
    "greedy",
    "int4",
    "left_padding",
    "holes_are_refused",
    "static_overflow_is_refused",
    "second_turn_crop_and_select",
    "sink_and_window",
    "full_static_cache_is_flagged",
)
CASES = (*INTERPRETED, "static", "static_sliding_is_refused", "assisted", "staged", "beams", "compiled", "cuda_graph")
ROOT = Path(__file__).parents[2]


def run_cases(device: str, *cases: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.fused_cases", device, *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fused_cases_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    out = run_cases("cpu", *INTERPRETED)
    assert out.count("ok ") == len(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_fused_case_on_the_gpu(case: str) -> None:
    assert f"ok {case}" in run_cases("cuda", case)
