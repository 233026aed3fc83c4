"""The command line: valid JSON, mistakes explained on one line, interrupts that keep what was finished."""

import io
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

import packedkv
from packedkv import progress, registry
from packedkv.cli import commands
from packedkv.cli import main as cli
from packedkv.cli.demo import recommend
from packedkv.cli.measure import compare as compare_module
from packedkv.cli.measure import perplexity
from packedkv.codecs.innerq import InnerQ
from packedkv.models import loading
from packedkv.progress import Progress
from packedkv.registry import split_specs
from tests.cli.tiny import TEXT, interrupted, interrupting, save_tiny, tiny_llama, tiny_tokenizer

SIZES = ["--windows", "2", "--window-tokens", "96"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    (path := tmp_path_factory.mktemp("text") / "text.txt").write_text(TEXT)
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

LINES = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS), ["list", "--json", "-"]]


def test_help_is_printed_without_torch_and_the_list_without_transformers():
    code = (
        "import sys, packedkv.cli.main as cli\n"
        f"for line in {LINES}:\n"
        "    heavy = ['transformers', 'matplotlib', 'triton'] + ['torch', 'numpy'] * ('--json' not in line)\n"
        "    try: cli.main(line)\n"
        "    except SystemExit as end: assert not end.code\n"
        "    print(line, [m for m in heavy if m in sys.modules], file=sys.stderr)\n"
        "    print('=====')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"{line} []" for line in LINES]
    *helps, listed, _ = done.stdout.split("=====")
    assert all(part.strip() for part in helps)
    assert json.loads(listed)


def test_help_lists_every_command_and_each_has_its_file(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert {m.name for m in pkgutil.iter_modules(commands.__path__)} == set(cli.COMMANDS)
    assert {point.name for point in entry_points(group=cli.GROUP)} == set(cli.LABORATORY)
    for name, summary in (cli.COMMANDS | cli.LABORATORY).items():
        assert f"    {name} " in out
        assert summary.split()[0] in out
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    for line, said in ([], "compare presets on your model"), (["eval", "some-model"], "pip install packedkv-lab"):
        with pytest.raises(SystemExit) as caught:
            cli.main(line)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err


def test_env_says_what_a_bug_report_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "packedkv").mkdir()
    (tmp_path / "packedkv" / "model.gguf").write_bytes(bytes(2_000_000))
    _, out, _ = run(capsys, "env", "--json", "-")
    found = json.loads(out)
    assert {"packedkv", "torch", "python", "transformers", "safetensors"} <= set(found["versions"])
    assert found["cache folders"][str(tmp_path / "packedkv")] == "1 files, 2.0 MB"
    assert len(found["gpus"]) == torch.cuda.device_count()
    (errors,) = [value for name, value in found.items() if name.startswith("self-test")]
    assert errors
    if found["cpu kernels"] in ("portable", "avx2", "avx512", "neon"):
        assert all(text.endswith("ok") for name, text in errors.items() if name.startswith("cpu"))
    monkeypatch.setattr("packedkv.cli.commands.env.MOST_ERROR", 0.0)
    status, out, _ = run(capsys, "env")
    assert status == 0
    assert "WRONG: the limit is 0.0" in out
    status, out, _ = run(capsys, "env", "--no-test")
    assert "self-test" not in out
    for name in ("platform", "versions", "  torch", "cpu kernels", "gpus", "cache folders"):
        assert f"\n{name}" in f"\n{out}"


# -- list, describe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [36, 64, 128])
def test_list_gives_an_object_per_preset_with_bits_from_bytes(capsys, head_dim):
    """With 36 channels some are refused, and listed."""
    status, out, _ = run(capsys, "list", "--json", "-", "--head-dim", str(head_dim))
    rows = json.loads(out)
    assert status == 0
    assert [row["spec"] for row in rows] == packedkv.presets()
    for row in rows:
        assert {"spec", "method", "source", "key_bits", "value_bits", "nominal_bits", "block_tokens"} <= set(row)
        assert set(row["kernels"]) == {"encode", "decode"}
        if "refused" in row:
            assert (row["key_bits"], row["kernels"]) == (None, {"encode": "none", "decode": "none"})
            continue
        page = packedkv.get(row["spec"]).page_layout(head_dim)
        for role in ("key", "value"):
            held = sum(p.nbytes for p in page.planes if p.role == role)
            assert row[f"{role}_bits"] == pytest.approx(held * 8 / (page.page_tokens * head_dim))
    refused = {row["spec"]: row["refused"] for row in rows if "refused" in row}
    assert bool(refused) == (head_dim == 36)
    assert "head_dim=36 is not a multiple of 8" in refused.get("saw-int4", "head_dim=36 is not a multiple of 8")
    status, out, _ = run(capsys, "list", "--head-dim", str(head_dim))
    assert status == 0
    assert all(preset in out for preset in packedkv.presets())


def test_describe_shows_every_option_and_field(capsys):
    _, out, _ = run(capsys, "describe", "saw-int4:rotate=kv")
    for part in ("saw-int4:rotate=kv", "k|kv|none, default k", "key.codes", "uint8 [64]", "4.25", "block=none  "):
        assert part in out, "an option is printed as a spec takes it"
    _, out, _ = run(capsys, "describe", "saw-int4:rotate=kv", "--json", "-")
    assert json.loads(out) == json.loads(json.dumps(packedkv.describe("saw-int4:rotate=kv")))


def test_a_codec_file_is_listed_before_or_after_the_command(capsys, tmp_path, monkeypatch):
    (path := tmp_path / "mine.py").write_text(
        "import packedkv\n"
        "@packedkv.register('mine-from-cli', source='here')\n"
        "def mine() -> packedkv.KVScheme:\n"
        "    '''A codec of mine.'''\n"
        "    return packedkv.get('saw-int4')\n"
    )
    monkeypatch.setattr(registry, "_METHODS", before := dict(registry._METHODS))
    _, out, _ = run(capsys, "list", "--codec-file", str(path), "--json", "-")
    assert "mine-from-cli" in [row["spec"] for row in json.loads(out)]
    before.pop("mine-from-cli")
    _, out, _ = run(capsys, "--codec-file", str(path), "describe", "mine-from-cli")
    assert "A codec of mine." in out


# -- compare, eval, demo, report ---------------------------------------------------------------------------------------


def test_compare_prints_nothing_but_json_or_a_table_and_writes_the_file(capsys, model, text, tmp_path):
    arguments = ["compare", model, "--specs", "dense,kivi-2:group=16,window=32", "--text", text, *SIZES, "--json"]
    status, out, err = run(capsys, *arguments, "-")
    rows = json.loads(out)
    assert status == 0
    assert [row["spec"] for row in rows] == ["dense", "kivi-2:group=16,window=32"]
    assert [row["text"] for row in rows] == ["text.txt"] * 2
    assert "measuring" in err
    target = tmp_path / "new" / "rows.json"
    _, out, _ = run(capsys, *arguments, str(target))
    lines = [line.split()[0] for line in out.splitlines()[:5]]
    assert [lines[0], *lines[2:]] == ["spec", "(uncompressed)", *(row["spec"] for row in rows)]
    assert "2 windows of 96 tokens of text.txt, prefill=decoded" in out
    assert [row["spec"] for row in json.loads(target.read_text())] == [row["spec"] for row in rows]


@pytest.mark.parametrize("prefill", ["decoded", "exact"])
def test_eval_measures_one_spec_and_states_the_prefill(capsys, model, text, prefill):
    arguments = ["eval", model, "--spec", "int-4", "--text", text, "--windows", "1", "--window-tokens", "300"]
    _, out, _ = run(capsys, *arguments, "--prefill", prefill, "--json", "-")
    (row,) = json.loads(out)
    assert row["prefill"] == prefill
    assert row["kl"] > 0
    assert row["attention_error"] > 0


def test_demo_writes_results_picture_and_page_and_recommends(capsys, model, text, tmp_path):
    specs, out_dir, again = ["dense", "int-2", "int-4", "saw-int4"], tmp_path / "report", tmp_path / "again"
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
    status, out, _ = run(capsys, "report", str(out_dir / "results.json"), "--out", str(again), "--json", "-")
    assert status == 0
    assert set(json.loads(out)) == {str(p) for p in again.iterdir()}


# -- fit, --params -----------------------------------------------------------------------------------------------------

INNERQ = "innerq-base:sink=0,window=0"


def test_fit_writes_a_file_that_compare_and_eval_take(capsys, model, text, tmp_path):
    out_file = tmp_path / "new" / "params.safetensors"
    arguments = ["fit", model, INNERQ, "--text", text, "-o", str(out_file), *SIZES]
    status, out, err = run(capsys, *arguments)
    assert status == 0
    assert f"written: {out_file}" in out
    assert "keys: norm float32 [1x2x64] in 3 layers" in out
    assert "reading the text" in err
    found = json.loads(run(capsys, *arguments, "--json", "-")[1])
    assert {"seconds", "sha256", "file", "text_sha256", "bytes"} <= set(found)
    assert (found["spec"], found["tokens"], found["layers"], found["seed"]) == (INNERQ, 192, [0, 1, 2], None)
    assert [p.name for p in out_file.parent.iterdir()] == [out_file.name]
    given = ["--text", text, *SIZES, "--params", str(out_file)]
    rows = json.loads(run(capsys, "compare", model, "--specs", f"{INNERQ},int-4", *given, "--json", "-")[1])
    assert [row["fitted"] for row in rows] == ["file", None]
    assert rows[0]["params"]["sha256"] == found["sha256"]
    assert "fitted" in run(capsys, "eval", model, "--spec", INNERQ, *given)[1]


def test_fit_without_a_text_takes_what_the_model_writes(capsys, model, tmp_path):
    small = ["--windows", "2", "--window-tokens", "24", "-o", str(tmp_path / "p")]
    status, out, err = run(capsys, "fit", model, INNERQ, *small)
    assert status == 0
    assert "text: the model's own samples (seed 0), 2 x 24 tokens" in out
    assert "drawing tokens" in err


def test_an_interrupted_fit_leaves_no_file(capsys, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(InnerQ, "fit", interrupted)
    status, out, _ = run(capsys, "fit", model, "innerq-base", "--text", text, "-o", str(tmp_path / "p"), *SIZES)
    assert (status, out) == (130, "")
    assert not list(tmp_path.iterdir())


def test_a_params_file_of_no_spec_or_of_another_model_is_refused(capsys, model, text, tmp_path, monkeypatch):
    out_file = str(tmp_path / "params")
    run(capsys, "fit", model, INNERQ, "--text", text, "-o", out_file, *SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
        arguments = ["eval", "m", "--spec", "int-4", "--text", text, "--params", out_file]
        assert f"fitted for {INNERQ}, which is not among the specs given (int-4)" in refused(capsys, *arguments)
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.01)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    arguments = ["eval", str(tmp_path / "other"), "--spec", INNERQ, "--text", text, *SIZES, "--params", out_file]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "whose weights are not those of this LlamaForCausalLM" in err.splitlines()[-1]


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_in_the_middle_keeps_the_results_and_ends_with_130(capsys, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module.perplexity, "compressed_logits", interrupting(perplexity.compressed_logits, 4))
    out_dir = tmp_path / "report"
    arguments = ["demo", "--model", model, "--text", text, "--specs", "dense,int-4", *SIZES, "--out", str(out_dir)]
    status, out, _ = run(capsys, *arguments)
    assert status == 130
    found = json.loads((out_dir / "results.json").read_text())
    assert [(r["spec"], r["windows"], r["partial"]) for r in found["rows"]] == [("dense", 1, True), ("int-4", 1, True)]
    assert "INTERRUPTED" in out
    assert "The run was interrupted" in (out_dir / "report.html").read_text()


def test_an_interrupt_before_any_result_says_so(capsys, model, text, monkeypatch):
    monkeypatch.setattr(compare_module.perplexity, "uncompressed", interrupted)
    status, out, err = run(capsys, "compare", model, "--specs", "int-4", "--text", text, *SIZES)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "packedkv: interrupted before anything was finished."


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("the model was loaded first"))
    monkeypatch.setattr("packedkv.cli.demo.load", lambda *_, **__: pytest.fail("the model was loaded first"))


FIT = "fit m innerq-base -o DIR/p --windows 2 --window-tokens 96 --text"
PARAMS = "compare m --specs innerq-base --text TEXT --params"
MISTAKES = {
    "fit m innerq-bas -o DIR/p --text TEXT": "Did you mean 'innerq-base'",
    "fit m saw-int4 -o DIR/p --text TEXT": "saw-int4 has no constants to fit",
    "fit m innerq-base -o DIR/p --text TEXT": "a window takes 2048 tokens",
    f"{FIT} no.txt": "cannot be read",
    f"{FIT} TEXT -o DIR/file/p": "cannot be written",
    f"{FIT} TEXT -o DIR": "is a folder; name a file in it",
    f"{PARAMS} DIR/no": "was not found",
    f"{PARAMS} DIR": "is a folder",
    f"{PARAMS} DIR/file": "is not a packedkv params file",
    "compare m --specs dense,octopus4": "Did you mean 'octopus-4'",
    "compare m --specs dense --text TEXT --json DIR/file/x": "cannot be written",
    "compare m --specs dense --text no.txt": "the text 'no.txt' cannot be read",
    "eval m --spec kivi-2:windw=3": "Did you mean 'window'?",
    "eval m --specs dense --data no.json --output DIR/new": "--data 'no.json': write TASK=PATH",
    "advise m --context 10 --output DIR/o": "--memory",
    "advise m --context 10 --output DIR/o --memory 1g --specs saw-int5": "unknown codec",
    "bench decode --shapes x": "--shapes and --also are for --device cuda",
    "describe saw-int": "Did you mean 'saw-int4'",
    "demo --specs nix --out DIR/new": "unknown codec 'nix'",
    "demo --out DIR/file": "the folder DIR/file cannot be written",
    "demo --out DIR/file/deeper": "the folder DIR/file/deeper cannot be written (Not a directory); choose another one",
    "list --json DIR": "is a folder; name a file in it",
    "--codec-file no.py list": "was not found",
    "report DIR/none.json": "holds no result rows",
    "report DIR/cut.json": "cut.json is not JSON",
    "report DIR/c.json": "holds no c.json (No such file",
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_explained_before_the_model_is_loaded(capsys, text, tmp_path, line):
    files = {"file": "no params file, but as long as one has to be", "none.json": '{"rows": []}', "cut.json": '[{"sp'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    said = refused(capsys, *line.replace("TEXT", text).replace("DIR", str(tmp_path)).split())
    assert MISTAKES[line].replace("DIR", str(tmp_path)) in said
    assert {p.name for p in tmp_path.iterdir()} == set(files)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"compare m --specs dense --windows {value}", "is not a whole number >= 1") for value in ("0", "-1", "x")),
        ("compare m --specs dense --window-tokens 1", "'1' is not a whole number >= 2"),
        ("compare m --specs dense --new-tokens -1", "'-1' is not a whole number >= 0"),
        ("compare m --specs dense --budget -1", "'-1' is not a number of seconds"),
        ("compare m --specs ,", "names no preset"),
        ("bench --rows-only", "unrecognized arguments: --rows-only"),
        ("bench page --out x --tokens 9", "unrecognized arguments: --tokens"),
    ],
)
def test_options_and_values_that_there_are_not(capsys, line, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("specs", [["a", "b"], ["a:x=1,y=2", "b"], ["a:x=1", "b:y=2"], [" a ", " ", "b"]])
def test_specs_with_options_in_a_list(specs):
    assert split_specs(",".join(specs)) == [spec.strip() for spec in specs if spec.strip()]


# -- the recommendation ------------------------------------------------------------------------------------------------


def result(spec, bits, perplexity, kl):
    measured = {"effective_bits": bits, "ratio_to_16bit": 16 / bits, "perplexity": perplexity, "kl": kl}
    return {"spec": spec, **measured, "uncompressed": {"perplexity": 20.0}}


def test_the_fewest_bits_within_five_percent_are_recommended():
    rows = [result("dense", 16.0, 20.0, 0.0), result("fp8", 8.1, 20.1, 0.01), result("a", 4.5, 20.9, 0.04)]
    rows += [result("b", 4.5, 20.8, 0.03), result("c", 2.3, 21.1, 0.08), result("nan", 2.0, float("nan"), 0.0)]
    text = recommend(rows)
    assert text.startswith("Take b: ")
    assert all(part in text for part in ("4.50 bits", "3.6x", "+4.0%"))
    assert text.count(". ") == 0, "one sentence"
    assert recommend(rows[:1]).startswith("No preset can be recommended")
    far = [rows[0], result("a", 4.5, 30.0, 0.4), result("b", 2.5, 60.0, 0.9)]
    assert recommend(far).startswith("Take a with care: no preset is within 5%")


# -- progress lines ----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_passing_messages_are_sparse_and_lasting_ones_stay():
    stream = io.StringIO()
    progress = Progress(stream=stream, interval=60)
    for done in range(100):
        progress.bar("measuring", done, 100, "x")
    progress.say("ready")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("measuring [")
    assert lines[0].endswith("0% x")
    assert lines[1:] == ["ready"]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_the_line_is_wiped_before_the_next():
    stream = Terminal()
    progress = Progress(stream=stream)
    progress.update("passing")
    progress.say("staying")
    before, wiped, after = stream.getvalue().split("\r")
    assert (before, wiped.strip(), after) == ("passing", "", "staying\n")


def test_a_long_job_shows_that_it_is_alive(monkeypatch):
    seconds = itertools.count()  # one more whenever somebody looks
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    stream = io.StringIO()
    with Progress(stream=stream, interval=0.5).busy("loading"):
        while stream.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading ..."
    assert all(re.fullmatch(r"loading \.\.\. [1-9]\d* s", line) for line in lines[1:-1])
    shown = [float(re.search(r"[\d.]+(?= s$)", line)[0]) for line in lines[1:]]
    assert shown == sorted(set(shown)), "they count up"
    assert re.fullmatch(r"loading: \d+\.0 s", lines[-1])


def test_progress_that_is_off_writes_nothing():
    stream = io.StringIO()
    progress = Progress(False, stream)
    progress.say("a")
    with progress.busy("b"):
        progress.bar("c", 1, 2)
    assert stream.getvalue() == ""
