"""A lock for processes that share one GPU: they compile at the same time and are timed one by one.

torch.compile keeps one process busy for most of a minute per cache, and the GPU for hardly any of it; a few processes
side by side use the machine's cores meanwhile. While one is timed, no other runs.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class GpuLock:
    """A lock that processes share through a file; without a file there is no other process to wait for.

    Parameters
    ----------
    path : Path, optional
        Made if it does not exist; on the machine's own disk.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Run beside others that hold it shared; waits while one holds it alone."""
        with self._held(exclusive=False):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run while no other does; waits until the others have let it go."""
        with self._held(exclusive=True):
            yield

    @contextlib.contextmanager
    def _held(self, exclusive: bool) -> Iterator[None]:
        if self.path is None:
            yield
            return
        import fcntl  # not on every system

        handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)  # gives the lock back, as the end of a process does
