"""Rows of `kvcodec bench cache` and `bench codec`: what is timed, beside what, what is refused before.

The exhaustive searches find the codes of the codecs.
"""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import kvcodec
from kvcodec.cache.host import LayerCache
from kvcodec.codec import Site
from kvcodec.errors import KVError, ShapeError, SpecError, UnsupportedError
from kvcodec.ops.bitpack import unpack
from kvcodec.ops.split_words import unpack_split
from kvcodec_lab import stamp
from kvcodec_lab.bench import cpu
from kvcodec_lab.bench.cpu import cache_rows, codec_rows
from kvcodec_lab.bench.exhaustive import exhaustive
from kvcodec_lab.bench.quantizer_rivals import QuantizerRival, quantizer_rivals
from kvcodec_lab.bench.record import spread

# -- bench cache -------------------------------------------------------------------------------------------------------

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
        assert row["versions"]["kvcodec"] == kvcodec.__version__
        assert row["device"].startswith("cpu")
        assert row["unit"] == ("x" if row["metric"] == "speedup_vs_sdpa" else "us")
        assert row["path"] == ("torch" if row["spec"] == "sdpa" else "reference")
        assert 0 < row["values"]["p20"] <= row["values"]["p50"] <= row["values"]["p80"]


def test_effective_bits_are_the_bytes_the_cache_holds(cached):
    k = torch.randn(2, 1, 192, 64)
    for spec in ("dense", "int-4", "kivi-2"):
        cache = LayerCache(kvcodec.get(spec))
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
        cache = LayerCache(kvcodec.get(spec))
        cache.append(k, k)
        before = cache.roles["key"].encoded
        cpu.CacheWork(spec, cache, k[:, :, :1], k, k).append_block()
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


# -- bench codec -------------------------------------------------------------------------------------------------------

CODEC = {"kv_heads": 2, "head_dim": 64, "tokens": 96, "repeats": 2}
CODEC_METRICS = ["encode_tokens_per_s", "decode_tokens_per_s", "encode_vs_int4", "decode_vs_int4"]


@pytest.fixture(scope="module")
def rows():
    return list(codec_rows(["int-4", "kivi-2", "hqmq-s24_r3"], **CODEC, seed=1))


def test_rows_of_every_spec_and_metric(rows):
    ours = [(r["spec"], r["metric"]) for r in rows if "job" not in r]
    expected = [(s, m) for s in ("int-4", "kivi-2", "hqmq-s24_r3") for m in CODEC_METRICS]
    assert ours == [*expected, ("hqmq-s24_r3", "exhaustive_vs_encode")]
    for row in json.loads(json.dumps(rows)):
        assert row["shape"] == "b1_h2_d64_t96"
        assert 0 < row["values"]["p20"] <= row["values"]["p50"] <= row["values"]["p80"]
        assert row["versions"]["kvcodec"] == kvcodec.__version__


def test_true_bits_and_codewords(rows):
    found = {r["spec"]: r for r in rows if r["metric"] in ("encode_vs_int4", "exhaustive_vs_encode")}
    assert found["kivi-2"]["effective_bits"] == kvcodec.get("kivi-2").effective_bits(64)
    assert found["hqmq-s24_r3"]["codewords"] == 576


def test_int4_beside_itself_costs_the_same_on_a_machine_that_slows_down(monkeypatch):
    """Each call takes 1 % longer than the one before; what is timed in turn differs by that alone."""
    now, calls = [0.0], itertools.count()

    def slower(work):
        now[0] += 0.01 * 1.01 ** next(calls)

    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(cpu.CodecWork, "encode", slower)
    monkeypatch.setattr(cpu.CodecWork, "decode", slower)
    found = {r["metric"]: r["values"] for r in codec_rows(["int-4"], **CODEC | {"repeats": 9}) if "job" not in r}
    for job in ("encode", "decode"):
        assert found[f"{job}_vs_int4"] == pytest.approx(dict.fromkeys(found[f"{job}_vs_int4"], 1 / 1.01), rel=1e-3)
    # encode: warmed up by two calls, then nine pairs
    assert found["encode_tokens_per_s"]["p50"] == pytest.approx(96 / (0.01 * 1.01 ** (2 + 2 * 4)), rel=1e-3)


