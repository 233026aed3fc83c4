"""docs/choose.md, docs/results.md and others: what presets lose.

best        the best measured at each of BUDGETS, from ALL_RESULTS, ADDED and VARIANTS
judged      the same on the real model, from the run TODAY
board       three sentences of the runs BOARD_RUNS on tasks
tasks       three of the run TODAY, and retrieved, one of them: who finds a UUID
quality     every preset of ALL_RESULTS and ADDED; QUALITY_FIGURE shows them
results     table of RESULTS, the demo's rows
columns     what its columns mean
age-tiers   KL of the newest tokens in other codecs, from AGE_TIERS
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocks.sources import (
    BOARD,
    RESULTS,
    TODAY,
    Blocks,
    MissingResultError,
    judge_of,
    judged,
    quality_rows,
    read_runs,
    rows_of,
    table_of,
)
from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.tables import columns_of, markdown, with_reference
from kvcodec.cli.page.words import DASH
from kvcodec.errors import FormatError
from kvcodec.registry import presets
from kvcodec_lab.report.pages.leaderboard import found_values, retrieval_sentences, sentences

VARIANTS = Path("benchmarks/results/nvidia-h200/quality_smollm2-135m_variants.json")
QUALITY_FIGURE = Path("docs/img/all-presets.png")
BUDGETS = (2.3, 3.3, 4.3, 5.0)
BOARD_RUNS = ("smollm2-135m", "smollm2-135m-stressed")
"""The plain and the stressed run that the sentences quote."""
REFUSED = 10.0
"""Times the uncompressed perplexity from which a preset is called refused: the key-bias check refuses all such."""
AGE_TIERS = Path("benchmarks/results/cpu/age_tiers_smollm2-135m.json")


def results_block(root: Path) -> str:
    """Markdown table of the demo's rows."""
    path = root / RESULTS
    if not path.is_file():
        raise MissingResultError(f"{RESULTS} does not exist; run the demo and put its result JSON there.")
    rows = with_reference(rows_of(path))
    if not any("spec" in row for row in rows):
        raise MissingResultError(f"{RESULTS} holds no result rows.")
    return table_of(columns_of(rows), rows)


def columns_block(root: Path) -> str:
    """Each column of that table and its meaning."""
    path = root / RESULTS
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{RESULTS} does not exist; run the demo and put its result JSON there.")
    return "\n".join(f"- **{c.heading}**: {c.meaning}" for c in columns_of(rows))


def best_block(root: Path) -> str:
    """The best at each budget on the small model, and what was measured there."""
    rows = quality_rows(root)
    presets = len(rows)
    rows += [row for row in rows_of(root / VARIANTS) if "spec" in row] if (root / VARIANTS).is_file() else []
    held = [(r["spec"], r["effective_bits"], r["kl"], r["perplexity"]) for r in rows]
    tokens = f"{rows[0]['windows']} windows of {rows[0]['window_tokens']} tokens"
    return _best(held) + (
        f"\n\n{presets} presets and {len(rows) - presets} options of them on {rows[0]['model']}, {tokens}; bits of "
        f"every byte held, windows and dense layers included, which weigh less in longer contexts; uncompressed "
        f"perplexity {rows[0]['uncompressed']['perplexity']:.2f}."
    )


def judged_block(root: Path) -> str:
    """The best at each budget on the real model with key biases."""
    values, base = judged(root, TODAY)
    named = [spec for spec in values if spec in presets()]
    off = sum(not values[spec].perplexity <= 1.1 * base for spec in named)
    options = f" and {len(values) - len(named)} options of them" if len(values) > len(named) else ""
    found = judge_of(root, TODAY)
    items = next(r["items"] for r in found.rows if (r.task, r.group) == ("kl", None))
    return _best([(spec, *of) for spec, of in values.items() if of.perplexity < REFUSED * base]) + (
        f"\n\n{len(named)} presets{options} on {found.about['model']['name']}, "
        f"{items:g} windows of 2048 tokens; uncompressed perplexity {base:.2f}, and {off} of the "
        f"presets are more than 10 % above it."
    )


