"""Whole runs on a tiny model: rows, order of work, what stops a run, and that going on loses and doubles nothing."""

import errno
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.cli.tiny import TEXT, corrupt, tiny_llama, tiny_loaded
from tests.conftest import tiny_model

from packedkv.cli.measure.compare import Settings, compare
from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv.errors import KVError, ShapeError
from packedkv.fitting.fit import fit_model
from packedkv.models.loading import SampleText
from packedkv.registry import LayerChoice, write_recipe
from packedkv_lab.eval import batches, store
from packedkv_lab.eval import run as module
from packedkv_lab.eval.about import weights_sha256
from packedkv_lab.eval.run import RunSettings, evaluate, merge
from packedkv_lab.eval.scoring import Reader
from packedkv_lab.eval.store import ITEMS, RESULTS, RUN, read_run
from packedkv_lab.eval.tasks.base import Item, TaskSettings

SPECS = ["dense", "int-4"]
TASKS = ["perplexity", "kl", "kv_retrieval", "needle"]
ITEMS_OF = {"perplexity": 2, "kl": 2, "kv_retrieval": 5, "needle": 2}
RECORDS = [{"ordered_kv_records": [[f"key {i} {k}", f"value {i} {k}"] for k in range(20)]} for i in range(9)]


@pytest.fixture(scope="module")
def model():
    return tiny_loaded()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "kv.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    return folder


def settings_for(data, **changed) -> RunSettings:
    task = TaskSettings(
        text=SampleText(TEXT, "text", "00" * 32),
        limits=ITEMS_OF,
        data={"kv_retrieval": Path(data) / "kv.jsonl"},
        lengths=(480,),
        depths=(0.0, 1.0),
        window_tokens=96,
    )
    return RunSettings(task, **changed)


def lines_of(folder) -> list[dict]:
    return read_run(folder).lines


def counted(folder) -> Counter:
    """Finished items by spec and task, from the file itself: a double line would show."""
    rows = [json.loads(line) for line in (Path(folder) / ITEMS).read_text().splitlines()]
    assert len({(r["spec"], r["task"], r["item"]) for r in rows}) == len(rows)
    return Counter((r["spec"], r["task"]) for r in rows)


def complete(specs=SPECS, of=ITEMS_OF) -> Counter:
    return Counter({(spec, task): n for spec in (UNCOMPRESSED, *specs) for task, n in of.items()})


def values(rows) -> dict:
    return {(r["spec"], r["task"], r["metric"], str(r["group"])): r["value"] for r in rows}


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    return evaluate(model, SPECS, TASKS, folder, settings_for(data)), folder


# -- several processes -------------------------------------------------------------------------------------------------


def test_processes_that_share_the_specs_read_each_item_once(whole, model, data, tmp_path, monkeypatch):
    shared = settings_for(data, share=tmp_path / "taken")
    shared.share.mkdir()
    claim = module.taken
    with monkeypatch.context() as patch:  # the first is slow: another will take every second spec
        patch.setattr(module, "taken", lambda mark: mark.name[-1] in "02" and claim(mark))
        first = evaluate(model, SPECS, TASKS, tmp_path / "first", shared)
    evaluate(model, SPECS, TASKS, tmp_path / "second", shared)
    mine, others = set(counted(tmp_path / "first")), set(counted(tmp_path / "second"))
    assert mine
    assert others
    assert not mine & others
    assert {spec for spec, _ in mine}.isdisjoint(spec for spec, _ in others)
    assert first.status == "complete", "there was nothing left to take"
    rows = merge([tmp_path / "first", tmp_path / "second"], tmp_path / "both")
    assert counted(tmp_path / "both") == complete()
    assert values(rows) == pytest.approx(values(whole[0].rows), rel=1e-5, abs=1e-7, nan_ok=True)


# -- what a run gives --------------------------------------------------------------------------------------------------


