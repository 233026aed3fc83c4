"""``packedkv describe``: everything about one preset: options, layout, bits."""

import argparse
from typing import Any

from packedkv.cli.arguments import Result, add_head_dim
from packedkv.cli.page.words import scalar_text


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("spec", metavar="SPEC", help="a preset, with options or without, e.g. kivi-2:window=64")
    add_head_dim(p)


def run(args: argparse.Namespace) -> Result:
    import packedkv

    facts = packedkv.describe(args.spec, args.head_dim)
    lines = [f"{facts['spec']}: {facts['summary']}", f"source: {facts['source']}", ""]
    for key, value in facts.items():
        if key not in ("spec", "summary", "source") and not isinstance(value, dict | list):
            lines.append(f"  {key:<20} {scalar_text(value)}")
    lines.append(f"  {'kernels':<20} {', '.join(f'{k}: {by}' for k, by in facts['kernels'].items())}")
    lines += ["", "options" if facts["options"] else "no options"]
    for o in facts["options"]:
        lines.append(f"  {o['name']}={_option(o['value'])}  ({o['type']}, default {_option(o['default'])})  {o['doc']}")
    lines += ["", f"bytes of a page of {facts['page_tokens']} tokens of one head, in this order"]
    for f in facts["layout"]:
        shape = " x ".join(map(str, f["shape"]))
        per = "token" if f["block_tokens"] == 1 else f"{f['block_tokens']} tokens"
        lines.append(f"  {f['page_offset']:>6}  {f['role']}.{f['field']:<12} {f['dtype']} [{shape}] per {per}")
    return Result(facts, "\n".join(lines))


def _option(value: Any) -> str:
    """As a spec takes it: true, false, none."""
    return str(value).lower() if value is None or isinstance(value, bool) else scalar_text(value)
