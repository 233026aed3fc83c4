"""Drawings of an eval run: quality over bits and over bytes at a context, speed over bits, figures by layer."""

from collections.abc import Callable, Mapping, Sequence

from kvcodec.cli.page import figures, html, svg
from kvcodec.cli.page.figures import SPEED_TITLES, Axis, Level, Plot, Point, Strips
from kvcodec.cli.page.html import escape, paragraph
from kvcodec.cli.page.rows import UNCOMPRESSED, Json, Layers, Results, Row
from kvcodec.cli.page.words import DASH, bytes_text, headline, listed, metric_name, small_text, value_text
from kvcodec_lab.bench.summary import speed_points
from kvcodec_lab.report.answer import DENSE_BITS, whole_rows

LOG_METRICS = ("kl", "perplexity")


def over_bits(results: Results) -> str:
    """Each task's main metric over the bits that were measured on it."""
    x = Axis("bits measured, everything held counted", from_zero=True, text="{:.2f}".format, unit=" bits")
    drawn = _by_task(results, x, lambda row: row["effective_bits"] or None)
    return f'<div class="plots">{drawn}</div>'


def over_bytes(results: Results, sizes: Mapping[str, Sequence[float]], at: int) -> str:
    """The same over bytes of one sequence at a context; the script moves the points to another context."""
    x = Axis("bytes of one sequence", from_zero=True, text=bytes_text, tick=_bytes_tick)
    drawn = _by_task(results, x, lambda row: sizes[row.spec][at] if row.spec in sizes else None, keyed=True)
    return f'<div class="plots" id="bytes">{drawn}</div>'


def _by_task(results: Results, x: Axis, place: Callable[[Row], float | None], *, keyed: bool = False) -> str:
    """Each task's main metric over what ``place`` says of a row; rows of 16 bits in other words are left out."""
    parts = []
    for task in results.tasks:
        rows = whole_rows(results, task)
        points = [
            Point(row.spec, at, row["value"], row["low"], row["high"])
            for row in rows
            if row["value"] is not None and (row["effective_bits"] or 0) < DENSE_BITS
            if (at := place(row)) is not None
        ]
        if not points:
            continue
        metric, better = rows[0].metric, rows[0].better
        title = f"{headline(task, metric)}, {better} is better"
        inside = {point.spec for point in points}
        missing = [row.spec for row in rows if row.spec not in inside]
        note = f"Not drawn, because of no finite value or 16 bits: {listed(missing)}." if missing else ""
        plot = Plot(title, x, _metric_axis(metric), points, (), _levels(results, task), better,
                    key=task if keyed else "")  # fmt: skip
        parts.append(html.touched(svg.draw(plot), title, note))
    return "".join(parts)


def _metric_axis(metric: str) -> Axis:
    def text(value: float) -> str:
        return value_text(metric, value)

    if metric in LOG_METRICS:
        return Axis(metric_name(metric), "log", text=text, tick=_short_tick)
    return Axis(metric_name(metric), text=text, tick=lambda value: text(value).replace(".0 %", " %"))


def _short_tick(value: float) -> str:
    return f"{value:g}" if value < 10_000 else f"{value:.0e}".replace("e+0", "e")


def _bytes_tick(value: float) -> str:
    return bytes_text(value).replace(".0 ", " ")


def _levels(results: Results, task: str) -> list[Level]:
    """The uncompressed model's value with its interval, and what guessing gives."""
    metric = results.metrics(task)[0]
    base = results.row(task, metric, UNCOMPRESSED)
    found = []
    if base is not None and base["value"] is not None and metric != "kl":
        found.append(Level("16 bit", base["value"], base["low"], base["high"]))
    chance = results.chance(task)
    if chance is not None and metric.startswith("accuracy"):
        found.append(Level("guessing", chance, left=True))
    return found


def speed(rows: Sequence[Json], specs: Sequence[str]) -> str:
    """Speed-up over 16-bit attention over bits, a drawing per shape of ``kvcodec bench decode``; empty without any."""
    found = speed_points(rows, tuple(SPEED_TITLES))
    mine = [p for p in found if p.spec in specs]
    shown = mine or found
    if not shown:
        return ""
    missing = [s for s in specs if s not in {p.spec for p in shown}]
    machines = dict.fromkeys(str(r.get("gpu")) for r in rows if r.get("gpu"))
    note = (
        f"One layer's attention for one new token per sequence, measured apart from this run on {listed([*machines])}."
    )
    if not mine:
        note += " None of this run's presets was timed; these are others."
    elif missing:
        note += f" Not timed: {listed(missing, 12)}."
    drawn = [
        html.touched(svg.draw(plot), f"{plot.title}: times as fast as 16 bit")
        for plot in figures.speed(shown, names="frontier")
    ]
    return f'{paragraph(note)}<div class="plots">{"".join(drawn)}</div>'


def layers(found: Layers) -> str:
    """KL with one role of one layer compressed; K_max / K_median of the keys."""
    parts = []
    strips = figures.sensitivity(found.sensitivity, "KL with one layer compressed (dark: little; light: much)")
    if strips.lines:
        worst, name, layer = max((v, name, layer) for name, held in strips.lines.items() for layer, v in held.items())
        label = (
            f"KL with one role of one layer compressed, {len(strips.lines)} lines; the most sensitive: {name} of layer "
            f"{layer} with {small_text(worst)} nats. The numbers are in the table below."
        )
        parts += [_strips(strips, label), _layer_table(strips)]
    if found.keys:
        ratios = {int(r["layer"]): float(r["worst_head_ratio"]) for r in found.keys}
        top, layer = max((ratio, layer) for layer, ratio in ratios.items())
        label = (
            f"Outlier channels of keys: the largest chunk of four channels over the median one, worst head of each "
            f"layer. Largest: {top:.1f} in layer {layer}. Far above 3, naive integers break."
        )
        name = "K_max / K_median"
        strips = Strips("Outliers of keys (light: strong)", {name: ratios}, "layer", name, "{:.1f}".format)
        parts.append(_strips(strips, label))
    return "".join(parts)


def _strips(strips: Strips, label: str) -> str:
    return (
        f'<figure class="plot strips"><h3>{escape(strips.title)}</h3>{svg.draw_strips(strips, label)}'
        f"<figcaption>{escape(label)}</figcaption></figure>"
    )


def _layer_table(strips: Strips) -> str:
    layers = sorted({layer for held in strips.lines.values() for layer in held})
    cells = [
        [str(layer), *(small_text(held[layer]) if layer in held else DASH for held in strips.lines.values())]
        for layer in layers
    ]
    table = html.table(["layer", *strips.lines], cells, name="KL by layer")
    return f"<details><summary>KL by layer as a table</summary>{table}</details>"
