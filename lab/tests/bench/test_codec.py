"""Rows of `packedkv bench codec`."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import packedkv
from lab.tests.bench.gpu_stubs import recorder
from packedkv.cli import stamp
from packedkv.errors import ShapeError, SpecError, UnsupportedError
from packedkv_lab.bench import codec as bench
from packedkv_lab.bench import timing
from packedkv_lab.bench.codec import codec_rows
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.rivals import QuantizerRival, quantizer_rivals
from packedkv_lab.bench.shapes import Shape

SHAPE = Shape("b1_h2_d64_t96", 1, 2, 2, 64, 96)
CODEC_METRICS = ["encode_tokens_per_s", "decode_tokens_per_s", "encode_vs_int4", "decode_vs_int4"]


@pytest.fixture(scope="module")
def rows():
    return timed(["int-4", "kivi-2", "hqmq-s24_r3"])


def timed(specs, shape=SHAPE, repeats=2, **options):
    found = recorder(**options)
    codec_rows(specs, shape, found, repeats=repeats)
    return found.new


def test_rows_of_every_spec_and_metric(rows):
    ours = [(r["spec"], r["metric"]) for r in rows if "job" not in r]
    expected = [(s, m) for s in ("int-4", "kivi-2", "hqmq-s24_r3") for m in CODEC_METRICS]
    assert ours == expected
    for row in json.loads(json.dumps(rows)):
        assert row["shape"] == "b1_h2_d64_t96"
        assert 0 < row["values"]["p20"] <= row["values"]["p50"] <= row["values"]["p80"]
        assert row["versions"]["packedkv"] == packedkv.__version__


def test_int4_beside_itself_costs_the_same_on_a_machine_that_slows_down(monkeypatch):
    """Each call takes 1 % longer than the one before; what is timed in turn differs by that alone."""
    now, calls = [0.0], itertools.count()

    def slower(work):
        now[0] += 0.01 * 1.01 ** next(calls)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(bench.CodecWork, "encode", slower)
    monkeypatch.setattr(bench.CodecWork, "decode", slower)
    found = {r["metric"]: r["values"] for r in timed(["int-4"], repeats=9)}
    for job in ("encode", "decode"):
        assert found[f"{job}_vs_int4"] == pytest.approx(dict.fromkeys(found[f"{job}_vs_int4"], 1 / 1.01), rel=1e-3)
    # encode: two calls for the bytes to decode, two to warm up, then nine pairs
    assert found["encode_tokens_per_s"]["p50"] == pytest.approx(96 / (0.01 * 1.01 ** (4 + 2 * 4)), rel=1e-3)


def test_refused_before_anything_is_timed():
    with pytest.raises(SpecError, match="int5"):
        timed(["int5"])
    with pytest.raises(ShapeError, match="32 tokens at once"):
        timed(["kivi-2"], Shape("short", 1, 2, 2, 64, 16))


def test_a_codec_that_needs_queries_is_refused(monkeypatch):
    monkeypatch.setattr(type(packedkv.get("saw-int4").key), "needs", frozenset({"queries"}))
    with pytest.raises(UnsupportedError, match="queries"):
        timed(["saw-int4"])


class Copy:
    """Stands for a library that keeps a float16 copy."""

    name, module, job, missing = "copy-16", "copy", "int-4", False

    def encode(self, x):
        return x.half()

    def decode(self, held):
        return held.float()

    def nbytes(self, held):
        return held.nbytes


def test_a_rival_is_timed_beside_the_preset_whose_job_it_does(monkeypatch):
    monkeypatch.setattr(bench, "quantizer_rivals", lambda dim: [Copy()])
    rows = timed([], libraries=True)
    metrics = [*CODEC_METRICS[:2], "encode_vs_preset", "decode_vs_preset"]
    assert [(r["metric"], r["job"], r["effective_bits"]) for r in rows] == [(m, "int-4", 16.0) for m in metrics]
    assert rows[0]["relative_mse"] < 1e-6


def test_a_rival_that_is_not_installed_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(
        bench, "quantizer_rivals", lambda dim: [QuantizerRival("nobody-4", "nobody_has_this", "int-4", None, None)]
    )
    said = []
    codec_rows([], SHAPE, Recorder(None, {}, said.append))
    assert said == ["nobody-4: nobody_has_this is not installed, left out"]


@pytest.mark.parametrize("rival", quantizer_rivals(64), ids=lambda r: r.name)
def test_rivals_do_the_job_they_are_timed_for(rival):
    if rival.missing:
        pytest.skip(f"{rival.module} is not installed")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    held = rival.encode(x)
    ours, _ = packedkv.fake_quant(rival.job, x[None, None], x[None, None])
    error = float((rival.decode(held).float() - x).square().sum())
    assert 0.5 < error / float((ours[0, 0] - x).square().sum()) < 2
    bits = int(rival.name[-1])
    assert bits <= rival.nbytes(held) * 8 / x.numel() <= bits + 2


# -- values and commit -------------------------------------------------------------------------------------------------


def test_commit_is_none_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "__file__", str(tmp_path / "stamp.py"))
    assert stamp.commit() is None
