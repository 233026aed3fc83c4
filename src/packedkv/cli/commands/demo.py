"""``packedkv demo``: one real model, one real text, nine presets; a table, a picture, a page, one recommendation."""

import argparse
from pathlib import Path

from packedkv.cli.arguments import Result, add_probe, add_text, specs
from packedkv.models.named import NAMES


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", help=f"path, .gguf file, hub id, or one of: {NAMES} (default: the first)")
    p.add_argument("--specs", type=specs, metavar="A,B", help="presets, instead of the nine")
    add_text(p)
    add_probe(p)
    p.add_argument("--out", default="packedkv-report", metavar="FOLDER", help="where the report goes (%(default)s)")


def run(args: argparse.Namespace) -> Result:
    from packedkv.cli.demo import BUDGET, LONG_TOKENS, MODEL, NEW_TOKENS, run_demo, show
    from packedkv.cli.measure.compare import Settings
    from packedkv.models.loading import load_text
    from packedkv.progress import Progress

    rows, meta, paths = run_demo(
        args.model or MODEL,
        args.specs,
        text=load_text(args.text),
        windows=args.windows,
        budget=BUDGET if args.budget is None else args.budget,
        out=Path(args.out),
        progress=Progress(),
        settings=Settings(
            window_tokens=args.window_tokens, new_tokens=NEW_TOKENS, long_tokens=LONG_TOKENS, probe=args.probe
        ),
    )
    return Result(rows, show(rows, meta, paths))
