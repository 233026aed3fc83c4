"""The page of ``packedkv eval``: tables and drawings, all numbers from the folder's results.json."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from packedkv.cli.page import figures, html
from packedkv.cli.page.figures import Axis, Level, Plot, Point
from packedkv.cli.page.html import Cell, Head, Section, escape, paragraph, plain
from packedkv.cli.page.rows import UNCOMPRESSED, Json
from packedkv.cli.page.words import (
    DASH,
    about_task,
    bits_text,
    bytes_text,
    change_text,
    headline,
    interval_text,
    listed,
    metric_name,
    small_text,
    spec_name,
    value_text,
)
from packedkv_lab.report.bench import speed_points
from packedkv_lab.report.results import Layers, Results, Row, mapping
from packedkv_lab.report.sizes import CONTEXT, sizes

DENSE_BITS = 15.5
"""From this many measured bits on, windows and unfilled pages make up the cache."""
MOST_ITEMS = 4
"""Items of each task whose answers are shown."""
INTERVALS = (
    "Intervals are 95 %: Wilson's where each item is right or wrong, else by the bootstrap over items, seeded. They do "
    "not cover another text, another model or another seed of the codec. A difference is against the uncompressed "
    "model on the same items, resampled together."
)
BITS = (
    "Bits are bytes: every byte that the cache held (codes, scales, sinks, windows, dense layers) x 8 / elements, "
    "measured in these items. Windows of dense tokens weigh more in short items."
)
PREFILLS = {
    "decoded": "attention read dequantized keys and values of every token, the prompt's own included",
    "exact": "attention read the prompt's exact keys and values while it was stored; only later tokens read the "
    "compressed cache. Scores may look better than those of the compressed cache",
}
PRESET = Head("preset", "`packedkv describe SPEC` says everything about it")


def page_html(
    results: Results,
    *,
    context: int = CONTEXT,
    bench: Sequence[Json] = (),
    layers: Layers | None = None,
    title: str = "",
) -> str:
    """Return the page; bytes are of ``context`` tokens, rows of ``bench decode`` and figures by layer add sections."""
    model = str(mapping(results.about.get("model")).get("name", "a model"))
    drawn = html.drawings([plot for task in results.tasks if (plot := _over_bits(results, task)).points])
    sections = [Section("Quality over true bits", paragraph(BITS) + drawn, "bits")]
    if points := [p for p in speed_points(bench) if p.spec in results.specs]:
        told = "One layer's attention for one new token per sequence, measured apart from this run."
        sections.append(
            Section("Speed over true bits", paragraph(told) + html.drawings(figures.speed(points)), "speed")
        )
    sections.append(Section("All presets", _overview(results, context), "all"))
    sections.append(Section("Task by task", "".join(_task(results, task) for task in results.tasks), "tasks"))
    if layers is not None:
        sections.append(Section("Layer by layer", _layers(layers, model), "layers"))
    sections.append(Section("How it was measured", _how(results), "how"))
    footer = "Written by packedkv report. The numbers are those of the folder's results.json."
    return html.page(title or f"Which KV cache for {model}?", sections, top=_warnings(results), footer=footer)


def _warnings(results: Results) -> str:
    """Limits of the run: unfinished, failed, short items, a changed model."""
    told = []
    whole = [row for row in results.rows if row.group is None]
    short = any(row["planned"] and (row["items"] or 0) < (row["planned"] or 0) for row in whole)
    states = {row.status for row in results.rows}
    if states & {"interrupted", "budget"} or short:
        why = "was interrupted" if "interrupted" in states else "is not complete"
        told.append(f"The run {why}: some numbers cover fewer items than planned. The same packedkv eval continues it.")
    if results.unsummarised:
        told.append(f"{results.unsummarised} further items are finished and not in these numbers.")
    if failed := sorted({row.spec for row in results.rows if row["failed"]}):
        told.append(f"Some items gave no result with {listed(failed)}; they are left out. Remarks say why.")
    if changes := {k: v for k, v in mapping(results.about.get("settings")).items() if k != "prefill" and v is not None}:
        told.append(f"The model was changed before it was measured: {plain(changes)}.")
    if any(row.prefill == "exact" for row in results.rows):
        told.append(f"Prefill was exact: {PREFILLS['exact']}.")
    if dense := listed_dense(whole):
        told.append(f"Items are so short that nearly nothing is compressed: {listed(dense)}.")
    return "".join(paragraph(text, "warn") for text in told)


def listed_dense(rows: Sequence[Row]) -> list[str]:
    """Presets and tasks whose caches stayed at about 16 bits although the layout compresses."""
    return [
        f"{row.spec} on {row.task}"
        for row in rows
        if row.spec != UNCOMPRESSED
        and (row["effective_bits"] or 0) >= DENSE_BITS
        and ((row["key_bits"] or 16) + (row["value_bits"] or 16)) / 2 < DENSE_BITS - 1
    ]


def _over_bits(results: Results, task: str) -> Plot:
    """A task's main metric over the bits measured on it; rows without a value or of 16 bits are left out."""
    metric = results.metrics(task)[0]
    rows = [row for spec in results.specs if (row := results.row(task, metric, spec)) is not None]
    shown = [r for r in rows if r["value"] is not None and (r["effective_bits"] or 99) < DENSE_BITS]
    points = [Point(r.spec, r["effective_bits"] or 0.0, r["value"] or 0.0, r["low"], r["high"]) for r in shown]
    base = results.row(task, metric, UNCOMPRESSED)
    levels = []
    if base is not None and base["value"] is not None and metric != "kl":
        levels.append(Level("16 bit", base["value"], base["low"], base["high"]))
    left_out = [r.spec for r in rows if r not in shown]
    note = f"Not drawn, because of no finite value or 16 bits: {listed(left_out)}." if left_out else ""

    def text(value: float) -> str:
        return value_text(metric, value)

    scale = Axis(metric_name(metric), "log" if metric in ("kl", "perplexity") else "linear", text=text, tick=text)
    x = Axis("bits measured, everything held counted", from_zero=True, text="{:.2f}".format, unit=" bits")
    better = rows[0].better if rows else "lower"
    return Plot(headline(task, metric), x, scale, points, levels=levels, better=better, note=note)


