"""Tables of the page: sortable ones of numbers, and grids whose cells are coloured by what they hold.

Every cell of a number carries it unrounded (``data-v``): the script sorts by it, and nothing is lost to rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcodec_lab.report.drawing import escape, marker
from kvcodec_lab.report.folder import UNCOMPRESSED, Results, Row
from kvcodec_lab.report.presets import bytes_text
from kvcodec_lab.report.words import (
    DASH,
    about_task,
    bits_text,
    change_text,
    headline,
    interval_text,
    metric_name,
    value_text,
)

MANY = 12
"""A grid with more values of its one key than this has them down the side."""


@dataclass(frozen=True)
class Cell:
    """Text, the number it is sorted by, a smaller text behind it, and a class."""

    text: str
    value: float | None = None
    small: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Head:
    """A column: heading, what it means, and its key where the script has to find it."""

    text: str
    meaning: str
    key: str = ""


def sortable(name: str, heads: Sequence[Head], lines: Sequence[tuple[str, Sequence[Cell]]]) -> str:
    """A table whose columns sort, by mouse and keyboard; a line is a spec and its cells. 16 bit stays on top."""
    columns = [Head("preset", "`kvcodec describe SPEC` says everything about it"), *heads]
    head = "".join(
        f'<th scope="col" title="{escape(h.meaning)}"{f" data-key={h.key}" if h.key else ""}>'
        f'<button type="button">{escape(h.text)}<span class="arrow" aria-hidden="true"></span></button></th>'
        for h in columns
    )
    fixed = [_line(spec, cells) for spec, cells in lines if spec == UNCOMPRESSED]
    others = [_line(spec, cells) for spec, cells in lines if spec != UNCOMPRESSED]
    body = f"<tbody>{''.join(fixed)}</tbody>" if fixed else ""
    rows = "\n".join(others)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}"><table class="sort">'
        f'<caption class="hidden">{escape(name)}; a heading sorts by its column</caption>'
        f"<thead><tr>{head}</tr></thead>{body}\n<tbody class=rows>\n{rows}\n</tbody></table></div>"
    )


def _line(spec: str, cells: Sequence[Cell]) -> str:
    shown = "16 bit" if spec == UNCOMPRESSED else spec
    parts = [
        f'<tr data-spec="{escape(spec)}"><th scope="row" data-v="{escape(shown)}">{swatch(spec)}{broken(shown)}</th>'
    ]
    for cell in cells:
        value = "" if cell.value is None else repr(cell.value)
        small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
        kind = f' class="{cell.kind}"' if cell.kind else ""
        parts.append(f'<td data-v="{value}"{kind}>{escape(cell.text)}{small}</td>')
    return "".join([*parts, "</tr>"])


def broken(spec: str) -> str:
    """A spec that a narrow column may break between its options."""
    return escape(spec).replace(":", ":<wbr>").replace(",", ",<wbr>")


def swatch(spec: str) -> str:
    """The mark that drawings have for a spec's method."""
    drawn = marker("dense" if spec == UNCOMPRESSED else spec)
    return f'<svg class="swatch" viewBox="-7 -7 14 14" aria-hidden="true">{drawn}</svg>'


def value_cell(row: Row | None) -> Cell:
    """A metric's value with its interval."""
    if row is None:
        return Cell(DASH)
    small = interval_text(row.metric, row["low"], row["high"])
    return Cell(value_text(row.metric, row["value"]), row["value"], small)


def change_cell(row: Row | None) -> Cell:
    """The paired difference; marked where the whole interval is a loss or a gain."""
    if row is None or row["difference"] is None:
        return Cell(DASH)
    low, high = row["difference_low"], row["difference_high"]
    text, _, small = change_text(row.metric, row["difference"], low, high).partition(" [")
    kind = ""
    if low is not None and high is not None and (low > 0 or high < 0):
        kind = "good" if (low > 0) == (row.better == "higher") else "bad"
    return Cell(text, row["difference"], f"[{small}" if small else "", kind)


