"""Drawings of the page: a task's quality over bits and over bytes at a context, speed over bits, figures per layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcodec_lab.report.answer import DENSE_BITS, whole_rows
from kvcodec_lab.report.drawing import Axes, Dot, Line, escape, marker, scatter, strips
from kvcodec_lab.report.folder import UNCOMPRESSED, Json, Layers, Results, Row
from kvcodec_lab.report.presets import bytes_text, small_text
from kvcodec_lab.report.words import headline, listed, metric_name, value_text

LOG_METRICS = ("kl", "perplexity")
HINT = "Touch a dot, or point at it, for its numbers."


def plot(drawn: str, title: str, note: str = "") -> str:
    """A drawing with its title, a line for the dot that is pointed at, and what is not in it."""
    below = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<figure class="plot"><h3>{escape(title)}</h3>{drawn}<figcaption><p class="near" data-hint="{HINT}" '
        f'aria-hidden="true">{HINT}</p>{below}</figcaption></figure>'
    )


def legend(specs: Sequence[str]) -> str:
    """Marks of the specs' methods, those that look alike together."""
    kinds: dict[str, list[str]] = {}
    for spec in specs:
        kinds.setdefault(marker(spec), []).append(spec)
    items = "".join(
        f'<li><svg class="swatch" viewBox="-7 -7 14 14" aria-hidden="true">{drawn}</svg>{escape(", ".join(names))}</li>'
        for drawn, names in kinds.items()
    )
    return f'<ul class="legend" aria-label="marks">{items}</ul>'


def over_bits(results: Results) -> str:
    """Each task's main metric over the bits that were measured on it."""
    parts = []
    for task in results.tasks:
        rows = whole_rows(results, task)
        drawn = [r for r in rows if r["value"] is not None and 0 < (r["effective_bits"] or 0) < DENSE_BITS]
        if not drawn:
            continue
        dots = [Dot(r.spec, r["effective_bits"] or 0, r["value"] or 0, r["low"], r["high"]) for r in drawn]
        axes = _axes(drawn[0], "bits measured, everything held counted", "{:.2f}".format, "{:g}".format, " bits")
        parts.append(plot(scatter(dots, axes, _levels(results, task)), axes.title, _left_out(rows, drawn)))
    return f'<div class="plots">{"".join(parts)}</div>'


def over_bytes(results: Results, sizes: Mapping[str, Sequence[float]], at: int) -> str:
    """The same over bytes of one sequence at a context; the script moves the dots to another context."""
    parts = []
    for task in results.tasks:
        rows = whole_rows(results, task)
        held = [r for r in rows if r.spec in sizes and (r["effective_bits"] or 0) < DENSE_BITS]
        drawn = [r for r in held if r["value"] is not None]
        if not drawn:
            continue
        dots = [Dot(r.spec, sizes[r.spec][at], r["value"] or 0, r["low"], r["high"]) for r in drawn]
        axes = _axes(drawn[0], "bytes of one sequence", bytes_text, _bytes_tick)
        parts.append(plot(scatter(dots, axes, _levels(results, task), name=task), axes.title, _left_out(rows, drawn)))
    return f'<div class="plots" id="bytes">{"".join(parts)}</div>'


def _axes(row: Row, x_title: str, x_text: Any, x_tick: Any, unit: str = "") -> Axes:
    metric = row.metric
    title = f"{headline(row.task, metric)}, {row.better} is better"
    log = metric in LOG_METRICS
    y_tick = _short if log else lambda v: value_text(metric, v).replace(".0 %", " %")
    y_title = metric_name(metric)
    return Axes(title, x_title, y_title, row.better, x_text, lambda v: value_text(metric, v), log, unit, x_tick, y_tick)


def _short(value: float) -> str:
    return f"{value:g}" if value < 10_000 else f"{value:.0e}".replace("e+0", "e")


def _bytes_tick(value: float) -> str:
    return bytes_text(value).replace(".0 ", " ")


def _levels(results: Results, task: str) -> list[Line]:
    """The uncompressed model's value with its interval, and what guessing gives."""
    metric = results.metrics(task)[0]
    base = results.row(task, metric, UNCOMPRESSED)
    found = []
    if base is not None and base["value"] is not None and metric != "kl":
        found.append(Line("16 bit", base["value"], base["low"], base["high"]))
    chance = results.chance(task)
    if chance is not None and metric.startswith("accuracy"):
        found.append(Line("guessing", chance, left=True))
    return found


