"""Processes that work beside each other, and alone."""

import fcntl
import queue
import subprocess
import sys
import threading
from unittest import mock

import pytest

from packedkv_lab.bench.generate import GpuLock

HOLD = """
import sys
from pathlib import Path
from packedkv_lab.bench.generate import GpuLock
with GpuLock(Path(sys.argv[1])).held(exclusive=sys.argv[2] == "exclusive"):
    print("held", flush=True)
    sys.stdin.read()
"""


def other(path, how):
    """Another process that holds the lock until its input is closed."""
    command = [sys.executable, "-c", HOLD, str(path), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def waits(lock, how):
    """Whether one must wait for the others, by what the lock says, not by how long it takes; the thread that asked."""
    said, flock = queue.SimpleQueue(), fcntl.flock

    def trying(file, kind):
        try:
            flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            said.put(True)
            flock(file, kind)

    def work():
        with lock.held(exclusive=how == "exclusive"):
            said.put(False)

    thread = threading.Thread(target=work)
    with mock.patch("fcntl.flock", trying):
        thread.start()
        return said.get(), thread


@pytest.mark.parametrize(
    ("theirs", "ours", "waiting"),
    [
        *[("shared", "shared", False), ("shared", "exclusive", True)],
        *[("exclusive", "shared", True), ("exclusive", "exclusive", True)],
    ],
)
def test_who_times_is_alone_and_who_compiles_is_not(tmp_path, theirs, ours, waiting):
    """A process that dies gives its turn back."""
    process = other(tmp_path / "turns", theirs)
    found, thread = waits(GpuLock(tmp_path / "turns"), ours)
    with process:
        process.kill()
    thread.join(600)
    assert found == waiting
    assert not thread.is_alive()
