"""``packedkv list``: all presets with their bits, the recommended ones first, the others by paper."""

import argparse
import re
from typing import Any

from packedkv.cli.arguments import Result, add_head_dim
from packedkv.cli.page.tables import aligned
from packedkv.errors import ShapeError

KEYS = ("spec", "mark", "method", "source", "key_bits", "value_bits", "effective_bits", "nominal_bits", "block_tokens",
        "sink", "window", "kernels", "summary")  # fmt: skip
HEADS = ("preset", "K bits", "V bits", "block", "sink", "window", "kernels", "what it is")


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_head_dim(p)


def run(args: argparse.Namespace) -> Result:
    import packedkv

    rows = [_row(preset, args.head_dim) for preset in packedkv.presets()]
    groups: dict[str, list[dict[str, Any]]] = {"recommended": []}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    groups["baselines"] = groups.pop("baselines", [])  # the last ones
    head, rule, *lines = aligned([HEADS, *(_cells(r) for g in groups.values() for r in g)], text=range(8), ruled=True)
    out, rest = [head, rule], iter(lines)
    for group, members in groups.items():
        out += ["", f"{group}:", *(next(rest) for _ in members)]
    bits = f"bits: all bytes of an encoded block x 8 / elements, at head_dim {args.head_dim}; windows not counted"
    return Result(rows, "\n".join([*out, "", bits, "Options of one of them: packedkv describe PRESET"]))


def _group(row: dict[str, Any]) -> str:
    if row["mark"] != "paper":
        return {"recommended": "recommended", "baseline": "baselines"}[row["mark"]]
    first = row["source"].partition(";")[0]
    return re.sub(r"(arXiv:[\d.]+|^[^:,]+:).*", r"\1", first).rstrip(":")


def _row(preset: str, head_dim: int) -> dict[str, Any]:
    import packedkv
    from packedkv.registry import method_of

    mark = method_of(preset).marks[preset]
    try:
        facts = packedkv.describe(preset, head_dim) | {"mark": mark}
    except ShapeError as error:  # listed with the reason why it cannot be used at this head_dim
        facts = packedkv.describe(preset) | {"mark": mark}
        facts |= {"key_bits": None, "value_bits": None, "effective_bits": None, "nominal_bits": None}
        facts["kernels"] = {"encode": "none", "decode": "none"}
        return {key: facts[key] for key in KEYS} | {"head_dim": head_dim, "refused": str(error)}
    return {key: facts[key] for key in KEYS} | {"head_dim": head_dim}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    bits = ["-" if row[k] is None else f"{row[k]:.3f}" for k in ("key_bits", "value_bits")]
    served = row["kernels"]
    kernels = (
        served["decode"] if served["decode"] == served["encode"] else f"{served['decode']} (encode: {served['encode']})"
    )
    counts = [str(row[k]) for k in ("block_tokens", "sink", "window")]
    return row["spec"], *bits, *counts, kernels, row.get("refused", row["summary"])
