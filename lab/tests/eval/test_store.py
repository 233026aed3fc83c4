"""The folder of a run: what a kill, a full disk or a second process does to it, and what it refuses to mix."""

import errno
import json
import os

import pytest
from tests.cli.tiny import tiny_loaded

from lab.tests.eval.test_run import RECORDS, SPECS, TASKS, lines_of, settings_for, values
from packedkv.errors import FormatError, KVError
from packedkv_lab.eval import store as module
from packedkv_lab.eval.run import evaluate, merge
from packedkv_lab.eval.store import ITEMS, RESULTS, RUN, Store, read_run

ABOUT = {
    "model": {"name": "tiny", "sha256": "ab" * 32, "dtype": "float32"},
    "versions": {"packedkv": "1"},
    "device": "cpu",
    "seed": 0,
    "settings": {"prefill": "decoded"},
    "tasks": {"kl": {"text_sha256": "11", "limit": 2, "items": 2, "source": {"name": "a", "sha256": "22"}}},
    "specs": ["int-4"],
    "params": {"int-4": None},
    "bits": {"int-4": {"key_bits": 4.25, "value_bits": 4.25}},
}


def line(item: str, spec: str = "int-4", **more) -> dict:
    return {"spec": spec, "task": "kl", "item": item, "group": {}, "scores": {"kl": [0.5, 2.0]}, **more}


def changed(**parts) -> dict:
    return json.loads(json.dumps(ABOUT)) | parts


def test_lines_are_kept_each_once_and_come_back(tmp_path):
    with Store(tmp_path, ABOUT) as store:
        for item in ("a", "b", "a"):
            store.add(line(item))
        assert store.has("int-4", "kl", "a")
        assert not store.has("int-4", "kl", "c")
        assert not store.has("dense", "kl", "a")
    assert (tmp_path / ITEMS).read_text().count("\n") == 2
    with Store(tmp_path, ABOUT) as store:
        assert store.resumed == 2
        store.add(line("b", scores={"kl": [9.0, 9.0]}))
        store.add(line("c"))
    assert [row["item"] for row in read_run(tmp_path).lines] == ["a", "b", "c"]
    assert read_run(tmp_path).lines[1]["scores"] == {"kl": [0.5, 2.0]}


def test_a_line_torn_anywhere_is_done_again_and_no_other(tmp_path):
    """A killed process leaves any number of a line's bytes."""
    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
        store.add(line("b", output="ü"))
    whole = (tmp_path / ITEMS).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        (tmp_path / ITEMS).write_bytes(whole[:cut])
        assert [row["item"] for row in read_run(tmp_path).lines] == ["a"]
        assert (tmp_path / ITEMS).read_bytes() == whole[:cut], "reading changes nothing"
        with Store(tmp_path, ABOUT) as store:
            assert not store.has("int-4", "kl", "b")
            store.add(line("b", output="ü"))
        assert (tmp_path / ITEMS).read_bytes() == whole


def test_an_item_that_stands_there_twice_counts_once(tmp_path):
    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
    text = (tmp_path / ITEMS).read_text()
    (tmp_path / ITEMS).write_text(text + text.replace("0.5", "0.7"))
    assert [row["scores"]["kl"] for row in read_run(tmp_path).lines] == [[0.5, 2.0]]


