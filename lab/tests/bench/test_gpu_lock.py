"""Processes that work beside each other, and alone."""

import fcntl
import queue
import subprocess
import sys
import threading
from unittest import mock

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


def test_who_is_alone_waits_for_the_others_and_they_for_it(tmp_path):
    lock = GpuLock(tmp_path / "turns")
    for theirs, ours, expected in (
        ("shared", "shared", False), ("shared", "exclusive", True), ("exclusive", "shared", True),
        ("exclusive", "exclusive", True),
    ):  # fmt: skip
        process = other(lock.path, theirs)
        found, thread = waits(lock, ours)
        process.communicate("")
        thread.join(600)
        assert found == expected, (theirs, ours)
        assert not thread.is_alive()


def test_a_process_that_dies_gives_its_turn_back(tmp_path):
    process = other(tmp_path / "turns", "exclusive")
    with process:
        process.kill()
    found, thread = waits(GpuLock(tmp_path / "turns"), "exclusive")
    thread.join(600)
    assert not found


def test_without_a_file_nobody_waits():
    with GpuLock().held(exclusive=True):
        found, thread = waits(GpuLock(), "exclusive")
        assert not found
    thread.join(600)
