"""The suite itself: what else is installed beside it must not matter, and scripts name tests that there are."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOISY = """
import warnings
def pytest_configure(config):
    warnings.warn("Benchmarks are automatically disabled because xdist plugin is active.")
"""


def test_pytest_benchmark_beside_it_changes_nothing(tmp_path: Path) -> None:
    """Its version 5.1 warns at the start of a run with ``-n``; images for GPUs bring it."""
    info = tmp_path / "pytest_benchmark-5.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 5.1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbenchmark = noisy_benchmark\n")
    (tmp_path / "noisy_benchmark.py").write_text(NOISY)
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--noconftest",
        "-n",
        "0",
        "test_one.py",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    bare = subprocess.run([*command, "-o", "addopts="], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "Benchmarks are automatically disabled" in bare.stdout + bare.stderr, "the plugin is not there at all"


def test_what_scripts_name_is_there() -> None:
    """Files and tests, ``{a,b}`` expanded: a missing one would stop CI late, or be left out in silence."""
    named = [
        found
        for script in (ROOT / "scripts").iterdir()
        if script.is_file()
        for found in re.findall(r"((?:lab/)?tests/[\w/]+\.py)(?:::([\w{},]+))?", script.read_text(encoding="utf-8"))
    ]
    assert any(name for _, name in named)
    for file, name in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        begin, several, end = re.fullmatch(r"(\w*)(?:\{([\w,]+)\})?(\w*)", name).groups()
        for middle in (several or "").split(","):
            assert not name or f"def {begin}{middle}{end}(" in text, f"{file} has no {begin}{middle}{end}"