def _left_out(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    inside = {row.spec for row in drawn}
    missing = [row.spec for row in rows if row.spec not in inside]
    return f"Not drawn, because of no finite value or 16 bits: {listed(missing)}." if missing else ""


def speed(rows: Sequence[Json], specs: Sequence[str]) -> tuple[str, str]:
    """Speed-up over 16-bit attention over bits, a drawing per shape of `kvcodec bench decode`, and a note on them."""
    from kvcodec_lab.bench.summary import speed_points
    from kvcodec_lab.report.plot import SPEED_TITLES

    found = speed_points(rows, tuple(SPEED_TITLES))
    mine = [p for p in found if p.spec in specs]
    shown = mine or found
    missing = [s for s in specs if s not in {p.spec for p in shown}]
    parts = []
    for shape in dict.fromkeys(p.shape for p in shown):
        dots = [Dot(p.spec, p.bits, p.speedup) for p in shown if p.shape == shape]
        title = f"{SPEED_TITLES[shape]}: times as fast as 16 bit"
        axes = Axes(title, "bits, everything held counted", "speed", "higher", "{:.2f}".format, "{:.2f}x".format,
                    False, " bits", "{:g}".format, "{:g}x".format)  # fmt: skip
        parts.append(plot(scatter(dots, axes, [Line("fastest 16-bit attention", 1.0)]), title))
    machines = dict.fromkeys(str(r.get("gpu")) for r in rows if r.get("gpu"))
    note = (
        f"One layer's attention for one new token per sequence, measured apart from this run on {listed([*machines])}."
    )
    if not mine:
        note += " None of this run's presets was timed; these are others."
    elif missing:
        note += f" Not timed: {listed(missing, 12)}."
    return f'<div class="plots">{"".join(parts)}</div>' if parts else "", note


def layers(found: Layers) -> str:
    """KL with one role of one layer compressed; K_max / K_median of the keys."""
    parts = []
    lines: dict[str, dict[int, float]] = {}
    for row in found.sensitivity:
        lines.setdefault(f"{row.get('role')}s {row.get('spec')}", {})[row["layer"]] = float(row["kl"])
    if lines:
        worst = max(((v, name, layer) for name, held in lines.items() for layer, v in held.items()))
        label = (
            f"KL with one role of one layer compressed, {len(lines)} lines; the most sensitive: {worst[1]} of layer "
            f"{worst[2]} with {small_text(worst[0])} nats. The numbers are in the table below."
        )
        drawn = strips(lines, label, "layer that is compressed, everything else dense", small_text)
        parts.append(
            f'<figure class="plot strips"><h3>KL with one layer compressed (dark: little; light: much)</h3>{drawn}'
            f"<figcaption>{escape(label)}</figcaption></figure>{_layer_table(lines)}"
        )
    if found.keys:
        ratios = {"K_max / K_median": {r["layer"]: float(r["worst_head_ratio"]) for r in found.keys}}
        top, layer = max((v, k) for k, v in ratios["K_max / K_median"].items())
        label = (
            f"Outlier channels of keys: the largest chunk of four channels over the median one, worst head of each "
            f"layer. Largest: {top:.1f} in layer {layer}. Far above 3, naive integers break."
        )
        drawn = strips(ratios, label, "layer", lambda v: f"{v:.1f}")
        parts.append(
            f'<figure class="plot strips"><h3>Outliers of keys (light: strong)</h3>{drawn}'
            f"<figcaption>{escape(label)}</figcaption></figure>"
        )
    return "".join(parts)


def _layer_table(lines: Mapping[str, Mapping[int, float]]) -> str:
    names = list(lines)
    every = sorted({layer for held in lines.values() for layer in held})
    head = "".join(f'<th scope="col">{escape(n)}</th>' for n in names)
    body = "".join(
        f'<tr><th scope="row">{layer}</th>'
        + "".join(f"<td>{small_text(lines[n][layer]) if layer in lines[n] else '–'}</td>" for n in names)
        + "</tr>"
        for layer in every
    )
    return (
        '<details><summary>KL by layer as a table</summary><div class="scroll" role="region" tabindex="0" '
        f'aria-label="KL by layer"><table><thead><tr><th scope="col">layer</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )
