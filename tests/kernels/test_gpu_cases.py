"""The random cases for a GPU, some of them in the emulator: what is right passes, and what is wrong is seen."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import gpu_cases
from tests.kernels.gpu_cases import Combination, Programs, bad, decode_case, gathered, report, truth

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


@pytest.mark.wide
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("pairs", [0, 32])
@pytest.mark.parametrize("spec", ["saw-int4", "int-2", "int-4", "int-8", "fp8", "turboquant-4", "dense"])
def test_heads_of_80_channels(spec: str, pairs: int, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine == {}
    monkeypatch.setattr(gpu_cases, "of_programs", lambda c: Programs([2], 0.0, 1, 2, pairs))
    rows = [decode_case(Combination(spec, 80, 32), seed, "cpu") for seed in range(12)]
    assert not any(map(bad, rows))


def test_pairs_with_a_mean_are_as_many_as_kernels_hold() -> None:
    """Of 80 channels, 48 for 40 pairs: a case that asks for another number ends before anything is launched."""
    for c in gpu_cases.combinations(["int-2", "int-8", "saw-int4", "turboquant-4", "turboquant-2"]):
        programs, rng, gen = gpu_cases.of_programs(c), random.Random(0), torch.Generator().manual_seed(0)
        if programs.pairs:
            assert gpu_cases.mean_of(programs.pairs, c.dim, rng, gen, 1, 2, 64).held.pairs == programs.pairs


def test_truth_of_heads_that_share_keys_is_that_of_each_alone() -> None:
    q, k, v = torch.randn(6, 2, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    hidden, sinks = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool(), torch.randn(6)
    together = truth(q, k, v, 0.3, 30.0, sinks, hidden)
    for i in range(6):
        alone = truth(q[i : i + 1], k[i // 3 : i // 3 + 1], v[i // 3 : i // 3 + 1], 0.3, 30.0, sinks[i : i + 1], hidden)
        torch.testing.assert_close(together[i], alone[0])
    s = torch.cat([30 * torch.tanh(q[4].double() @ k[1].double().T * 0.3 / 30), sinks[4].double().expand(2, 1)], 1)
    p = s.masked_fill(torch.nn.functional.pad(hidden, (0, 1)), -torch.inf).softmax(-1)[:, :5]
    torch.testing.assert_close(together[4], p @ v[1].double())
    nothing = truth(q, k[:, :0], v[:, :0], 0.3, 0.0, None)
    assert torch.equal(nothing, torch.zeros(6, 2, 8, dtype=torch.float64))
    assert torch.equal(truth(q, k[:, :0], v[:, :0], 0.3, 0.0, sinks), nothing)


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
