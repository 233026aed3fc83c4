"""The committed result files hold one current row of everything that was measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcodec
from kvcodec.cli.page.rows import read_rows
from kvcodec_lab.bench.record import key_of, newest

ROOT = Path(__file__).parents[1]
MACHINES = [path for path in sorted((ROOT / "benchmarks/results").iterdir()) if any(path.glob("*.json"))]


def timed(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a folder that say what was measured of what at which shape, with their files."""
    for path in sorted(folder.glob("*.json")):
        for row in read_rows([path], needed=()):
            if {"spec", "metric", "shape"} <= row.keys():
                yield path.name, row


def twice(rows: Iterator[tuple[str, dict[str, Any]]]) -> list[str]:
    """What two files hold a row of."""
    files: dict[tuple[str, ...], set[str]] = {}
    for name, row in rows:
        files.setdefault(tuple(json.dumps(row[k]) for k in ("spec", "metric", "shape")), set()).add(name)
    return [f"{' '.join(key)}: {', '.join(sorted(names))}" for key, names in files.items() if len(names) > 1]


@pytest.mark.parametrize("folder", MACHINES, ids=lambda path: path.name)
def test_no_two_files_hold_a_row_of_the_same(folder: Path) -> None:
    assert twice(timed(folder)) == []


@pytest.mark.parametrize("file", ["decode.json", "encode.json", "prefill.json", "generate.json", "serve.json"])
def test_no_row_is_older_than_another_of_the_same(file: str) -> None:
    rows = read_rows([ROOT / "benchmarks/results/nvidia-h200" / file])
    assert rows
    assert len({key_of(row) for row in rows}) == len(rows)
    assert newest(rows) == rows


def test_a_stale_file_is_seen(tmp_path: Path) -> None:
    row = {"spec": "int-4", "metric": "speedup_vs_bf16_cold", "shape": "b32_8k", "values": {"p50": 2.92}}
    (tmp_path / "decode.json").write_text(json.dumps([row, {**row, "shape": "video"}]))
    (tmp_path / "int-4_b32_8k.json").write_text(json.dumps([{**row, "values": {"p50": 2.13}}]))
    (tmp_path / "quality.json").write_text(json.dumps([{"spec": "int-4", "kl": 0.1}]))
    assert twice(timed(tmp_path)) == ['"int-4" "speedup_vs_bf16_cold" "b32_8k": decode.json, int-4_b32_8k.json']


def test_gpus_with_100_kb_of_shared_memory_take_at_most_a_third_longer() -> None:
    """Every preset with kernels, many long sequences and one; some of the former by a sweep."""
    folder = ROOT / "benchmarks/results/shared-memory-h100"
    times: dict[tuple[str, str], dict[int, float]] = {}
    for row in read_rows([folder / "decode.json"]):
        if row["metric"] == "decode_us_cold":
            limit = row.get("shared_memory_kb", 228)
            times.setdefault((row["spec"], row["shape"]), {})[limit] = row["values"]["p50"]
    for row in json.loads((folder / "copies_b32_32k.json").read_text()):
        if row["limit_kb"]:
            assert 100 not in times[row["spec"], row["shape"]]
            times[row["spec"], row["shape"]][100] = row["decode_us_cold"]
    ratios = {which: both[100] / both[228] for which, both in times.items()}
    presets = {p for p in kvcodec.presets() if kvcodec.describe(p)["kernels"]["decode"] == "cuda"} - {"dense"}
    assert ratios.keys() == {(p, shape) for p in presets for shape in ("b32_32k", "llm64k")}
    assert {which: ratio for which, ratio in ratios.items() if ratio > 1.35} == {}
