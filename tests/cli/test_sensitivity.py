"""Sensitivity: what one layer's keys or values cost, begun again at any layer, kept row by row; K_max / K_median."""

import json

import pytest
import torch

from packedkv.cli.measure import perplexity
from packedkv.cli.measure import sensitivity as module
from packedkv.cli.measure.outliers import key_outliers, outliers_of
from packedkv.cli.measure.sensitivity import Prefix, only, sensitivity
from packedkv.cli.page import figures, svg
from packedkv.codec import Dense
from packedkv.errors import FormatError, KVError, SpecError
from packedkv.models import windows as text_windows
from packedkv_lab.eval.stress import stress
from tests.cli.tiny import TEXT, tiny_llama, tiny_loaded, tiny_tokenizer
from tests.conftest import MODELS, tiny_model

SPECS = {"key": ["int-2", "int-4"], "value": ["int-2"]}


@pytest.fixture(scope="module")
def model():
    return tiny_loaded(tiny_llama().bfloat16())  # dense layers hold what the model gives: exactly uncompressed


@pytest.fixture(scope="module")
def windows():
    return text_windows.split_windows(text_windows.tokenize(tiny_tokenizer(), TEXT, 192), 2, 96)


def test_rows_are_those_of_the_cache_with_one_role_of_one_layer_compressed(model, windows):
    rows = sensitivity(model, windows, SPECS)
    assert [(r["role"], r["spec"], r["layer"]) for r in rows] == [
        (role, spec, layer) for role in SPECS for spec in SPECS[role] for layer in range(3)
    ]
    references = [perplexity.uncompressed(model.model, w) for w in windows]
    for row in rows:
        scheme = only(row["layer"], 3, row["role"], row["spec"])
        logits = [perplexity.compressed_logits(model.model, scheme, w)[0] for w in windows]
        scores = [reference.score(own) for reference, own in zip(references, logits, strict=True)]
        assert row["kl"] == pytest.approx(perplexity.summarize(scores).kl, rel=1e-3)
        assert (row["tokens"], row["windows"]) == (190, 2)
    by = {(r["role"], r["spec"], r["layer"]): r["kl"] for r in rows}
    assert all(by["key", "int-2", layer] > by["key", "int-4", layer] > 0 for layer in range(3))


def test_only_one_role_of_one_layer_has_a_codec():
    scheme = only(1, 3, "value", "kivi-2")
    kinds = [(type(s.key), type(s.value), s.window) for s in (scheme.for_layer(i, 3) for i in range(3))]
    assert [k[:2] == (Dense, Dense) for k in kinds] == [True, False, True]
    assert kinds[1][0] is Dense
    assert kinds[1][2] == 0, "every token counts"


@pytest.mark.parametrize("name", [*MODELS, "lfm2"])
def test_beginning_again_at_a_layer_gives_the_same_logits(name):
    model = tiny_model(name)
    if name == "gpt-oss":
        model.set_attn_implementation("eager")
    window = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1))
    prefix = Prefix(model)
    reference = prefix.reference(model, window)
    assert prefix.works
    for layer in range(len(prefix.layers)):
        with prefix.starting_at(layer):
            again = perplexity.uncompressed(model, window)
        torch.testing.assert_close(again.log_p, reference.log_p)
    assert not any("forward" in layer.__dict__ for layer in prefix.layers)


def test_layers_before_the_compressed_one_are_not_computed_again(model, windows):
    prefix, calls = Prefix(model.model), []
    prefix.reference(model.model, windows[0])
    hooks = [
        layer.self_attn.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, layer in enumerate(prefix.layers)
    ]
    with prefix.starting_at(2):
        perplexity.uncompressed(model.model, windows[0])
    for hook in hooks:
        hook.remove()
    assert calls == [2]