def test_every_item_is_a_line_and_every_metric_a_row(whole):
    found, folder = whole
    assert found.status == "complete"
    assert counted(folder) == complete()
    promised = {"spec", "task", "item", "group", "scores", "prefill", "seconds", "bytes", "elements"}
    for line in lines_of(folder):
        assert promised <= set(line)
        assert line["prefill"] == "decoded"
        assert line["bytes"] > 0
        assert ("output" in line) == (line["task"] in ("kv_retrieval", "needle"))
    rows = json.loads((folder / RESULTS).read_text())["rows"]
    assert len(rows) == len(found.rows)
    wanted = {"spec", "task", "metric", "value", "low", "high", "items", "count", "difference", "difference_low"}
    wanted |= {"difference_high", "effective_bits", "key_bits", "value_bits", "cache_bytes", "ratio_to_16bit"}
    wanted |= {"prefill", "seconds", "group", "model", "versions", "seed", "better", "status"}
    assert all(wanted <= set(row) for row in rows)
    metrics = {(r["task"], r["metric"]) for r in rows if r["group"] is None}
    assert metrics == {
        *(("perplexity", "perplexity"), ("kl", "kl"), ("kl", "top1"), ("kl", "top5")),
        *(("kv_retrieval", m) for m in ("recall", "prefix", "agreement")),
        *(("needle", m) for m in ("recall", "prefix", "agreement")),
    }
    cells = {str(r["group"]) for r in rows if r["task"] == "needle" and r["group"]}
    assert cells == {str({"length": 480, "depth": d}) for d in (0.0, 1.0)}


def test_run_json_says_what_the_numbers_depend_on(whole, model):
    about = json.loads((whole[1] / RUN).read_text())
    assert (about["format"], about["version"], about["seed"], about["device"]) == ("packedkv-eval", 1, 0, "cpu")
    assert about["model"]["sha256"] == weights_sha256(model.model)
    assert (about["model"]["layers"], about["model"]["kv_heads"], about["model"]["head_dim"]) == (3, 2, 64)
    assert about["specs"] == SPECS
    assert about["tasks"]["kv_retrieval"]["source"]["name"] == "kv.jsonl"
    assert about["tasks"]["perplexity"]["window_tokens"] == 96
    assert {"packedkv", "torch", "transformers"} <= set(about["versions"])


def test_dense_is_the_uncompressed_model_and_noise_is_not(whole, model, data, tmp_path):
    found = values(whole[0].rows)
    for task, metric in (("perplexity", "perplexity"), ("kv_retrieval", "prefix")):
        wanted = found[UNCOMPRESSED, task, metric, "None"]
        assert found["dense", task, metric, "None"] == pytest.approx(wanted, rel=5e-3)
    assert found["dense", "kl", "kl", "None"] < 1e-3 < found["int-4", "kl", "kl", "None"]
    assert found["dense", "needle", "agreement", "None"] == 1.0
    noise = replace(corrupt(), spec="noise")
    lost = values(evaluate(model, [noise], ["kl"], tmp_path, settings_for(data)).rows)
    assert lost["noise", "kl", "kl", "None"] > 5 * found["int-4", "kl", "kl", "None"]


def test_windows_agree_with_compare(whole, model):
    options = {"windows": 2, "window_tokens": 96, "new_tokens": 0, "queries": 0}
    rows = {r["spec"]: r for r in compare(model, SPECS, TEXT, Settings(**options))}
    found = values(whole[0].rows)
    for spec in SPECS:
        assert found[spec, "perplexity", "perplexity", "None"] == pytest.approx(rows[spec]["perplexity"], rel=1e-4)
        assert found[spec, "kl", "kl", "None"] == pytest.approx(rows[spec]["kl"], rel=1e-3)
        assert found[spec, "kl", "top1", "None"] == pytest.approx(rows[spec]["top1_agreement"])
        row = next(r for r in whole[0].rows if (r["spec"], r["task"]) == (spec, "kl"))
        assert row["effective_bits"] == pytest.approx(rows[spec]["effective_bits"])
        assert row["cache_bytes"] == rows[spec]["cache_bytes"]


def test_an_exact_prefill_is_said_in_every_line_and_row(model, data, tmp_path):
    found = evaluate(model, ["int-4"], ["kl", "kv_retrieval"], tmp_path, settings_for(data, prefill="exact"))
    assert {line["prefill"] for line in lines_of(tmp_path)} == {"exact"}
    assert {row["prefill"] for row in found.rows} == {"exact"}


def test_fitted_constants_of_a_file_are_used_and_named(model, data, tmp_path):
    spec = "innerq-base:sink=0,window=0"
    fitted = fit_model(model, spec, TEXT, windows=2, window_tokens=96)
    one = evaluate(model, [spec], ["kl"], tmp_path / "a", settings_for(data), params=[fitted])
    other = evaluate(model, [spec], ["kl"], tmp_path / "b", settings_for(data))
    assert read_run(tmp_path / "a").about["params"][spec]["tokens"] == fitted.tokens
    assert values(one.rows)[spec, "kl", "kl", "None"] != values(other.rows)[spec, "kl", "kl", "None"]
    with pytest.raises(KVError, match="holds a run that differs"):
        evaluate(model, [spec], ["kl"], tmp_path / "a", settings_for(data))


# -- going on ----------------------------------------------------------------------------------------------------------


