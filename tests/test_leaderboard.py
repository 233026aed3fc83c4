"""The leaderboard says what the published runs say, and nothing before there are any."""

import gzip
import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.eval.test_store import ABOUT

import update_leaderboard as script
from blocks import quality, sources
from kvcodec.errors import FormatError, KVError
from kvcodec_lab.eval.merge import PACKED, unpack, write_results
from kvcodec_lab.eval.scoring import UNCOMPRESSED
from kvcodec_lab.eval.stats import summarize
from kvcodec_lab.eval.store import ITEMS, RESULTS, RUN, Store, read_run
from kvcodec_lab.eval.tasks import get_task
from kvcodec_lab.report.pages.leaderboard import (
    pair_plots,
    pairs,
    plots,
    points,
    prediction,
    read_runs,
    sentences,
    tables,
)

ROOT = Path(__file__).parents[1]


PUBLISHED = sorted((ROOT / script.RUNS).glob(f"*/{RUN}"))


# -- what is committed -------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_published_runs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sources.read_runs(ROOT / script.RUNS)
    monkeypatch.setattr(script, "read_runs", lambda folder: runs)
    monkeypatch.setattr(sys, "argv", ["update_leaderboard.py", "--check"])
    assert script.main() == 0, "run scripts/update_leaderboard.py"
    assert (ROOT / script.FIGURE).is_file() == any(points(results) for results in runs.values())
    assert (ROOT / script.PAIRS).is_file() == bool(pair_plots(runs))


@pytest.mark.parametrize("run", PUBLISHED or [None], ids=lambda p: p and p.parent.name)
def test_published_rows_follow_from_the_published_items(run: Path | None, tmp_path: Path) -> None:
    if run is None:
        pytest.skip("no run is published yet")
    rows = summarize(unpack(run.parent, tmp_path))
    published = json.loads((run.parent / RESULTS).read_text())["rows"]
    compare(published, json.loads(json.dumps([row for row in rows if row["group"] is None])))


def test_a_published_number_that_is_wrong_is_found() -> None:
    """The comparison takes what another processor's sums make of a number, and nothing else."""
    row = {"value": 20.09, "low": 19.5, "high": None, "items": 12, "versions": {"torch": "2.9"}, "bits": [4.25, 4.5]}
    compare([row], [row | {"value": 20.09 * (1 + 4e-14), "bits": [4.25 * (1 + 4e-14), 4.5]}])
    for wrong in ({"value": 20.09001}, {"low": None}, {"high": 0.0}, {"items": 13}, {"items": 12.0},
                  {"versions": {"torch": "2.10"}}, {"bits": [4.25]}, {"more": 1}):  # fmt: skip
        with pytest.raises(AssertionError):
            compare([row], [row | wrong])
    with pytest.raises(AssertionError):
        compare([row], [row, row])


def compare(published: Any, again: Any, where: str = "rows") -> None:
    """Ask for equal rows; of floats, for what sums in another order leave: nine digits."""
    assert type(published) is type(again), f"{where}: {published!r} is published, {again!r} follows"
    if isinstance(published, dict):
        assert published.keys() == again.keys(), where
        for key in published:
            compare(published[key], again[key], f"{where}.{key}")
    elif isinstance(published, list):
        assert len(published) == len(again), where
        for i, (one, other) in enumerate(zip(published, again, strict=True)):
            compare(one, other, f"{where}[{i}]")
    elif isinstance(published, float):
        # differences of two sums of about 10 keep fewer digits than the sums
        assert again == pytest.approx(published, rel=1e-9, abs=1e-12), where
    else:
        assert published == again, where


# -- runs made here ----------------------------------------------------------------------------------------------------

