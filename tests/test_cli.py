"""The command line: valid JSON, mistakes explained on one line, interrupts that keep what was finished."""

import json
import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

import packedkv
from packedkv.cli import commands
from packedkv.cli import main as cli
from packedkv.cli.demo import recommend
from packedkv.cli.measure import compare as compare_module
from packedkv.cli.measure import perplexity
from packedkv.registry import split_specs
from tests.cli.tiny import TEXT, save_tiny, tiny_llama, tiny_tokenizer

SIZES = ["--windows", "2", "--window-tokens", "96"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def run(capsys, *arguments):
    capsys.readouterr()
    status = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    """One line on standard error, no traceback, nothing on standard output, status 2."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("packedkv: error: ")
    assert err.count("\n") == 1
    return err


# -- help --------------------------------------------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "transformers", "matplotlib")
LINES = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]


def test_help_is_printed_without_torch():
    code = (
        "import sys, packedkv.cli.main as cli\n"
        f"for line in {LINES}:\n"
        "    try: cli.main(line)\n"
        "    except SystemExit as end: assert not end.code\n"
        f"    print(line, [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)\n"
        "    print('=====')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"{line} []" for line in LINES]
    assert all(part.strip() for part in done.stdout.split("=====")[: len(LINES)])


def test_list_starts_without_transformers_or_matplotlib():
    code = (
        "import sys; from packedkv.cli.main import main; main(['list', '--json', '-']); "
        "print([m for m in ('transformers', 'triton', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    json.loads(done.stdout)
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_lists_every_command_and_each_has_its_file(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    files = {m.name for m in pkgutil.iter_modules(commands.__path__)}
    assert files == set(cli.COMMANDS)
    added = {point.name for point in entry_points(group=cli.GROUP)}
    assert added == set(cli.LABORATORY)
    for name, summary in (cli.COMMANDS | cli.LABORATORY).items():
        assert f"    {name} " in out
        assert summary.split()[0] in out


def test_a_command_of_the_laboratory_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    with pytest.raises(SystemExit):
        cli.main(["eval", "some-model"])
    assert "pip install packedkv-lab" in capsys.readouterr().err


def test_env_says_what_a_bug_report_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "packedkv").mkdir()
    (tmp_path / "packedkv" / "model.gguf").write_bytes(bytes(2_000_000))
    _, out, _ = run(capsys, "env", "--json", "-")
    found = json.loads(out)
    assert {"packedkv", "torch", "python", "transformers", "safetensors"} <= set(found["versions"])
    assert found["cache folders"][str(tmp_path / "packedkv")] == "1 files, 2.0 MB"
    assert len(found["gpus"]) == torch.cuda.device_count()
    status, out, _ = run(capsys, "env")
    assert status == 0
    for name in ("platform", "versions", "  torch", "cpu kernels", "gpus", "cache folders"):
        assert f"\n{name}" in f"\n{out}"


# -- list, describe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_list_gives_an_object_per_preset_with_bits_from_bytes(capsys, head_dim):
    status, out, _ = run(capsys, "list", "--json", "-", "--head-dim", str(head_dim))
    rows = json.loads(out)
    assert status == 0
    assert [row["spec"] for row in rows] == packedkv.presets()
    for row in rows:
        assert {"spec", "method", "source", "key_bits", "value_bits", "nominal_bits", "block_tokens"} <= set(row)
        assert set(row["kernels"]) == {"encode", "decode"}
        page = packedkv.get(row["spec"]).page_layout(head_dim)
        for role in ("key", "value"):
            held = sum(p.nbytes for p in page.planes if p.role == role)
            assert row[f"{role}_bits"] == pytest.approx(held * 8 / (page.page_tokens * head_dim))


def test_list_shows_every_preset_also_where_a_head_dim_is_refused(capsys):
    _, out, _ = run(capsys, "list", "--head-dim", "36", "--json", "-")
    saw = next(row for row in json.loads(out) if row["spec"] == "saw-int4")
    assert saw["key_bits"] is None
    assert "head_dim=36 is not a multiple of 8" in saw["refused"]
    assert saw["kernels"] == {"encode": "none", "decode": "none"}
    status, out, _ = run(capsys, "list", "--head-dim", "36")
    assert status == 0
    assert all(preset in out for preset in packedkv.presets())


def test_describe_shows_every_option_and_field(capsys):
    _, out, _ = run(capsys, "describe", "saw-int4:rotate=kv")
    for part in ("saw-int4:rotate=kv", "k|kv|none, default k", "key.codes", "uint8 [64]", "4.25", "block=none  "):
        assert part in out, "an option is printed as a spec takes it"
    _, out, _ = run(capsys, "describe", "saw-int4:rotate=kv", "--json", "-")
    assert json.loads(out) == json.loads(json.dumps(packedkv.describe("saw-int4:rotate=kv")))


def test_a_codec_file_is_listed_before_or_after_the_command(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import packedkv\n"
        "@packedkv.register('mine-from-cli', source='here')\n"
        "def mine() -> packedkv.KVScheme:\n"
        "    '''A codec of mine.'''\n"
        "    return packedkv.get('saw-int4')\n"
    )
    from packedkv import registry

    try:
        _, out, _ = run(capsys, "list", "--codec-file", str(path), "--json", "-")
        assert "mine-from-cli" in [row["spec"] for row in json.loads(out)]
        registry._METHODS.pop("mine-from-cli")
        _, out, _ = run(capsys, "--codec-file", str(path), "describe", "mine-from-cli")
        assert "A codec of mine." in out
    finally:
        registry._METHODS.pop("mine-from-cli", None)


# -- compare, eval, demo, report ---------------------------------------------------------------------------------------


def test_compare_prints_nothing_but_json_on_standard_output(capsys, model, text):
    status, out, err = run(
        capsys, "compare", model, "--specs", "dense,kivi-2:group=16,window=32", "--text", text, *SIZES, "--json", "-"
    )
    rows = json.loads(out)
    assert status == 0
    assert [row["spec"] for row in rows] == ["dense", "kivi-2:group=16,window=32"]
    assert [row["text"] for row in rows] == ["text.txt"] * 2
    assert "measuring" in err


def test_compare_prints_a_table_and_writes_the_file(capsys, model, text, tmp_path):
    target = tmp_path / "new" / "rows.json"
    _, out, _ = run(capsys, "compare", model, "--specs", "dense,int-4", "--text", text, *SIZES, "--json", str(target))
    lines = out.splitlines()
    assert lines[0].split()[0] == "spec"
    assert [line.split()[0] for line in lines[2:5]] == ["(uncompressed)", "dense", "int-4"]
    assert "2 windows of 96 tokens of text.txt, prefill=decoded" in out
    assert [row["spec"] for row in json.loads(target.read_text())] == ["dense", "int-4"]


@pytest.mark.parametrize("prefill", ["decoded", "exact"])
def test_eval_measures_one_spec_and_states_the_prefill(capsys, model, text, prefill):
    arguments = ["eval", model, "--spec", "int-4", "--text", text, "--windows", "1", "--window-tokens", "300"]
    _, out, _ = run(capsys, *arguments, "--prefill", prefill, "--json", "-")
    (row,) = json.loads(out)
    assert row["prefill"] == prefill
    assert row["kl"] > 0
    assert row["attention_error"] > 0


def test_demo_writes_results_picture_and_page_and_recommends(capsys, model, text, tmp_path):
    specs = ["dense", "int-2", "int-4", "saw-int4"]
    out_dir = tmp_path / "report"
    arguments = ["demo", "--model", model, "--text", text, "--specs", ",".join(specs), *SIZES, "--out", str(out_dir)]
    status, out, err = run(capsys, *arguments)
    assert status == 0
    found = json.loads((out_dir / "results.json").read_text())
    assert [row["spec"] for row in found["rows"]] == specs
    last = out.strip().splitlines()[-1]
    assert last == found["meta"]["recommendation"] == recommend(found["rows"])
    assert last.startswith("Take ")
    written = {line.split(": ")[1] for line in out.splitlines() if line.startswith("written: ")}
    assert written == {str(p) for p in out_dir.iterdir()}
    assert {p.suffix for p in out_dir.iterdir()} == {".json", ".svg", ".html"}
    assert "greedy continuation" in out
    assert "measuring" in err

    again = tmp_path / "again"
    status, out, _ = run(capsys, "report", str(out_dir / "results.json"), "--out", str(again), "--json", "-")
    assert status == 0
    assert set(json.loads(out)) == {str(p) for p in again.iterdir()}


# -- fit, --params -----------------------------------------------------------------------------------------------------

INNERQ = "innerq-base:sink=0,window=0"


def test_fit_writes_a_file_that_compare_and_eval_take(capsys, model, text, tmp_path):
    out_file = tmp_path / "new" / "params.safetensors"
    status, out, err = run(capsys, "fit", model, INNERQ, "--text", text, "-o", str(out_file), *SIZES)
    assert status == 0
    assert f"written: {out_file}" in out
    assert "keys: norm float32 [1x2x64] in 3 layers" in out
    assert "reading the text" in err
    _, out, _ = run(capsys, "fit", model, INNERQ, "--text", text, "-o", str(out_file), *SIZES, "--json", "-")
    found = json.loads(out)
    assert {"seconds", "sha256", "file", "text_sha256", "bytes"} <= set(found)
    assert (found["spec"], found["tokens"], found["layers"], found["seed"]) == (INNERQ, 192, [0, 1, 2], None)
    assert [p.name for p in out_file.parent.iterdir()] == [out_file.name]

    arguments = ["compare", model, "--specs", f"{INNERQ},int-4", "--text", text, *SIZES, "--params", str(out_file)]
    _, out, _ = run(capsys, *arguments, "--json", "-")
    rows = json.loads(out)
    assert [row["fitted"] for row in rows] == ["file", None]
    assert rows[0]["params"]["sha256"] == found["sha256"]
    arguments = ["eval", model, "--spec", INNERQ, "--text", text, *SIZES, "--params", str(out_file)]
    _, out, _ = run(capsys, *arguments)
    assert "fitted" in out


def test_fit_without_a_text_takes_what_the_model_writes(capsys, model, tmp_path):
    small = ["--windows", "2", "--window-tokens", "24", "-o", str(tmp_path / "p")]
    status, out, err = run(capsys, "fit", model, INNERQ, *small)
    assert status == 0
    assert "text: the model's own samples (seed 0), 2 x 24 tokens" in out
    assert "drawing tokens" in err


@pytest.mark.usefixtures("no_model")
def test_fit_refuses_before_the_model_is_loaded(capsys, text, tmp_path):
    good = ["--text", text, "-o", str(tmp_path / "p"), *SIZES]
    assert "Did you mean 'innerq-base'" in refused(capsys, "fit", "m", "innerq-bas", *good)
    assert "saw-int4 has no constants to fit" in refused(capsys, "fit", "m", "saw-int4", *good)
    assert "a window takes 2048 tokens" in refused(capsys, "fit", "m", "innerq-base", *good[:4])
    assert "cannot be read" in refused(capsys, "fit", "m", "innerq-base", "--text", "no.txt", *good[2:])
    (tmp_path / "file").write_text("in the way")
    blocked = ["--text", text, "-o", str(tmp_path / "file" / "p"), *SIZES]
    assert "cannot be written" in refused(capsys, "fit", "m", "innerq-base", *blocked)
    folder = ["--text", text, "-o", str(tmp_path), *SIZES]
    assert "is a folder; name a file in it" in refused(capsys, "fit", "m", "innerq-base", *folder)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_fit_leaves_no_file(capsys, model, text, tmp_path, monkeypatch):
    from packedkv.codecs.innerq import InnerQ

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(InnerQ, "fit", interrupted)
    status, out, _ = run(capsys, "fit", model, "innerq-base", "--text", text, "-o", str(tmp_path / "p"), *SIZES)
    assert (status, out) == (130, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_model")
def test_params_files_are_checked_before_the_model_is_loaded(capsys, text, tmp_path):
    (tmp_path / "p").write_text("no params file, but as long as one has to be")
    measure = ["compare", "m", "--specs", "innerq-base", "--text", text, "--params"]
    assert "was not found" in refused(capsys, *measure, str(tmp_path / "no"))
    assert "is a folder" in refused(capsys, *measure, str(tmp_path))
    assert "is not a packedkv params file" in refused(capsys, *measure, str(tmp_path / "p"))


def test_a_params_file_of_no_spec_or_of_another_model_is_refused(capsys, model, text, tmp_path, monkeypatch):
    out_file = str(tmp_path / "params")
    run(capsys, "fit", model, INNERQ, "--text", text, "-o", out_file, *SIZES)
    from packedkv.models import loading as models

    with monkeypatch.context() as patch:
        patch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
        arguments = ["eval", "m", "--spec", "int-4", "--text", text, "--params", out_file]
        assert f"fitted for {INNERQ}, which is not among the specs given (int-4)" in refused(capsys, *arguments)
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    capsys.readouterr()
    arguments = ["eval", str(tmp_path / "other"), "--spec", INNERQ, "--text", text, *SIZES, "--params", out_file]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "whose weights are not those of this LlamaForCausalLM" in err.splitlines()[-1]


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_in_the_middle_keeps_the_results_and_ends_with_130(capsys, model, text, tmp_path, monkeypatch):
    calls, original = [], perplexity.compressed_logits

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(compare_module.perplexity, "compressed_logits", interrupted)
    out_dir = tmp_path / "report"
    arguments = ["demo", "--model", model, "--text", text, "--specs", "dense,int-4", *SIZES, "--out", str(out_dir)]
    status, out, _ = run(capsys, *arguments)
    assert status == 130
    found = json.loads((out_dir / "results.json").read_text())
    assert [(r["spec"], r["windows"], r["partial"]) for r in found["rows"]] == [("dense", 1, True), ("int-4", 1, True)]
    assert "INTERRUPTED" in out
    assert "The run was interrupted" in (out_dir / "report.html").read_text()


def test_an_interrupt_before_any_result_says_so(capsys, model, text, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module.perplexity, "uncompressed", interrupted)
    status, out, err = run(capsys, "compare", model, "--specs", "int-4", "--text", text, *SIZES)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "packedkv: interrupted before anything was finished."


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    from packedkv.models import loading as models

    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    monkeypatch.setattr("packedkv.cli.demo.load", lambda *_, **__: pytest.fail("the model was loaded first"))


@pytest.mark.usefixtures("no_model")
def test_a_wrong_preset_or_option_names_the_nearest_before_the_model_is_loaded(capsys, tmp_path):
    assert "Did you mean 'octopus-4'" in refused(capsys, "compare", "m", "--specs", "dense,octopus4")
    assert "Did you mean 'window'?" in refused(capsys, "eval", "m", "--spec", "kivi-2:windw=3")
    assert "Did you mean 'saw-int4'" in refused(capsys, "describe", "saw-int")
    assert "unknown codec 'nix'" in refused(capsys, "demo", "--specs", "nix", "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("no_model")
def test_a_folder_that_cannot_be_written_is_found_before_the_model_is_loaded(capsys, tmp_path, text):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        error = refused(capsys, "demo", "--out", str(folder))
        assert f"the folder {folder} cannot be written" in error
        assert "choose another one" in error
    error = refused(capsys, "compare", "m", "--specs", "dense", "--text", text, "--json", str(tmp_path / "file" / "x"))
    assert "cannot be written" in error
    assert "is a folder; name a file in it" in refused(capsys, "list", "--json", str(tmp_path))


@pytest.mark.usefixtures("no_model")
def test_options_that_no_task_or_bench_would_look_at(capsys, tmp_path):
    error = refused(capsys, "eval", "m", "--specs", "dense", "--data", "no.json", "--output", str(tmp_path / "new"))
    assert "--data 'no.json': write TASK=PATH" in error
    assert not (tmp_path / "new").exists()
    assert "--shapes and --also are for --device cuda" in refused(capsys, "bench", "decode", "--shapes", "x")
    for wrong in (["--rows-only"], ["page", "--out", "x", "--tokens", "9"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", *wrong])
        assert f"unrecognized arguments: {wrong[-2] if len(wrong) > 1 else wrong[0]}" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "compare presets on your model" in capsys.readouterr().err


def test_a_text_or_a_model_that_is_missing(capsys):
    assert "the text 'no.txt' cannot be read" in refused(capsys, "compare", "m", "--specs", "dense", "--text", "no.txt")
    assert "no such file or folder" in refused(capsys, "compare", "./no/model", "--specs", "dense")


def test_files_that_are_no_results(capsys, tmp_path):
    (tmp_path / "a.json").write_text('{"rows": []}')
    (tmp_path / "b.json").write_text('[{"spec": "den')
    assert "holds no result rows" in refused(capsys, "report", str(tmp_path / "a.json"))
    assert "b.json is not JSON" in refused(capsys, "report", str(tmp_path / "b.json"))
    assert "holds no c.json (No such file" in refused(capsys, "report", str(tmp_path / "c.json"))
    assert "was not found" in refused(capsys, "--codec-file", "no.py", "list")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("--windows", value, "is not a whole number >= 1") for value in ("0", "-1", "x")),
        ("--window-tokens", "1", "'1' is not a whole number >= 2"),
        ("--new-tokens", "-1", "'-1' is not a whole number >= 0"),
        ("--budget", "-1", "'-1' is not a number of seconds"),
        ("--specs", ",", "names no preset"),
    ],
)
def test_values_of_options_are_refused_before_the_model_loads(capsys, option, value, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["compare", "m", "--specs", "dense", option, value])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("a,b", ["a", "b"]),
        ("a:x=1,y=2,b", ["a:x=1,y=2", "b"]),
        ("a:x=1,b:y=2", ["a:x=1", "b:y=2"]),
        (" a , ,b", ["a", "b"]),
    ],
)
def test_specs_with_options_in_a_list(text, specs):
    assert split_specs(text) == specs


# -- the recommendation ------------------------------------------------------------------------------------------------


def result(spec, bits, perplexity, kl):
    return {
        "spec": spec, "effective_bits": bits, "ratio_to_16bit": 16 / bits, "perplexity": perplexity, "kl": kl,
        "uncompressed": {"perplexity": 20.0},
    }  # fmt: skip


def test_the_fewest_bits_within_five_percent_are_recommended():
    rows = [result("dense", 16.0, 20.0, 0.0), result("fp8", 8.1, 20.1, 0.01), result("a", 4.5, 20.9, 0.04)]
    rows += [result("b", 4.5, 20.8, 0.03), result("c", 2.3, 21.1, 0.08), result("nan", 2.0, float("nan"), 0.0)]
    text = recommend(rows)
    assert recommend(rows[:1]).startswith("No preset can be recommended")
    far = [rows[0], result("a", 4.5, 30.0, 0.4), result("b", 2.5, 60.0, 0.9)]
    assert recommend(far).startswith("Take a with care: no preset is within 5%")
    assert text.startswith("Take b: ")
    assert "4.50 bits" in text
    assert "3.6x" in text
    assert "+4.0%" in text
    assert text.count(". ") == 0, "one sentence"
