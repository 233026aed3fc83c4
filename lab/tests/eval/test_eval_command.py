"""``packedkv eval``: from a model's folder to a folder of results; mistakes are found before the model loads."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.tiny import TEXT, save_tiny, tiny_llama
from tests.test_cli import refused, run

from lab.tests.eval.test_run import RECORDS, interrupted_after
from packedkv.cli import main as cli
from packedkv.cli.arguments import depths, lengths
from packedkv.errors import SpecError
from packedkv_lab.commands.eval import data_paths, task_list
from packedkv_lab.eval.store import AGAINST, ITEMS, RESULTS, RUN

SIZES = ["--window-tokens", "96", "--lengths", "480", "--depths", "0,1", "--limit", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "kv.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return f"kv_retrieval={path}"


@pytest.fixture
def no_model(monkeypatch):
    from packedkv.models import loading as models

    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded first"))


def test_a_run_prints_tables_and_writes_its_folder(capsys, model, text, data, tmp_path):
    out_dir = tmp_path / "out"
    arguments = ["eval", model, "--specs", "dense,int-4", "--tasks", "kl,kv_retrieval:limit=3,needle", "--text", text]
    arguments += ["--data", data, "--output", str(out_dir), *SIZES]
    status, out, err = run(capsys, *arguments)
    assert status == 0
    assert {p.name for p in out_dir.iterdir()} == {RUN, ITEMS, RESULTS}
    assert "kl: 2 of 2 items, prefill=decoded" in out
    assert "kv_retrieval: 3 of 3 items" in out
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("kv_retrieval"))
    assert lines[head + 1].split()[:4] == ["spec", "bits", "recall", "difference"]
    assert [line.split()[0] for line in lines[head + 3 : head + 6]] == ["(uncompressed)", "dense", "int-4"]
    assert lines[-1] == f"written: {out_dir} (rows in results.json, items in items.jsonl)"
    assert "evaluating [" in err
    status, out, err = run(capsys, *arguments, "--json", "-")
    assert status == 0
    assert json.loads(out) == json.loads((out_dir / RESULTS).read_text())["rows"]
    assert "going on: 21 of 21 items are finished" in err


def test_specs_are_compared_with_those_that_are_named(capsys, model, text, tmp_path):
    arguments = ["eval", model, "--specs", "int-4,dense,fp8", "--tasks", "kl,perplexity", "--text", text, *SIZES]
    status, out, _ = run(capsys, *arguments, "--output", str(tmp_path / "out"), "--against", "fp8,dense")
    assert status == 0
    rows = json.loads((tmp_path / "out" / AGAINST).read_text())["rows"]
    assert {(r["spec"], r["other"]) for r in rows} == {
        (a, b) for a in ("fp8", "dense") for b in ("int-4", "dense", "fp8") if a != b
    }
    kl = next(r for r in rows if (r["spec"], r["other"], r["metric"]) == ("dense", "int-4", "kl"))
    assert kl["value"] < kl["other_value"]
    assert kl["difference"] == pytest.approx(kl["value"] - kl["other_value"])
    assert kl["low"] <= kl["difference"] <= kl["high"] < 0
    at = out.splitlines().index("kl: kl of dense")
    assert [line.split()[0] for line in out.splitlines()[at + 1 : at + 5 : 2]] == ["other", "int-4"]


def test_an_interrupt_ends_with_130_and_the_same_command_goes_on(capsys, model, text, tmp_path, monkeypatch):
    arguments = ["eval", model, "--specs", "int-4", "--tasks", "kl,perplexity", "--text", text, *SIZES]
    arguments += ["--output", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        interrupted_after(patch, 5)
        status, out, err = run(capsys, *arguments, "--json", "-")
    assert status == 130
    assert all(row["partial"] for row in json.loads(out))
    assert "interrupted: what was finished is kept; the same command goes on with it." in err
    assert "Traceback" not in err
    status, out, err = run(capsys, *arguments, "--json", "-")
    assert (status, len((tmp_path / "out" / ITEMS).read_text().splitlines())) == (0, 8)
    assert "going on: 5 of 8 items are finished" in err


def test_a_spent_budget_ends_with_0_and_says_so(capsys, model, text, tmp_path):
    arguments = ["eval", model, "--specs", "int-4", "--tasks", "kl", "--text", text, *SIZES]
    status, out, err = run(capsys, *arguments, "--output", str(tmp_path / "out"), "--budget", "0", "--json", "-")
    assert status == 0
    assert {row["status"] for row in json.loads(out)} == {"budget"}
    assert "of 0 s are spent: no further call." in err


def test_stress_is_part_of_what_a_run_is(capsys, model, text, tmp_path):
    arguments = ["eval", model, "--specs", "int-4", "--tasks", "kl", "--text", text, *SIZES]
    arguments += ["--output", str(tmp_path / "out")]
    _, out, _ = run(capsys, *arguments, "--stress", "64:2", "--json", "-")
    stressed = {(r["spec"], r["metric"]): r["value"] for r in json.loads(out) if r["group"] is None}
    settings = json.loads((tmp_path / "out" / RUN).read_text())["settings"]
    assert (settings["stress"]["factor"], settings["stress"]["pairs"]) == (64.0, 2)
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "settings stress" in err.splitlines()[-1]
    arguments[-1] = str(tmp_path / "plain")
    _, out, _ = run(capsys, *arguments, "--json", "-")
    plain = {(r["spec"], r["metric"]): r["value"] for r in json.loads(out) if r["group"] is None}
    assert stressed["int-4", "kl"] > 2 * plain["int-4", "kl"]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--specs", "saw-int", "--tasks", "kl"], "Did you mean 'saw-int4'"),
        (["--specs", "int-4", "--tasks", "kl,needel"], "unknown task 'needel'. Did you mean 'needle'?"),
        (["--specs", "int-4", "--tasks", "kl,kl"], "given twice: kl"),
        (["--specs", "int-4,int-4"], "given twice: int-4"),
        (["--specs", "int-4", "--tasks", "kl:limit=0"], "a task takes one option, limit=N"),
        (["--specs", "int-4", "--tasks", "kl:shots=3"], "a task takes one option, limit=N"),
        (["--specs", "int-4", "--tasks", "piqa"], "piqa is a task of the lm-evaluation-harness"),
        (["--specs", "int-4", "--tasks", "hellaswag"], "--model_args pretrained=MODEL,spec=SPEC --tasks hellaswag"),
        (["--specs", "int-4", "--data", "needle=nowhere.jsonl"], "'needle=nowhere.jsonl' does not exist"),
        (["--specs", "int-4", "--text", "no.txt"], "the text 'no.txt' cannot be read"),
        (["--specs", "int-4", "--params", "no.safetensors"], "was not found"),
        (["--specs", "int-4", "--against", "int-8"], "--against int-8: not among --specs"),
        (["--specs", "int-4", "--stress", "x"], "stress 'x': expected FACTOR"),
        (["--specs", "int-4", "--windows", "3"], "--windows is for --spec; use --limit"),
        (["--specs", "int-4", "--new-tokens", "3"], "--new-tokens is for --spec"),
        (["--spec", "int-4", "--tasks", "kl"], "--tasks is for tasks; use --specs int-4"),
        (["--spec", "hqq-4"], "use --specs hqq-4 --tasks"),
        (["--specs", "int-4", "--output", "FILE/out"], "cannot be written"),
    ],
)
def test_mistakes_are_found_before_the_model_loads(capsys, data, tmp_path, given, said):
    (tmp_path / "file").write_text("in the way")
    given = [part.replace("FILE", str(tmp_path / "file")) for part in given]
    if "--output" not in given and "--spec" not in given:
        given += ["--output", str(tmp_path / "out")]
    paths = [] if "--spec" in given else ["--data", data]
    assert said in refused(capsys, "eval", "m", *given, *paths)
    assert not (tmp_path / "out").exists()


def test_a_model_folder_without_a_tokenizer_is_refused(capsys, text, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    arguments = ["eval", str(tmp_path / "model"), "--specs", "int-4", "--tasks", "kl", "--text", text]
    capsys.readouterr()
    status, out, err = run(capsys, *arguments, "--output", str(tmp_path / "out"))
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert "could not be loaded from" in err.splitlines()[-1]
    assert "with its tokenizer" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "given",
    [
        ["--lengths", "1k,x"],
        ["--lengths", "0"],
        ["--depths", "2"],
        ["--depths", "a"],
        ["--depths", ""],
        ["--batch", "0"],
    ],
)
def test_numbers_out_of_range_are_refused(capsys, given):
    with pytest.raises(SystemExit) as caught:
        cli.main(["eval", "m", "--specs", "int-4", *given])
    assert caught.value.code == 2
    assert given[0] in capsys.readouterr().err


@pytest.mark.parametrize(("command", "page"), [("eval", "evaluate.md"), ("advise", "advise.md")])
def test_the_page_names_every_option(capsys, command, page):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    found = set(re.findall(r"^  (?:-\w[^,]*, )?(--[a-z-]+)", capsys.readouterr().out, re.M)) - {"--help"}
    assert len(found) > 10
    said = set(re.findall(r"--[a-z-]+", (Path(__file__).parents[3] / "docs" / page).read_text()))
    assert found <= said


def test_lists_of_numbers_tasks_and_paths(tmp_path):
    assert lengths("512, 1k,128K") == (512, 1024, 131072)
    assert depths("0,0.25,1") == (0.0, 0.25, 1.0)
    assert task_list(["kl", "needle:limit=20"]) == (["kl", "needle"], {"needle": 20})
    (tmp_path / "kv=file").write_text("")
    assert data_paths([f"kv_retrieval={tmp_path}/kv=file"]) == {"kv_retrieval": tmp_path / "kv=file"}
    assert data_paths([]) == {}
    for wrong in (["a"], [f"kv_retrieval={tmp_path}"] * 2):
        with pytest.raises(SpecError, match="write TASK=PATH once for each task"):
            data_paths(wrong)