TASKS = {"perplexity": 2, "kl": 2, "needle": 4}
NLL = {UNCOMPRESSED: 3.0, "dense": 3.0, "fp8": 3.05, "saw-int4": 3.06, "int-4": 3.2}
NLL_STRESSED = NLL | {"saw-int4": 5.0, "int-4": 8.0}
KL = {UNCOMPRESSED: 0.0, "dense": 0.0, "fp8": 0.01, "saw-int4": 0.04, "int-4": 0.05}
FOUND = {UNCOMPRESSED: 4, "dense": 4, "fp8": 4, "saw-int4": 4, "int-4": 0}
BITS = {UNCOMPRESSED: 16.0, "dense": 16.0, "fp8": 8.25, "saw-int4": 4.5, "int-4": 4.25}


def written(
    folder: Path, stress: str = "", skip: str = "", model: str = "tiny", head_dim: int = 64, windows: int = 2
) -> Path:
    """A run's folder with such values; of ``skip`` one needle is left. Larger heads: fewer bits, and as if stressed."""
    bits = {spec: b - (b < 16) * (head_dim > 64) / 8 for spec, b in BITS.items()}
    counts = TASKS | {"perplexity": windows, "kl": windows}
    metrics = {name: {m: vars(metric) for m, metric in get_task(name).metrics.items()} for name in TASKS}
    tasks = {name: {"items": n, "limit": n, "metrics": metrics[name]} for name, n in counts.items()}
    tasks["needle"] |= {"lengths": [1024, 4096]}
    settings = {"prefill": "decoded"} | ({"stress": {"factor": 64.0, "pairs": 1}} if stress else {})
    specs = [spec for spec in BITS if spec != UNCOMPRESSED]
    about = ABOUT | {"settings": settings, "tasks": tasks, "specs": specs, "params": {}, "bits": {}}
    sizes = {"layers": 2, "kv_heads": 1, "head_dim": head_dim}
    about |= {"model": {"name": model, "sha256": "ab" * 32, "dtype": "float32", **sizes}, "device_name": "a machine"}
    nll = NLL_STRESSED if stress or head_dim > 64 else NLL
    with Store(folder, about) as store:
        for spec in BITS:
            for task, count in counts.items():
                for i in range(count - (spec == skip and task == "needle")):
                    store.add(_line(spec, task, i, bits[spec], nll[spec]))
    return folder


