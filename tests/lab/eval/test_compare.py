"""``compare``: rows, their order of work, what stops them early, and what an interrupt keeps."""

import json

import pytest
import torch

import kvcodec
from kvcodec.errors import FitError, FormatError, ModelError, SpecError
from kvcodec_lab.eval import compare as module
from kvcodec_lab.eval import perplexity
from kvcodec_lab.eval.compare import Settings, compare
from kvcodec_lab.eval.rows import plain
from kvcodec_lab.fit import fit_model
from tests.lab.eval.leaning import leaning
from tests.lab.eval.tiny import TEXT, tiny_loaded

SPECS = ["dense", "int-4", "saw-int4"]
SMALL = {"windows": 2, "window_tokens": 96, "prompt_tokens": 40, "new_tokens": 6, "queries": 32}


@pytest.fixture(scope="module")
def model():
    return tiny_loaded()


@pytest.fixture(scope="module")
def rows(model):
    torch.manual_seed(0)
    return compare(model, SPECS, TEXT, Settings(**SMALL))


def test_rows_follow_the_specs_and_are_json(rows):
    assert [row["spec"] for row in rows] == SPECS
    assert json.loads(json.dumps(plain(rows), allow_nan=False)) == plain(rows)
    promised = {"spec", "perplexity", "kl", "top1_agreement", "key_bits", "value_bits", "cache_bytes"}
    promised |= {"effective_bits", "ratio_to_16bit", "attention_error", "tokens_per_s", "continuation", "windows"}
    promised |= {"tokens", "prefill", "model", "seconds", "versions", "status", "uncompressed"}
    for row in rows:
        assert promised <= set(row)
        assert (row["windows"], row["tokens"], row["prefill"], row["status"]) == (2, 190, "decoded", "complete")


def test_dense_is_the_uncompressed_model_and_four_bits_are_not(rows):
    dense, naive, _ = rows
    assert dense["perplexity"] == pytest.approx(dense["uncompressed"]["perplexity"], rel=1e-3)
    assert dense["kl"] < 1e-4
    assert naive["kl"] > 100 * dense["kl"]
    assert naive["attention_error"] > 10 * dense["attention_error"]
    assert dense["continuation"] == dense["uncompressed"]["continuation"]
    assert dense["same_tokens"] == dense["new_tokens"] == 6


def test_bytes_are_those_of_a_cache_filled_with_one_window(model, rows):
    """The peers' fake savings: a ratio that no tensor backs."""
    ids = perplexity.tokenize(model.tokenizer, TEXT, 96)
    cache = kvcodec.cache_for(model.model, "saw-int4")
    with torch.no_grad():
        model.model(ids[None], past_key_values=cache)
    held = sum(t.nbytes for layer in cache.layer_caches for t in layer.tensors())
    row = rows[2]
    assert row["cache_bytes"] == held == sum(row["bytes_by_part"].values())
    elements = 3 * 2 * 96 * 64 * 2  # layers, heads, tokens, channels, K and V
    assert row["effective_bits"] == pytest.approx(held * 8 / elements)
    assert row["ratio_to_16bit"] == pytest.approx(elements * 2 / held)
    assert (row["key_bits"], row["value_bits"]) == (4.5, 4.5)


def test_same_seed_same_figures(model, rows):
    again = compare(model, SPECS, TEXT, Settings(**SMALL))
    timed = {"seconds", "tokens_per_s", "uncompressed"}
    for a, b in zip(rows, again, strict=True):
        assert {k: v for k, v in a.items() if k not in timed} == {k: v for k, v in b.items() if k not in timed}


FITTED = ["innerq-base:sink=0,window=0", "ultra-tq:table=calibrated,dense_layers=0", "int-4"]


@pytest.fixture(scope="module")
def params(model):
    """Constants from a text of other statistics than the one measured on."""
    return fit_model(model, FITTED[1], TEXT.upper()[::-1], windows=2, window_tokens=96, text_name="other.txt")


def test_rows_say_where_constants_come_from(model, params, tmp_path):
    params.save(tmp_path / "levels.safetensors")
    found = compare(model, FITTED, TEXT, Settings(**SMALL), params=[tmp_path / "levels.safetensors"])
    assert [row["fitted"] for row in found] == ["prefill", "file", None]
    assert [row["params"] for row in found][::2] == [None, None]
    assert found[1]["params"] == {
        "file": "levels.safetensors",
        "sha256": params.save(tmp_path / "again").sha256,
        "tokens": 192,
        "text": "other.txt",
    }
    assert [row["notes"] for row in found] == [
        ["constants fitted on each prefill (kvcodec fit and --params: on a text of your own)."],
        ["constants of levels.safetensors, fitted on 192 tokens of other.txt."],
        [],
    ]
    without = compare(model, FITTED[1:2], TEXT, Settings(**SMALL))[0]
    assert without["fitted"] == "prefill"
    assert without["kl"] != found[1]["kl"], "the windows are read with the constants of the file"
    assert without["attention_error"] != found[1]["attention_error"]
    assert json.loads(json.dumps(plain(found), allow_nan=False)) == plain(found)


def test_where_every_layer_is_dense_nothing_is_fitted(model):
    (row,) = compare(model, ["ultra-tq:table=calibrated"], TEXT, Settings(**SMALL))
    assert row["fitted"] is None


