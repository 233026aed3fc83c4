"""``packedkv report``: the page of an eval folder, or picture and page of result files."""

import argparse
from pathlib import Path
from typing import Any

from packedkv.cli import arguments
from packedkv.cli.arguments import Result
from packedkv.cli.page.rows import read_rows
from packedkv.errors import FormatError, KVError, SpecError
from packedkv_lab.report.results import ADVICE, SENSITIVITY, read_folder, read_layers, read_times
from packedkv_lab.report.sizes import CONTEXT, CONTEXTS

PAGE = "report.html"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("files", nargs="+", metavar="DIR|FILE.json", help="what eval --output wrote, or files of rows")
    p.add_argument("--out", metavar="FOLDER", help="of files: where picture and page go (packedkv-report)")
    p.add_argument("--title", help="the page's title")
    p.add_argument("-o", "--output", metavar="FILE", help=f"of a folder: the page to write (DIR/{PAGE})")
    p.add_argument(
        "--context",
        type=context_tokens,
        default=CONTEXT,
        metavar="N",
        help="of a folder: tokens of a sequence that memory is shown for (%(default)s)",
    )
    p.add_argument("--bench", metavar="DIR", help="of a folder: also speed, from the folder of `packedkv bench decode`")
    p.add_argument(
        "--layers",
        metavar="DIR",
        help=f"of a folder: also figures by layer, from the folder of `packedkv advise` (an {ADVICE} or {SENSITIVITY} "
        f"in the results folder is read by itself)",
    )


def context_tokens(text: str) -> int:
    """Read a context; ``k`` is 1024.

    >>> context_tokens("32k")
    32768
    """
    tokens = arguments.tokens(text)
    if not CONTEXTS[0] <= tokens <= CONTEXTS[-1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no context; write tokens from {CONTEXTS[0]} to {CONTEXTS[-1]}, e.g. 32768 or 32k"
        )
    return tokens


def _names_folder(files: list[str]) -> bool:
    folders = [path for path in files if Path(path).is_dir()]
    if folders and len(files) > 1:
        raise SpecError(f"{folders[0]} is a folder: name it alone, one page shows one run; or name files alone.")
    return bool(folders)


def _check_options(args: argparse.Namespace) -> None:
    if not Path(args.files[0]).exists() and not args.files[0].endswith((".json", ".jsonl")):
        raise SpecError(f"{args.files[0]} does not exist; name the folder that `packedkv eval --output` wrote.")
    for option in ("output", "bench", "layers"):
        if getattr(args, option) is not None:
            name = "-o" if option == "output" else f"--{option}"
            raise SpecError(f"{name} is for the folder of an eval run; files of rows take --out FOLDER.")


def run(args: argparse.Namespace) -> Result:
    from packedkv.cli.measure.rows import check_writable
    from packedkv.cli.page.compare import write_report

    if _names_folder(args.files):
        page = _eval_page(args)
        return Result([str(page)], f"written: {page}")
    _check_options(args)
    rows = read_rows(args.files)
    if not rows:
        raise FormatError(f"{', '.join(args.files)} holds no result rows; pass what compare --json or demo wrote.")
    out = check_writable(args.out or "packedkv-report")
    meta: dict[str, Any] = {"title": args.title or "packedkv report", "files": ", ".join(map(str, args.files))}
    meta |= {key: rows[0][key] for key in ("model", "text", "versions") if key in rows[0]}
    paths = write_report(rows, out, meta)
    return Result([str(path) for path in paths], "\n".join(f"written: {path}" for path in paths))


def _eval_page(args: argparse.Namespace) -> Path:
    from packedkv.cli.page.rows import write_whole
    from packedkv_lab.report.evaluation import page_html

    folder = Path(args.files[0])
    if args.out is not None:
        raise SpecError("--out is for result files; the page of a folder goes to -o FILE.")
    target = Path(args.output) if args.output else folder / PAGE
    if target.is_dir():
        raise KVError(f"-o {target} is a folder; name a file in it.")
    results = read_folder(folder)
    bench = [] if args.bench is None else read_times(Path(args.bench))
    there = any((folder / name).is_file() for name in (ADVICE, SENSITIVITY))
    layers = read_layers(args.layers or folder) if args.layers is not None or there else None
    text = page_html(results, context=args.context, bench=bench, layers=layers, title=args.title or "")
    write_whole(target, text.encode("utf-8", "replace").decode("utf-8"))  # a model may generate half a surrogate pair
    return target
