"""The page of a run: every number is the folder's, every word of a file is escaped, nothing is fetched."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.tiny import TEXT, tiny_loaded

import packedkv
from lab.tests.report import folders
from lab.tests.report.folders import BITS, KL, RECALL, SPECS, UNCOMPRESSED
from packedkv.cli.advise.expected import cache_bytes
from packedkv.cli.main import main
from packedkv.cli.page import svg, words
from packedkv.cli.page.figures import frontier, style_of
from packedkv.cli.page.words import value_text
from packedkv.models.loading import SampleText
from packedkv_lab.eval.run import RunSettings, evaluate
from packedkv_lab.eval.tasks.base import TaskSettings
from packedkv_lab.report.evaluation import page_html
from packedkv_lab.report.results import read_folder, read_layers, read_times
from packedkv_lab.report.sizes import sizes

VOID = ("meta", "br", "img", "link", "input", "wbr")


class Page(HTMLParser):
    """Elements with their texts; refuses structure that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[tuple[dict[str, str | None], str]]]] = {}
        self._name = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "div":
            self._name = found.get("aria-label") or ""
        if tag == "table":
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
            self.tables[self._name] = self._rows

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            attrs, text = self._rows[-1][-1]
            self._rows[-1][-1] = attrs, text + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write(tmp_path / "run")


def page_of(folder: Path, **options: Any) -> tuple[str, Page]:
    text = page_html(read_folder(folder), **options)
    return text, Page(text)


def test_every_number_of_results_json_stands_in_its_table(folder: Path) -> None:
    _, page = page_of(folder)
    for task, title in (("kl", "KL divergence"), ("needle", "Needle in a haystack"), ("piqa", "piqa")):
        head, *lines = page.tables[f"{title}: results"]
        assert [text for _, text in head][:2] == ["preset", "bits"]
        for spec, line in zip((UNCOMPRESSED, *SPECS), lines, strict=True):
            shown = dict(zip([text for _, text in head], [text for _, text in line], strict=True))
            assert shown["preset"] == words.spec_name(spec)
            assert (shown["bits"], shown["items"]) == (words.bits_text(BITS[spec]), "8")
            for r in folders.rows():
                if (r["spec"], r["task"], r["group"]) == (spec, task, None):
                    text = shown[words.metric_name(r["metric"])]
                    assert text.startswith(words.value_text(r["metric"], r["value"])), (r, text)


def test_values_and_intervals_are_written_in_their_unit(folder: Path) -> None:
    _, page = page_of(folder)
    lines = {line[0][1]: [text for _, text in line] for line in page.tables["Needle in a haystack: results"]}
    assert lines["kivi-2"][2:4] == ["12.5 % [0.0, 25.0]", "−62.5 pp [−68.8, −56.2]"]
    lines = {line[0][1]: [text for _, text in line] for line in page.tables["KL divergence: results"]}
    assert lines["int-4"][1:3] == ["4.50", "0.1000 [0.0900, 0.1100]"]
    marked = {line[0][1]: line[3][0].get("class") for line in page.tables["Needle in a haystack: results"][1:]}
    assert marked == {"16 bit": None, "int-4": "bad", "saw-int4": None, "kivi-2": "bad", "fp8": None}


def test_the_grid_holds_every_cell(folder: Path) -> None:
    _, page = page_of(folder)
    head, *lines = page.tables["Needle in a haystack: recall by length, depth"]
    assert [text for _, text in head][1:] == ["16 bit", *SPECS]
    cells = {(r["spec"], words.value_text("recall", r["value"])) for r in folders.rows()
             if r["task"] == "needle" and r["group"]}  # fmt: skip
    assert len(lines) == len(folders.DEPTHS) * len(folders.LENGTHS)
    for line in lines:
        for spec, (_, text) in zip((UNCOMPRESSED, *SPECS), line[1:], strict=True):
            assert (spec, text.partition(" [")[0]) in cells


def test_drawings_hold_a_dot_for_each_preset_at_its_numbers(folder: Path) -> None:
    _, page = page_of(folder)
    dots = [(a["data-spec"], a["data-y"]) for tag, a in page.tags if tag == "g" and a.get("class") == "dot"]
    for values in (KL, RECALL):
        assert all((spec, repr(values[spec])) in dots for spec in SPECS)
    labels = [a["aria-label"] or "" for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    frontier = next(x for x in labels if x.startswith("KL divergence"))
    assert "kivi-2, 0.4000 at 3.25 bits; saw-int4, 0.0500 at 4.38 bits; fp8, 0.0030 at 8.25 bits." in frontier
    assert "int-4, 0.1" not in frontier.replace("saw-int4", "")


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
    assert "script" not in [tag for tag, _ in page.tags]
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_the_page_needs_nothing_else(folder: Path) -> None:
    text, page = page_of(folder, layers=read_layers(folders.write_layers(folder)))
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "script")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith("#")
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
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
                 "attention read dequantized keys and values of every token", "95 %"):  # fmt: skip
        assert told in text
    assert 'class="warn"' not in text


def test_what_is_not_whole_is_said(tmp_path: Path) -> None:
    rows = [r | {"status": "interrupted", "items": 3} for r in folders.rows()]
    text, page = page_of(folders.write(tmp_path / "a", results=rows))
    assert "The run was interrupted" in text
    assert page.tables["piqa: results"][1][-1][1] == "3 of 8"
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


