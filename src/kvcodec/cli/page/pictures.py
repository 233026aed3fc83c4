"""Figures as image files, by matplotlib: pictures of the README, the docs and of result folders.

matplotlib is imported when a figure is drawn (extra ``plot``); the Agg canvas needs no display.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcodec.cli.page.figures import STYLES, Axis, Plot, Point, Strips, frontier, style_of
from kvcodec.errors import KVError, UnsupportedError

LABEL_POINTS = 8.0


def write(plots: Sequence[Plot], path: Path) -> None:
    """Draw panels beside each other and write them; the suffix of ``path`` is the format.

    Parameters
    ----------
    plots : sequence of Plot
        One panel has its note below it; several share the size of the first one and the titles of its axes.
    path : Path

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; names the extra.
    KVError
        If the file cannot be written.
    """
    plots = plots or [Plot("", Axis(""), Axis(""))]
    across = 2 if len(plots) in (2, 4) else min(3, len(plots))
    down = -(-len(plots) // across)
    figure, canvas = _figure(plots[0].size[0] * across, plots[0].size[1] * down)
    panels = figure.subplots(down, across, squeeze=False, sharey=all(p.y.scale == "linear" for p in plots))
    for axes in panels.flat[len(plots) :]:
        axes.set_axis_off()
    methods: dict[str, Any] = {}
    drawn = list(zip(plots, panels.flat, strict=False))
    for plot, axes in drawn:
        methods |= _panel(axes, plot)
    for plot, axes in drawn:  # after all points are drawn, because panels may share an axis
        _leave_room(axes, plot)
    if len(plots) == 1:
        panels[0][0].set(xlabel=plots[0].x.title, ylabel=plots[0].y.title)
        figure.supxlabel(plots[0].note, fontsize=7.5, x=0.01, ha="left")
    else:
        for plot, axes in drawn:
            axes.set_xlabel(plot.note, fontsize=7)
        figure.supxlabel(plots[0].x.title, fontsize=9)
        figure.supylabel(plots[0].y.title, fontsize=9)
    if methods:
        figure.legend(methods.values(), methods.keys(), loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    canvas.draw()  # text sizes are known only after drawing
    for plot, axes in drawn:
        if plot.names == "all":
            _place_labels(axes, plot.points, canvas.get_renderer())
    _save(figure, path)


def write_strips(strips: Strips, path: Path) -> None:
    """Draw strips: a line per name, a column per layer, colour the logarithm of the value.

    Raises
    ------
    UnsupportedError, KVError
        As ``write``.
    """
    layers = sorted({layer for held in strips.lines.values() for layer in held}) or [0]
    floor = min((v for held in strips.lines.values() for v in held.values() if v > 0), default=1e-6)
    values = [
        [math.log10(max(held[layer], floor)) if layer in held else math.nan for layer in layers]
        for held in strips.lines.values()
    ]
    figure, _ = _figure(max(5.0, 2.6 + 0.22 * len(layers)), 1.6 + 0.28 * len(strips.lines))
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_yticks(range(len(strips.lines)), list(strips.lines), fontsize=7)
    shown = range(0, len(layers), max(1, len(layers) // 16))
    axes.set_xticks(list(shown), [str(layers[i]) for i in shown], fontsize=7)
    axes.set_xlabel(strips.x_title, fontsize=8)
    axes.set_title(strips.title, fontsize=10, loc="left")
    figure.colorbar(image, ax=axes).set_label(f"log10 of {strips.value_title}", fontsize=8)
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """Figure and canvas, sizes in inches; raises if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "figures need matplotlib, which is not installed; run: pip install 'kvcodec[plot]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, FigureCanvasAgg(figure)


def _save(figure: Any, path: Path) -> None:
    """Write in the format of the suffix."""
    metadata = {"Software": "kvcodec"} if path.suffix == ".png" else {"Creator": "kvcodec", "Date": None}
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise KVError(f"{path} cannot be written ({error.strerror or error}); choose another folder.") from error


