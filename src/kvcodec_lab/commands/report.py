"""``kvcodec report``: the page of an eval folder, or picture and page of result files."""

import argparse
from typing import Any

from kvcodec_lab.result import Result


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from kvcodec_lab.report import command

    p.add_argument("files", nargs="+", metavar="DIR|FILE.json", help="what eval --output wrote, or files of rows")
    p.add_argument("--out", metavar="FOLDER", help="of files: where picture and page go (kvcodec-report)")
    p.add_argument("--title")
    command.add_arguments(p)


def run(args: argparse.Namespace) -> Result:
    """Write the page of a folder, or picture and page of files."""
    from kvcodec_lab.eval.rows import check_writable, read_rows
    from kvcodec_lab.report import command
    from kvcodec_lab.report.pages.compare import write_report

    if command.wants_page(args.files):
        page = command.run(args)
        return Result([str(page)], f"written: {page}")
    command.refuse_options(args)
    rows = read_rows(args.files)
    out = check_writable(args.out or "kvcodec-report")
    meta: dict[str, Any] = {"title": args.title or "kvcodec report", "files": ", ".join(map(str, args.files))}
    meta |= {key: rows[0][key] for key in ("model", "text", "versions") if key in rows[0]}
    paths = write_report(rows, out, meta)
    return Result([str(path) for path in paths], "\n".join(f"written: {path}" for path in paths))
