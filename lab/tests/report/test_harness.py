"""What `packedkv eval` really writes, on the page: the two know each other by the folder alone."""

import json
from pathlib import Path

import pytest
from tests.cli.tiny import TEXT, tiny_loaded

from lab.tests.report.test_page import Page
from packedkv.cli.page.words import value_text
from packedkv.models.loading import SampleText
from packedkv_lab.eval.run import RunSettings, evaluate
from packedkv_lab.eval.tasks.base import TaskSettings
from packedkv_lab.report.evaluation import page_html
from packedkv_lab.report.results import read_folder


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
