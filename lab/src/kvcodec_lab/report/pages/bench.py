"""The page of ``kvcodec bench``: speed-ups, times, rivals, the papers' studies of GPU rows, and how they were timed."""

from collections.abc import Sequence
from typing import Any

from kvcodec.cli.page import figures, html, svg
from kvcodec.cli.page.figures import SPEED_TITLES
from kvcodec.cli.page.html import Cell, Section
from kvcodec.cli.page.rows import runs_of
from kvcodec.cli.page.words import DASH
from kvcodec_lab.bench.shapes import SWEEP_BATCHES
from kvcodec_lab.bench.studies import number, studies
from kvcodec_lab.bench.summary import RIVALS, SPINE_NAMES, Line, Row, Table, lines, speed_points, steps_of_a_model

NOTHING = html.paragraph("Not measured yet.")
FLOOR = (
    "Beside a speed-up microseconds, and in brackets the time that reading all bytes of a step at 4.3 TB/s takes, in "
    "percent of them."
)
BREAK_EVEN = (
    "Tokens per sequence from which a preset is faster than 16-bit attention at every longer measured length; 32 query "
    "heads, 8 KV heads, head_dim 128, cold."
)
STEP = (
    "Milliseconds per token of a Qwen3-8B-shaped model with random weights, 32k tokens before it, and the least "
    "peak memory beside the weights. Caches were filled, not computed: the peak is that of a decode step."
)
METHOD = (
    "One layer, one step, in a CUDA graph between two events; bf16 queries and output; pages of 64 tokens in random "
    "order behind a block table. Cold: 512 MB were written before each replay, so the L2 holds dirty lines whose "
    "write-back the call pays for; clean: 512 MB were read; warm: several calls in one graph. Medians; p20 and p80 are "
    "in the rows. A preset is timed as it is used, its sink and window among the tokens. Every token is another one: "
    "Gaussian values, on which speed does not depend. Before timing and at the size that is timed, the error against "
    "float64 attention over the decoded K and V is at most 1.5 times that of bf16 SDPA over them, for queries under "
    "which nearly all tokens count as for those under which a few do. (Rows of runs before 2026-11-23: twice, over "
    "copies of 64 pages per head, with queries as drawn.)"
)


def page_html(rows: Sequence[Row]) -> str:
    """Return the page as one text."""
    table, found = Table(rows), lines(rows)
    drawn = [svg.draw(plot) for plot in figures.speed(speed_points(rows, SPINE_NAMES))]
    steps = steps_of_a_model(rows)
    sections: list[Section | str] = [
        Section(
            "Decode: times as fast as the fastest 16-bit attention",
            html.paragraph(FLOOR) + _decode(found) + html.drawings(drawn),
        ),
        Section("Break-even context", html.paragraph(BREAK_EVEN) + _break_evens(found)),
        Section("Encode: K and V of 64k tokens, 4 KV heads", _encode(table)),
        Section("Rivals", _rivals(table)),
    ]
    for study in studies(rows):
        told = html.paragraph(f"{study.source}. {study.note}")
        sections.append(Section(study.title, told + html.table(study.headings, study.lines, name=study.title)))
    if steps.lines:
        told = html.paragraph(STEP)
        sections.append(Section("A whole model's step", told + html.table(steps.headings, steps.lines, name="steps")))
    measured = html.paragraph(METHOD) + html.definitions(runs_of(rows).items())
    sections.append(Section("How it was measured", measured))
    return html.page("Attention over packed caches on a GPU", sections)


def _with_reasons(name: str, headings: Sequence[str], cells: Sequence[tuple[list[str], str]]) -> str:
    """A table; beside a line why it was not timed, if any was not."""
    if not cells:
        return NOTHING
    if not any(why for _, why in cells):
        return html.table(headings, [line for line, _ in cells], name=name)
    told = [[*map(Cell, line), Cell(why, kind="why")] for line, why in cells]
    return html.table([*headings, "not timed because"], told, name=name)


def _decode(found: Sequence[Line]) -> str:
    headings = ["preset", "bits"]
    for shape in SPINE_NAMES:
        headings += [SPEED_TITLES[shape], "us (floor)"]
    cells = []
    for line in found:
        row = [line.spec, number(line.bits, ".2f")]
        for shape in SPINE_NAMES:
            gain, us, share = line.speedups[shape], line.microseconds[shape], line.shares[shape]
            floor = DASH if share is None else f"{100 * share:.0f} %"
            row.append(DASH if gain is None else f"{gain:.2f}x")
            row.append(DASH if us is None else f"{us:.1f} ({floor})")
        cells.append((row, line.status))
    return _with_reasons("speed of decode", headings, cells)


def _break_evens(found: Sequence[Line]) -> str:
    kept = [line for line in found if any(line.break_evens.values())]
    headings = ["preset", *(f"{b} sequence{'s' * (b > 1)}" for b in SWEEP_BATCHES)]
    cells = [[line.spec, *(str(line.break_evens[b] or DASH) for b in SWEEP_BATCHES)] for line in kept]
    return html.table(headings, cells, name="break-even context") if kept else NOTHING


def _encode(table: Table) -> str:
    cells = []
    for spec in table.specs("encode_us"):
        row = table.row(spec, "encode_us", "llm64k")
        if row is None:
            continue
        us, floor = (table.median(spec, metric, "llm64k") for metric in ("encode_us", "encode_roofline_us"))
        times = None if us is None or not floor else us / floor
        cells.append(([spec, number(us), number(floor), number(times)], str(row.get("status", ""))))
    return _with_reasons("times of encode", ["preset", "us", "byte floor", "times the floor"], cells)


def _rivals(table: Table) -> str:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table.rows:
        if row["spec"] in RIVALS and row["metric"] == "decode_us_cold" and row["shape"] in SPINE_NAMES:
            found.setdefault((str(row.get("backend")), str(row.get("form"))), {})[row["shape"]] = row
    cells = []
    for (backend, form), rows in found.items():
        why = dict.fromkeys(str(r["status"]) for r in rows.values() if r.get("values") is None)
        times = [number(rows[s]["values"]["p50"]) if s in rows and rows[s].get("values") else DASH for s in SPINE_NAMES]
        bits = number(next(iter(rows.values())).get("effective_bits"), "g")
        cells.append(([f"{backend}, {form}", bits, *times], "; ".join(why)))
    headings = ["microseconds, cold", "bits", *(SPEED_TITLES[shape] for shape in SPINE_NAMES)]
    return _with_reasons("times of rivals", headings, cells)
