"""Figures as data: points, curves and levels, and the colour and marker of each method. ``svg`` draws them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from packedkv.cli.page.rows import number
from packedkv.cli.page.words import small_text

Row = Mapping[str, Any]

# -- what a figure is made of ------------------------------------------------------------------------------------------


class Style(NamedTuple):
    """Colour and marker of a method or a curve; markers have matplotlib's names."""

    color: str
    marker: str


@dataclass(frozen=True)
class Axis:
    """An axis; ``text`` and ``tick`` format a value in a sentence and at a tick, ``name`` is that of a value in a
    sentence.
    """

    title: str
    scale: Literal["linear", "log"] = "linear"
    from_zero: bool = False
    text: Callable[[float], str] = "{:g}".format
    tick: Callable[[float], str] = "{:g}".format
    name: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Point:
    """A marker: a spec at (x, y), with the interval of y if known."""

    spec: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Curve:
    """Joined points in a style."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style


@dataclass(frozen=True)
class Level:
    """A horizontal line, with its interval as a band."""

    name: str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Plot:
    """One panel; ``note`` says how to read the figure, and what it leaves out."""

    title: str
    x: Axis
    y: Axis
    points: Sequence[Point] = ()
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    better: Literal["lower", "higher"] = "lower"
    note: str = ""


def frontier(points: Sequence[tuple[float, float]], better: str) -> list[int]:
    """Indices of the Pareto frontier, smallest x first.

    >>> frontier([(4.5, 0.1), (3.0, 0.5), (5.0, 0.2)], "lower")
    [1, 0]
    """
    sign = 1 if better == "lower" else -1
    front: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not front or sign * points[i][1] < sign * points[front[-1]][1]:
            front.append(i)
    return front


# -- colours and markers -----------------------------------------------------------------------------------------------

STYLES = {
    "dense": Style("#4d4d4d", "*"),
    "fp8": Style("#56b4e9", "s"),
    "int": Style("#8c8c00", "d"),
    "saw-int4": Style("#d55e00", "D"),
    "kivi": Style("#009e73", "^"),
    "octopus": Style("#0072b2", "o"),
    "hqmq": Style("#cc79a7", "P"),
    "innerq": Style("#e69f00", "v"),
    "ultraquant": Style("#882255", "X"),
    "turboquant": Style("#44aa99", "<"),
    "polarquant": Style("#aa4499", ">"),
    "octopus-qjl": Style("#3d1f99", "*"),
    "turboquant-qjl": Style("#1b6e60", "p"),
}
# for methods that are not in the table (user codecs): chosen by name, the same in every figure
SPARE_COLORS = ("#332288", "#117733", "#aa7744", "#771155", "#225577")
SPARE_MARKERS = ("h", "p", "8", "H")
CURVE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
CURVE_MARKERS = "osD^vP<"


def style_of(spec: str) -> Style:
    """Colour and marker of the method that ``spec`` belongs to: the longest name that fits.

    >>> style_of("kivi-sink-2") == style_of("kivi-4:window=64") == STYLES["kivi"]
    True
    """
    base = spec.partition(":")[0]
    if names := [name for name in STYLES if base == name or base.startswith(f"{name}-")]:
        return STYLES[max(names, key=len)]
    family = base.rpartition("-")[0] if base.rpartition("-")[2].isdigit() else base
    code = zlib.crc32(family.encode())
    return Style(SPARE_COLORS[code % len(SPARE_COLORS)], SPARE_MARKERS[code // 7 % len(SPARE_MARKERS)])


def _by_place(i: int) -> Style:
    return Style(CURVE_COLORS[i % len(CURVE_COLORS)], CURVE_MARKERS[i % len(CURVE_MARKERS)])


# -- the figures of several pages --------------------------------------------------------------------------------------

METRICS = {
    "kl": "KL divergence from the uncompressed model (nats per token)",
    "perplexity": "perplexity above the uncompressed model",
}
BITS = Axis("effective bits (bytes held x 8 / elements)", text="{:.2f}".format, unit=" bits")
SPEED_TITLES = {
    "llm64k": "1 sequence of 64k tokens",
    "b32_8k": "32 sequences of 8k",
    "b32_32k": "32 sequences of 32k",
    "video": "a video model's 32k",
}


def points_of(rows: Sequence[Row]) -> tuple[str, list[Point]]:
    """Choose the metric that rows of ``packedkv compare`` have, and its points; intervals are two standard errors.

    ``"kl"`` when a compressed row has it, else ``"perplexity"``: its gap to the uncompressed model.
    """
    packed = [r for r in rows if r.get("spec") != "dense"]
    metric = "kl" if any(number(r.get("kl")) is not None for r in packed) else "perplexity"
    dense = next((r for r in rows if r.get("spec") == "dense"), {})
    points: list[Point] = []
    for row in packed:
        value, bits = number(row.get(metric)), number(row.get("effective_bits"))
        reference = number((row.get("uncompressed") or dense).get("perplexity"))
        if value is None or bits is None or (metric == "perplexity" and reference is None):
            continue
        error = number(row.get("kl_se")) or 0.0
        if metric == "perplexity":
            error = value * (number(row.get("nll_rise_se")) or 0.0)  # of the paired difference, to first order
            value -= reference or 0.0
        low, high = (value - 2 * error, value + 2 * error) if error else (None, None)
        points.append(Point(str(row["spec"]), bits, value, low, high))
    return metric, points


def quality(rows: Sequence[Row], title: str) -> Plot:
    """Quality over effective bits, of rows of ``packedkv compare``; gaps <= 0 are named in the note."""
    metric, points = points_of(rows)
    x = replace(BITS, title="effective bits per element of K and V (all bytes held x 8 / elements; uncompressed: 16)")
    counts = sorted({int(r["windows"]) for r in rows if isinstance(r.get("windows"), int)})
    note = "n not recorded"
    if counts:
        note = f"n = {' to '.join(str(c) for c in counts[:: len(counts) - 1 or 1])} window{'s' * (counts != [1])}"
    if any(p.low is not None for p in points):
        note += " per point; lines: 2 standard errors over tokens to either side"
    note += "; lower and further left is better"
    if hidden := [p.spec for p in points if p.y <= 0]:
        note += f"; no gap to show on a log scale: {', '.join(hidden)}"
    drawn = [p for p in points if p.y > 0]
    return Plot(title, x, Axis(METRICS[metric], "log"), drawn, note=note)


def speed(points: Sequence[Any]) -> list[Plot]:
    """Speed-up over 16-bit attention over effective bits, a panel per shape; points are
    ``packedkv_lab.report.bench.SpeedPoint``.
    """
    x = replace(BITS, from_zero=True)
    y = Axis("times as fast as the fastest 16-bit attention, cold L2", from_zero=True, text="{:.2f}x".format,
             tick="{:g}x".format, name="speed")  # fmt: skip
    plots = []
    for shape in dict.fromkeys(p.shape for p in points):
        shown = [Point(p.spec, p.bits, p.speedup) for p in points if p.shape == shape]
        level = Level("fastest 16-bit attention", 1.0)
        title = SPEED_TITLES.get(shape, shape)
        plots.append(Plot(title, x, y, shown, (), [level], "higher"))
    return plots


def sensitivity(rows: Sequence[Row], title: str) -> Plot:
    """KL with one role of one layer compressed, a curve per role and spec; a KL that is not finite has no point."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if (value := number(row.get("kl"))) is not None:
            lines.setdefault(f"{row.get('role')}s {row.get('spec')}", []).append((row["layer"], value))
    curves = [Curve(name, sorted(points), _by_place(i)) for i, (name, points) in enumerate(lines.items())]
    x = Axis("layer that is compressed, everything else dense")
    return Plot(title, x, Axis("KL (nats per token)", "log", text=small_text), (), curves)


def outliers(models: Mapping[str, Sequence[Row]]) -> Plot:
    """K_max / K_median over layers (the worst head's), a curve per model: ``models`` has its rows by name."""
    curves = [
        Curve(name, [(r["layer"], r["worst_head_ratio"]) for r in rows], _by_place(i))
        for i, (name, rows) in enumerate(models.items())
    ]
    title = "Keys: the largest chunk over the median one, worst head of each layer"
    y = Axis("K_max / K_median of chunks of four channels", "log")
    return Plot(title, Axis("layer"), y, (), curves, [Level("3: an outlier for Med3", 3.0)])
