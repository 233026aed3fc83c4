"""The page of a run: every number is the folder's, every word of a file is escaped, nothing is fetched."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvcodec.cli.advise.expected import cache_bytes
from kvcodec.cli.main import main
from kvcodec.cli.page import svg, words
from kvcodec.cli.page.figures import frontier, style_of
from kvcodec.cli.page.rows import read_folder, read_layers, read_times
from kvcodec.registry import get
from kvcodec_lab.eval.tasks import task_names
from kvcodec_lab.report.answer import best_at_bits, losses, sentences, whole_rows
from kvcodec_lab.report.pages.eval import page_html
from kvcodec_lab.report.sizes import Shape, bytes_at, sizes
from lab.tests.report import folders
from lab.tests.report.folders import BITS, KL, RECALL, SPECS, UNCOMPRESSED

VOID = ("meta", "br", "img", "link", "input", "wbr")


class Page(HTMLParser):
    """Elements with their texts; refuses structure that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[tuple[dict[str, str | None], str]]]] = {}
        self._table = self._caption = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._caption = ""
            self._rows: list[list[tuple[dict[str, str | None], str]]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append((found, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self._caption.partition(";")[0]] = self._rows

    def handle_data(self, data: str) -> None:
        if "caption" in self.open:
            self._caption += data
        elif "td" in self.open or "th" in self.open:
            attrs, text = self._rows[-1][-1]
            self._rows[-1][-1] = attrs, text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write(tmp_path / "run")


def page_of(folder: Path, **options: Any) -> tuple[str, Page]:
    text = page_html(read_folder(folder), **options)
    return text, Page(text)


def test_every_number_of_results_json_stands_in_its_table_unrounded(folder: Path) -> None:
    _, page = page_of(folder)
    for task, title in (("kl", "KL divergence"), ("needle", "Needle in a haystack"), ("piqa", "PIQA")):
        head, *lines = page.tables[f"{title}: results"]
        assert [text for _, text in head][:2] == ["preset", "bits"]
        for spec, line in zip((UNCOMPRESSED, *SPECS), lines, strict=True):
            assert line[0][1] == ("16 bit" if spec == UNCOMPRESSED else spec)
            shown = {text: attrs for (_, text), (attrs, _) in zip(head, line, strict=True)}
            wanted = {"bits": BITS[spec], "items": 8.0}
            for r in folders.rows():
                if (r["spec"], r["task"], r["group"]) == (spec, task, None):
                    wanted[words.metric_name(r["metric"])] = r["value"]
                    if r["metric"] in ("recall", "accuracy"):
                        wanted["difference"] = r["difference"]
            found = {key: attrs["data-v"] for key, attrs in shown.items() if key != "preset"}
            assert set(found) == set(wanted)
            for key, value in wanted.items():
                assert found[key] == ("" if value is None else repr(float(value)) if key != "items" else "8")


def test_values_and_intervals_are_written_in_their_unit(folder: Path) -> None:
    _, page = page_of(folder)
    lines = {line[0][1]: [text for _, text in line] for line in page.tables["Needle in a haystack: results"]}
    assert lines["kivi-2"][2:4] == ["12.5 % [0.0, 25.0]", "−62.5 pp [−68.8, −56.2]"]
    lines = {line[0][1]: [text for _, text in line] for line in page.tables["KL divergence: results"]}
    assert lines["int-4"][1:3] == ["4.50", "0.1000 [0.0900, 0.1100]"]
    marked = {line[0][1]: line[3][0].get("class") for line in page.tables["Needle in a haystack: results"][1:]}
    assert marked == {"16 bit": None, "int-4": "bad", "saw-int4": None, "kivi-2": "bad", "fp8": None}


def test_the_grid_of_each_preset_holds_every_cell(folder: Path) -> None:
    _, page = page_of(folder)
    for spec in (UNCOMPRESSED, *SPECS):
        head, *lines = page.tables["16 bit" if spec == UNCOMPRESSED else spec]
        assert [text for _, text in head][1:] == ["256", "1k"]
        assert [line[0][1] for line in lines] == ["0", "0.5", "1"]
        cells = {
            json.dumps(r["group"]): r["value"] for r in folders.rows() if (r["spec"], r["task"]) == (spec, "needle")
        }
        for depth, line in zip(folders.DEPTHS, lines, strict=True):
            for length, (attrs, _) in zip(folders.LENGTHS, line[1:], strict=True):
                assert float(attrs["data-v"] or "nan") == cells[json.dumps({"length": length, "depth": depth})]
    head, *lines = page.tables["KL by positions"]
    assert [text for _, text in head][1:] == ["0-255", "256-511"]
    assert [line[0][1] for line in lines] == list(SPECS)  # 16 bit is 0 everywhere


def test_drawings_hold_a_dot_for_each_preset_at_its_numbers(folder: Path) -> None:
    _, page = page_of(folder)
    dots = [(a["data-spec"], a["data-y"]) for tag, a in page.tags if tag == "g" and a.get("class") == "dot"]
    for values in (KL, RECALL):
        for spec in SPECS:
            assert dots.count((spec, repr(values[spec]))) >= 2  # over bits and over bytes
    labels = [a["aria-label"] or "" for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    assert labels
    assert all("numbers are in the table" in x for x in labels)
    frontier = next(x for x in labels if x.startswith("KL divergence") and "bits measured" in x)
    assert "kivi-2, 0.4000 at 3.25 bits; saw-int4, 0.0500 at 4.38 bits; fp8, 0.0030 at 8.25 bits." in frontier
    assert "int-4, 0.1" not in frontier.replace("saw-int4", "")


def test_the_answer_names_the_best_preset_of_each_budget(folder: Path) -> None:
    results = read_folder(folder)
    assert [(b.budget, b.row.spec) for b in best_at_bits(whole_rows(results, "kl"))] == [
        (3.5, "kivi-2"), (4.5, "saw-int4"), (8.5, "fp8"),
    ]  # fmt: skip
    said = sentences(results)
    assert said[1] == (
        "At 4.5 bits the best preset is saw-int4: KL 0.0500 [0.0450, 0.0550] at 4.38 bits measured; next is int-4 with "
        "0.1000 [0.0900, 0.1100]."
    )
    text, _ = page_of(folder)
    assert all(sentence in text for sentence in said)


def test_the_answer_says_what_the_items_do_not_tell_apart(tmp_path: Path) -> None:
    rows = [r | {"low": 0.0, "high": 1.0} if r["metric"] == "kl" else r for r in folders.rows()]
    said = sentences(read_folder(folders.write(tmp_path, results=rows)))
    assert "these 8 items do not tell it apart from int-4 and kivi-2." in said[1]
    cheap = [r for r in folders.rows() if r["spec"] == UNCOMPRESSED or r["effective_bits"] > 8]
    other = [r | {"effective_bits": 12.0} if r["spec"] == "fp8" else r for r in cheap]
    said = sentences(read_folder(folders.write(tmp_path / "dear", results=other)))
    assert said == ["No preset has a value of KL divergence within 8.5 bits."]


def test_losses_are_those_whose_whole_interval_is_a_loss(folder: Path, tmp_path: Path) -> None:
    found = dict(losses(read_folder(folder)))
    assert found["Needle in a haystack"] == (
        "16 bit scores 75.0 % [62.5, 87.5]. Measurably worse: kivi-2 (−62.5 pp [−68.8, −56.2]) and int-4 (−25.0 pp "
        "[−31.2, −18.8]); the other 2 are not."
    )
    assert "not told apart from guessing (50 %). No preset is measurably worse on these 8 items." in found["PIQA"]
    blind = [r | {"value": 0.0} if (r["task"], r["spec"]) == ("needle", UNCOMPRESSED) else r for r in folders.rows()]
    found = dict(losses(read_folder(folders.write(tmp_path / "blind", results=blind))))
    assert found["Needle in a haystack"].startswith("the 16-bit model scores 0 here, so no preset can lose")


def test_everything_from_the_files_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"
    swapped = json.loads(json.dumps(folders.rows()).replace("kivi-2", json.dumps(evil)[1:-1]))
    for r in swapped:
        r["prefill"] = r["status"] = evil
        if r["group"] and "positions" in r["group"]:
            r["group"] = {evil: evil}
    run = folders.about(
        notes={evil: [evil]}, versions={evil: evil}, settings={evil: evil}, params={evil: {"file": evil}}
    )
    run["model"] |= {"name": evil, "sha256": evil}
    run["tasks"] |= {evil: {"metrics": {evil: {"text": evil}}, evil: evil}}
    run["tasks"]["kl"]["metrics"]["kl"]["text"] = evil
    swapped.append(folders.row(UNCOMPRESSED, evil, evil, 0.5, 0.1))
    lines = [line | {"output": evil + line["spec"], "group": {evil: evil}} for line in folders.items()]
    folder = folders.write(tmp_path / "run", run, swapped, lines)
    data = {"model": evil, "sensitivity": [{"layer": 0, "role": evil, "spec": evil, "kl": 0.1}]}
    (folder / "advice.json").write_text(json.dumps(data))
    times = json.loads((folders.write_times(tmp_path) / "decode.json").read_text())
    bench = [time | {"spec": evil, "gpu": evil} for time in times]
    text, page = page_of(folder, bench=bench, layers=read_layers(folder), title=evil)
    assert evil not in text
    assert "<script>alert" not in text
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_the_page_needs_nothing_else(folder: Path) -> None:
    text, page = page_of(folder, layers=read_layers(folders.write_layers(folder)))
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith("#")
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(a["href"] or "")[1:] for tag, a in page.tags if tag == "a"} <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_how_it_was_measured_is_said(folder: Path) -> None:
    text, _ = page_of(folder)
    for told in ("ab" * 32, "torch 2.13.0", "<dt>seed</dt><dd>7</dd>", "breaks on outlier keys", "window tokens 512",
                 "attention read decoded keys and values of every token", "95 %"):  # fmt: skip
        assert told in text
    assert 'class="warn"' not in text


def test_every_task_of_the_harness_has_its_words() -> None:
    assert set(words.TASKS) == set(task_names())
    assert all(about.is_ and about.is_not for about in words.TASKS.values())


def test_what_is_not_whole_is_said(tmp_path: Path) -> None:
    rows = [r | {"status": "interrupted", "items": 3} for r in folders.rows()]
    text, page = page_of(folders.write(tmp_path / "a", results=rows))
    assert "The run was interrupted" in text
    assert page.tables["PIQA: results"][1][-1][1] == "3 of 8"
    more = [{"spec": "int-4", "task": "kl", "item": f"{i}", "scores": {}} for i in range(11)]
    text, _ = page_of(folders.write(tmp_path / "b", lines=more))
    assert "3 further items are finished and not in these numbers" in text
    rows = [r | {"failed": 2} if r["spec"] == "int-4" else r for r in folders.rows()]
    text, _ = page_of(folders.write(tmp_path / "c", results=rows))
    assert "Some items gave no result with int-4" in text
    run = folders.about(settings={"prefill": "exact", "stress": {"factor": 64.0}})
    rows = [r | {"prefill": "exact"} for r in folders.rows()]
    text, _ = page_of(folders.write(tmp_path / "d", run, rows))
    assert "The model was changed before it was measured: stress factor 64." in text
    assert "Prefill was exact" in text


def test_values_that_are_not_finite_are_left_out_of_drawings_and_named(tmp_path: Path) -> None:
    rows = [
        r | {"value": None, "low": None, "high": None, "difference": None} if r["spec"] == "kivi-2" else r
        for r in folders.rows()
    ]
    text, page = page_of(folders.write(tmp_path, results=rows))
    assert "Not drawn, because of no finite value or 16 bits: kivi-2." in text
    lines = {line[0][1]: [text for _, text in line] for line in page.tables["KL divergence: results"]}
    assert lines["kivi-2"][2] == "–"


def test_items_too_short_to_be_encoded_are_said_to_tell_little(tmp_path: Path) -> None:
    rows = [r | {"effective_bits": 16.0} if (r["spec"], r["task"]) == ("kivi-2", "piqa") else r for r in folders.rows()]
    text, page = page_of(folders.write(tmp_path, results=rows))
    told = "windows of dense tokens and unfilled pages make up the cache of kivi-2 (16.0 bits here)"
    assert text.count(told) == 1
    assert text.count("These items are too short to try kivi-2.") == 1
    dots = [a["data-spec"] for tag, a in page.tags if tag == "g" and a.get("class") == "dot" and a["data-y"] == "0.5"]
    assert dots.count("fp8") == dots.count("int-4") - 2 == 2  # over bits and bytes; int-4's recall is 0.5 as well
    assert "kivi-2" not in dots


def test_one_preset_one_task_one_item_is_a_page_too(tmp_path: Path) -> None:
    one = {"low": None, "high": None, "difference_low": None, "difference_high": None, "items": 1, "planned": 1}
    rows = [r | one for r in folders.rows() if r["spec"] == "int-4" and r["task"] == "kl" and r["group"] is None]
    text, _ = page_of(folders.write(tmp_path, results=rows, lines=[]))
    assert "one item gives no interval" in text
    run = folders.about(model={"name": "m"}, tasks={}, specs=None, versions=None, settings=None, notes=[])
    text, _ = page_of(folders.write(tmp_path / "bare", run, rows, []))
    assert "Quality over memory" not in text


# -- memory ------------------------------------------------------------------------------------------------------------


class _Plan:
    """As ``advise`` sees a model."""

    name, heads, head_dim = "m", 2, 64

    class _Layer:
        window = None

    kv_layers = (_Layer(),) * 4


@pytest.mark.parametrize(
    "spec", ["dense", "int-4", "kivi-2", "octopus-3", "hqmq-s96_r4", "saw-int4:window=999,recent=fp8"]
)
def test_bytes_at_a_context_are_those_that_advise_foretells_but_for_pages(spec: str) -> None:
    import torch

    exact: Any = cache_bytes(spec, _Plan(), 32_768, torch.bfloat16)  # type: ignore[arg-type]
    assert bytes_at(get(spec), 32_768, Shape(4, 2, 64)) == pytest.approx(exact, rel=0.01)


def test_a_spec_that_is_not_known_here_is_scaled_from_its_measured_bits(tmp_path: Path) -> None:
    rows = [r | {"spec": "of-another-file"} if r["spec"] == "kivi-2" else r for r in folders.rows()]
    results = read_folder(folders.write(tmp_path, results=rows))
    found, scaled = sizes(results, (1024, 2048))
    assert scaled == ["of-another-file"]
    assert found["of-another-file"] == [2 * 4 * 2 * 64 * n * 3.25 / 8 for n in (1024, 2048)]
    assert found[UNCOMPRESSED] == [2 * 4 * 2 * 64 * n * 2 for n in (1024, 2048)]
    assert "Scaled from measured bits" in page_html(results)


def test_the_context_that_is_asked_for_is_shown_and_sent_to_the_script(folder: Path) -> None:
    text, page = page_of(folder, context=12_345)
    assert 'At <span class="atcontext">12,345</span> tokens' in text
    lines = {line[0][1]: line for line in page.tables["All presets and tasks"]}
    at = [text for _, text in page.tables["All presets and tasks"][0]].index("cache")
    assert float(lines["int-4"][at][0]["data-v"] or "nan") == pytest.approx(
        bytes_at(get("int-4"), 12_345, Shape(4, 2, 64))
    )
    data = json.loads(re.search(r'id="sizes">(.*?)</script>', text)[1])  # type: ignore[index]
    assert 12_345 in data["contexts"]
    assert set(data["bytes"]) == {UNCOMPRESSED, *SPECS}


# -- what may stand beside it ------------------------------------------------------------------------------------------


def test_speed_is_that_of_this_runs_presets(folder: Path, tmp_path: Path) -> None:
    bench = read_times(folders.write_times(tmp_path / "bench"))
    text, page = page_of(folder, bench=bench)
    assert "measured apart from this run on A GPU. Not timed: kivi-2 and fp8." in text
    dots = [(a["data-spec"], a["data-y"]) for tag, a in page.tags if tag == "g" and a.get("class") == "dot"]
    assert {("int-4", "2.0"), ("saw-int4", "2.25")} <= set(dots)
    assert "octopus-3" not in text
    others = [time | {"spec": "turboquant-4"} for time in bench]
    assert "None of this run&#x27;s presets was timed; these are others." in page_of(folder, bench=others)[0]


def test_layers_are_drawn_and_told(folder: Path) -> None:
    text, page = page_of(folder, layers=read_layers(folders.write_layers(folder)))
    assert "the most sensitive: keys int-4 of layer 3 with 0.0120 nats" in text
    assert "Largest: 5.0 in layer 3" in text
    assert text.count("<title>keys int-4, layer ") == 4
    table = next(t for t in page.tables.values() if t[0][0][1] == "layer")
    assert [cell for _, cell in table[4]] == ["3", "0.0120", "0.0040"]


def test_frontier_ticks_and_colours() -> None:
    assert frontier([(1, 5), (2, 5), (3, 4), (1, 6)], "lower") == [0, 2]
    assert frontier([(1, 5), (2, 5), (3, 6)], "higher") == [0, 2]
    assert svg.ticks(20.5, 27, False) == [22.0, 24.0, 26.0]
    assert svg.ticks(0.03, 0.5, True) == [0.03, 0.1, 0.3]
    assert svg.color(-1) == svg.color(0)
    marks = {
        svg.marker(style_of(spec)) for spec in ("dense", "fp8", "int-4", "saw-int4", "kivi-2", "octopus-3", "nobodys-3")
    }
    assert len(marks) == 7


def test_the_command_writes_the_page_beside_the_results_or_where_it_is_told(
    folder: Path, tmp_path: Path, capsys
) -> None:
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").is_file()
    target = tmp_path / "new" / "page.html"
    folders.write_layers(folder)
    bench = folders.write_times(tmp_path / "bench")
    capsys.readouterr()
    arguments = ["-o", str(target), "--bench", str(bench), "--context", "8k", "--title", "Mine & yours", "--json", "-"]
    assert main(["report", str(folder), *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == [str(target)]
    text = target.read_text()
    assert "<h1>Mine &amp; yours</h1>" in text
    assert "8,192" in text
    assert {"speed", "layers"} <= {attrs.get("id") for _, attrs in Page(text).tags}
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
