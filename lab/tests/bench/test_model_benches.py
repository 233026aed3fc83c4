"""Rows of ``packedkv bench prefill`` and ``generate`` on small shapes."""

import fcntl
import json
import math

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, recorder, use_reference
from packedkv.cli.measure.generation import FORMS
from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv_lab.bench import generate, prefill
from packedkv_lab.bench.generate import GpuLock
from packedkv_lab.bench.packed import packed_operator
from packedkv_lab.bench.prefill import dense_attention, prefill_error, prefill_rows, prefill_shape
from packedkv_lab.bench.record import newest
from packedkv_lab.bench.shapes import Shape


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    use_reference(monkeypatch)


def by_reference(packed, q, k, v):
    """What the operator computes, by the reference cache and torch."""

    def attend():
        history = packed.cache.decode()
        both = [torch.cat([old, new], 2) for old, new in zip(history, (k, v), strict=True)]
        return dense_attention(q.float(), both[0].float(), both[1].float()).to(q.dtype)

    return attend


def prefills(specs, queries=(3, 16)):
    shapes = [prefill_shape(1, 130, n) for n in queries]
    found = recorder()
    prefill_rows(specs, shapes, found)
    return found.new


def test_prefill_rows(monkeypatch):
    monkeypatch.setattr(prefill, "prefill_operator", by_reference)
    rows = prefills(["int-4"])
    assert {r["shape"] for r in rows} == {prefill_shape(1, 130, n).name for n in (3, 16)}
    ours = [r for r in rows if r["spec"] == "int-4" and r["shape"].endswith("q16")]
    assert [r["metric"] for r in ours] == ["dequant_us", "prefill_apart_us", "prefill_speedup", "prefill_us"]
    apart = ours[1]
    packed, bf16, rest = 2 * 8 * 130 * (64 + 4), 2 * 8 * 130 * 256, 3 * 4 + 2 * 32 * 256
    assert apart["least_apart_us"] - 100.0 == pytest.approx((packed + 2 * bf16 + rest) / 4.3e6, rel=0.01)


class Engine(CudaEngine):
    """Names the pages that it gets; notes whether it got constants."""

    def __init__(self):
        pass

    def prepare(self, roles):
        self.ready = True

    def attend_chunk(self, q, tokens, rules):
        assert self.ready
        return q, tokens, rules


def test_the_operator_sees_the_history_and_the_fresh_tokens():
    packed = packed_operator("kivi-2", Shape("prefill", 1, 4, 2, 64, 300), CPU)
    packed.cache.engine = Engine()
    q, k, v = (torch.randn(1, heads, 5, 64).bfloat16() for heads in (4, 2, 2))
    asked, (pages, table, first, last, sink, window, *_), rules = prefill.prefill_operator(packed, q, k, v)()
    assert asked is q
    assert (rules.scale, first, last) == (64**-0.5, 0, packed.encoded["key"])
    assert (pages, table) == (packed.cache.store.pages, packed.cache.store.table)
    for i, (role, x) in enumerate((("key", k), ("value", v))):
        before = packed.cache.roles[role]
        assert torch.equal(sink[i], before.sink)
        assert torch.equal(window[i], torch.cat([before.window, x], 2))
        assert before.encoded + before.sink.shape[2] + before.window.shape[2] == 300


def test_prefill_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(prefill, "prefill_operator", lambda packed, q, k, v: lambda: torch.zeros_like(q))
    rows = [r for r in prefills(["int-4"], (3,)) if r["spec"] == "int-4"]
    assert [r["values"] for r in rows] == [None]
    assert rows[0]["status"].startswith("failed its gate: attention error 1.00e+00")


@pytest.mark.parametrize("spec", ["int-8", "innerq-base", "ultraquant"])
def test_prefill_error_knows_which_tokens_a_query_sees(spec):
    packed = packed_operator(spec, Shape("p", 2, 4, 2, 128, 150), CPU)
    q, k, v = (torch.randn(2, h, 7, 128).bfloat16() for h in (4, 2, 2))
    right = by_reference(packed, q, k, v)()
    assert prefill_error(packed, q, k, v, right).passed
    for wrong in (right.roll(1, 2), by_reference(packed, q, k.flip(2), v.flip(2))()):
        assert not prefill_error(packed, q, k, v, wrong).passed


# -- generate ----------------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    return generate.make_model("Qwen3-8B", CPU, **TINY)


def generated(model, specs, *, path=None, libraries=False, **options):
    options = {"batches": (2,), "ways": ("generate",), "prompt": 40, "new_tokens": 2, **options}
    found = recorder(path=path, libraries=libraries)
    generate.generate_rows(specs, found, model=model, **options)
    return found.new


def test_a_filled_cache_takes_the_prompts_last_token_and_goes_on(model):
    filler = generate.Filler(model, 2, 40, 8)
    found = []
    for kind in ("DynamicCache", "StaticCache"):
        cache = filler.filled(filler.dense(kind))
        assert int(cache.get_seq_length()) == 39
        mask = torch.ones_like(filler.ids)
        out = model.generate(
            filler.ids, **passing(model, cache), max_new_tokens=3, do_sample=False, attention_mask=mask
        )
        assert out.shape == (2, 43)
        assert int(cache.get_seq_length()) == 42
        found.append(out)
    assert torch.equal(*found)


def test_a_filled_cache_without_the_keys_mean_knows_its_positions(model):
    cache_for = pytest.importorskip("packedkv.integrations.transformers").cache_for
    filler = generate.Filler(model, 2, 40, 8)
    cache = filler.filled(cache_for(model, "saw-int4:mean=pre", attention="decoded", probe="off"))
    assert int(cache.get_seq_length()) == 39
    assert cache.report()["mean"] == "pre"


