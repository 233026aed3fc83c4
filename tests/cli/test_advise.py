"""``advise``: fits what is asked, is no worse than the presets of its bytes, and says what it did not measure."""

import argparse
import itertools
import json
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch

import packedkv
from packedkv.cli import main as cli
from packedkv.cli.advise import run, steps
from packedkv.cli.advise.candidates import Candidate, choose, default_specs
from packedkv.cli.advise.expected import cache_bytes
from packedkv.cli.advise.run import advise
from packedkv.cli.advise.search import Option, best_within, frontier, least_for
from packedkv.cli.advise.steps import Request
from packedkv.cli.commands.advise import memory, show
from packedkv.cli.measure import generation, perplexity, sensitivity
from packedkv.cli.measure.generation import Generation
from packedkv.cli.measure.rows import plain
from packedkv.errors import KVError, SpecError, UnsupportedError
from packedkv.integrations.transformers import cache_for
from packedkv.integrations.transformers.plan import plan_for
from packedkv.models import windows as text_windows
from packedkv.models.loading import load_text
from packedkv.registry import LayerChoice, scheme_of
from packedkv.scheme import mix_of
from tests.cli.tiny import TEXT, interrupting, save_tiny
from tests.conftest import tiny_config

SPECS = ("int-8", "int-4", "int-2", "saw-int4", "kivi-4", "turboquant-2")
CONTEXT, WINDOW = 4096, 128


def request_for(**options):
    return Request(**{"context": CONTEXT, "window_tokens": WINDOW, "specs": SPECS, **options})


