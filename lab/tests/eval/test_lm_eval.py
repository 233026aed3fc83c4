"""The model ``packedkv`` of lm-evaluation-harness: reads the packed cache, says so, and otherwise is lm-eval's ``hf``.

Needs the extra ``eval`` (``make test-eval``). Small models are made here; the real one runs in a ``slow`` test, which
skips where it cannot be had.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.tiny import TEXT, corrupt, tiny_llama, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

import packedkv
from packedkv.cli.measure.caches import packed_cache
from packedkv.cli.measure.perplexity import compressed_logits
from packedkv.errors import FormatError, ModelError, SpecError, UnsupportedError
from packedkv.fitting.fit import fit_model
from packedkv.models.loading import LoadedModel, load_text

pytest.importorskip("lm_eval", reason="needs the extra eval: make test-eval")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::ResourceWarning")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from packedkv.integrations.transformers.argument import passing  # noqa: E402
from packedkv_lab.eval import lm_eval as integration  # noqa: E402
from packedkv_lab.eval.lm_eval import PackedKVLM  # noqa: E402

ROOT = Path(__file__).parents[3]
INT4 = "int-4"  # no window, no sink: every token is encoded


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory):
    """No test asks a hub for anything; data sets built from local files go to a folder that goes away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


def tiny_loaded(dtype=torch.float32) -> LoadedModel:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return LoadedModel(tiny_llama().to(dtype), tokenizer, "tiny", "made in the test")


def save(loaded, folder):
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def model():
    return tiny_loaded()


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


PAIRS = requests(
    "loglikelihood",
    (TEXT[:90], " what attention"),
    (TEXT[:90], " what"),
    (TEXT[:40], " every byte of it"),
    (TEXT[5:45], " every byte of it"),
    (TEXT[:90], "a"),
    (TEXT[:90], "b"),
    ("", "counted"),
)
DOCUMENTS = requests("loglikelihood_rolling", (TEXT[:200],), (TEXT[100:350],))
PROMPTS = requests(
    "generate_until",
    *((text, {"until": ["zz"], "max_gen_toks": 12}) for text in (TEXT[:60], TEXT[3:90], TEXT[20:80])),
)


def answers(lm):
    return [
        lm.loglikelihood(PAIRS, disable_tqdm=True),
        lm.loglikelihood_rolling(DOCUMENTS, disable_tqdm=True),
        lm.generate_until(PROMPTS, disable_tqdm=True),
    ]


# -- the real model: first, because it takes longest -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hf_and_the_dense_preset_give_the_same_scores_on_the_real_model(smollm2, tmp_path):
    """Float32 weights: ``dense`` holds fp16, so log-likelihoods move in the third decimal; in float32 not a bit."""
    text = load_text().text
    items = [text[at : at + 400].rsplit(" ", 1)[0] for at in range(0, 2000, 500)]
    rows = [{"ctx": x[:-20], "endings": [x[-20:], " the of and in"], "label": 0} for x in items]
    task = local_choices(write_lines(tmp_path / "items.jsonl", rows))
    models = (
        HFLM(smollm2.model, tokenizer=smollm2.tokenizer),
        *(PackedKVLM(smollm2, spec) for spec in ("dense:dtype=float32", "dense", "saw-int4")),
    )
    own, same, dense, packed = (evaluate(model, task) for model in models)
    resps = [[s["resps"] for s in found["samples"]["choices"]] for found in (own, same)]
    assert resps[0] == resps[1]
    assert own["results"] == dense["results"] == packed["results"], "every item is answered as without a cache"
    assert same["config"]["packedkv"]["sha256"] == smollm2.sha256


# -- it is lm-eval's hf model ------------------------------------------------------------------------------------------


def test_the_name_is_registered_by_the_import_and_by_the_package():
    assert get_model("packedkv") is PackedKVLM
    pyproject = (ROOT / "lab" / "pyproject.toml").read_text()
    assert '[project.entry-points."lm_eval.models"]\npackedkv = "packedkv_lab.eval.lm_eval:PackedKVLM"' in pyproject
    assert 'packedkv-lm-eval = "packedkv_lab.eval.lm_eval:main"' in pyproject


