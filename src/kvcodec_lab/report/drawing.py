"""SVG: dots over bits or bytes with intervals and a frontier, and strips of cells over layers. Text in, text out.

Drawn 360 units wide, so that letters keep their size on a phone; colours of text and lines come from the page's style.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcodec_lab.report.answer import pareto
from kvcodec_lab.report.plot import style_of

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 270, 52, 20, 14, 38
LETTER = 6.1
"""Width of a letter of a label."""
LOG_FROM = 8.0
"""Where the largest value is this many times the smallest, the axis is logarithmic."""
CORNERS = {"s": (4, 45), "D": (4, 0), "d": (4, 0), "^": (3, -90), "v": (3, 90), "<": (3, 180), ">": (3, 0),
           "p": (5, -90), "h": (6, -90), "H": (6, 0), "8": (8, 22.5)}  # fmt: skip
"""Marker -> corners and the angle of the first; the names are matplotlib's, as in ``plot.STYLES``."""
ARMS = {"*": (5, 0.45, -90), "P": (4, 0.55, 0), "X": (4, 0.55, 45)}


@dataclass(frozen=True)
class Dot:
    """A marker: a spec at (x, y), and the interval of y where there is one."""

    spec: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A level across the drawing, with its interval as a band."""

    name: str
    y: float
    low: float | None = None
    high: float | None = None
    left: bool = False
    """Where its name stands: on the left, or on the right."""


@dataclass(frozen=True)
class Axes:
    """What a drawing says beside its dots."""

    title: str
    x_title: str
    y_title: str
    better: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    log: bool = False
    """Whether the axis of y may be logarithmic: what spans decades, not shares."""
    unit: str = ""
    """Behind a value of x in words."""
    x_tick: Callable[[float], str] = "{:g}".format
    y_tick: Callable[[float], str] = "{:g}".format


def escape(x: object) -> str:
    """Text for HTML and for an attribute."""
    return html.escape(str(x))


def marker(spec: str, x: float = 0, y: float = 0, size: float = 4.6) -> str:
    """The mark of a spec's method at a place."""
    style = style_of(spec)
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
        found = [x for e in exponents for m in steps if low <= (x := float(f"{m}e{e}")) <= high]
        return found[:: -(-len(found) // most)] if found else [low]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(step * (first + i), 10) for i in range(math.floor(high / step + 1e-9) - first + 1)]


def scatter(dots: Sequence[Dot], axes: Axes, lines: Sequence[Line] = (), *, name: str = "") -> str:
    """Dots with intervals, the frontier through those that nothing beats, their names beside it."""
    values = [v for d in dots for v in (d.y, d.low, d.high) if v is not None]
    values += [v for line in lines for v in (line.y, line.low, line.high) if v is not None]
    floor = min((v for v in values if v > 0), default=1.0)
    log = axes.log and min(values) >= 0 and max(values) > LOG_FROM * floor
    if log:
        low, high = floor / 1.3, max(values) * 1.3
    else:
        margin = 0.07 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 0.05
        low, high = min(values) - margin, max(values) + margin
        low = max(low, 0.0) if min(values) >= 0 else low
    most = max(d.x for d in dots) * 1.06

    def at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / most

    def up(y: float) -> float:
        place = (y - low) / (high - low)
        if log:
            place = (math.log(max(y, low)) - math.log(low)) / (math.log(high) - math.log(low))
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * place

    front = pareto([(d.x, d.y) for d in dots], axes.better)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_told(dots, front, axes))}"'
        f' data-better="{axes.better}"{f" data-name={chr(34)}{escape(name)}{chr(34)}" if name else ""}>',
        '<g class="grid">',
    ]
    for y in ticks(low, high, log):
        parts.append(
            f'<path d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{escape(axes.y_tick(y))}</text>'
        )
    parts.append('</g><g class="xaxis">')
    for x in ticks(0, most, False, 5):
        parts.append(
            f'<text x="{at(x):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{escape(axes.x_tick(x))}</text>'
        )
    parts.append(
        f'</g><text class="soft" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(axes.x_title)}</text>"
    )
    for line in lines:
        if line.low is not None and line.high is not None:
            top, bottom = up(line.high), up(line.low)
            parts.append(
                f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" '
                f'height="{max(bottom - top, 0):.1f}"/>'
            )
        place, anchor = (LEFT + 4, "start") if line.left else (WIDTH - RIGHT, "end")
        parts.append(
            f'<path class="level" d="M{LEFT} {up(line.y):.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="soft" x="{place}" y="{up(line.y) + (13 if line.left else -4):.1f}" text-anchor="{anchor}">'
            f"{escape(line.name)}</text>"
        )
    path = "L".join(f"{at(dots[i].x):.1f} {up(dots[i].y):.1f}" for i in front)
    parts.append(f'<path class="front" d="M{path}"/>')
    for dot in dots:
        x, y = at(dot.x), up(dot.y)
        bar = ""
        if dot.low is not None and dot.high is not None:
            bar = f'<path class="bar" d="M0 {up(dot.low) - y:.1f}V{up(dot.high) - y:.1f}"/>'
        parts.append(
            f'<g class="dot" data-spec="{escape(dot.spec)}" data-y="{dot.y!r}" transform="translate({x:.1f} {y:.1f})">'
            f"{bar}{marker(dot.spec)}<title>{escape(_dot_text(dot, axes))}</title></g>"
        )
    parts.append(f'<g class="names">{_names([(dots[i].spec, at(dots[i].x), up(dots[i].y)) for i in front], axes)}</g>')
    return "".join([*parts, "</svg>"])


