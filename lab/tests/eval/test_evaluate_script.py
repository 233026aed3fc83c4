"""benchmarks/evaluate.py: what is carried arrives whole, work is dealt once, and a call goes on where one ended."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.tiny import TEXT, save_tiny

from kvcodec.models.loading import load
from kvcodec_lab.eval.merge import PACKED, unpack
from kvcodec_lab.eval.store import ITEMS, RESULTS, RUN, Run, Store
from lab.tests.eval.test_run import QUESTIONS
from lab.tests.eval.test_store import changed, line

ROOT = Path(__file__).parents[3]
TASKS = "kl:limit=2,hellaswag:limit=3"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("evaluate_script", ROOT / "benchmarks/evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def here(tmp_path):
    """A model, data and a text as they lie where the network is."""
    save_tiny(tmp_path / "here/tiny")
    (tmp_path / "here/data").mkdir()
    (tmp_path / "here/data/hellaswag.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "here/text.txt").write_text(TEXT)
    return tmp_path / "here"


def call(script, monkeypatch, *options) -> int:
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, options)])
    return script.main()


def exported(script, monkeypatch, here, *options) -> list[Path]:
    common = ["--weights", here / "tiny", "--data", here / "data", "--text", here / "text.txt", "--tasks", TASKS]
    assert call(script, monkeypatch, "--export", here / "loads", *common, *options) == 0
    return sorted((here / "loads").iterdir())


def test_loads_are_of_one_size_and_arrive_in_any_order(script, here, tmp_path, monkeypatch, capsys):
    loads = exported(script, monkeypatch, here, "--form", "float16", "--part-mb", "0.15")
    assert len(loads) > 2
    sizes = [sum(p.stat().st_size for p in folder.iterdir() if p.name != script.MANIFEST) for folder in loads]
    assert max(sizes) <= 150_000
    assert max(sizes) - min(sizes) <= len(sizes)
    work = tmp_path / "there"
    for number, folder in reversed(list(enumerate(loads))):
        assert script.collect([folder], work) == [p.name for p in loads[:number]]
    assert script.collect([], work) == [], "a later call finds what was kept"
    assert (work / "text/text.txt").read_text() == TEXT
    assert (work / "data/hellaswag/hellaswag.jsonl").is_file()
    there = load(str(work / "models/tiny"), progress=False)
    ids = there.tokenizer("cache", return_tensors="pt")["input_ids"]
    assert there.model(ids).logits.isfinite().all()


def test_a_damaged_part_is_refused_and_another_export_begins_anew(script, here, tmp_path, monkeypatch):
    loads = exported(script, monkeypatch, here, "--form", "float16", "--part-mb", "0.15")
    work = tmp_path / "there"
    script.collect(loads[:1], work)
    part = max(loads[1].glob("0*"), key=lambda p: p.stat().st_size)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SystemExit, match="is not what was exported"):
        script.collect(loads[1:], work)
    other = exported(script, monkeypatch, here, "--form", "bfloat16", "--part-mb", "5")
    assert script.collect(other[:1], work) == [], "parts of the other export do not mix in"
    with pytest.raises(SystemExit, match=r"--form gguf carries smollm2-135m, .*; use --form float16"):
        exported(script, monkeypatch, here)


def test_a_call_that_lacks_a_load_keeps_it_and_ends(script, here, tmp_path, monkeypatch, capsys):
    loads = exported(script, monkeypatch, here, "--form", "float16", "--part-mb", "0.4")
    options = "--out", tmp_path / "out", "--work", tmp_path / "work"
    assert call(script, monkeypatch, *options, "--carried", loads[0]) == 0
    assert "kept; still to come: load-2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_each_run_has_workers_by_what_is_left_of_it(script):
    left = {"plain": ["a", "b", "c", "d"], "stressed": ["a"], "none": []}
    assert script.staff(left, 3) == ["plain", "plain", "stressed"]
    assert script.staff(left, 50) == ["plain"] * 4 + ["stressed"], "no worker without a spec"
    assert script.staff({"plain": []}, 3) == []


def test_a_spec_is_left_if_an_item_of_a_task_that_is_asked_for_is(script):
    about = {"specs": ["int-4", "fp8", "int-8"], "tasks": {"kl": {"items": 2, "limit": 2}, "piqa": {"items": 9}}}
    lines = [line(item, spec) for spec, items in (("int-4", "a"), ("fp8", ""), ("int-8", "ab")) for item in items]
    run = Run(Path(), about, lines)
    assert script.unread(run, ["int-4", "fp8", "int-8", "dense"], "kl") == ["int-4", "fp8", "dense"]
    for tasks in ("kl,needle", "kl:limit=5"):
        assert script.unread(run, ["int-8"], tasks) == ["int-8"], "more was asked for"
    assert script.unread(None, ["int-8"], "kl") == ["int-8"]


def test_a_worker_begins_with_what_is_finished(script, tmp_path):
    with Store(tmp_path / "all", changed(tasks={})) as store:
        for spec in ("int-4", "fp8"):
            store.add(line("a", spec))
    job = script.Job("plain", tmp_path / "worker-00")
    script.seed(job, script.read_run(tmp_path / "all"))
    assert [row["spec"] for row in script.read_run(job.folder).lines] == ["int-4", "fp8"]


def test_workers_that_do_not_end_are_interrupted_and_then_killed(script, tmp_path, monkeypatch, capsys):
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); "
    deaf += "time.sleep(3600)"
    log, started = tmp_path / "work/plain/worker-00.log", []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    # the deadline comes when the worker is deaf, however long it takes to be so
    clock = SimpleNamespace(monotonic=lambda: 1000.0 * (log.is_file() and "deaf" in log.read_text()), sleep=time.sleep)
    monkeypatch.setattr(script, "time", clock)
    monkeypatch.setattr(script.subprocess, "Popen", Popen)
    monkeypatch.setattr(script, "command", lambda job, args: [sys.executable, "-c", deaf])
    monkeypatch.setattr(script, "END_SECONDS", 0)
    monkeypatch.setattr(script, "GRACE_SECONDS", 1)
    options = ["--out", tmp_path / "out", "--work", tmp_path / "work", "--specs", "int-4", "--runs", "plain"]
    assert call(script, monkeypatch, *options, "--device", "cpu", "--deadline", "600", "--workers", "1") == 0
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    status = json.loads((tmp_path / "out" / script.STATUS).read_text())
    assert status["complete"] is False
    assert status["left"] == {"plain": None}


def test_a_worker_that_fails_is_shown(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "command", lambda job, args: [sys.executable, "-c", "raise SystemExit('no such luck')"])
    options = ["--out", tmp_path / "out", "--work", tmp_path / "work", "--specs", "int-4", "--device", "cpu"]
    assert call(script, monkeypatch, *options, "--runs", "plain") == 1
    assert "no such luck" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_visit_evaluates_all_goes_on_elsewhere_and_reads_nothing_twice(script, here, tmp_path, monkeypatch, capsys):
    loads = exported(script, monkeypatch, here, "--form", "float16", "--part-mb", "5")
    common = ["--weights", "tiny", "--tasks", TASKS, "--device", "cpu", "--window-tokens", "96", "--workers", "2"]
    common += ["--out", tmp_path / "out", "--carried", loads[0], "--deadline", "3500"]

    def visit(machine: str, specs: str) -> dict:
        assert call(script, monkeypatch, *common, "--work", tmp_path / machine, "--specs", specs) == 0
        return json.loads((tmp_path / "out" / script.STATUS).read_text())

    assert visit("one", "dense,int-4")["complete"]
    for name in ("plain", "stressed"):
        assert {p.name for p in (tmp_path / "out" / name).iterdir()} == {RUN, RESULTS, PACKED}
        run = unpack(tmp_path / "out" / name, tmp_path / "seen" / name)
        assert run.about["model"]["name"] == "tiny", "not a path of that machine"
        assert run.about["settings"].get("stress", {}).get("factor") == (64.0 if name == "stressed" else None)
        assert len(run.lines) == 3 * 5
    rows = json.loads((tmp_path / "out/plain" / RESULTS).read_text())["rows"]
    assert {row["status"] for row in rows} == {"complete"}

    before = (tmp_path / "seen/plain" / ITEMS).read_text().splitlines()
    assert visit("two", "dense,int-4,fp8")["complete"]
    after = unpack(tmp_path / "out/plain", tmp_path / "seen/after")
    lines = (after.folder / ITEMS).read_text().splitlines()
    assert lines[: len(before)] == before
    assert {json.loads(text)["spec"] for text in lines[len(before) :]} == {"fp8"}
    capsys.readouterr()
    assert visit("two", "dense,int-4,fp8")["complete"]
    assert "items" not in capsys.readouterr().out.replace("no items", ""), "no worker ran"