@pytest.mark.parametrize("prefill", ["decoded", "exact"])
@pytest.mark.parametrize(
    ("dtype", "spec"), [("bfloat16", "dense"), ("float16", "dense"), ("float32", "dense:dtype=float32")]
)
def test_a_cache_that_rounds_nothing_gives_hf_s_answers_to_the_bit(dtype, spec, prefill):
    loaded = tiny_loaded(getattr(torch, dtype))
    own = answers(HFLM(loaded.model, tokenizer=loaded.tokenizer))
    pairs, documents, texts = answers(PackedKVLM(loaded, spec, prefill))
    assert texts == own[2]
    if prefill == "decoded":
        assert [pairs, documents] == own[:2]
    else:  # split into calls, matrix products sum in another order
        rel = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
        assert [p for p, _ in pairs] == pytest.approx([p for p, _ in own[0]], rel=rel)
        assert documents == pytest.approx(own[1], rel=1e-2)
    assert all(len(text) for text in texts)


def test_too_long_requests_lose_their_beginning_as_in_hf():
    loaded = tiny_loaded()
    asked = requests("loglikelihood", (TEXT[:700], TEXT[700:720]), (TEXT[:512], "x"), (TEXT[:511], "x"))
    own = HFLM(loaded.model, tokenizer=loaded.tokenizer).loglikelihood(asked, disable_tqdm=True)
    assert PackedKVLM(loaded, "dense:dtype=float32").loglikelihood(asked, disable_tqdm=True) == own


def test_a_folder_is_loaded_as_hf_loads_it(tmp_path):
    loaded = tiny_loaded(torch.bfloat16)
    save(loaded, tmp_path)
    ours = PackedKVLM.create_from_arg_string(f"pretrained={tmp_path},spec=dense", {"batch_size": 1, "device": "cpu"})
    assert ours.model.dtype == torch.bfloat16
    assert answers(ours) == answers(HFLM(str(tmp_path), device="cpu"))
    assert ours.get_model_info()["packedkv"]["model"] == str(tmp_path)


# -- every score comes from the packed cache ---------------------------------------------------------------------------


def log_likelihood(logits, ids, n):
    return logits[-n:].log_softmax(-1).gather(1, ids[-n:, None]).sum().item()


def test_decoded_scores_are_those_of_the_perplexity_protocol(model):
    """One call, decoded K and V of every token; the continuation's last token is not in it."""
    lm = PackedKVLM(model, INT4)
    found = lm.loglikelihood(PAIRS[:4], disable_tqdm=True)
    for request, (value, _) in zip(PAIRS, found, strict=False):
        ids = torch.tensor(model.tokenizer("".join(request.args))["input_ids"])
        logits, _ = compressed_logits(model.model, INT4, ids[:-1])
        last = compressed_logits(model.model, INT4, ids)[0][-1:]  # causal: the row of the last input token
        n = len(request.args[1])
        assert value == pytest.approx(log_likelihood(torch.cat([logits, last]), ids, n), abs=1e-3)
    assert lm.totals.calls == {"decoded": 3 * 4}, "three layers, four sequences, one call each"


def test_exact_reads_fresh_what_comes_before_the_last_context_token_and_nothing_else(model):
    lm = PackedKVLM(model, INT4, "exact")
    found = lm.loglikelihood(PAIRS[:1], disable_tqdm=True)[0][0]
    ids = torch.tensor(model.tokenizer("".join(PAIRS[0].args))["input_ids"])
    with packed_cache(model.model, INT4, prefill="exact") as cache, torch.no_grad():
        model.model(input_ids=ids[None, :89], **passing(model.model, cache))
        logits = model.model(input_ids=ids[None, 89:-1], **passing(model.model, cache)).logits[0]
    assert found == pytest.approx(log_likelihood(logits, ids, 15), abs=1e-4)
    assert lm.totals.calls == {"exact": 3, "decoded": 3}


def test_noise_in_the_cache_is_not_the_right_answer(model):
    """The harness can fail: answers through a cache of noise are not those of the model."""
    right, wrong = (answers(PackedKVLM(model, spec)) for spec in ("dense", corrupt()))
    assert all(abs(a - b) > 0.1 for (a, _), (b, _) in zip(right[0], wrong[0], strict=True))
    assert right[2] != wrong[2]


