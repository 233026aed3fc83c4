"""Figures as SVG: plots with axes, intervals, curves and a column of names; ``drawing.css`` has the colours."""

import math
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from packedkv.cli.page.figures import Axis, Curve, Plot, Point, Style, frontier, style_of


class Box(NamedTuple):
    """Size of a drawing, and its margins."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


BOX = Box(560, 330, 62, 162, 26, 38)
LINE = 14.0
"""Height of a line of the column of names."""
LOG_FROM = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
CORNERS = {"s": (4, 45), "D": (4, 0), "d": (4, 0), "^": (3, -90), "v": (3, 90), "<": (3, 180), ">": (3, 0),
           "p": (5, -90), "h": (6, -90), "H": (6, 0), "8": (8, 22.5)}  # fmt: skip
"""Marker -> corners and the angle of the first; the names are matplotlib's, as in ``figures.STYLES``."""
ARMS = {"*": (5, 0.45, -90), "P": (4, 0.55, 0), "X": (4, 0.55, 45)}


def marker(style: Style, x: float = 0, y: float = 0, size: float = 4.6) -> str:
    """A style's mark at a place."""
    if style.marker in CORNERS:
        n, begin = CORNERS[style.marker]
        points = [(size * 1.1, begin + 360 * i / n) for i in range(n)]
    elif style.marker in ARMS:
        n, inner, begin = ARMS[style.marker]
        points = [(size * 1.25 * (inner if i % 2 else 1), begin + 180 * i / n) for i in range(2 * n)]
    else:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{size * 0.9:.1f}" fill="{style.color}"/>'
    corners = " ".join(
        f"{x + r * math.cos(math.radians(a)):.1f},{y + r * math.sin(math.radians(a)):.1f}" for r, a in points
    )
    return f'<polygon class="mark" points="{corners}" fill="{style.color}"/>'


def ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round numbers in a range.

    >>> ticks(0, 9, False), ticks(0.02, 3, True)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.1, 1.0])
    """
    if log:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1,) if len(exponents) > 3 else (1, 2, 5) if len(exponents) < 3 else (1, 3)
        numbers = [x for e in exponents for m in steps if low <= (x := float(f"{m}e{e}")) <= high]
        return numbers[:: -(-len(numbers) // most)] if numbers else [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(step * (first + i), 10) for i in range(math.floor(high / step + 1e-9) - first + 1)]


Place = Callable[[float], float]
"""From a value to units of the drawing."""


def _scale(axis: Axis, values: Sequence[float], begin: float, end: float, most: int) -> tuple[Place, list[float]]:
    """Return the map of values to ``begin`` .. ``end``, and round numbers for ticks."""
    floor = min((v for v in values if v > 0), default=1.0)
    log = axis.scale == "log" and min(values) >= 0 and max(values) > LOG_FROM * floor
    if axis.from_zero:
        low, high = 0.0, max(values) * 1.06 or 1.0
    elif log:
        low, high = floor / 1.3, max(values) * 1.3
    else:
        margin = 0.07 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 0.05
        low, high = min(values) - margin, max(values) + margin
        low = max(low, 0.0) if min(values) >= 0 else low

    def place(value: float) -> float:
        share = (value - low) / (high - low)
        if log:
            share = (math.log(max(value, low)) - math.log(low)) / (math.log(high) - math.log(low))
        return begin + (end - begin) * share

    return place, ticks(low, high, log, most)


def draw(plot: Plot) -> str:
    """A plot with at least one point or curve."""
    named = len(plot.points) + len(plot.curves)
    box = BOX._replace(height=max(BOX.height, math.ceil(BOX.top + BOX.bottom + LINE * named)))
    width, height, left, right, top, bottom = box
    x_values = [p.x for p in plot.points] + [x for c in plot.curves for x, _ in c.points]
    y_values = [v for p in plot.points for v in (p.y, p.low, p.high) if v is not None]
    y_values += [v for level in plot.levels for v in (level.y, level.low, level.high) if v is not None]
    y_values += [y for c in plot.curves for _, y in c.points]
    at, x_ticks = _scale(plot.x, x_values, left, width - right, 5)
    up, y_ticks = _scale(plot.y, y_values, height - bottom, top, 6)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_description(plot))}">',
        f'<text x="8" y="15" font-weight="600">{escape(plot.title)}: {escape(plot.y.title)}</text><g class="grid">',
    ]
    for y in y_ticks:
        parts.append(
            f'<path d="M{left} {up(y):.1f}H{width - right}"/>'
            f'<text x="{left - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{escape(plot.y.tick(y))}</text>'
        )
    for x in x_ticks:
        parts.append(
            f'<text x="{at(x):.1f}" y="{height - bottom + 15}" text-anchor="middle">{escape(plot.x.tick(x))}</text>'
        )
    parts.append(
        f'</g><text class="soft" x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">'
        f"{escape(plot.x.title)}</text>"
    )
    for level in plot.levels:
        if level.low is not None and level.high is not None:
            parts.append(
                f'<rect class="band" x="{left}" y="{up(level.high):.1f}" width="{width - left - right}" '
                f'height="{max(up(level.low) - up(level.high), 0):.1f}"/>'
            )
        parts.append(
            f'<path class="level" d="M{left} {up(level.y):.1f}H{width - right}"/>'
            f'<text class="soft" x="{width - right}" y="{up(level.y) - 4:.1f}" text-anchor="end">'
            f"{escape(level.name)}</text>"
        )
    parts += [_curve(curve, plot, at, up) for curve in plot.curves]
    parts += [_point(point, plot, at, up) for point in plot.points]
    ends = [(p.spec, p.x, p.y, style_of(p.spec).color) for p in plot.points]
    ends += [(c.name, *c.points[-1], c.style.color) for c in plot.curves]
    parts += _name_column([(name, at(x), up(y), color) for name, x, y, color in ends], box)
    return "".join([*parts, "</svg>"])


def _point(point: Point, plot: Plot, at: Place, up: Place) -> str:
    x, y = at(point.x), up(point.y)
    bar = ends = ""
    if point.low is not None and point.high is not None:
        bar = f'<path class="bar" d="M0 {up(point.low) - y:.1f}V{up(point.high) - y:.1f}"/>'
        ends = f" [{plot.y.text(point.low)}, {plot.y.text(point.high)}]"
    told = f"{point.spec}: {_name(plot.y)} {plot.y.text(point.y)}{ends} at {plot.x.text(point.x)}{plot.x.unit}"
    return (
        f'<g class="dot" data-spec="{escape(point.spec)}" data-y="{point.y!r}" transform="translate({x:.1f} {y:.1f})">'
        f"{bar}{marker(style_of(point.spec))}<title>{escape(told)}</title></g>"
    )


def _curve(curve: Curve, plot: Plot, at: Place, up: Place) -> str:
    path = "L".join(f"{at(x):.1f} {up(y):.1f}" for x, y in curve.points)
    marks = "".join(
        f"<g>{marker(curve.style, at(x), up(y), 4.2)}"
        f"<title>{escape(f'{curve.name}: {plot.y.text(y)} at {plot.x.text(x)}')}</title></g>"
        for x, y in curve.points
    )
    return f'<path d="M{path}" fill="none" stroke="{curve.style.color}" stroke-width="2"/>{marks}'


def _name_column(ends: Sequence[tuple[str, float, float, str]], box: Box) -> list[str]:
    """Names in a column on the right, highest first, as near to their curves as possible, with connecting lines."""
    ordered = sorted(ends, key=lambda end: end[2])
    places: list[float] = []
    for _, _, y, _ in ordered:
        places.append(max(y, places[-1] + LINE if places else box.top))
    lowest = float(box.height - box.bottom)
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], lowest)
        lowest = places[i] - LINE
    column = box.width - box.right + 12
    return [
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{column - 3}" y2="{place:.1f}" stroke="{color}" stroke-width=".5" '
        f'opacity=".6"/><text class="name" x="{column}" y="{place + 4:.1f}" fill="{color}">{escape(name)}</text>'
        for (name, x, y, color), place in zip(ordered, places, strict=True)
    ]


def _name(axis: Axis) -> str:
    return axis.name or axis.title


def _description(plot: Plot) -> str:
    """The drawing in words, for screen readers."""
    if plot.curves:
        return f"{plot.title}: {plot.y.title} over {plot.x.title}; the numbers are in the table"
    y, x, unit = plot.y.text, plot.x.text, plot.x.unit
    front = frontier([(p.x, p.y) for p in plot.points], plot.better)
    best = "; ".join(f"{p.spec}, {y(p.y)} at {x(p.x)}{unit}" for p in (plot.points[i] for i in front))
    return (
        f"{plot.title}: {_name(plot.y)} over {plot.x.title} of {len(plot.points)} presets, {plot.better} is better. "
        f"Frontier: {best}. All numbers are in the tables."
    )


def style_sheet(name: str = "drawing.css") -> str:
    """A style sheet, by default that of drawings."""
    return resources.files("packedkv.cli.page").joinpath(name).read_text(encoding="utf-8")


def standalone(drawn: str) -> str:
    """A drawing as the text of an SVG file: on white, with its own style."""
    begin, inside = drawn.split(">", 1)
    head = begin.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" class="light" ', 1)
    return f'{head}><style>{style_sheet()}</style><rect width="100%" height="100%" fill="#fff"/>{inside}\n'
