"""Figures: quality and distortion over effective bits, recomputed curves. A fixed colour and marker per method.

matplotlib is imported when a figure is drawn (extra ``plot``); the Agg canvas needs no display.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcodec.errors import KVError, UnsupportedError

Row = Mapping[str, Any]


class Style(NamedTuple):
    """How a method is drawn."""

    color: str
    marker: str


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
# for methods that are not in the table (a codec that is one new file): chosen by name, the same in every figure
SPARE_COLORS = ("#332288", "#117733", "#aa7744", "#771155", "#225577")
SPARE_MARKERS = ("h", "p", "8", "H")

METRICS = {
    "kl": "KL divergence from the uncompressed model (nats per token)",
    "perplexity": "perplexity above the uncompressed model",
}
SPEED_TITLES = {
    "llm64k": "1 sequence of 64k tokens",
    "b32_8k": "32 sequences of 8k",
    "b32_32k": "32 sequences of 32k",
    "video": "a video model's 32k",
}
LABEL_POINTS = 8.0
CURVE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
CURVE_MARKERS = "osD^vP<"
MOST_BITS = 7.0
"""Right end of the rate-distortion figure; what costs more is named under it."""


def style_of(spec: str) -> Style:
    """Colour and marker of the method that ``spec`` belongs to.

    Examples
    --------
    >>> style_of("kivi-sink-2") == style_of("kivi-4:window=64") == STYLES["kivi"]
    True
    """
    base = spec.partition(":")[0]
    known = [name for name in STYLES if base == name or base.startswith(f"{name}-")]
    if known:
        return STYLES[max(known, key=len)]
    family = base.rpartition("-")[0] if base.rpartition("-")[2].isdigit() else base
    code = zlib.crc32(family.encode())
    return Style(SPARE_COLORS[code % len(SPARE_COLORS)], SPARE_MARKERS[code // 7 % len(SPARE_MARKERS)])


class Point(NamedTuple):
    """One row in the figure; ``error`` is the standard error of ``value`` over tokens, 0 when the row has none."""

    spec: str
    bits: float
    value: float
    error: float
    partial: bool


def points_of(rows: Sequence[Row]) -> tuple[str, list[Point]]:
    """Choose the metric that the rows have, and its points.

    Returns
    -------
    (str, list of Point)
        ``"kl"`` when a compressed row has it, else ``"perplexity"``: its gap to the uncompressed model (a row's
        ``uncompressed`` figures, or the row ``dense``). Rows without the metric or without ``effective_bits`` give no
        point, nor does ``dense``, which is what they are measured against.
    """
    packed = [r for r in rows if r.get("spec") != "dense"]
    metric = "kl" if any(_number(r, "kl") is not None for r in packed) else "perplexity"
    dense = next((r for r in rows if r.get("spec") == "dense"), {})
    found: list[Point] = []
    for row in packed:
        value, bits = _number(row, metric), _number(row, "effective_bits")
        reference = _number(row.get("uncompressed") or dense, "perplexity")
        if value is None or bits is None or (metric == "perplexity" and reference is None):
            continue
        error = _number(row, "kl_se") or 0.0
        if metric == "perplexity":
            error = value * (_number(row, "nll_rise_se") or 0.0)  # of the paired difference, to first order
            value -= reference or 0.0
        found.append(Point(str(row["spec"]), bits, value, error, bool(row.get("partial", False))))
    return metric, found


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def quality_figure(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw quality (log scale, lower is better) over effective bits and write a PNG.

    Parameters
    ----------
    rows : sequence of mapping
        Result rows; those without ``effective_bits`` or a metric are left out of the figure.
    path : Path
    title : str

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; names the extra.
    KVError
        If the file cannot be written.
    """
    metric, points = points_of(rows)
    figure, canvas = _figure(9.0, 5.4)
    axes = figure.add_subplot()
    shown = [p for p in points if p.value > 0]  # a log scale has no place for a gap of 0 or below
    for point in shown:
        _mark(axes, point)
    if shown:
        axes.set_yscale("log")
        _widen(axes, shown)
    else:
        axes.text(0.5, 0.5, "no compressed row with a gap above 0", transform=axes.transAxes, ha="center")
    axes.set_xlabel("effective bits per element of K and V (all bytes held x 8 / elements; uncompressed: 16)")
    axes.set_ylabel(METRICS[metric])
    axes.set_title(title, fontsize=10, loc="left")
    _calm(axes)
    figure.supxlabel(_caption(rows, points), fontsize=7.5, x=0.01, ha="left")
    if shown:
        canvas.draw()  # text sizes are known only after a drawing
        _place_labels(axes, shown, canvas.get_renderer())
    _save(figure, path)


