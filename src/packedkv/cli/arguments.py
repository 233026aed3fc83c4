"""What commands share: types and groups of arguments, and the result that the command line writes."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from packedkv.errors import KVError
from packedkv.models.named import NAMES

PROBE = ("refuse", "warn", "off")
"""The choices of ``packedkv.key_bias.Probe``, written here because that module needs torch."""


class Result(NamedTuple):
    """The result of a command: ``data`` for ``--json``, readable ``text``, and the exit status."""

    data: Any
    text: str
    status: int = 0


def at_least(least: int) -> Callable[[str], int]:
    """Give the reader of a whole number that is no less."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return read


positive, not_negative = at_least(1), at_least(0)


def seconds(text: str) -> float:
    """Read a time, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number


def specs(text: str) -> list[str]:
    """Read a list of specs: ``int-4,kivi-2:window=64,sink=4``."""
    from packedkv.registry import split_specs

    names = split_specs(text)
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no preset; write e.g. saw-int4,kivi-2:window=64")
    return names


def tokens(text: str) -> int:
    """Read a number of tokens; ``k`` is 1024.

    >>> tokens("32k")
    32768
    """
    number = text.strip().lower()
    return positive(number.removesuffix("k")) * (1024 if number.endswith("k") else 1)


def lengths(text: str) -> tuple[int, ...]:
    """Read several numbers of tokens, as ``tokens`` does.

    >>> lengths("512,4k")
    (512, 4096)
    """
    return tuple(tokens(part) for part in text.split(",") if part.strip())


def depths(text: str) -> tuple[float, ...]:
    """Read shares between 0 and 1."""
    try:
        shares = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        shares = (-1.0,)
    if not shares or any(not 0 <= depth <= 1 for depth in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of shares between 0 and 1, e.g. 0,0.5,1")
    return shares


def add_model(p: argparse.ArgumentParser) -> None:
    """Add MODEL."""
    p.add_argument("model", metavar="MODEL", help=f"path, .gguf file, hub id, or one of: {NAMES}")


def add_device(p: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    p.add_argument("--device", default="cpu", help="torch device (%(default)s)")
    p.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of the model (%(default)s)"
    )


def add_seed(p: argparse.ArgumentParser) -> None:
    """Add ``--seed``."""
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn at random (%(default)s)")


def add_head_dim(p: argparse.ArgumentParser) -> None:
    """Add ``--head-dim``."""
    p.add_argument("--head-dim", type=positive, default=128, metavar="D", help="channels of a head (%(default)s)")


def add_codec_file(p: argparse.ArgumentParser, default: Any) -> None:
    """Add ``--codec-file``."""
    p.add_argument(
        "--codec-file", metavar="FILE", action="append", default=default, help="a .py file with codecs of your own"
    )


def add_text(p: argparse.ArgumentParser, windows: int | None = 3) -> None:
    """Add the options of windows of a text."""
    p.add_argument("--text", metavar="FILE", help="UTF-8 text (default: the packaged head of WikiText-2's test split)")
    p.add_argument("--windows", type=positive, default=windows, metavar="N", help="windows of text (3)")
    p.add_argument(
        "--window-tokens",
        type=at_least(2),
        default=2048,
        metavar="N",
        help="tokens of a window (%(default)s, the protocol's)",
    )
    p.add_argument("--budget", type=seconds, metavar="SECONDS", help="begin nothing that would end later than this")


def add_reading(p: argparse.ArgumentParser) -> None:
    """Add the options of how a compressed model is evaluated."""
    p.add_argument(
        "--params",
        action="append",
        default=[],
        metavar="FILE",
        help="constants that `packedkv fit` wrote, for the spec they were fitted for; may be repeated",
    )
    p.add_argument(
        "--prefill",
        choices=("decoded", "exact"),
        default="decoded",
        help="what a window attends: what is stored, as papers do (decoded, the default), or fresh K and V (exact)",
    )
    add_seed(p)
    add_device(p)


def add_probe(p: argparse.ArgumentParser, default: str | None = "refuse") -> None:
    """Add ``--probe``."""
    p.add_argument(
        "--probe",
        choices=PROBE,
        default=default,
        help="a preset that breaks on the model's key biases: refuse it, warn and go on, or do not look (refuse)",
    )


def check_target(option: str, path: str, otherwise: str = "") -> None:
    """Validate, before any work, that a file can be written."""
    from packedkv.cli.measure.rows import check_writable

    check_writable(Path(path).parent)
    if Path(path).is_dir():
        raise KVError(f"{option} {path} is a folder; name a file in it{otherwise}.")