def _line(spec: str, task: str, i: int, bits: float, nll: float) -> dict[str, Any]:
    shift = (i - 0.5) * 1e-3  # windows are not all alike
    scores: dict[str, Any] = {
        "perplexity": {"nll": [10 * (nll + shift), 10]},
        "kl": {"kl": [10 * (KL[spec] * (1 + shift)), 10], "top1": [9, 10], "top5": [10, 10]},
        "needle": {"recall": [float(i < FOUND[spec]), 1], "prefix": [1.0, 1]},
    }
    line = {"spec": spec, "task": task, "item": str(i), "group": {"depth": i % 2} if task == "needle" else {}}
    sizes = {"bytes": int(bits * 1000), "elements": 8000, "seconds": 0.5, "prefill": "decoded"}
    return line | sizes | {"scores": scores[task]} | ({"output": "7"} if task == "needle" else {})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a plain and a stressed run published."""
    place = tmp_path_factory.mktemp("board")
    for name, stress in zip(quality.BOARD_RUNS, ("", "64:1"), strict=True):
        script.add(name, written(place / "made" / name, stress), place)
    return place


def test_published_runs_are_small_and_stand_plain_first(root: Path) -> None:
    runs = read_runs(root / script.RUNS)
    assert list(runs) == list(quality.BOARD_RUNS)
    for name in runs:
        assert {p.name for p in (root / script.RUNS / name).iterdir()} == {RUN, RESULTS, PACKED}
        rows = json.loads((root / script.RUNS / name / RESULTS).read_text())["rows"]
        assert all(row["group"] is None for row in rows)
    stressed_first = {"a": runs[quality.BOARD_RUNS[1]], "b": runs[quality.BOARD_RUNS[0]]}
    assert "| preset | bits | stressed 64:1: KL |" in tables(stressed_first)


def test_tables_have_every_preset_sorted_with_bits_and_intervals(root: Path) -> None:
    text = script.page(read_runs(root / script.RUNS))
    assert script.NONE not in text
    sections = {m[1]: m[2] for m in re.finditer(r"^### (.+?)\n(.*?)(?=^##|\Z)", text, re.S | re.M)}
    assert list(sections) == ["Perplexity", "KL divergence", "Needle in a haystack: recall"]
    rows = {
        name: [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
        for name, body in sections.items()
    }
    head, _, *lines = rows["Perplexity"]
    assert head == ["preset", "bits", "plain: perplexity", "difference", "stressed 64:1: perplexity", "difference"]
    assert [line[0] for line in lines] == [f"`{s}`" for s in (UNCOMPRESSED, "dense", "fp8", "saw-int4", "int-4")]
    by = {line[0].strip("`"): line for line in lines}
    assert by["fp8"][1] == "8.25"
    assert re.fullmatch(r"21\.12 \[21\.1\d, 21\.1\d\]", by["fp8"][2])
    assert re.fullmatch(r"\+1\.03 \[\+1\.03, \+1\.03\]", by["fp8"][3])
    assert by["int-4"][4].startswith("2,981 [")
    assert by[UNCOMPRESSED][3] == "–"
    needle = {line[0].strip("`"): line for line in rows["Needle in a haystack: recall"][2:]}
    assert needle["int-4"][2:4] == ["0.0 % [0.0, 49.0]", "−100.0 pp [−100.0, −100.0]"]
    assert "4 items." in sections["Needle in a haystack: recall"]
    assert "float32 on a machine, prefill decoded, seed 0" in text


def test_sentences_say_who_loses_least_who_finds_and_who_holds(root: Path) -> None:
    least, found, held = quality.board_block(root).splitlines()
    assert "at most 4.5 bits, `saw-int4` (4.50) loses least on tiny: a KL of 0.0400 [" in least
    assert "and a perplexity of 21.33 [" in least
    assert "beside 20.09 without compression (2 windows)" in least
    assert "hidden in up to 4,096 tokens" in found
    assert "gives back in 100.0 % [51.0, 100.0] of the prompts" in found
    assert "with 2 of 3 presets, `saw-int4` with the fewest bits (4.50)." in found
    assert "(stress 64:1: the same model, larger keys), 1 of 3 presets stay within 10 %" in held
    assert "perplexity of 20.09, `fp8` with the fewest bits (8.25), and `int-4` goes to 2,981." in held


def test_who_finds_a_uuid_on_the_real_model_is_counted_from_the_items() -> None:
    run, found = ROOT / script.RUNS / sources.TODAY, defaultdict(dict)
    for text in gzip.decompress((run / PACKED).read_bytes()).decode().splitlines():
        line = json.loads(text)
        if line["task"] == "kv_retrieval":
            found[line["spec"]][line["item"]] = line["scores"]["recall"][0]
    exact = found.pop(UNCOMPRESSED)
    del found["dense"]
    assert {len(items) for items in found.values()} == {10}, "every preset has every item"
    # where every item is as good as the uncompressed model's the difference is 0; fewer than 3 lost may be chance
    lost = {spec: sum(exact[i] > items[i] for i in exact) for spec, items in found.items()}
    told = quality.retrieved_block(ROOT)
    count = int(re.search(r"with (\d+) of 55 presets", told)[1])
    assert sum(n == 0 for n in lost.values()) <= count <= sum(n < 4 for n in lost.values())
    assert "`ghost-2` with the fewest bits (2.06)" in told
    assert lost["ghost-2"] == 0


def test_without_runs_nothing_is_claimed(tmp_path: Path) -> None:
    assert "No results are published yet" in script.page(read_runs(tmp_path))
    assert not re.search(r"^\|", script.page({}), re.M)
    assert script.write_figures({}, tmp_path) == []
    assert not list(tmp_path.iterdir())
    assert prediction({}) == ""
    assert quality.board_block(tmp_path).startswith("Not measured on tasks yet")


def test_a_run_that_the_readme_quotes_may_not_be_missing_or_lack_a_task(root: Path, tmp_path: Path) -> None:
    name = quality.BOARD_RUNS[0]
    script.add(name, root / script.RUNS / name, tmp_path)
    with pytest.raises(sources.MissingResultError, match=f"no run {quality.BOARD_RUNS[1]}"):
        quality.board_block(tmp_path)
    path = tmp_path / script.RUNS / name / RESULTS
    rows = json.loads(path.read_text())["rows"]
    path.write_text(json.dumps({"rows": [row for row in rows if row["task"] != "needle"]}))
    plain = read_runs(tmp_path / script.RUNS)[name]
    with pytest.raises(FormatError, match="holds no recall of needle"):
        sentences(plain, plain)


def test_a_run_with_items_left_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(KVError, match=r"1 specs have items left, e.g. fp8 \{'needle': 1\}; give the same call"):
        script.add("short", written(tmp_path / "short", skip="fp8"), tmp_path)
    assert not (tmp_path / script.RUNS).exists()


def test_a_spec_may_lack_a_whole_task_and_the_uncompressed_model_may_not(tmp_path: Path) -> None:
    for lacking, folder in (("fp8", tmp_path / "one"), (UNCOMPRESSED, tmp_path / "base")):
        lines = (written(folder) / ITEMS).read_text().splitlines(keepends=True)
        kept = [x for x in lines if (json.loads(x)["spec"], json.loads(x)["task"]) != (lacking, "needle")]
        (folder / ITEMS).write_text("".join(kept))
    script.add("one", tmp_path / "one", tmp_path)
    rows = json.loads((tmp_path / script.RUNS / "one" / RESULTS).read_text())["rows"]
    assert {r["task"] for r in rows if r["spec"] == "fp8"} == {"perplexity", "kl"}
    assert {r["task"] for r in rows if r["spec"] == UNCOMPRESSED} == {"perplexity", "kl", "needle"}
    with pytest.raises(KVError, match=r"1 specs have items left, e.g. \(uncompressed\)"):
        script.add("base", tmp_path / "base", tmp_path)


def test_a_published_run_is_made_again_and_published_the_same(root: Path, tmp_path: Path) -> None:
    name = quality.BOARD_RUNS[0]
    run = unpack(root / script.RUNS / name, tmp_path / "again")
    assert (run.folder / ITEMS).read_bytes() == (root / "made" / name / ITEMS).read_bytes()
    assert any(row["group"] for row in write_results(run))
    script.add(name, run.folder, tmp_path)
    for file in (RUN, RESULTS, PACKED):
        ours, theirs = (place / script.RUNS / name / file for place in (tmp_path, root))
        assert ours.read_bytes() == theirs.read_bytes()
    assert read_run(run.folder).about["model"]["name"] == "tiny"


def test_the_figure_has_a_panel_for_each_run(root: Path, tmp_path: Path) -> None:
    runs = read_runs(root / script.RUNS)
    assert [(p.spec, p.x) for p in points(runs[quality.BOARD_RUNS[0]])] == [
        ("fp8", 8.25),
        ("saw-int4", 4.5),
        ("int-4", 4.25),
    ]
    assert script.write_figures(runs, tmp_path) == [script.FIGURE, script.PAIRS]
    one = {"plain": runs[quality.BOARD_RUNS[0]]}
    assert script.write_figures(one, tmp_path / "one") == [script.FIGURE]
    both, alone = ((folder / script.FIGURE).read_bytes() for folder in (tmp_path, tmp_path / "one"))
    assert both.startswith(b"\x89PNG")
    width = [int.from_bytes(data[16:20], "big") for data in (both, alone)]
    assert width[0] == 2 * width[1]


def test_other_presets_on_the_same_windows_share_a_panel(root: Path) -> None:
    plain = read_runs(root / script.RUNS)[quality.BOARD_RUNS[0]]
    own = [replace(row, spec="ghost-3") for row in plain.rows if row.spec == "fp8"]
    more = replace(plain, about=plain.about | {"settings": {"prefill": "decoded", "mean": "auto"}}, rows=own)
    (panel,) = plots({"a": plain, "b": more})
    assert panel.title == "tiny, plain; ghost-3: plain, mean=auto"
    assert [p.spec for p in panel.points] == ["fp8", "saw-int4", "int-4", "ghost-3"]
    assert [panel.title for panel in plots({"a": plain, "b": plain})] == ["tiny, plain"] * 2


# -- one model for another ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both runs of the small model and one of a larger, with more windows, published beside each other."""
    place = tmp_path_factory.mktemp("three")
    for name in quality.BOARD_RUNS:
        script.add(name, root / script.RUNS / name, place)
    script.add("zz-large", written(place / "made", model="large", head_dim=128, windows=3), place)
    return read_runs(place / script.RUNS)