def test_an_exact_prefill_does_not_score_a_single_token_continuation(model):
    """The trap: the token that is scored follows the context, so one call over the context would never read a code."""
    asked = PAIRS[4:6]
    plain = [p for p, _ in HFLM(model.model, tokenizer=model.tokenizer).loglikelihood(asked, disable_tqdm=True)]
    for prefill in ("decoded", "exact"):
        found = [p for p, _ in PackedKVLM(model, INT4, prefill).loglikelihood(asked, disable_tqdm=True)]
        assert min(abs(a - b) for a, b in zip(plain, found, strict=True)) > 1e-3


def test_rolling_has_nothing_to_prefill_and_reads_codes_throughout(model):
    lm = PackedKVLM(model, INT4, "exact")
    asked = requests("loglikelihood_rolling", (TEXT[:400],))
    found = lm.loglikelihood_rolling(asked, disable_tqdm=True)[0]
    assert lm.totals.calls == {"decoded": 6}, "400 tokens are two calls of at most 256, in three layers"
    decoded = PackedKVLM(model, INT4).loglikelihood_rolling(asked, disable_tqdm=True)[0]
    assert found == pytest.approx(decoded, rel=1e-3), "without a window, the split into calls changes nothing"


def test_rounded_queries_are_read_inside_attention(model):
    lm = PackedKVLM(model, "ultraquant:queries=fp8,dense_layers=0")
    answers(lm)
    assert set(lm.totals.calls) == {"streamed"}
    assert lm.get_model_info()["packedkv"]["attention"] == "streamed"
    assert model.model.config._attn_implementation == "sdpa", "the model's own attention is set again"


@pytest.mark.parametrize("prefill", ["decoded", "exact"])
def test_a_generation_reads_the_packed_cache(model, prefill):
    lm = PackedKVLM(model, INT4, prefill)
    found = lm.generate_until(PROMPTS[:1], disable_tqdm=True)
    ids = torch.tensor([model.tokenizer(TEXT[:60])["input_ids"]])
    made = []
    with packed_cache(model.model, INT4, prefill=prefill) as cache, torch.no_grad():
        if prefill == "exact":
            model.model(input_ids=ids[:, :-1], **passing(model.model, cache))
            ids = ids[:, -1:]
        for _ in range(12):
            ids = model.model(input_ids=ids, **passing(model.model, cache)).logits[:, -1].argmax(-1, keepdim=True)
            made.append(int(ids))
    assert found == [model.tokenizer.decode(made, skip_special_tokens=True)]
    assert lm.totals.calls["decoded"] == 3 * 12
    assert lm.totals.calls.get("exact", 0) == (3 if prefill == "exact" else 0)


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["decoded", "exact"])
@pytest.mark.parametrize("spec", ["kivi-2:window=8", "saw-int4", "octopus-3", "innerq-base"])
def test_a_batch_of_equal_lengths_gives_what_single_sequences_give(model, spec, prefill):
    """Groups, windows and fitted constants of a sequence do not see its neighbours in the batch."""
    one, many = (answers(PackedKVLM(model, spec, prefill, batch_size=n)) for n in (1, 4))
    for a, b in zip(one[0], many[0], strict=True):
        assert a[0] == pytest.approx(b[0], abs=2e-3)
    assert one[1] == pytest.approx(many[1], rel=1e-4)
    assert one[2] == many[2]


def test_answers_come_in_the_order_of_the_requests_and_equal_inputs_share_a_call(model):
    lm = PackedKVLM(model, INT4, batch_size=8)
    found = lm.loglikelihood(PAIRS, disable_tqdm=True)
    turned = lm.loglikelihood(PAIRS[::-1], disable_tqdm=True)
    assert [p for p, _ in found] == pytest.approx([p for p, _ in turned[::-1]], abs=1e-3)
    alone = PackedKVLM(model, INT4)
    alone.loglikelihood(PAIRS[4:6], disable_tqdm=True)
    assert alone.totals.calls == {"decoded": 3}, "contexts are equal and the last token is not an input"


