"""The answer in words: the best preset at each number of bits, and the presets that measurably lose on a task."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcodec.cli.page.rows import UNCOMPRESSED, Results, Row
from kvcodec.cli.page.words import about_task, change_text, interval_text, listed, metric_name, value_text

BUDGETS = (2.5, 3.5, 4.5, 5.5, 6.5, 8.5)
"""Budgets in bits, everything held counted: a round number and half a bit for scales."""
DENSE_BITS, FEWER_BITS = 15.5, 14.0
"""From ``DENSE_BITS`` measured bits on a cache is in effect dense; below ``FEWER_BITS`` a layout compresses."""
JUDGES = ("kl", "perplexity")
"""Tasks that decide, most sensitive first; without them the run's first task decides."""


@dataclass(frozen=True)
class Best:
    """The best row at a budget, the next one, and specs whose intervals overlap the best one's."""

    budget: float
    row: Row
    second: Row | None
    tied: list[str]


def judge(results: Results) -> str:
    """Task whose main metric decides."""
    return next((task for task in JUDGES if task in results.tasks), results.tasks[0])


def whole_rows(results: Results, task: str) -> list[Row]:
    """Rows of the compressed specs on a whole task, of its main metric."""
    wanted = results.metrics(task)[0]
    found = [results.row(task, wanted, spec) for spec in results.specs]
    return [row for row in found if row is not None]


def best_at_bits(rows: Sequence[Row]) -> list[Best]:
    """The best row of each budget; a budget that allows no better one than the one before is left out."""
    found: list[Best] = []
    for budget in BUDGETS:
        inside = [r for r in rows if r["value"] is not None and round(r["effective_bits"] or 99, 2) <= budget]
        inside.sort(key=_rank)
        if not inside or (found and inside[0].spec == found[-1].row.spec):
            continue
        best, others = inside[0], inside[1:]
        tied = [r.spec for r in others if _overlap(best, r)]
        found.append(Best(budget, best, others[0] if others else None, tied))
    return found


def _rank(row: Row) -> float:
    value = row["value"] or 0.0
    return value if row.better == "lower" else -value


def _overlap(a: Row, b: Row) -> bool:
    ends = a["low"], a["high"], b["low"], b["high"]
    if any(x is None for x in ends):
        return a["value"] == b["value"]
    low, high, other_low, other_high = (x or 0.0 for x in ends)
    return low <= other_high and other_low <= high


def shown(row: Row) -> str:
    """Value and interval of a row."""
    ends = interval_text(row.metric, row["low"], row["high"])
    return f"{value_text(row.metric, row['value'])}{f' {ends}' if ends else ''}"


def sentences(results: Results) -> list[str]:
    """One sentence for each budget with a best row of its own."""
    task = judge(results)
    out = []
    for best in best_at_bits(whole_rows(results, task)):
        row = best.row
        text = (
            f"At {best.budget:g} bits the best preset is {row.spec}: {metric_name(row.metric)} {shown(row)} at "
            f"{row['effective_bits']:.2f} bits measured"
        )
        if best.tied:
            text += f"; these {row['items']:.0f} items do not tell it apart from {listed(best.tied)}"
        elif best.second is not None:
            text += f"; next is {best.second.spec} with {shown(best.second)}"
        else:
            text += "; no other is as small"
        out.append(f"{text}.")
    return out or [f"No preset has a value of {about_task(task).title} within {BUDGETS[-1]:g} bits."]


def hardly_tried(rows: Sequence[Row]) -> list[Row]:
    """Rows of presets whose caches stayed at about 16 bits on the task's short items."""
    return [
        r
        for r in rows
        if (r["effective_bits"] or 0) >= DENSE_BITS
        and ((r["key_bits"] or 16) + (r["value_bits"] or 16)) / 2 < FEWER_BITS
    ]


def losses(results: Results) -> list[tuple[str, str]]:
    """For each task with a right answer: its title, and the presets that are measurably worse than 16 bit."""
    out = []
    for task in results.tasks:
        rows = whole_rows(results, task)
        if task in JUDGES or not rows:
            continue
        base = results.row(task, rows[0].metric, UNCOMPRESSED)
        out.append((about_task(task).title, _loss(rows, base, results.chance(task))))
    return out


def _loss(rows: Sequence[Row], base: Row | None, chance: float | None) -> str:
    if base is not None and base.better == "higher" and base["value"] == 0:
        return "the 16-bit model scores 0 here, so no preset can lose: the task says nothing about this model's cache."
    known = [r for r in rows if r["difference_low"] is not None and r["difference_high"] is not None]
    if not known:
        return "no paired difference yet: fewer than two items are finished in 16 bit and compressed."
    worse = [r for r in known if _bad_end(r) < 0]
    start = f"16 bit scores {shown(base)}. " if base is not None else ""
    guess = base is not None and chance is not None and base["low"] is not None and base["low"] <= chance
    if guess:
        start += f"That is not told apart from guessing ({100 * (chance or 0):.0f} %). "
    short = hardly_tried(known)
    end = f" These items are too short to try {listed([r.spec for r in short])}." if short else ""
    if not worse:
        return f"{start}No preset is measurably worse on these {known[0]['items']:.0f} items.{end}"
    worse.sort(key=lambda r: r["difference"] or 0.0, reverse=worse[0].better == "lower")
    told = [
        f"{r.spec} ({change_text(r.metric, r['difference'], r['difference_low'], r['difference_high'])})" for r in worse
    ]
    rest = len(known) - len(worse)
    others = f"; the other {rest} are not" if rest > 1 else "; the other one is not" if rest else ""
    return f"{start}Measurably worse: {listed(told)}{others}.{end}"


def _bad_end(row: Row) -> float:
    """The end of the interval nearest to no loss; below 0 the whole interval is a loss."""
    end = row["difference_low"] if row.better == "lower" else row["difference_high"]
    return -(end or 0.0) if row.better == "lower" else end or 0.0
