"""The page of ``packedkv bench``: medians of each part's rows, drawings of speed, and how they were measured."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packedkv.cli.page import figures, html
from packedkv.cli.page.figures import SPEED_TITLES
from packedkv.cli.page.html import Cell, Section
from packedkv.cli.page.rows import Json, read_rows, write_whole
from packedkv.cli.page.words import DASH, bits_text
from packedkv.errors import KVError
from packedkv_lab.bench import PARTS
from packedkv_lab.bench.record import newest
from packedkv_lab.report.results import runs_of

Row = Mapping[str, Any]
NEEDED = ("spec", "metric", "shape")
SPEEDUP = "speedup_vs_bf16_cold"
RIVALS = ("dense", "dense-fp8", "rival")
"""Names of rows of decode attention by other libraries."""
SWEEP_SHAPE = re.compile(r"llama8b_b(\d+)_(\d+)$")
METHOD = (
    "GPU benches: one layer, one step, in a CUDA graph between two events; bf16 queries and output; pages of 64 tokens "
    "in random order behind a block table. Cold: 512 MB were written before each replay, so the L2 holds dirty lines "
    "whose write-back the call pays for; clean: 512 MB were read; warm: several calls in one graph. Medians; p20 and "
    "p80 are in the rows. A preset is timed as it is used, sink and window included. Before timing, the error against "
    "float64 attention over the dequantized K and V is at most 1.5 times that of bf16 SDPA over them. Caches of a "
    "whole model are filled with random values, not computed. The copy rate behind a roofline is 4.3 TB/s (H200)."
)


class SpeedPoint(NamedTuple):
    """Effective bits at a shape, and the speed-up over the fastest 16-bit attention."""

    spec: str
    shape: str
    bits: float
    speedup: float


def speed_points(rows: Sequence[Row]) -> list[SpeedPoint]:
    """Return a point per shape and measured preset."""
    speedups = [row for row in newest([dict(row) for row in rows]) if row["metric"] == SPEEDUP and row.get("values")]
    return [
        SpeedPoint(row["spec"], shape, float(row["effective_bits"]), float(row["values"]["p50"]))
        for shape in SPEED_TITLES
        for row in speedups
        if row["shape"] == shape
    ]


def break_evens(rows: Sequence[Row]) -> dict[str, dict[int, str]]:
    """Return spec -> sequences -> shortest context from which a preset is faster at every longer measured one.

    ``<= 128`` means faster at every measured context from 128 tokens on, ``> 32768`` at none up to 32,768.
    """
    ratios: dict[str, dict[int, dict[int, float]]] = {}
    for row in newest([dict(row) for row in rows]):
        match = SWEEP_SHAPE.match(str(row["shape"]))
        if match and row["metric"] == SPEEDUP and row.get("values"):
            batches = ratios.setdefault(row["spec"], {}).setdefault(int(match[1]), {})
            batches[int(match[2])] = float(row["values"]["p50"])
    evens: dict[str, dict[int, str]] = {}
    for spec, batches_of in ratios.items():
        for batch, speedups in batches_of.items():
            first = None
            for tokens in sorted(speedups, reverse=True):
                if speedups[tokens] <= 1:
                    break
                first = tokens
            text = f"> {max(speedups)}" if first is None else f"<= {first}" if first == min(speedups) else str(first)
            evens.setdefault(spec, {})[batch] = text
    return evens


def page_html(rows: Mapping[str, Sequence[Row]]) -> str:
    """Return the page of rows by part as one text."""
    everything = [row for part in rows.values() for row in part]
    sections = []
    if points := speed_points(everything):
        sections.append(Section("Speed over effective bits", html.drawings(figures.speed(points))))
    if evens := break_evens(everything):
        batches = sorted({batch for contexts in evens.values() for batch in contexts})
        lines = [[spec, *(contexts.get(batch, DASH) for batch in batches)] for spec, contexts in evens.items()]
        heads = ["tokens per sequence", *(f"{b} sequence{'s' * (b > 1)}" for b in batches)]
        sections.append(Section("Break-even context against 16 bit", html.table(heads, lines, name="break-even")))
    for part, here in rows.items():
        sections += [_medians(part, metric, here) for metric in dict.fromkeys(str(row["metric"]) for row in here)]
    measured = html.paragraph(METHOD) + html.definitions(runs_of(everything).items())
    return html.page("packedkv bench", [*sections, Section("How it was measured", measured)])


def _medians(part: str, metric: str, rows: Sequence[Row]) -> Section:
    """A line per cache, a column per shape, medians; the reason where nothing was timed."""
    mine = [row for row in rows if row["metric"] == metric]
    shapes = list(dict.fromkeys(str(row["shape"]) for row in mine))
    lines: dict[str, dict[str, Row]] = {}
    for row in mine:
        more = [str(row[key]) for key in ("backend", "form", "cache") if row.get(key)]
        name = ", ".join([str(row["spec"]), *more]) if row["spec"] in RIVALS or "cache" in row else str(row["spec"])
        lines.setdefault(name, {})[str(row["shape"])] = row
    units = ", ".join(dict.fromkeys(str(row.get("unit")) for row in mine))
    cells: list[list[Cell | str]] = [
        [name, bits_text(next(iter(line.values())).get("effective_bits")), *(_cell(line.get(s)) for s in shapes)]
        for name, line in lines.items()
    ]
    return Section(f"{part}: {metric} ({units})", html.table(["", "bits", *shapes], cells, name=f"{part} {metric}"))


def _cell(row: Row | None) -> Cell:
    if row is None:
        return Cell(DASH)
    return Cell(f"{row['values']['p50']:,.4g}") if row.get("values") else Cell(str(row.get("status")), kind="why")


def write_page(out: Path, say: Callable[[str], None], add: Path | None = None) -> list[Json]:
    """Write JSON and page of a folder's rows and of those that another folder adds; return the rows."""
    folders = [folder for folder in (out, add) if folder is not None]
    rows = {part: part_rows for part in PARTS if (part_rows := _gather(part, folders, say))}
    if not rows:
        raise KVError(f"bench page: {out} holds no rows ({', '.join(f'{part}.jsonl' for part in PARTS)}).")
    write_whole(out / "bench.html", page_html(rows))
    say(f"written: {out / 'bench.html'}")
    return [row for part in rows.values() for row in part]


def _gather(part: str, folders: Sequence[Path], say: Callable[[str], None]) -> list[Json]:
    """Return the newest rows of a part in some folders; the first folder's JSON is written again from them."""
    files = [folder / f"{part}{end}" for folder in folders for end in (".json", ".jsonl")]
    rows = newest(read_rows([path for path in files if path.is_file()], NEEDED))
    if rows and any(path.is_file() for path in files[1:]):
        # one row per line, for readable diffs of committed files
        target = folders[0] / f"{part}.json"
        write_whole(target, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        say(f"written: {target}")
    return rows