def _panel(axes: Any, plot: Plot) -> dict[str, Any]:
    """Draw one panel but for its labels; return a legend's handles by method."""
    log = plot.y.scale == "log"
    methods: dict[str, Any] = {}
    for point in plot.points:
        handle = _mark(axes, point, log, 8.0 if plot.names == "all" else 5.5)
        if point.method:
            methods[point.method] = handle
    for curve in plot.curves:
        color, marker, dashes = curve.style
        x, y = zip(*curve.points, strict=True)
        if not curve.joined:
            axes.plot(x, y, color=color, marker=marker, ms=9, ls="none", mfc="none", mew=0.8)
            continue
        axes.plot(x, y, color=color, marker=marker, ms=4, lw=1, ls=":" if dashes else "-", label=curve.name, zorder=2)
        if plot.names == "frontier":
            axes.annotate(
                curve.name, (x[-1], y[-1]), xytext=(-8, 0), textcoords="offset points", fontsize=6, color=color,
                ha="right",
            )  # fmt: skip
    for level in plot.levels:
        axes.axhline(level.y, color=STYLES["dense"].color, lw=1, ls="--", zorder=1, label=level.name)
    if not plot.points and not plot.curves:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center")
    elif log:
        axes.set_yscale("log")
    if plot.x.scale in ("log", "doubling") and (plot.points or plot.curves):
        axes.set_xscale("log")
    if plot.x.scale in ("doubling", "named"):
        found = sorted({x for c in plot.curves for x, _ in c.points} | {p.x for p in plot.points})
        axes.set_xticks(found, [plot.x.tick(x) for x in found], minor=False)
        axes.minorticks_off()
    if plot.names == "legend":
        axes.legend(fontsize=8, frameon=False)
    elif plot.names == "frontier":
        for i in frontier([(p.x, p.y) for p in plot.points], plot.better):
            point = plot.points[i]
            axes.annotate(
                point.spec, (point.x, point.y), xytext=(-3, -4), textcoords="offset points", fontsize=6, ha="right",
                va="top", color=style_of(point.spec).color,
            )  # fmt: skip
    axes.set_title(plot.title, fontsize=10 if plot.names == "all" else 9, loc="left")
    axes.grid(which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return methods


def _mark(axes: Any, point: Point, log: bool, size: float) -> Any:
    """A point with its interval; hollow where its run was interrupted."""
    style = style_of(point.spec)
    if point.low is not None and point.high is not None:
        low = max(point.low, point.y / 100) if log else point.low
        axes.errorbar(point.x, point.y, [[point.y - low], [point.high - point.y]], fmt="none", ecolor=style.color,
                      elinewidth=1, capsize=2, alpha=0.6, zorder=2)  # fmt: skip
    face = "white" if point.partial else style.color
    return axes.plot(
        point.x, point.y, color=style.color, marker=style.marker, ms=size, ls="", zorder=3, mfc=face, mew=1.4
    )[0]


def _leave_room(axes: Any, plot: Plot) -> None:
    """Leave room for labels around the outermost points."""
    if plot.names == "all" and plot.y.scale == "log" and plot.points:
        left, right = min(p.x for p in plot.points), max(p.x for p in plot.points)
        if plot.x.scale == "log":
            pad = (right / left) ** 0.08
            axes.set_xlim(left / pad, right * pad**2)
        else:
            pad = max(0.08 * (right - left), 0.3)
            axes.set_xlim(left - pad, right + 2 * pad)
        low, high = axes.get_ylim()
        factor = (high / low) ** 0.08
        axes.set_ylim(low / factor, high * factor)
    elif plot.names != "legend":
        axes.margins(x=0.25 if plot.names == "all" else 0.22, y=0.12 if plot.y.from_zero else None)
        if plot.y.from_zero:
            axes.set_ylim(bottom=0)


def _place_labels(axes: Any, points: Sequence[Point], renderer: Any) -> None:
    """Label each point without covering markers, labels or edges; a thin line connects distant labels."""
    pixels = renderer.points_to_pixels(1.0)
    frame = axes.get_window_extent(renderer)
    places = [axes.transData.transform((p.x, p.y)) for p in points]
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
            point.spec, (point.x, point.y), xytext=(left, bottom), textcoords="offset points",
            fontsize=LABEL_POINTS, color=color, zorder=4,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.7} if far else None,
        )  # fmt: skip


Box = tuple[float, float, float, float]


def _free_box(x: float, y: float, width: float, height: float, pixels: float, frame: Any, taken: Sequence[Box]) -> Box:
    """First box around ``(x, y)`` that overlaps nothing taken; rings of 16 directions, nearest first."""
    best: tuple[float, Box] = math.inf, (x, y, x + width, y + height)
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
            best = min(best, (overlap + outside, box))
    return best[1]


def _overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
