"""Figures as data: points, curves, levels and strips, and the colour and marker of each method.

``svg`` draws them on pages, ``pictures`` as image files.
"""

import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvcodec.cli.page.rows import number
from kvcodec.cli.page.words import small_text

Row = Mapping[str, Any]

# -- what a figure is made of ------------------------------------------------------------------------------------------


class Style(NamedTuple):
    """How a method or a curve is drawn; markers have matplotlib's names, dashes are those of SVG."""

    color: str
    marker: str
    dashes: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis.

    Parameters
    ----------
    title : str
        Beside the axis.
    scale : {"linear", "log", "doubling", "named"}
        ``doubling``: logarithmic, and its ticks are the values that occur. ``named``: linear, likewise; of x.
    from_zero : bool
        Whether it begins at 0.
    text, tick : callable
        Format a value in a sentence, and at a tick.
    name, unit : str
        Name of a value in a sentence (default: the title), and its unit.
    """

    title: str
    scale: Literal["linear", "log", "doubling", "named"] = "linear"
    from_zero: bool = False
    text: Callable[[float], str] = "{:g}".format
    tick: Callable[[float], str] = "{:g}".format
    name: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Point:
    """A marker: a spec at (x, y), with the interval of y if known; hollow if its run was interrupted."""

    spec: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    partial: bool = False
    method: str = ""
    """Its entry in a legend of methods."""


@dataclass(frozen=True)
class Curve:
    """Joined points in a style; ``joined`` false: only hollow markers, without a name."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style
    joined: bool = True


@dataclass(frozen=True)
class Level:
    """A horizontal line, with its interval as a band; ``left``: where its name stands."""

    name: str
    y: float
    low: float | None = None
    high: float | None = None
    left: bool = False


@dataclass(frozen=True)
class Plot:
    """One panel.

    Parameters
    ----------
    title : str
    x, y : Axis
    points, curves, levels : sequences
    better : {"lower", "higher"}
    names : {"frontier", "all", "legend"}
        What is labelled: the points of the frontier, every point and curve, or curves in a legend.
    note : str
        What is not drawn, and how to read it.
    key : str
        Identifies the drawing for a script.
    size : (float, float)
        Inches of the panel in a picture.
    """

    title: str
    x: Axis
    y: Axis
    points: Sequence[Point] = ()
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    better: Literal["lower", "higher"] = "lower"
    names: Literal["frontier", "all", "legend"] = "frontier"
    note: str = ""
    key: str = ""
    size: tuple[float, float] = (9.0, 5.4)


@dataclass(frozen=True)
class Strips:
    """A strip per line, a cell per layer; colour is the logarithm of the value, dark for small."""

    title: str
    lines: Mapping[str, Mapping[int, float]]
    x_title: str
    value_title: str
    text: Callable[[float], str] = small_text


def frontier(points: Sequence[tuple[float, float]], better: str) -> list[int]:
    """Indices of the Pareto frontier, smallest x first.

    >>> frontier([(4.5, 0.1), (3.0, 0.5), (5.0, 0.2)], "lower")
    [1, 0]
    """
    sign = 1 if better == "lower" else -1
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not found or sign * points[i][1] < sign * points[found[-1]][1]:
            found.append(i)
    return found


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
DASHES = ("", "6 3", "2 3", "8 3 2 3")
BOUND = Style("#808080", "", "2 3")


def _method_of(spec: str) -> str | None:
    """Method of ``STYLES`` that a spec belongs to: the longest name that fits."""
    base = spec.partition(":")[0]
    return max((name for name in STYLES if base == name or base.startswith(f"{name}-")), key=len, default=None)


