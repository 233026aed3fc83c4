"""The page of ``bench serve``: tables and drawings of its rows in one self-contained file, and each drawing as SVG."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvcodec_lab.report.bench_page import MORE_STYLE, grid
from kvcodec_lab.report.plot import CURVE_MARKERS, SPARE_COLORS, STYLES, style_of
from kvcodec_lab.report.presets import STYLE
from kvcodec_lab.serve.tables import BASELINES, Chart, charts, tables

Row = Mapping[str, Any]
METHOD = (
    "Prompts are random token ids; outputs have the length asked for (ignore_eos), greedy. A time begins when a "
    "request is sent; its body was written before. TTFT: until the first event with a token; E2E: until the last; "
    "TPOT: (E2E - TTFT) / (output tokens - 1); throughput: tokens of requests answered whole / time from the first "
    "request to the end of the last, as vLLM's own benchmark has them. Requests that failed are in no time and are "
    "counted beside it. Under pressure the rate per request flatters a small cache: it runs few requests at once while "
    "the others wait; the system's throughput does not. client_cpu in a row is the share of a core that the clients "
    "took: near 1, they were the limit."
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, NAMES, LINE = 560, 330, 62, 38, 26, 150, 14.0
FONT = "font-family='system-ui, sans-serif' font-size='11'"


def page_html(rows: Sequence[Row]) -> str:
    """Return the page as one text; every word from a row is escaped."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>kvcodec: serving</title><style>{STYLE}{MORE_STYLE}</style></head><body>",
        "<h1>Serving under load</h1>",
    ]
    for table in tables(rows):
        cells = [[(cell, "") for cell in line] for line in table.lines]
        headings = table.headings
        if any(table.whys):
            headings = [*headings, "missing because"]
            cells = [[*line, (why, "why")] for line, why in zip(cells, table.whys, strict=True)]
        parts += [f"<h2>{_text(table.title)}</h2>", f"<p>{_text(table.note)}</p>", grid(headings, cells)]
    drawn = "".join(drawing(chart) for chart in charts(rows))
    if drawn:
        parts += ["<h2>Drawings</h2>", f'<figure class="drawings">{drawn}</figure>']
    parts += ["<h2>How it was measured</h2>", f"<p>{METHOD}</p>", _machines(rows), "</body></html>"]
    return "\n".join(parts) + "\n"


def _text(x: Any) -> str:
    return html.escape(str(x))


def _machines(rows: Sequence[Row]) -> str:
    runs: dict[str, str] = {}
    for row in rows:
        versions = ", ".join(f"{k} {v}" for k, v in (row.get("versions") or {}).items())
        runs[str(row.get("run"))] = f"{row.get('gpu')}; commit {row.get('commit')}; seed {row.get('seed')}; {versions}"
    commands = {str(r["spec"]): str(r["command"]) for r in rows if r.get("command")}
    items = [f"<dt>{_text(name)}</dt><dd>{_text(about)}</dd>" for name, about in (*runs.items(), *commands.items())]
    return "<dl>\n" + "\n".join(items) + "\n</dl>"


# -- drawings ----------------------------------------------------------------------------------------------------------


def colors_of(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each label: a method's own colour, others by their place; dashed where one comes again."""
    found: dict[str, tuple[str, str]] = {}
    for i, label in enumerate(labels):
        method = "dense" if label in BASELINES else label
        known = any(method == name or method.startswith(f"{name}-") for name in STYLES)
        color = style_of(method).color if known else SPARE_COLORS[i % len(SPARE_COLORS)]
        again = sum(color == other for other, _ in found.values())
        found[label] = (color, ("", "6 3", "2 3", "8 3 2 3")[again % 4])
    return found


def _steps(most: float) -> list[float]:
    """Round numbers from 0 to at least ``most``, four to seven of them."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _column(ends: Sequence[float], lowest: float) -> list[float]:
    """Places of names below each other, as near to their curves' ends as that allows, none below ``lowest``."""
    places: list[float] = []
    for end in ends:
        places.append(max(end, places[-1] + LINE if places else TOP))
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], lowest)
        lowest = places[i] - LINE
    return places


