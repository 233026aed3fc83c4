"""Runs made side by side become the run that one process would have made."""

import json

import pytest
from tests.cli.tiny import tiny_loaded

from lab.tests.eval.test_run import RECORDS, SPECS, TASKS, lines_of, settings_for, values
from lab.tests.eval.test_store import ABOUT, changed, line
from packedkv.errors import FormatError, KVError
from packedkv_lab.eval.merge import merge
from packedkv_lab.eval.run import evaluate
from packedkv_lab.eval.store import RESULTS, Store, read_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One run of both specs, and a run of each."""
    root, model = tmp_path_factory.mktemp("merge"), tiny_loaded()
    (root / "kv.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    for name, specs in (("whole", SPECS), ("first", SPECS[:1]), ("second", SPECS[1:])):
        evaluate(model, specs, TASKS, root / name, settings_for(root))
    return root


def test_runs_of_a_spec_each_merge_to_the_run_of_all(folders, tmp_path):
    rows = merge([folders / "first", folders / "second"], tmp_path)
    whole = read_run(folders / "whole")
    assert values(rows) == values(json.loads(_text(folders / "whole"))["rows"])
    assert read_run(tmp_path).about["specs"] == whole.about["specs"]
    assert len(lines_of(tmp_path)) == len(whole.lines), "the uncompressed model's items count once"
    assert {row["status"] for row in rows} == {"complete"}
    assert merge([folders / "second"], tmp_path) == rows, "again changes nothing"
    assert len(lines_of(tmp_path)) == len(whole.lines)


def _text(folder) -> str:
    return (folder / RESULTS).read_text()


LACKING = (("a", "int-4", "x"), ("b", "fp8", "xy"))


def run_at(folder, spec: str, items: str, **about):
    with Store(folder, changed(specs=[spec], params={spec: None}, bits={}, **about)) as store:
        for item in items:
            store.add(line(item, spec, seconds=1.0))
    return folder


def test_a_run_that_lacks_items_says_so(tmp_path):
    tasks = {"kl": {"items": 2, "metrics": {"kl": {"better": "lower", "text": "t"}}}}
    both = [run_at(tmp_path / name, spec, items, tasks=tasks) for name, spec, items in LACKING]
    rows = merge(both, tmp_path / "all")
    assert {row["status"] for row in rows} == {"budget"}


def test_notes_of_all_runs_stay(tmp_path):
    for name, spec in (("a", "int-4"), ("b", "fp8")):
        with Store(tmp_path / name, changed(specs=[spec], params={}, bits={}, tasks={})) as store:
            store.note(spec, f"said of {spec}")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert read_run(tmp_path / "all").about["notes"] == {"int-4": ["said of int-4"], "fp8": ["said of fp8"]}


def test_runs_that_differ_are_refused_and_what_was_gathered_stays(tmp_path):
    first = run_at(tmp_path / "a", "int-4", "x", tasks={})
    other = run_at(tmp_path / "b", "fp8", "x", tasks={}, model={**ABOUT["model"], "sha256": "cd" * 32})
    with pytest.raises(KVError, match="model sha256"):
        merge([first, other], tmp_path / "all")
    assert [row["spec"] for row in read_run(tmp_path / "all").lines] == ["int-4"]
    with pytest.raises(KVError, match="no run to merge"):
        merge([], tmp_path / "none")
    with pytest.raises(FormatError, match=r"holds no run\.json"):
        merge([tmp_path / "nothing"], tmp_path / "none")
