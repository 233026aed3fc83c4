"""HQMQ and OCTOPUS on the same family of models, smaller: printed rows of Qwen2.5-7B beside a published evaluation.

The papers judged Qwen2.5-7B; the published run ``RUN`` is of Qwen2.5-Coder-1.5B-Instruct, with its weights in 4 bit, on
WikiText-2 in windows of 2,048 tokens. Nothing is run here: rows come from the run's result files, which a checkout of
the repository has and an installed package has not. Perplexities are compared as multiples of the uncompressed
model's, and held to bounds: what collapses must collapse, what holds may lose no more than the paper prints (OCTOPUS:
twice its rise). Then the order of all rows.

Med3 has no fixed size in the paper and ``slots`` places a token here; ``slots=8`` has room for all outliers of this
model's keys, ``slots=2`` has not (docs/key-biases.md).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kvcodec.cli.page.rows import UNCOMPRESSED, Results, read_folder
from kvcodec_lab.report.ranks import spearman
from kvcodec_lab.reproduce.claims import Claim, cannot, reproduces

RUN = Path("benchmarks/results/eval/qwen2.5-coder-1.5b")
FOLDER = Path(__file__).resolve().parents[3] / RUN
FAMILY = "same family, 1.5B"
COLLAPSED = 10.0
"""Times the uncompressed perplexity from which a row counts as collapsed."""
ORDERED = 0.8
"""Spearman correlation from which the printed order holds."""


class Printed(NamedTuple):
    """A printed row of Qwen2.5-7B and the spec that stands for it."""

    spec: str
    perplexity: str
    collapses: bool


HQMQ_BASE = 7.59
HQMQ = {
    "naive int4": Printed("int-4", "17661", True),
    "naive int3": Printed("int-3", "25411", True),
    "naive int4 + Med3": Printed("int-4:outliers=3,slots=8", "10668", True),
    "HQMQ s24_r6": Printed("hqmq-s24_r6", "197.0", True),
    "HQMQ s96_r6": Printed("hqmq-s96_r6", "98.4", True),
    "HQMQ s192_r6": Printed("hqmq-s192_r6", "109.0", True),
    "HQMQ s24_r6 + Med3": Printed("hqmq-s24_r6:outliers=3,slots=8", "9.69", False),
    "HQMQ s96_r6 + Med3": Printed("hqmq-s96_r6:outliers=3,slots=8", "9.03", False),
    "HQMQ s192_r6 + Med3": Printed("hqmq-s192_r6:outliers=3,slots=8", "8.83", False),
    "HQMQ s192_r6 + Med5": Printed("hqmq-s192_r6:outliers=5,slots=8", "9.259", False),
    "HQMQ s192_r6 + Med3, 2 slots a token": Printed("hqmq-s192_r6:outliers=3", "8.83", False),
    "HQMQ s24_r6 + Med3, 2 slots a token": Printed("hqmq-s24_r6:outliers=3", "9.69", False),
}
OCTOPUS_BASE = 10.033
OCTOPUS = {
    "OCTOPUS b=4": Printed("octopus-4", "10.306", False),
    "OCTOPUS-QJL b=4": Printed("octopus-qjl-4", "10.306", False),
    "OCTOPUS b=3": Printed("octopus-3", "10.753", False),
    "OCTOPUS-QJL b=3": Printed("octopus-qjl-3", "10.754", False),
    "OCTOPUS b=2": Printed("octopus-2", "13.517", False),
    "OCTOPUS-QJL b=2": Printed("octopus-qjl-2", "13.511", False),
}
UNPROTECTED = ("turboquant-4", "turboquant-3", "turboquant-2", "turboquant-qjl-3", "polarquant-4", "polarquant-3",
               "polarquant-2")  # fmt: skip
"""Rotated codecs without the dense keys of the outer layers, which the paper says diverge above ``DIVERGED``."""
DIVERGED = 1000.0
RECALL = {"octopus-4": "1.00", "octopus-3": "1.00", "octopus-2": "0.81"}
"""Mean recall over the lengths of OCTOPUS's Table 8, to two digits; 16 bit has 1.00."""
KEEPS = 0.5
"""Share of the 16-bit recall from which 2 bits have not collapsed."""


