"""Summaries of result rows: one line per preset, the break-even context, the points of the figure. Arithmetic only.

Of rows with the same spec, metric and shape the newest measured one is used (``record.newest``).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcodec.cli.page.words import DASH
from kvcodec_lab.bench.record import newest
from kvcodec_lab.bench.shapes import SPINE, SWEEP_BATCHES

Row = Mapping[str, Any]
SPEEDUP = "speedup_vs_bf16_cold"
RIVALS = ("dense", "dense-fp8", "rival")
"""What rows of decode attention that is not ours are called."""
SPINE_NAMES = tuple(shape.name for shape in SPINE)
_SWEEP_SHAPE = re.compile(r"llama8b_b(\d+)_(\d+)$")


class Table:
    """Rows by spec, metric and shape.

    Parameters
    ----------
    rows : sequence of mapping
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = newest([dict(row) for row in rows])
        self._by_key = {(r["spec"], r["metric"], r["shape"]): r for r in self.rows if r["spec"] not in RIVALS}

    def row(self, spec: str, metric: str, shape: str) -> Row | None:
        """Return the row, measured or with a status; None if there is none."""
        return self._by_key.get((spec, metric, shape))

    def median(self, spec: str, metric: str, shape: str) -> float | None:
        """Return p50 of a measured row."""
        row = self.row(spec, metric, shape)
        return None if row is None or row.get("values") is None else float(row["values"]["p50"])

    def bf16(self, metric: str, shape: str) -> float | None:
        """Return p50 of the fastest 16-bit form."""
        found = [
            float(r["values"]["p50"])
            for r in self.rows
            if (r["spec"], r["metric"], r["shape"]) == ("dense", metric, shape) and r.get("values") is not None
        ]
        return min(found, default=None)

    def specs(self, metric: str = SPEEDUP) -> list[str]:
        """Presets with rows of a metric, measured or not, in order."""
        wanted = {metric, "decode_us_cold"} if metric == SPEEDUP else {metric}
        found = dict.fromkeys(r["spec"] for r in self.rows if r["metric"] in wanted)
        return [spec for spec in found if spec not in RIVALS]

    def status(self, spec: str, shape: str) -> str:
        """Why a preset has no time at a shape; empty if it has, or was never tried."""
        row = self.row(spec, "decode_us_cold", shape)
        return "" if row is None or row.get("values") is not None else str(row["status"])


class BreakEven(NamedTuple):
    """From which length on a preset beats 16-bit attention.

    Parameters
    ----------
    tokens : int, optional
        Smallest measured length from which on it is faster at every measured one; None: at none.
    shortest, longest : int
        Lengths measured.
    """

    tokens: int | None
    shortest: int
    longest: int

    def __str__(self) -> str:
        """Return e.g. ``1024``, ``<= 128`` or ``> 32768``."""
        if self.tokens is None:
            return f"> {self.longest}"
        return f"<= {self.tokens}" if self.tokens == self.shortest else str(self.tokens)


def break_even(table: Table, spec: str, batch: int) -> BreakEven | None:
    """Read the break-even context of a preset from the sweep of lengths; None where it was not swept."""
    ratios: dict[int, float] = {}
    for row in table.rows:
        match = _SWEEP_SHAPE.match(str(row["shape"]))
        measured = row["spec"] == spec and row["metric"] == SPEEDUP and row.get("values") is not None
        if match and measured and int(match[1]) == batch:
            ratios[int(match[2])] = float(row["values"]["p50"])
    if not ratios:
        return None
    first = None
    for tokens in sorted(ratios, reverse=True):
        if ratios[tokens] <= 1:
            break
        first = tokens
    return BreakEven(first, min(ratios), max(ratios))


class Line(NamedTuple):
    """One preset of the report: bits at 64k tokens, speed-ups, times and shares by shape, break-even by batch."""

    spec: str
    bits: float | None
    speedups: dict[str, float | None]
    microseconds: dict[str, float | None]
    shares: dict[str, float | None]
    break_evens: dict[int, BreakEven | None]
    status: str


