"""``kvcodec bench decode | ... | page`` and the script of a visit: arguments, files, exit statuses."""

import importlib.util
import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kvcodec.registry import split_specs
from kvcodec_lab.bench import command, decode, encode, generate, prefill, timing
from kvcodec_lab.bench.record import DeviceLostError
from kvcodec_lab.bench.targets import DECODE
from kvcodec_lab.cli import main
from tests.lab.bench.gpu_stubs import CPU, Clock
from tests.lab.bench.test_summary import ROWS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("what", ["decode", "encode", "prefill", "generate"])
def test_without_a_gpu_it_says_what_to_pass(capsys, what):
    assert main(["bench", what]) == 2
    assert f"bench {what} times kernels on a GPU; pass --device cuda" in capsys.readouterr().err


def test_an_engine_that_does_not_exist_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(command, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())
    assert main(["bench", "decode", "--device", "cuda", "--engine", "triton"]) == 2
    assert "--engine triton: there are no such kernels; use cuda, or leave it out" in capsys.readouterr().err


def test_without_cuda_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "decode", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


@pytest.fixture
def _gpu(monkeypatch):
    monkeypatch.setattr(command, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())


def rows(specs, shapes, recorder, **options):
    for spec in specs:
        yield recorder.add(spec, 4.0, "decode_us_cold", "us", shapes[0].name, {"p20": 1.0, "p50": 2.0, "p80": 3.0})


