"""``advise``: fits what is asked, is no worse than the presets of its bytes, and says what it did not measure."""

import argparse
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import packedkv
from packedkv.cli import main as cli
from packedkv.cli.advise import steps
from packedkv.cli.advise.candidates import Candidate, check_specs, choose, default_specs
from packedkv.cli.advise.run import advise
from packedkv.cli.advise.steps import Request
from packedkv.cli.commands.advise import memory, show
from packedkv.cli.measure import perplexity
from packedkv.cli.measure.rows import plain
from packedkv.errors import KVError, SpecError, UnsupportedError
from packedkv.integrations.transformers.plan import plan_for
from packedkv.models import windows as text_windows
from packedkv.models.loading import load_text
from tests.cli.tiny import TEXT, save_tiny, tiny_loaded
from tests.conftest import tiny_config

SPECS = ("int-8", "int-4", "int-2", "saw-int4", "kivi-4", "turboquant-2")
CONTEXT, WINDOW = 4096, 128


@pytest.fixture(scope="module")
def model():
    return tiny_loaded()


@pytest.fixture
def advised_folder(advised, tmp_path):
    """A copy of the folder of ``advised``: another request in it would overwrite its recipe."""
    return shutil.copytree(advised[1], tmp_path / "advice")


def request_for(**options):
    return Request(**{"context": CONTEXT, "window_tokens": WINDOW, "specs": SPECS, **options})


