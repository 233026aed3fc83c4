"""Processes that share one GPU: they compile at the same time and are timed one by one.

torch.compile keeps one process busy for most of a minute per cache and the GPU for hardly any of it; a few processes
side by side use the cores of the machine meanwhile. Nobody else works while one is timed.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """A lock that processes share through a file; without a file there is nobody to wait for.

    Parameters
    ----------
    path : Path, optional
        Made if it does not exist; on the machine's own disk.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Work beside others that do so; waits while somebody is alone."""
        with self._held(alone=False):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Work while nobody else does; waits until the others have finished theirs."""
        with self._held(alone=True):
            yield

    @contextlib.contextmanager
    def _held(self, alone: bool) -> Iterator[None]:
        if self.path is None:
            yield
            return
        import fcntl  # not on every system

        handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)  # gives the lock back, as the end of a process does
