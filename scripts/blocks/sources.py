"""Result files that several pages quote, and rows picked from them."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcodec.cli.page.rows import UNCOMPRESSED, Results, read_rows
from kvcodec.cli.page.tables import cell, markdown
from kvcodec.errors import FormatError
from kvcodec_lab.bench.record import newest
from kvcodec_lab.report.pages import leaderboard
from kvcodec_lab.report.ranks import EXACT

read_runs = cache(leaderboard.read_runs)  # many blocks tell of the published runs: they are read once
RESULTS = Path("benchmarks/results/cpu/smollm2-135m.json")
ALL_RESULTS = Path("benchmarks/results/nvidia-h200/quality_smollm2-135m.json")
ADDED = Path("benchmarks/results/cpu/quality_smollm2-135m.json")
"""The same of presets that came later, measured on a CPU."""
OWN, MORE_BITS = "ghost", 0.5
"""The library's own method; others may hold so many bits more than it beside them."""
SPEED = Path("benchmarks/results/nvidia-h200")
SHAPES = {
    "llm64k": "1 sequence of 64k tokens",
    "b32_8k": "32 of 8k",
    "b32_32k": "32 of 32k",
    "video": "a video model's 32k",
}
SPEED_SPEC = "saw-int4"
DECODE = "decode*.json"
"""Files of `kvcodec bench decode`; of rows with the same name those of the latest run count."""
BOARD = Path("benchmarks/results/eval")
JUDGE = ("qwen2.5-coder-1.5b", "smollm2-135m-stressed", "smollm2-135m")
"""Errors of scores on the model with key biases and on the stressed small one; their runs of BOARD, and the plain."""
TODAY = "qwen2.5-coder-1.5b-auto"
"""The run of the real model with today's default, which encodes keys without their bias; JUDGE[0] is with it."""
SERVE_FILE = "serve.json"
SERVED = ("saw-int4", "fp8", "bf16")
"""Of `benchmarks/serve_h200.py`: the load that is quoted, and whose; the last is what the others are compared with."""


Blocks = dict[str, tuple[Path, Callable[[Path], str]]]
"""Name of a block -> the page that has it, and what writes it."""


class MissingResultError(Exception):
    """Raised when a result that a page quotes does not exist, or exists twice."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a result file: a list, an object with ``rows``, or one row."""
    return read_rows([path], needed=())


def median_of(rows: list[dict[str, Any]], metric: str, shape: str) -> tuple[float, dict[str, Any]]:
    """p50 of the one row with this metric and shape; of several runs' that of the latest."""
    found = [r for r in rows if (r.get("spec"), r.get("metric"), r.get("shape")) == (SPEED_SPEC, metric, shape)]
    found = [r for r in found if r.get("values") is not None]
    latest = max((r.get("run", "") for r in found), default="")
    found = [r for r in found if r.get("run", "") == latest]
    if len(found) != 1:
        raise MissingResultError(
            f"{SPEED}: {len(found)} rows have spec {SPEED_SPEC}, metric {metric}, shape {shape}; exactly one must."
        )
    return float(found[0]["values"]["p50"]), found[0]


def decode_rows(root: Path) -> list[dict[str, Any]]:
    """Rows of the benches of decode attention; empty before the first."""
    return newest(read_rows(sorted((root / SPEED).glob(DECODE))))


def quality_rows(root: Path) -> list[dict[str, Any]]:
    """Every preset on the small model: the rows of ALL_RESULTS, and of ADDED what those lack."""
    rows: dict[str, dict[str, Any]] = {}
    for path in (ALL_RESULTS, ADDED):
        if (root / path).is_file():
            for row in rows_of(root / path):
                if "spec" in row:
                    rows.setdefault(row["spec"], row)
    if not rows:
        raise MissingResultError(f"{ALL_RESULTS} does not exist; compare every preset and put the JSON there.")
    return list(rows.values())


def judge_of(root: Path, run: str) -> Results:
    """A run of the real model."""
    try:
        found = read_runs(root / BOARD).get(run)
    except FormatError as error:
        raise MissingResultError(str(error)) from error
    if found is None:
        raise MissingResultError(f"{BOARD}: no run {run}, which README and docs quote.")
    return found


class Judged(NamedTuple):
    """What a preset holds and loses on the real model."""

    bits: float
    kl: float
    perplexity: float


def judged(root: Path, run: str) -> tuple[dict[str, Judged], float]:
    """Every compressed spec of a run of the real model, and the uncompressed perplexity."""
    whole = [r for r in judge_of(root, run).rows if r.group is None]
    perplexity = {r.spec: r["value"] for r in whole if r.metric == "perplexity"}
    rows = [r for r in whole if r.metric == "kl" and r.spec not in EXACT]
    found = {r.spec: Judged(r["effective_bits"], r["value"], perplexity[r.spec]) for r in rows}
    return found, perplexity[UNCOMPRESSED]


def row_of(rows: list[dict[str, Any]], spec: str) -> dict[str, Any]:
    """The one row of a preset."""
    found = [row for row in rows if row.get("spec") == spec]
    if len(found) != 1:
        raise MissingResultError(f"{ALL_RESULTS}: {len(found)} rows have spec {spec}; one is needed.")
    return found[0]


def table_of(columns: Sequence[Any], rows: Sequence[Any]) -> str:
    """Markdown table of rows, the columns as a page of results has them."""
    lines = [[f"`{cell(r, c)}`" if c.key == "spec" else cell(r, c) for c in columns] for r in rows]
    return markdown([c.heading for c in columns], lines)