def interrupted_after(monkeypatch, count):
    """Stop the run when ``count`` items are finished."""
    add = store.Store.add

    def counting(self, line):
        if len(self.lines) == count:
            raise KeyboardInterrupt
        add(self, line)

    monkeypatch.setattr(store.Store, "add", counting)


@pytest.mark.parametrize("count", [1, 4, 11, 20, 30])
def test_interrupted_and_gone_on_with_is_as_if_never_interrupted(whole, model, data, tmp_path, monkeypatch, count):
    with monkeypatch.context() as patch:
        interrupted_after(patch, count)
        found = evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    assert found.status == "interrupted"
    assert all(row["partial"] for row in found.rows)
    assert sum(counted(tmp_path).values()) == count
    assert json.loads((tmp_path / RESULTS).read_text())["rows"]
    kept = (tmp_path / ITEMS).read_bytes()
    again = evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    assert again.status == "complete"
    assert (tmp_path / ITEMS).read_bytes().startswith(kept)
    assert counted(tmp_path) == complete()
    wanted = values(whole[0].rows)
    assert values(again.rows) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert not any(row["partial"] for row in again.rows)


def test_a_finished_run_reads_nothing_again(whole, model, data, monkeypatch):
    monkeypatch.setattr(Reader, "reading", lambda self: pytest.fail("something was read"))
    before = (whole[1] / ITEMS).read_bytes()
    again = evaluate(model, SPECS, TASKS, whole[1], settings_for(data))
    assert values(again.rows) == values(whole[0].rows)
    assert (whole[1] / ITEMS).read_bytes() == before


def test_specs_tasks_and_items_may_be_added(model, data, tmp_path):
    settings = settings_for(data)
    evaluate(model, ["int-4"], ["kl"], tmp_path, settings)
    first = (tmp_path / ITEMS).read_bytes()
    more = replace(settings, task=replace(settings.task, limits={"kl": 3, "kv_retrieval": 2}))
    found = evaluate(model, ["saw-int4"], ["kl", "kv_retrieval"], tmp_path, more)
    assert (tmp_path / ITEMS).read_bytes().startswith(first)
    of = counted(tmp_path)
    assert of["int-4", "kl"] == 2
    assert of["saw-int4", "kl"] == of[UNCOMPRESSED, "kl"] == 3
    assert of["saw-int4", "kv_retrieval"] == 2
    rows = {(r["spec"], r["task"]): r for r in found.rows if r["group"] is None}
    assert rows["int-4", "kl"]["items"] == 2
    assert rows["int-4", "kl"]["difference"] is not None, "over the items that both have"


def test_interrupted_before_anything_was_finished(model, data, tmp_path, monkeypatch):
    interrupted_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    assert (tmp_path / ITEMS).read_text() == ""


def test_a_spent_budget_begins_no_further_call(whole, model, data, tmp_path, monkeypatch):
    now = [0.0]

    def calling(original):
        def call(*args):
            now[0] += 1.0
            return original(*args)

        return call

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Reader, "window", calling(Reader.window))
    monkeypatch.setattr(Reader, "answers", calling(Reader.answers))
    found = evaluate(model, SPECS, TASKS, tmp_path, settings_for(data, budget=4.5))
    assert found.status == "budget"
    assert now[0] <= 4.5
    assert 0 < sum(counted(tmp_path).values()) < 33
    again = evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    assert counted(tmp_path) == complete()
    assert values(again.rows) == pytest.approx(values(whole[0].rows), rel=1e-4, abs=1e-6)


def test_a_disk_that_fills_up_keeps_what_was_finished(model, data, tmp_path, monkeypatch):
    write, taken = os.write, 0

    def until_full(file, text):
        nonlocal taken
        if taken + len(text) > 4000:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken += len(text)
        return write(file, text)

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "write", until_full)
        with pytest.raises(KVError, match=r"No space left on device.*finished so far are kept: free some space"):
            evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    kept = sum(counted(tmp_path).values())
    assert kept > 3
    evaluate(model, SPECS, TASKS, tmp_path, settings_for(data))
    assert counted(tmp_path) == complete()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_another_model_seed_or_setting_is_refused(whole, model, data):
    before = {p.name: p.read_bytes() for p in whole[1].iterdir()}
    settings = settings_for(data)
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1e-3
    task = settings.task
    for changed, said in (
        ((replace(model, model=other), settings), "model sha256"),
        ((model, replace(settings, task=replace(task, seed=1))), "seed: 0 there, 1 here"),
        ((model, replace(settings, prefill="exact")), "settings prefill"),
        ((model, replace(settings, changes={"stress": {"factor": 8.0}})), "settings stress"),
        ((model, replace(settings, task=replace(task, window_tokens=64))), "kl window_tokens: 96 there, 64 here"),
        ((model, replace(settings, task=replace(task, text=SampleText(TEXT + "x", "t", "11")))), "kl text_sha256"),
        ((model, replace(settings, task=replace(task, depths=(0.5,)))), "needle depths"),
    ):
        with pytest.raises(KVError, match="holds a run that differs from this one") as caught:
            evaluate(changed[0], SPECS, TASKS, whole[1], changed[1])
        assert said in str(caught.value)
    assert {p.name: p.read_bytes() for p in whole[1].iterdir()} == before