def lines(rows: Sequence[Row], shapes: Sequence[str] = SPINE_NAMES) -> list[Line]:
    """One line per preset that has a row at one of ``shapes``."""
    table = Table(rows)
    out = []
    for spec in table.specs():
        gains = {shape: table.median(spec, SPEEDUP, shape) for shape in shapes}
        times = {shape: table.median(spec, "decode_us_cold", shape) for shape in shapes}
        status = next(filter(None, (table.status(spec, shape) for shape in shapes)), "")
        if not any(times.values()) and not any(gains.values()) and not status:
            continue
        bits = next((r["effective_bits"] for s in shapes if (r := table.row(spec, SPEEDUP, s)) is not None), None)
        out.append(
            Line(
                spec,
                bits,
                gains,
                times,
                {shape: table.median(spec, "roofline_share_cold", shape) for shape in shapes},
                {batch: break_even(table, spec, batch) for batch in SWEEP_BATCHES},
                status,
            )
        )
    return out


class Point(NamedTuple):
    """One marker of the figure: effective bits at that shape, speed-up over the fastest 16-bit attention."""

    spec: str
    shape: str
    bits: float
    speedup: float


def speed_points(rows: Sequence[Row], shapes: Sequence[str] = SPINE_NAMES) -> list[Point]:
    """Return a point per preset and shape that was measured."""
    table = Table(rows)
    found = []
    for shape in shapes:
        for spec in table.specs():
            row = table.row(spec, SPEEDUP, shape)
            if row is not None and row.get("values") is not None:
                found.append(Point(spec, shape, float(row["effective_bits"]), float(row["values"]["p50"])))
    return found


WAYS = {"graph": "one step in a CUDA graph", "compiled": "generate, compiled", "generate": "generate, eager"}
"""Ways of ``bench generate``, as tables call them."""
_GENERATE_SHAPE = re.compile(r"qwen3_8b_b(\d+)_32k$")


class Steps(NamedTuple):
    """A whole model's steps: headings, and lines of a cache's name and cells, 16-bit caches first."""

    headings: list[str]
    lines: list[list[str]]


def steps_of_a_model(rows: Sequence[Row]) -> Steps:
    """Milliseconds per token by sequences and way, and the peak memory beside the weights; empty before any row."""
    times: dict[tuple[str, str, str], dict[tuple[int, str], Row]] = {}
    for row in newest([dict(row) for row in rows]):
        match, metric = _GENERATE_SHAPE.match(str(row["shape"])), str(row["metric"])
        way = metric.removeprefix("ms_per_token_")
        if match and way in WAYS and way != metric and row.get("values") is not None:
            kind = row["spec"], str(row.get("cache")), str(row.get("form") or "")
            times.setdefault(kind, {})[int(match[1]), way] = row
    columns = sorted({key for found in times.values() for key in found}, key=lambda k: (k[0], list(WAYS).index(k[1])))
    most = max((batch for batch, _ in columns), default=0)
    headings = ["cache", *(f"{batch} sequence{'s' * (batch > 1)}, {WAYS[way]}" for batch, way in columns)]

    def order(item: tuple[tuple[str, str, str], dict[tuple[int, str], Row]]) -> tuple[bool, bool, float]:
        (spec, cache, _), found = item
        last = [found[key]["values"]["p50"] for key in reversed(columns) if key in found]
        return spec != "dense", cache != "QuantizedCache", last[0]

    lines = []
    for (spec, cache, form), found in sorted(times.items(), key=order):
        name = spec if cache == "kvcodec fused" else f"{'16 bit' if spec == 'dense' else spec}, {cache}"
        name += f", {form}" if form else ""
        cells = [f"{found[key]['values']['p50']:.1f}" if key in found else DASH for key in columns]
        peaks = [row["peak_bytes"] for (batch, _), row in found.items() if batch == most and row.get("peak_bytes")]
        lines.append([name, *cells, f"{min(peaks) / 1e9:.1f}" if peaks else DASH])
    return Steps([*headings, f"GB, {most} sequence{'s' * (most > 1)}"], lines)
