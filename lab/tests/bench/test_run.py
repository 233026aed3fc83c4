"""benchmarks/run.py: commands of every plan, time limits, what goes on; beside.py: two checkouts in turn."""

import importlib
import json
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, Clock
from packedkv.cache.layer import LayerCache
from packedkv.cli.main import main
from packedkv_lab.bench import decode, encode, first, generate, prefill, record, timing
from packedkv_lab.bench.shapes import Shape

ROOT = Path(__file__).parents[3]
PARTS = {"decode": decode, "encode": encode, "prefill": prefill, "generate": generate, "first": first}


@pytest.fixture
def runner(monkeypatch):
    """The script, on a machine that has everything."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("run")
    monkeypatch.setattr(module, "missing", lambda job, args: [])
    return module


@pytest.fixture
def told(runner, monkeypatch, tmp_path):
    """Call the script: commands that it runs and its exit status; ``statuses`` are what the commands return."""

    def call(*arguments, statuses=()):
        commands, left = [], list(statuses)

        def run(command, seconds, log, checkout):
            commands.append(command)
            return left.pop(0) if left else 0

        monkeypatch.setattr(runner, "run", run)
        monkeypatch.setattr(sys, "argv", ["run", "--out", str(tmp_path / "out"), *arguments])
        return commands, runner.main()

    return call


def test_a_hanging_job_is_stopped_with_what_it_started(runner, tmp_path, monkeypatch):
    begun, asked = tmp_path / "begun", []

    class Timer(threading.Thread):
        """Its seconds are over when the job hangs, however long that takes."""

        def __init__(self, seconds, function):
            super().__init__(daemon=True)
            self.function = function
            asked.append(seconds)

        def run(self):
            while not begun.exists():
                time.sleep(0.01)
            self.function()

        def cancel(self):
            pass

    child = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    script = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        f"print(p.stdout.readline().decode().strip(), flush=True); open({str(begun)!r}, 'w').close(); time.sleep(3600)"
    )
    with monkeypatch.context() as patch:
        patch.setattr(runner.threading, "Timer", Timer)
        assert runner.run([sys.executable, "-c", script], 2.0, tmp_path / "log") == 124
    assert asked == [2.0]
    pid = int((tmp_path / "log").read_text())
    end = time.monotonic() + 600
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # nobody has collected it
            break
        time.sleep(0.05)
    assert time.monotonic() < end
    assert runner.run([sys.executable, "-c", "raise SystemExit(7)"], 600.0, tmp_path / "log") == 7


def test_a_bench_goes_on_when_the_device_was_lost(told, capsys):
    options = ["--plan", "kernels", "--steps", "decode,encode", "--specs", "int-4", "--commit", "abc"]
    options += ["--options", "--shapes spine", "--deadline", "200"]
    commands, status = told(*options, statuses=[3, 3, 0, 0])
    assert status == 0
    assert [c[c.index("bench") + 1] for c in commands] == ["decode", "decode", "decode", "encode"]
    for part in ("--specs int-4", "--shapes spine", "--commit abc", "--rows-only", "--device cuda"):
        assert part in shlex.join(commands[0])
    assert set(json.loads(capsys.readouterr().out.split("s\n")[-1])) == {"decode", "encode"}


def test_a_failed_job_is_not_the_others_end(told):
    commands, status = told("--plan", "kernels", "--steps", "tests,cases,decode", statuses=[3, 0, 1])
    assert status == 1
    assert len(commands) == 3  # of a test run that ends with 3 there is no second one


NAMES = ("kernels", "studies", "rivals", "release", "soak", "cpu")


@pytest.mark.parametrize("name", NAMES, ids="plan-{}".format)
def test_every_job_of_a_plan_is_a_command_that_parses(runner, told, tmp_path, monkeypatch, capsys, name):
    arguments = ["--plan", name, "--commit", "abc", "--deadline", "50000", "--other", str(tmp_path)]
    commands, status = told(*arguments)
    assert status == 0
    assert len(commands) == sum(job.workers for job in runner.PLANS[name])
    seen = []

    def note(part):
        def rows_of(*given, **options):
            seen.append(part)

        return rows_of

    for part, module in PARTS.items():
        monkeypatch.setattr(module, f"{part}_rows", note(part))
    monkeypatch.setattr(record, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())
    wanted = []
    for command in commands:
        if command[1:4] == ["-m", "packedkv", "bench"]:
            if command[4] in PARTS and "cuda" in command:
                wanted.append(command[4])
                assert main(command[3:]) == 0
        elif command[1].endswith(".py"):
            assert takes(Path(command[1]).name, command[2:]), command
        else:
            assert command[1:3] in (["-m", "pytest"], ["-m", "tests.kernels.gpu_cases"]) or command[1] == "-c"
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(wanted))


def takes(file, arguments):
    """Whether a script of the folder knows these options; it is only read, for some import what is not here (vLLM)."""
    source = (ROOT / "benchmarks" / file).read_text()
    return all(f'"{word}"' in source for word in arguments if word.startswith("--"))


def test_a_dry_run_prints_commands_and_does_nothing(runner, told, tmp_path, capsys):
    commands, status = told("--plan", "rivals", "--dry-run")
    assert (commands, status) == ([], 0)
    out = capsys.readouterr().out
    assert "# spine\n" in out
    assert f"bench decode --device cuda --out {tmp_path / 'out'} --rows-only --shapes spine" in out
    assert not (tmp_path / "out").exists()


# -- benchmarks/beside.py ----------------------------------------------------------------------------------------------


class Fused(LayerCache):
    """A fused cache served by the reference."""

    def __init__(self, *args: Any, capacity: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)

    def kernels(self) -> dict[str, str]:
        return {"decode": "reference"}


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("beside")
    monkeypatch.setattr(module, "FusedLayerCache", Fused)
    monkeypatch.setattr(module, "refusal", lambda *_, **__: "")
    return module


def test_a_worker_times_every_spec_beside_bf16(beside, monkeypatch):
    monkeypatch.setattr(beside, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(beside, "rival", lambda shape, timer: {"cold": (300.0, "cudnn"), "warm": (250.0, "flash")})
    shape = Shape("tiny", 2, 4, 2, 64, 100)
    found = list(beside.worker(["int-4", "fp9"], [shape], 1e12, compiling=False))
    assert found[0] | {"bytes": 0} == {
        "spec": "int-4", "shape": "tiny", "gpu": "NVIDIA H200", "cold_us": 100.0, "warm_us": 100.0, "bytes": 0,
        "path": "reference", "bf16_cold_us": 300.0, "bf16_warm_us": 250.0, "bf16_cold": "cudnn", "bf16_warm": "flash",
    }  # fmt: skip
    assert found[0]["bytes"] > 2 * 2 * 2 * 100 * 32
    assert "fp9" in found[1]["status"]
    assert list(beside.worker(["int-4"], [shape], 1e12, compiling=True)) == []
    assert list(beside.worker(["int-4"], [shape], 0.0, compiling=False)) == []


def test_the_table_has_ratios_of_medians_and_names_what_is_slower(beside):
    def row(label, spec, cold, **more):
        times = {"cold_us": cold, "warm_us": cold / 2, "bf16_cold_us": 300.0, "bf16_warm_us": 200.0, "bytes": 240e6}
        return {"label": label, "spec": spec, "shape": "s", "gpu": "NVIDIA H200", "path": "cuda", **times, **more}

    found = [row("this", "int-4", us) for us in (99.0, 101.0)] + [row("other", "int-4", us) for us in (199.0, 201.0)]
    found += [row("this", "kivi-2", 110.0), row("other", "kivi-2", 100.0)]
    found += [{"label": "other", "spec": "saw-int4", "shape": "s", "gpu": "NVIDIA H200", "status": "boom"}]
    lines = beside.summary(found).splitlines()
    assert lines[1].split() == ["s", "int-4", "cuda", "200.0", "100.0", "0.500", "0.500", "3.00", "4.00", "50%", "100%"]
    assert "boom" in lines[3]
    assert lines[4] == "SLOWER by more than 3 %: kivi-2 at s: 1.100"
    alone = beside.summary([r for r in found if r["label"] == "this"])
    assert "nan" in alone
    assert "SLOWER" not in alone
