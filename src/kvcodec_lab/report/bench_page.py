"""One self-contained page of GPU rows: speed-ups, times, rivals, the papers' studies, how it was timed."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from kvcodec_lab.bench.shapes import SWEEP_BATCHES
from kvcodec_lab.bench.studies import number, studies
from kvcodec_lab.bench.summary import RIVALS, SPINE_NAMES, Line, Point, Table, lines, speed_points, steps_of_a_model
from kvcodec_lab.report.plot import SPEED_TITLES, style_of
from kvcodec_lab.report.presets import STYLE

Row = Mapping[str, Any]
MORE_STYLE = """
table { font-size: .9rem; } th, td { padding: .35rem .45rem; }
.drawings { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
th { white-space: normal; vertical-align: bottom; }
td.why { text-align: left; color: var(--soft); white-space: normal; min-width: 8rem; }
svg text { font: 11px system-ui, sans-serif; }
"""
FLOOR = (
    "Beside a speed-up microseconds, and in brackets the time that reading all bytes of a step at 4.3 TB/s takes, in "
    "percent of them."
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
    """Return the page as one text; every word from a row is escaped."""
    table = Table(rows)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>kvcodec: kernels</title><style>{STYLE}{MORE_STYLE}</style></head><body>",
        "<h1>Attention over packed caches on a GPU</h1>",
        "<h2>Decode: times as fast as the fastest 16-bit attention</h2>",
        f"<p>{FLOOR}</p>",
        _decode(lines(rows)),
        _drawings(speed_points(rows, SPINE_NAMES)),
        "<h2>Break-even context</h2>",
        "<p>Tokens per sequence from which a preset is faster than 16-bit attention at every longer measured length; "
        "32 query heads, 8 KV heads, head_dim 128, cold.</p>",
        _break_evens(lines(rows)),
        "<h2>Encode: K and V of 64k tokens, 4 KV heads</h2>",
        _encode(table),
        "<h2>Rivals</h2>",
        _rivals(table),
    ]
    for study in studies(rows):
        parts += [f"<h2>{_text(study.title)}</h2>", f"<p>{_text(study.source)}. {_text(study.note)}</p>"]
        parts.append(grid(study.headings, [[(cell, "") for cell in line] for line in study.lines]))
    parts += [_generate(rows), "<h2>How it was measured</h2>", f"<p>{METHOD}</p>", _machines(rows), "</body></html>"]
    return "\n".join(p for p in parts if p) + "\n"


def _text(x: Any) -> str:
    return html.escape(str(x))


def grid(headings: Sequence[str], cells: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Return a table; a cell is its text and its class."""
    head = "".join(f"<th>{_text(h)}</th>" for h in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td{f' class={mark}' if mark else ''}>{_text(x)}</td>" for x, mark in line) + "</tr>"
        for line in cells
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _decode(found: Sequence[Line]) -> str:
    if not found:
        return "<p>Not measured yet.</p>"
    headings = ["preset", "bits"]
    for shape in SPINE_NAMES:
        headings += [SPEED_TITLES[shape], "us (floor)"]
    cells = []
    for line in found:
        row = [(line.spec, ""), (number(line.bits, ".2f"), "")]
        for shape in SPINE_NAMES:
            gain, us = line.speedups[shape], line.microseconds[shape]
            row.append((f"{gain:.2f}x" if gain is not None else "–", ""))
            row.append(("–" if us is None else f"{us:.1f} ({_percent(line.shares[shape])})", ""))
        cells.append([*row, (line.status, "why")])
    return _with_reasons(headings, cells)


def _with_reasons(headings: list[str], cells: list[list[tuple[str, str]]]) -> str:
    """Return a table whose last column says what was not timed and why; without it where everything was."""
    if any(row[-1][0] for row in cells):
        return grid([*headings, "not timed because"], cells)
    return grid(headings, [row[:-1] for row in cells])


def _percent(x: float | None) -> str:
    return "–" if x is None else f"{100 * x:.0f} %"


def _break_evens(found: Sequence[Line]) -> str:
    kept = [line for line in found if any(line.break_evens.values())]
    if not kept:
        return "<p>Not measured yet.</p>"
    headings = ["preset", *(f"{b} sequence{'s' * (b > 1)}" for b in SWEEP_BATCHES)]
    return grid(headings, [[(x.spec, ""), *((str(x.break_evens[b] or "–"), "") for b in SWEEP_BATCHES)] for x in kept])


def _encode(table: Table) -> str:
    cells = []
    for spec in table.specs("encode_us"):
        row = table.row(spec, "encode_us", "llm64k")
        if row is None:
            continue
        us = table.median(spec, "encode_us", "llm64k")
        floor = table.median(spec, "encode_roofline_us", "llm64k")
        times = None if us is None or not floor else us / floor
        cells.append([
            (spec, ""), (number(us), ""), (number(floor), ""), (number(times), ""), (str(row.get("status", "")), "why"),
        ])  # fmt: skip
    headings = ["preset", "us", "byte floor", "times the floor"]
    return _with_reasons(headings, cells) if cells else "<p>Not measured yet.</p>"


def _rivals(table: Table) -> str:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table.rows:
        if row["spec"] in RIVALS and row["metric"] == "decode_us_cold" and row["shape"] in SPINE_NAMES:
            found.setdefault((str(row.get("backend")), str(row.get("form"))), {})[row["shape"]] = row
    if not found:
        return "<p>Not measured yet.</p>"
    cells = []
    for (backend, form), rows in found.items():
        any_row = next(iter(rows.values()))
        why = dict.fromkeys(str(r["status"]) for r in rows.values() if r.get("values") is None)
        times = [number(rows[s]["values"]["p50"]) if s in rows and rows[s].get("values") else "–" for s in SPINE_NAMES]
        bits = number(any_row.get("effective_bits"), "g")
        cells.append([(f"{backend}, {form}", ""), (bits, ""), *((x, "") for x in times), ("; ".join(why), "why")])
    return _with_reasons(["microseconds, cold", "bits", *(SPEED_TITLES[s] for s in SPINE_NAMES)], cells)


def _generate(rows: Sequence[Row]) -> str:
    found = steps_of_a_model(rows)
    if not found.lines:
        return ""
    told = (
        "Milliseconds per token of a Qwen3-8B-shaped model with random weights, 32k tokens before it, and the least "
        "peak memory beside the weights. Caches were filled, not computed: the peak is that of a decode step."
    )
    lines = [[(cell, "") for cell in line] for line in found.lines]
    return f"<h2>A whole model's step</h2>\n<p>{told}</p>\n{grid(found.headings, lines)}"


def _machines(rows: Sequence[Row]) -> str:
    runs: dict[str, str] = {}
    for row in rows:
        versions = ", ".join(f"{k} {v}" for k, v in (row.get("versions") or {}).items())
        runs[str(row.get("run"))] = f"{row.get('gpu')}; commit {row.get('commit')}; seed {row.get('seed')}; {versions}"
    items = "\n".join(f"<dt>{_text(run)}</dt><dd>{_text(about)}</dd>" for run, about in runs.items())
    return f"<dl>\n{items}\n</dl>"


# -- drawings ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, NAMES, LINE = 560, 370, 42, 38, 26, 170, 12.5


def _drawings(points: Sequence[Point]) -> str:
    shapes = dict.fromkeys(p.shape for p in points)
    most = max((p.bits for p in points), default=0.0)
    drawn = [drawing([p for p in points if p.shape == shape], SPEED_TITLES.get(shape, shape), most) for shape in shapes]
    return f'<figure class="drawings">{"".join(drawn)}</figure>' if drawn else ""


def drawing(points: Sequence[Point], title: str, bits: float) -> str:
    """Speed-up over effective bits, up to ``bits``, as SVG: a dot per preset, names in a column, 16-bit attention."""
    most_bits = bits * 1.15
    most = max(*(p.speedup for p in points), 1.0) * 1.12

    def x(bits: float) -> float:
        return LEFT + (WIDTH - LEFT - NAMES) * bits / most_bits

    def y(gain: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * gain / most

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(title)}: the numbers are in the table">',
        f'<text x="{LEFT}" y="15" font-weight="600">{_text(title)}</text>',
        f'<path d="M{LEFT} {y(1):.1f}H{WIDTH - NAMES}" stroke="#4d4d4d" stroke-dasharray="4 3"/>',
    ]
    for gain in range(int(most) + 1):
        parts.append(f'<text x="{LEFT - 8}" y="{y(gain) + 4:.1f}" text-anchor="end">{gain}x</text>')
    for bits in range(0, int(most_bits) + 1, 1 if most_bits < 9 else 2):
        parts.append(f'<text x="{x(bits):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{bits}</text>')
    parts.append(f'<text x="{x(most_bits / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">effective bits</text>')
    ordered = sorted(points, key=lambda p: -p.speedup)
    labels: list[float] = []
    for point in ordered:  # below each other, as near to their dots as that allows
        labels.append(max(y(point.speedup), labels[-1] + LINE if labels else TOP))
    low = HEIGHT - BOTTOM + 0.0
    for i in range(len(labels) - 1, -1, -1):
        labels[i] = min(labels[i], low)
        low = labels[i] - LINE
    column = WIDTH - NAMES + 14
    for point, label in zip(ordered, labels, strict=True):
        color, at, height = style_of(point.spec).color, x(point.bits), y(point.speedup)
        parts.append(
            f'<line x1="{at:.1f}" y1="{height:.1f}" x2="{column - 3}" y2="{label:.1f}" stroke="{color}" '
            f'stroke-width=".5" opacity=".6"/><circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{color}">'
            f"<title>{_text(point.spec)}: {point.speedup:.2f}x at {point.bits:.2f} bits</title></circle>"
            f'<text class="name" x="{column}" y="{label + 4:.1f}" fill="{color}">{_text(point.spec)}</text>'
        )
    return "".join([*parts, "</svg>"])
