"""Printed rows of Qwen2.5-7B beside a run of the 1.5B: what collapses, what holds, and the order; read, not run."""

from pathlib import Path

import pytest

from kvcodec.cli.page.rows import NUMBERS, Results, Row
from kvcodec.registry import get
from kvcodec_lab.eval.scoring import UNCOMPRESSED
from kvcodec_lab.reproduce import available, claims, not_recomputed, same_family
from kvcodec_lab.reproduce.same_family import FAMILY, FOLDER, HQMQ, OCTOPUS, RECALL, hqmq_claims, octopus_claims

NONE = dict.fromkeys(NUMBERS)


def run(perplexity: dict[str, float], recall: dict[str, tuple[float, float]] | None = None) -> Results:
    """A run with these perplexities, and recalls with the upper end of their difference."""
    rows = [Row(s, "perplexity", "perplexity", None, NONE | {"value": v}, "lower", "decoded", "complete")
            for s, v in perplexity.items()]  # fmt: skip
    rows += [Row(s, "needle", "recall", None, NONE | {"value": v, "difference_high": high}, "higher", "decoded", "")
             for s, (v, high) in (recall or {}).items()]  # fmt: skip
    return Results(Path(), {}, rows)


def as_printed(table: dict[str, same_family.Printed], base: float) -> dict[str, float]:
    return {UNCOMPRESSED: 10.0} | {p.spec: 10 * float(p.perplexity) / base for p in table.values()}


def test_every_spec_of_a_printed_row_exists() -> None:
    for spec in [p.spec for p in (*HQMQ.values(), *OCTOPUS.values())] + [*RECALL, *same_family.UNPROTECTED]:
        assert str(get(spec)) == spec


def test_a_run_like_the_paper_holds() -> None:
    found = {c.item: c.row("hqmq", "t") for c in hqmq_claims(run(as_printed(HQMQ, 7.59)))}
    assert set(found) == {*HQMQ, "order of these rows"}
    assert all(row["holds"] for row in found.values())
    assert found["naive int4"]["printed"] == pytest.approx(17661 / 7.59, abs=0.5)
    assert found["HQMQ s192_r6 + Med3"]["printed"] == pytest.approx(1.163)
    assert found["order of these rows"]["ours"] == pytest.approx(1)
    assert all(row["band"] is None for row in found.values())


@pytest.mark.parametrize(
    ("spec", "perplexity", "item"),
    [
        ("int-4", 99.9, "naive int4"),
        ("hqmq-s192_r6", 99.0, "HQMQ s192_r6"),
        ("hqmq-s192_r6:outliers=3,slots=8", 11.7, "HQMQ s192_r6 + Med3"),
    ],
)
def test_a_row_on_the_other_side_of_its_bound_differs(spec: str, perplexity: float, item: str) -> None:
    rows = [c.row("hqmq", "t") for c in hqmq_claims(run(as_printed(HQMQ, 7.59) | {spec: perplexity}))]
    assert [row["item"] for row in rows if not row["holds"]] == [item]


def test_another_order_of_presets_lowers_the_rank_correlation() -> None:
    perplexity = as_printed(HQMQ, 7.59)
    worst = [p.spec for p in HQMQ.values() if p.collapses]
    turned = perplexity | dict(zip(worst, sorted(perplexity[s] for s in worst), strict=True))
    turned |= {p.spec: 10.0 for p in HQMQ.values() if p.spec.endswith("outliers=3")}
    rows = {c.item: c.row("hqmq", "t") for c in hqmq_claims(run(turned))}
    assert rows["order of these rows"]["ours"] < 0.8
    assert not rows["order of these rows"]["holds"]


def test_what_was_not_evaluated_is_left_out() -> None:
    few = run({UNCOMPRESSED: 10.0, "int-4": 5000.0, "hqmq-s192_r6": 500.0})
    assert [c.item for c in hqmq_claims(few)] == ["naive int4", "HQMQ s192_r6"]
    assert list(octopus_claims(few)) == []


def test_octopus_keeps_recall_at_4_bits_and_does_not_collapse_at_2() -> None:
    recall = {UNCOMPRESSED: (0.9, 0.0), "octopus-4": (0.85, 0.0), "octopus-3": (0.8, -0.05), "octopus-2": (0.5, -0.2)}
    perplexity = as_printed(OCTOPUS, 10.033) | {"turboquant-4": 2336.0, "polarquant-4": 500.0}
    rows = {c.item: c.row("octopus", "t") for c in octopus_claims(run(perplexity, recall))}
    assert {item: row["holds"] for item, row in rows.items() if item not in OCTOPUS} == {
        "order of these rows": True,
        "turboquant-4, no layer dense": True,
        "polarquant-4, no layer dense": False,
        "octopus-4": True,
        "octopus-3": False,
        "octopus-2": True,
    }
    worse = run(perplexity, recall | {"octopus-2": (0.4, -0.2)})
    assert [c.item for c in octopus_claims(worse) if not c.row("octopus", "t")["holds"]][-1] == "octopus-2"


def test_the_tables_are_there_if_the_run_is_published() -> None:
    for paper, tables in (("hqmq", "Tables 2, 18"), ("octopus", "Tables 2, 8")):
        name = f"{tables}: {FAMILY}"
        assert (name in available()[paper]) == FOLDER.is_dir()
        assert (name in not_recomputed(paper)) != FOLDER.is_dir()


def test_a_claim_with_bounds_is_held_to_them() -> None:
    claim = claims.Claim("a", "m", "2.0", 3.0, least=2.5, most=3.0)
    assert claim.row("hqmq", "t")["holds"]
    assert not claims.Claim("a", "m", "3.0", 3.0, least=3.5).row("hqmq", "t")["holds"]
    assert not claims.Claim("a", "m", "3.0", 3.0, most=2.5).row("hqmq", "t")["holds"]
