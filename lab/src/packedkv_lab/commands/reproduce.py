"""``packedkv reproduce``: recompute what the papers print."""

import argparse
from collections.abc import Iterable
from itertools import chain
from time import monotonic
from typing import Any

from packedkv.cli.arguments import Result
from packedkv.errors import KVError


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("papers", nargs="*", metavar="PAPER", help="e.g. saw-int4, or rate-distortion; default: all")
    p.add_argument("--quick", action="store_true", help="smaller samples: sooner done, less exact")
    p.add_argument("--model", metavar="MODEL", help="rate-distortion also on this model's keys and values")
    p.add_argument("--out", metavar="FOLDER", help="write reproduce.md and reproduce.json there")


def run(args: argparse.Namespace) -> Result:
    from packedkv.cli.measure.rows import check_writable
    from packedkv.progress import Progress
    from packedkv_lab.reproduce import rate_distortion, report, reproduce_rows

    progress, start = Progress(), monotonic()
    papers = [paper for paper in args.papers if paper != rate_distortion.STUDY]
    sources: list[Iterable[dict[str, Any]]] = []
    if papers or not args.papers:
        sources.append(reproduce_rows(papers or None, quick=args.quick, progress=progress))
    if rate_distortion.STUDY in args.papers or not args.papers:
        model = None
        if args.model is not None:
            from packedkv.models.loading import load

            model = load(args.model, progress=progress)
        sources.append(rate_distortion.rate_distortion_rows(quick=args.quick, model=model, progress=progress))
    elif args.model is not None:
        raise KVError(f"--model is for {rate_distortion.STUDY}, which was not asked for; add it, or name no paper.")
    if args.out is not None:
        check_writable(args.out)
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(chain.from_iterable(sources))
    except KeyboardInterrupt:
        if not rows:
            raise
        progress.say("interrupted: the rows hold what was finished.")
        rows = [row | {"partial": True} for row in rows]
    written = []
    if args.out is not None:
        about = {"seconds": round(monotonic() - start), "quick": args.quick, "model": args.model or "none"}
        written = [f"written: {path}" for path in report.write_folder(rows, args.out, about)]
    return Result(rows, "\n".join([report.terminal(rows), *written]))