@pytest.fixture(scope="module")
def advised(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    return advise(model, TEXT, request_for(memory=1_400_000), output=folder), folder


@pytest.fixture
def advised_folder(advised, tmp_path):
    """A copy of the folder of ``advised``: another request in it would overwrite its recipe."""
    return shutil.copytree(advised[1], tmp_path / "advice")


def measured(model, spec):
    """KL on the windows after the first, on which the search was."""
    scores = []
    for window in text_windows.split_windows(text_windows.tokenize(model.tokenizer, TEXT, 3 * WINDOW), 3, WINDOW)[1:]:
        reference = perplexity.uncompressed(model.model, window)
        scores.append(reference.score(perplexity.compressed_logits(model.model, spec, window)[0]))
    return perplexity.summarize(scores).kl


def test_the_recipe_fits_and_is_no_worse_than_any_preset_that_fits(model, advised):
    found, folder = advised
    best = found["advised"]
    assert best["spec"] == str(folder / "recipe.json")
    assert found["met"]
    fitting = [r for r in found["finalists"] if r["bytes"] <= 1_400_000]
    assert {"int-2", "turboquant-2"} <= {r["spec"] for r in fitting}
    assert best["kl"] == min(r["kl"] for r in fitting)
    mixture = packedkv.get(best["spec"])
    assert measured(model, mixture.without_windows()) == pytest.approx(best["kl"], rel=1e-4)
    assert measured(model, mixture) == pytest.approx(best["kl_as_served"], rel=1e-4)
    assert best["kl"] < measured(model, "int-2")
    cache = packedkv.cache_for(model.model, best["spec"], probe=False)
    for layer in range(3):
        cache.update(*torch.randn(2, 1, 2, CONTEXT, 64), layer)
    assert cache.report()["total_bytes"] == best["bytes"] <= 1_400_000


def test_the_result_says_what_was_chosen_where_and_what_was_not_measured(advised):
    found, folder = advised
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
    assert sum(row["predicted_kl"] for row in found["layers"]) == pytest.approx(found["advised"]["predicted_kl"])
    assert sum(row["bytes"] for row in found["layers"]) == found["advised"]["bytes"]
    told, timed = " ".join(found["not_measured"]), found["speed"]
    assert all(word in told for word in ("speed", "tasks", "windows of 128 tokens, not of 4096"))
    assert min(timed["tokens_per_s"], timed["uncompressed_tokens_per_s"]) > 0
    assert (timed["prompt_tokens"], timed["new_tokens"]) == (112, 16)
    assert repr(str(folder / "recipe.json")) in found["use"]["python"]
    assert json.loads(json.dumps(found))["keys"][0]["worst_head_ratio"] > 1
    assert len((folder / "sensitivity.jsonl").read_text().splitlines()) == 1 + len(found["sensitivity"])


def test_a_second_request_uses_the_rows_of_the_first(model, advised, advised_folder, monkeypatch):
    monkeypatch.setattr(sensitivity, "compressed_logits", lambda *_, **__: pytest.fail("measured again"))
    again = advise(model, TEXT, request_for(memory=2_000_000), output=advised_folder)
    assert again["advised"]["kl"] < advised[0]["advised"]["kl"]
    assert again["advised"]["bytes"] <= 2_000_000


def test_the_fewest_bytes_within_the_kl_are_advised_or_it_is_not_met(model, advised_folder):
    found = advise(model, TEXT, request_for(max_kl=0.5), output=advised_folder)
    assert found["met"]
    assert found["advised"]["kl"] <= 0.5
    good = [row for row in found["finalists"] if row["kl"] <= 0.5]
    assert found["advised"]["bytes"] == min(row["bytes"] for row in good)
    looser = advise(model, TEXT, request_for(max_kl=1.5), output=advised_folder)
    assert looser["advised"]["bytes"] < found["advised"]["bytes"]
    missed = advise(model, TEXT, request_for(memory=1_400_000, max_kl=1e-4), output=advised_folder)
    assert not missed["met"]
    assert missed["advised"]["bytes"] <= 1_400_000


def test_a_sum_that_promised_too_much_is_asked_for_more(model, advised_folder, monkeypatch):
    monkeypatch.setattr(steps.Search, "_measure", worse(steps.Search._measure, 3))
    found = advise(model, TEXT, request_for(max_kl=0.3), output=advised_folder)
    promised = sorted((r["predicted_kl"], -r["bytes"]) for r in found["finalists"] if r["predicted_kl"] is not None)
    assert 1 < len(promised) <= steps.TRIES
    assert promised == sorted(promised, key=lambda p: p[1]), "less KL was bought with more bytes"


@pytest.mark.parametrize("times", [100, math.nan])
def test_a_preset_that_measures_better_than_the_mixture_is_advised(model, tmp_path, monkeypatch, times):
    """Also where the mixture gives no numbers at all."""
    asked = request_for(memory=1_400_000, specs=("int-4", "int-2"))
    monkeypatch.setattr(steps.Search, "_measure", worse(steps.Search._measure, times))
    found = advise(model, TEXT, asked, output=tmp_path)
    assert found["advised"]["spec"] == "int-2"
    assert found["layers"] == []
    assert not (tmp_path / "recipe.json").exists()
    assert "cache_for(model, 'int-2')" in found["use"]["python"]
    assert found["finalists"][-1]["spec"] == "(mixture)"
    if math.isnan(times):
        line = next(line for line in show(plain(found)).splitlines() if "(mixture)" in line)
        assert line.split()[-4:-1] == ["-", "-", "-"]
        monkeypatch.setattr(perplexity.Reference, "score", lambda self, _: replace(self.score_itself(), kl=math.nan))
        with pytest.raises(KVError, match="are no numbers"):
            advise(model, TEXT, asked, output=tmp_path)


def test_a_layer_whose_logits_are_no_numbers_is_not_taken(model, tmp_path, monkeypatch):
    """Measured or read back from the file, where NaN is null."""
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


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({}, SpecError, "--memory"),
        ({"max_kl": 0.0}, SpecError, "above 0"),
        ({"context": 0, "memory": 1}, SpecError, "at least"),
        ({"memory": 10 << 20}, KVError, r"take 6\.00 MiB in 16 bit, which fits .* --max-kl"),
        ({"memory": 100_000}, KVError, r"go into 97\.66 KiB; the smallest .*, turboquant-2 for keys .* take 864"),
        ({"memory": 1_400_000, "specs": ("dense",)}, SpecError, "no candidate but dense"),
        ({"memory": 2_000_000, "specs": ("imt-4",)}, SpecError, "unknown codec"),
        ({"memory": 2_000_000, "specs": ("saw-int4:hessian=true",)}, UnsupportedError, "packedkv fit"),
        ({"memory": 2_000_000, "specs": ("recipe.json",)}, SpecError, "not another recipe"),
        ({"memory": 2_000_000, "window_tokens": 500}, KVError, "pass a longer text, or --window-tokens"),
    ],
)
def test_mistakes_are_refused(model, asked, error, said):
    """A request that nothing meets is answered with the least there is."""
    with pytest.raises(error, match=said):
        advise(model, TEXT[:900], request_for(**asked))


