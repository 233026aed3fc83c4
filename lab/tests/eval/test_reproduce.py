"""Recomputed numbers of the papers: rows, bands, corrections, reasons, order, errors. Each paper has a file beside."""

import json
from collections.abc import Iterator

import pytest

from kvcodec.errors import SpecError
from kvcodec.progress import Progress
from kvcodec_lab.reproduce import (
    NOT_PRINTED,
    PAPERS,
    Axes,
    Claim,
    available,
    cannot,
    claims,
    not_recomputed,
    reproduce_rows,
    reproduces,
)

CHEAP = ["innerq", "saw-int4"]
KEYS = ["paper", "table", "item", "metric", "printed", "spec", "ours", "relative_error", "printed_error", "band",
        "holds", "note", "curve", "x"]  # fmt: skip


@pytest.fixture
def own_tables(monkeypatch):
    """Empty registers, so that a test's tables are all there is."""
    monkeypatch.setattr(claims, "_TABLES", {})
    monkeypatch.setattr(claims, "_REASONS", {})

    @reproduces("octopus", "Table 1", axes=Axes("bits", "MSE"), seconds=3)
    def one(quick: bool) -> Iterator[Claim]:
        yield Claim("a", "mse", "0.50", 0.502, curve="c", x=2)
        yield Claim("b", "mse", "0.40", 0.3, spec="0.30", note="printed twice too large")

    @reproduces("hqmq", "Table 2")
    def two(quick: bool) -> Iterator[Claim]:
        yield Claim("quick" if quick else "full", "bits", "3.0", 3.2)

    cannot("octopus", "Table 9", "needs a model")


def test_rows_are_plain_and_complete():
    rows = list(reproduce_rows(CHEAP, quick=True))
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert list(row) == KEYS
        if row["ours"] is None:
            assert row["note"]
            assert row["holds"] is None
            continue
        reference = row["printed"] if row["spec"] is None else row["spec"]
        assert row["relative_error"] == pytest.approx(row["ours"] / reference - 1)
        assert row["printed_error"] == pytest.approx(row["ours"] / row["printed"] - 1)
        assert row["holds"] == (abs(row["relative_error"]) <= row["band"] * (1 + 1e-12))
    identity = [(r["paper"], r["table"], r["item"], r["metric"]) for r in rows]
    assert len(set(identity)) == len(identity)


def test_a_table_gives_its_claims_and_a_paper_its_reasons(own_tables):
    rows = list(reproduce_rows(quick=True))
    assert [(r["paper"], r["table"], r["item"], r["holds"]) for r in rows] == [
        ("octopus", "Table 1", "a", True),
        ("octopus", "Table 1", "b", True),
        ("octopus", "Table 9", "", None),
        ("hqmq", "Table 2", "quick", False),
    ]
    assert (rows[0]["curve"], rows[0]["x"]) == ("c", 2)
    assert (rows[1]["curve"], rows[1]["x"]) == ("", None)
    assert rows[2]["note"] == "needs a model"
    assert not_recomputed("octopus") == {"Table 9": "needs a model"}
    assert claims.axes_of("octopus", "Table 1") == Axes("bits", "MSE")
    assert claims.axes_of("hqmq", "Table 2") is None
    assert claims.axes_of("no", "table") is None


def test_quick_reaches_the_table(own_tables):
    assert [r["item"] for r in reproduce_rows(["hqmq"])] == ["full"]


def test_a_correction_is_what_ours_is_held_to(own_tables):
    row = next(r for r in reproduce_rows(["octopus"]) if r["item"] == "b")
    assert (row["printed"], row["spec"], row["holds"]) == (0.4, 0.3, True)
    assert row["relative_error"] == pytest.approx(0)
    assert row["printed_error"] == pytest.approx(-0.25)


def test_rows_are_the_same_in_a_second_run():
    first, second = (list(reproduce_rows(CHEAP, quick=True)) for _ in range(2))
    assert first == second


def test_papers_come_in_the_order_asked_and_once(own_tables):
    rows = list(reproduce_rows(["hqmq", "octopus", "hqmq"]))
    assert [r["paper"] for r in rows] == ["hqmq", "octopus", "octopus", "octopus"]


def test_progress_ends_full_and_names_the_table(own_tables):
    seen = []

    class Spy(Progress):
        def bar(self, label: str, done: float, total: float, note: str = "") -> None:
            seen.append((done / total, note))

    list(reproduce_rows(progress=Spy(False)))
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert (seen[0][0], seen[-1][0]) == (0.0, 1.0)
    assert seen[1][1] == "octopus, Table 1, a"


@pytest.mark.parametrize(
    ("done", "elapsed", "text"),
    [(25.0, 10.0, "30 s left: "), (25.0, 1.0, ""), (1.0, 10.0, ""), (100.0, 9.0, "0 s left: ")],
)
def test_time_left_follows_from_the_time_taken(monkeypatch, done, elapsed, text):
    monkeypatch.setattr(claims.time, "monotonic", lambda: 100.0 + elapsed)
    assert claims._left(100.0, done, 100.0) == text


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
        SpecError, match=r"unknown paper 'octopuss'\. Did you mean 'octopus'\? There are: octopus, saw-int4, "
    ):
        reproduce_rows(["octopuss"])


def test_a_paper_with_nothing_yet_says_what_there_is(monkeypatch):
    kept = {key: f for key, f in claims._TABLES.items() if key[0] != "saw-int4"}
    monkeypatch.setattr(claims, "_TABLES", kept)
    with pytest.raises(
        SpecError, match=r"nothing of saw-int4 \(SAW-INT4, .*\) can be recomputed yet\. There are: octopus"
    ):
        reproduce_rows(["saw-int4"])
    assert {r["paper"] for r in reproduce_rows(["innerq"], quick=True)} == {"innerq"}


def test_paper_names_are_the_documented_ones():
    assert list(PAPERS) == ["octopus", "saw-int4", "hqmq", "innerq", "ultraquant", "turboquant", "polarquant"]
    assert all(paper in PAPERS for paper, _ in claims._REASONS)
    assert {"octopus", "hqmq", "turboquant", "polarquant"} <= {
        p for p in PAPERS if available()[p] and not_recomputed(p)
    }


def test_the_accounting_of_kivi_and_saw():
    ours = {(r["item"], r["metric"]): r["ours"] for r in reproduce_rows(["innerq", "saw-int4"], quick=True)}
    assert ours["KIVI, key", "bits"] == ours["KIVI, value", "bits"] == 3.0
    assert ours["saw-int4, d=128", "bits"] == 4.25
    assert ours["Qwen3-8B, dense", "bytes_per_token"] == 147456
    assert ours["Qwen3-8B, saw-int4", "bytes_per_token"] == 147456 * 4.25 / 16
    assert ours["Llama 4 Scout, 10M tokens", "bf16_tib"] == pytest.approx(196608e7 / 2**40)
