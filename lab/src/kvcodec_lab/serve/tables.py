"""Tables and curves of the rows of ``bench serve``: servers, the sweep, sessions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcodec.cli.page.tables import aligned
from kvcodec.cli.page.words import DASH
from kvcodec_lab.bench.record import newest

Row = Mapping[str, Any]
BASELINES = ("bf16", "auto", "dense", "fp16")
"""Labels that ratios are taken to, if there is one; else the first label."""
_ROUND = re.compile(r"_r(\d+)(?:-(\d+))?$")


class Grid(NamedTuple):
    """A table: title, a line about it, headings, lines of cells; why something is missing, line by line."""

    title: str
    note: str
    headings: list[str]
    lines: list[list[str]]
    whys: list[str]

    def __str__(self) -> str:
        """Return it in columns, reasons below."""
        text = aligned([self.headings, *self.lines])
        missing = [f"! {line[0]}: {why}" for line, why in zip(self.lines, self.whys, strict=True) if why]
        return "\n".join([self.title, *text, *missing])


class Curve(NamedTuple):
    """One label's points in a drawing."""

    label: str
    points: list[tuple[float, float]]


class Chart(NamedTuple):
    """A drawing as data: name of its file, title, what the axes are, whether x doubles, its curves."""

    name: str
    title: str
    x: str
    y: str
    doubling: bool
    curves: list[Curve]


class Found:
    """Rows by label, metric and shape; the newest measured one counts.

    Parameters
    ----------
    rows : sequence of mapping
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = newest([dict(row) for row in rows])
        self._by_key = {(r["spec"], r["metric"], r["shape"]): r for r in self.rows}
        self.labels = list(dict.fromkeys(r["spec"] for r in self.rows))
        self.baseline = next((x for x in BASELINES if x in self.labels), self.labels[0] if self.labels else "")

    def row(self, label: str, metric: str, shape: str) -> Row | None:
        """Return the row; None if there is none."""
        return self._by_key.get((label, metric, shape))

    def value(self, label: str, metric: str, shape: str, of: str = "p50") -> float | None:
        """Return a number of a measured row."""
        row = self.row(label, metric, shape)
        return None if row is None or row.get("values") is None else row["values"].get(of)

    def cell(self, label: str, metric: str, shape: str, of: str = "p50", form: str = "") -> str:
        """Return the number as text for a table."""
        value = self.value(label, metric, shape, of)
        return DASH if value is None else number(value) if not form else format(value, form)

    def ratio(self, label: str, metric: str, shape: str) -> str:
        """Return the ratio to the baseline's number of the same load."""
        mine, base = self.value(label, metric, shape), self.value(self.baseline, metric, shape)
        return DASH if mine is None or not base else f"{mine / base:.2f}x"

    def loads(self, kind: str) -> dict[str, Row]:
        """Shapes of a kind of load that some label has a last row of, measured or not, with their sizes."""
        found = (r for r in self.rows if r.get("load") == kind and r["metric"] == "requests_done")
        return {r["shape"]: r["sizes"] for r in found}


def number(x: float) -> str:
    """Four significant digits, no decimals from 1000 on.

    >>> number(1234567.8), number(123.456), number(0.01234)
    ('1,234,568', '123.5', '0.01234')
    """
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def tables(rows: Sequence[Row]) -> list[Grid]:
    """Return the tables that there are rows for."""
    found = Found(rows)
    grids = [_servers(found), *(_steps(found, tokens) for tokens in steps_of(found))]
    sizes = dict.fromkeys((s["input_len"], s["output_len"]) for s in found.loads("sweep").values())
    grids += [_sweep(found, *one) for one in sizes]
    for shape, about in found.loads("sessions").items():
        grids += [_sessions(found, shape, about), _rounds(found, shape, about)]
    return [grid for grid in grids if grid.lines]


def _servers(found: Found) -> Grid:
    lines, reasons = [], []
    for label in found.labels:
        tokens, start = found.row(label, "kv_cache_tokens", "start"), found.row(label, "start_s", "start")
        failed = found.row(label, "requests_done", "start")
        whys = [str(r["status"]) for r in (tokens, start, failed) if r is not None and r.get("values") is None]
        about = (tokens or {}).get("server") or {}
        lines.append([label, str(about.get("model") or DASH), str(about.get("version") or DASH),
                      found.cell(label, "kv_cache_tokens", "start", form=",.0f"),
                      found.ratio(label, "kv_cache_tokens", "start"),
                      found.cell(label, "start_s", "start", form=".0f")])  # fmt: skip
        reasons.append("; ".join(whys))
    note = f"Tokens that the cache holds, as the server says; ratios are to {found.baseline}."
    return Grid("Servers", note, ["label", "model", "version", "KV tokens", "ratio", "start s"], lines, reasons)


