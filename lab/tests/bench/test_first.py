"""Rows of ``packedkv bench first`` on a small model: what is timed, what it is compared with."""

import contextlib
import itertools
import json

import pytest

from lab.tests.bench.gpu_stubs import CPU, recorder
from packedkv.cli.main import main
from packedkv.errors import UnsupportedError
from packedkv_lab.bench import first

pytest.importorskip("transformers")
TINY = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return first.make_model("Llama-3.2-1B", CPU, **TINY)


@pytest.fixture(autouse=True)
def _streamed(monkeypatch):
    def packed(runner, spec):
        from packedkv.integrations.transformers import cache_for

        if spec == "fp8":
            raise UnsupportedError("no kernel for it")
        return cache_for(runner.model, spec, attention="streamed")

    monkeypatch.setattr(first.Runner, "packed", packed)


def timed(specs, model, path=None, deadline=None, **options):
    found = recorder(path=path, deadline=deadline)
    options = {"prompts": (16, 64), "first_prompt": 16, "history": 100, "new": (8, 3), "repeats": 3} | options
    first.first_rows(specs, found, model=model, **options)
    return found.new


def test_rows_of_dynamic_cache_and_of_a_preset(model):
    rows = timed(["int-4"], model)
    shapes = [
        ("first_token_ms", "llama_1b_16"), ("first_token_ms", "llama_1b_64"),
        ("next_turn_ms", "llama_1b_100_8"), ("next_turn_ms", "llama_1b_100_3"),
    ]  # fmt: skip
    for form in first.FORMS:
        assert [(r["metric"], r["shape"]) for r in rows if r.get("form") == form] == shapes
    ours = [r for r in rows if r["spec"] == "int-4"]
    assert [(r["metric"], r["shape"]) for r in ours] == [("first_cache_ms", "llama_1b_16"), *shapes]
    assert [r.get("caches") for r in ours] == [None, 3, 3, 3, 3]
    assert ours[1]["paths"] == {"exact": 2}
    assert ours[3]["paths"] == {"exact": 2, "streamed": 2}
    assert all({"vs_dynamic", "beyond_ms", "dynamic_ms"} <= set(r) for r in ours[1:])
    assert json.loads(json.dumps(rows)) == rows


def test_dynamic_cache_takes_turns_with_a_preset(model, monkeypatch):
    """In the form that was faster, so that a preset timed late is not compared with a time of the process's youth."""
    times = {"as torch chooses": [3.0, 4.0], "cuDNN off": [2.0, 5.0]}  # at 16 and at 64 tokens
    asked = []

    def clocked(runner, make, n):
        made = make()
        form = current[0]
        dense = type(made).__name__ == "DynamicCache"
        asked.append((dense, n, form, runner.model.config._attn_implementation))
        return (times[form or "as torch chooses"][n == 64] if dense else 6.0), made

    current = [""]

    @contextlib.contextmanager
    def backends(form):
        before, current[0] = current[0], form
        yield
        current[0] = before

    monkeypatch.setattr(first.Runner, "first", clocked)
    monkeypatch.setattr(first, "attention_backends", backends)
    rows = {r["shape"]: r for r in timed(["int-4"], model, new=(3,)) if r["spec"] == "int-4" and "caches" in r}
    assert [rows["llama_1b_16"][k] for k in ("dynamic_ms", "vs_dynamic", "beyond_ms")] == [2.0, 3.0, 3.0]
    assert [rows["llama_1b_64"][k] for k in ("dynamic_ms", "vs_dynamic", "beyond_ms")] == [4.0, 1.5, 0.0]
    at = asked.index((False, 64, "", "packedkv"))
    assert asked[at - 1 : at + 4] == [(True, 64, "as torch chooses", "sdpa"), (False, 64, "", "packedkv")] * 2 + [
        (True, 64, "as torch chooses", "sdpa")
    ]


def test_the_clock_runs_from_the_making_of_the_cache_to_the_token(model, monkeypatch):
    runner = first.Runner(model, 100)
    ticks = itertools.count()
    monkeypatch.setattr(first.time, "perf_counter", lambda: float(next(ticks)))

    def make():
        next(ticks)
        return runner.dense()

    assert runner.first(make, 5)[0] == 2000.0  # one tick passes while the cache is made
    ms, cache = runner.turn(make, 5)
    assert (ms, cache.get_seq_length()) == (1000.0, 105)  # none of the filling


def test_a_run_goes_on_where_the_last_one_stopped(model, tmp_path):
    path, small = tmp_path / "first.jsonl", {"prompts": (16,), "new": (3,), "repeats": 2}
    timed(["int-4"], model, path, **small)
    again = timed(["int-4", "int-8"], model, path, **small)
    assert {r["spec"] for r in again} == {"dense", "int-8"}
    assert timed(["int-4", "int-8"], model, path, **small) == []
    assert timed(["kivi-2"], model, path, -1.0) == []


def test_the_command_names_the_part(monkeypatch, capsys):
    assert main(["bench", "first"]) == 2
    assert "bench first times kernels on a GPU" in capsys.readouterr().err
    told = []
    monkeypatch.setattr("packedkv_lab.bench.record.require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(first, "first_rows", lambda specs, recorder: told.append(specs))
    assert main(["bench", "first", "--device", "cuda", "--specs", "int-4,kivi-2"]) == 0
    assert main(["bench", "first", "--device", "cuda"]) == 0
    assert told == [["int-4", "kivi-2"], first.served()]
