"""benchmarks/drift.py and beside.py on the CPU: distinct tokens, how a one-sided error looks, turns and tables."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcodec
from kvcodec.cache.host import LayerCache
from kvcodec.cli.stamp import stamp
from kvcodec.errors import UnsupportedError
from kvcodec_lab.bench.record import Recorder
from kvcodec_lab.bench.shapes import GROUPS, Shape, shapes_named
from lab.tests.bench.gpu_stubs import CPU, Clock

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # beside.py imports drift.py
    spec.loader.exec_module(module)
    return module


load("checkout")
drift = load("drift")
beside = load("beside")
HEADS = drift.Heads(4, 2, 64)


class Fused(LayerCache):
    """What the scripts need of a fused cache, served by the reference; ``shift`` is added to what it attends to."""

    shift = 0.0

    def __init__(self, *args: Any, capacity: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)

    def kernels(self) -> dict[str, str]:
        return {"decode": "reference"}

    def attend(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().attend(q, **options) + self.shift


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setattr(drift, "FusedLayerCache", Fused)
    monkeypatch.setattr(drift, "fused_refusal", lambda *_: "")


def rows(specs, path=None, **options):
    recorder = Recorder(path, stamp(CPU, 0), lambda _: None)
    options = {"tokens": [300], "batches": [1, 3]} | options
    return list(drift.rows_of(specs, recorder, device=CPU, heads=HEADS, **options))


@pytest.mark.parametrize("spec", ["int-8", "kivi-sink-2", "innerq-base", "ultraquant", "octopus-qjl-3"])
def test_what_is_right_passes(spec, monkeypatch):
    monkeypatch.setattr(drift, "CHUNK_TOKENS", 128)  # several calls to encode and to decode
    found = rows([spec])
    assert [(r["shape"], r["metric"]) for r in found] == [
        (f"drift_b{batch}_300", f"drift_{kind}") for batch in (1, 3) for kind in ("diffuse", "plain", "sharp")
    ]
    assert all(r["passed"] for r in found)
    assert all(r["values"]["p50"] == pytest.approx(r["error"] / r["bf16_error"], rel=1e-2) for r in found)


def test_tokens_are_distinct_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(drift, "CHUNK_TOKENS", 128)
    cache = drift.filled("int-8", 3, 300, HEADS, CPU, 0)
    whole = cache.decode()
    chosen = drift.units(3, 2)
    assert chosen == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]
    for (b, h), both in zip(chosen, drift.decoded(cache, chosen), strict=True):
        for x, of in zip(both, whole, strict=True):
            torch.testing.assert_close(x, of[b, h].float(), rtol=8e-3, atol=1e-3)
    rows = torch.cat([whole[0].flatten(0, 2), whole[1].flatten(0, 2)])
    assert len(rows.unique(dim=0)) == len(rows) == 2 * 3 * 2 * 300
    assert len(drift.filled("int-8", 3, 300, HEADS, CPU, 0, most=64)) == 64


def test_a_one_sided_error_shows_where_attention_is_diffuse(monkeypatch):
    monkeypatch.setattr(Fused, "shift", 6e-4)
    found = {r["metric"]: r for r in rows(["int-8"], batches=[1])}
    assert not found["drift_diffuse"]["passed"]
    assert found["drift_diffuse"]["bias"] > 0.9
    assert found["drift_sharp"]["passed"]
    text = drift.table(list(found.values()))
    assert text.splitlines()[0].startswith("FAILED int-8")
    assert "drift_diffuse" in text.splitlines()[0]
    nan = drift.Found(float("nan"), 1e-3, 0.0)
    assert not nan.passed


def test_a_cell_that_fails_is_a_row_and_is_tried_again(monkeypatch, tmp_path):
    true, path = drift.filled, tmp_path / "drift.0.jsonl"

    def filled(spec, batch, *rest):
        if batch == 3:
            raise torch.OutOfMemoryError("not enough")
        if spec == "kivi-2":
            raise UnsupportedError("nobody")
        return true(spec, batch, *rest)

    monkeypatch.setattr(drift, "filled", filled)
    found = rows(["int-8", "kivi-2"], path, batches=[3, 1])
    assert [r["status"].split(":")[0] for r in found if r["values"] is None] == [
        "too large for this GPU's memory", "too large for this GPU's memory", "no kernel",
    ]  # fmt: skip
    monkeypatch.setattr(drift, "filled", true)
    again = rows(["int-8"], path, batches=[3, 1])
    assert {r["shape"] for r in again} == {"drift_b3_300"}
    kept = drift.latest(tmp_path, [0, 1])
    assert len([r for r in kept if r["spec"] == "int-8"]) == 6
    assert [r["shape"] for r in kept if r["values"] is None] == ["drift_b3_300", "drift_b1_300"]
    assert "kivi-2 drift_b1_300: no kernel" in drift.table(kept)


def test_what_did_not_fit_beside_others_is_measured_alone(monkeypatch, tmp_path):
    told = []

    def process(command, check):
        worker, specs = command[command.index("--worker") + 1], command[command.index("--specs") + 1]
        early = (worker, specs) not in told
        status = "too large for this GPU's memory" if early and worker == "1" else None
        told.append((worker, specs))
        row = {"spec": specs, "shape": "s", "metric": "drift", "values": None if status else {"p50": 1.0}}
        with (tmp_path / f"drift.{worker}.jsonl").open("a") as file:
            file.write(json.dumps(row | ({"status": status} if status else {"passed": True})) + "\n")
        return type("Done", (), {"returncode": drift.DEVICE_LOST if early and worker == "0" else 0})

    monkeypatch.setattr(drift.subprocess, "run", process)
    args = type("Args", (), {"out": tmp_path, "workers": 2, "deadline": 60.0})
    drift.shared_out(["int-4", "int-8"], args, [])
    assert sorted(told) == [("0", "int-4")] * 2 + [("1", "int-8")] * 2
    assert [r["values"] for r in drift.latest(tmp_path, [0, 1])] == [{"p50": 1.0}] * 2


def test_every_preset_with_kernels_is_measured(monkeypatch):
    monkeypatch.setattr(drift, "fused_refusal", lambda scheme, *_: "no" if "polarquant" in str(scheme) else "")
    found = drift.served(CPU)
    assert "saw-int4" in found
    assert not {"dense", "polarquant-4"} & set(found)
    assert set(found) < set(kvcodec.presets())


# -- two checkouts -----------------------------------------------------------------------------------------------------


def test_shapes_of_the_corners():
    names = [s.name for s in GROUPS["corners"]]
    assert names == [
        "b128_1k", "b64_2k", "llama8b_b1_4096", "one_kv_head_b2_8k", "d64_b4_32k", "d96_b4_8k", "d256_b16_16k",
        "d512_b8_32k",
    ]  # fmt: skip
    assert [Shape(*sizes) for sizes in json.loads(beside.described(GROUPS["corners"]))] == list(GROUPS["corners"])
    assert len(shapes_named("spine,corners")) == 12


def test_a_worker_times_every_spec_beside_bf16(monkeypatch):
    from kvcodec_lab.bench import timing

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


def test_the_rival_is_the_fastest_that_attends(monkeypatch):
    monkeypatch.setattr(beside, "DEVICE", "cpu")

    def rivals(dense):
        yield beside_rival("wrong", dense.expected * 2)
        yield beside_rival("slow", dense.expected)
        yield beside_rival("fast", dense.expected)

    def beside_rival(name, answer):

        from kvcodec_lab.bench.attention_rivals import AttentionRival

        return AttentionRival(name, "form", 16.0, lambda: lambda: answer)

    clock = Clock()
    clock.next_times = [300.0, 100.0, 200.0, 150.0]
    monkeypatch.setattr(beside, "torch_rivals", rivals)
    monkeypatch.setattr(beside, "library_rivals", lambda dense: iter([]))
    found = beside.rival(Shape("tiny", 2, 4, 2, 64, 100), clock)
    assert found == {"cold": (200.0, "fast, form"), "warm": (100.0, "slow, form")}


def test_the_table_has_ratios_of_medians_and_names_what_is_slower():
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


def test_processes_take_turns_there_and_back():
    assert beside.rounds(3, ["this", "other"]) == ["this", "other", "other", "this", "this", "other"]