def drawing(chart: Chart) -> str:
    """Return curves as SVG: y from 0, a marker for each point, names in a column at the curves' ends."""
    points = [point for curve in chart.curves for point in curve.points]
    height = max(HEIGHT, math.ceil(TOP + BOTTOM + LINE * len(chart.curves)))
    steps = _steps(max(*(y for _, y in points), 1e-9))
    ticks = sorted({x for x, _ in points})

    def scale(x: float) -> float:
        return math.log2(x) if chart.doubling else x

    low, high = scale(ticks[0]), scale(ticks[-1])

    def at(x: float) -> float:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return LEFT + 12 + (WIDTH - LEFT - NAMES - 24) * share

    def up(y: float) -> float:
        return height - BOTTOM - (height - BOTTOM - TOP) * y / steps[-1]

    title = f"{_text(chart.title)}: {_text(chart.y)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT} role="img" '
        f'aria-label="{title}; the numbers are in the table">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="15" font-weight="600">{title}</text>',
    ]
    for y in steps:
        parts.append(f'<path d="M{LEFT} {up(y):.1f}H{WIDTH - NAMES}" stroke="#000" opacity=".12"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:,g}</text>')
    for x in ticks:
        parts.append(f'<text x="{at(x):.1f}" y="{height - BOTTOM + 15}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - NAMES) / 2}" y="{height - 6}" text-anchor="middle">{_text(chart.x)}</text>'
    )
    colors = colors_of([curve.label for curve in chart.curves])
    ordered = sorted(chart.curves, key=lambda c: -c.points[-1][1])
    names = _column([up(curve.points[-1][1]) for curve in ordered], height - BOTTOM)
    for i, (curve, label_at) in enumerate(zip(ordered, names, strict=True)):
        color, dashes = colors[curve.label]
        path = " ".join(f"{'L' if k else 'M'}{at(x):.1f} {up(y):.1f}" for k, (x, y) in enumerate(curve.points))
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        for x, y in curve.points:
            parts.append(
                _mark(CURVE_MARKERS[i % len(CURVE_MARKERS)], at(x), up(y), color, f"{curve.label}: {y:,g} at {x:g}")
            )
        end = up(curve.points[-1][1])
        name_x = WIDTH - NAMES + 12
        parts.append(
            f'<line x1="{at(curve.points[-1][0]):.1f}" y1="{end:.1f}" x2="{name_x - 3}" y2="{label_at:.1f}" '
            f'stroke="{color}" stroke-width=".5"/><text x="{name_x}" y="{label_at + 4:.1f}" fill="{color}">'
            f"{_text(curve.label)}</text>"
        )
    return "".join([*parts, "</svg>"])


def _mark(marker: str, x: float, y: float, color: str, told: str) -> str:
    """A marker that differs from curve to curve, so that colour is not all there is."""
    r = 4.0
    if marker == "o":
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{color}">'
    else:
        corners = {
            "s": ((-1, -1), (1, -1), (1, 1), (-1, 1)), "D": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
            "^": ((0, -1.2), (1.2, 1), (-1.2, 1)), "v": ((0, 1.2), (1.2, -1), (-1.2, -1)),
            "<": ((-1.2, 0), (1, -1.2), (1, 1.2)),
        }.get(marker, ((-1.2, -0.4), (1.2, -0.4), (1.2, 0.4), (-1.2, 0.4)))  # fmt: skip
        around = " ".join(f"{x + a * r:.1f},{y + b * r:.1f}" for a, b in corners)
        shape = f'<polygon points="{around}" fill="{color}">'
    return f"{shape}<title>{_text(told)}</title></{shape[1:].split()[0]}>"
