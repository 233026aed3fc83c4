"""benchmarks/serve_h200.py: turns, rows of what fails, resuming; what docs/serve-results.md says of its rows."""

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from kvcodec_lab.serve.tables import charts, tables

ROOT = Path(__file__).parents[3]
ENGINE = """
import json, os, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, (part, variant, eager) = Path(given["--out"]), json.loads(given["--job"])
sys.stdin.readline() or sys.exit(3)
if variant == "dies":
    print("CUDA error: out of memory", flush=True)
    os.abort()
begin = time.time()
if variant == "hangs":
    (out / "hangs").touch()
    time.sleep(3600)
time.sleep(0.2)
row = {"spec": variant, "metric": "step_ms", "unit": "ms", "shape": "n1_i8192", "load": "steps", "run": given["--run"],
       "sizes": {"sequences": 1, "tokens": 8192}, "values": {"p20": 1.0, "p50": 2.0, "p80": 3.0},
       "turn": [begin, time.time()], "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
       "plugin": os.environ["PYTHONPATH"].split(os.pathsep)[0]}
with (out / "serve.jsonl").open("a") as file:
    file.write(json.dumps(row) + "\\n")
"""


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load(ROOT / "benchmarks/serve_h200.py")
docs = load(ROOT / "scripts/update_serve.py")


@pytest.fixture
def visit(tmp_path, monkeypatch):
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(bench, "PROGRAM", tmp_path / "engine.py")
    monkeypatch.setitem(bench.SECONDS, "steps", 600)
    # an hour passes as soon as a process hangs: nothing is late because the machine is slow
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 3600 * (tmp_path / "out/hangs").exists(), sleep=time.sleep
    )
    monkeypatch.setattr(bench, "time", clock)

    def run(variants, gpus="0", deadline=36000):
        args = argparse.Namespace(
            out=tmp_path / "out", parts=["steps"], variants=variants.split(","), gpus=gpus, deadline=deadline, ahead=1,
            side=1, scale="full", commit="abc", run="2026-01-01T00:00:00Z",
        )  # fmt: skip
        (tmp_path / "out").mkdir(exist_ok=True)
        status = bench.visit(args)
        path = tmp_path / "out/serve.jsonl"
        return status, [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    return run


def test_turns_on_a_gpu_do_not_overlap_and_all_gpus_are_used(visit):
    status, rows = visit("a,b,c,d,e", gpus="2,5")
    assert status == 0
    assert {row["spec"] for row in rows} == set("abcde")
    assert {row["gpu"] for row in rows} == {"2", "5"}
    for gpu in ("2", "5"):
        turns = sorted(row["turn"] for row in rows if row["gpu"] == gpu)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns))


def test_what_fails_is_a_row_with_its_last_words_and_the_others_go_on(visit, capsys):
    status, rows = visit("dies,a,hangs,b")
    assert status == 1
    found = {row["spec"]: row for row in rows}
    assert {name for name, row in found.items() if row["values"]} == {"a", "b"}
    assert found["dies"]["status"].startswith("failed: the process ended with -6")
    assert "out of memory" in found["dies"]["said"]
    assert re.match(r"failed: stopped after 3[67]\d\d s", found["hangs"]["status"])
    assert "2 failed: dies step_ms; hangs step_ms" in capsys.readouterr().out


def test_the_same_command_goes_on_with_what_has_no_rows(visit, capsys):
    visit("a,dies")
    capsys.readouterr()
    _, rows = visit("a,b,dies")
    assert [row["spec"] for row in rows if row["values"]] == ["a", "b"]
    assert "2 jobs on 1 x GPU: steps-b, steps-dies" in capsys.readouterr().out


def test_nothing_begins_when_time_is_over(visit, capsys):
    status, rows = visit("a,b", deadline=5)
    assert (status, rows) == (1, [])
    assert "not begun: steps-a, steps-b" in capsys.readouterr().out


def test_the_plugin_is_found_without_being_installed(visit, monkeypatch, tmp_path):
    kept = {}
    wait = bench.Lane.join
    monkeypatch.setattr(bench.Lane, "join", lambda lane: (kept.update(points(lane.visit.plugin)), wait(lane)))

    def points(folder):
        from importlib.metadata import distributions

        return {d.name: (d.version, [str(e.value) for e in d.entry_points]) for d in distributions(path=[str(folder)])}

    visit("a")
    version = __import__("kvcodec").__version__
    assert kept == {"kvcodec": (version, ["kvcodec.integrations.vllm:register"])}


