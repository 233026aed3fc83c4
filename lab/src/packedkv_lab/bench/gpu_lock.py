"""A lock for processes that share one GPU: they compile at the same time and are timed one by one.

torch.compile takes most of a minute of CPU time per cache and hardly uses the GPU, so several processes compile in
parallel. While one is timed, no other runs.
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
        """Hold the lock shared; waits while another process holds it exclusively."""
        with self._held(exclusive=False):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively; waits until the others have released it."""
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
            os.close(handle)  # releases the lock, as does the end of the process
