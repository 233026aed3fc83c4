"""Caches of transformers as specs: read through the same calls, all their bytes counted, refused where not installed.

Where optimum-quanto and hqq are not installed, layers made here stand in for theirs.
"""

import importlib.util
import json
import sys

import pytest
import torch
from transformers import cache_utils

from packedkv.cli.main import main
from packedkv.cli.measure import quantized_cache
from packedkv.cli.measure.perplexity import uncompressed
from packedkv.cli.measure.quantized_cache import QuantizedCacheMaker, QuantizedCacheSpec, quantized_cache_of, scheme_of
from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.models.loading import SampleText
from packedkv_lab.eval.batches import read_answers, read_window
from packedkv_lab.eval.run import RunSettings, checked_specs, evaluate
from packedkv_lab.eval.scoring import Reader
from packedkv_lab.eval.tasks.base import Item, TaskSettings
from tests.cli.tiny import TEXT, save_tiny, tiny_llama, tiny_tokenizer
from tests.conftest import tiny_model

PREFILLS = ("decoded", "exact")
INSTALLED = [
    name for name, (module, _) in quantized_cache.PACKAGES.items() if importlib.util.find_spec(module.partition(".")[0])
]


LIBRARIES = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=f"{name} is not installed"))
        for name in quantized_cache.PACKAGES
    ],
)


class Lossless(cache_utils.QuantizedLayer):
    """In place of hqq's: holds everything as it is, beside a scale and a zero of each group, which it does not use."""

    def _quantize(self, tensor, axis):
        groups = tensor.numel() // self.q_group_size
        assert groups * self.q_group_size == tensor.numel()
        assert groups * self.nbits % 8 == 0, "codes that do not fill whole bytes"
        meta = {"scale": torch.ones(groups, dtype=tensor.dtype), "zero": torch.ones(groups, dtype=tensor.dtype)}
        return tensor.clone(), meta

    def _dequantize(self, q_tensor):
        return q_tensor[0]


class Lost(Lossless):
    """Hands out another sign."""

    def _dequantize(self, q_tensor):
        return -q_tensor[0]


@pytest.fixture
def stand_in(monkeypatch):
    """Put a layer in hqq's place."""

    def put(layer):
        monkeypatch.setitem(sys.modules, "hqq.core.quantize", sys)
        monkeypatch.setattr(cache_utils, "HQQQuantizedLayer", layer)
        monkeypatch.setattr(QuantizedCacheSpec, "version", "of the test")
        quantized_cache._layer_class.cache_clear()

    yield put
    quantized_cache._layer_class.cache_clear()


PROMPT = [Item("t", "y", "answer", context=TEXT[:45], answers=("x",), max_new_tokens=6)]


def answer(reader):
    with reader.reading():
        (done,) = read_answers(reader, tiny_tokenizer(), PROMPT, 4, lambda: None)
    return done


def window(reader, tokens):
    """Scores of a window beside those of the uncompressed model."""
    ids = torch.tensor(tiny_tokenizer()(TEXT[:tokens]).input_ids)
    item = Item("t", "w", "window", ids=tuple(ids.tolist()))
    with reader.reading():
        done = read_window(reader, item, uncompressed(reader.model, ids), lambda: None)
    assert done.error == ""
    return done.output


# -- specs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "found", "name"),
    [
        ("quanto-4", QuantizedCacheSpec("quanto", 4), "quanto-4"),
        ("hf-quanto:bits=4", QuantizedCacheSpec("quanto", 4), "quanto-4"),
        ("hqq", QuantizedCacheSpec("hqq", 4), "hqq-4"),
        ("hqq-2:residual=32,group=32", QuantizedCacheSpec("hqq", 2, 32, 32), "hqq-2:group=32,residual=32"),
        (QuantizedCacheSpec("hqq", 8), QuantizedCacheSpec("hqq", 8), "hqq-8"),
    ],
)
def test_specs_are_read_and_written(spec, found, name):
    assert scheme_of(spec) == found
    assert str(found) == name
    assert quantized_cache_of(name) == found


