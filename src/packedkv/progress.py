"""Show progress on standard error: one rewritten line on a terminal, occasional plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

WIDTH = 110


class Progress:
    """Show progress on ``stream`` (default: ``sys.stderr``), if ``enabled``.

    ``interval``: seconds between two temporary messages if the stream is not a terminal.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None, interval: float = 5.0) -> None:
        self.enabled = enabled
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.interval = 0.1 if self.terminal else interval
        self._last = float("-inf")
        self._drawn = False
        self._label = ""
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with self._lock:
            self._clear()
            self._write(text + "\n")
            self._last = time.monotonic()

    def update(self, text: str) -> None:
        """Print a temporary message; most are dropped if the stream is not a terminal."""
        with self._lock:
            if time.monotonic() - self._last < self.interval:
                return
            self._last = time.monotonic()
            self._clear()
            self._write(text[:WIDTH] if self.terminal else text + "\n")
            self._drawn = self.terminal

    def bar(self, label: str, done: float, total: float, note: str = "") -> None:
        """Show the progress of a job of known length."""
        if label != self._label:  # a job's first message is never dropped
            self._label, self._last = label, float("-inf")
        share = min(done / total, 1.0) if total else 0.0
        filled = "#" * round(share * 24)
        self.update(f"{label} [{filled:<24}] {share:4.0%} {note}")

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Show the elapsed seconds of a job of unknown length until the block ends."""
        start, done = time.monotonic(), threading.Event()

        def tick() -> None:
            while not done.wait(1.0):
                self.update(f"{text} ... {time.monotonic() - start:.0f} s")

        self.update(f"{text} ...")
        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self.say(f"{text}: {time.monotonic() - start:.1f} s")

    def _clear(self) -> None:
        if self._drawn:
            self._write("\r" + " " * WIDTH + "\r")
            self._drawn = False

    def _write(self, text: str) -> None:
        if self.enabled:
            self.stream.write(text)
            self.stream.flush()
