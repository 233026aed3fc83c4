"""Printed numbers of the papers, recomputed: those that need neither a model nor the authors' hardware.

A claim of ``tables/claims.csv`` holds when ours lies within half a unit of the last printed digit, plus a relative
allowance for the sampling of the experiment. ``corrected`` has the value that follows from a paper's own definitions
where the printed one does not. Rows without an item name what cannot be recomputed, and the reason.
"""

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packedkv.cli.measure.rows import Row
from packedkv.errors import SpecError, nearest
from packedkv.progress import Progress

PAPERS = {
    "octopus": "OCTOPUS, arXiv:2605.21226",
    "saw-int4": "SAW-INT4, arXiv:2604.19157",
    "hqmq": "HQMQ, arXiv:2605.27646",
    "innerq": "InnerQ",
    "ultraquant": "UltraQuant, arXiv:2606.20474",
    "turboquant": "TurboQuant, arXiv:2504.19874",
    "polarquant": "PolarQuant, arXiv:2502.02617",
}
NOT_PRINTED = "not printed"
FILE = Path(__file__).parent / "tables" / "claims.csv"

Figures = Iterator[tuple[str, str, float]]
"""Item, metric and our value of each claim of a table."""
Recompute = Callable[[bool], Figures]


@dataclass(frozen=True)
class Claim:
    """A number as a paper prints it (text, so that the digits are known), and what ours is held to instead, if
    ``corrected``. ``allowance`` and ``quick``: the relative deviation that sampling explains, of full and of quick
    runs.
    """

    paper: str
    table: str
    item: str
    metric: str
    printed: str
    corrected: str
    allowance: float
    quick: float
    note: str

    def row(self, ours: float, quick: bool = False) -> Row:
        """Return the comparison as a result row."""
        reference = self.corrected or self.printed
        value = float(reference)
        half_digit = 0.5 * 10.0 ** -len(reference.partition(".")[2])
        band = half_digit / abs(value) + (self.quick if quick else self.allowance)
        relative = ours / value - 1
        return self.empty() | {
            "printed": float(self.printed),
            "spec": float(self.corrected) if self.corrected else None,
            "ours": ours,
            "relative_error": relative,
            "printed_error": ours / float(self.printed) - 1,
            "band": band,
            "holds": abs(relative) <= band * (1 + 1e-12),
        }

    def empty(self) -> Row:
        """Return the row without numbers, for what cannot be recomputed."""
        named = {"paper": self.paper, "table": self.table, "item": self.item, "metric": self.metric}
        numbers = ("printed", "spec", "ours", "relative_error", "printed_error", "band", "holds")
        return named | dict.fromkeys(numbers) | {"note": self.note}


@cache
def claims() -> tuple[Claim, ...]:
    """Return every row of the table of claims."""
    _, *rows = csv.reader(FILE.read_text(encoding="utf-8").splitlines())
    return tuple(
        Claim(paper, table, item, metric, printed, corrected, float(allowance or 0), float(quick or 0), note)
        for paper, table, item, metric, printed, corrected, allowance, quick, note in rows
    )


_TABLES: dict[tuple[str, str], tuple[Recompute, float]] = {}


def recomputes(paper: str, table: str, *, seconds: float = 1.0) -> Callable[[Recompute], Recompute]:
    """Register a function ``quick -> (item, metric, ours)`` for one table; ``seconds`` weighs the progress bar."""

    def add(recompute: Recompute) -> Recompute:
        _TABLES[paper, table] = recompute, seconds
        return recompute

    return add


def reproduce_rows(
    papers: Sequence[str] | None = None, *, quick: bool = False, progress: Progress | None = None
) -> Iterator[Row]:
    """Recompute the printed numbers of ``papers``; ``quick``: fewer samples, wider bands, under a minute.

    ``relative_error`` of a row is against ``spec``, the corrected value, where there is one. After the tables of a
    paper comes a row for each table that cannot be recomputed. Seeds are fixed.
    """
    wanted = list(PAPERS) if papers is None else list(dict.fromkeys(papers))
    for paper in wanted:
        if paper not in PAPERS:
            raise SpecError(f"unknown paper {paper!r}.{nearest(paper, PAPERS)} There are: {', '.join(PAPERS)}.")
    return _run(wanted, quick, progress or Progress(False))


def _run(papers: list[str], quick: bool, progress: Progress) -> Iterator[Row]:
    total = sum(seconds for (paper, _), (_, seconds) in _TABLES.items() if paper in papers)
    known = {(c.paper, c.table, c.item, c.metric): c for c in claims()}
    done, start = 0.0, time.monotonic()
    for paper in papers:
        for (of, table), (recompute, seconds) in list(_TABLES.items()):
            if of != paper:
                continue
            for item, metric, ours in recompute(quick):
                yield known[paper, table, item, metric].row(ours, quick)
                progress.bar("reproducing", done, total, f"{paper}, {table}, {item}")
            done += seconds
        yield from (c.empty() for c in claims() if c.paper == paper and not c.item)
    progress.bar("reproducing", total, total, f"{time.monotonic() - start:.0f} s")