@pytest.fixture(scope="module")
def advised(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    return advise(model, TEXT, request_for(memory=1_400_000), output=folder), folder


def measured(model, spec, windows):
    scores = []
    for window in windows:
        reference = perplexity.uncompressed(model.model, window)
        scores.append(reference.score(perplexity.compressed_logits(model.model, spec, window)[0]))
    return perplexity.summarize(scores).kl


def test_the_recipe_fits_and_is_no_worse_than_any_preset_that_fits(model, advised):
    found, folder = advised
    best = found["advised"]
    assert best["bytes"] <= 1_400_000
    assert best["spec"] == str(folder / "recipe.json")
    assert found["met"]
    fitting = [r for r in found["finalists"] if r["bytes"] <= 1_400_000]
    assert {"int-2", "turboquant-2"} <= {r["spec"] for r in fitting}
    assert best["kl"] == min(r["kl"] for r in fitting)
    windows = text_windows.split_windows(text_windows.tokenize(model.tokenizer, TEXT, 3 * WINDOW), 3, WINDOW)[1:]
    mixture = packedkv.get(best["spec"])
    assert measured(model, mixture.without_windows(), windows) == pytest.approx(best["kl"], rel=1e-4)
    assert measured(model, mixture, windows) == pytest.approx(best["kl_as_served"], rel=1e-4)
    assert best["kl"] < measured(model, "int-2", windows)


def test_the_real_cache_takes_the_bytes_that_were_promised(model, advised):
    found, _ = advised
    cache = packedkv.cache_for(model.model, found["advised"]["spec"], probe=False)
    k = torch.randn(1, 2, CONTEXT, 64)
    for layer in range(3):
        cache.update(k, k, layer)
    assert cache.report()["total_bytes"] == found["advised"]["bytes"] <= 1_400_000


def test_the_result_says_what_was_chosen_where_and_what_was_not_measured(advised):
    found, folder = advised
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
    assert sum(row["predicted_kl"] for row in found["layers"]) == pytest.approx(found["advised"]["predicted_kl"])
    assert sum(row["bytes"] for row in found["layers"]) == found["advised"]["bytes"]
    told = " ".join(found["not_measured"])
    for word in ("speed", "tasks", "windows of 128 tokens, not of 4096"):
        assert word in told
    speed = found["speed"]
    assert speed["tokens_per_s"] > 0
    assert speed["uncompressed_tokens_per_s"] > 0
    assert (speed["prompt_tokens"], speed["new_tokens"]) == (112, 16)
    assert repr(str(folder / "recipe.json")) in found["use"]["python"]
    assert json.loads(json.dumps(found))["keys"][0]["worst_head_ratio"] > 1
    assert len((folder / "sensitivity.jsonl").read_text().splitlines()) == 1 + len(found["sensitivity"])


def test_a_second_request_uses_the_rows_of_the_first(model, advised, advised_folder, monkeypatch):
    from packedkv.cli.measure import sensitivity

    found, _ = advised
    monkeypatch.setattr(sensitivity, "compressed_logits", lambda *_, **__: pytest.fail("measured again"))
    again = advise(model, TEXT, request_for(memory=2_000_000), output=advised_folder)
    assert again["advised"]["kl"] < found["advised"]["kl"]
    assert again["advised"]["bytes"] <= 2_000_000


def test_without_memory_the_fewest_bytes_within_the_kl_are_advised(model, advised_folder):
    found = advise(model, TEXT, request_for(max_kl=0.5), output=advised_folder)
    assert found["met"]
    assert found["advised"]["kl"] <= 0.5
    good = [row for row in found["finalists"] if row["kl"] <= 0.5]
    assert found["advised"]["bytes"] == min(row["bytes"] for row in good)
    looser = advise(model, TEXT, request_for(max_kl=1.5), output=advised_folder)
    assert looser["advised"]["bytes"] < found["advised"]["bytes"]


def test_a_sum_that_promised_too_much_is_asked_for_more(model, advised_folder, monkeypatch):
    monkeypatch.setattr(steps.Search, "_measure", worse(steps.Search._measure, 3))
    found = advise(model, TEXT, request_for(max_kl=0.3), output=advised_folder)
    promised = sorted((r["predicted_kl"], -r["bytes"]) for r in found["finalists"] if r["predicted_kl"] is not None)
    assert 1 < len(promised) <= steps.TRIES
    assert promised == sorted(promised, key=lambda p: p[1]), "less KL was bought with more bytes"


def test_a_kl_that_is_not_reached_within_the_memory_is_said(model, advised_folder):
    found = advise(model, TEXT, request_for(memory=1_400_000, max_kl=1e-4), output=advised_folder)
    assert not found["met"]
    assert found["advised"]["bytes"] <= 1_400_000


def test_a_preset_that_measures_better_than_the_mixture_is_advised(model, tmp_path, monkeypatch):
    monkeypatch.setattr(steps.Search, "_measure", worse(steps.Search._measure, 100))
    found = advise(model, TEXT, request_for(memory=1_400_000, specs=("int-4", "int-2")), output=tmp_path)
    assert found["advised"]["spec"] == "int-2"
    assert found["layers"] == []
    assert not (tmp_path / "recipe.json").exists()
    assert "cache_for(model, 'int-2')" in found["use"]["python"]


def test_what_gives_no_numbers_is_not_advised(model, tmp_path, monkeypatch):
    monkeypatch.setattr(steps.Search, "_measure", worse(steps.Search._measure, math.nan))
    found = advise(model, TEXT, request_for(memory=1_400_000, specs=("int-4", "int-2")), output=tmp_path)
    assert found["advised"]["spec"] == "int-2"
    assert found["finalists"][-1]["spec"] == "(mixture)"
    line = next(line for line in show(plain(found)).splitlines() if "(mixture)" in line)
    assert line.split()[-4:-1] == ["-", "-", "-"]
    monkeypatch.setattr(perplexity.Reference, "score", lambda self, _: replace(self.score_itself(), kl=math.nan))
    with pytest.raises(KVError, match="are no numbers"):
        advise(model, TEXT, request_for(memory=1_400_000, specs=("int-4", "int-2")), output=tmp_path)


def test_a_layer_whose_logits_are_no_numbers_is_not_taken(model, tmp_path, monkeypatch):
    """Measured or read back from the file, where NaN is null."""
    from packedkv.cli.measure import sensitivity

    whole = sensitivity.compressed_logits

    def logits(model, scheme, window, **options):
        found, cache = whole(model, scheme, window, **options)
        return found * (math.nan if str(scheme) == "keys of one layer: int-8" else 1), cache

    monkeypatch.setattr(sensitivity, "compressed_logits", logits)
    for _ in range(2):
        found = advise(model, TEXT, request_for(memory=2_000_000, specs=("int-8", "int-4")), output=tmp_path)
        assert {row["key"] for row in found["layers"]} <= {"int-4", "dense"}


def worse(whole, times):
    """Measure mixtures as if the cache did worse on them than the search foresaw."""

    def measure(self, finalists, windows, **options):
        base = whole(self, finalists, windows, **options)
        for finalist in finalists:
            if finalist.options:
                finalist.scores = [replace(score, kl=times * score.kl) for score in finalist.scores]
        return base

    return measure


def test_nothing_that_fits_is_refused_with_the_least_there_is(model):
    said = r"do not go into 97\.66 KiB; the smallest candidates, turboquant-2 for keys .* take 864"
    with pytest.raises(KVError, match=said):
        advise(model, TEXT, request_for(memory=100_000))


def test_where_16_bit_fits_nothing_is_compressed(model):
    with pytest.raises(KVError, match=r"take 6\.00 MiB in 16 bit, which fits .* --max-kl"):
        advise(model, TEXT, request_for(memory=10 << 20))
    with pytest.raises(SpecError, match="no candidate but dense"):
        advise(model, TEXT, request_for(memory=1_400_000, specs=("dense",)))


def test_mistakes_are_refused(model):
    with pytest.raises(SpecError, match="--memory"):
        Request(4096)
    with pytest.raises(SpecError, match="above 0"):
        Request(4096, max_kl=0.0)
    with pytest.raises(SpecError, match="at least"):
        Request(0, memory=1)
    with pytest.raises(KVError, match="window"):
        advise(model, TEXT[:150], request_for(memory=2_000_000))
    with pytest.raises(SpecError, match="unknown codec"):
        advise(model, TEXT, request_for(memory=2_000_000, specs=("imt-4",)))
    with pytest.raises(SpecError, match="not another recipe"):
        advise(model, TEXT, request_for(memory=2_000_000, specs=("recipe.json",)))
    with pytest.raises(UnsupportedError, match="packedkv fit"):
        check_specs(["saw-int4:hessian=true"], plan_for(tiny_config("llama-gqa"), "decoded"))


def test_default_candidates_have_kernels_and_take_the_head_dim():
    found = default_specs(64)
    assert {"int-4", "kivi-2", "fp8", "hqmq-s24_r3"} <= set(found)
    assert not {"dense", "additive-k48_r4", "polarquant-4"} & set(found)


def test_per_class_of_bits_the_least_error_is_chosen_and_the_useless_are_left_out():
    def row(spec, role, bits, error):
        return Candidate(spec, role, bits, error)

    keys = [
        row("int-2", "key", 2.5, 0.9),
        row("turboquant-2", "key", 2.2, 0.3),
        row("int-4", "key", 4.2, 0.02),
        row("saw-int4", "key", 4.2, 0.01),
        row("int:bits=4", "key", 4.2, 0.02),
        row("kivi-4", "key", 5.0, 0.05),
        row("int-8", "key", 8.2, 0.001),
    ]
    values = [row("int-4", "value", 4.2, 0.02), row("int:bits=4", "value", 4.2, 0.02)]
    found = choose({"key": keys, "value": values})
    assert found["key"] == ["turboquant-2", "saw-int4", "int-8"]
    assert found["value"] == ["int-4"]
    with pytest.raises(KVError, match="compresses values"):
        choose({"key": keys, "value": []})


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("1.5GB", 1_500_000_000),
        ("500 MB", 500_000_000),
        ("4096", 4096),
        ("1k", 1024),
    ],
)
def test_sizes_are_parsed_with_any_unit(text, nbytes):
    assert memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "8XB", "-1", "0", "8 i", "1e9", "8ib"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        memory(text)