def test_a_model_whose_layers_cannot_be_replayed_is_run_whole(model, windows, monkeypatch):
    rows = sensitivity(model, windows[:1], {"key": ["int-2"]})
    monkeypatch.setattr(Prefix, "_given", lambda self, i: lambda *_, **__: torch.zeros_like(self.outputs[i]))
    prefix = Prefix(model.model)
    prefix.reference(model.model, windows[0])
    assert not prefix.works
    again = sensitivity(model, windows[:1], {"key": ["int-2"]})
    assert [r["kl"] for r in again] == pytest.approx([r["kl"] for r in rows], rel=1e-3)


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(model, windows, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    counted, whole = [], module.compressed_logits

    def logits(*args, **options):
        counted.append(1)
        if len(counted) == 5:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(module, "compressed_logits", logits)
    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, windows[:1], SPECS, path=path, text="abc")
    assert len(path.read_text().splitlines()) == 1 + 4
    with path.open("a") as file:
        file.write('{"layer": 1, "role": "key", "sp')  # killed in the middle of a line
    rows = sensitivity(model, windows[:1], SPECS, path=path, text="abc")
    assert len(counted) == 5 + 5
    assert len(path.read_text().splitlines()) == 1 + 9
    assert sensitivity(model, windows[:1], SPECS, path=path, text="abc") == rows
    assert len(counted) == 10
    assert rows == sensitivity(model, windows[:1], SPECS)


def test_rows_of_something_else_are_refused(model, windows, tmp_path):
    path = tmp_path / "rows.jsonl"

    def rows(count=1, text="abc"):
        return sensitivity(model, windows[:count], {"value": ["int-4"]}, path=path, text=text)

    rows()
    with pytest.raises(FormatError, match=r"text 'abc' \(now 'other'\)"):
        rows(text="other")
    with pytest.raises(FormatError, match=r"windows 1 \(now 2\)"):
        rows(2)
    with stress(model.model, 2.0, 30), pytest.raises(FormatError, match="other weights"):
        rows()
    path.write_text("no rows\nand no end")
    with pytest.raises(FormatError, match="no sensitivity rows"):
        rows()
    assert path.read_text() == "no rows\nand no end"


def test_mistakes_come_before_any_work(model, windows, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("worked"))
    with pytest.raises(SpecError, match="unknown codec"):
        sensitivity(model, windows, {"key": ["int-4", "saw-int5"]})
    with pytest.raises(KVError, match="cannot be written"):
        sensitivity(model, windows, SPECS, path=tmp_path / "nowhere" / "rows.jsonl")


# -- K_max / K_median --------------------------------------------------------------------------------------------------


def test_the_ratio_is_that_of_chunks_and_names_the_channels_that_make_it():
    keys = torch.ones(1, 2, 50, 16)
    keys[:, 1, :, 6] = 30.0
    row = outliers_of(7, keys)
    chunk = (30.0**2 + 3) ** 0.5 / 2
    assert row["layer"] == 7
    assert row["ratio"] == pytest.approx(chunk)
    assert row["head_ratios"] == pytest.approx([1.0, chunk])
    assert row["worst_head_ratio"] == pytest.approx(chunk)
    assert row["largest"] == 30
    assert row["above"] == [[0, 0], [1, 1]]
    assert row["channels"][0] == {"head": 1, "channel": 6, "times_median": 30.0}


def test_stress_shows_in_the_diagnosis_at_the_channels_it_scaled(windows):
    made, window = tiny_model("llama-gqa"), windows[0] % 128
    plain = key_outliers(made, window)
    with stress(made, 64.0, 1) as done:
        for before, after in zip(plain, key_outliers(made, window), strict=True):
            assert after["worst_head_ratio"] > 10 * before["worst_head_ratio"]
            found = {(c["head"], c["channel"]) for c in after["channels"]}
            heads = done.channels[after["layer"]]
            assert found == {(h, c) for h, channels in enumerate(heads) for c in channels}


def test_figures_are_drawn(model, windows):
    rows = sensitivity(model, windows[:1], {"key": ["int-2"], "value": ["int-2"]})
    assert svg.draw(figures.sensitivity(rows, "tiny")).count("<title>") == len(rows)
    keys = {"tiny": key_outliers(model.model, windows[0])}
    assert svg.draw(figures.outliers(keys)).count("<title>") == len(keys["tiny"])
    assert json.dumps(rows)