def _names(front: Sequence[tuple[str, float, float]], axes: Axes) -> str:
    """Names of the frontier's dots on its empty side: nothing is both cheaper and better."""
    below = axes.better == "lower"
    parts: list[str] = []
    last = -99.0 if below else 9999.0
    for spec, x, y in front:
        width = LETTER * len(spec)
        fits = x - 8 - width >= LEFT
        place = y + (4 if fits else 15) if below else y - (-4 if fits else 9)
        place = max(place, last + 12) if below else min(place, last - 12)
        place = min(max(place, TOP - 3), HEIGHT - BOTTOM - 3)
        last = place
        left = x - 8 if fits else LEFT + 3
        anchor = "end" if fits else "start"
        parts.append(f'<text x="{left:.1f}" y="{place:.1f}" text-anchor="{anchor}">{escape(spec)}</text>')
    return "".join(parts)


def _dot_text(dot: Dot, axes: Axes) -> str:
    ends = ""
    if dot.low is not None and dot.high is not None:
        ends = f" [{axes.y_text(dot.low)}, {axes.y_text(dot.high)}]"
    return f"{dot.spec}: {axes.y_title} {axes.y_text(dot.y)}{ends} at {axes.x_text(dot.x)}{axes.unit}"


def _told(dots: Sequence[Dot], front: Sequence[int], axes: Axes) -> str:
    best = "; ".join(f"{dots[i].spec}, {axes.y_text(dots[i].y)} at {axes.x_text(dots[i].x)}{axes.unit}" for i in front)
    return (
        f"{axes.title}: {axes.y_title} over {axes.x_title} of {len(dots)} presets, {axes.better} is better. "
        f"Not beaten by a cheaper one: {best}. All numbers are in the tables."
    )


# -- strips ------------------------------------------------------------------------------------------------------------

STRIP, STRIP_NAME = 16, 15
STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def strips(lines: Mapping[str, Mapping[int, float]], label: str, x_title: str, text: Callable[[float], str]) -> str:
    """A strip per line, a cell per layer; colour is the logarithm of the value, dark for small."""
    layers = sorted({layer for values in lines.values() for layer in values})
    positive = [v for values in lines.values() for v in values.values() if v > 0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    cell = (WIDTH - 2) / len(layers)
    height = len(lines) * (STRIP + STRIP_NAME + 4) + 30
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']
    top = 0
    for name, values in lines.items():
        parts.append(f'<text x="1" y="{top + 11}">{escape(name)}</text>')
        for i, layer in enumerate(layers):
            if layer not in values:
                continue
            share = 0.5
            if high > low:
                share = (math.log(max(values[layer], low)) - math.log(low)) / (math.log(high) - math.log(low))
            parts.append(
                f'<rect x="{1 + i * cell:.2f}" y="{top + STRIP_NAME}" width="{cell - 0.6:.2f}" height="{STRIP}" '
                f'fill="{color(share)}"><title>{escape(f"{name}, layer {layer}: {text(values[layer])}")}</title></rect>'
            )
        top += STRIP + STRIP_NAME + 4
    for i in range(0, len(layers), max(1, -(-len(layers) // 8))):
        parts.append(f'<text x="{1 + (i + 0.5) * cell:.1f}" y="{top + 8}" text-anchor="middle">{layers[i]}</text>')
    parts.append(f'<text class="soft" x="{WIDTH / 2}" y="{top + 24}" text-anchor="middle">{escape(x_title)}</text>')
    return "".join([*parts, "</svg>"])


def color(share: float) -> str:
    """A colour of viridis for 0..1.

    >>> color(0), color(1)
    ('#440154', '#fde725')
    """
    place = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    i = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(STOPS[i], STOPS[i + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)
