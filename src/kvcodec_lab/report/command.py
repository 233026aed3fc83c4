"""``kvcodec report DIR -o FILE``: arguments, and what is read and written."""

import argparse
import os
from pathlib import Path

from kvcodec.errors import KVError, SpecError
from kvcodec_lab.report.pages.eval import CONTEXT, page_html
from kvcodec_lab.report.rows import ADVICE, SENSITIVITY, Layers, read_folder, read_layers, read_times
from kvcodec_lab.report.sizes import CONTEXTS

PAGE = "report.html"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add what only the page of a folder takes."""
    p.add_argument("-o", "--output", metavar="FILE", help=f"of a folder: the page to write (DIR/{PAGE})")
    p.add_argument(
        "--context",
        type=context_tokens,
        default=CONTEXT,
        metavar="N",
        help="of a folder: tokens of a sequence that memory is shown for, the page can change it (%(default)s)",
    )
    p.add_argument("--bench", metavar="DIR", help="of a folder: also speed, from the folder of `kvcodec bench decode`")
    p.add_argument(
        "--layers",
        metavar="DIR",
        help=f"of a folder: also figures by layer, from the folder of `kvcodec advise` (a {ADVICE} or {SENSITIVITY} in "
        f"the results folder is read by itself)",
    )


def context_tokens(text: str) -> int:
    """Read a context; ``k`` is 1024.

    >>> context_tokens("32k")
    32768
    """
    number, unit = text.strip().lower(), 1
    if number.endswith("k"):
        number, unit = number[:-1], 1024
    if not number.isdigit() or not CONTEXTS[0] <= int(number) * unit <= CONTEXTS[-1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no context; write tokens from {CONTEXTS[0]} to {CONTEXTS[-1]}, e.g. 32768 or 32k"
        )
    return int(number) * unit


def wants_page(files: list[str]) -> bool:
    """Whether a folder was named: then it is the page of a run.

    Raises
    ------
    SpecError
        If there is something beside the folder.
    """
    folders = [path for path in files if Path(path).is_dir()]
    if folders and len(files) > 1:
        raise SpecError(f"{folders[0]} is a folder: name it alone, one page shows one run; or name files alone.")
    return bool(folders)


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse what only a folder's page takes, where files of rows were named.

    Raises
    ------
    SpecError
    """
    if not Path(args.files[0]).exists() and not args.files[0].endswith((".json", ".jsonl")):
        raise SpecError(f"{args.files[0]} does not exist; name the folder that `kvcodec eval --output` wrote.")
    for option in ("output", "bench", "layers"):
        if getattr(args, option) is not None:
            name = "-o" if option == "output" else f"--{option}"
            raise SpecError(f"{name} is for the folder of an eval run; files of rows take --out FOLDER.")


def run(args: argparse.Namespace) -> Path:
    """Write the page; return its path.

    Raises
    ------
    KVError
        What is read is damaged or missing, or the page cannot be written. A page that was there stays then.
    """
    folder = Path(args.files[0])
    if args.out is not None:
        raise SpecError("--out is for result files; the page of a folder goes to -o FILE.")
    target = Path(args.output) if args.output else folder / PAGE
    if target.is_dir():
        raise KVError(f"-o {target} is a folder; name a file in it.")
    results = read_folder(folder)
    bench = [] if args.bench is None else read_times(Path(args.bench))
    layers: Layers | None = None
    if args.layers is not None:
        layers = read_layers(args.layers)
    elif any((folder / name).is_file() for name in (ADVICE, SENSITIVITY)):
        layers = read_layers(folder)
    text = page_html(results, context=args.context, bench=bench, layers=layers, title=args.title or "")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8", errors="replace")
            part.replace(target)
        except BaseException:  # a full disk, an interrupt: nothing half written stays
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise KVError(f"the page {target} cannot be written ({error.strerror or error}); pass another -o.") from error
    return target
