"""Tables as plain text, and the columns of the rows of ``packedkv compare``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv.cli.page.words import DASH, bytes_text, small_text

Row = Mapping[str, Any]


def aligned(lines: Sequence[Sequence[str]], *, text: Collection[int] = (0,), ruled: bool = False) -> list[str]:
    """Lines of a table as plain text, headings first: two spaces between columns, numbers to the right, columns of
    ``text`` to the left; ``ruled``: with dashes under the headings.

    >>> print(*aligned([["preset", "bits"], ["int-4", "4.50"], ["octopus-3", "3.19"]], ruled=True), sep="\\n")
    preset     bits
    ---------  ----
    int-4      4.50
    octopus-3  3.19
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if ruled:
        rule = ["-" * width for width in widths]
        if len(rule) - 1 in text:
            rule[-1] = "-" * len(lines[0][-1])
        lines = [lines[0], rule, *lines[1:]]
    pads = [str.ljust if i in text else str.rjust for i in range(len(widths))]
    return ["  ".join(put(x, w) for put, x, w in zip(pads, line, widths, strict=True)).rstrip() for line in lines]


# -- rows of packedkv compare ------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the result table: key of the row, heading, format of a value, meaning."""

    key: str
    heading: str
    text: Callable[[Any], str]
    meaning: str


COLUMNS = (
    Column("spec", "spec", str, "the preset; `packedkv describe SPEC` says everything about it"),
    Column(
        "key_bits",
        "K bits",
        lambda v: f"{v:.2f}",
        "bits per stored key element, scales and padding included, from the byte layout at the model's head_dim; "
        "tokens held dense are not counted",
    ),
    Column("value_bits", "V bits", lambda v: f"{v:.2f}", "the same for values"),
    Column(
        "effective_bits",
        "bits in all",
        lambda v: f"{v:.2f}",
        "every byte the cache held in the run (codes, scales, sinks, windows, dense layers, reserve) x 8 / elements",
    ),
    Column("cache_bytes", "cache", bytes_text, "bytes measured from the tensors held"),
    Column("ratio_to_16bit", "ratio", lambda v: f"{v:.2f}x", "bytes of the same tokens in 16 bit / `cache`"),
    Column(
        "perplexity", "perplexity", lambda v: f"{v:.2f}", "exp of the mean loss over all scored tokens; lower is better"
    ),
    Column(
        "kl",
        "KL",
        small_text,
        "mean over tokens of KL(uncompressed || compressed) between next-token distributions, in nats; 0 is the same",
    ),
    Column(
        "top1_agreement",
        "top-1",
        lambda v: f"{100 * v:.1f} %",
        "how often the most likely next token is the uncompressed model's",
    ),
    Column(
        "attention_error",
        "attn. error",
        small_text,
        "relative error of the attention output, ||o^ - o|| / ||o||, mean over layers",
    ),
    Column("tokens_per_s", "tokens/s", lambda v: f"{v:.1f}", "speed of greedy generation on the machine of the run"),
    Column(
        "long_tokens_per_s",
        "tokens/s, long",
        lambda v: f"{v:.1f}",
        "the same behind a long context: `long_tokens` tokens of the text, 8,000 in the demo",
    ),
)


def with_reference(rows: Sequence[Row]) -> list[Row]:
    """Put the uncompressed model's own figures on top, when the rows carry them."""
    base = next((r["uncompressed"] for r in rows if r.get("uncompressed")), None)
    if base is None:
        return list(rows)
    return [{"kl": 0.0, "top1_agreement": 1.0, "attention_error": 0.0, **base, "spec": UNCOMPRESSED}, *rows]


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Columns that at least one row has a value for."""
    return [c for c in COLUMNS if any(r.get(c.key) is not None for r in rows)]


def cell(row: Row, column: Column) -> str:
    """Return the text of a cell; a dash if the row has no value."""
    value = row.get(column.key)
    if value is None:
        return DASH
    return column.text(value) if column.key == "spec" or isinstance(value, (int, float)) else str(value)