def test_the_larger_model_stands_first_with_bits_of_its_own(three: Any) -> None:
    assert list(three) == ["zz-large", *quality.BOARD_RUNS]
    text = script.page(three)
    assert text.index("## large") < text.index("## tiny")
    assert "plain (`zz-large`): 2 layers, 1 KV heads, head_dim 128, float32 on a machine" in text
    large, tiny = text.partition("## large")[2].split("## tiny")
    assert re.search(r"\| `saw-int4` \| 4\.38 \|", large)
    assert not re.search(r"\| `saw-int4` \| 4\.50 \|", large)
    assert re.search(r"\| `saw-int4` \| 4\.50 \|", tiny)


def test_a_smaller_model_and_a_plain_run_predict(three: Any) -> None:
    large, plain, stressed = three.values()
    assert pairs(three) == [(plain, large), (stressed, large), (plain, stressed)]
    table, *said = prediction(three).split("\n\n")
    head, _, first, second, third = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    assert head[4:10] == [
        "Spearman",
        "Kendall",
        "hold on both",
        "only on the first",
        "only on the second",
        "on neither",
    ]
    assert first[:4] == ["tiny, plain", "large, plain", "3", "2 and 3"]
    assert first[4:] == ["1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]", "1", "1", "0", "1", "–"]
    assert second[:4] + second[6:10] == ["tiny, stressed 64:1", "large, plain", "3", "2 and 3", "1", "0", "0", "2"]
    assert third[:2] == ["tiny, plain", "tiny, stressed 64:1"]
    kinds = "Hold on both: `fp8`; only on the first: {}; only on the second: none."
    assert said[0].splitlines() == [
        f"- tiny, plain for large, plain. {kinds.format('`saw-int4`')}",
        f"- tiny, stressed 64:1 for large, plain. {kinds.format('none')}",
        f"- tiny, plain for tiny, stressed 64:1. {kinds.format('`saw-int4`')}",
    ]


