"""Printed numbers of the papers, recomputed: those that need neither a model nor the authors' hardware.

``reproduce_rows`` runs small functions, one per table, each registered with ``@reproduces(paper, table)`` and yielding
claims. Every claim becomes one row, whether it holds or not. It holds when ours lies within the band: half a unit of
the last printed digit, plus what the sampling of the experiment allows. Claims of the table ``NOT_PRINTED`` are
figures that a paper implies but does not print; their reference was computed independently from the paper's text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcodec.errors import SpecError, nearest
from kvcodec.eval.rows import Row
from kvcodec.progress import Progress

PAPERS = {
    "octopus": "OCTOPUS, arXiv:2605.21226",
    "saw-int4": "SAW-INT4, arXiv:2604.19157",
    "hqmq": "HQMQ",
    "innerq": "InnerQ",
    "ultraquant": "UltraQuant",
}
NOT_PRINTED = "not printed"


@dataclass(frozen=True)
class Claim:
    """One number of a paper beside ours.

    Parameters
    ----------
    item : str
        Which row of the table.
    metric : str
    printed : str
        As printed, so that its digits are known.
    ours : float
    allowance : float
        Relative deviation that the sampling of the experiment explains.
    note : str
        What a reader must know: the reading of an ambiguity, or why it does not hold.
    """

    item: str
    metric: str
    printed: str
    ours: float
    allowance: float = 0.0
    note: str = ""

    def row(self, paper: str, table: str) -> Row:
        """Compare, as a result row."""
        printed = float(self.printed)
        half_digit = 0.5 * 10.0 ** -len(self.printed.partition(".")[2])
        band = half_digit / abs(printed) + self.allowance
        relative = self.ours / printed - 1
        return {
            "paper": paper,
            "table": table,
            "item": self.item,
            "metric": self.metric,
            "printed": printed,
            "ours": self.ours,
            "relative_error": relative,
            "band": band,
            "holds": abs(relative) <= band * (1 + 1e-12),
            "note": self.note,
        }


Recompute = Callable[[bool], Iterator[Claim]]
_TABLES: dict[tuple[str, str], Recompute] = {}


def reproduces(paper: str, table: str) -> Callable[[Recompute], Recompute]:
    """Register a function ``quick -> claims`` for one table of one paper."""

    def add(recompute: Recompute) -> Recompute:
        _TABLES[paper, table] = recompute
        return recompute

    return add


def available() -> dict[str, list[str]]:
    """Tables that can be recomputed, by paper; an empty list for a paper with none yet."""
    return {paper: [table for p, table in _TABLES if p == paper] for paper in PAPERS}


def reproduce_rows(
    papers: Sequence[str] | None = None, *, quick: bool = False, progress: Progress | None = None
) -> Iterator[Row]:
    """Recompute the printed numbers of ``papers``.

    Parameters
    ----------
    papers : list of str, optional
        Names out of ``PAPERS``; None for every paper of which something can be recomputed.
    quick : bool
        Fewer samples, wider bands: seconds instead of a minute or two.
    progress : Progress, optional
        Where to say which table is at work.

    Returns
    -------
    iterator of dict
        ``paper, table, item, metric, printed, ours, relative_error, band, holds, note``, as they are ready. Seeds are
        fixed: a second run gives the same numbers.

    Raises
    ------
    SpecError
        For a paper that is unknown, or of which nothing can be recomputed yet; at once, not at the first row.
    """
    known = available()
    wanted = [p for p in known if known[p]] if papers is None else list(dict.fromkeys(papers))
    there = "; ".join(f"{paper} ({', '.join(tables)})" for paper, tables in known.items() if tables)
    for paper in wanted:
        if paper not in PAPERS:
            raise SpecError(f"unknown paper {paper!r}.{nearest(paper, PAPERS)} There is: {there}.")
        if not known[paper]:
            raise SpecError(f"nothing of {paper} ({PAPERS[paper]}) can be recomputed yet. There is: {there}.")
    jobs = [(key, recompute) for key, recompute in _TABLES.items() if key[0] in wanted]
    return _run(sorted(jobs, key=lambda job: wanted.index(job[0][0])), quick, progress or Progress(False))


def _run(jobs: list[tuple[tuple[str, str], Recompute]], quick: bool, progress: Progress) -> Iterator[Row]:
    for done, ((paper, table), recompute) in enumerate(jobs):
        progress.bar("reproducing", done, len(jobs), f"{paper}, {table}")
        for claim in recompute(quick):
            yield claim.row(paper, table)
            progress.bar("reproducing", done, len(jobs), f"{paper}, {table}, {claim.item}")