@pytest.mark.parametrize("spec", ["hqmq-s24_r3", "hqmq-s96_r4"])
def test_the_search_through_all_products_finds_the_codes(spec):
    codec = kvcodec.get(spec).key
    params = codec.fit(Site(0, "key", 2, 64))
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(2)).half().float()
    count, search = exhaustive(codec)
    assert count == params["codebook"].shape[2]
    codes, _ = codec.unpack(codec.encode(x, params), 16)
    assert torch.equal(search(x.double(), params), codes.long())


def test_the_search_through_all_directions_finds_the_codes():
    codec = kvcodec.get("octopus-3").key
    params = codec.fit(Site(0, "key", 2, 64))
    x = codec.to_code(torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(2)), params)
    _, search = exhaustive(codec)
    codes = unpack_split(codec.encode(x, params), codec.code_bits, 22, codec.low_bits).long() >> codec.norm_bits
    assert torch.equal(search(x.double(), params), codes)


@pytest.mark.parametrize("spec", ["turboquant-2", "turboquant-4", "turboquant-qjl-3", "ultra-tq"])
def test_the_search_through_all_levels_finds_the_codes(spec):
    codec = kvcodec.get(spec).key
    params = codec.fit(Site(0, "key", 2, 64))
    x = codec.to_code(torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(2)), params)
    count, search = exhaustive(codec)
    codes = unpack(codec.encode(x, params)["codes"], count.bit_length() - 1, 64).long()
    differing = (search(x.double(), params) != codes).float().mean()
    assert differing <= (1e-3 if spec == "ultra-tq" else 0)  # ultra-tq divides by the norm as it is held


def test_additive_is_exhaustive_already():
    codec = kvcodec.get("additive-k48_r4").key
    params = codec.fit(Site(0, "key", 2, 64))
    x = torch.randn(1, 2, 20, 64, generator=torch.Generator().manual_seed(2)).half().float()
    count, search = exhaustive(codec)
    codes = unpack(codec.encode(x, params)["codes"], codec.code_bits, 16).long()
    assert count == 48**2
    assert torch.equal(search(x.double(), params), codes)


def test_refused_before_anything_is_timed():
    with pytest.raises(SpecError, match="int5"):
        codec_rows(["int5"])
    with pytest.raises(ShapeError, match="tokens=0"):
        codec_rows(["int-4"], tokens=0)
    with pytest.raises(ShapeError, match="32 tokens at once"):
        codec_rows(["kivi-2"], tokens=16)


def test_a_codec_that_needs_queries_is_refused(monkeypatch):
    monkeypatch.setattr(type(kvcodec.get("saw-int4").key), "needs_queries", True)
    with pytest.raises(UnsupportedError, match="queries"):
        codec_rows(["saw-int4"])


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
    monkeypatch.setattr(cpu, "quantizer_rivals", lambda dim: [Copy()])
    rows = [r for r in codec_rows([], **CODEC) if r["spec"] == "copy-16"]
    metrics = [*CODEC_METRICS[:2], "encode_vs_preset", "decode_vs_preset"]
    assert [(r["metric"], r["job"], r["effective_bits"]) for r in rows] == [(m, "int-4", 16.0) for m in metrics]
    assert rows[0]["relative_mse"] < 1e-6


def test_a_rival_that_is_not_installed_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(
        cpu, "quantizer_rivals", lambda dim: [QuantizerRival("nobody-4", "nobody_has_this", "int-4", 4, dim)]
    )
    said = []
    assert list(codec_rows([], **CODEC, progress=said.append)) == []
    assert said == ["nobody-4: nobody_has_this is not installed, left out"]


@pytest.mark.parametrize("rival", quantizer_rivals(64), ids=lambda r: r.name)
def test_rivals_do_the_job_they_are_timed_for(rival):
    if rival.missing:
        pytest.skip(f"{rival.module} is not installed")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    held = rival.encode(x)
    ours, _ = kvcodec.fake_quant(rival.job, x[None, None], x[None, None])
    error = float((rival.decode(held).float() - x).square().sum())
    assert 0.5 < error / float((ours[0, 0] - x).square().sum()) < 2
    assert rival.bits <= rival.nbytes(held) * 8 / x.numel() <= rival.bits + 2


# -- values and commit -------------------------------------------------------------------------------------------------


def test_spread_interpolates():
    assert spread([1.0, 2.0, 3.0, 4.0, 11.0]) == {"p20": 1.8, "p50": 3.0, "p80": 5.4}
    assert spread([7.0]) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}


def test_commit_is_none_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "__file__", str(tmp_path / "stamp.py"))
    assert stamp.commit() is None
