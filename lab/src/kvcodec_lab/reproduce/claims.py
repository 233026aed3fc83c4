"""Printed numbers of the papers, recomputed: those that need neither a model nor the authors' hardware.

``reproduce_rows`` runs small functions, one per table, each registered with ``@reproduces(paper, table)`` and yielding
claims. Every claim becomes one row, whether it holds or not. It holds when ours lies within the band: half a unit of
the last printed digit, plus what the sampling of the experiment allows. Where a printed number was found to be wrong,
the claim carries ``spec``, the value that follows from the paper's own definitions, and is held to that. Claims of the
table ``NOT_PRINTED`` are figures that a paper implies but does not print; their reference was computed independently
from the paper's text. A result on another model cannot equal a printed one: such a claim carries ``least`` or ``most``
and holds within these bounds. What cannot be recomputed is registered with ``cannot`` and becomes a row without
numbers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcodec.cli.measure.rows import Row
from kvcodec.errors import SpecError, nearest
from kvcodec.progress import Progress

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


@dataclass(frozen=True)
class Claim:
    """A printed number of a paper and ours.

    Parameters
    ----------
    item : str
        Which row of the table.
    metric : str
    printed : str
        As printed, so that its digits are known; never zero.
    ours : float
    allowance : float
        Relative deviation that the sampling of the experiment explains.
    note : str
        Note for the reader: how an ambiguity was read, or why the claim does not hold.
    spec : str
        The right value, where what is printed does not follow from the paper's definitions; ours is held to it.
    curve : str
        Name of the curve that this number is a point of, in the figure of its table; empty for none.
    x : float
        Where on that curve.
    least, most : float, optional
        Bounds that ours is held to instead of the printed number.

    Examples
    --------
    >>> row = Claim("b=4", "mse", "0.0094", 0.009316, 1e-3, spec="0.009315").row("octopus", "Table 1")
    >>> row["holds"], round(row["relative_error"], 4), round(row["printed_error"], 3)
    (True, 0.0001, -0.009)
    """

    item: str
    metric: str
    printed: str
    ours: float
    allowance: float = 0.0
    note: str = ""
    spec: str = ""
    curve: str = ""
    x: float = 0.0
    least: float | None = None
    most: float | None = None

    def row(self, paper: str, table: str) -> Row:
        """Return the comparison as a result row."""
        reference = self.spec or self.printed
        value = float(reference)
        half_digit = 0.5 * 10.0 ** -len(reference.partition(".")[2])
        band = half_digit / abs(value) + self.allowance
        relative = self.ours / value - 1
        holds = abs(relative) <= band * (1 + 1e-12)
        if bounded := self.least is not None or self.most is not None:
            holds = (self.least is None or self.ours >= self.least) and (self.most is None or self.ours <= self.most)
        return {
            "paper": paper,
            "table": table,
            "item": self.item,
            "metric": self.metric,
            "printed": float(self.printed),
            "spec": float(self.spec) if self.spec else None,
            "ours": self.ours,
            "relative_error": relative,
            "printed_error": self.ours / float(self.printed) - 1,
            "band": None if bounded else band,
            "holds": holds,
            "note": self.note,
            "curve": self.curve,
            "x": self.x if self.curve else None,
        }


@dataclass(frozen=True)
class Axes:
    """How the figure of a table is drawn, from its claims that are points of a curve.

    Parameters
    ----------
    x, y : str
        Labels, with units.
    log_y : bool
    """

    x: str
    y: str
    log_y: bool = True


Recompute = Callable[[bool], Iterator[Claim]]


@dataclass(frozen=True)
class _Table:
    recompute: Recompute
    axes: Axes | None
    seconds: float


_TABLES: dict[tuple[str, str], _Table] = {}
_REASONS: dict[tuple[str, str], str] = {}


def reproduces(
    paper: str, table: str, *, axes: Axes | None = None, seconds: float = 1.0
) -> Callable[[Recompute], Recompute]:
    """Register a function ``quick -> claims`` for one table of one paper.

    Parameters
    ----------
    paper : str
        A name out of ``PAPERS``.
    table : str
    axes : Axes, optional
        Draw the claims that have a ``curve``.
    seconds : float
        About how long the full table takes on two cores; weighs the progress bar, nothing else.
    """

    def add(recompute: Recompute) -> Recompute:
        _TABLES[paper, table] = _Table(recompute, axes, seconds)
        return recompute

    return add


def cannot(paper: str, table: str, reason: str) -> None:
    """Register tables of a paper that cannot be recomputed here, and why."""
    _REASONS[paper, table] = reason


def available() -> dict[str, list[str]]:
    """Tables that can be recomputed, by paper; an empty list for a paper with none yet."""
    return {paper: [table for p, table in _TABLES if p == paper] for paper in PAPERS}


def not_recomputed(paper: str) -> dict[str, str]:
    """Tables of a paper that cannot be recomputed here, with the reason."""
    return {table: reason for (p, table), reason in _REASONS.items() if p == paper}


def axes_of(paper: str, table: str) -> Axes | None:
    """How a table's figure is drawn; None when it has none."""
    return _TABLES[paper, table].axes if (paper, table) in _TABLES else None