def test_items_too_short_to_be_encoded_are_named(tmp_path: Path) -> None:
    rows = [r | {"effective_bits": 16.0} if (r["spec"], r["task"]) == ("kivi-2", "piqa") else r for r in folders.rows()]
    text, _ = page_of(folders.write(tmp_path, results=rows))
    assert "Items are so short that nearly nothing is compressed: kivi-2 on piqa." in text


def test_one_preset_one_task_one_item_is_a_page_too(tmp_path: Path) -> None:
    one = {"low": None, "high": None, "difference_low": None, "difference_high": None, "items": 1, "planned": 1}
    rows = [r | one for r in folders.rows() if r["spec"] == "int-4" and r["task"] == "kl" and r["group"] is None]
    run = folders.about(model={"name": "m"}, tasks={}, specs=None, versions=None, settings=None, notes=[])
    text, _ = page_of(folders.write(tmp_path / "bare", run, rows, []))
    assert "32,768 tokens" not in text


# -- memory ------------------------------------------------------------------------------------------------------------


class _Plan:
    """As ``advise`` sees a model."""

    name, heads, head_dim = "m", 2, 64

    class _Layer:
        window = None

    kv_layers = (_Layer(),) * 4


def test_a_spec_that_is_not_known_here_is_scaled_from_its_measured_bits(tmp_path: Path) -> None:
    rows = [r | {"spec": "of-another-file"} if r["spec"] == "kivi-2" else r for r in folders.rows()]
    results = read_folder(folders.write(tmp_path, results=rows))
    found, scaled = sizes(results, 1024)
    assert scaled == ["of-another-file"]
    assert found["of-another-file"] == 2 * 4 * 2 * 64 * 1024 * 3.25 / 8
    assert found[UNCOMPRESSED] == 2 * 4 * 2 * 64 * 1024 * 2
    assert "Scaled from measured bits" in page_html(results)


def test_bytes_are_of_the_context_that_is_asked_for(folder: Path) -> None:
    _, page = page_of(folder, context=12_345)
    head, *lines = page.tables["All presets and tasks"]
    at = [text for _, text in head].index("cache, 12,345 tokens")
    shown = {line[0][1]: line[at][1] for line in lines}
    assert shown["int-4"] == words.bytes_text(cache_bytes("int-4", _Plan(), 12_345, torch.float16))  # type: ignore[arg-type]


# -- what may stand beside it ------------------------------------------------------------------------------------------


def test_speed_is_that_of_this_runs_presets(folder: Path, tmp_path: Path) -> None:
    text, page = page_of(folder, bench=read_times(folders.write_times(tmp_path / "bench")))
    dots = [(a["data-spec"], a["data-y"]) for tag, a in page.tags if tag == "g" and a.get("class") == "dot"]
    assert {("int-4", "2.0"), ("saw-int4", "2.25")} <= set(dots)
    assert "octopus-3" not in text


def test_layers_are_drawn_and_told(folder: Path) -> None:
    text, page = page_of(folder, layers=read_layers(folders.write_layers(folder)))
    assert "Most sensitive: keys int-4 of layer 3 with 0.0120 nats" in text
    assert text.count("<title>keys int-4: ") == 4
    assert [cell for _, cell in page.tables["KL by layer"][4]] == ["3", "0.0120", "0.0040"]


def test_frontier_ticks_and_colours() -> None:
    assert frontier([(1, 5), (2, 5), (3, 4), (1, 6)], "lower") == [0, 2]
    assert frontier([(1, 5), (2, 5), (3, 6)], "higher") == [0, 2]
    assert svg.ticks(20.5, 27, False) == [22.0, 24.0, 26.0]
    assert svg.ticks(0.03, 0.5, True) == [0.03, 0.1, 0.3]
    marks = {
        svg.marker(style_of(spec)) for spec in ("dense", "fp8", "int-4", "saw-int4", "kivi-2", "octopus-3", "nobodys-3")
    }
    assert len(marks) == 7
    assert len({style_of(method) for method in packedkv.names()}) == len(packedkv.names())


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


# -- what the harness writes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = TaskSettings(
        text=SampleText(TEXT, "text", "00" * 32), limit=2, lengths=(480,), depths=(0.0, 1.0), window_tokens=96
    )
    found = evaluate(
        tiny_loaded(),
        ["dense", "int-4"],
        ["perplexity", "kl", "needle"],
        tmp_path_factory.mktemp("run"),
        RunSettings(task),
    )
    assert found.status == "complete"
    return found.folder


def test_a_run_of_the_harness_is_a_page_with_all_its_numbers(run: Path) -> None:
    results = read_folder(run)
    rows = json.loads((run / "results.json").read_text())["rows"]
    assert len(results.rows) == len(rows)
    assert results.unsummarised == 0
    page = Page(page_html(results))
    shown = {text.partition(" [")[0] for table in page.tables.values() for line in table for _, text in line}
    for row in rows:
        if row["group"] is None or row["metric"] == results.metrics(row["task"])[0]:
            assert value_text(row["metric"], row["value"]) in shown, row
    assert "sha256 " + json.loads((run / "run.json").read_text())["model"]["sha256"] in page_html(results)
