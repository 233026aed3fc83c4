"""``kvcodec list``: all presets with their bits."""

import argparse
from typing import Any

from kvcodec.cli.arguments import add_head_dim
from kvcodec.cli.page.tables import aligned
from kvcodec.cli.result import Result
from kvcodec.errors import ShapeError

KEYS = ("spec", "method", "source", "key_bits", "value_bits", "effective_bits", "nominal_bits", "block_tokens", "sink",
        "window", "kernels", "summary")  # fmt: skip
HEADS = ("preset", "K bits", "V bits", "block", "sink", "window", "kernels", "what it is")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_head_dim(p)


def run(args: argparse.Namespace) -> Result:
    """Describe every preset."""
    import kvcodec

    rows = [_row(preset, args.head_dim) for preset in kvcodec.presets()]
    out = aligned([HEADS, *map(_cells, rows)], text=range(len(HEADS)), ruled=True)
    bits = f"bits: all bytes of an encoded block x 8 / elements, at head_dim {args.head_dim}; windows not counted"
    return Result(rows, "\n".join([*out, "", bits, "Options of one of them: kvcodec describe PRESET"]))


def _row(preset: str, head_dim: int) -> dict[str, Any]:
    import kvcodec

    try:
        found = kvcodec.describe(preset, head_dim)
    except ShapeError as error:  # listed with the reason why it cannot be used at this head_dim
        found = kvcodec.describe(preset)
        found |= {"key_bits": None, "value_bits": None, "effective_bits": None, "nominal_bits": None}
        found["kernels"] = {"encode": "none", "decode": "none"}
        return {key: found[key] for key in KEYS} | {"head_dim": head_dim, "refused": str(error)}
    return {key: found[key] for key in KEYS} | {"head_dim": head_dim}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    bits = ["-" if row[k] is None else f"{row[k]:.3f}" for k in ("key_bits", "value_bits")]
    served = row["kernels"]
    kernels = (
        served["decode"] if served["decode"] == served["encode"] else f"{served['decode']} (encode: {served['encode']})"
    )
    counts = [str(row[k]) for k in ("block_tokens", "sink", "window")]
    return row["spec"], *bits, *counts, kernels, row.get("refused", row["summary"])
