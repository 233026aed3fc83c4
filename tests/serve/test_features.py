"""benchmarks/serve_features.py finds what it must: faults that are planted in pages, and none where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["saw-int4", "kivi-2"])
def test_planted_faults_are_found(preset: str, tmp_path: Path) -> None:
    """Two processes are as one; a page that is wrong in every layer shows twice, one head of one layer in the bytes."""
    command = [sys.executable, str(ROOT / "benchmarks/serve_features.py"), "--out", str(tmp_path), "--parts", "two"]
    options = ["--presets", f"{preset},none", "--runs", "one,order,page,head,tp2", "--side", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, *options], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False, timeout=3000
    )
    rows = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    found = {row["shape"]: row for row in rows if row["spec"] == preset}
    assert done.returncode == 0, found
    assert [found[f"two_{run}"]["same_pages"] for run in ("page", "head", "tp2")] == [False, False, True]
    assert [found[f"two_{run}"]["rounding"] for run in ("page", "tp2")] == [False, True]
    assert [p["layers"] for p in found["two_tp2"]["pages"]] == [8, 8]
