"""All kernel cases on the CPU: a process of its own, because TRITON_INTERPRET acts at import."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from int4_cases import INT4_CASES
from kernel_cases import CASES

pytest.importorskip("triton", reason="the kernels need triton")
ALL = (*CASES, *INT4_CASES, "compile-aot-eager", "int4-compile-aot-eager")
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def outcome():
    path = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "run_cases.py")],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ALL)
def test_case(outcome, name):
    assert outcome[name] == "", outcome[name]


def test_every_case_ran(outcome):
    assert set(outcome) == set(ALL)
