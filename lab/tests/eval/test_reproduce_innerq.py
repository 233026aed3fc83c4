"""InnerQ and KIVI in ``kvcodec reproduce``: every claim holds, and would not if something were off."""

import pytest

from kvcodec_lab.reproduce import NOT_PRINTED, innerq, not_recomputed, reproduce_rows
from kvcodec_lab.reproduce.innerq import LATENCY, LONG_SCORES, QUANTIZE, SCORES
from kvcodec_lab.reproduce.measure import adds_up


@pytest.fixture(scope="module")
def rows():
    return [r for r in reproduce_rows(["innerq"], quick=True) if r["ours"] is not None]


def ours(rows, metric, start=""):
    return {r["item"]: r["ours"] for r in rows if r["metric"] == metric and r["item"].startswith(start)}


def test_every_claim_holds(rows):
    assert [r["item"] for r in rows if not r["holds"]] == []
    assert len(rows) > 90


def test_published_bits_are_those_of_b_bit_codes_and_the_default_takes_one_more(rows):
    bits = ours(rows, "bits", "InnerQ")
    for variant, published in (("base", 3.5), ("hybrid", 3.25), ("small", 3.0)):
        assert bits[f"InnerQ {variant}, signed"] == bits[f"InnerQ {variant}, full"] == published
        assert bits[f"InnerQ {variant}, literal"] == published + 1


@pytest.mark.parametrize(("variant", "value_bits"), [("base", 3.5), ("hybrid", 3.0), ("small", 2.5)])
@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_bits_with_windows_follow_from_the_closed_form(rows, variant, value_bits, tokens):
    dense_values = 32 + 96 + (tokens - 128) % 32
    key = (16 * 128 + 3.5 * (tokens - 128)) / tokens
    value = (16 * dense_values + value_bits * (tokens - dense_values)) / tokens
    found = ours(rows, "bits_with_windows")[f"InnerQ {variant}, {tokens} tokens"]
    assert found == pytest.approx((key + value) / 2, rel=1e-12)


def test_evictions_are_those_of_the_cache():
    encoded, dense = innerq._decode("innerq-base", 70)
    assert encoded["key"] == [(step, 1) for step in range(1, 71)]
    assert encoded["value"] == [(32, 32), (64, 32)]
    assert set(dense["key"]) == {128}
    assert dense["value"] == [128 + step % 32 for step in range(1, 71)]
    encoded, dense = innerq._decode("kivi-sink-2", 70)
    assert encoded["value"] == [(step, 1) for step in range(1, 71)]
    assert encoded["key"] == [(32, 32), (64, 32)]


def test_hybrid_picks_symmetric_only_with_the_literal_reading(rows):
    share = ours(rows, "percent_symmetric")
    assert min(v for k, v in share.items() if "literal" in k) > 90
    assert 20 < share["mask, full, least of four laws"] < share["mask, full, most of four laws"] < 60
    assert share["mask, signed, most of four laws"] < 5


def test_printed_tables_are_whole():
    assert [len(r) for r in SCORES.values()].count(7) == 20
    assert len(SCORES) == 22
    assert {len(r) for r in LONG_SCORES.values()} == {6}
    assert len(LONG_SCORES) == 40
    assert {len(r) for r in LATENCY.values()} == {7}
    assert len(LATENCY) == 18
    assert {len(r) for r in QUANTIZE.values()} == {5}


def test_a_wrong_digit_shows(monkeypatch):
    monkeypatch.setitem(LATENCY, "total, FP16", [*LATENCY["total, FP16"][:3], 1184, *LATENCY["total, FP16"][4:]])
    label = "Minerva Math (500), Llama 3.2-3B"
    monkeypatch.setitem(SCORES, label, [9.20, 7.80, *SCORES[label][2:]])
    items = {(r["item"], r["metric"]): r for r in reproduce_rows(["innerq"], quick=True)}
    assert items["Table 4", "totals_that_add_up"]["ours"] == 41
    assert not items["Table 4", "totals_that_add_up"]["holds"]
    assert not items["Table 1, task averages", "averages_that_add_up"]["holds"]


@pytest.mark.parametrize(
    ("parts", "total", "unit", "expected"),
    [
        ([1.0, 2.0], 3.0, 1.0, True),
        ([1.0, 2.0], 4.5, 1.0, True),
        ([1.0, 2.0], 5.0, 1.0, False),
        ([0.1], 0.3, 0.1, False),
    ],
)
def test_sums_of_rounded_numbers(parts, total, unit, expected):
    assert adds_up(parts, total, unit) is expected


def test_what_is_left_out_says_why():
    reasons = not_recomputed("innerq")
    assert len(reasons) >= 3
    assert all("need" in why or "captured" in why or "figures" in why for why in reasons.values())


def test_bands_are_narrow(rows):
    """What is printed with one digit is the exception."""
    for r in rows:
        digits = str(r["spec"] or r["printed"]).removesuffix(".0").replace(".", "").lstrip("0")
        assert r["band"] <= 0.06 or len(digits) == 1, r


def test_tables_that_are_no_papers_are_named_so(rows):
    implied = {r["item"] for r in rows if r["table"] == NOT_PRINTED}
    assert {"FP16 keys, 32 heads", "b=2, literal", "InnerQ base, literal"} <= implied
