"""Exceptions of packedkv: each message says what was passed, what is allowed, and what to do."""

import difflib
from collections.abc import Iterable
from pathlib import Path

FORMER_NAME = "kvcodec"
"""Name of the project in files and options that were written before it became packedkv."""


class KVError(Exception):
    """Base class of every error below."""


class SpecError(KVError, ValueError):
    """Raised for an unknown preset, option or option value."""


class ShapeError(KVError, ValueError):
    """Raised for a tensor shape or head_dim that a codec does not support."""


class FitError(KVError, RuntimeError):
    """Raised when a site's constants cannot be fitted from the sample given."""


class FormatError(KVError, ValueError):
    """Raised when a saved file is cut, altered, foreign, or written by a newer version."""


class ModelError(KVError, RuntimeError):
    """Raised when a model or a text cannot be found or loaded."""


class UnsupportedError(KVError, NotImplementedError):
    """Raised for a model, layer or device that is not supported."""


class BrokenPresetError(UnsupportedError):
    """Raised for a preset that breaks on a model's keys, with ``probe="refuse"``."""


class PackedKVWarning(UserWarning):
    """Issued when the chosen codec loses too much on a model's keys; names an alternative."""


def check_former_name(path: str | Path, marks: Iterable[object], mark: str, remedy: str) -> None:
    """Raise FormatError if a file has the mark of the project's former name instead of ``mark``."""
    if mark.replace("packedkv", FORMER_NAME) in marks:
        raise FormatError(f"{path} was written by {FORMER_NAME}, the former name of packedkv; {remedy}.")


def nearest(word: str, known: Iterable[str], n: int = 3) -> str:
    """Return `` Did you mean 'a', 'b'?`` for the known words closest to ``word``, or ``""``."""
    names = {name.lower(): name for name in sorted(set(known))}
    close = difflib.get_close_matches(word.lower(), names, n=n, cutoff=0.5)
    return f" Did you mean {', '.join(repr(names[c]) for c in close)}?" if close else ""