def test_the_command_prints_a_recipe_and_writes_what_it_says(tmp_path, capsys):
    folder, out, text = save_tiny(tmp_path / "model"), tmp_path / "out", tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = f"advise {folder} --context 4k --memory 1400kb --text {text} --window-tokens 128 --output {out}".split()
    arguments += ["--specs", "int-8,int-4,kivi-4:group=32,window=64,int-2"]
    assert cli.main([*arguments, "--json", str(tmp_path / "advice.json")]) == 0
    told = capsys.readouterr().out
    for part in (
        "speed here: ",
        f"advised: {out / 'recipe.json'}",
        "use it",
        f"--specs {out / 'recipe.json'},dense",
        "not measured",
    ):
        assert part in told
    for name in ("recipe.json", "advice.json", "sensitivity.svg", "keys.svg"):
        assert (out / name).is_file()
        assert name == "recipe.json" or f"written: {out / name}" in told
    assert json.loads((tmp_path / "advice.json").read_text())["advised"]["spec"] == str(out / "recipe.json")
    assert cli.main(["describe", str(out / "recipe.json"), "--head-dim", "64"]) == 0
    assert "layers 0" in capsys.readouterr().out
    assert cli.main([*arguments, "--max-kl", "0.000001"]) == 1
    assert "NOT MET" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured_and_says_so(tmp_path, capsys, monkeypatch):
    from packedkv.cli.measure import sensitivity

    folder, text, whole, calls = save_tiny(tmp_path / "model"), tmp_path / "text.txt", sensitivity.compressed_logits, []
    text.write_text(TEXT)

    def logits(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(sensitivity, "compressed_logits", logits)
    out = tmp_path / "out"
    arguments = f"advise {folder} --context 4096 --memory 2MiB --text {text} --output {out}".split()
    assert cli.main([*arguments, "--window-tokens", "96", "--specs", "int-4,int-2"]) == 130
    assert f"kept in {out}" in capsys.readouterr().out
    assert len((out / "sensitivity.jsonl").read_text().splitlines()) == 1 + 2


def test_the_command_refuses_before_it_loads(tmp_path, capsys):
    assert cli.main(["advise", "nowhere", "--context", "10", "--output", str(tmp_path)]) == 2
    assert "--memory" in capsys.readouterr().err
    assert cli.main(["advise", "x", "--context", "9", "--memory", "1g", "--specs", "saw-int5", "--output", "o"]) == 2
    assert "unknown codec" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_smollm2_fits_the_memory_and_the_recipe_is_no_worse_than_presets_of_its_bytes(smollm2, tmp_path):
    asked = Request(
        32768, memory=180 << 20, window_tokens=48, windows=1, uniform=3, specs=("int-8", "turboquant-4", "turboquant-3")
    )
    found = advise(smollm2, load_text().text, asked, output=tmp_path)
    best = found["advised"]
    assert best["bytes"] <= 180 << 20
    assert best["kl"] == min(row["kl"] for row in found["finalists"])
    assert "turboquant-3" in {row["spec"] for row in found["finalists"]}
