"""``kvcodec bench serve URL``: its arguments; ``bench.py`` does the work.

At module level only light modules are imported, so that ``kvcodec --help`` does not load torch.
"""

import argparse
from typing import TYPE_CHECKING, Any

from kvcodec.cli.arguments import lengths, positive, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcodec.progress import Progress
    from kvcodec_lab.bench.record import Row
    from kvcodec_lab.serve.bench import Outcome

LOADS = ("sweep", "sessions")


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (0.0,)
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates, e.g. 0.5,2")
    return found


def _loads(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(LOADS):
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(LOADS)}")
    return found


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of ``bench serve``."""
    group = p.add_argument_group("bench serve")
    options: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("--start", {"metavar": "LABEL=COMMAND", "action": "append", "default": []}, "start this server, measure it, "
         "stop it; one after the other. Its --port says where (else URL's)"),
        ("--label", {"metavar": "NAME", "default": "server"}, "of the server that runs at URL (%(default)s)"),
        ("--load", {"type": _loads, "default": LOADS, "metavar": "A,B"}, "sweep, sessions (both)"),
        ("--concurrency", {"type": lengths, "default": (1, 4, 16, 64, 256), "metavar": "N,M"}, "of the sweep: clients "
         "at once (1,4,16,64,256)"),
        ("--rate", {"type": _rates, "metavar": "R,S"}, "of the sweep, instead of clients: requests per second"),
        ("--input-len", {"type": lengths, "default": (1024, 8192, 16384), "metavar": "N,M"}, "of the sweep: tokens of "
         "a prompt (1k,8k,16k)"),
        ("--output-len", {"type": positive, "default": 1024, "metavar": "N"}, "of the sweep: tokens (%(default)s)"),
        ("--requests", {"type": positive, "metavar": "N"}, "of each point (4 for each client, at least 8; of a rate: "
         "what comes in a minute)"),
        ("--sessions", {"type": positive, "default": 32, "metavar": "N"}, "beside each other (%(default)s)"),
        ("--rounds", {"type": positive, "default": 6, "metavar": "N"}, "of a session (%(default)s)"),
        ("--shared", {"type": int, "default": 1024, "metavar": "N"}, "tokens that all sessions share (%(default)s)"),
        ("--context", {"type": positive, "default": 16384, "metavar": "N"}, "a session's own first tokens "
         "(%(default)s)"),
        ("--turn", {"type": positive, "default": 2048, "metavar": "N"}, "tokens of a tool's output (%(default)s)"),
        ("--answer", {"type": positive, "default": 256, "metavar": "N"}, "tokens of an answer (%(default)s)"),
        ("--pause", {"type": seconds, "default": 0.0, "metavar": "SECONDS"}, "of a tool's work (%(default)s)"),
        ("--together", {"action": "store_true"}, "a round begins when every session has finished the one before"),
        ("--warmups", {"type": int, "default": 2, "metavar": "N"}, "requests before each load (%(default)s)"),
        ("--model", {"metavar": "NAME"}, "of those that the server serves (the first)"),
        ("--vocabulary", {"type": positive, "metavar": "N"}, "prompts' ids: below it (the model's, or 30000)"),
        ("--timeout", {"type": seconds, "default": 1800.0, "metavar": "SECONDS"}, "of one request (%(default)s)"),
        ("--start-timeout", {"type": seconds, "default": 900.0, "metavar": "SECONDS"}, "until a server is up "
         "(%(default)s)"),
        ("--header", {"metavar": "'NAME: VALUE'", "action": "append", "default": []}, "sent with every request"),
        ("--gpu", {"metavar": "NAME"}, "stamped on the rows (what nvidia-smi says here; a server elsewhere: unknown)"),
    )  # fmt: skip
    for option, form, text in options:
        group.add_argument(option, **form, help=text)


def run(args: argparse.Namespace, progress: "Progress") -> "Outcome":
    """Measure, write rows, page and drawings: ``serve.bench.run``."""
    from kvcodec_lab.serve import bench

    return bench.run(args, progress)


def text(rows: "Sequence[Row]") -> str:
    """Return the tables of a run for a terminal."""
    from kvcodec_lab.serve.tables import tables

    return "\n\n".join(str(table) for table in tables(rows))
