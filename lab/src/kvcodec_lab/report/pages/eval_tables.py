"""Tables of an eval run: a task's numbers, all presets, and grids whose cells are coloured by what they hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvcodec.cli.page.html import Cell, Head, escape, swatch, table
from kvcodec.cli.page.rows import UNCOMPRESSED, Results, Row
from kvcodec.cli.page.words import (
    DASH,
    about_task,
    bits_text,
    bytes_text,
    change_text,
    headline,
    interval_text,
    metric_name,
    spec_name,
    value_text,
)

MANY = 12
"""A grid with more values of its one key than this has them down the side."""
PRESET = Head("preset", "`kvcodec describe SPEC` says everything about it")


def name_cell(spec: str) -> Cell:
    """The heading of a spec's line."""
    return Cell(spec_name(spec), spec=spec)


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
        PRESET,
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
        lines.append([name_cell(spec), *cells, items_cell(row)])
    return table(heads, lines, name=f"{about_task(task).title}: results", sort=True)


def items_cell(row: Row) -> Cell:
    """Items, those that failed, and those that are missing."""
    items, planned, failed = row["items"] or 0, row["planned"], row["failed"]
    text = f"{items:.0f}" if planned is None or items >= planned else f"{items:.0f} of {planned:.0f}"
    return Cell(text, items, f"{failed:.0f} without a result" if failed else "")


def overview_table(results: Results, sizes: Mapping[str, Sequence[float]], at: int) -> str:
    """A line per preset: bits, bytes at a context, every task's main metric."""
    heads = [
        PRESET,
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
        lines.append([name_cell(spec), *cells])
    return table(heads, lines, name="All presets and tasks", sort=True)


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
    corner = f'<span class="hidden">{escape(down)}, by {escape(across)}</span>'
    grids = []
    for spec in specs:
        held = {(r.group[across], r.group[down]): r for r in cells if r.spec == spec and r.group and len(r.group) == 2}
        inside = [[_heat_cell(held.get((c, side)), metric, shade) for c in columns] for side in sides]
        grids.append(_grid(_marked(spec), corner, [_tick(c) for c in columns], [_tick(s) for s in sides], inside))
    told = f'<p class="soft">Down: {escape(down)}; across: {escape(across)}.</p>'
    return f'{told}<div class="heats">{"".join(grids)}</div>'


def _one_key(metric: str, key: str, cells: Sequence[Row], specs: Sequence[str], shade: "_Shade") -> str:
    values = _values(cells, key)
    held = {(r.spec, r.group[key]): r for r in cells if r.group and key in r.group}
    shown, names = [_tick(v) for v in values], [escape(spec_name(s)) for s in specs]
    if len(values) > MANY:
        head, sides = names, shown
        inside = [[_heat_cell(held.get((s, v)), metric, shade) for s in specs] for v in values]
    else:
        head, sides = shown, [_marked(s) for s in specs]
        inside = [[_heat_cell(held.get((s, v)), metric, shade) for v in values] for s in specs]
    title = escape(f"{metric_name(metric)} by {key}")
    grid = _grid(title, "", head, sides, inside, " wide")
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">{grid}</div>'


def _grid(
    caption: str, corner: str, head: Sequence[str], sides: Sequence[str], cells: Sequence[Sequence[str]], kind: str = ""
) -> str:
    """A grid; all its texts are HTML."""
    across = "".join(f'<th scope="col">{text}</th>' for text in head)
    lines = "".join(
        f'<tr><th scope="row">{side}</th>{"".join(line)}</tr>' for side, line in zip(sides, cells, strict=True)
    )
    return (
        f'<table class="heat{kind}"><caption>{caption}</caption><thead><tr><th>{corner}</th>{across}</tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _marked(spec: str) -> str:
    return f"{swatch(spec)}{escape(spec_name(spec))}"


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
    """A value of a key, as HTML."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}k"
    return f"{value:g}" if isinstance(value, float) else escape(value)