def test_default_candidates_have_kernels_and_take_the_head_dim():
    found = default_specs(64)
    assert {"int-4", "kivi-2", "fp8", "hqmq-s24_r3"} <= set(found)
    assert not {"dense", "additive-k48_r4", "polarquant-4"} & set(found)


def test_per_class_of_bits_the_least_error_is_chosen_and_the_useless_are_left_out():
    keys = {
        "int-2": (2.5, 0.9), "turboquant-2": (2.2, 0.3), "int-4": (4.2, 0.02), "saw-int4": (4.2, 0.01),
        "int:bits=4": (4.2, 0.02), "kivi-4": (5.0, 0.05), "int-8": (8.2, 0.001),
    }  # fmt: skip
    found = {"key": [Candidate(spec, "key", *figures) for spec, figures in keys.items()]}
    values = [Candidate(spec, "value", 4.2, 0.02) for spec in ("int-4", "int:bits=4")]
    chosen = choose(found | {"value": values})
    assert chosen == {"key": ["turboquant-2", "saw-int4", "int-8"], "value": ["int-4"]}
    with pytest.raises(KVError, match="compresses values"):
        choose(found | {"value": []})


# -- the command -------------------------------------------------------------------------------------------------------


def test_sizes_are_parsed_with_any_unit():
    sizes = {"8GiB": 8 << 30, "8g": 8 << 30, "1.5GB": 1_500_000_000, "500 MB": 500_000_000, "4096": 4096, "1k": 1024}
    assert {text: memory(text) for text in sizes} == sizes
    for text in ("", "GiB", "8XB", "-1", "0", "8 i", "1e9", "8ib"):
        with pytest.raises(argparse.ArgumentTypeError):
            memory(text)


@pytest.fixture
def command(tmp_path):
    folder, out, text = save_tiny(tmp_path / "model"), tmp_path / "out", tmp_path / "text.txt"
    text.write_text(TEXT)
    return f"advise {folder} --context 4k --text {text} --output {out}".split(), out


def test_the_command_prints_a_recipe_and_writes_what_it_says(command, tmp_path, capsys):
    arguments, out = command
    specs = "int-8,int-4,kivi-4:group=32,window=64,int-2"
    arguments += ["--memory", "1400kb", "--window-tokens", "128", "--specs", specs]
    assert cli.main([*arguments, "--json", str(tmp_path / "advice.json")]) == 0
    told, recipe = capsys.readouterr().out, str(out / "recipe.json")
    for part in ("speed here: ", f"advised: {recipe}", "use it", f"--specs {recipe},dense", "not measured"):
        assert part in told
    for name in ("recipe.json", "advice.json", "sensitivity.svg", "keys.svg"):
        assert (out / name).is_file()
        assert name == "recipe.json" or f"written: {out / name}" in told
    assert json.loads((tmp_path / "advice.json").read_text())["advised"]["spec"] == recipe
    assert cli.main(["describe", recipe, "--head-dim", "64"]) == 0
    assert "layers 0" in capsys.readouterr().out
    assert cli.main([*arguments, "--max-kl", "0.000001"]) == 1
    assert "NOT MET" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured_and_says_so(command, capsys, monkeypatch):
    arguments, out = command
    monkeypatch.setattr(sensitivity, "compressed_logits", interrupting(sensitivity.compressed_logits, 3))
    assert cli.main([*arguments, "--memory", "2MiB", "--window-tokens", "96", "--specs", "int-4,int-2"]) == 130
    assert f"kept in {out}" in capsys.readouterr().out
    assert len((out / "sensitivity.jsonl").read_text().splitlines()) == 1 + 2


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