def test_other_specs_are_the_registrys_and_two_spellings_are_one(stand_in):
    stand_in(Lossless)
    assert quantized_cache_of("int-4") is None
    assert str(scheme_of("int-4")) == "int-4"
    with pytest.raises(SpecError, match="given twice: hqq-4"):
        checked_specs(["hqq-4", "hf-hqq:bits=4"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("quant-4", "unknown codec 'quant-4'"),
        ("quanto-8", "use quanto-4 or quanto-2"),
        ("hqq-3", "bits=3 is not offered"),
        ("hqq-4:grup=32", "has no option 'grup'.*group, residual"),
        ("hqq-4:group", "'group' has no value"),
        ("hqq-4:bits=2", "'bits' is given twice"),
        ("hqq-4:group=x", "group=x is not allowed"),
        ("hqq-4:residual=0", "residual=0 is not allowed"),
        ("hqq-", "bits= is not allowed"),
    ],
)
def test_wrong_specs_say_what_is_wrong(spec, said):
    with pytest.raises(SpecError, match=said):
        scheme_of(spec)


# -- not installed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "package"), [("quanto-4", "optimum-quanto"), ("hqq-4", "hqq")])
def test_a_library_that_is_not_there_is_named_before_the_model_loads(spec, package, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, quantized_cache.PACKAGES[spec.partition("-")[0]][0], None)
    with pytest.raises(UnsupportedError, match=rf"{spec} is transformers' QuantizedCache .* pip install '{package}'"):
        checked_specs(["int-4", spec])
    code = main(["eval", str(tmp_path / "no model"), "--specs", spec, "--output", str(tmp_path / "out")])
    assert code != 0
    assert f"pip install '{package}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_transformers_refuses_is_refused(stand_in):
    stand_in(Lossless)
    with pytest.raises(UnsupportedError, match="hqq-4: transformers refuses this cache"):
        QuantizedCacheMaker(tiny_model("gemma3"), QuantizedCacheSpec("hqq")).new_cache()


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("residual", [128, 3])
def test_a_lossless_cache_is_the_uncompressed_model(llama, stand_in, prefill, residual):
    stand_in(Lossless)
    spec = QuantizedCacheSpec("hqq", 2, residual=residual)
    ours, plain = (Reader(llama, one, prefill=prefill) for one in (spec, None))
    assert float(window(ours, 60).kl.max()) < 1e-4
    a, b = answer(ours), answer(plain)
    assert a.output == b.output
    assert a.content.elements == b.content.elements


@pytest.mark.parametrize("prefill", PREFILLS)
def test_every_score_reads_what_is_stored(llama, stand_in, prefill):
    stand_in(Lost)
    lost, plain = (Reader(llama, spec, prefill=prefill) for spec in ("hqq-4", None))
    assert answer(lost).output != answer(plain).output
    assert bool((window(lost, 60).kl[1:] > 1e-4).all())


def test_residual_tokens_are_counted_in_16_bit(llama, stand_in):
    """45 tokens of a prompt and three after it; the stand-in's codes are the tensor, in float32 and counted as 16."""
    stand_in(Lossless)
    maker = QuantizedCacheMaker(llama, QuantizedCacheSpec("hqq", 4, residual=8))
    cache = maker.new_cache()
    layers, per_token = 3, 2 * 2 * 64  # K and V of two heads
    scales = 2 * 2 * per_token // 64

    def read(*ids):
        with torch.no_grad():
            for one in ids:
                llama(one[None], **passing(llama, cache))

    read(torch.arange(45))
    assert maker.held(cache) == (layers * 45 * (2 * per_token + scales), layers * 45 * per_token)
    read(*torch.full((3, 1), 7))
    held = layers * (45 * (2 * per_token + scales) + 3 * 2 * per_token)
    assert maker.held(cache) == (held, layers * 48 * per_token)
    read(*torch.full((5, 1), 7))  # the residual is full: all of it is quantized
    assert cache.layers[0].keys.numel() == 0 or cache.layers[0].keys.shape[-2] < 8
    assert maker.held(cache)[1] == layers * 53 * per_token


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64])
def test_tokens_are_filled_up_to_whole_bytes_and_come_back(llama, stand_in, tokens):
    stand_in(Lossless)
    layer = QuantizedCacheMaker(llama, QuantizedCacheSpec("hqq", 2)).new_cache().layers[0]
    k = torch.randn(1, 3, tokens, 64)  # three heads: a token has three groups, a byte four codes
    assert all(torch.equal(x, y) for x, y in zip(layer.update(k, k + 1), (k, k + 1), strict=True))


