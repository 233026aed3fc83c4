"""Folders that are missing, foreign, cut, altered or empty, and options that clash: one clear line each."""

import json
from pathlib import Path

import pytest

from lab.tests.report import folders
from packedkv.cli.main import main
from packedkv.cli.page.rows import read_rows
from packedkv.errors import FormatError
from packedkv_lab.eval.store import ITEMS, RESULTS, RUN, read_run
from packedkv_lab.report.results import read_folder, read_layers, runs_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write(tmp_path / "run")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("packedkv: error: ")


def test_a_folder_that_is_not_there_or_holds_no_run(capsys, folder: Path, tmp_path: Path) -> None:
    assert "not exist; name the folder that `packedkv eval --output` wrote" in refused(capsys, str(tmp_path / "no"))
    (tmp_path / "empty").mkdir()
    told = refused(capsys, str(tmp_path / "empty"))
    assert "holds no run.json (No such file or directory): pass the folder that `packedkv eval --output` wrote." in told
    with pytest.raises(FormatError, match=r"holds no run.json \(Not a directory\)"):
        read_folder(folder / RUN)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (RUN, '{"format": "packedkv-ev', "run.json is not JSON"),
        (RUN, "[]", "run.json is not that of a packedkv eval run"),
        (RUN, '{"format": "other"}', "run.json is not that of a packedkv eval run"),
        (RUN, '{"format": "packedkv-eval", "version": 2}', "version 2, this packedkv reads version 1; update packedkv"),
        (RESULTS, '{"rows": [{"spec"', "results.json is not JSON"),
        (RESULTS, "[" * 100_000, "results.json is not JSON"),
        (RESULTS, '{"rows": 3}', "results.json holds no rows"),
        (RESULTS, "[]", "results.json holds no rows"),
        (RESULTS, '{"rows": []}', "no item was finished"),
        (RESULTS, '{"rows": [7]}', "results.json, row 1 is damaged: 7 is no object"),
        (RESULTS, '{"rows": [{"spec": 1, "task": "a", "metric": "b"}]}', "row 1 is damaged"),
        (RESULTS, '{"rows": [{"spec": "a", "task": "a", "metric": "b", "value": "12"}]}', "is '12', not a number"),
        (RESULTS, '{"rows": [{"spec": "a", "task": "a", "metric": "b", "group": 4}]}', "group is 4, not an object"),
        (ITEMS, '{"spec": "a"}\n', "items.jsonl, line 1 is damaged"),
        (ITEMS, "3\n", "items.jsonl, line 1 is damaged"),
        (ITEMS, "{]\n{}\n", "items.jsonl, line 1 is damaged"),
        *((name, b"\xff\xfe\x00\n", name) for name in (RUN, RESULTS, ITEMS)),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(capsys, folder: Path, name: str, text: str | bytes, told: str) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert told in refused(capsys, str(folder))
    assert not (folder / "report.html").exists()


def test_a_run_that_was_killed_before_its_results_says_what_to_do(capsys, folder: Path) -> None:
    (folder / RESULTS).unlink()
    told = refused(capsys, str(folder))
    assert "holds no results.json" in told
    assert "give the same `packedkv eval` again: it keeps what is finished" in told
    folders.write(folder)
    (folder / ITEMS).unlink()
    assert "holds no items.jsonl" in refused(capsys, str(folder))


def test_a_torn_last_line_is_passed_over_as_the_harness_does(folder: Path) -> None:
    with (folder / ITEMS).open("a") as file:
        file.write('{"spec": "int-4", "ta')
    assert len(read_folder(folder).answers) == len(folders.items()) == len(read_run(folder).lines)


def test_targets_that_cannot_be_written(capsys, folder: Path, tmp_path: Path) -> None:
    assert f"-o {tmp_path} is a folder; name a file in it." in refused(capsys, str(folder), "-o", str(tmp_path))
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in refused(capsys, str(folder), "-o", str(tmp_path / "file" / "page.html"))


