"""OCTOPUS's findings on models of ours: what the paper's own numbers give, what a bound refuses; read, not run."""

import pytest

from kvcodec_lab.reproduce import available, not_recomputed
from kvcodec_lab.reproduce.own_models import (
    AUDIO,
    FINDINGS,
    FOLDER,
    OWN,
    VIDEO,
    by_name,
    errors_of,
    own_claims,
    squared,
)

PRINTED = (by_name(VIDEO, squared), by_name(AUDIO))


@pytest.mark.parametrize("errors", PRINTED)
def test_the_paper_s_own_numbers_hold(errors: dict[str, float]) -> None:
    own = OWN[0]._replace(printed=errors)
    rows = [claim.row("octopus", "t") for claim in own_claims(own, errors)]
    assert [row["item"] for row in rows] == [finding.item for finding in FINDINGS]
    assert all(row["holds"] for row in rows)
    assert all(abs(row["relative_error"]) < 5e-3 for row in rows)


def test_squared_errors_are_those_of_the_decibels() -> None:
    ratio = PRINTED[0]["turboquant-qjl-2"] / PRINTED[0]["octopus-2"]
    assert ratio == pytest.approx(10 ** ((10.90 - 7.10) / 10))


@pytest.mark.parametrize(
    ("changed", "times", "item"),
    [
        ("polarquant-4", 3.0, "b=4, worst / best"),
        ("octopus-3", 1.3, "b=3, best other / OCTOPUS"),
        ("octopus-qjl-2", 0.6, "b=2, OCTOPUS-QJL / OCTOPUS"),
        ("turboquant-qjl-3:stage", 2.0, "TurboQuant-QJL b=3 / TurboQuant b=2"),
    ],
)
def test_what_lies_outside_a_bound_differs(changed: str, times: float, item: str) -> None:
    errors = PRINTED[0] | {changed: times * PRINTED[0][changed]}
    rows = [claim.row("octopus", "t") for claim in own_claims(OWN[1], errors)]
    assert [row["item"] for row in rows if not row["holds"]] == [item]


def test_what_was_not_run_is_left_out_and_parts_are_named() -> None:
    rows = [{"spec": spec, "kl": x} for spec, x in (("dense", 0.0), ("octopus-2:keys", 3.0), ("octopus-2:values", 2.0))]
    rows.append({"spec": "octopus-2:paper", "kl": 4.0})
    errors = errors_of(OWN[0], rows)
    assert errors == {"octopus-2:keys": 3.0, "octopus-2:values": 2.0, "octopus-2": 4.0}
    (claim,) = own_claims(OWN[0], errors)
    assert (claim.item, claim.ours, claim.least) == ("b=2, keys alone / values alone", 1.5, 1.0)


def test_of_codecs_that_were_not_run_the_paper_s_number_is_left_out_as_well() -> None:
    errors = {"octopus-2": 1.0, "turboquant-2": 3.0, "polarquant-3": 1.0, "octopus-3": 1.0}
    (claim,) = own_claims(OWN[0]._replace(printed=PRINTED[1]), errors)
    assert (claim.item, claim.ours) == ("b=2, best other / OCTOPUS", 3.0)
    assert claim.printed == f"{12.65 / 6.75:.3g}"


def test_the_tables_are_there_if_the_results_are() -> None:
    for own in OWN:
        title = f"Sec. 4.3: own model, {own.name}"
        assert (title in available()["octopus"]) == (FOLDER / own.file).is_file()
        assert (title in not_recomputed("octopus")) != (FOLDER / own.file).is_file()