def hqmq_claims(results: Results) -> Iterator[Claim]:
    """HQMQ's Tables 2 and 18 as multiples of the uncompressed perplexity."""
    yield from _perplexities(results, HQMQ, HQMQ_BASE, 1.0)


def octopus_claims(results: Results) -> Iterator[Claim]:
    """OCTOPUS's Table 2, what diverges without dense outer layers, and needles."""
    yield from _perplexities(results, OCTOPUS, OCTOPUS_BASE, 2.0)
    for spec in UNPROTECTED:
        if (value := _value(results, "perplexity", "perplexity", spec)) is not None:
            note = f"Sec. 4.2: every rotated codec diverges to more than {DIVERGED:,.0f} without dense outer layers"
            yield Claim(f"{spec}, no layer dense", "perplexity", f"{DIVERGED:.0f}", value, 0.0, note, least=DIVERGED)
    base = _value(results, "needle", "recall", UNCOMPRESSED)
    for spec, printed in RECALL.items():
        row = results.row("needle", "recall", spec)
        if not base or row is None or row["value"] is None:
            continue
        share, high = row["value"] / base, row["difference_high"]
        if spec == "octopus-2":
            least, why = KEEPS, f"not collapsed: at least {KEEPS:g} of the 16-bit model's"
        else:  # as often as 16 bit: the paired interval of the difference reaches 0
            least, why = (share if high is not None and high >= 0 else 1.0), "no less often than the 16-bit model"
        yield Claim(
            spec, "needle recall / 16 bit", printed, share, 0.0, f"{why}; lengths of the run's own", least=least
        )


def _perplexities(results: Results, printed: Mapping[str, Printed], base: float, rise: float) -> Iterator[Claim]:
    """Each row's multiple of the uncompressed perplexity, and the order of all rows."""
    uncompressed = _value(results, "perplexity", "perplexity", UNCOMPRESSED)
    if not uncompressed:
        return
    pairs = []
    for item, row in printed.items():
        value = _value(results, "perplexity", "perplexity", row.spec)
        if value is None:
            continue
        ours, theirs = value / uncompressed, float(row.perplexity) / base
        text = f"{theirs:.{max(3 - math.floor(math.log10(theirs)), 0)}f}"
        note = f"`{row.spec}`: {value:,.2f} beside {uncompressed:.2f}; printed {row.perplexity} beside {base:g}; "
        if row.collapses:
            note += f"collapsed is {COLLAPSED:g} times and more"
            yield Claim(item, "perplexity / uncompressed", text, ours, 0.0, note, least=COLLAPSED)
        else:
            most = 1 + rise * (theirs - 1)
            note += f"holds up to {most:.3f}"
            yield Claim(item, "perplexity / uncompressed", text, ours, 0.0, note, most=most)
        pairs.append((theirs, ours))
    if len(pairs) > 2:
        order = spearman(*zip(*pairs, strict=True))
        note = f"printed and ours, {len(pairs)} rows; holds from {ORDERED:g}"
        yield Claim("order of these rows", "Spearman", "1.00", order, 0.0, note, least=ORDERED)


def _value(results: Results, task: str, metric: str, spec: str) -> float | None:
    row = results.row(task, metric, spec)
    return None if row is None else row["value"]


if FOLDER.is_dir():

    @reproduces("hqmq", f"Tables 2, 18: {FAMILY}")
    def hqmq_1_5b(quick: bool) -> Iterator[Claim]:
        """Read the published run; nothing is measured."""
        yield from hqmq_claims(read_folder(FOLDER))

    @reproduces("octopus", f"Tables 2, 8: {FAMILY}")
    def octopus_1_5b(quick: bool) -> Iterator[Claim]:
        """Read the published run; nothing is measured."""
        yield from octopus_claims(read_folder(FOLDER))

else:
    for paper, tables in (("hqmq", "Tables 2, 18"), ("octopus", "Tables 2, 8")):
        cannot(
            paper, f"{tables}: {FAMILY}", f"needs the published run {RUN.as_posix()} of a checkout of the repository"
        )
