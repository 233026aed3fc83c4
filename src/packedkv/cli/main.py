"""The command line, ``packedkv COMMAND``; each command is a file of ``packedkv.cli.commands``.

Exit status: 0 done, 1 advise found nothing within --max-kl or bench serve met failures, 2 user error, 130 interrupted.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from packedkv.cli.arguments import Result, add_codec_file, check_target
from packedkv.errors import KVError
from packedkv.version import __version__

INTERRUPTED = 130
GROUP = "packedkv.commands"
"""Entry point group of the commands that other distributions add; a name is a command, a value its module."""
COMMANDS = {
    "demo": "nine presets on a real model and text: table, picture, page",
    "list": "list all presets with their bits",
    "describe": "everything about one preset: options, layout, bits",
    "compare": "compare presets on your model and text",
    "advise": "which preset or mixture suits your model, context and memory",
    "fit": "fit the constants of a preset to your model on your text",
    "compile": "compile CUDA kernels ahead of time, also for other machines",
    "env": "versions, kernels, GPUs and cache folders of this installation, for a bug report",
}
"""The library's commands and their help texts."""
LABORATORY = {
    "eval": "evaluate presets on tasks, with intervals; resumable",
    "report": "make the page of an eval folder, or picture and page of result files",
    "bench": "time encode, decode and attention on this machine",
    "reproduce": "recompute what the papers print",
}
"""Commands of the distribution ``packedkv-lab``, and their help texts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    form, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        for path in args.codec_file:
            from packedkv.registry import load_file

            load_file(path)
        if args.json not in (None, "-"):
            check_target("--json", args.json, ", or - for standard output")
        result = args.run(args)
        return result if isinstance(result, int) else _write(args.json, result)
    except KVError as error:
        print(f"packedkv: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("packedkv: interrupted before anything was finished.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        warnings.formatwarning = form


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; only the commands that it names are imported."""
    parser = argparse.ArgumentParser(prog="packedkv", description="KV caches 3-5x smaller, at their true bits.")
    parser.add_argument("--version", action="version", version=f"packedkv {__version__}")
    add_codec_file(parser, [])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    added = {point.name: point.value for point in entry_points(group=GROUP)}
    if (missing := next((word for word in argv if not word.startswith("-")), "")) in LABORATORY.keys() - added.keys():
        parser.error(f"'{missing}' is a command of packedkv-lab, which is not installed; pip install packedkv-lab")
    summaries = COMMANDS | {name: LABORATORY.get(name, f"command of {module}") for name, module in added.items()}
    for name, summary in summaries.items():
        p = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in argv:
            p.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
            add_codec_file(p, argparse.SUPPRESS)  # allowed before the command and after it
            command: Any = import_module(added.get(name, f"packedkv.cli.commands.{name}"))
            command.add_arguments(p)
            p.set_defaults(run=command.run)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2, "\npackedkv: error: name a command, e.g. packedkv list\n")
    return parser.parse_args(argv)


def _write(json: str | None, result: Result) -> int:
    from packedkv.cli.measure.rows import write_json

    if json is not None:
        write_json(json, result.data)
    if json != "-":
        print(result.text)
    interrupted = isinstance(result.data, list) and any(isinstance(r, dict) and r.get("partial") for r in result.data)
    return INTERRUPTED if interrupted else result.status


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line, without the source location of the default format."""
    return f"packedkv: warning: {message}\n"


if __name__ == "__main__":
    sys.exit(main())