def style_of(spec: str) -> Style:
    """Colour and marker of the method that ``spec`` belongs to.

    Examples
    --------
    >>> style_of("kivi-sink-2") == style_of("kivi-4:window=64") == STYLES["kivi"]
    True
    """
    if (method := _method_of(spec)) is not None:
        return STYLES[method]
    base = spec.partition(":")[0]
    family = base.rpartition("-")[0] if base.rpartition("-")[2].isdigit() else base
    code = zlib.crc32(family.encode())
    return Style(SPARE_COLORS[code % len(SPARE_COLORS)], SPARE_MARKERS[code // 7 % len(SPARE_MARKERS)])


def curve_styles(labels: Sequence[str], baselines: Sequence[str] = ()) -> dict[str, Style]:
    """A style for each label, no two alike in colour and dashes.

    Colours are the methods', and ``dense``'s for ``baselines``; other labels take one by position. Dashes distinguish
    labels of one colour; markers go by position.
    """
    found: dict[str, Style] = {}
    for i, label in enumerate(labels):
        method = "dense" if label in baselines else label
        color = style_of(method).color if _method_of(method) else SPARE_COLORS[i % len(SPARE_COLORS)]
        again = sum(color == other.color for other in found.values())
        found[label] = Style(color, CURVE_MARKERS[i % len(CURVE_MARKERS)], DASHES[again % len(DASHES)])
    return found


def _by_place(i: int) -> Style:
    return Style(CURVE_COLORS[i % len(CURVE_COLORS)], CURVE_MARKERS[i % len(CURVE_MARKERS)])


# -- the figures that more than one place draws, or that are pictures alone --------------------------------------------

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
MOST_BITS = 7.0
"""Right end of the rate-distortion figure; what costs more is named under it."""


def points_of(rows: Sequence[Row]) -> tuple[str, list[Point]]:
    """Choose the metric that rows of ``kvcodec compare`` have, and its points; intervals are two standard errors.

    Returns
    -------
    (str, list of Point)
        ``"kl"`` when a compressed row has it, else ``"perplexity"``: its gap to the uncompressed model (a row's
        ``uncompressed`` figures, or the row ``dense``). Rows without the metric or without ``effective_bits`` give no
        point, nor does ``dense``, the reference.
    """
    packed = [r for r in rows if r.get("spec") != "dense"]
    metric = "kl" if any(number(r.get("kl")) is not None for r in packed) else "perplexity"
    dense = next((r for r in rows if r.get("spec") == "dense"), {})
    found: list[Point] = []
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
        found.append(Point(str(row["spec"]), bits, value, low, high, bool(row.get("partial", False))))
    return metric, found


def quality(rows: Sequence[Row], title: str) -> Plot:
    """Quality over effective bits, of rows of ``kvcodec compare``; gaps <= 0 are named in the note."""
    metric, points = points_of(rows)
    x = replace(BITS, title="effective bits per element of K and V (all bytes held x 8 / elements; uncompressed: 16)")
    counts = sorted({int(r["windows"]) for r in rows if isinstance(r.get("windows"), int)})
    note = "n not recorded"
    if counts:
        note = f"n = {' to '.join(str(c) for c in counts[:: len(counts) - 1 or 1])} window{'s' * (counts != [1])}"
    if any(p.low is not None for p in points):
        note += " per point; lines: 2 standard errors over tokens to either side"
    note += "; lower and further left is better"
    if any(p.partial for p in points):
        note += "; hollow: interrupted before the last window"
    if hidden := [p.spec for p in points if p.y <= 0]:
        note += f"\nno gap to show on a log scale: {', '.join(hidden)}"
    drawn = [p for p in points if p.y > 0]
    return Plot(title, x, Axis(METRICS[metric], "log"), drawn, names="all", note=note)


def speed(points: Sequence[Any], *, names: Literal["frontier", "all"] = "all") -> list[Plot]:
    """Speed-up over 16-bit attention over effective bits, a panel per shape.

    Parameters
    ----------
    points : sequence of kvcodec_lab.bench.summary.Point
        ``spec, shape, bits, speedup``.
    names : {"frontier", "all"}
    """
    x = replace(BITS, from_zero=True)
    y = Axis("times as fast as the fastest 16-bit attention, cold L2", from_zero=True, text="{:.2f}x".format,
             tick="{:g}x".format, name="speed")  # fmt: skip
    plots = []
    for shape in dict.fromkeys(p.shape for p in points):
        shown = [Point(p.spec, p.bits, p.speedup) for p in points if p.shape == shape]
        level = Level("fastest 16-bit attention", 1.0)
        title = SPEED_TITLES.get(shape, shape)
        plots.append(Plot(title, x, y, shown, (), [level], "higher", names, size=(4.6, 4.6)))
    return plots


def recomputed(rows: Sequence[Row], title: str, *, x: str, y: str, log_y: bool = True) -> Plot:
    """Recomputed figures beside printed ones, a colour per curve: ours are filled and joined, printed ones hollow.

    Parameters
    ----------
    rows : sequence of mapping
        ``curve, x, ours, printed``.
    title, x, y : str
    log_y : bool
    """
    curves = []
    for i, name in enumerate(dict.fromkeys(str(r["curve"]) for r in rows)):
        here = sorted((r for r in rows if r["curve"] == name), key=lambda r: float(r["x"]))
        curves.append(Curve(name, [(r["x"], r["ours"]) for r in here], _by_place(i)))
        curves.append(Curve("", [(r["x"], r["printed"]) for r in here], _by_place(i), joined=False))
    told = f"{title}\nfilled: ours; hollow: the paper or its reference"
    return Plot(told, Axis(x), Axis(y, "log" if log_y else "linear"), curves=curves, names="legend", size=(6.4, 4.2))


def ablation(models: Mapping[str, Sequence[Row]], title: str) -> Plot:
    """KL of steps that follow one another, a curve per model; what is taken away from the last one is hollow.

    Parameters
    ----------
    models : mapping of str to sequence of mapping
        ``step, kl, effective_bits, windows, window_tokens``; ``"LAST, NAME"``: NAME is taken away from the step LAST.
    title : str
    """
    names = list(dict.fromkeys(str(row["step"]) for rows in models.values() for row in rows))
    taken = [name for name in names if name.partition(", ")[0] in names and ", " in name]
    place = {name: float(i) for i, name in enumerate([*(x for x in names if x not in taken), *taken])}
    curves = []
    for i, (model, rows) in enumerate(models.items()):
        found = sorted((place[str(row["step"])], float(row["kl"]), str(row["step"]) in taken) for row in rows)
        curves.append(Curve(model, [(x, y) for x, y, away in found if not away], _by_place(i)))
        if away := [(x, y) for x, y, away in found if away]:
            curves.append(Curve("", away, _by_place(i), joined=False))
    short = {name: name.partition(", ")[2] if name in taken else name for name in names}
    told = {at: "\n".join(textwrap.wrap(short[name], 14)) for name, at in place.items()}
    last = next((name.partition(", ")[0] for name in taken), "")
    some = next(iter(models.values()))[0]
    note = f"{some['windows']} windows of {some['window_tokens']:,} tokens; lower is better"
    note += f"; hollow: `{last}`, but for this" if taken else ""
    x = Axis("", "named", tick=lambda at: told[at])
    return Plot(title, x, Axis(METRICS["kl"], "log"), curves=curves, names="legend", note=note)


def rate_distortion(rows: Sequence[Row]) -> list[Plot]:
    """Relative MSE over true bits, a panel per source; bars are one standard deviation.

    Parameters
    ----------
    rows : sequence of mapping
        ``spec, method, source, head_dim, bits, relative_mse, spread, samples``; those without numbers are left out.
    """
    x = replace(BITS, title="bits per element: all bytes of an encoded block x 8 / elements")
    y = Axis("relative MSE; bars: one standard deviation", "log")
    drawn = [r for r in rows if r["relative_mse"]]
    plots = []
    for source in dict.fromkeys(str(r["source"]) for r in drawn):
        here = sorted((r for r in drawn if r["source"] == source), key=lambda r: (r["bits"], r["relative_mse"]))
        points = [
            Point(r["spec"], r["bits"], r["relative_mse"], max(r["relative_mse"] - r["spread"], r["relative_mse"] / 10),
                  r["relative_mse"] + r["spread"], method=r["method"])
            for r in here if r["bits"] <= MOST_BITS
        ]  # fmt: skip
        curves = []
        if points and source in ("Gaussian keys", "unit-sphere keys"):
            curves = [Curve("Shannon's bound, 4^-bits", [(p.x, 4.0**-p.x) for p in points], BOUND)]
        left_out = [r["spec"] for r in here if r["bits"] > MOST_BITS]
        note = f"above {MOST_BITS:.0f} bits, not shown: {', '.join(left_out)}" if left_out else ""
        what = "layers" if " of " in source else "seeds"
        title = f"{source} (D = {here[0]['head_dim']}; {here[0]['samples']} {what})"
        plots.append(Plot(title, x, y, points, curves, note=note, size=(5.6, 4.85)))
    return plots


def sensitivity(rows: Sequence[Row], title: str) -> Strips:
    """KL with one role of one layer compressed: a strip per role and spec.

    Parameters
    ----------
    rows : sequence of mapping
        ``layer, role, spec, kl``; one whose KL is not finite has no cell.
    title : str
    """
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        strip = lines.setdefault(f"{row.get('role')}s {row.get('spec')}", {})
        if (value := number(row.get("kl"))) is not None:
            strip[int(row["layer"])] = value
    return Strips(title, lines, "layer that is compressed, everything else dense", "KL (nats per token)")


def outliers(models: Mapping[str, Sequence[Row]]) -> Plot:
    """K_max / K_median over layers (the worst head's), a curve per model.

    Parameters
    ----------
    models : mapping
        Name -> rows with ``layer, worst_head_ratio``.
    """
    curves = [
        Curve(name, [(r["layer"], r["worst_head_ratio"]) for r in rows], _by_place(i))
        for i, (name, rows) in enumerate(models.items())
    ]
    title = "Keys: the largest chunk over the median one, worst head of each layer"
    y = Axis("K_max / K_median of chunks of four channels", "log")
    return Plot(title, Axis("layer"), y, (), curves, [Level("3: an outlier for Med3", 3.0)], names="legend",
                size=(7.0, 4.0))  # fmt: skip