# -- tables ------------------------------------------------------------------------------------------------------------


def _name(spec: str) -> Cell:
    return Cell(spec_name(spec), spec=spec)


def _value(row: Row | None) -> Cell:
    if row is None:
        return Cell(DASH)
    return Cell(value_text(row.metric, row["value"]), interval_text(row.metric, row["low"], row["high"]))


def _change(row: Row) -> Cell:
    """The paired difference; marked where the whole interval is a loss or a gain."""
    if row["difference"] is None:
        return Cell(DASH)
    low, high = row["difference_low"], row["difference_high"]
    text, _, small = change_text(row.metric, row["difference"], low, high).partition(" [")
    kind = ""
    if low is not None and high is not None and (low > 0 or high < 0):
        kind = "good" if (low > 0) == (row.better == "higher") else "bad"
    return Cell(text, f"[{small}" if small else "", kind)


def _overview(results: Results, context: int) -> str:
    """A line per preset: bits, bytes at a context, every task's main metric."""
    nbytes, scaled = sizes(results, context)
    heads = [
        PRESET,
        Head("K bits", "bits of an encoded key element, scales included, from the byte layout"),
        Head("V bits", "the same for values"),
        Head("bits in all", "measured: every byte held x 8 / elements, over all items of the run"),
    ]
    if nbytes:
        heads.append(Head(f"cache, {context:,} tokens", "bytes of one sequence at this context, from byte layouts"))
    heads += [Head(headline(t, results.metrics(t)[0]), about_task(t).is_) for t in results.tasks]
    lines = []
    for spec in (UNCOMPRESSED, *results.specs):
        mine = [row for row in results.rows if row.spec == spec and row.group is None]
        if not mine:
            continue
        cells = [Cell(bits_text(x)) for x in (mine[0]["key_bits"], mine[0]["value_bits"], _bits(mine))]
        if nbytes:
            cells.append(Cell(bytes_text(nbytes[spec]) if spec in nbytes else DASH))
        cells += [_value(results.row(t, results.metrics(t)[0], spec)) for t in results.tasks]
        lines.append([_name(spec), *cells])
    note = f"Scaled from measured bits, because this program does not know them: {listed(scaled)}." if scaled else ""
    return html.table(heads, lines, name="All presets and tasks") + (paragraph(note) if note else "")