# -- the knapsack, against every combination there is ------------------------------------------------------------------


def option(nbytes, kl):
    return Option(LayerChoice("int-4", "int-4"), nbytes, kl)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5, 0.9, 2.0])
def test_the_least_kl_within_the_budget_and_the_fewest_bytes_for_a_kl_are_found(seed, share):
    r = random.Random(seed)
    found = [[option(r.randint(10, 90), round(r.random(), 3)) for _ in range(4)] for _ in range(4)]
    sums = [(sum(o.nbytes for o in c), sum(o.kl for o in c)) for c in itertools.product(*found)]
    (low, least), (high, most) = (tuple(pick(column) for column in zip(*sums, strict=True)) for pick in (min, max))
    budget, target = int(low + share * (high - low)), least + share * (most - least)
    picked = best_within(found, budget)
    assert sum(o.nbytes for o in picked) <= budget
    assert sum(o.kl for o in picked) == pytest.approx(min(kl for size, kl in sums if size <= budget))
    assert all(o in group for o, group in zip(picked, found, strict=True))
    if 0 < share < 1:
        picked = least_for(found, target)
        assert sum(o.kl for o in picked) <= target
        assert sum(o.nbytes for o in picked) == min(size for size, kl in sums if kl <= target)


def test_nothing_fits_and_nothing_is_good_enough():
    found = [[option(10, 0.5), option(20, 0.1)]] * 2
    assert best_within(found, 19) is None
    assert [o.nbytes for o in least_for(found, 0.01)] == [20, 20], "the best there is"
    assert [o.nbytes for o in least_for(found, 5.0)] == [10, 10]
    kept = frontier([option(5, 0.4), option(3, 0.4), option(9, 0.1), option(7, 0.5), option(3, 0.6)])
    assert [(o.nbytes, o.kl) for o in kept] == [(3, 0.4), (9, 0.1)], "more for nothing is left out"


def test_sizes_beyond_the_steps_never_exceed_the_budget():
    found = [[option(s * 1_000_003 + i, 1 / s) for s in range(1, 9)] for i in range(40)]
    for budget in (41_000_000, 123_456_789, 250_000_001):
        picked = best_within(found, budget)
        assert sum(o.nbytes for o in picked) <= budget
        left = budget - sum(o.nbytes for o in picked)
        cheapest = min(
            o.nbytes - had.nbytes for group, had in zip(found, picked, strict=True) for o in group if o.kl < had.kl
        )
        assert left < cheapest, "what is left buys nothing more"


# -- bytes foretold are those that the real cache reports --------------------------------------------------------------


EXACT = (
    "dense", "int-4", "kivi-2", "octopus-4", "innerq-hybrid", "hqmq-s24_r3:outliers=3", "ultraquant", "fp8",
    mix_of([scheme_of(LayerChoice("kivi-4", "int-3")), scheme_of(LayerChoice("dense", "fp8"))]),
)  # fmt: skip