def test_a_scheme_that_rounds_queries_is_streamed_throughout(model):
    specs = ["ultraquant:dense_layers=0", "ultraquant:queries=fp8,dense_layers=0"]
    exact, rounded = compare(model, specs, TEXT, Settings(**SMALL))
    assert (exact["attention"], rounded["attention"]) == ("decoded", "streamed")
    assert exact["kl"] != rounded["kl"]
    assert rounded["kl"] == pytest.approx(exact["kl"], rel=0.2)
    assert exact["attention_error"] != rounded["attention_error"]
    assert rounded["new_tokens"] == 6
    assert model.model.config._attn_implementation == "sdpa"


def test_params_that_do_not_fit_are_refused_before_any_work(model, params, monkeypatch):
    monkeypatch.setattr(module.perplexity, "uncompressed", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(SpecError, match="which is not among the specs given"):
        compare(model, ["int-4"], TEXT, Settings(**SMALL), params=[params])
    drawn = leaning(drawing=True)
    given = fit_model(model, drawn, TEXT, windows=1, window_tokens=96)
    with pytest.raises(FormatError, match="fitted with seed 0"):
        compare(model, [drawn], TEXT, Settings(**SMALL, seed=1), params=[given])
    with pytest.raises(FitError, match="run `kvcodec fit MODEL"):
        compare(model, [leaning()], TEXT, Settings(**SMALL))


def test_constants_fitted_with_queries_are_measured_from_their_params(model):
    given = fit_model(model, leaning(), TEXT, windows=1, window_tokens=96)
    (row,) = compare(model, [leaning()], TEXT, Settings(**SMALL), params=[given])
    assert row["fitted"] == "file"
    assert row["kl"] < 1e-3, "fp16 keys over a factor"


def test_a_spent_budget_keeps_the_first_window_and_says_so(model):
    found = compare(model, ["int-4"], TEXT, Settings(**SMALL, budget=0.0))
    assert [(r["windows"], r["status"]) for r in found] == [(1, "budget")]


def test_a_short_text_gives_the_windows_it_has_and_says_so(model):
    found = compare(model, ["int-4"], TEXT[:150], Settings(**SMALL))
    assert [(r["windows"], r["status"]) for r in found] == [(1, "short-text")]


def interrupting(at):
    """``compressed_logits`` that is interrupted in its ``at``-th call."""
    calls = []

    def run(*args, **options):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*args, **options)

    original = perplexity.compressed_logits
    return run


def test_an_interrupt_in_the_second_window_keeps_the_first_of_all(model, rows, monkeypatch):
    monkeypatch.setattr(module.perplexity, "compressed_logits", interrupting(5))
    kept = compare(model, SPECS, TEXT, Settings(**SMALL))
    assert [(r["spec"], r["windows"], r["status"], r["partial"]) for r in kept] == [
        (spec, 1, "interrupted", True) for spec in SPECS
    ]
    assert kept[0]["continuation"] == rows[0]["continuation"], "generation came before the second window"
    assert kept[0]["uncompressed"]["perplexity"] != rows[0]["uncompressed"]["perplexity"], "same windows for both"


def test_an_interrupt_in_the_first_window_keeps_the_specs_that_were_done(model, monkeypatch):
    monkeypatch.setattr(module.perplexity, "compressed_logits", interrupting(3))
    kept = compare(model, SPECS, TEXT, Settings(**SMALL))
    assert [r["spec"] for r in kept] == SPECS[:2]
    assert "continuation" not in kept[0]


def test_an_interrupt_before_anything_is_an_interrupt(model, monkeypatch):
    monkeypatch.setattr(module.perplexity, "compressed_logits", interrupting(1))
    with pytest.raises(KeyboardInterrupt):
        compare(model, SPECS, TEXT, Settings(**SMALL))


def test_mistakes_are_refused_before_any_work(model, monkeypatch):
    monkeypatch.setattr(module.perplexity, "uncompressed", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(SpecError, match="Did you mean 'saw-int4'"):
        compare(model, ["dense", "saw-int5"], TEXT, Settings(**SMALL))
    with pytest.raises(SpecError, match="given twice: int-4"):
        compare(model, ["int-4", "int-4"], TEXT, Settings(**SMALL))
    with pytest.raises(SpecError, match="no spec to compare"):
        compare(model, [], TEXT, Settings(**SMALL))
    with pytest.raises(ModelError, match="the text has 5 tokens"):
        compare(model, ["int-4"], "short", Settings(**SMALL))
    with pytest.raises(ModelError, match="does not fit the model, which knows 512 positions"):
        compare(model, ["int-4"], TEXT, Settings())


def test_a_model_without_an_attention_cache_is_refused_before_any_work(model, monkeypatch):
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=256, state_size=4))
    monkeypatch.setattr(module.perplexity, "uncompressed", lambda *_: pytest.fail("work was begun"))
    loaded = type(model)(mamba, model.tokenizer, "mamba", "made in the test")
    with pytest.raises(kvcodec.UnsupportedError, match=r"(?i)mamba"):
        compare(loaded, ["int-4"], TEXT, Settings(**SMALL))
