"""Write a file whole or not at all: in a folder of its own beside it, then renamed. Where files are cached."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".packedkv.part"
"""Suffix of the folders in which files are written."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` at the end; its folder must exist (OSError).

    An error leaves ``path`` unchanged. The next call for the same folder removes the files of killed processes: a
    folder in use is locked, and the system releases the lock when the process ends.
    """
    _remove_unfinished(path.parent)
    folder, lock = _new_folder(path.parent)
    try:
        yield folder / path.name
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int | None]:
    """Make a folder that only this user can write to, and its lock."""
    while True:
        folder = parent / f".{secrets.token_hex(8)}{SUFFIX}"
        folder.mkdir(0o700)
        if fcntl is None:
            return folder, None
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        with suppress(OSError):  # a file system without locks: nothing is removed either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_unfinished(parent: Path) -> None:
    """Remove the folders that no process has locked."""
    if fcntl is None:
        return
    for folder in parent.glob(f".*{SUFFIX}"):
        with suppress(OSError):  # another user's, or gone
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def cache_dir() -> Path:
    """Return the folder of compiled and downloaded files: ``$XDG_CACHE_HOME/packedkv`` or ``~/.cache/packedkv``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "packedkv"