def held(config, spec, tokens, dtype=torch.float32, batch=1):
    cache = cache_for(config, spec, probe=False, prefill="decoded")
    k, v = torch.randn(2, batch, config.num_key_value_heads, tokens, config.head_dim, dtype=dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(k, v, layer)
    return cache


def foretold(config, spec, tokens, dtype=torch.float32, **options):
    return cache_bytes(spec, plan_for(config, "decoded"), tokens, dtype, **options)


GQA, ONE_LAYER = tiny_config("llama-gqa"), tiny_config("llama-mqa", num_hidden_layers=1)
SHORT = (1, torch.float32, 1), (100, torch.bfloat16, 2), (777, torch.float16, 1)
IN_PARTS = [(tokens, torch.float32, 1) for tokens in (4096, 4097, 8300)]


@pytest.mark.parametrize(
    ("config", "spec", "tokens", "dtype", "batch"),
    [
        *((GQA, spec, *size) for spec in EXACT for size in SHORT),
        *((ONE_LAYER, spec, *size) for spec in ("int-4", "kivi-4", "innerq-base") for size in IN_PARTS),
    ],
)
def test_every_byte_of_a_prefill_is_foretold(config, spec, tokens, dtype, batch):
    found = held(config, spec, tokens, dtype, batch).report()["total_bytes"]
    assert foretold(config, spec, tokens, dtype, batch=batch) == found


@pytest.mark.parametrize("spec", ["int-4", "kivi-2"])
def test_pages_that_grow_token_by_token_stay_below_the_stated_most(spec):
    cache = held(ONE_LAYER, spec, 50)
    for n in range(51, 400):
        cache.update(*torch.randn(2, 1, 1, 1, 64), 0)
        if n % 7 == 0:
            assert cache.report()["total_bytes"] <= foretold(ONE_LAYER, spec, n, grown=True)


@pytest.mark.parametrize("tokens", [100, 777, 4200])
def test_age_tiers_are_foretold_to_a_page_of_the_newer_one(tokens):
    spec, page = "kivi-2:window=200,sink=4,recent=int-8", packedkv.get("int-8").page_layout(64).page_bytes + 4
    assert 0 <= held(ONE_LAYER, spec, tokens).report()["total_bytes"] - foretold(ONE_LAYER, spec, tokens) <= page


def test_sliding_layers_hold_their_window_alone():
    config = tiny_config("mistral")
    found = held(config, "int-4", 400).report()["total_bytes"]
    page = packedkv.get("int-4").page_layout(64).page_bytes * config.num_key_value_heads
    assert abs(foretold(config, "int-4", 400) - found) <= config.num_hidden_layers * (page + 4)
    assert foretold(config, "int-4", 400) == foretold(config, "int-4", 10**6)


@pytest.mark.parametrize("hidden", [True, False], ids=["not stated", "layers differ"])
def test_a_config_that_hides_its_sizes_is_refused(hidden):
    plan = plan_for(tiny_config("llama-gqa" if hidden else "gemma4"), "decoded")
    if hidden:
        plan = replace(plan, layers=tuple(replace(layer, heads=None) for layer in plan.layers))
    with pytest.raises(UnsupportedError, match="one number of KV heads and one head_dim of all layers"):
        cache_bytes("int-4", plan, 10, torch.float32)


# -- speed is that through the advised cache ---------------------------------------------------------------------------


def test_each_figure_is_of_its_own_cache(llama, monkeypatch):
    scheme = packedkv.get("int-4")
    filled, greedy = [], generation.greedy

    def timed(model, prompt, new_tokens, cache):
        greedy(model, prompt, new_tokens, cache)
        filled.append(cache)
        return Generation([], [1 / len(filled)], 0.0)

    monkeypatch.setattr(generation, "greedy", timed)
    found = run.speed(llama, scheme, torch.arange(3, 60), 0)
    packed, plain = filled
    assert {layer.cache.scheme for layer in packed.layers} == {replace(scheme, mean="none")}  # decided for this model
    assert packed.get_seq_length() == plain.get_seq_length() == 41 + run.NEW_TOKENS - 1
    assert not isinstance(plain, type(packed))
    assert (found["tokens_per_s"], found["uncompressed_tokens_per_s"], found["prompt_tokens"]) == (1.0, 2.0, 41)