def test_padding_never_reaches_the_cache(model):
    lm = PackedKVLM(model, INT4, batch_size=2)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(UnsupportedError, match="prompts of unequal length in one batch; pass batch_size=1"):
        lm._model_generate(torch.ones(2, 3, dtype=torch.long), 8, [], attention_mask=mask)
    with pytest.raises(UnsupportedError, match="sequences are not padded"):
        lm._model_call(torch.ones(2, 3, dtype=torch.long), attn_mask=mask, labels=mask)


# -- what a result says ------------------------------------------------------------------------------------------------


def evaluate(lm, task):
    """``simple_evaluate`` on a local task; lm-eval's own thousands are not even listed."""
    return simple_evaluate(lm, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)


def local_choices(path):
    """A task, ``choices``, over a JSON-lines file."""
    metrics = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    choices = {"doc_to_text": "{{ctx}}", "doc_to_target": "{{label}}", "doc_to_choice": "{{endings}}"}
    return {"task": "choices", **data, "output_type": "multiple_choice", **choices, "metric_list": metrics}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"ctx": TEXT[i : i + 30], "endings": [TEXT[i + 30 : i + 40], "zebra quagga"], "label": 0} for i in range(6)]


def test_the_results_of_a_run_say_what_they_were_read_from(model, tmp_path):
    task = local_choices(write_lines(tmp_path / "items.jsonl", ROWS))
    result = evaluate(PackedKVLM(model, "kivi-2:window=16", "exact", seed=3), task)
    said = result["config"]["packedkv"]
    assert result["results"]["choices"]["sample_len"] == 6
    assert {k: said[k] for k in ("model", "origin", "prefill", "attention", "seed", "fitted_params")} == {
        "model": "tiny", "origin": "made in the test", "prefill": "exact", "attention": "decoded", "seed": 3,
        "fitted_params": False,
    }  # fmt: skip
    assert said["version"] == packedkv.__version__
    assert said["spec"] == str(packedkv.get("kivi-2:window=16"))
    assert said["attention_calls"] == {"exact": 3 * 12, "decoded": 3 * 12}
    assert said["effective_bits"] == pytest.approx(said["cache_bytes"] * 8 / said["elements"])
    assert 0 < said["encoded_share"] < 1
    json.dumps(said)


def test_a_result_is_told_to_be_of_dense_tokens_where_windows_hold_them_all(model, caplog):
    lm = PackedKVLM(model, "kivi-2:window=128")
    lm.loglikelihood(PAIRS[2:4], disable_tqdm=True)
    assert lm.get_model_info()["packedkv"]["encoded_share"] == 0
    assert "0 % of the tokens of these requests were ever encoded (sink 0, window 128)" in caplog.text
    caplog.clear()
    full = PackedKVLM(model, INT4)
    full.loglikelihood(PAIRS[2:4], disable_tqdm=True)
    assert full.get_model_info()["packedkv"]["encoded_share"] == 1
    assert "ever encoded" not in caplog.text