def steps_of(found: Found) -> dict[int, dict[int, str]]:
    """Shapes of decode steps by tokens of a sequence, then by sequences, fewest first."""
    by_tokens: dict[int, dict[int, str]] = {}
    for row in found.rows:
        if row.get("load") == "steps":
            by_tokens.setdefault(row["sizes"]["tokens"], {})[row["sizes"]["sequences"]] = row["shape"]
    return {tokens: dict(sorted(shapes.items())) for tokens, shapes in by_tokens.items()}


def _steps(found: Found, tokens: int) -> Grid:
    shapes = steps_of(found)[tokens]
    most, last = list(shapes.items())[-1]
    lines, whys = [], []
    for label in found.labels:
        rows = [row for shape in shapes.values() if (row := found.row(label, "step_ms", shape)) is not None]
        if not rows:
            continue
        step = found.value(label, "step_ms", last)
        low, high = (found.cell(label, "step_ms", last, of, ".2f") for of in ("p20", "p80"))
        lines.append([label, found.cell(label, "kv_cache_tokens", "start", form=",.0f"),
                      found.ratio(label, "kv_cache_tokens", "start"),
                      *(found.cell(label, "step_ms", shape, form=".2f") for shape in shapes.values()),
                      DASH if step is None else f"{low} to {high}", found.ratio(label, "step_ms", last),
                      DASH if step is None else f"{1e3 * most / step:,.0f}",
                      found.cell(label, "prefill_s", last, form=".1f")])  # fmt: skip
        whys.append("; ".join(str(row["status"]) for row in rows if row.get("values") is None))
    headings = ["label", "KV tokens", "ratio", *(f"{n} seq. ms" for n in shapes), "p20 to p80",
                f"of {found.baseline}", "tokens/s", "prompts s"]  # fmt: skip
    note = (
        f"Median time from one step of pure decode to the next, sequences of {tokens:,} tokens found in the prefix "
        f"cache. Spread, ratio and tokens per second are those of {most} sequences; prompts: seconds until the first "
        f"token of all {most}, nothing cached."
    )
    return Grid(f"Decode steps at {tokens:,} tokens", note, headings, lines, whys)


def _sweep(found: Found, tokens: int, output: int) -> Grid:
    shapes = {k: s for k, s in found.loads("sweep").items() if (s["input_len"], s["output_len"]) == (tokens, output)}
    lines, whys = [], []
    for shape, sizes in sorted(shapes.items(), key=lambda item: item[1].get("concurrency", item[1].get("rate"))):
        load = f"{sizes['concurrency']}" if "concurrency" in sizes else f"{sizes['rate']:g}/s"
        for label in found.labels:
            row = found.row(label, "requests_done", shape)
            if row is None:
                continue
            numbers = [(metric, of) for metric, of in (
                ("request_tokens_per_s", "p50"), ("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"),
                ("tpot_ms", "p99"))]  # fmt: skip
            lines.append([label, load, found.cell(label, "output_tokens_per_s", shape),
                          found.ratio(label, "output_tokens_per_s", shape),
                          *(found.cell(label, metric, shape, of) for metric, of in numbers),
                          found.cell(label, "prefix_hit_share", shape, form=".1%"),
                          _answered(row)])  # fmt: skip
            whys.append(_why(row))
    headings = ["label", "clients", "tokens/s", f"of {found.baseline}", "per request", "TTFT p50 ms", "p99",
                "TPOT p50 ms", "p99", "prefix hits", "answered"]  # fmt: skip
    note = (
        "Output tokens per second of the system, and of a request after its first token (p50; the rows have the mean)."
    )
    return Grid(f"Sweep: {tokens} tokens in, {output} out", note, headings, lines, whys)


def _answered(row: Row) -> str:
    sizes = row.get("sizes") or {}
    total = sizes.get("requests") or sizes.get("sessions", 0) * sizes.get("rounds", 0)
    return f"{(row.get('values') or {}).get('p50', 0):.0f}/{total}"


def _why(row: Row) -> str:
    if row.get("values") is None:
        return str(row.get("status"))
    errors = [f"{e['count']} {kind}: {e['first']}" for kind, e in (row.get("errors") or {}).items()]
    return "; ".join(errors + [f"{row['unsent']} not sent"] * bool(row.get("unsent")))


def _title(sizes: Row) -> str:
    return f"{sizes['sessions']} sessions of {sizes['rounds']} rounds"


