"""Rows of ``packedkv bench decode``: what is timed beside what, what is not timed and says why, and going on."""

import json

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, Clock, recorder, use_reference
from packedkv.cli.page.rows import read_rows
from packedkv.errors import UnsupportedError
from packedkv_lab.bench import decode, packed, record
from packedkv_lab.bench.decode import decode_rows
from packedkv_lab.bench.packed import Gate
from packedkv_lab.bench.record import DeviceLostError, Recorder, newest, status_of
from packedkv_lab.bench.rivals import AttentionRival, Dense
from packedkv_lab.bench.shapes import Shape, sweep
from packedkv_lab.bench.timing import ratio

TINY = Shape("tiny", 2, 4, 2, 64, 100)
METRICS = {
    "attention_error", "decode_us_cold", "decode_us_clean", "decode_us_warm", "roofline_us", "roofline_share_cold",
    "speedup_vs_bf16_cold", "speedup_vs_bf16_clean", "speedup_vs_bf16_warm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    use_reference(monkeypatch)


def run(specs, clock=None, path=None, shapes=(TINY,), **options):
    found = recorder(clock, path, **options)
    decode_rows(specs, shapes, found)
    return found.new


def test_rows_of_a_preset_and_of_its_rivals():
    rows = run(["int-8"])
    assert {r["metric"] for r in rows if r["spec"] == "int-8"} == METRICS
    dense = [r for r in rows if r["spec"] == "dense"]
    assert {(r["backend"], r["form"]) for r in dense} == {("cudnn", "group as query rows"), ("cudnn", "enable_gqa")}
    assert dense[-1]["metric"] == "decode_us_cold_again"
    for row in json.loads(json.dumps(rows)):
        assert {"spec", "effective_bits", "metric", "unit", "values", "shape", "gpu", "versions", "commit", "seed"} <= {
            *row
        }
        assert row["commit"] == "abc"
        assert row["sizes"] == TINY.sizes()


def test_speedup_is_over_the_fastest_form_of_the_same_state():
    clock = Clock()
    # two forms, cold clean warm each; then the preset's three
    clock.next_times = [300.0, 90.0, 50.0, 200.0, 120.0, 70.0, 100.0, 30.0, 25.0]
    rows = {r["metric"]: r for r in run(["int-8"], clock) if r["spec"] == "int-8"}
    found = {state: rows[f"speedup_vs_bf16_{state}"] for state in ("cold", "clean", "warm")}
    assert {s: r["values"]["p50"] for s, r in found.items()} == {"cold": 2.0, "clean": 3.0, "warm": 2.0}
    assert (found["cold"]["form"], found["clean"]["form"]) == ("enable_gqa", "group as query rows")
    assert found["cold"]["values"] == ratio(200.0, {"p20": 90.0, "p50": 100.0, "p80": 120.0})


def test_what_fails_its_gate_is_reported_and_not_timed(monkeypatch):
    monkeypatch.setattr(decode, "gate", lambda _: Gate(0.5, 0.001))
    rows = [r for r in run(["int-8"]) if r["spec"] == "int-8"]
    assert [(r["metric"], r["values"]) for r in rows] == [("decode_us_cold", None)]
    assert rows[0]["status"] == "failed its gate: attention error 5.00e-01, bf16 SDPA over the decoded K and V 1.00e-03"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("nothing reads it"), "no kernel: nothing reads it"),
        (RuntimeError("boom"), "failed: RuntimeError: boom"),
    ],
)
def test_what_has_no_kernel_or_breaks_says_so_and_the_others_are_timed(monkeypatch, error, status):
    true = packed.packed_operator

    def operator(spec, *rest):
        if spec == "int-4":
            raise error
        return true(spec, *rest)

    monkeypatch.setattr(decode, "packed_operator", operator)
    rows = run(["int-4", "int-8"])
    assert [r["status"] for r in rows if r["spec"] == "int-4"] == [status]
    assert {r["metric"] for r in rows if r["spec"] == "int-8"} == METRICS


def test_a_lost_device_ends_the_run_behind_its_row(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "device_lost", lambda _: True)
    monkeypatch.setattr(decode, "gate", lambda _: (_ for _ in ()).throw(RuntimeError("illegal address")))
    path = tmp_path / "decode.jsonl"
    with pytest.raises(DeviceLostError, match="int-8 at tiny broke the CUDA context"):
        run(["int-8"], path=path)
    assert read_rows([path])[-1]["status"] == "device lost: RuntimeError: illegal address"
    assert run(["int-8"], path=path) == []  # the next process leaves that case out


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path):
    path = tmp_path / "decode.jsonl"
    run(["int-8"], path=path)
    with path.open("a") as file:
        file.write('{"spec": "int-4", "met')  # killed in the middle of a line
    clock = Clock()
    rows = run(["int-8", "int-4"], clock, path=path)
    assert {r["spec"] for r in rows} == {"dense", "int-4"}
    assert run(["int-8", "int-4"], path=path) == []
    held = read_rows([path])
    assert len([r for r in held if (r["spec"], r["metric"]) == ("dense", "decode_us_cold_again")]) == 2
    assert {r["spec"] for r in newest(held)} == {"dense", "int-8", "int-4"}


def test_nothing_begins_behind_the_deadline():
    assert run(["int-8"], deadline=-1.0) == []
    assert not recorder().out_of_time


def test_the_sweep_is_timed_cold_only():
    clock = Clock()
    rows = run(["int-8"], clock, shapes=[sweep(1)[0]])
    assert {r["metric"] for r in rows if "decode_us" in r["metric"]} == {"decode_us_cold", "decode_us_cold_again"}