def _best(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """A table of what has the least KL at each of BUDGETS; rows are specs with bits, KL and perplexity."""
    lines = []
    for budget in BUDGETS:
        fitting = sorted((row for row in rows if row[1] <= budget), key=lambda row: row[2])
        if not fitting:
            lines.append([f"{budget:g} bits", "none works", *[DASH] * 4])
            continue
        (spec, bits, kl, perplexity), *others = fitting
        after = f"`{others[0][0]}` ({others[0][2]:.4f})" if others else DASH
        lines.append([f"{budget:g} bits", f"`{spec}`", f"{bits:.2f}", f"{kl:.4f}", f"{perplexity:,.2f}", after])
    return markdown(["at most", "best", "bits in all", "KL", "perplexity", "next best"], lines, text=(1, 5))


def board_block(root: Path) -> str:
    """Three sentences of what the published runs on tasks say."""
    try:
        runs = read_runs(root / BOARD)
        if not runs:
            return "Not measured on tasks yet: `benchmarks/evaluate.py` makes the rows."
        if lacking := [name for name in BOARD_RUNS if name not in runs]:
            raise MissingResultError(f"{BOARD}: no run {' and '.join(lacking)}, which the docs quote.")
        return "\n".join(f"- {sentence}" for sentence in sentences(*(runs[name] for name in BOARD_RUNS)))
    except FormatError as error:
        raise MissingResultError(str(error)) from error


def tasks_block(root: Path) -> str:
    """Three sentences of the real model: who loses least, who finds a number, who a UUID."""
    return "\n".join(f"- {sentence}" for sentence in retrieval_sentences(judge_of(root, TODAY)))


def retrieved_block(root: Path) -> str:
    """Who finds a UUID on the real model."""
    return found_values(judge_of(root, TODAY))


def age_tiers_block(root: Path) -> str:
    """A row for each spec, in the order of bits: bits behind each length, and KL of the tokens up to it."""
    if not (root / AGE_TIERS).is_file():
        raise MissingResultError(f"{AGE_TIERS} does not exist; benchmarks/age_tiers.py makes it.")
    held = json.loads((root / AGE_TIERS).read_text())
    at = sorted({row["tokens"] for row in held["rows"]})
    by: dict[str, dict[int, dict[str, Any]]] = {}
    for row in held["rows"]:
        by.setdefault(row["spec"], {})[row["tokens"]] = row
    lines = []
    for spec, rows in sorted(by.items(), key=lambda item: item[1][at[-1]]["effective_bits"]):
        cells, scored, total = [f"`{spec}`"], 0, 0.0
        for n in at:  # the first token of the window is not scored
            summed = rows[n]["kl"] * (n - 1)
            cells += [f"{rows[n]['effective_bits']:.2f}", f"{(summed - total) / (n - 1 - scored):.4f}"]
            scored, total = n - 1, summed
        lines.append(cells)
    spans = zip((1, *at), at, strict=False)
    heads = ["spec", *(h for a, b in spans for h in (f"bits at {b:,}", f"KL of tokens {a:,} to {b:,}"))]
    worst = max(row["kl_se"] / row["kl"] for row in held["rows"])
    windows = "one window" if held["windows"] == 1 else f"{held['windows']} windows"
    return (
        f"{markdown(heads, lines)}\n\n{held['model']}, {windows} of {at[-1]:,} tokens of {held['text']}, fed in calls "
        f"of {held['call_tokens']} tokens, each of which attends what is stored; bits of every byte held behind so "
        f"many tokens. Standard errors of a mean KL are at most {worst:.0%} of it, over the same tokens in all rows."
    )


def quality_block(root: Path) -> str:
    """Every preset: bits, bytes and quality, fewest bits first."""
    rows = quality_rows(root)
    rows.sort(key=lambda r: (r["effective_bits"], r["kl"]))
    columns = [c for c in columns_of(rows) if c.key != "tokens_per_s"]
    return table_of(columns, rows)


def write_figures(root: Path) -> None:
    """Draw QUALITY_FIGURE."""
    rows = quality_rows(root)
    pictures.write([figures.quality(rows, f"{rows[0]['model']} on {rows[0]['text']}")], root / QUALITY_FIGURE)


BLOCKS: Blocks = {
    "best": (Path("docs/choose.md"), best_block),
    "judged": (Path("docs/choose.md"), judged_block),
    "board": (Path("docs/choose.md"), board_block),
    "tasks": (Path("docs/choose.md"), tasks_block),
    "retrieved": (Path("docs/advise.md"), retrieved_block),
    "quality": (Path("docs/results.md"), quality_block),
    "results": (Path("docs/results.md"), results_block),
    "columns": (Path("docs/results.md"), columns_block),
    "age-tiers": (Path("docs/concepts.md"), age_tiers_block),
}
