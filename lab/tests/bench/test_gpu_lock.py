"""Processes that work beside each other, and alone."""

import fcntl

import pytest

from packedkv_lab.bench.generate import GpuLock


@pytest.mark.parametrize("exclusive", [True, False], ids=["who times", "who compiles"])
def test_who_times_is_alone_and_who_compiles_is_not(tmp_path, exclusive):
    """What another process would find: an open file of its own, asked for the lock without waiting."""
    with GpuLock(tmp_path / "turns").held(exclusive=exclusive), (tmp_path / "turns").open() as other:
        for kind, blocked in ((fcntl.LOCK_SH, exclusive), (fcntl.LOCK_EX, True)):
            if blocked:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(other, kind | fcntl.LOCK_NB)
            else:
                fcntl.flock(other, kind | fcntl.LOCK_NB)
                fcntl.flock(other, fcntl.LOCK_UN)
    with (tmp_path / "turns").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back at the end