def _bits(rows: Sequence[Row]) -> float | None:
    """Bits over a spec's tasks, each task once, weighted by the bytes held."""
    tasks = {row.task: row for row in rows if row["effective_bits"] and row["cache_bytes"]}
    nbytes = sum((r["cache_bytes"] or 0) * (r["items"] or 0) for r in tasks.values())
    elements = sum((r["cache_bytes"] or 0) * (r["items"] or 0) * 8 / (r["effective_bits"] or 1) for r in tasks.values())
    return nbytes * 8 / elements if elements else None


def _task(results: Results, task: str) -> str:
    about = about_task(task)
    words = paragraph(about.is_) if about.is_ else ""
    if about.is_not:
        words += f"<p><b>What it does not say:</b> {escape(about.is_not)}</p>"
    meanings = html.definitions(
        (metric_name(m), t) for m in results.metrics(task) if (t := results.metric_text(task, m))
    )
    return (
        f'<h3 id="task-{escape(task)}">{escape(about.title)}</h3>{words}{_task_table(results, task)}'
        f"{_cells(results, task)}{_answers(results, task)}"
        f"<details><summary>What the columns mean</summary>{meanings}</details>"
    )


def _task_table(results: Results, task: str) -> str:
    """All metrics of a task with intervals, the paired difference of the main one, items and bits."""
    main, *others = results.metrics(task)
    heads = [PRESET, Head("bits", BITS), Head(metric_name(main), results.metric_text(task, main)),
             Head("difference", "from the uncompressed model on the same items (paired), 95 % interval")]  # fmt: skip
    heads += [Head(metric_name(m), results.metric_text(task, m)) for m in others]
    heads.append(Head("items", "finished, of those that were planned"))
    lines = []
    for spec in (UNCOMPRESSED, *results.specs):
        row = results.row(task, main, spec)
        if row is None:
            continue
        cells = [Cell(bits_text(row["effective_bits"])), _value(row), _change(row)]
        cells += [_value(results.row(task, m, spec)) for m in others]
        lines.append([_name(spec), *cells, _items(row)])
    return html.table(heads, lines, name=f"{about_task(task).title}: results")


def _items(row: Row) -> Cell:
    items, planned, failed = row["items"] or 0, row["planned"], row["failed"]
    text = f"{items:.0f}" if planned is None or items >= planned else f"{items:.0f} of {planned:.0f}"
    return Cell(text, f"{failed:.0f} without a result" if failed else "")


def _cells(results: Results, task: str) -> str:
    """A task's main metric by cell of its grid: a line per cell, a column per preset."""
    metric = results.metrics(task)[0]
    cells = results.cells(task, metric)
    groups = {plain(row.group): row.group or {} for row in cells}
    specs = [s for s in (UNCOMPRESSED, *results.specs) if any(r.spec == s for r in cells)]
    grid = {(row.spec, plain(row.group)): row for row in cells}
    lines: list[list[Cell | str]] = [[name, *(_value(grid.get((spec, name))) for spec in specs)] for name in groups]
    if not lines:
        return ""
    told = f"{metric_name(metric)} by {', '.join(next(iter(groups.values())))}"
    table = html.table(["", *map(spec_name, specs)], lines, name=f"{about_task(task).title}: {told}")
    return f"<details><summary>{escape(told)}</summary>{table}</details>"


