"""The lines of a run to rows with 95 % intervals over items.

Wilson's interval (1927, J. Am. Stat. Assoc. 22, p. 209) where every item is right or wrong, else the seeded bootstrap.
Intervals do not cover another text, another model, or another seed of the codec.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np

from packedkv.cli.measure.rows import Row
from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv_lab.eval.store import Run
from packedkv_lab.eval.tasks.base import SEPARATOR, Metric

RESAMPLES = 1000
LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
AGREEMENT = "agreement"
AGREEMENT_TEXT = "share of items that get the uncompressed model's answer, right or wrong"

Array = np.ndarray[Any, np.dtype[Any]]
Scored = Mapping[str, tuple[float, float]]
"""Item -> (sum, count) of one metric."""


def estimate(scores: Scored, metric: Metric, seed: int = 0) -> tuple[float, float | None, float | None]:
    """Value of a metric and its interval; None for both ends where there are fewer than two items.

    >>> value, low, high = estimate({str(i): (1.0, 1.0) for i in range(10)}, Metric("higher", ""))
    >>> value, round(low, 3), high
    (1.0, 0.722, 1.0)
    """
    sums, counts = _columns(scores, sorted(scores))
    value = metric.value(float(sums.sum()), float(counts.sum()))
    if len(scores) < 2:
        return value, None, None
    if not metric.exp and (counts == 1).all() and np.isin(sums, (0.0, 1.0)).all():
        return value, *wilson(int(sums.sum()), len(scores))
    return value, *_ends(_values(metric, sums, counts, _weights(len(scores), seed)))


def wilson(right: int, items: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion: its ends p solve (p - right/items)^2 = z^2 p (1 - p) / items.

    >>> [round(end, 4) for end in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    share, part = right / items, Z * Z / items
    middle, half = share + part / 2, Z * math.sqrt((share * (1 - share) + part / 4) / items)
    return max(0.0, (middle - half) / (1 + part)), min(1.0, (middle + half) / (1 + part))


def paired(
    scores: Scored, base: Scored, metric: Metric, seed: int = 0
) -> tuple[float, float | None, float | None] | None:
    """Difference from ``base`` over the items of both, and its interval; None if they have none in common."""
    common = sorted(set(scores) & set(base))
    if not common:
        return None
    (s, n), (bs, bn) = _columns(scores, common), _columns(base, common)
    value = metric.value(float(s.sum()), float(n.sum())) - metric.value(float(bs.sum()), float(bn.sum()))
    if len(common) < 2:
        return value, None, None
    weights = _weights(len(common), seed)
    return value, *_ends(_values(metric, s, n, weights) - _values(metric, bs, bn, weights))


def _columns(scores: Scored, items: Sequence[str]) -> tuple[Array, Array]:
    pairs = np.array([scores[item] for item in items], dtype=np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@lru_cache(maxsize=16)
def _weights(items: int, seed: int) -> Array:
    """How often each resample holds each item: ``[RESAMPLES, items]``; the same for the same arguments."""
    draws = np.random.default_rng([seed, items]).integers(0, items, (RESAMPLES, items))
    draws += np.arange(RESAMPLES)[:, None] * items
    return np.bincount(draws.ravel(), minlength=RESAMPLES * items).reshape(RESAMPLES, items).astype(np.float32)


def _values(metric: Metric, sums: Array, counts: Array, weights: Array) -> Array:
    total, count = weights @ sums, weights @ counts
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean = total / count
        return np.exp(mean) if metric.exp else mean


def _ends(values: Array) -> tuple[float | None, float | None]:
    """Percentiles of the resamples, those without a value (0 / 0, an overflow) left out."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None, None
    tail = (1 - LEVEL) / 2 * 100
    low, high = np.percentile(finite, [tail, 100 - tail])
    return float(low), float(high)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    """One spec's lines of one task, or of one cell of its grid."""

    group: dict[str, Any] | None
    scores: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def add(self, line: Row, name: str, score: tuple[float, float]) -> None:
        self.scores.setdefault(name, {})[line["item"]] = score


def summarize(run: Run, status: str = "complete") -> list[Row]:
    """Rows of ``results.json``: by task, spec and metric; the whole first, then each cell of the task's grid. Only the
    folder is read: model and tasks need not be at hand.
    """
    lines: dict[tuple[str, str], list[Row]] = {}
    for line in run.lines:
        lines.setdefault((line["task"], line["spec"]), []).append(line)
    rows: list[Row] = []
    for task, about in run.about["tasks"].items():
        metrics = {name: Metric(**m) for name, m in about["metrics"].items()}
        base = _cells(lines.get((task, UNCOMPRESSED), []))
        for spec in (UNCOMPRESSED, *run.about["specs"]):
            mine = lines.get((task, spec), [])
            common = _common(run, task, spec, mine, status)
            for key, cell in _cells(mine).items():
                reference = None if spec == UNCOMPRESSED else base.get(key, _Cell(None))
                for row in _rows(cell, reference, metrics, int(run.about["seed"])):
                    rows.append({"spec": spec, "task": task, **row, "group": cell.group, **common})
    return rows


