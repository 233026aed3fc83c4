"""benchmarks/beside.py on the CPU: shapes, rows of a worker, turns of two checkouts and the table."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.bench.gpu_stubs import Clock
from packedkv.cache.layer import LayerCache
from packedkv_lab.bench.shapes import Shape

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Fused(LayerCache):
    """A fused cache served by the reference."""

    def __init__(self, *args: Any, capacity: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)

    def kernels(self) -> dict[str, str]:
        return {"decode": "reference"}


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("beside")
    monkeypatch.setattr(module, "FusedLayerCache", Fused)
    monkeypatch.setattr(module, "refusal", lambda *_, **__: "")
    return module


def test_a_worker_times_every_spec_beside_bf16(beside, monkeypatch):
    from packedkv_lab.bench import timing

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