def _answers(results: Results, task: str) -> str:
    """Answers of some items on which presets differ from 16 bit."""
    by_item: dict[str, dict[str, Json]] = {}
    for line in results.answers:
        if line["task"] == task:
            by_item.setdefault(line["item"], {})[line["spec"]] = line
    lines: list[list[Cell]] = []
    shown = 0
    for by_spec in by_item.values():
        base = by_spec.get(UNCOMPRESSED)
        others = [x for x in by_spec.values() if base is not None and x["output"] != base["output"]]
        if base is None or not others or shown == MOST_ITEMS:
            continue
        shown += 1
        for line in (base, *others):
            place = plain(mapping(line.get("group"))) if line is base else ""
            output = Cell(line["output"], kind="said") if line["output"] else Cell("nothing", kind="partial")
            lines.append([Cell(place), _name(str(line["spec"])), output])
    if not lines:
        return ""
    table = html.table(["item", "preset", "answer"], lines, name="answers")
    return f"<details><summary>Answers that differ from 16 bit ({shown} items)</summary>{table}</details>"


# -- figures by layer, and how it was measured -------------------------------------------------------------------------


def _layers(advice: Layers, model: str) -> str:
    """KL with one role of one layer compressed, and K_max / K_median of the keys, from ``packedkv advise``."""
    other = f" <b>Measured on {escape(advice.model)}.</b>" if advice.model and advice.model != model else ""
    told = "From packedkv advise: the KL of compressing the keys, or the values, of one layer alone."
    plots, table = [], ""
    if (plot := figures.sensitivity(advice.sensitivity, "One layer compressed")).curves:
        worst, name, layer = max((kl, curve.name, at) for curve in plot.curves for at, kl in curve.points)
        plots.append(replace(plot, note=f"Most sensitive: {name} of layer {layer:g} with {small_text(worst)} nats."))
        curves = {curve.name: dict(curve.points) for curve in plot.curves}
        layers = sorted({at for points in curves.values() for at in points})
        lines = [[f"{at:g}", *(small_text(p[at]) if at in p else DASH for p in curves.values())] for at in layers]
        table = html.table(["layer", *curves], lines, name="KL by layer")
        table = f"<details><summary>KL by layer as a table</summary>{table}</details>"
    if advice.keys:
        plots.append(figures.outliers({advice.model or model: advice.keys}))
    return f"<p>{escape(told)}{other}</p>{html.drawings(plots)}{table}"


def _how(results: Results) -> str:
    about = results.about
    model = dict(mapping(about.get("model")))
    seconds = sum(r["seconds"] or 0 for r in {(r.spec, r.task): r for r in results.rows}.values())
    prefills = list(dict.fromkeys(row.prefill for row in results.rows))
    told: list[tuple[str, Any]] = [
        ("model", model.pop("name", "")),
        ("weights", {k: v for k, v in model.items() if v is not None}),
        ("versions", about.get("versions")),
        ("device", " ".join(dict.fromkeys(str(about[k]) for k in ("device", "device_name") if about.get(k)))),
        ("seed", about.get("seed")),
        ("prefill", "; ".join(f"{p}: {PREFILLS[p]}" if p in PREFILLS else p for p in prefills)),
        ("settings", about.get("settings")),
        ("time", f"{seconds:,.0f} s, of all items together"),
        ("continued with", about.get("later_versions")),
        ("fitted constants", {k: v for k, v in mapping(about.get("params")).items() if v}),
    ]
    for task, settings in mapping(about.get("tasks")).items():
        entries = {k: v for k, v in mapping(settings).items() if k != "metrics" and v is not None}
        told.append((about_task(task).title, entries))
    notes = [
        f"{spec}: {text.removeprefix(spec + ' ')}"
        for spec, texts in mapping(about.get("notes")).items()
        for text in (texts if isinstance(texts, list) else [texts])
    ]
    remarks = f"<h3>Remarks of the run</h3>{html.listing(notes)}" if notes else ""
    return f"{paragraph(INTERVALS)}{html.definitions(told)}{remarks}"
