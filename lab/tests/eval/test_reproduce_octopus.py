"""OCTOPUS, TurboQuant and PolarQuant: which figures must hold, and what the tables rest on."""

import pytest
import torch

from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec_lab.reproduce import available, baselines, octopus, reproduce_rows
from kvcodec_lab.reproduce.measure import fidelity
from kvcodec_lab.reproduce.same_family import FAMILY

PAPERS = ["octopus", "turboquant", "polarquant"]


@pytest.fixture(scope="module")
def rows():
    return list(reproduce_rows(PAPERS, quick=True))


@pytest.fixture(scope="module")
def claims(rows):
    """What is recomputed; other models need not hold: see test_reproduce_family.py and test_reproduce_own.py."""
    return [r for r in rows if r["ours"] is not None and FAMILY not in r["table"] and "own model" not in r["table"]]


def test_everything_holds(claims):
    assert [(r["table"], r["item"], r["metric"], r["ours"]) for r in claims if not r["holds"]] == []


def test_what_is_held_to_another_value_says_why(claims):
    assert all(r["note"] for r in claims if r["spec"] is not None)
    corrected = {r["item"] for r in claims if r["spec"] is not None and r["paper"] == "octopus"}
    assert corrected == {*(f"TQ-QJL b={b} correct" for b in (2, 3, 4)), "TQ-MSE b=4"}


def test_bands_are_narrow(claims):
    """One per cent and half a printed digit; quick samples add little. Only figures of one digit have more."""
    wide = {(r["item"], r["metric"], r["printed"]) for r in claims if r["band"] > 0.045}
    assert wide == set()


def test_every_table_gives_rows(rows):
    seen = {(r["paper"], r["table"]) for r in rows if r["ours"] is not None}
    assert seen == {(paper, table) for paper in PAPERS for table in available()[paper]}
    assert {"Table 1", "Table 4", "Table 5", "Table 6", "Table 7"} <= {table for _, table in seen}
    assert len({(r["paper"], r["table"], r["item"], r["metric"]) for r in rows}) == len(rows)


def test_table_7_needs_the_paper_packing(claims):
    """A plain ceil(n b / 8) misses three of the cells; the byte-aligned streams hit all of them."""
    found = {r["item"]: round(r["ours"], 3) for r in claims if r["table"] == "Table 7"}
    assert len(found) == 18
    assert {item: ratio for item, ratio in found.items() if "llm" in item} == {
        "llm d=128 g=32 OCTOPUS b=4": 2.960,
        "llm d=128 g=32 OCTOPUS b=3": 3.710,
        "llm d=128 g=32 OCTOPUS b=2": 4.785,
        "llm d=128 g=32 TQ-MSE b=4": 3.122,
        "llm d=128 g=32 TQ-MSE b=3": 3.879,
        "llm d=128 g=32 TQ-MSE b=2": 5.120,
    }


def test_local_3x3_is_the_full_search(claims):
    for metric in ("cos", "mse", "tail95", "ip_abs_err"):
        ours = {r["item"]: r["ours"] for r in claims if r["table"] == "Table 5" and r["metric"] == metric}
        assert all(ours[f"b={b} full"] == ours[f"b={b} local_3x3"] for b in (1, 2, 3))


def test_the_exact_mean_over_queries_is_what_many_queries_give():
    codec = TurboQuant(2, "fp32")
    exact = fidelity(codec, 1, 256).ip
    k = torch.randn(1, 1, 256, 128, generator=torch.Generator().manual_seed(0))
    q = torch.randn(8192, 128, generator=torch.Generator().manual_seed(1))
    from kvcodec.codec import Site, roundtrip

    k_hat = roundtrip(codec, k, codec.fit(Site(0, "key", 1, 128, 0)))
    assert exact == pytest.approx(float(((k - k_hat)[0, 0] @ q.T).abs().mean()), rel=2e-3)


def test_fidelity_tells_rounding_modes_and_variants_apart():
    scalar, full = (fidelity(Octopus(3, 1, mode, "fp32"), 1, 256) for mode in ("scalar", "local_3x3"))
    assert full.mse < 0.95 * scalar.mse
    right, wrong = (fidelity(TurboQuantQJL(2, "fp32", variant), 1, 256).ip for variant in ("correct", "printed"))
    assert wrong > 1.3 * right


def test_needle_finds_the_key_of_exact_keys_and_less_of_coarse_ones():
    exact, coarse = octopus.needle_mass(None, 1), octopus.needle_mass(TurboQuant(1, "fp32"), 1)
    assert exact == pytest.approx(0.960, abs=0.004)
    assert coarse < 0.7


@pytest.mark.parametrize(("levels", "rate"), [(4, 2.0), (5, 2.321928), (8, 3.0)])
def test_scalar_rate_passes_through_whole_level_counts(levels, rate):
    assert octopus.scalar_mse_at(rate) == pytest.approx(octopus.scalar_mse(levels), rel=1e-5)


def test_plus_split_wins_at_its_rate_and_the_paper_split_does_not(claims):
    ours = {r["item"]: r["ours"] for r in claims if r["table"].endswith("equal rate")}
    for b in (2, 3, 4):
        plus, paper = (3 * b + 2) / 3, (3 * b + 1) / 3
        assert ours[f"split {(b + 1, b)}"] < ours[f"scalar at {plus:.3f} bits"]
        assert ours[f"split {(b + 1, b - 1)}"] > ours[f"scalar at {paper:.3f} bits"]


def test_polar_closed_form_is_a_product_of_levels():
    assert baselines.closed_form(3) == pytest.approx(0.05708, rel=1e-3)
    assert baselines.closed_form(3, 64) < baselines.closed_form(3)
