"""Tables and sentences of errors of scores say what the rows say, and which presets break without a warning."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcodec.cli.page.rows import NUMBERS, UNCOMPRESSED, Results, Row
from kvcodec.errors import FormatError
from kvcodec_lab.report.pages.key_errors import breaking, channels, mending, read, summary, unwarned, without_mean


def row(spec: str, by_layer: list[float | None], mends: dict[str, float | None], check: bool, probe: bool) -> Any:
    known = [e for e in by_layer if e is not None]
    layer = by_layer.index(max(known)) if known else None
    return {
        "spec": spec, "key_bits": 4.25, "layer": layer, "head": None if layer is None else 1,
        "error": max(known, default=None), "shift": 2.0 if known else None, "by_layer": by_layer, "mends": mends,
        "check": {"warned": check, "layer": 0, "error": 5.5, "without": 1.0},
        "probe": {"warned": probe, "layer": layer, "outlier_ratio": 99.0, "channel_error": 0.9},
    }  # fmt: skip


LEFT = {"mean": 0.5, "mean before RoPE": 0.25, "channel scales": 4.0, "outliers": None}
DATA = {
    "outliers": [
        {"layer": 0, "worst_head_ratio": 164.0, "head_ratios": [164.0, 138.2], "above": [[6, 8], [5, 8]],
         "largest": 358.0, "channels": [{"head": 0, "channel": 44, "times_median": 250.4}]},
        {"layer": 1, "worst_head_ratio": 9.9, "head_ratios": [9.9, 4.0], "above": [[0, 1], [0, 0]], "largest": 20.0,
         "channels": []},
    ],
    "rows": [
        row("kivi-4", [0.6, 0.1], {}, False, False),
        row("int-4", [30.0, 0.5], LEFT, True, False),
        row("fp8", [3.0, 3.5], LEFT, False, False),
        row("octopus-4", [None, 2.9], {}, False, True),
        row("int-8", [None, None], {}, False, False),
    ],
}  # fmt: skip


def results(perplexity: dict[str, float | None]) -> Results:
    rows = [Row(s, "perplexity", "perplexity", None, dict.fromkeys(NUMBERS) | {"value": v}, "lower", "", "complete")
            for s, v in perplexity.items()]  # fmt: skip
    return Results(Path(), {}, rows)


JUDGED = results({UNCOMPRESSED: 10.0, "int-4": None, "fp8": 12.0, "kivi-4": 10.5, "octopus-4": 10.2})


def cells(table: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_presets_stand_in_order_of_their_error_with_what_was_said() -> None:
    lines = cells(breaking(DATA, DATA, JUDGED, results({UNCOMPRESSED: 10.0, "kivi-4": 9.9})))
    assert [line[0] for line in lines] == ["`int-4`", "`fp8`", "`octopus-4`", "`kivi-4`", "`int-8`"]
    assert lines[0] == ["`int-4`", "4.25", "0, 1", "30.00", "2.00", "0", "refuses (5.5)", "silent", "x inf", "30.00",
                        "–"]  # fmt: skip
    assert lines[1][5:9] == ["0, 1", "passes (5.5)", "silent", "+20.0 %"]
    assert lines[2][7] == "warns"
    assert lines[3][8:] == ["+5.0 %", "0.60", "−1.0 %"]
    assert lines[4][2:6] == ["–", "–", "–", "–"]
    alone = cells(breaking(DATA, None, None, None))
    assert [line[8:] for line in alone] == [["–", "–", "–"]] * 5


def test_only_what_fails_is_mended() -> None:
    assert cells(mending(DATA)) == [
        ["`int-4`", "30.00", "0.50", "0.25", "4.00", "–"],
        ["`fp8`", "3.50", "0.50", "0.25", "4.00", "–"],
    ]


def test_the_whole_model_with_and_without_the_mean() -> None:
    judged = results({UNCOMPRESSED: 10.0, "int-4": 500.0, "int-4:mean=pre": 10.4, "kivi-4": 10.1})
    assert [line[:3] + line[4:5] for line in cells(without_mean(judged))] == [["`int-4`", "–", "500.00", "10.40"]]
    assert cells(without_mean(None)) == []


def test_layers_that_stand_out_are_listed() -> None:
    assert cells(channels(DATA)) == [["0", "164, 138", "6 to 8, 5 to 8", "358", "head 0, 44 (250)"]]


def test_sentences_count_what_fails_what_is_mended_and_what_was_not_said() -> None:
    lines = summary(DATA, JUDGED, None).splitlines()
    assert lines[0].startswith("- 2 of 5 presets and options move")
    assert lines[0].endswith("1 of them in layer 0 alone.")
    assert lines[1:5] == [
        "- Without the mean key, 0 of 2 still do.",
        "- Without the mean key before RoPE, 0 of 2 still do.",
        "- With channel scales, 2 of 2 still do.",
        "- With 8 outlier slots a token, 0 of 0 still do.",
    ]
    assert lines[5:] == [
        "- The perplexity of 2 of 4 is more than 10 % off. Of 1 of these the check of the weights or the probe warns.",
        "- Not warned of, and good on a model without biases: `fp8`.",
        "- Warned of, though it holds: `octopus-4`.",
    ]
    assert len(summary(DATA, None, None).splitlines()) == 5


def test_what_is_coarse_on_a_plain_model_as_well_is_told_apart() -> None:
    plain = results({UNCOMPRESSED: 20.0, "fp8": 22.1, "int-4": 99.0})
    plain.about["model"] = {"name": "small"}
    assert unwarned(DATA, JUDGED, plain) == (["fp8"], [])
    assert unwarned(DATA, JUDGED, results({UNCOMPRESSED: 20.0, "fp8": 21.9})) == ([], ["fp8"])
    assert unwarned(DATA, JUDGED, None) == ([], ["fp8"])
    said = summary(DATA, JUDGED, plain).splitlines()
    assert "- Not warned of, but as far off on small, which has no biases: `fp8`." in said
    assert not any("good on a model" in line for line in said)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(DATA))
    assert read(path)["rows"][1]["spec"] == "int-4"
    path.write_text(json.dumps({"rows": [{"spec": "int-4"}]}))
    with pytest.raises(FormatError, match="holds no errors of scores"):
        read(path)