def test_a_point_of_the_pairs_is_a_preset_on_both(three: Any) -> None:
    large, plain, _ = three.values()
    panels = pair_plots({"a": large, "b": plain})
    assert [panel.title for panel in panels] == ["large, plain over tiny, plain"]
    kl = {name: {p.spec: p.y for p in points(run)} for name, run in (("x", plain), ("y", large))}
    assert {p.spec: (p.x, p.y) for p in panels[0].points} == {s: (kl["x"][s], kl["y"][s]) for s in kl["x"]}
    assert (panels[0].x.scale, panels[0].y.scale) == ("log", "log")


def test_the_report_page_is_made_of_a_published_run(root: Path, tmp_path: Path) -> None:
    from kvcodec.cli.main import main

    target = tmp_path / "page.html"
    assert main(["report", str(root / script.RUNS / quality.BOARD_RUNS[0]), "-o", str(target)]) == 0
    assert "saw-int4" in target.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--add", "nothing"], "'nothing' is not NAME=FOLDER"),
        (["--add", "a=/no/such/folder"], "holds no run.json"),
        (["--check", "--add", "a=b"], "--check changes nothing"),
    ],
)
def test_the_script_refuses(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["update_leaderboard.py", *options])
    try:
        code = script.main()
    except SystemExit as end:
        code = end.code
    assert code
    assert said in capsys.readouterr().err
