"""Rank correlations are those of the textbooks, and say how sure they are."""

import math
from pathlib import Path

import pytest

from kvcodec.cli.page.rows import UNCOMPRESSED, Results, Row
from kvcodec_lab.report.ranks import agreement, average_ranks, holding, kendall, spearman

NONE = dict.fromkeys(("value", "low", "high", "effective_bits", "items", "planned"))


def results(kl: dict[str, list[float]], perplexity: dict[str, float], names: str = "w") -> Results:
    """A run with these values of KL window by window, all windows of equal weight."""
    rows, windows = [], []
    for spec, values in kl.items():
        for task, value in (("kl", sum(values) / len(values)), ("perplexity", perplexity[spec])):
            rows.append(Row(spec, task, task, None, NONE | {"value": value}, "lower", "decoded", "complete"))
        for i, value in enumerate(values):
            line = {"spec": spec, "task": "kl", "item": f"{names}{i}", "scores": {"kl": [value * 10, 10]}}
            windows += [line, line | {"task": "perplexity", "scores": {"nll": [1.0, 10]}}]
    return Results(Path(), {}, rows, windows=windows)


def test_ties_share_a_rank_and_a_single_value_has_no_correlation() -> None:
    assert average_ranks([5, 1, 5, 5, 9]) == [3, 1, 3, 3, 5]
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert kendall([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(5 / math.sqrt(5 * 6))
    assert spearman([1, 2, 3], [3, 2, 1]) == kendall([1, 2, 3], [3, 2, 1]) == -1
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(kendall([1, 1, 1], [1, 2, 3]))


SPECS = ("a", "b", "c", "d")
FLAT = dict(zip((UNCOMPRESSED, "dense", *SPECS), (10.0,) * 6, strict=True))


def test_presets_of_both_runs_are_compared_and_the_exact_ones_left_out() -> None:
    one = results({UNCOMPRESSED: [0.0], "dense": [0.0], "a": [0.1], "b": [0.2], "c": [0.3], "x": [9.0]},
                  FLAT | {"x": 10.0})  # fmt: skip
    other = results({UNCOMPRESSED: [0.0], "dense": [1e-6], "c": [1.0], "b": [3.0], "a": [2.0]}, FLAT)
    found = agreement(one, other)
    assert found is not None
    assert found.specs == ["a", "b", "c"]
    assert found.spearman[0] == -0.5
    assert found.kendall[0] == pytest.approx(-1 / 3)
    assert agreement(one, results({UNCOMPRESSED: [0.0], "a": [0.1], "b": [0.2]}, FLAT)) is None


def test_who_holds_is_decided_by_perplexity_on_each_run() -> None:
    kl = {UNCOMPRESSED: [0.0], **{spec: [i + 1.0] for i, spec in enumerate(SPECS)}}
    one = results(kl, FLAT | {"a": 11.0, "b": 11.01, "c": 10.5, "d": 30.0})
    other = results(kl, FLAT | {"a": 10.0, "b": 10.9, "c": 11.5, "d": 40.0})
    assert holding(one) == {UNCOMPRESSED, "a", "c"}
    found = agreement(one, other)
    assert found is not None
    assert (found.both, found.first_only, found.second_only, found.neither) == (["a"], ["c"], ["b"], ["d"])
    assert found.held is None
    assert agreement(one, one).held is None  # type: ignore[union-attr]
    calm = results(kl, FLAT)
    assert agreement(calm, calm).held == 1  # type: ignore[union-attr]


def test_the_interval_covers_what_windows_disagree_about() -> None:
    """Two windows order three presets in opposite ways: resampled, every order occurs; one window says nothing."""
    kl = {UNCOMPRESSED: [0.0, 0.0], "a": [1.0, 4.0], "b": [2.0, 2.0], "c": [3.5, 1.0]}
    sure = results({spec: [values[0]] * 2 for spec, values in kl.items()}, FLAT)
    found = agreement(results(kl, FLAT), sure)
    assert found is not None
    assert found.spearman[1:] == (-1, 1)
    steady = agreement(sure, sure)
    assert steady is not None
    assert steady.spearman == (1, 1, 1)


def test_runs_on_the_same_windows_are_resampled_together() -> None:
    kl = {UNCOMPRESSED: [0.0, 0.0], "a": [1.0, 4.0], "b": [2.0, 2.0], "c": [3.5, 1.0]}
    together = agreement(results(kl, FLAT), results(kl, FLAT))
    apart = agreement(results(kl, FLAT), results(kl, FLAT, names="other"))
    assert together is not None
    assert apart is not None
    assert together.kendall == (1, 1, 1)
    assert apart.kendall[0] == 1
    assert apart.kendall[1] == -1