@pytest.mark.parametrize(
    ("cause", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.EFBIG, "File too large"), KVError)],
)
def test_what_ends_a_write_halfway_leaves_no_half_line(tmp_path, monkeypatch, cause, seen):
    """A full disk accepts part of a line first."""
    write, calls = os.write, []

    def interrupted(file, data):
        if calls:
            raise cause
        calls.append(len(data))
        return write(file, data[:10])

    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "write", interrupted)
            with pytest.raises(seen, match="File too large" if seen is KVError else None):
                store.add(line("b"))
    assert (tmp_path / ITEMS).read_text().count("\n") == 1
    assert (tmp_path / ITEMS).read_bytes().endswith(b"\n")
    assert [row["item"] for row in read_run(tmp_path).lines] == ["a"]


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (changed(model={**ABOUT["model"], "sha256": "cd" * 32}), "model sha256"),
        (changed(model={**ABOUT["model"], "dtype": "bfloat16"}), 'model dtype: "float32" there, "bfloat16" here'),
        (changed(seed=1), "seed: 0 there, 1 here"),
        (changed(device="cuda"), "device"),
        (changed(settings={"prefill": "exact"}), 'settings prefill: "decoded" there, "exact" here'),
        (changed(settings={"prefill": "decoded", "stress": {"factor": 8}}), "settings stress: null there"),
        (changed(tasks={"kl": {**ABOUT["tasks"]["kl"], "text_sha256": "12"}}), 'kl text_sha256: "11" there'),
        (
            changed(tasks={"kl": {**ABOUT["tasks"]["kl"], "source": {"name": "a", "sha256": "0"}}}),
            "kl source sha256",
        ),
        (changed(params={"int-4": {"file": "p", "sha256": "33"}}), "int-4: null there"),
        (changed(bits={"int-4": {"key_bits": 4.5, "value_bits": 4.25}}), "int-4 key_bits: 4.25 there, 4.5 here"),
    ],
)
def test_a_run_that_differs_is_refused_and_says_in_what(tmp_path, about, said):
    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(KVError, match="holds a run that differs from this one") as caught:
        Store(tmp_path, about)
    assert said in str(caught.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, "what is there stays as it is"


def test_names_limits_versions_tasks_and_specs_may_change(tmp_path):
    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
    more = changed(
        model={**ABOUT["model"], "name": "elsewhere/tiny"},
        tasks={"kl": {**ABOUT["tasks"]["kl"], "limit": 9, "source": {"name": "moved", "sha256": "22"}}, "piqa": {}},
        specs=["saw-int4"],
        params={"saw-int4": None},
        bits={"saw-int4": {}},
        versions={"packedkv": "2"},
    )
    with Store(tmp_path, more) as store:
        assert store.has("int-4", "kl", "a")
    about = read_run(tmp_path).about
    assert about["specs"] == ["int-4", "saw-int4"]
    assert set(about["bits"]) == {"int-4", "saw-int4"}
    assert about["tasks"]["kl"]["limit"] == 9
    assert list(about["tasks"]) == ["kl", "piqa"]
    assert (about["versions"], about["later_versions"]) == ({"packedkv": "1"}, [{"packedkv": "2"}])


def test_a_run_names_every_device_that_measured_a_part(tmp_path):
    for device in ("NVIDIA H200", "NVIDIA H100", "NVIDIA H200"):
        with Store(tmp_path, changed(device_name=device)):
            pass
    assert read_run(tmp_path).about["device_name"] == "NVIDIA H200, NVIDIA H100"


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    with Store(tmp_path, ABOUT), pytest.raises(KVError, match="another run is writing to"):
        Store(tmp_path, ABOUT)
    Store(tmp_path, ABOUT).__exit__(None, None, None)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"holds no run\.json"):
        read_run(tmp_path)
    (tmp_path / ITEMS).write_text("")
    with pytest.raises(FormatError, match=r"holds items\.jsonl and no run\.json"):
        Store(tmp_path, ABOUT)
    for text, said in (
        ("{", "is not JSON"),
        ('{"format": "x"}', "is not that of a packedkv eval run"),
        (
            '{"format": "packedkv-eval", "version": 99}',
            "version 99, this packedkv reads version 1; update packedkv",
        ),
    ):
        (tmp_path / RUN).write_text(text)
        for reader in (read_run, lambda folder: Store(folder, ABOUT)):
            with pytest.raises(FormatError, match=said):
                reader(tmp_path)


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    with Store(tmp_path, ABOUT) as store:
        store.add(line("a"))
        store.add(line("b"))
    text = (tmp_path / ITEMS).read_text()
    (tmp_path / ITEMS).write_text("{" + text)
    with pytest.raises(FormatError, match=r"items\.jsonl, line 1 is damaged"):
        Store(tmp_path, ABOUT)
    (tmp_path / ITEMS).write_text(text)
    with Store(tmp_path, ABOUT) as store:  # the refused one let go of the file
        assert store.resumed == 2


def test_notes_are_kept_once(tmp_path):
    with Store(tmp_path, ABOUT) as store:
        assert store.note("int-4", "breaks")
        assert not store.note("int-4", "breaks")
    with Store(tmp_path, ABOUT) as store:
        assert not store.note("int-4", "breaks")
    assert read_run(tmp_path).about["notes"] == {"int-4": ["breaks"]}


# -- runs that are merged ----------------------------------------------------------------------------------------------


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