def test_options_differ_between_variants_only_in_what_names_the_cache(tmp_path):
    engines, sizes = importlib.import_module("serve_engines"), importlib.import_module("serve_sizes")
    scale = engines.SCALES["full"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(sizes.config_of(sizes.TINY)))

    def options(variant):
        return engines.options_of(engines.Job("steps", variant), scale, True, tmp_path / "m")

    base = options("bf16")
    assert base["kv_cache_dtype"] == "auto"
    assert options("ultraquant_4bit") == base | {"kv_cache_dtype": "ultraquant_4bit"}
    for variant, own in (
        ("saw-int4", {"preset": "saw-int4"}),
        ("kvcodec:fp8", {"preset": "fp8"}),
        ("octopus-3", {"preset": "octopus-3", "window": 0}),
    ):
        assert options(variant) == base | {"attention_backend": "CUSTOM", "additional_config": {"kvcodec": own}}
    own = options("innerq-base")["additional_config"]["kvcodec"]
    assert own.keys() == {"preset", "window", "sink", "params"}
    from kvcodec.files.params import read_params

    assert read_params(own["params"]).spec == "innerq-base"


def rows_of_steps():
    common = {"gpu": "NVIDIA H200", "versions": {"vllm": "0.33.0"}, "run": "r", "unit": "ms", "load": "steps"}
    rows = [{"spec": label, "metric": "step_ms", "shape": f"n{n}_i8192", "values": {"p20": x - 0.5, "p50": x, "p80": x},
             "sizes": {"sequences": n, "tokens": 8192}, **common}
            for label, steps in {"bf16": (6, 14.5), "saw-int4": (5.8, 9.25)}.items()
            for n, x in zip((1, 32), steps, strict=True)]  # fmt: skip
    rows.append({**rows[0], "spec": "innerq-base", "values": None, "status": "failed: UnsupportedError: a|b <c> " * 9})
    for label, tokens in (("bf16", 797488), ("saw-int4", 3002288)):
        rows.append({"spec": label, "metric": "kv_cache_tokens", "unit": "tokens", "shape": "start", "run": "r",
                     "values": dict.fromkeys(("p20", "p50", "p80"), tokens)})  # fmt: skip
    return rows


def test_the_table_of_steps_has_ratios_to_bf16_and_reasons():
    (grid,) = [t for t in tables(rows_of_steps()) if t.title == "Decode steps at 8,192 tokens"]
    lines = {line[0]: dict(zip(grid.headings, line, strict=True)) for line in grid.lines}
    mine = lines["saw-int4"]
    assert (mine["KV tokens"], mine["ratio"]) == ("3,002,288", "3.76x")
    assert (mine["1 seq. ms"], mine["32 seq. ms"], mine["p20 to p80"]) == ("5.80", "9.25", "8.75 to 9.25")
    assert (mine["of bf16"], mine["tokens/s"]) == ("0.64x", "3,459")
    assert "UnsupportedError" in str(grid)
    (chart,) = charts(rows_of_steps())
    assert {c.label: c.points for c in chart.curves} == {
        "bf16": [(1.0, 6), (32.0, 14.5)], "saw-int4": [(1.0, 5.8), (32.0, 9.25)]
    }  # fmt: skip


def test_docs_show_the_rows(tmp_path):
    gpu = docs.DRAWN_GPU
    assert docs.block(tmp_path, gpu) == docs.EMPTY
    path = tmp_path / docs.RESULTS[gpu]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows_of_steps()))
    text = docs.block(tmp_path, gpu)
    assert "| `saw-int4` | 3,002,288 | 3.76x | 5.80 | 9.25 | 8.75 to 9.25 | 0.64x | 3,459 | – |" in text
    assert "![steps](img/serve-steps.svg)" in text
    reason = next(line for line in text.splitlines() if line.startswith("- `innerq-base`"))
    assert "|" not in reason
    assert "<c>" not in reason
    assert len(reason) < 200
    ElementTree.fromstring(docs.pictures(tmp_path)["serve-steps.svg"])


def test_the_committed_page_is_what_the_committed_rows_say():
    found = {block["name"]: block for block in docs.BLOCK.finditer((ROOT / docs.PAGE).read_text())}
    assert set(found) == {*docs.RESULTS, *docs.CHECKED}
    for name, block in found.items():
        assert block[0] == f"{block[1]}{docs.made(ROOT, name)}{block[3]}", "run scripts/update_serve.py"
    for name, svg in docs.pictures(ROOT).items():
        assert (ROOT / "docs/img" / name).read_text() == svg, "run scripts/update_serve.py"