def against(runs: Sequence[Run], spec: str) -> list[Row]:
    """How every other spec differs from one, on the items that both have finished, which are resampled together.

    ``runs`` are of the same model on other data, such as several texts: their items are taken together. Rows by task,
    other spec and metric: ``value`` of ``spec`` and ``other_value`` over the ``items`` of both, ``difference`` and its
    interval.
    """
    rows: list[Row] = []
    scores: dict[tuple[str, str], dict[str, dict[str, tuple[float, float]]]] = {}
    for number, run in enumerate(runs):
        for line in run.lines:
            for name, score in {} if line.get("error") else line["scores"].items():
                mine = scores.setdefault((line["task"], line["spec"]), {}).setdefault(name, {})
                mine[f"{number} {line['item']}"] = tuple(score)
    tasks = {task: about for run in runs for task, about in run.about["tasks"].items()}
    others = dict.fromkeys(other for run in runs for other in run.about["specs"] if other != spec)
    for (task, about), other in product(tasks.items(), others):
        for name, given in about["metrics"].items():
            metric = Metric(**given)
            left, right = (scores.get((task, s), {}).get(metric.of or name, {}) for s in (spec, other))
            if (interval := paired(left, right, metric, int(runs[0].about["seed"]))) is None:
                continue
            common = sorted(set(left) & set(right))
            values = [metric.value(*(float(x.sum()) for x in _columns(of, common))) for of in (left, right)]
            row: Row = {"spec": spec, "task": task, "metric": name, "better": metric.better, "other": other}
            row |= zip(("value", "other_value"), values, strict=True)
            row |= zip(("difference", "low", "high"), interval, strict=True)
            rows.append({**row, "items": len(common)})
    return rows


def _cells(lines: Iterable[Row]) -> dict[str, _Cell]:
    """The whole of a spec's lines and each cell of the grid; failed items are in none."""
    cells: dict[str, _Cell] = {"": _Cell(None)}
    for line in lines:
        if line.get("error"):
            continue
        inside = [cells[""]]
        if group := line.get("group"):
            inside.append(cells.setdefault(repr(sorted(group.items())), _Cell(dict(group))))
        for cell in inside:
            if line.get("output") is not None:
                cell.outputs[line["item"]] = line["output"]
        for name, (total, count) in line["scores"].items():
            metric, _, part = name.partition(SEPARATOR)
            for cell in inside if not part else [cells.setdefault(part, _Cell({"positions": part}))]:
                cell.add(line, metric, (total, count))
    return cells


def _rows(cell: _Cell, base: _Cell | None, metrics: Mapping[str, Metric], seed: int) -> list[Row]:
    rows: list[Row] = []
    for name, metric in metrics.items():
        mine = cell.scores.get(metric.of or name)
        if not mine:
            continue
        value, low, high = estimate(mine, metric, seed)
        row: Row = {"metric": name, "value": value, "low": low, "high": high, "items": len(mine)}
        row |= {"count": sum(n for _, n in mine.values()), "better": metric.better}
        against = None if base is None else paired(mine, base.scores.get(metric.of or name, {}), metric, seed)
        keys = "difference", "difference_low", "difference_high"
        rows.append(row | dict(zip(keys, against or (None, None, None), strict=True)))
    if base is not None and (both := set(cell.outputs) & set(base.outputs)):
        same = {i: (float(cell.outputs[i] == base.outputs[i]), 1.0) for i in both}
        value, low, high = estimate(same, Metric("higher", AGREEMENT_TEXT), seed)
        row = {"metric": AGREEMENT, "value": value, "low": low, "high": high, "items": len(same), "count": len(same)}
        empty = dict.fromkeys(("difference", "difference_low", "difference_high"))
        rows.append({**row, "better": "higher", **empty})
    return rows


def _common(run: Run, task: str, spec: str, lines: Sequence[Row], status: str) -> Row:
    """What all rows of a spec on a task share: bytes as measured, time, and what the run was."""
    sized = [line for line in lines if line.get("elements")]
    nbytes, elements = sum(line["bytes"] for line in sized), sum(line["elements"] for line in sized)
    bits = run.about.get("bits", {}).get(spec, {})
    return {
        "effective_bits": nbytes * 8 / elements if elements else None,
        "key_bits": bits.get("key_bits"),
        "value_bits": bits.get("value_bits"),
        "cache_bytes": nbytes / len(sized) if sized else None,
        "ratio_to_16bit": elements * 2 / nbytes if nbytes else None,
        "prefill": run.about["settings"]["prefill"],
        "seconds": sum(line["seconds"] for line in lines),
        "failed": sum(bool(line.get("error")) for line in lines),
        "planned": run.about["tasks"][task]["items"],
        "status": status,
        "partial": status == "interrupted",
        "model": run.about["model"]["name"],
        "versions": run.about["versions"],
        "seed": run.about["seed"],
    }
