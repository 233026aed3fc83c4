"""docs/key-biases.md: presets on keys with biases.

key-summary, key-breaks, key-channels, key-mends, key-means
            which presets fail, and what mends it, from KEY_ERRORS and the runs JUDGE
med3        perplexity by slots of outliers, from MED3
"""

from functools import partial
from pathlib import Path

from blocks.sources import BOARD, JUDGE, Blocks, MissingResultError, read_runs, rows_of
from kvcodec.cli.page.tables import cell, columns_of, markdown
from kvcodec.errors import FormatError
from kvcodec_lab.report.pages import key_errors

KEY_ERRORS = tuple(
    Path(f"benchmarks/results/cpu/key_errors_{name}.json") for name in ("qwen2.5-coder-1.5b", "smollm2-135m-stressed")
)
MED3 = Path("benchmarks/results/cpu/med3_qwen2.5-coder-1.5b.json")


def key_block(root: Path, part: str) -> str:
    """One part of the page on key biases: ``summary``, ``breaks``, ``channels``, ``mends`` or ``means``."""
    try:
        data, stressed = (key_errors.read(root / path) for path in KEY_ERRORS)
        runs = read_runs(root / BOARD)
    except FormatError as error:
        raise MissingResultError(str(error)) from error
    judged, small, plain = (runs.get(name) for name in JUDGE)
    if part == "summary":
        return key_errors.summary(data, judged, plain)
    if part == "breaks":
        return key_errors.breaking(data, stressed, judged, small)
    if part == "means":
        return key_errors.without_mean(judged)
    return key_errors.channels(data) if part == "channels" else key_errors.mending(data)


def med3_block(root: Path) -> str:
    """Bits, perplexity and KL by slots, and with the keys of layer 0 dense."""
    path = root / MED3
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{MED3} does not exist; docs/key-biases.md says what made it.")
    columns = [c for c in columns_of(rows) if c.key in ("spec", "key_bits", "effective_bits", "perplexity", "kl")]
    lines = []
    for row in rows:
        rise = row["perplexity"] / row["uncompressed"]["perplexity"] - 1
        told = f"{100 * rise:+.1f} %".replace("-", "−") if rise < 1 else f"x {1 + rise:,.1f}"
        name, *cells = [cell(row, c) for c in columns]
        lines.append([f"`{name}`", str(row["window_tokens"]), *cells, told])
    heads = ["spec", "tokens", *(c.heading for c in columns[1:]), "beside uncompressed"]
    return markdown(heads, lines)


BLOCKS: Blocks = {
    **{
        f"key-{part}": (Path("docs/key-biases.md"), partial(key_block, part=part))
        for part in ("summary", "breaks", "channels", "mends", "means")
    },
    "med3": (Path("docs/key-biases.md"), med3_block),
}