def test_time_per_token_is_from_logits_to_logits(model, monkeypatch):
    clock = iter([0.0, 9.0, 9.5, 9.9, 10.0, 10.2])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(clock))
    filler = generate.Filler(model, 1, 40, 8)
    found = generate.timed_generate(filler, lambda: filler.dense("DynamicCache"), 3)
    # of six tokens the prompt's last and the first steps do not count: 9.5 to 9.9, 10.0 and 10.2
    assert found["values"] == {"p20": 140.0, "p50": 200.0, "p80": 320.0}


def test_rows_of_the_16_bit_cache_and_of_what_no_kernel_takes(model):
    rows = generated(model, ["kivi-2:group=16"])
    assert [(r["spec"], r["cache"], r["shape"]) for r in rows] == [
        ("dense", "DynamicCache", "qwen3_8b_b2_0k"),
        ("dense", "DynamicCache", "qwen3_8b_b2_0k"),
        ("kivi-2:group=16", "packedkv fused", "qwen3_8b_b2_0k"),
    ]
    assert rows[0]["values"] is not None
    assert rows[2]["status"].startswith("no kernel: no kernel encodes kivi-2")


def test_dynamic_cache_is_timed_with_cudnn_and_without(model, monkeypatch, tmp_path):
    seen = []

    def timed(filler, make, new_tokens):
        seen.append((type(make()).__name__, torch.backends.cuda.cudnn_sdp_enabled()))
        return {"values": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}

    monkeypatch.setattr(generate, "timed_generate", timed)
    path = tmp_path / "generate.jsonl"
    rows = generated(model, [], path=path)
    assert [(r["cache"], r["form"]) for r in rows] == [("DynamicCache", form) for form in FORMS]
    assert seen == [("DynamicCache", True)] * 2 + [("DynamicCache", False)] * 2
    assert len(newest(rows)) == 2
    path.write_text("".join(json.dumps(r) + "\n" for r in rows[:1]))  # a visit that ended between them
    again = generated(model, [], path=path)
    assert [r["form"] for r in again] == ["cuDNN off"]


def test_quantized_caches_of_transformers_are_rivals(model, monkeypatch):
    made = []

    def quantized(filler, backend):
        made.append(backend)
        if backend == "hqq":
            raise ImportError("You need to install `HQQ`")
        return filler.dense("DynamicCache")

    monkeypatch.setattr(generate.Filler, "quantized", quantized)
    rows = generated(model, [], libraries=True)
    assert [(r["spec"], r["cache"], r.get("status")) for r in rows] == [
        *[("dense", "DynamicCache", None)] * 2,
        *[("hqq-4", "QuantizedCache", "not available: ImportError: You need to install `HQQ`")] * 2,
        *[("quanto-4", "QuantizedCache", None)] * 2,
    ]
    assert made == ["hqq"] * 2 + ["quanto"] * 4  # with and without cuDNN, once each to warm up
    assert [r["spec"] for r in generated(model, [])] == ["dense"] * 2
    assert generated(model, [], dense=False, libraries=True) == []


def test_a_model_is_made_only_for_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "make_model", lambda *_: pytest.fail("made"))
    path = tmp_path / "generate.jsonl"
    held = recorder(path=path)
    held.add("dense", 16.0, "ms_per_token_graph", "ms", "qwen3_8b_b1_32k", {"p20": 1.0, "p50": 1.0, "p80": 1.0})
    generate.generate_rows([], held, batches=(1,), ways=("graph",))
    held.end = -math.inf
    generate.generate_rows(["int-4"], held, batches=(1,), ways=("graph",))
    assert len(held.new) == 1


def test_packed_caches_are_filled_and_reported(model, monkeypatch):
    def streamed(filler, spec, fixed):
        from packedkv.integrations.transformers import cache_for

        return cache_for(filler.model, spec, attention="streamed", probe=False)

    monkeypatch.setattr(generate.Filler, "packed", streamed)
    row = generated(model, ["int-4"])[-1]
    assert row["values"] is not None
    assert 4.5 < row["effective_bits"] < 8  # a page of 64 tokens for 42
    assert row["paths"]["streamed"] > 0


def test_without_transformers_it_says_what_to_install(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(generate.importlib, "import_module", absent)
    with pytest.raises(UnsupportedError, match=r"bench generate needs transformers; run: pip install"):
        generate.generate_rows([], recorder())


def test_ways_and_shapes_that_there_are_not_are_refused(model):
    with pytest.raises(SpecError, match="no way eager; there are generate, graph, compiled"):
        generated(model, [], ways=("eager",))
    with pytest.raises(SpecError, match=r"no shape 'b8'; use e\.g\. qwen3_8b_b8_32k"):
        generate.batches_of("qwen3_8b_b1_32k,b8")


# -- processes beside each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclusive", [True, False], ids=["who times", "who compiles"])
def test_who_times_is_alone_and_who_compiles_is_not(tmp_path, exclusive):
    """What another process would find: an open file of its own, asked for the lock without waiting."""
    with GpuLock(tmp_path / "turns").hold(exclusive=exclusive), (tmp_path / "turns").open() as other:
        for kind, blocked in ((fcntl.LOCK_SH, exclusive), (fcntl.LOCK_EX, True)):
            if blocked:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(other, kind | fcntl.LOCK_NB)
            else:
                fcntl.flock(other, kind | fcntl.LOCK_NB)
                fcntl.flock(other, fcntl.LOCK_UN)
    with (tmp_path / "turns").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back at the end