def test_options_that_do_not_go_together(capsys, folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text('[{"spec": "dense"}]')
    assert "--out is for result files" in refused(capsys, str(folder), "--out", str(tmp_path / "x"))
    assert "name it alone" in refused(capsys, str(folder), str(rows))
    assert "-o is for the folder of an eval run" in refused(capsys, str(rows), "-o", str(tmp_path / "x.html"))
    assert "--bench is for the folder" in refused(capsys, str(rows), "--bench", str(tmp_path))
    says = "is no context; write tokens from 256 to 8388608"
    for wrong, message in {"0": ">= 1", "x": "is not a whole number", "100": says, "99999k": says}.items():
        with pytest.raises(SystemExit):
            main(["report", str(folder), "--context", wrong])
        assert message in capsys.readouterr().err


def test_what_stands_beside_it_may_be_damaged_too(capsys, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert "holds neither decode.json nor decode.jsonl" in refused(capsys, str(folder), "--bench", str(other))
    (other / "decode.json").write_text("[{")
    assert "is not JSON" in refused(capsys, str(folder), "--bench", str(other))
    (other / "decode.json").write_text('[{"a": 1}]')
    assert "holds no rows of `packedkv bench decode`" in refused(capsys, str(folder), "--bench", str(other))
    assert "holds neither advice.json nor sensitivity.jsonl" in refused(capsys, str(folder), "--layers", str(other))
    (other / "advice.json").write_text('{"sensitivity": [{"kl": 1}]}')
    assert "holds a row without a layer" in refused(capsys, str(folder), "--layers", str(other))
    (other / "advice.json").write_text("{}")
    assert "holds no sensitivity rows" in refused(capsys, str(folder), "--layers", str(other))
    (folder / "sensitivity.jsonl").write_text("{]\n")
    assert "sensitivity.jsonl, line 1 is damaged" in refused(capsys, str(folder))


def test_sensitivity_rows_alone_are_enough_and_one_that_is_not_finite_is_not_drawn(tmp_path: Path) -> None:
    rows = [{"layer": i, "role": "key", "spec": "int-4", "kl": None if i else 0.5} for i in range(2)]
    lines = [{"format": "packedkv-sensitivity", "model": "m"}, *rows]
    path = tmp_path / "sensitivity.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"layer": 3, "ro')
    found = read_layers(tmp_path)
    assert ([r["layer"] for r in found.sensitivity], found.keys, found.model) == ([0], [], "m")


# -- rows of result files ----------------------------------------------------------------------------------------------


def test_files_of_every_form_are_read_in_order(tmp_path: Path) -> None:
    for name, text in {"a.json": '[{"spec": "a"}]', "b.json": '{"rows": [{"spec": "b"}]}', "c.json": '{"spec": "c"}',
                       "d.jsonl": '{"spec": "d"}\n{"spec": "e", "kl": null}\n{"sp',
                       "e.jsonl": '{"spec": "f"}'}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    rows = read_rows(sorted(tmp_path.iterdir()))
    assert "".join(row["spec"] for row in rows) == "abcdef"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("r.json", "[{", "r.json is not JSON"),
        ("r.json", "3", "holds no rows: a list, or an object with rows"),
        ("r.json", '[{"spec": "a"}, 3]', "r.json, row 2 is damaged: 3 is no object; measure it again."),
        ("r.json", '[{"kl": 1}]', "row 1 is damaged: it has no spec"),
        ("r.json", '[{"spec": "a", "values": 3}]', "values is 3, not an object"),
        ("r.json", '[{"spec": "a", "kl": true}]', "kl is True, not a number"),
        ("r.json", '[{"spec": ["a"]}]', r"spec is \['a'\], not a text"),
        ("r.jsonl", '{"sp\n{"spec": "a"}\n', "r.jsonl, line 1 is damaged"),
    ],
)
def test_a_damaged_row_is_named_with_its_file(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=told):
        read_rows([tmp_path / name])


def test_runs_are_told_by_when_they_began() -> None:
    row = {"run": "2026-01-01", "gpu": "G", "commit": "c", "seed": 0, "versions": {"torch": "2", "vllm": "0"}}
    assert runs_of([row, row]) == {"2026-01-01": "G; commit c; seed 0; torch 2, vllm 0"}
