"""Rows of `packedkv bench cache`: what is timed, beside what, what is refused before."""

import json

import pytest
import torch

import packedkv
from lab.tests.bench.gpu_stubs import recorder
from packedkv.cache.layer import LayerCache
from packedkv.cli.main import main
from packedkv.errors import KVError
from packedkv_lab.bench.cache import append_block, cache_rows
from packedkv_lab.bench.shapes import Shape

SHAPE = Shape("b2_hq2_h1_d64_t192", 2, 2, 1, 64, 192)
CACHE_METRICS = ["encode_us", "decode_us", "attend_us", "speedup_vs_sdpa", "append_us"]


@pytest.fixture(scope="module")
def cached():
    return timed(["dense", "int-4", "kivi-2"])


def timed(specs, shape=SHAPE, **options):
    found = recorder()
    cache_rows(specs, shape, found, repeats=2, **options)
    return found.new


def test_one_row_per_spec_and_metric_behind_the_baseline(cached):
    expected = [("sdpa", "attend_us")] + [(s, m) for s in ("dense", "int-4", "kivi-2") for m in CACHE_METRICS]
    assert [(r["spec"], r["metric"]) for r in cached] == expected


def test_rows_are_json_with_everything_needed_to_repeat_them(cached):
    for row in json.loads(json.dumps(cached)):
        assert row["shape"] == "b2_hq2_h1_d64_t192"
        assert (row["dtype"], row["seed"], row["repeats"]) == ("float32", 0, 2)
        assert row["versions"]["torch"] == torch.__version__
        assert row["versions"]["packedkv"] == packedkv.__version__
        assert row["gpu"].startswith("cpu")
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
    first, *rest = timed(["saw-int4"], dtype=dtype)
    assert (first["effective_bits"], first["dtype"]) == (16, dtype)
    assert len(rest) == len(CACHE_METRICS)


def test_append_is_timed_over_a_whole_block_so_that_a_group_is_encoded_in_it():
    k = torch.randn(1, 1, 160, 64)
    for spec, unit in (("int-4", 1), ("kivi-2", 32), ("kivi-2:group=16", 16)):
        cache = LayerCache(packedkv.get(spec))
        cache.append(k, k)
        before = cache.roles["key"].encoded
        append_block(cache, k, k)
        assert len(cache) == 160 + unit
        assert cache.roles["key"].encoded == before + unit


def test_a_cache_that_attends_wrongly_is_not_timed(monkeypatch):
    monkeypatch.setattr(LayerCache, "attend", lambda self, q: torch.zeros_like(q))
    with pytest.raises(KVError, match=r"attention of int-4 differs from SDPA .* times of a wrong result mean nothing"):
        timed(["int-4"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query-heads", "3", "--kv-heads", "2"], "3 query heads are no multiple of 2"),
        (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
        (["--head-dim", "20"], "head_dim=20 is not a multiple of 8"),
    ],
)
def test_what_cannot_be_timed_is_refused(capsys, arguments, message):
    assert main(["bench", "cache", "--specs", "int-4", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(monkeypatch, capsys):
    """Options may stand before the bench's name or behind it, and without a name the bench is ``cache``."""
    sizes = ["--tokens", "64", "--kv-heads", "1", "--query-heads", "2", "--repeats", "1", "--json", "-"]
    assert main(["bench", *sizes, "--specs", "int-4"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert {row["shape"] for row in whole} == {"b1_hq2_h1_d128_t64"}

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerCache, "decode", interrupted)
    assert main(["bench", *sizes, "cache", "--specs", "int-4"]) == 130
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["spec"], row["partial"], row["shape"]) == ("sdpa", True, whole[0]["shape"])