def test_libraries_that_are_missing_say_so(monkeypatch):
    def compile_nothing(*_, **__):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(decode, "SPINE", (TINY,))
    rows = run(["int-8"], libraries=True)
    found = {(r["backend"], r["form"]): r.get("status") for r in rows if r["spec"].startswith("dense")}
    assert found["flashinfer", "paged decode"] == found["flash-attention-3", "contiguous, fp8"] == "not installed"
    assert found["flex", "flex_attention, compiled"] == "failed: RuntimeError: no compiler"
    assert status_of(ImportError("libfoo.so")) == "not available: ImportError: libfoo.so"


@pytest.mark.parametrize(
    ("bits", "error", "spec", "refused"),
    [
        (16.0, 0.05, "dense", True),
        (8.0, 0.05, "dense-fp8", False),
        (4.25, 0.3, "rival", False),
        (4.25, 1.0, "rival", True),
    ],
)
def test_a_rival_that_computes_something_else_is_none(monkeypatch, bits, error, spec, refused):
    true = decode.torch_rivals

    def rivals(dense):
        wrong = dense.expected * (1 + error)
        yield from true(dense)
        yield AttentionRival("other", "paged", bits, lambda: lambda: wrong)

    monkeypatch.setattr(decode, "torch_rivals", rivals)
    rows = [r for r in run(["int-8"]) if r.get("backend") == "other"]
    assert {r["spec"] for r in rows} == {spec}
    assert rows[0]["error"] == pytest.approx(error, abs=1e-4)
    if refused:
        assert [r["status"] for r in rows] == [
            f"failed its gate: its output differs from 16-bit attention by {error:.2g}"
        ]
    else:
        assert [r["metric"] for r in rows] == ["decode_us_cold", "decode_us_clean", "decode_us_warm"]


def test_a_quantized_rival_is_no_bar(monkeypatch):
    true = decode.torch_rivals

    def rivals(dense):
        yield from true(dense)
        yield AttentionRival("vllm", "fast", 4.25, lambda: lambda: dense.expected)

    monkeypatch.setattr(decode, "torch_rivals", rivals)
    clock = Clock()
    clock.next_times = [300.0] * 6 + [1.0] * 3 + [100.0] * 3
    rows = run(["int-8"], clock)
    found = next(r for r in rows if r["metric"] == "speedup_vs_bf16_cold")
    assert (found["values"]["p50"], found["backend"]) == (3.0, "cudnn")
    assert [r["spec"] for r in rows if r.get("backend") == "vllm"] == ["rival"] * 3


def test_a_rival_that_breaks_the_device_is_left_out_by_the_next_process(monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("illegal address")

    true, path = decode.torch_rivals, tmp_path / "decode.jsonl"

    def rivals(dense):
        yield AttentionRival("vllm", "fast", 4.25, broken)
        yield from true(dense)

    monkeypatch.setattr(decode, "torch_rivals", rivals)
    monkeypatch.setattr(record, "device_lost", lambda _: True)
    with pytest.raises(DeviceLostError, match="fast at tiny broke the CUDA context"):
        run(["int-8"], path=path)
    monkeypatch.setattr(record, "device_lost", lambda _: False)
    rows = run(["int-8"], path=path)
    assert {r["spec"] for r in rows} == {"dense", "int-8"}


@pytest.mark.parametrize("heads_first", [True, False])
def test_pages_for_libraries_hold_every_token(heads_first):
    dense = Dense(TINY, CPU)
    k, v, table = dense.paged(heads_first)
    for pool, x in ((k, dense.k), (v, dense.v)):
        pages = pool[table.long()]  # [B, M, ...]
        pages = pages if heads_first else pages.transpose(2, 3)
        tokens = pages.permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :100]
        assert torch.equal(tokens, x)
    assert sorted(table.flatten().tolist()) == list(range(14))


def test_without_16_bit_attention_nothing_is_compared(monkeypatch):
    def broken():
        raise RuntimeError("no backend")

    monkeypatch.setattr(decode, "torch_rivals", lambda _: iter([AttentionRival("cudnn", "x", 16.0, broken)]))
    rows = run(["int-8"])
    assert [(r["spec"], r["status"]) for r in rows] == [("dense", "failed: RuntimeError: no backend")]


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_a_row_without_values_needs_a_reason():
    recorder = Recorder(None, {}, lambda _: None)
    with pytest.raises(ValueError, match="neither values nor a status"):
        recorder.add("int-4", 4.0, "decode_us_cold", "us", "tiny", None)


def test_the_newest_measured_row_counts():
    base = {"spec": "a", "metric": "m", "shape": "s"}
    old, new = ({**base, "values": {"p50": x}, "run": run} for x, run in ((1, "2026-01-01"), (2, "2026-01-02")))
    refused = {**base, "values": None, "status": "failed", "run": "2026-01-03"}
    assert newest([new, old, refused]) == newest([refused, old, new]) == [new]
    assert newest([refused]) == [refused]
    small = {**old, "shared_memory_kb": 100}  # on a GPU that was told of less memory
    assert newest([new, small]) == [new, small]


def test_a_ratio_is_one_whatever_it_is_over_and_each_rival_is_one():
    base = {"spec": "int-4", "metric": "speedup_vs_bf16_cold", "shape": "s"}
    rows = [
        {**base, "values": {"p50": gain}, "backend": "cudnn", "form": form, "run": f"2026-01-0{day}"}
        for day, gain, form in ((2, 2.9, "enable_gqa"), (1, 2.1, "group as query rows"))
    ]
    assert newest(rows) == newest(rows[::-1]) == rows[:1]
    rivals = [{**row, "spec": "dense", "metric": "decode_us_cold"} for row in rows]
    assert newest(rivals) == rivals