def curves_figure(rows: Sequence[Row], path: Path, title: str, *, x: str, y: str, log_y: bool = True) -> None:
    """Draw recomputed figures beside printed ones and write a PNG; a colour per curve.

    Parameters
    ----------
    rows : sequence of mapping
        ``curve, x, ours, printed``; ours are filled and joined, what is printed is hollow.
    path : Path
    title, x, y : str
        Labels.
    log_y : bool

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    figure, _ = _figure(6.4, 4.2)
    axes = figure.add_subplot()
    for i, curve in enumerate(dict.fromkeys(str(r["curve"]) for r in rows)):
        here = sorted((r for r in rows if r["curve"] == curve), key=lambda r: float(r["x"]))
        color, marker = CURVE_COLORS[i % len(CURVE_COLORS)], CURVE_MARKERS[i % len(CURVE_MARKERS)]
        at = [r["x"] for r in here]
        axes.plot(at, [r["ours"] for r in here], color=color, marker=marker, ms=4, lw=1, label=curve)
        axes.plot(at, [r["printed"] for r in here], color=color, marker=marker, ms=9, ls="none", mfc="none", mew=0.8)
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(f"{title}\nfilled: ours; hollow: the paper or its reference", fontsize=9, loc="left")
    _calm(axes)
    axes.legend(fontsize=7, frameon=False)
    _save(figure, path)


def rate_distortion_figure(rows: Sequence[Row], path: Path) -> None:
    """Draw relative MSE over true bits, a panel per source; the suffix of ``path`` is the format.

    Parameters
    ----------
    rows : sequence of mapping
        ``spec, method, source, head_dim, bits, relative_mse, spread, samples``; those without numbers are left out.
        Names stand where nothing with fewer bits is as good.
    path : Path

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    drawn = [r for r in rows if r["relative_mse"]]
    sources = list(dict.fromkeys(str(r["source"]) for r in drawn))
    across = 2 if len(sources) in (2, 4) else min(3, max(1, len(sources)))
    down = max(1, -(-len(sources) // across))
    figure, _ = _figure(5.6 * across, 4.4 * down + 0.9)
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.flat[len(sources) :]:
        axes.set_axis_off()
    handles: dict[str, Any] = {}
    for source, axes in zip(sources, panels.flat, strict=False):
        here = sorted((r for r in drawn if r["source"] == source), key=lambda r: (r["bits"], r["relative_mse"]))
        handles |= _source_panel(axes, source, here)
    figure.supxlabel("bits per element: all bytes of an encoded block x 8 / elements", fontsize=9)
    figure.supylabel("relative MSE; bars: one standard deviation", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    _save(figure, path)


def _source_panel(axes: Any, source: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the rows of one source, ascending in bits; return a legend's handles by method."""
    handles: dict[str, Any] = {}
    shown = [r for r in rows if r["bits"] <= MOST_BITS]
    best = math.inf
    for r in shown:
        style = style_of(r["spec"])
        low = min(r["spread"], 0.9 * r["relative_mse"])
        handles[r["method"]] = axes.errorbar(
            r["bits"], r["relative_mse"], [[low], [r["spread"]]], color=style.color, marker=style.marker,
            ms=5.5, lw=1, capsize=2, ls="none", alpha=0.9,
        )  # fmt: skip
        if r["relative_mse"] < best:
            best = r["relative_mse"]
            axes.annotate(
                r["spec"], (r["bits"], best), xytext=(-3, -4), textcoords="offset points", fontsize=6,
                ha="right", va="top", color=style.color,
            )  # fmt: skip
    if shown and source in ("Gaussian keys", "unit-sphere keys"):
        rates = [r["bits"] for r in shown]
        axes.plot(rates, [4.0**-rate for rate in rates], color="0.5", lw=1, ls=":", zorder=0)
        axes.annotate(
            "Shannon's bound, 4^-bits", (rates[-1], 4.0 ** -rates[-1]), xytext=(-8, 0), textcoords="offset points",
            fontsize=6, color="0.4", ha="right",
        )  # fmt: skip
    what = "layers" if " of " in source else "seeds"
    axes.set_title(f"{source} (D = {rows[0]['head_dim']}; {rows[0]['samples']} {what})", fontsize=9, loc="left")
    axes.set_yscale("log")
    axes.margins(x=0.22)
    _calm(axes)
    if left_out := [r["spec"] for r in rows if r["bits"] > MOST_BITS]:
        axes.set_xlabel(f"above {MOST_BITS:.0f} bits, not shown: {', '.join(left_out)}", fontsize=7)
    return handles


def sensitivity_figure(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw KL with one role of one layer compressed: a line per role and spec, a column per layer, colour log KL.

    Parameters
    ----------
    rows : sequence of mapping
        ``layer, role, spec, kl``.
    path : Path
    title : str

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    lines = list(dict.fromkeys((str(r["role"]), str(r["spec"])) for r in rows))
    layers = sorted({int(r["layer"]) for r in rows})
    held = {(str(r["role"]), str(r["spec"]), int(r["layer"])): _number(r, "kl") for r in rows}
    floor = min((v for v in held.values() if v), default=1e-6)
    figure, _ = _figure(max(5.0, 2.6 + 0.22 * len(layers)), 1.6 + 0.28 * len(lines))
    axes = figure.add_subplot()
    values = [[math.log10(max(held.get((*line, layer)) or 0.0, floor, 1e-9)) for layer in layers] for line in lines]
    image = axes.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_yticks(range(len(lines)), [f"{role}s {spec}" for role, spec in lines], fontsize=7)
    shown = range(0, len(layers), max(1, len(layers) // 16))
    axes.set_xticks(list(shown), [str(layers[i]) for i in shown], fontsize=7)
    axes.set_xlabel("layer that is compressed, everything else dense", fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("log10 of KL (nats per token)", fontsize=8)
    _save(figure, path)


def outliers_figure(models: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw K_max / K_median over layers (the worst head's), a curve per model.

    Parameters
    ----------
    models : mapping
        Name -> rows with ``layer, worst_head_ratio``.
    path : Path

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    figure, _ = _figure(7.0, 4.0)
    axes = figure.add_subplot()
    for i, (name, rows) in enumerate(models.items()):
        color, marker = CURVE_COLORS[i % len(CURVE_COLORS)], CURVE_MARKERS[i % len(CURVE_MARKERS)]
        at = [r["layer"] for r in rows]
        axes.plot(at, [r["worst_head_ratio"] for r in rows], color=color, marker=marker, ms=4, lw=1, label=name)
    axes.axhline(3.0, color=STYLES["dense"].color, lw=1, ls="--", zorder=1, label="3: an outlier for Med3")
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("K_max / K_median of chunks of four channels")
    axes.set_title("Keys: the largest chunk over the median one, worst head of each layer", fontsize=10, loc="left")
    _calm(axes)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)


def speed_figure(points: Sequence[Any], path: Path) -> None:
    """Draw speed-up over 16-bit attention over effective bits, a panel per shape, and write a PNG.

    Parameters
    ----------
    points : sequence of kvcodec_lab.bench.summary.Point
        ``spec, shape, bits, speedup``.
    path : Path

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    shapes = list(dict.fromkeys(p.shape for p in points))
    figure, canvas = _figure(4.6 * max(len(shapes), 1), 4.6)
    panels: list[tuple[Any, list[Point]]] = []
    for i, shape in enumerate(shapes):
        axes = figure.add_subplot(1, len(shapes), i + 1, sharey=panels[0][0] if panels else None)
        shown = [Point(p.spec, p.bits, p.speedup, 0.0, False) for p in points if p.shape == shape]
        for point in shown:
            style = style_of(point.spec)
            axes.plot(point.bits, point.value, color=style.color, marker=style.marker, ms=7, ls="none", zorder=3)
        axes.axhline(1.0, color=STYLES["dense"].color, lw=1, ls="--", zorder=1)
        axes.set_title(SPEED_TITLES.get(shape, shape), fontsize=10, loc="left")
        axes.set_xlabel("effective bits (bytes held x 8 / elements)")
        axes.margins(x=0.25, y=0.12)
        _calm(axes)
        panels.append((axes, shown))
    if panels:
        panels[0][0].set_ylabel("times as fast as the fastest 16-bit attention, cold L2")
        panels[0][0].set_ylim(bottom=0)
    canvas.draw()
    for axes, shown in panels:
        _place_labels(axes, shown, canvas.get_renderer())
    _save(figure, path)


def board_figure(panels: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw KL (log scale, lower is better) over effective bits, a panel for each run by its title, and write a PNG.

    Raises
    ------
    UnsupportedError, KVError
        As ``quality_figure``.
    """
    figure, canvas = _figure(8.0 * max(len(panels), 1), 6.4)
    drawn = []
    for i, (title, points) in enumerate(panels.items()):
        drawn.append((figure.add_subplot(1, len(panels), i + 1), points))
        axes = drawn[-1][0]
        for point in points:
            _mark(axes, point)
        axes.set(yscale="log", xlabel="effective bits (bytes held x 8 / elements)", ylabel=METRICS["kl"])
        axes.set_title(title, fontsize=10, loc="left")
        _widen(axes, points)
        _calm(axes)
    canvas.draw()
    for axes, points in drawn:
        _place_labels(axes, points, canvas.get_renderer())
    _save(figure, path)


def _mark(axes: Any, point: Point) -> None:
    """A point with its uncertainty; hollow where it is partial."""
    style = style_of(point.spec)
    ends = [max(point.value - 2 * point.error, point.value / 100), point.value + 2 * point.error]
    axes.plot([point.bits] * 2, ends, color=style.color, lw=1, alpha=0.6, zorder=2)
    face = "white" if point.partial else style.color
    axes.plot(point.bits, point.value, color=style.color, marker=style.marker, ms=8, ls="", zorder=3, mfc=face, mew=1.4)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Figure and canvas, sizes in inches; refuses when matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "figures need matplotlib, which is not installed; run: pip install 'kvcodec[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, FigureCanvasAgg(figure)


def _calm(axes: Any) -> None:
    """A faint grid, no box."""
    axes.grid(which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    """Write in the format of the suffix."""
    metadata = {"Software": "kvcodec"} if path.suffix == ".png" else {"Creator": "kvcodec", "Date": None}
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise KVError(f"{path} cannot be written ({error.strerror or error}); choose another folder.") from error


def _caption(rows: Sequence[Row], points: Sequence[Point]) -> str:
    counts = sorted({int(r["windows"]) for r in rows if isinstance(r.get("windows"), int)})
    text = (
        f"n = {' to '.join(str(c) for c in counts[:: len(counts) - 1 or 1])} window{'s' * (counts != [1])}"
        if counts
        else "n not recorded"
    )
    text += " per point; lines: 2 standard errors over tokens to either side" if any(p.error for p in points) else ""
    text += "; lower and further left is better"
    if any(p.partial for p in points):
        text += "; hollow: interrupted before the last window"
    if hidden := [p.spec for p in points if p.value <= 0]:
        text += f"\nno gap to show on a log scale: {', '.join(hidden)}"
    return text


def _widen(axes: Any, points: Sequence[Point]) -> None:
    """Leave room for labels around the outermost points."""
    bits = [p.bits for p in points]
    pad = max(0.08 * (max(bits) - min(bits)), 0.3)
    axes.set_xlim(min(bits) - pad, max(bits) + 2 * pad)
    low, high = axes.get_ylim()
    factor = (high / low) ** 0.08
    axes.set_ylim(low / factor, high * factor)


def _place_labels(axes: Any, points: Sequence[Point], renderer: Any) -> None:
    """Write each spec beside its point, where it covers no marker, no label and no edge; a thin line when far."""
    pixels = renderer.points_to_pixels(1.0)
    frame = axes.get_window_extent(renderer)
    places = [axes.transData.transform((p.bits, p.value)) for p in points]
    taken = [(x - 6 * pixels, y - 6 * pixels, x + 6 * pixels, y + 6 * pixels) for x, y in places]
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda item: tuple(item[1])):
        probe = axes.text(0, 0, point.spec, fontsize=LABEL_POINTS)
        extent = probe.get_window_extent(renderer).padded(2 * pixels)
        probe.remove()
        box = _free_box(x, y, extent.width, extent.height, pixels, frame, taken)
        taken.append(box)
        left, bottom = (box[0] - x) / pixels + 2, (box[1] - y) / pixels + 2
        far = math.hypot(max(left, 0.0, -left - extent.width / pixels), max(bottom, -bottom, 0.0)) > 16
        color = style_of(point.spec).color
        axes.annotate(
            point.spec, (point.bits, point.value), xytext=(left, bottom), textcoords="offset points",
            fontsize=LABEL_POINTS, color=color, zorder=4,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.7} if far else None,
        )  # fmt: skip


Box = tuple[float, float, float, float]


def _free_box(x: float, y: float, width: float, height: float, pixels: float, frame: Any, taken: Sequence[Box]) -> Box:
    """First box around ``(x, y)`` that overlaps nothing taken; rings of 16 directions, nearest first."""
    best: tuple[float, Box] | None = None
    for ring in range(9, 90, 8):
        for step in range(16):
            angle = 2 * math.pi * step / 16
            cx = x + math.cos(angle) * (ring * pixels + width / 2)
            cy = y + math.sin(angle) * (ring * pixels + height / 2)
            box = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
            overlap = sum(_overlap(box, other) for other in taken)
            outside = width * height - _overlap(box, (frame.x0, frame.y0, frame.x1, frame.y1))
            if overlap + outside < 1e-6:
                return box
            if best is None or overlap + outside < best[0]:
                best = (overlap + outside, box)
    assert best is not None
    return best[1]


def _overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
