"""Do two models order presets alike? Rank correlations of two runs by KL, and who holds on both.

A run that has other windows, another model or another head_dim is compared by order only: values are not comparable.
Intervals are 95 % percentiles over resampled windows (seeded); runs on the same windows are resampled together. They do
not cover another text, and with few windows they are rough. Sums are exact (``math.fsum``), so that the same items give
the same digits on every machine.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcodec.cli.page.rows import UNCOMPRESSED, Results

RESAMPLES = 200
EXACT = (UNCOMPRESSED, "dense")
"""What loses nothing: its KL is rounding."""
WITHIN = 1.10
"""Times the uncompressed perplexity up to which a preset holds."""

Interval = tuple[float, float, float]
"""A value and both ends of its interval."""


def average_ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs.

    >>> average_ranks([0.3, 0.1, 0.3])
    [2.5, 1.0, 2.5]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for i in order[at:end]:
            ranks[i] = (at + 1 + end) / 2
        at = end
    return ranks


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, ties by average ranks; NaN where one side has a single value.

    >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    a, b = average_ranks(x), average_ranks(y)
    middle = (len(a) + 1) / 2
    both = sum((p - middle) * (q - middle) for p, q in zip(a, b, strict=True))
    size = sum((p - middle) ** 2 for p in a) * sum((q - middle) ** 2 for q in b)
    return both / math.sqrt(size) if size else math.nan


def kendall(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less those in the other; NaN where one side has a single value.

    >>> kendall([1, 2, 3, 4], [10, 20, 40, 30]) == 4 / 6
    True
    """
    alike = first = second = 0
    for i in range(len(x)):
        for j in range(i):
            a, b = (x[i] > x[j]) - (x[i] < x[j]), (y[i] > y[j]) - (y[i] < y[j])
            alike, first, second = alike + a * b, first + a * a, second + b * b
    size = math.sqrt(first * second)
    return alike / size if size else math.nan


@dataclass(frozen=True)
class Agreement:
    """How alike two runs order the presets that both have.

    Parameters
    ----------
    specs : list of str
        Presets with a KL in both, in the first run's order.
    spearman, kendall : (value, low, high)
    both, first_only, second_only, neither : list of str
        Which of them hold: perplexity at most ``WITHIN`` times the uncompressed model's.
    held : float or None
        Spearman's correlation of those that hold in both; None below three.
    """

    specs: list[str]
    spearman: Interval
    kendall: Interval
    both: list[str]
    first_only: list[str]
    second_only: list[str]
    neither: list[str]
    held: float | None


def agreement(first: Results, second: Results) -> Agreement | None:
    """Compare two runs; None if fewer than three presets have a KL in both."""
    kl = [_values(first), _values(second)]
    specs = [spec for spec in kl[0] if spec in kl[1]]
    if len(specs) < 3:
        return None
    held = [holding(first), holding(second)]
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for spec in specs:
        kinds.setdefault((spec in held[0], spec in held[1]), []).append(spec)
    both = kinds.get((True, True), [])
    columns = [[of[spec] for spec in specs] for of in kl]
    drawn = _resampled(first, second, specs)
    return Agreement(
        specs,
        _interval(spearman, columns, drawn),
        _interval(kendall, columns, drawn),
        both,
        kinds.get((True, False), []),
        kinds.get((False, True), []),
        kinds.get((False, False), []),
        spearman(*([of[spec] for spec in both] for of in kl)) if len(both) > 2 else None,
    )


def holding(results: Results) -> set[str]:
    """Specs whose perplexity is at most ``WITHIN`` times the uncompressed model's."""
    base = results.row("perplexity", "perplexity", UNCOMPRESSED)
    limit = None if base is None or base["value"] is None else WITHIN * base["value"]
    rows = [r for r in results.rows if (r.task, r.metric, r.group) == ("perplexity", "perplexity", None)]
    return {r.spec for r in rows if limit is not None and r["value"] is not None and r["value"] <= limit}


def _values(results: Results) -> dict[str, float]:
    """KL of the presets, least first."""
    rows = [r for r in results.rows if (r.task, r.metric, r.group) == ("kl", "kl", None) and r.spec not in EXACT]
    found = {r.spec: r["value"] for r in rows}
    return {spec: v for spec, v in sorted(found.items(), key=lambda item: (item[1] or 0.0, item[0])) if v is not None}


def _resampled(first: Results, second: Results, specs: Sequence[str]) -> list[list[list[float]]]:
    """Both columns of KL for each resample of the windows; none where an item is missing."""
    scores = [results.window_scores("kl", "kl") for results in (first, second)]
    items = [sorted(set.intersection(*(set(of.get(spec, ())) for spec in specs))) for of in scores]
    if not all(items):
        return []
    draw, columns = random.Random(0), []
    for _ in range(RESAMPLES):
        taken = draw.choices(items[0], k=len(items[0]))
        other = taken if items[0] == items[1] else draw.choices(items[1], k=len(items[1]))
        columns.append([_column(of, specs, windows) for of, windows in zip(scores, (taken, other), strict=True)])
    return columns


def _column(
    scores: Mapping[str, Mapping[str, tuple[float, float]]], specs: Sequence[str], items: Sequence[str]
) -> list[float]:
    held = [[scores[spec][item] for item in items] for spec in specs]
    return [math.fsum(total for total, _ in of) / math.fsum(count for _, count in of) for of in held]


def _interval(
    of: Callable[[Sequence[float], Sequence[float]], float],
    columns: Sequence[Sequence[float]],
    drawn: Sequence[Sequence[Sequence[float]]],
) -> Interval:
    value = of(columns[0], columns[1])
    found = sorted(v for v in (of(x, y) for x, y in drawn) if not math.isnan(v))
    if not found:
        return value, math.nan, math.nan
    tail = 0.025 * len(found)
    return value, found[math.floor(tail)], found[math.ceil(len(found) - tail) - 1]