def test_a_recipe_written_anew_under_its_name_is_refused_and_the_same_one_is_gone_on_with(model, data, tmp_path):
    path = tmp_path / "recipe.json"
    choices = [LayerChoice("int-8", "int-4")] * 3
    write_recipe(path, choices)
    first = evaluate(model, [str(path)], ["kl"], tmp_path / "out", settings_for(data))
    write_recipe(path, choices, {"note": "the same layers"})
    assert values(evaluate(model, [str(path)], ["kl"], tmp_path / "out", settings_for(data)).rows) == values(first.rows)
    write_recipe(path, [*choices[:2], LayerChoice("int-2", "int-4")])
    with pytest.raises(KVError, match=r"holds a run that differs.*recipe\.json"):
        evaluate(model, [str(path)], ["kl"], tmp_path / "out", settings_for(data))


def test_a_head_dim_that_a_codec_cannot_take_is_refused_before_any_work(data, tmp_path):
    narrow = replace(tiny_loaded(), model=tiny_model("llama-gqa", vocab_size=256, head_dim=36))
    with pytest.raises(ShapeError, match="head_dim=36"):
        evaluate(narrow, ["saw-int4"], ["kl"], tmp_path / "new", settings_for(data))
    assert not (tmp_path / "new").exists()


def test_items_without_a_result_do_not_stop_a_run(model, data, tmp_path):
    pytest.importorskip("sklearn")
    spec = "saw-int4:kmeans=512"
    found = evaluate(model, [spec, "int-4"], ["kv_retrieval"], tmp_path, settings_for(data))
    of = {r["spec"]: r for r in found.rows if r["metric"] == "recall"}
    assert of["int-4"]["failed"] == 0
    failed = [line for line in lines_of(tmp_path) if line.get("error")]
    assert failed
    assert {line["spec"] for line in failed} == {spec}
    assert all("needs at least 512 tokens to fit on" in line["error"] for line in failed)
    assert "needs at least 512 tokens" in read_run(tmp_path).about["notes"][spec][0]
    again = evaluate(model, [spec, "int-4"], ["kv_retrieval"], tmp_path, settings_for(data))
    assert len(lines_of(tmp_path)) == 15
    assert values(again.rows) == values(found.rows)


def test_too_little_memory_halves_the_call_and_stops_at_one_sequence(model, data, tmp_path, monkeypatch):
    sizes, most = [], 1
    original = Reader.answers

    def small(self, prompts, *rest):
        sizes.append(prompts.shape[0])
        if prompts.shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto")
        return original(self, prompts, *rest)

    monkeypatch.setattr(Reader, "answers", small)
    settings = settings_for(data, batch=16)
    evaluate(model, ["int-4"], ["needle"], tmp_path / "a", settings)
    assert max(sizes) == 2
    assert counted(tmp_path / "a") == complete(["int-4"], {"needle": 2})
    most = 0
    with pytest.raises(KVError, match=r"too little memory for one item \(CUDA out of memory. Tried\)"):
        evaluate(model, ["int-4"], ["needle"], tmp_path / "b", settings)


def test_the_hash_of_the_weights_sees_every_weight_and_no_order():
    model = tiny_llama()
    one = weights_sha256(model)
    assert one == weights_sha256(tiny_llama())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-6
    assert weights_sha256(model) != one
    assert weights_sha256(tiny_llama().to(torch.bfloat16)) != one


def test_a_call_has_a_bound_on_its_tokens():
    item = Item("t", "a", "answer", max_new_tokens=4)

    def sizes(count, tokens, batch):
        return [len(group) for group in batches._equal([(item, [0] * tokens)] * count, batch)]

    assert sizes(10, 5000, 16) == [3, 3, 3, 1]
    assert sizes(10, 5000, 64) == [10], "who asks for larger calls gets them"
    assert sizes(2, 10**6, 16) == [1, 1]
