"""``packedkv bench decode --device cpu``: rows, their ratios, and refusals; times are invented."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cache.layer import LayerCache, attend
from packedkv.cli.main import main
from packedkv.errors import KVError, UnsupportedError
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library
from packedkv_lab.bench import cpu_decode
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.rivals import CpuRival
from packedkv_lab.bench.shapes import Shape

SHAPE = Shape("tiny", 1, 4, 2, 64, 300)
SECONDS = {"sdpa": 8e-3, "sdpa bfloat16": 9e-3, "two-matmuls": 4e-3, "two-matmuls-kt": 2e-3, "int-4": 1e-3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sources.compile_missing()
    monkeypatch.setattr(cpu_decode, "ENCODED", 128)
    monkeypatch.setattr(cpu_decode, "READ_BYTES", 1 << 20)

    def timed(jobs: Any, device: Any, repeats: int) -> list[list[float]]:
        for job in jobs:
            job()
        return [[x] * repeats for x in (*SECONDS.values(), 1e-3)]

    monkeypatch.setattr(cpu_decode, "in_turn", timed)
    monkeypatch.setattr(cpu_decode, "cpu_rivals", list)


def timed(*specs: str, say: Any = print, **options: Any) -> list[dict[str, Any]]:
    recorder = Recorder(None, {}, say, **options)
    cpu_decode.cpu_decode_rows(specs, SHAPE, recorder, repeats=3)
    return recorder.new


def test_rows_have_times_and_speed_ups() -> None:
    rows = timed("int-4")
    found = {(r["spec"], r["dtype"], r["metric"]): r["values"]["p50"] for r in rows}
    assert found["int-4", "float32", "attend_us"] == pytest.approx(1000)
    assert found["int-4", "float32", "speedup_vs_sdpa"] == pytest.approx(8)
    assert found["int-4", "float32", "speedup_vs_two_matmuls"] == pytest.approx(2)
    assert found["sdpa", "bfloat16", "speedup_vs_sdpa"] == pytest.approx(8 / 9, abs=1e-3)
    read = 2 * 2 * 300 * 64 * 4 / 8e-3 / ((1 << 20) / 1e-3)
    assert found["sdpa", "float32", "read_share"] == pytest.approx(read, rel=1e-3)
    assert {r["path"] for r in rows if r["spec"] == "int-4"} == {library.variant()}


def test_rivals_that_are_missing_fail_or_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is there, one is not installed, one cannot start; a wrong one ends the bench."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), k.nbytes

    def fails(*_: Tensor) -> Any:
        raise RuntimeError("no compiler\nand more")

    rivals = [
        CpuRival("there", "torch", "torch", 1e-4, sdpa),
        CpuRival("absent", "absent-package", "no_such_module", 1e-4, sdpa),
        CpuRival("failing", "torch", "torch", 1e-4, fails),
    ]
    monkeypatch.setattr(cpu_decode, "cpu_rivals", lambda: rivals)
    monkeypatch.setitem(SECONDS, "there", 2e-3)
    said: list[str] = []
    rows = timed("int-4", say=said.append)
    there = {r["metric"]: r for r in rows if r["spec"] == "there"}
    assert there["attend_us"]["values"]["p50"] == pytest.approx(2000)
    assert there["attend_us"]["effective_bits"] == 16
    assert there["attend_us"]["path"] == "torch"
    assert "absent: absent-package is not installed, left out" in said
    assert "failing: failed: RuntimeError: no compiler, left out" in said
    assert not {"absent", "failing"} & {r["spec"] for r in rows}
    monkeypatch.delitem(SECONDS, "there")
    rows = timed("int-4", libraries=False)
    assert "there" not in {r["spec"] for r in rows}
    rivals[0] = CpuRival("wrong", "torch", "torch", 1e-4, lambda q, k, v: (lambda: torch.ones_like(q), 8))
    with pytest.raises(KVError, match="wrong differs from SDPA"):
        timed("int-4")


def test_repeated_bytes_are_a_cache() -> None:
    """300 tokens, of which 128 were encoded: as if the others had come with the same numbers."""
    k, v = torch.randn(2, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    cache = cpu_decode._filled("int-4", k, v, 300)
    plain = LayerCache(cache.scheme)
    again = [torch.cat([x[:, :, :128], x[:, :, :128], x[:, :, :44]], 2) for x in (k, v)]
    plain.append(*again)
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    assert len(cache) == 300
    assert float((cache.attend(q) - attend(q, plain)).abs().max()) < 1e-5


@pytest.mark.parametrize("spec", ["saw-int4:mean=pre", "ghost-3"])
def test_keys_without_their_mean(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes repeat, positions go on: keys are those of 640 tokens again and again, their mean at their own places."""
    monkeypatch.setattr(cpu_decode, "ENCODED", 640)
    k, v = torch.randn(2, 1, 2, 1300, 64, generator=torch.Generator().manual_seed(0))
    cache = cpu_decode._filled(spec, k, v, 1300)
    assert (len(cache), cache.unfused(), len(cache.positions)) == (1300, "", 1300)
    assert cache.site.mean is not None
    assert cache.mean is not None
    rest = cache.decode()[0] - cache.site.mean.at(cache.mean, torch.arange(1300)[None])
    sink = cache.scheme.sink
    # the first ones were rounded to 16 bit with their mean; other tokens differ by 1.1
    assert float((rest[:, :, sink:640] - rest[:, :, 640 + sink : 1280]).abs().mean()) < 0.05
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1))
    assert float((cache.attend(q) - attend(q, cache)).abs().max()) < 1e-4


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="no CPU kernel reads E8"):
        timed("e8-2")
    monkeypatch.setattr(cpu_decode, "attend", lambda q, cache: torch.ones_like(q))
    with pytest.raises(KVError, match="differs from the reference"):
        timed("int-4")
    monkeypatch.setattr(library, "chosen", lambda: sources.HERE / "missing.so")
    with pytest.raises(UnsupportedError, match="bench decode: the CPU kernels are not compiled"):
        timed("int-4")


def test_the_command_writes_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--kv-heads=2", "--query-heads=4", "--head-dim=64", "--tokens=300"]
    assert main(["bench", "decode", "--specs", "int-4", *sizes, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["metric"] for r in rows} >= {"attend_us", "speedup_vs_two_matmuls"}