def task_table(results: Results, task: str) -> str:
    """All metrics of a task, with intervals, the paired difference of the main one, items and bits."""
    main, *others = results.metrics(task)
    rows = {spec: results.row(task, main, spec) for spec in (UNCOMPRESSED, *results.specs)}
    paired = task != "kl" and any(row and row["difference"] is not None for row in rows.values())
    heads = [
        Head("bits", "every byte the cache held in these items x 8 / elements, sinks and windows included"),
        Head(metric_name(main), results.metric_text(task, main), "main"),
    ]
    if paired:
        heads.append(Head("difference", "from the uncompressed model on the same items (paired), 95 % interval"))
    heads += [Head(metric_name(m), results.metric_text(task, m)) for m in others]
    heads.append(Head("items", "finished, of those that were drawn"))
    lines = []
    for spec, row in rows.items():
        if row is None:
            continue
        cells = [Cell(bits_text(row["effective_bits"]), row["effective_bits"]), value_cell(row)]
        if paired:
            cells.append(change_cell(row))
        cells += [value_cell(results.row(task, m, spec)) for m in others]
        lines.append((spec, [*cells, items_cell(row)]))
    return sortable(f"{about_task(task).title}: results", heads, lines)


def items_cell(row: Row) -> Cell:
    """Items, those that failed, and those that are missing."""
    items, planned, failed = row["items"] or 0, row["planned"], row["failed"]
    text = f"{items:.0f}" if planned is None or items >= planned else f"{items:.0f} of {planned:.0f}"
    return Cell(text, items, f"{failed:.0f} without a result" if failed else "")


def overview_table(results: Results, sizes: Mapping[str, Sequence[float]], at: int) -> str:
    """A line per preset: bits, bytes at a context, every task's main metric."""
    heads = [
        Head("K bits", "bits of an encoded key element, scales included, from the byte layout"),
        Head("V bits", "the same for values"),
        Head("bits in all", "measured: every byte held x 8 / elements, over all items of the run"),
        Head("times smaller", "than 16 bit, measured"),
    ]
    if sizes:
        heads.append(Head("cache", "bytes of one sequence at the context asked for", "bytes"))
    heads += [Head(headline(t, results.metrics(t)[0]), about_task(t).is_) for t in results.tasks]
    lines = []
    for spec in (UNCOMPRESSED, *results.specs):
        mine = [row for row in results.rows if row.spec == spec and row.group is None]
        if not mine:
            continue
        keys = ("key_bits", "value_bits")
        cells = [Cell(DASH if mine[0][k] is None else f"{mine[0][k]:.2f}", mine[0][k]) for k in keys]
        bits, ratio = measured(mine)
        cells += [Cell(bits_text(bits), bits), Cell(DASH if ratio is None else f"{ratio:.2f}x", ratio)]
        if sizes:
            held = sizes.get(spec)
            cells.append(Cell(DASH) if held is None else Cell(bytes_text(held[at]), held[at]))
        cells += [value_cell(results.row(t, results.metrics(t)[0], spec)) for t in results.tasks]
        lines.append((spec, cells))
    return sortable("All presets and tasks", heads, lines)


