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

from tests.kernels import gpu_cases
from tests.kernels.gpu_cases import Combination, Programs, bad, decode_case, gathered, report

CASE = Combination("int-4", 64, 64)
PAIRS = {"int-4": 0, "ghost-4:bits=2.5": 32, "ghost-4:transform=klt": 32}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths for the emulator; several steps of the reference in each."""
    monkeypatch.setattr(gpu_cases, "LENGTHS", (1, 70))
    monkeypatch.setattr(gpu_cases, "LONG", (200,))
    monkeypatch.setattr(gpu_cases, "LONGEST", 300)
    monkeypatch.setattr(gpu_cases, "STEP", 64)
    monkeypatch.setattr(gpu_cases, "of_programs", lambda c: Programs([2], 0.0, 1, 2, PAIRS[c.preset]))  # one program


@pytest.mark.usefixtures("_short")
def test_a_case_of_each_kind_passes_and_a_wrong_answer_does_not(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine == {}
    found = [decode_case(CASE, seed, "cpu") for seed in range(3)] + [decode_case(CASE, 3, "cpu", longest=True)]
    assert not any(bad(row) for row in found)
    assert found[-1]["tokens"] == 300
    true = gpu_cases.attention.decode_attention

    def shifted(*args: Any, **options: Any) -> Any:
        o, lse = true(*args, **options)
        return o * 1.02, lse

    monkeypatch.setattr(gpu_cases.attention, "decode_attention", shifted)
    assert bad(decode_case(CASE, 3, "cpu", longest=True))


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("spec", ["ghost-4:bits=2.5", pytest.param("ghost-4:transform=klt", marks=pytest.mark.wide)])
def test_ghost_of_any_bits_without_its_mean(spec: str, machine: Any) -> None:
    assert machine == {}
    rows = [decode_case(Combination(spec, 64, 32), seed, "cpu") for seed in range(24 if "klt" in spec else 4)]
    assert not any(map(bad, rows))
    assert "klt" not in spec or any("prefill" in row for row in rows)


def _fake(job: str) -> Iterator[str]:
    yield job
    if job == "compiles":
        time.sleep(1000)
    if job == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    yield f"{job} again"


def test_rows_come_as_they_are_made_and_a_process_that_dies_is_replaced() -> None:
    found = list(gathered(["one", "dies", "two"], _fake, 1, lambda: 100.0))
    assert found[0:2] == ["one", "one again"]
    assert found[-2:] == ["two", "two again"]


def test_at_the_deadline_whatever_runs_is_ended() -> None:
    seconds, found = [100.0], []
    for row in gathered(["compiles", "one"], _fake, 1, lambda: seconds[0]):
        found.append(row)
        seconds[0] = 0.0
    assert found == ["compiles"]
    assert multiprocessing.active_children() == []


def test_the_report_says_what_was_wanted_and_what_came(tmp_path: Path) -> None:
    report(None, [], 3)
    report(tmp_path / "cases.json", [{"decode": {"ratio": 2.0, "bf16_once": 1e-9}}, {"decode": {"ratio": 0.5}}], 3)
    held = json.loads((tmp_path / "cases.json").read_text())
    assert (held["cases"], held["wanted"], len(held["wrong"])) == (2, 3, 1)
    assert [x.name for x in tmp_path.iterdir()] == ["cases.json"]