@pytest.mark.usefixtures("_gpu")
def test_rows_page_and_json_of_a_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "decode_rows", rows)
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--shapes", "spine", "--out", str(tmp_path)]
    assert main([*arguments, "--commit", "abc", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["spec"], row["commit"], row["shape"]) == ("int-4", "abc", "llm64k")
    assert json.loads((tmp_path / "decode.json").read_text()) == [row]
    assert "int-4" in (tmp_path / "bench.html").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl", "decode.json", "bench.html"}


@pytest.mark.usefixtures("_gpu")
def test_rows_only(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "decode_rows", rows)
    assert main(["bench", "decode", "--device", "cuda", "--specs", "a-b:c,int-4", "--out", str(tmp_path)]) == 2
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--out", str(tmp_path), "--rows-only"]
    assert main(arguments) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl"}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("error", "status"), [(DeviceLostError("lost"), 3), (KeyboardInterrupt(), 0)])
def test_what_ends_a_run_keeps_its_rows(monkeypatch, tmp_path, error, status):
    def broken(*args, **options):
        yield from rows(*args, **options)
        raise error

    monkeypatch.setattr(decode, "decode_rows", broken)
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--out", str(tmp_path), "--rows-only"]
    assert main(arguments) == status
    assert len((tmp_path / "decode.jsonl").read_text().splitlines()) == 1


def test_page_of_a_folder_with_its_figure(capsys, tmp_path):
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    assert main(["bench", "page", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl", "decode.json", "bench.html", "speed.png"}
    assert "saw-int4" in capsys.readouterr().out
    (tmp_path / "decode.jsonl").unlink()
    assert main(["bench", "page", "--out", str(tmp_path)]) == 0  # from the JSON alone


def test_page_adds_the_rows_of_another_folder(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, found in ((here, ROWS[:5]), (there, ROWS[3:])):
        folder.mkdir()
        (folder / "decode.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    assert main(["bench", "page", "--out", str(here)]) == 0
    (here / "decode.jsonl").unlink()  # as in a folder that is committed
    for _ in range(2):  # a second time adds nothing
        assert main(["bench", "page", "--out", str(here), "--add", str(there)]) == 0
        assert json.loads((here / "decode.json").read_text()) == ROWS
    assert not (there / "decode.json").exists()


@pytest.mark.usefixtures("_gpu")
def test_shapes_are_named_in_every_part(monkeypatch, tmp_path):
    told = {}

    def note(part):
        def rows_of(specs, recorder, **options):
            told[part] = options
            return iter([])

        return rows_of

    for module, name in ((encode, "encode"), (prefill, "prefill"), (generate, "generate")):
        monkeypatch.setattr(module, f"{name}_rows", note(name))
    given = {
        "encode": ["--shapes", "video,append"],
        "prefill": ["--shapes", "hqmq,prefill_b8_t8192_q16"],
        "generate": [
            "--shapes", "qwen3_8b_b1_32k", "--ways", "graph,compiled", "--no-dense", "--turns", str(tmp_path / "t"),
        ],
    }  # fmt: skip
    for part, arguments in given.items():
        assert main(["bench", part, "--device", "cuda", *arguments]) == 0
    assert [s.name for s in told["encode"]["shapes"]] == ["video"]
    assert told["encode"]["batches"] == encode.APPEND_BATCHES
    names = [s.name for s in told["prefill"]["shapes"]]
    assert len(names) == 11
    assert (names[0], names[-1]) == ("prefill_b1_t2048_q1", "prefill_b8_t8192_q16")
    chosen = told["generate"]
    assert (chosen["batches"], chosen["ways"], chosen["dense"]) == ((1,), ["graph", "compiled"], False)
    assert chosen["turns"].path == tmp_path / "t"
    assert main(["bench", "prefill", "--device", "cuda", "--shapes", "spine"]) == 2


def test_page_without_rows_or_folder(capsys, tmp_path):
    assert main(["bench", "page"]) == 2
    assert "name the folder of the rows with --out DIR" in capsys.readouterr().err
    assert main(["bench", "page", "--out", str(tmp_path)]) == 2
    assert "holds no rows (decode.jsonl, encode.jsonl" in capsys.readouterr().err


@pytest.mark.usefixtures("_gpu")
def test_some_specs_at_some_shapes_beside_the_others(monkeypatch, tmp_path):
    told = []

    def note(specs, shapes, recorder, **options):
        told.append((specs, [s.name for s in shapes]))
        yield from ()

    monkeypatch.setattr(decode, "decode_rows", note)
    also = ["--also", "int-4,kivi-2:window=64,sink=4@audio", "--also", "fp8@sweep1,video"]
    assert main(["bench", "decode", "--device", "cuda", *also]) == 0
    assert [(specs, shapes[0], len(shapes)) for specs, shapes in told] == [
        (["int-4", "kivi-2:window=64,sink=4"], "audio", 1), (["fp8"], "llama8b_b1_128", 12),
    ]  # fmt: skip
    assert main(["bench", "decode", "--device", "cuda", "--shapes", "audio", "--specs", "fp8", *also]) == 0
    assert told[2][1] == ["audio"]
    for wrong in ("fp8", "fp8@", "fp9@audio", "fp8@audo"):
        assert main(["bench", "decode", "--device", "cuda", "--also", wrong]) == 2


# -- the visit ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def visit():
    spec = importlib.util.spec_from_file_location("visit_h200", ROOT / "benchmarks/visit_h200.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hanging_part_is_stopped(visit, tmp_path, monkeypatch, capsys):
    begun, asked = tmp_path / "begun", []

    class Timer(threading.Thread):
        """Its seconds are over when the part hangs, however long that takes."""

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

    script = f"import time; print('begun', flush=True); open({str(begun)!r}, 'w').close(); time.sleep(3600)"
    with monkeypatch.context() as patch:
        patch.setattr(visit.threading, "Timer", Timer)
        assert visit.run([sys.executable, "-c", script], 2.0, tmp_path / "log") == 124
    assert asked == [2.0]
    assert (tmp_path / "log").read_text() == "begun\n"
    assert visit.run([sys.executable, "-c", "raise SystemExit(7)"], 600.0, tmp_path / "log") == 7


def test_a_part_goes_on_when_the_device_was_lost(visit, tmp_path, monkeypatch, capsys):
    told, statuses = [], [3, 3, 0]

    def run(arguments, seconds, log):
        told.append(arguments)
        return statuses.pop(0)

    monkeypatch.setattr(visit, "run", run)
    options = ["--parts", "decode,encode", "--presets", "int-4", "--shapes", "spine", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["visit", *options, "--out", str(tmp_path), "--deadline", "100"])
    statuses += [0]
    assert visit.main() == 0
    assert [a[a.index("bench") + 1] for a in told] == ["decode", "decode", "decode", "encode"]
    first = " ".join(told[0])
    for part in ("--specs int-4", "--shapes spine", "--commit abc", "--rows-only", "--device cuda"):
        assert part in first
    assert "--shapes" not in told[3]
    assert "decode" in json.loads(capsys.readouterr().out.split("s\n")[-1])


def plan(visit, tmp_path, monkeypatch, *arguments):
    """Commands that a plan runs, and the exit status."""
    told = []
    monkeypatch.setattr(visit, "run", lambda arguments, seconds, log: told.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["visit", "--out", str(tmp_path / "out"), *arguments])
    return told, visit.main()


@pytest.mark.parametrize("name", ["studies", "rivals"])
def test_every_step_of_a_plan_is_a_command_that_parses(visit, tmp_path, monkeypatch, name):
    told, status = plan(visit, tmp_path, monkeypatch, "--plan", name, "--commit", "abc", "--deadline", "5000")
    assert status == 0
    assert [len(told), len(visit.PLANS[name])] == [sum(s.workers for s in visit.PLANS[name]), len(visit.PLANS[name])]
    seen = []

    def note(part):
        def rows_of(*given, **options):
            seen.append((part, given, options))
            return iter([])

        return rows_of

    for module, part in ((decode, "decode"), (encode, "encode"), (prefill, "prefill"), (generate, "generate")):
        monkeypatch.setattr(module, f"{part}_rows", note(part))
    monkeypatch.setattr(command, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())
    for arguments in told:
        if "bench" in arguments:
            assert main(arguments[arguments.index("bench") :]) == 0
        else:
            assert Path(arguments[1]).name == "compile_kernels.py"
    parts = [step.part for step in visit.PLANS[name] for _ in range(step.workers) if step.part != "compile"]
    assert list(dict.fromkeys(p for p, *_ in seen)) == list(dict.fromkeys(parts))


def test_the_plans_hold_what_is_asked_of_them(visit):
    studies, rivals = visit.PLANS["studies"], visit.PLANS["rivals"]
    sweeps = next(s for s in studies if s.name == "sweeps")
    assert set(sweeps.specs) == set(DECODE)
    assert "sweep32,sweep8,sweep1" in sweeps.options
    assert "--ways graph,generate" in next(s for s in studies if s.part == "generate").options
    assert not any("--no-libraries" in s.options for s in rivals if s.part == "decode")


def test_processes_that_compile_share_the_specs_and_a_lock(visit, tmp_path, monkeypatch):
    arguments = ["--plan", "rivals", "--steps", "compiled", "--deadline", "500"]
    told, _ = plan(visit, tmp_path, monkeypatch, *arguments)
    told.sort(key=lambda a: "--no-dense" in a)
    specs = [split_specs(a[a.index("--specs") + 1]) for a in told]
    assert sorted(itertools.chain(*specs)) == sorted(DECODE)
    assert {a[a.index("--turns") + 1] for a in told} == {str(tmp_path / "out" / "turns")}
    assert ["--no-dense" in a for a in told] == [False, True, True, True]


def test_a_step_takes_no_more_than_its_share(visit, tmp_path, monkeypatch):
    told, _ = plan(visit, tmp_path, monkeypatch, "--plan", "studies", "--deadline", "100")
    limits = [int(a[a.index("--deadline") + 1]) for a in told if "--deadline" in a]
    assert all(limit <= 90 for limit in limits)
    assert "innerq" not in {s.name for s in visit.PLANS["studies"]}
    with pytest.raises(SystemExit):
        plan(visit, tmp_path, monkeypatch, "--plan", "studies", "--steps", "innerq")


def test_a_plan_is_listed_and_nothing_done(visit, tmp_path, monkeypatch, capsys):
    told, status = plan(visit, tmp_path, monkeypatch, "--plan", "rivals", "--list")
    assert (told, status) == ([], 0)
    assert "spine: decode --shapes spine; 14 specs, 300 s at most" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_random_cases_are_a_part(visit, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(visit, "run", lambda arguments, seconds, log: told.append(arguments) or 0)
    arguments = ["visit", "--parts", "cases", "--cases", "50", "--presets", "int-4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert visit.main() == 0
    (command,) = told
    assert "tests.kernels.gpu_cases --cases 50 --presets int-4 --deadline" in " ".join(command)
    assert command[-1] == str(tmp_path / "cases.json")


def test_unknown_parts_are_refused(visit, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["visit", "--parts", "decode,speed", "--out", "x"])
    with pytest.raises(SystemExit):
        visit.main()
    assert "no part speed; there are compile, tests, cases, decode" in capsys.readouterr().err


def test_nothing_begins_when_time_is_out(visit, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(visit, "run", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr(sys, "argv", ["visit", "--parts", "tests,decode", "--out", str(tmp_path), "--deadline", "5"])
    assert visit.main() == 0
    late = "not begun: out of time"
    assert json.loads(capsys.readouterr().out) == {"tests": late, "decode": late}