def _sessions(found: Found, shape: str, sizes: Row) -> Grid:
    lines, whys = [], []
    for label in found.labels:
        row = found.row(label, "requests_done", shape)
        if row is not None:
            plain = ("output_tokens_per_s", "preemptions", "evicted_blocks_sampled", "lost_tokens")
            cells = [found.cell(label, metric, shape) for metric in plain]
            cells.insert(1, found.ratio(label, "output_tokens_per_s", shape))
            lines.append([label, *cells, found.cell(label, "prefix_residency", shape, "mean", ".1%"),
                          found.cell(label, "prefix_hit_share", shape, form=".1%"),
                          _answered(row)])  # fmt: skip
            whys.append(_why(row))
    headings = ["label", "tokens/s", f"of {found.baseline}", "preemptions", "blocks evicted (sampled)", "tokens lost",
                "residency", "prefix hits", "answered"]  # fmt: skip
    note = (
        f"{sizes['shared']} shared tokens, {sizes['context']} of its own, then {sizes['turn']} of a tool a round; "
        f"answers of {sizes['answer']}. Residency: of what a session's rounds before had computed, the share that was "
        "found again (mean)."
    )
    return Grid(_title(sizes), note, headings, lines, whys)


def _rounds(found: Found, shape: str, sizes: Row) -> Grid:
    lines = []
    here = dict.fromkeys(r["shape"] for r in found.rows if str(r["shape"]).startswith(f"{shape}_r"))
    for one in sorted(here, key=_round):
        for label in found.labels:
            if found.value(label, "ttft_ms", one) is None:
                continue
            first, last = _round(one)[1:]
            cells = [found.cell(label, m, one, of) for m in ("ttft_ms", "tpot_ms") for of in ("p50", "p99")]
            cells.insert(1, found.ratio(label, "ttft_ms", one))
            lines.append([label, f"{first}" if first == last else f"{first}-{last}", *cells,
                          found.cell(label, "prefix_residency", one, "mean", ".1%"),
                          found.cell(label, "prefix_hit_share", one, form=".1%")])  # fmt: skip
    headings = [
        "label",
        "round",
        "TTFT p50 ms",
        f"of {found.baseline}",
        "p99",
        "TPOT p50 ms",
        "p99",
        "residency",
        "prefix hits",
    ]
    note = "Single rounds, then warm and late ones together."
    return Grid(f"{_title(sizes)}, round by round", note, headings, lines, [""] * len(lines))


def _round(shape: str) -> tuple[int, int, int]:
    """Single rounds before groups, then by number."""
    match = _ROUND.search(shape)
    assert match is not None
    first = int(match[1])
    last = int(match[2] or first)
    return last > first, first, last


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Return the drawings that there are rows for."""
    found = Found(rows)
    drawn = []
    for tokens, by_count in steps_of(found).items():
        curves = _curves(found, "step_ms", "p50", {shape: float(n) for n, shape in by_count.items()})
        title = f"decode steps at {tokens:,} tokens"
        drawn.append(Chart(f"steps-i{tokens}", title, "sequences", "ms per step, p50", True, curves))
    sweep = found.loads("sweep")
    for tokens, output, key in dict.fromkeys((s["input_len"], s["output_len"], _axis(s)) for s in sweep.values()):
        shapes = {name: float(s[key]) for name, s in sweep.items()
                  if (s["input_len"], s["output_len"]) == (tokens, output) and key in s}  # fmt: skip
        x = "clients" if key == "concurrency" else "requests per second"
        what = f"{tokens} tokens in, {output} out"
        for metric, of, name, y in (
            ("output_tokens_per_s", "p50", "throughput", "output tokens per second, whole system"),
            ("request_tokens_per_s", "p50", "per-request", "tokens per second of a request, p50"),
            ("ttft_ms", "p50", "ttft", "TTFT p50, ms"),
            ("tpot_ms", "p50", "tpot", "TPOT p50, ms"),
        ):
            curves = _curves(found, metric, of, shapes)
            drawn.append(Chart(f"{name}-{x.split()[0]}-i{tokens}-o{output}", what, x, y, True, curves))
    for shape, sizes in found.loads("sessions").items():
        rounds = {f"{shape}_r{i}": float(i) for i in range(1, sizes["rounds"] + 1)}
        for metric, of, name, y in (
            ("ttft_ms", "p50", "round-ttft", "TTFT p50, ms"),
            ("ttft_ms", "p99", "round-ttft-p99", "TTFT p99, ms"),
            ("tpot_ms", "p50", "round-tpot", "TPOT p50, ms"),
            ("prefix_residency", "mean", "round-residency", "share of the prefix still in the cache"),
        ):
            curves = _curves(found, metric, of, rounds)
            drawn.append(Chart(f"{name}-{shape}", _title(sizes), "round", y, False, curves))
    return [chart for chart in drawn if chart.curves]


def _axis(sizes: Row) -> str:
    return "concurrency" if "concurrency" in sizes else "rate"


def _curves(found: Found, metric: str, of: str, shapes: Mapping[str, float]) -> list[Curve]:
    curves = []
    for label in found.labels:
        known = [(x, found.value(label, metric, shape, of)) for shape, x in shapes.items()]
        points = sorted((x, y) for x, y in known if y is not None)
        if points:
            curves.append(Curve(label, points))
    return curves
