"""Rows of `packedkv bench cache`: what is timed, beside what, what is refused before."""

import json

import pytest
import torch

import packedkv
from packedkv.cache.host import LayerCache
from packedkv.errors import KVError, ShapeError, SpecError, UnsupportedError
from packedkv_lab.bench.cache import CacheWork, cache_rows

CACHE = {"batch": 2, "kv_heads": 1, "query_heads": 2, "head_dim": 64, "tokens": 192, "repeats": 2}
CACHE_METRICS = ["encode_us", "decode_us", "attend_us", "speedup_vs_sdpa", "append_us"]


@pytest.fixture(scope="module")
def cached():
    return list(cache_rows(["dense", "int-4", "kivi-2"], **CACHE, seed=3))


def test_one_row_per_spec_and_metric_behind_the_baseline(cached):
    expected = [("sdpa", "attend_us")] + [(s, m) for s in ("dense", "int-4", "kivi-2") for m in CACHE_METRICS]
    assert [(r["spec"], r["metric"]) for r in cached] == expected


def test_rows_are_json_with_everything_needed_to_repeat_them(cached):
    for row in json.loads(json.dumps(cached)):
        assert row["shape"] == "b2_hq2_h1_d64_t192"
        assert (row["dtype"], row["seed"], row["repeats"]) == ("float32", 3, 2)
        assert row["versions"]["torch"] == torch.__version__
        assert row["versions"]["packedkv"] == packedkv.__version__
        assert row["device"].startswith("cpu")
        assert row["unit"] == ("x" if row["metric"] == "speedup_vs_sdpa" else "us")
        assert row["path"] == ("torch" if row["spec"] == "sdpa" else "reference")
        assert 0 < row["values"]["p20"] <= row["values"]["p50"] <= row["values"]["p80"]


def test_effective_bits_are_the_bytes_the_cache_holds(cached):
    k = torch.randn(2, 1, 192, 64)
    for spec in ("dense", "int-4", "kivi-2"):
        cache = LayerCache(packedkv.get(spec))
        cache.append(k, k)
        held = sum(t.untyped_storage().nbytes() for t in cache.tensors())
        bits = {r["effective_bits"] for r in cached if r["spec"] == spec}
        assert bits == {held * 8 / (2 * k.numel())}
    assert cached[0]["effective_bits"] == 32  # float32 K and V


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_models(dtype):
    first, *rest = cache_rows(["saw-int4"], **CACHE, dtype=dtype)
    assert (first["effective_bits"], first["dtype"]) == (16, dtype)
    assert len(rest) == len(CACHE_METRICS)


def test_rows_come_as_they_are_measured_and_progress_is_told():
    said: list[str] = []
    rows = cache_rows(["int-4", "fp8"], **CACHE, progress=said.append)
    assert said == []
    assert next(rows)["spec"] == "sdpa"
    assert next(rows)["spec"] == "int-4"
    assert said == ["sdpa (float32)", "int-4 (1 of 2)"]


def test_append_is_timed_over_a_whole_block_so_that_a_group_is_encoded_in_it():
    k = torch.randn(1, 1, 160, 64)
    for spec, unit in (("int-4", 1), ("kivi-2", 32), ("kivi-2:group=16", 16)):
        cache = LayerCache(packedkv.get(spec))
        cache.append(k, k)
        before = cache.roles["key"].encoded
        CacheWork(spec, cache, k[:, :, :1], k, k).append_block()
        assert len(cache) == 160 + unit
        assert cache.roles["key"].encoded == before + unit


def test_a_cache_that_attends_wrongly_is_not_timed(monkeypatch):
    monkeypatch.setattr(LayerCache, "attend", lambda self, q: torch.zeros_like(q))
    with pytest.raises(KVError, match=r"attention of int-4 differs from SDPA .* times of a wrong result mean nothing"):
        list(cache_rows(["int-4"], **CACHE))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tokens": 0}, ShapeError, "tokens=0; expected a number >= 1"),
        ({"query_heads": 3, "kv_heads": 2}, ShapeError, "query_heads=3 is not a multiple of kv_heads=2"),
        ({"dtype": "int8"}, SpecError, "dtype='int8' is not allowed; use float32, float16, bfloat16"),
        ({"device": "nowhere"}, UnsupportedError, "device 'nowhere' cannot be used here .*; try device='cpu'"),
        ({"head_dim": 20}, ShapeError, "head_dim=20 is not a multiple of 8"),
    ],
)
def test_what_cannot_be_timed_is_refused_at_once(changed, error, message):
    with pytest.raises(error, match=message):
        cache_rows(["int-4"], **(CACHE | changed))


def test_an_unknown_spec_is_refused_before_the_known_ones_are_timed():
    with pytest.raises(SpecError, match="unknown codec 'int4'"):
        cache_rows(["dense", "int4"], **CACHE)
