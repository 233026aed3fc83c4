"""What ``packedkv reproduce`` shows and writes, and the rate-distortion study."""

import json

import pytest
import torch
from tests.cli.tiny import tiny_loaded

import packedkv
from packedkv.cli.main import main
from packedkv.errors import SpecError
from packedkv_lab import reproduce
from packedkv_lab.reproduce import report
from packedkv_lab.reproduce.claims import Claim
from packedkv_lab.reproduce.rate_distortion import SOURCES, STUDY, capture, measure, rate_distortion_rows

SPECS = ["int-4", "turboquant-2", "kivi-2", "hqmq-s24_r3:packing=radix"]


@pytest.fixture(scope="module")
def study():
    return list(rate_distortion_rows(SPECS, quick=True))


def claim(paper, table, item, printed, corrected="", note=""):
    return Claim(paper, table, item, "mse", printed, corrected, 0.0, 0.0, note)


@pytest.fixture(scope="module")
def rows(study):
    known = [
        claim("octopus", "Table 4", "held", "0.50").row(0.502),
        claim("hqmq", "Tables 2, 3", "wrong print", "2.0", "2.25", "no scales").row(2.25),
        claim("hqmq", "Tables 2, 3", "missed", "3.0", note="unclear").row(3.5),
    ]
    return [*known, claim("hqmq", "Table 5", "", "", note="times").empty(), *study]


def test_rows_of_the_rate_distortion_study(study):
    assert [r["source"] for r in study[:: len(SPECS)]] == list(SOURCES)
    by = {(r["spec"], r["source"]): r for r in study}
    row = by["turboquant-2", "Gaussian keys"]
    assert row["bits"] == packedkv.get("turboquant-2").key_bits(128) == 2.125
    assert row["relative_mse"] == pytest.approx(0.116, rel=0.03)
    assert 0 < row["spread"] < 0.01
    assert (row["method"], row["role"], row["samples"], row["tokens"]) == ("turboquant", "key", 2, 128)
    # a channel that is loud for ever costs groups along channels their step, and groups along tokens nothing
    assert by["int-4", "one-outlier-channel keys"]["relative_mse"] > 3 * by["int-4", "Gaussian keys"]["relative_mse"]
    assert by["kivi-2", "one-outlier-channel keys"]["relative_mse"] < by["kivi-2", "Gaussian keys"]["relative_mse"]
    assert by["int-4", "heavy-tailed keys"]["relative_mse"] > 1.5 * by["int-4", "Gaussian keys"]["relative_mse"]
    assert json.loads(json.dumps(study)) == study


def test_study_takes_every_preset_by_itself():
    measured = [row["spec"] for row, _ in zip(rate_distortion_rows(quick=True), range(3), strict=False)]
    assert measured == [p for p in packedkv.presets() if p != "dense"][:3]
    with pytest.raises(SpecError, match="kivvi"):
        rate_distortion_rows(["kivvi-2"])


def test_a_codec_that_refuses_says_why():
    row = measure("turboquant-2", "odd", "key", [torch.randn(1, 1, 8, 10, generator=torch.Generator().manual_seed(0))])
    assert (row["bits"], row["relative_mse"], row["spread"]) == (None, None, None)
    assert "head_dim=10" in row["note"]


def test_terminal_shows_paper_ours_and_difference(rows):
    found, missing, study = report.parts(rows)
    assert [report.verdict(r) for r in found] == ["holds", "corrected", "DIFFERS"]
    assert (len(missing), len(study)) == (1, len(SPECS) * len(SOURCES))
    text = report.terminal(rows)
    assert "OCTOPUS, arXiv:2605.21226, Table 4" in text
    line = next(line for line in text.splitlines() if "missed" in line)
    assert line.split() == ["DIFFERS", "missed,", "mse", "3", "-", "3.5", "+16.67", "%", "unclear"]
    assert "hqmq, Table 5: times" in text
    assert "turboquant-2" in text
    assert text.endswith("2 of 3 figures hold, 1 of them to a corrected value.")


def test_folder_holds_text_and_data(rows, tmp_path):
    page, file = report.write_folder(rows, tmp_path / "new", {"seconds": 1})
    data = json.loads(file.read_text())
    assert [len(data[k]) for k in ("claims", "not_recomputed", "rate_distortion")] == [3, 1, len(SPECS) * len(SOURCES)]
    assert report.terminal(rows) in page.read_text()


def test_command_line(capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["reproduce", "innerq", "--quick", "--out", str(out), "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {r["paper"] for r in printed} == {"innerq"}
    assert (out / "reproduce.md").read_text().startswith("# The papers' numbers, recomputed")
    assert main(["reproduce", "innerq", "--quick"]) == 0
    assert "figures hold" in capsys.readouterr().out
    assert main(["reproduce", "innerq", "--model", "smollm2-135m"]) == 2
    assert STUDY in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_recomputed(capsys, monkeypatch, rows):
    def interrupted(papers, *, quick, progress):
        yield rows[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "reproduce_rows", interrupted)
    assert main(["reproduce", "innerq", "--json", "-"]) == 130
    assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(rows[0])) | {"partial": True}]


def test_keys_and_values_of_a_model():
    tiny_model = tiny_loaded()
    records = capture(tiny_model, layers=3, tokens=40)
    assert records[0].layer == 0
    assert records[-1].layer == tiny_model.model.config.num_hidden_layers - 1
    rows = list(rate_distortion_rows(["int-8"], quick=True, model=tiny_model))
    assert [(r["source"], r["role"]) for r in rows[-2:]] == [("keys of tiny", "key"), ("values of tiny", "value")]
    assert all(0 < r["relative_mse"] < 1e-3 for r in rows)
    assert rows[-1]["samples"] <= 6
