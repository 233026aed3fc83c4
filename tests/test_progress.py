"""Progress lines: a rewriting line on a terminal, sparse plain lines elsewhere, silence when asked for."""

import io
import itertools
import re
import time
from types import SimpleNamespace

from packedkv import progress
from packedkv.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_passing_messages_are_sparse_and_lasting_ones_stay():
    stream = io.StringIO()
    progress = Progress(stream=stream, interval=60)
    for done in range(100):
        progress.bar("measuring", done, 100, "x")
    progress.say("ready")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("measuring [")
    assert lines[0].endswith("0% x")
    assert lines[1:] == ["ready"]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_the_line_is_wiped_before_the_next():
    stream = Terminal()
    progress = Progress(stream=stream)
    progress.update("passing")
    progress.say("staying")
    before, wiped, after = stream.getvalue().split("\r")
    assert (before, wiped.strip(), after) == ("passing", "", "staying\n")


def test_a_long_job_shows_that_it_is_alive(monkeypatch):
    seconds = itertools.count()  # one more whenever somebody looks
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    stream = io.StringIO()
    with Progress(stream=stream, interval=0.5).busy("loading"):
        while stream.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading ..."
    assert all(re.fullmatch(r"loading \.\.\. [1-9]\d* s", line) for line in lines[1:-1])
    shown = [float(re.search(r"[\d.]+(?= s$)", line)[0]) for line in lines[1:]]
    assert shown == sorted(set(shown)), "they count up"
    assert re.fullmatch(r"loading: \d+\.0 s", lines[-1])


def test_progress_that_is_off_writes_nothing():
    stream = io.StringIO()
    progress = Progress(False, stream)
    progress.say("a")
    with progress.busy("b"):
        progress.bar("c", 1, 2)
    assert stream.getvalue() == ""
