"""SAW-INT4 in ``kvcodec reproduce``: every claim holds, and would not if something were off."""

import pytest
import torch

from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec_lab.reproduce import not_recomputed, reproduce_rows, saw_int4
from kvcodec_lab.reproduce.measure import codec_error, gauss
from kvcodec_lab.reproduce.saw_int4 import ACCURACY, DECODE, PREFILL, STEP


@pytest.fixture(scope="module")
def rows():
    return [r for r in reproduce_rows(["saw-int4"], quick=True) if r["ours"] is not None]


def test_every_claim_holds(rows):
    assert [r["item"] for r in rows if not r["holds"]] == []


def test_all_69_rows_of_scores_are_checked(rows):
    means = [r["ours"] for r in rows if r["metric"] == "means_that_add_up"]
    assert sum(means) == len(ACCURACY) == 69


def test_printed_tables_are_whole():
    assert {len(r) for r in ACCURACY.values()} == {6, 7}
    for table, rows, columns in ((STEP, 7, 3), (PREFILL, 7 + 7 + 8 + 8, 5), (DECODE, 6 + 6 + 7 + 7, 5)):
        assert len(table) == rows
        assert {len(r) for r in table.values()} == {columns}


def misprint(monkeypatch, table, label, at, by):
    """Change one number of a table."""
    row = list(table[label])
    row[at] += by
    monkeypatch.setitem(table, label, row)


@pytest.mark.parametrize(
    ("table", "changes", "item"),
    [
        (STEP, [("total", 0, 10)], "Table 4"),
        (PREFILL, [("INT4, total", 0, 0.1)], "Table 6"),
        (DECODE, [("fused, attention", 4, 0.1), ("fused, total", 4, -0.1)], "Table 7"),
    ],
)
def test_a_wrong_digit_shows(monkeypatch, table, changes, item):
    for change in changes:
        misprint(monkeypatch, table, *change)
    claims = {c.item: c for c in saw_int4.saw_sums(True) if c.metric == "totals_that_add_up"}
    assert [i for i, c in claims.items() if not c.row("saw-int4", "t")["holds"]] == [item]


def test_a_wrong_mean_shows(monkeypatch):
    for label in ("3, GLM-4.7, INT4", "8, GLM-4.7, INT4 (K&V)"):
        misprint(monkeypatch, ACCURACY, label, 5, 0.1)
    wrong = [(c.item, c.metric) for c in saw_int4.saw_means(True) if not c.row("saw-int4", "t")["holds"]]
    assert wrong == [(f"Table {table}", f"{what}_that_add_up") for table in (3, 8) for what in ("means", "drops")]


def test_outliers_are_as_many_as_asked_and_constant():
    keys = saw_int4._outlier_keys(4, 6, 200)
    means = keys.mean(2)[:, 0]
    assert ((means.abs() > 25).sum(-1) == 4).all()
    assert keys.std(2).max() < 1.5
    assert not torch.equal(means[0] > 25, means[1] > 25)


def test_one_scale_per_block_undoes_what_the_block_is_for(rows):
    """Against few outliers larger blocks help per head, the smallest per block: the paper's order is the former."""
    mse = {r["item"]: r["ours"] for r in rows if r["metric"] == "mse"}
    for n in (1, 2):
        per_head = [mse[f"{n} outliers, h={h}, per head"] for h in (16, 32, 64, 128)]
        assert per_head == sorted(per_head, reverse=True)
    for n in (1, 2, 4, 8):
        per_block = [mse[f"{n} outliers, h={h}, per block"] for h in (16, 32, 64)]
        assert per_block == sorted(per_block)


def test_a_block_is_a_head_of_its_own():
    keys = saw_int4._outlier_keys(2, 3, 16)
    parts = keys.unflatten(-1, (-1, 32)).transpose(2, 3).flatten(1, 2)
    assert torch.equal(parts[1, 2], keys[1, 0, :, 64:96])


def test_a_clipped_zero_point_is_what_costs():
    x = gauss(True).abs() + 3
    assert saw_int4._clipped_error(x) > 100 * codec_error(x, SawInt4(1))
    y = gauss(True)
    assert saw_int4._clipped_error(y) == pytest.approx(codec_error(y, SawInt4(1)), rel=1e-6)


def test_bands_are_narrow_where_nothing_is_drawn(rows):
    for r in rows:
        digits = str(r["spec"] or r["printed"]).removesuffix(".0").replace(".", "").lstrip("0")
        assert r["band"] <= 0.06 or len(digits) == 1 or r["table"] == saw_int4.BLOCK_STUDY, r
        assert r["band"] < 0.6, r


def test_what_is_left_out_says_why():
    reasons = not_recomputed("saw-int4")
    assert len(reasons) >= 3
    assert all("need" in why or "captured" in why or "figures" in why for why in reasons.values())
