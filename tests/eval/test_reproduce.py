"""Recomputed numbers of the papers: rows, bands, errors, and which claims must hold."""

import json

import pytest

from kvcodec.errors import SpecError
from kvcodec.eval.reproduce import NOT_PRINTED, PAPERS, Claim, available, claims, reproduce_rows

KEYS = ["paper", "table", "item", "metric", "printed", "ours", "relative_error", "band", "holds", "note"]
DO_NOT_HOLD = {
    ("naive int2", "bits"),
    ("naive int3", "bits"),
    ("naive int4", "bits"),
    ("KIVI-2", "bits"),
    ("KIVI-4", "bits"),
}
"""Claims of a paper that bytes contradict; every other row must hold."""


@pytest.fixture(scope="module")
def quick_rows():
    return list(reproduce_rows(quick=True))


def test_everything_holds_but_the_bits_that_leave_scales_out(quick_rows):
    failed = {(r["item"], r["metric"]) for r in quick_rows if not r["holds"]}
    assert failed == DO_NOT_HOLD
    for row in quick_rows:
        assert row["holds"] or row["note"], f"{row['item']}: a claim that does not hold says why"


def test_rows_are_plain_and_complete(quick_rows):
    assert json.loads(json.dumps(quick_rows)) == quick_rows
    for row in quick_rows:
        assert list(row) == KEYS
        assert row["relative_error"] == pytest.approx(row["ours"] / row["printed"] - 1)
        assert row["holds"] == (abs(row["relative_error"]) <= row["band"] * (1 + 1e-12))
    identity = [(r["paper"], r["table"], r["item"], r["metric"]) for r in quick_rows]
    assert len(set(identity)) == len(identity)


def test_every_registered_table_gives_rows(quick_rows):
    seen = {(r["paper"], r["table"]) for r in quick_rows}
    assert seen == {(paper, table) for paper, tables in available().items() for table in tables}
    assert {"Table 1", "Table 4", "Table 5", "Table 7"} <= {table for paper, table in seen if paper == "octopus"}


def test_bands_are_narrow(quick_rows):
    """A band wide enough to let anything through proves nothing; one printed digit is the exception."""
    wide = {(r["item"], r["metric"]): r["band"] for r in quick_rows if r["band"] > 0.06}
    assert set(wide) == {("INT4, BDR", "ratio_to_bf16"), ("KIVI", "bits")}


def test_same_numbers_twice():
    first, second = (list(reproduce_rows(["hqmq"], quick=True)) for _ in range(2))
    assert first == second


def test_papers_come_in_the_order_asked_and_once():
    rows = list(reproduce_rows(["innerq", "hqmq", "innerq"], quick=True))
    assert len([r for r in rows if r["paper"] == "innerq"]) == 3
    assert list(dict.fromkeys(r["paper"] for r in rows)) == ["innerq", "hqmq"]


def test_the_accounting_of_kivi_and_saw():
    ours = {(r["item"], r["metric"]): r["ours"] for r in reproduce_rows(["innerq", "saw-int4"], quick=True)}
    assert ours["KIVI, key", "bits"] == ours["KIVI, value", "bits"] == 3.0
    assert ours["saw-int4, d=128", "bits"] == 4.25
    assert ours["Qwen3-8B, dense", "bytes_per_token"] == 147456
    assert ours["Qwen3-8B, saw-int4", "bytes_per_token"] == 147456 * 4.25 / 16
    assert ours["Llama 4 Scout, 10M tokens", "bf16_tib"] == pytest.approx(196608e7 / 2**40)


def test_table_7_needs_the_paper_packing(quick_rows):
    """A plain ceil(n b / 8) misses three of the cells; the byte-aligned streams hit all nine."""
    rows = [r for r in quick_rows if r["table"] == "Table 7"]
    assert len(rows) == 9
    assert {r["item"]: round(r["ours"], 3) for r in rows if "llm" in r["item"]} == {
        "llm d=128 g=32 b=4": 2.960,
        "llm d=128 g=32 b=3": 3.710,
        "llm d=128 g=32 b=2": 4.785,
    }


@pytest.mark.parametrize(
    ("printed", "ours", "allowance", "band", "holds"),
    [
        ("0.0897", 0.08974, 0.0, 0.00005 / 0.0897, True),
        ("0.0897", 0.08976, 0.0, 0.00005 / 0.0897, False),
        ("0.0897", 0.0900, 0.005, 0.00005 / 0.0897 + 0.005, True),
        ("-41.0", -41.04, 0.0, 0.05 / 41, True),
        ("4", 3.765, 0.0, 0.125, True),
    ],
)
def test_band_is_half_a_digit_and_the_allowance(printed, ours, allowance, band, holds):
    row = Claim("item", "metric", printed, ours, allowance).row("octopus", NOT_PRINTED)
    assert row["band"] == pytest.approx(band)
    assert row["holds"] is holds


def test_unknown_paper():
    with pytest.raises(
        SpecError, match=r"unknown paper 'octopuss'\. Did you mean 'octopus'\? There is: octopus \(Table 1,"
    ):
        reproduce_rows(["octopuss"])


def test_a_paper_with_nothing_yet_says_what_there_is(monkeypatch):
    kept = {key: f for key, f in claims._TABLES.items() if key[0] != "saw-int4"}
    monkeypatch.setattr(claims, "_TABLES", kept)
    with pytest.raises(
        SpecError, match=r"nothing of saw-int4 \(SAW-INT4, .*\) can be recomputed yet\. There is: octopus"
    ):
        reproduce_rows(["saw-int4"])
    assert {r["paper"] for r in reproduce_rows(["innerq"], quick=True)} == {"innerq"}


def test_paper_names_are_the_documented_ones():
    assert list(PAPERS) == ["octopus", "saw-int4", "hqmq", "innerq", "ultraquant"]