def measured(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Bits and ratio over a spec's tasks, each task once; tasks weigh by the bytes that they held."""
    tasks = {row.task: row for row in rows if row["effective_bits"] and row["cache_bytes"]}
    nbytes = sum((r["cache_bytes"] or 0) * (r["items"] or 0) for r in tasks.values())
    elements = sum((r["cache_bytes"] or 0) * (r["items"] or 0) * 8 / (r["effective_bits"] or 1) for r in tasks.values())
    if not nbytes or not elements:
        return None, None
    return nbytes * 8 / elements, 2 * elements / nbytes


# -- grids -------------------------------------------------------------------------------------------------------------


def heat_maps(results: Results, task: str) -> str:
    """Grids of a task's cells: depth x length for each preset, or presets x the one key that there is."""
    metric = results.metrics(task)[0]
    cells = results.cells(task, metric)
    keys = list(dict.fromkeys(key for row in cells for key in row.group or {}))
    if not cells or len(keys) > 2:
        return ""
    specs = [s for s in (UNCOMPRESSED, *results.specs) if any(r.spec == s for r in cells)]
    shade = _Shade([r["value"] for r in cells], cells[0].better, metric)
    if len(keys) == 1:
        if cells[0].spec == UNCOMPRESSED and task == "kl":
            specs = [s for s in specs if s != UNCOMPRESSED]
        return _one_key(metric, keys[0], cells, specs, shade)
    across, down = ("length", "depth") if "length" in keys else (keys[0], keys[1])
    down = next(k for k in keys if k != across) if down not in keys else down
    columns, sides = _values(cells, across), _values(cells, down)
    grids = []
    for spec in specs:
        held = {(r.group[across], r.group[down]): r for r in cells if r.spec == spec and r.group and len(r.group) == 2}
        head = "".join(f'<th scope="col">{escape(_tick(c))}</th>' for c in columns)
        lines = []
        for side in sides:
            inside = "".join(_heat_cell(held.get((c, side)), metric, shade) for c in columns)
            lines.append(f'<tr><th scope="row">{escape(_tick(side))}</th>{inside}</tr>')
        name = "16 bit" if spec == UNCOMPRESSED else spec
        grids.append(
            f'<table class="heat"><caption>{swatch(spec)}{escape(name)}</caption><thead><tr>'
            f'<th><span class="hidden">{escape(down)}, by {escape(across)}</span></th>{head}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table>"
        )
    told = f'<p class="soft">Down: {escape(down)}; across: {escape(across)}.</p>'
    return f'{told}<div class="heats">{"".join(grids)}</div>'


def _one_key(metric: str, key: str, cells: Sequence[Row], specs: Sequence[str], shade: "_Shade") -> str:
    values = _values(cells, key)
    held = {(r.spec, r.group[key]): r for r in cells if r.group and key in r.group}
    names = ["16 bit" if s == UNCOMPRESSED else s for s in specs]
    if len(values) > MANY:
        head = "".join(f'<th scope="col">{escape(n)}</th>' for n in names)
        lines = [
            f'<tr><th scope="row">{escape(_tick(v))}</th>'
            + "".join(_heat_cell(held.get((s, v)), metric, shade) for s in specs)
            + "</tr>"
            for v in values
        ]
    else:
        head = "".join(f'<th scope="col">{escape(_tick(v))}</th>' for v in values)
        lines = [
            f'<tr><th scope="row">{swatch(s)}{escape(n)}</th>'
            + "".join(_heat_cell(held.get((s, v)), metric, shade) for v in values)
            + "</tr>"
            for s, n in zip(specs, names, strict=True)
        ]
    title = f"{metric_name(metric)} by {key}"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table class="heat wide">'
        f"<caption>{escape(title)}</caption><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


class _Shade:
    """Share of the colour of a good cell, 0..100, for a value."""

    def __init__(self, values: Sequence[float | None], better: str, metric: str) -> None:
        known = [v for v in values if v is not None]
        self.better = better
        self.log = better == "lower" and metric in ("kl", "perplexity")
        known = [math.log(v) for v in known if v > 0] if self.log else [*known, 0.0, 1.0 if better == "higher" else 0.0]
        self.low, self.high = min(known, default=0.0), max(known, default=1.0)

    def __call__(self, value: float) -> float:
        place = math.log(value) if self.log and value > 0 else self.low if self.log else value
        share = (place - self.low) / (self.high - self.low) if self.high > self.low else 1.0
        return 100 * (share if self.better == "higher" else 1 - share)


def _heat_cell(row: Row | None, metric: str, shade: _Shade) -> str:
    if row is None or row["value"] is None:
        return f"<td>{DASH}</td>"
    text = value_text(metric, row["value"]).replace(" %", "").removesuffix(".0")
    told = f"{value_text(metric, row['value'])} {interval_text(metric, row['low'], row['high'])}".strip()
    title = f"{told}, {row['items'] or 0:.0f} items"
    return (
        f'<td style="--v:{shade(row["value"]):.0f}%" data-v="{row["value"]!r}" title="{escape(title)}">'
        f"{escape(text)}</td>"
    )


def _values(cells: Sequence[Row], key: str) -> list[Any]:
    """Values of a key, in their order: numbers and ranges as numbers."""
    found = list(dict.fromkeys(str(r.group[key]) if isinstance(r.group[key], list | dict) else r.group[key]
                               for r in cells if r.group and key in r.group))  # fmt: skip

    def order(value: Any) -> tuple[float, str]:
        try:
            return float(str(value).split("-")[0]), str(value)
        except ValueError:
            return math.inf, str(value)

    return sorted(found, key=order)


def _tick(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}k"
    return f"{value:g}" if isinstance(value, float) else str(value)
