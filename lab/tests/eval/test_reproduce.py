"""Recomputed numbers of the papers: every claim holds, a wrong digit shows, and the tools behind them are right."""

import json

import pytest
import torch

from packedkv.codecs.turboquant import TurboQuant
from packedkv.errors import SpecError
from packedkv.ops.quaternion import UNITS, products
from packedkv.progress import Progress
from packedkv_lab.reproduce import (
    PAPERS,
    claims,
    hqmq,
    innerq,
    reproduce_rows,
    saw_int4,
    ultraquant,
)
from packedkv_lab.reproduce.claims import Claim
from packedkv_lab.reproduce.measure import fidelity


@pytest.fixture(scope="module")
def every():
    return list(reproduce_rows(quick=True))


@pytest.fixture(scope="module")
def rows(every):
    return [r for r in every if r["ours"] is not None]


def test_every_claim_holds(rows):
    assert [(r["paper"], r["table"], r["item"], r["metric"]) for r in rows if not r["holds"]] == []


def test_every_claim_of_the_table_is_recomputed_once(every, rows):
    """But for the few that a quick run leaves out."""
    found = [(r["paper"], r["table"], r["item"], r["metric"]) for r in every]
    assert len(set(found)) == len(found)
    left_out = {(c.table, c.item) for c in claims() if (c.paper, c.table, c.item, c.metric) not in set(found)}
    assert {table for table, _ in left_out} <= {"Table 5", "not printed: geometry (Prop. 3.1)"}
    assert len(left_out) < 20
    assert {(r["paper"], r["table"]) for r in rows} == {(c.paper, c.table) for c in claims() if c.item}
    assert all(sum(r["paper"] == paper and r["ours"] is None for r in every) for paper in PAPERS), "reasons"
    assert json.loads(json.dumps(every)) == every


def test_bands_are_narrow_and_corrections_say_why(rows):
    """Figures of one digit are the exception."""
    for r in rows:
        digits = str(r["spec"] or r["printed"]).removesuffix(".0").replace(".", "").lstrip("0")
        assert r["band"] <= 0.08 or len(digits) == 1, r
    assert sum(r["spec"] is not None for r in rows) < 50


@pytest.mark.parametrize(
    ("printed", "value", "allowance", "band", "holds"),
    [
        ("0.0897", 0.08974, 0.0, 0.00005 / 0.0897, True),
        ("0.0897", 0.08976, 0.0, 0.00005 / 0.0897, False),
        ("0.0897", 0.0900, 0.005, 0.00005 / 0.0897 + 0.005, True),
        ("-41.0", -41.04, 0.0, 0.05 / 41, True),
        ("4", 3.765, 0.0, 0.125, True),
    ],
)
def test_band_is_half_a_digit_and_the_allowance(printed, value, allowance, band, holds):
    row = Claim("octopus", "Table 1", "a", "mse", printed, "", allowance, 0.1, "").row(value)
    assert row["band"] == pytest.approx(band)
    assert row["holds"] is holds


def test_a_correction_is_what_ours_is_held_to():
    row = Claim("octopus", "Table 1", "a", "mse", "0.4", "0.30", 0.0, 0.0, "").row(0.3)
    assert (row["printed"], row["spec"], row["holds"]) == (0.4, 0.3, True)
    assert row["relative_error"] == pytest.approx(0)
    assert row["printed_error"] == pytest.approx(-0.25)


def test_papers_come_in_the_order_asked_once_and_the_same_again():
    first, second = (list(reproduce_rows(["innerq", "saw-int4", "innerq"], quick=True)) for _ in range(2))
    assert list(dict.fromkeys(r["paper"] for r in first)) == ["innerq", "saw-int4"]
    assert first == second
    with pytest.raises(SpecError, match=r"unknown paper 'octopuss'\. Did you mean 'octopus'\? There are: octopus, saw"):
        reproduce_rows(["octopuss"])


def test_progress_ends_full_and_names_the_table():
    seen = []

    class Spy(Progress):
        def bar(self, label: str, done: float, total: float, note: str = "") -> None:
            seen.append((done / total, note))

    list(reproduce_rows(["turboquant"], quick=True, progress=Spy(False)))
    assert [share for share, _ in seen] == sorted(share for share, _ in seen)
    assert (seen[0][0], seen[-1][0]) == (0.0, 1.0)
    assert seen[0][1].startswith("turboquant, Theorem 1, b=1")


# -- misprints are seen ------------------------------------------------------------------------------------------------


def differing(paper):
    return {(r["table"], r["item"]) for r in reproduce_rows([paper], quick=True) if r["holds"] is False}


@pytest.mark.parametrize(
    ("paper", "table", "label", "by", "item"),
    [
        ("saw-int4", saw_int4.DECODE, "unfused, rotation", 1.0, ("Tables 6, 7, ratios", "unfused, decode of 32")),
        ("innerq", innerq.LATENCY, "FP16", 900.0, ("Fig. 4", "small over FP16")),
        ("innerq", innerq.SCORES, "HumanEval, Llama 3.2-1B", 9.0,
         ("Tables 1, 2, averages", "Table 1, hybrid over small")),
    ],
)  # fmt: skip
def test_a_wrong_digit_shows(monkeypatch, paper, table, label, by, item):
    monkeypatch.setitem(table, label, [*table[label][:-1], table[label][-1] + by])
    assert item in differing(paper)


# -- the tools ---------------------------------------------------------------------------------------------------------


def test_the_exact_mean_over_queries_is_what_many_queries_give():
    from packedkv.codec import Site, roundtrip

    codec = TurboQuant(2, "fp32")
    k = torch.randn(1, 1, 256, 128, generator=torch.Generator().manual_seed(0))
    q = torch.randn(8192, 128, generator=torch.Generator().manual_seed(1))
    k_hat = roundtrip(codec, k, codec.fit(Site(0, "key", 1, 128, 0)))
    assert fidelity(codec, 1, 256).ip == pytest.approx(float(((k - k_hat)[0, 0] @ q.T).abs().mean()), rel=2e-3)


@pytest.mark.parametrize(
    ("points", "degrees"),
    [
        (torch.cat([torch.eye(4), -torch.eye(4)]), 60.0),  # 16-cell: middle of a facet, (1,1,1,1)/2
        (UNITS, 45.0),
        (products(torch.tensor([[0.5, 0.5, 0.5, 0.5]])), 45.0),
    ],
    ids=["16-cell", "24-cell", "24-cell turned into itself"],
)
def test_covering_radius_of_polytopes(points, degrees):
    assert hqmq.covering_radius(points, 512, 0) == pytest.approx(degrees, abs=1e-4)


def test_law_of_a_group_has_variance_one():
    top, t, weights = ultraquant.group_law()
    assert top + float(weights @ t**2) == pytest.approx(1, abs=1e-5)