def test_answers_cached_by_lm_eval_are_not_taken_for_those_of_another_spec(model, tmp_path):
    file = str(tmp_path / "answers.db")
    first = CachingLM(PackedKVLM(model, INT4), file)
    found = first.loglikelihood(PAIRS[:2])
    first.dbdict.close()
    again = PackedKVLM(model, INT4)
    assert CachingLM(again, file).loglikelihood(PAIRS[:2]) == found
    assert again.totals.calls == {}, "answered from the file"
    for spec, prefill in (("int-8", "decoded"), (INT4, "exact")):
        with pytest.raises(FormatError, match="name another file for every model, spec and prefill"):
            CachingLM(PackedKVLM(model, spec, prefill), file)
    other = CachingLM(HFLM(model.model, tokenizer=model.tokenizer), str(tmp_path / "hf.db"))
    other.loglikelihood(PAIRS[:1])
    other.dbdict.close()
    with pytest.raises(FormatError, match=r"were made by another model, these would be by .*tiny.*decoded"):
        CachingLM(PackedKVLM(model, "dense"), str(tmp_path / "hf.db"))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, SpecError, "no spec; pass e.g. spec=saw-int4"),
        ({"spec": "saw-int5"}, SpecError, "saw-int4"),
        ({"spec": "dense", "prefill": "exakt"}, SpecError, "prefill='exakt': expected one of decoded, exact"),
        ({"spec": "dense", "batch_size": "auto"}, UnsupportedError, "batch_size='auto'; pass a whole number >= 1"),
        ({"spec": "dense", "batch_size": 0}, UnsupportedError, "batch_size=0; pass a whole number >= 1"),
        ({"spec": "dense", "prefil": "exact"}, SpecError, "prefil is no option of model packedkv. Did you mean"),
        ({"spec": "kivi-2:window=8", "sink": 4}, SpecError, r"sink is an option of the spec .* quote the spec: 'spec="),
        ({"spec": "dense", "peft": "x"}, ModelError, "loaded by packedkv, which takes no peft"),
        ({"spec": "dense", "dtype": "int8"}, ModelError, "dtype='int8': expected auto or one of float32"),
        ({"spec": "dense", "codec_file": "nowhere.py"}, SpecError, "nowhere.py"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_a_model_is_loaded(options, error, text, monkeypatch):
    monkeypatch.setattr(integration.models, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(error, match=text):
        PackedKVLM("smollm2-135m", **options)


def test_an_encoder_decoder_model_is_refused():
    config = T5Config(vocab_size=256, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        PackedKVLM(T5ForConditionalGeneration(config), "dense", tokenizer=tiny_loaded().tokenizer)


def test_constants_fitted_for_another_spec_are_refused(model, tmp_path):
    spec, file = "innerq-base", tmp_path / "params"
    fit_model(model, spec, TEXT * 4, windows=1, window_tokens=256).save(file)
    lm = PackedKVLM(model, spec, params=file)
    lm.loglikelihood(PAIRS[:1], disable_tqdm=True)
    assert lm.get_model_info()["packedkv"]["fitted_params"]
    with pytest.raises(FormatError, match="fitted for"):
        PackedKVLM(model, "saw-int4", params=file)


def test_without_lm_eval_the_import_says_what_to_install(tmp_path):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval/__init__.py").write_text("raise ImportError('not here')")
    done = python("import packedkv_lab.eval.lm_eval", path=tmp_path, fails=True)
    assert "not here); install it with: pip install 'packedkv[eval]'" in done.stderr


def python(program, *arguments, path=None, fails=False, **more):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    folders = [str(p) for p in (path, ROOT / "src", ROOT) if p]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return done


PAGE = (ROOT / "docs/lm-eval.md").read_text()


def test_the_command_line_runs_the_yaml_task_of_the_page(tmp_path):
    """In a process of its own, as ``packedkv-lm-eval`` starts it; the results file holds what was read."""
    save(tiny_loaded(), tmp_path / "model")
    items = write_lines(tmp_path / "items.jsonl", ROWS)
    task = tmp_path / "my_hellaswag.yaml"
    task.write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1].replace("/data/hellaswag.jsonl", str(items)))
    command = "from packedkv_lab.eval.lm_eval import main; main()"
    spec = 'spec="kivi-2:window=8,sink=4"'
    arguments = f"--model packedkv --device cpu --tasks {task} --limit 4 --output_path {tmp_path / 'out'}".split()
    arguments += ["--model_args", f"pretrained={tmp_path}/model,prefill=exact,{spec}"]
    done = python(command, *arguments, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert "my_hellaswag" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(file.read_text())
    said = result["config"]["packedkv"]
    assert (said["spec"], said["prefill"]) == (str(packedkv.get("kivi-2:window=8,sink=4")), "exact")
    assert said["attention_calls"]["exact"] == said["attention_calls"]["decoded"]
    assert result["n-samples"]["my_hellaswag"]["effective"] == 4


def test_a_mistake_is_one_line_on_the_command_line(monkeypatch):
    def refuse():
        raise SpecError("unknown preset")

    monkeypatch.setattr(integration, "cli_evaluate", refuse)
    with pytest.raises(SystemExit, match=r"^packedkv-lm-eval: error: unknown preset$"):
        integration.main()


def test_the_page_names_every_option_and_figure():
    named = set(re.findall(r"^\| `(\w+)`", PAGE, re.M))
    assert set(inspect.signature(PackedKVLM.__init__).parameters) - {"self", "options"} <= named
    assert set(PackedKVLM(tiny_loaded(), "dense").get_model_info()["packedkv"]) <= named | {"origin", "sha256"}
