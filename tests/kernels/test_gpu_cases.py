"""The random cases for a GPU, some of them in the emulator: what is right passes, and what is wrong is seen."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import packedkv
from packedkv.kernels.mean import most_pairs
from tests.kernels import gpu_cases
from tests.kernels.decode_cases import each_in_turn
from tests.kernels.gpu_cases import Combination, Programs, bad, decode_case, gathered, layer_of, report

CASE = Combination("int-4", 64, 64)
READERS = (
    *("saw-int4", "int-3:symmetric=true", "int-8:outliers=3", "turboquant-3", "turboquant-qjl-3", "fp8", "octopus-3"),
    *("octopus-qjl-2", "hqmq-s24_r3", "hqmq-s24_r3:outliers=3", "ultraquant", "ultra-tq", "dense", "innerq-base"),
    *("kivi-4", "ghost-4:bits=2.5", "ghost-4", "saw-int4:rotate=kv", "int-4:group=32", "fp8:scale=none"),
)
LAYER = 57
"""A layer for the emulator: two heads of one sequence, and a mean that RoPE rotates in all channels."""


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths for the emulator, several steps of the reference in each; one program, with a mean where it may be."""
    for name, value in (("LENGTHS", (70,)), ("LONG", (200,)), ("LONGEST", 300), ("STEP", 64), ("PREFILLS", 1.0)):
        monkeypatch.setattr(gpu_cases, name, value)

    def of_programs(c: Combination) -> Programs:
        return Programs([2], 0.0, 1, 2, most_pairs(c.dim) if packedkv.get(c.preset).key.block_tokens == 1 else 0)

    monkeypatch.setattr(gpu_cases, "of_programs", of_programs)


@pytest.mark.parametrize(
    ("spec", "dim"),
    [
        *each_in_turn(READERS, (64, 128, 256)),
        *(
            pytest.param(*row, marks=pytest.mark.wide)
            for row in (("ghost-4:transform=klt", 64), ("saw-int4", 80), ("int-8", 80))
        ),
    ],
)
def test_cases_of_every_reader(spec: str, dim: int, device: torch.device, request: pytest.FixtureRequest) -> None:
    """Encoded bytes, decode steps and prefill, of keys without their mean where blocks allow it."""
    if device.type == "cpu":
        request.getfixturevalue("_short")
    combination = Combination(spec, dim, packedkv.get(spec).page_layout(dim).page_tokens)
    seeds = range(4 * LAYER, 4 * LAYER + 4) if device.type == "cpu" else range(4, 16)
    rows = [decode_case(combination, seed, device.type) for seed in seeds]
    if device.type == "cpu" and (mean := layer_of(combination, LAYER, "cpu", False).layer.mean) is not None:
        assert len(mean.rotary.frequencies) == dim // 2
        assert int(mean.placed.min()) > 1_000_000
    assert not [row for row in rows if bad(row)]
    assert any("prefill" in row for row in rows)


@pytest.mark.usefixtures("_short")
def test_a_long_case_passes_and_a_wrong_answer_does_not(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine == {}
    found = decode_case(CASE, 3, "cpu", longest=True)
    assert not bad(found)
    assert found["tokens"] == 300
    true = gpu_cases.attention.decode_attention

    def shifted(*args: Any, **options: Any) -> Any:
        o, lse = true(*args, **options)
        return o * 1.02, lse

    monkeypatch.setattr(gpu_cases.attention, "decode_attention", shifted)
    assert bad(decode_case(CASE, 3, "cpu", longest=True))


def _fake(job: str) -> Iterator[str]:
    yield job
    if job == "compiles":
        time.sleep(1000)
    if job == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    yield f"{job} again"


def test_rows_come_as_they_are_made_a_process_that_dies_is_replaced_and_the_deadline_ends_all() -> None:
    seconds, found = [100.0], []
    for row in gathered(["one", "dies", "two", "compiles"], _fake, 1, lambda: seconds[0]):
        found.append(row)
        seconds[0] = 0.0 if row == "compiles" else 100.0
    assert found[:2] == ["one", "one again"]
    assert found[-3:] == ["two", "two again", "compiles"]
    assert multiprocessing.active_children() == []


def test_the_report_says_what_was_wanted_and_what_came(tmp_path: Path) -> None:
    report(None, [], 3)
    report(tmp_path / "cases.json", [{"decode": {"ratio": 2.0, "bf16_once": 1e-9}}, {"decode": {"ratio": 0.5}}], 3)
    held = json.loads((tmp_path / "cases.json").read_text())
    assert (held["cases"], held["wanted"], len(held["wrong"])) == (2, 3, 1)
    assert [x.name for x in tmp_path.iterdir()] == ["cases.json"]