def reproduce_rows(
    papers: Sequence[str] | None = None, *, quick: bool = False, progress: Progress | None = None
) -> Iterator[Row]:
    """Recompute the printed numbers of ``papers``.

    Parameters
    ----------
    papers : list of str, optional
        Names out of ``PAPERS``; None for every paper of which something can be recomputed.
    quick : bool
        Fewer samples, wider bands: under a minute instead of some minutes.
    progress : Progress, optional
        Where to say which table is at work, and how long it all may take.

    Returns
    -------
    iterator of dict
        ``paper, table, item, metric, printed, spec, ours, relative_error, printed_error, band, holds, note, curve, x``,
        as they are ready; ``relative_error`` is against ``spec`` where there is one. After the tables of a paper, one
        row for each registered with ``cannot``: the reason in ``note``, None where there is no number. Seeds are fixed:
        a second run gives the same numbers.

    Raises
    ------
    SpecError
        For a paper that is unknown, or of which nothing can be recomputed yet; at once, not at the first row.
    """
    known = available()
    wanted = [p for p in known if known[p]] if papers is None else list(dict.fromkeys(papers))
    there = ", ".join(paper for paper, tables in known.items() if tables)
    for paper in wanted:
        if paper not in PAPERS:
            raise SpecError(f"unknown paper {paper!r}.{nearest(paper, PAPERS)} There are: {there}.")
        if not known[paper]:
            raise SpecError(f"nothing of {paper} ({PAPERS[paper]}) can be recomputed yet. There are: {there}.")
    return _run(wanted, quick, progress or Progress(False))


def _run(papers: list[str], quick: bool, progress: Progress) -> Iterator[Row]:
    total = sum(table.seconds for (paper, _), table in _TABLES.items() if paper in papers)
    done, start = 0.0, time.monotonic()
    for paper in papers:
        for (of, name), table in list(_TABLES.items()):
            if of != paper:
                continue
            began = time.monotonic()
            progress.bar("reproducing", done, total, _left(start, done, total) + f"{paper}, {name}")
            for claim in table.recompute(quick):
                yield claim.row(paper, name)
                share = done + min(time.monotonic() - began, 0.9 * table.seconds)
                progress.bar("reproducing", share, total, _left(start, share, total) + f"{paper}, {name}, {claim.item}")
            done += table.seconds
        for name, reason in not_recomputed(paper).items():
            yield _reason_row(paper, name, reason)
    progress.bar("reproducing", total, total, f"{time.monotonic() - start:.0f} s")


def _left(start: float, done: float, total: float) -> str:
    """Time left if it goes on as it went; nothing before there is something to go by."""
    elapsed = time.monotonic() - start
    if elapsed < 2 or done < 0.02 * total:
        return ""
    return f"{elapsed * (total / done - 1):.0f} s left: "


def _reason_row(paper: str, table: str, reason: str) -> Row:
    empty = dict.fromkeys(Claim("", "", "1", 1.0).row(paper, table))
    return empty | {"paper": paper, "table": table, "item": "", "metric": "", "note": reason, "curve": ""}