# -- the libraries -----------------------------------------------------------------------------------------------------


@LIBRARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_what_the_library_holds(backend, dtype):
    model = tiny_llama().to(dtype)
    for bits in quantized_cache.BITS[backend]:
        maker = QuantizedCacheMaker(model, QuantizedCacheSpec(backend, bits))
        cache = maker.new_cache()
        with torch.no_grad():
            model(torch.randint(0, 256, (2, 64)), **passing(model, cache))
        nbytes, elements = maker.held(cache)
        assert elements == 3 * 2 * 2 * 64 * 64
        assert nbytes * 8 / elements == maker.scheme.key_bits(64) == bits + 0.5


@LIBRARIES
@pytest.mark.parametrize("prefill", PREFILLS)
def test_four_bits_lose_what_int_4_loses_and_two_lose_more(llama, backend, prefill):
    specs = ("int-4", f"{backend}-4", f"{backend}-2")
    kl = {spec: float(window(Reader(llama, spec, prefill=prefill), 150).kl.mean()) for spec in specs}
    assert kl[f"{backend}-4"] < kl[f"{backend}-2"]
    # at 64 channels in groups of 64 both are int-4's grid, one a token and head, but for how offsets are rounded
    assert 0.5 < kl[f"{backend}-4"] / kl["int-4"] < 2


# -- the whole command -------------------------------------------------------------------------------------------------


def test_a_run_has_rows_of_a_quantized_cache_beside_a_preset(model, stand_in, tmp_path):
    stand_in(Lossless)
    settings = RunSettings(
        TaskSettings(text=SampleText(TEXT, "t", "0" * 64), limit=2, window_tokens=64, lengths=(480,), depths=(0.5,))
    )
    found = evaluate(model, ["int-4", "hqq-4"], ["kl", "needle"], tmp_path, settings)
    assert found.status == "complete"
    rows = {(r["spec"], r["task"], r["metric"]): r for r in found.rows if r["group"] is None}
    assert {spec for spec, _, _ in rows} == {"(uncompressed)", "int-4", "hqq-4"}
    lossless = rows["hqq-4", "kl", "kl"]
    assert abs(lossless["value"]) < 1e-4 < rows["int-4", "kl", "kl"]["value"]
    assert lossless["effective_bits"] == pytest.approx(16 + 0.5)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["specs"] == ["int-4", "hqq-4"]
    assert about["bits"]["hqq-4"] == {"key_bits": 4.5, "value_bits": 4.5}
    assert about["versions"]["hqq"] == "of the test"
    again = evaluate(model, ["hf-hqq:bits=4"], ["kl", "needle"], tmp_path, settings)
    assert len((tmp_path / "items.jsonl").read_text().splitlines()) == 3 * 4
    assert again.status == "complete"


@pytest.mark.skipif(not INSTALLED, reason="neither optimum-quanto nor hqq is installed")
def test_the_command_scores_what_is_installed(tmp_path, capsys):
    save_tiny(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    spec = f"{INSTALLED[0]}-4"
    options = ["--tasks", "kl", "--limit", "1", "--window-tokens", "64", "--text", str(tmp_path / "text.txt")]
    code = main(["eval", str(tmp_path / "model"), "--specs", spec, *options, "--output", str(tmp_path / "out")])
    assert code == 0
    assert spec in capsys.readouterr().out
