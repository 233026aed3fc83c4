"""Requests of the soak, and what memory its processes take; ``soak_serve`` sends them."""

import os
import time
from pathlib import Path

KINDS = ("whole", "queued", "prefill", "decode")
"""How requests end: answered, or cancelled while they wait, within their prompt, within their answer."""
MB = 1 << 20


class Request:
    """One request and what became of it."""

    def __init__(self, prompt, new, kind, cut):
        self.prompt, self.new, self.kind, self.cut = prompt, new, kind, cut
        self.tokens, self.ended, self.begun = (), "running", time.monotonic()


class Prompts:
    """Token ids that share prefixes: systems, documents of a system, questions of a document; a few on their own."""

    def __init__(self, args, words, rng):
        self.args, self.words, self.rng = args, words, rng
        longest = args.prompt
        systems = [self.text(longest // 8, longest // 4) for _ in range(3)]
        documents = [s + self.text(longest // 8, longest // 3) for s in systems for _ in range(3)]
        shared = [rng.choice(documents) + self.text(1, longest // 3) for _ in range(args.prompts * 3 // 4)]
        own = [self.text(longest // 2, longest) for _ in range(args.prompts - len(shared))]
        self.all = shared + own
        self.turns = [self.text(1, longest // 8) for _ in self.all]

    def text(self, least, most):
        count = self.rng.randint(max(1, least), max(1, most))
        if isinstance(self.words, int):
            return tuple(self.rng.randrange(3, self.words) for _ in range(count))
        start = self.rng.randrange(len(self.words) - count)
        return tuple(self.words[start : start + count])

    def draw(self, seconds):
        """A request: any prompt, an answer of any length; ``seconds``: about what a queued one waits."""
        rng = self.rng
        at, kind = rng.randrange(len(self.all)), rng.choices(KINDS, (70, 6, 12, 12))[0]
        new = self.args.answer if kind != "whole" or rng.random() < 0.3 else rng.randint(1, self.args.answer)
        cut = rng.expovariate(1 / seconds) if kind == "queued" else rng.randint(1, max(1, new - 1))
        # nothing of it in the cache, so that its chunks take several steps
        prompt = self.text(self.args.prompt * 3 // 4, self.args.prompt) if kind == "prefill" else self.all[at]
        return at, Request(prompt, new, kind, cut)


# -- memory ------------------------------------------------------------------------------------------------------------


def descendants():
    """Ids of this process' children and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found, fresh = [], [os.getpid()]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def resident(pids):
    """Resident bytes of processes, MB."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, ValueError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def growth(series, warm):
    """What the fitted line gains from ``warm`` seconds to the end: (MB, MB per minute, seconds)."""
    points = [(t, driver + engine) for t, driver, engine in series if t >= warm]
    if len(points) < 5:
        return None
    mean_t, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
    seconds = points[-1][0] - points[0][0]
    return slope * seconds, slope * 60, seconds
