"""Times of calls: jobs in turn on any device, and one call inside a CUDA graph with the L2 cache in a known state.

``cold``: 512 MB were written, so the L2 is full of dirty lines. ``clean``: 512 MB were read. ``warm``: the same call
ran just before. A graph with one call includes its launch (about 3 us). Times of graphs are in microseconds.
"""

import time
from collections.abc import Callable, Sequence

import torch

from packedkv.fitting.samples import capture

FLUSH_BYTES = 512 << 20
Spread = dict[str, float]
"""20th, 50th and 80th percentile: ``p20``, ``p50``, ``p80``."""


def spread(values: Sequence[float], digits: int = 4) -> Spread:
    """Percentiles of measured values, interpolated linearly.

    >>> spread([1.0, 2.0, 3.0, 4.0, 11.0])
    {'p20': 1.8, 'p50': 3.0, 'p80': 5.4}
    """
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    percentiles = torch.tensor(list(values), dtype=torch.float64).quantile(points)
    return {name: round(float(x), digits) for name, x in zip(("p20", "p50", "p80"), percentiles, strict=True)}


def flat(value: float, digits: int = 3) -> Spread:
    """One value as a spread."""
    return dict.fromkeys(("p20", "p50", "p80"), round(value, digits))


def ratio(base: float, values: Spread) -> Spread:
    """``base`` over ``values``, so the slow percentiles become the low ones.

    >>> ratio(100.0, {"p20": 40.0, "p50": 50.0, "p80": 80.0})
    {'p20': 1.25, 'p50': 2.0, 'p80': 2.5}
    """
    return {p: round(base / values[q], 4) for p, q in (("p20", "p80"), ("p50", "p50"), ("p80", "p20"))}


def ratios(over: Sequence[float], under: Sequence[float], scale: float = 1.0) -> list[float]:
    """Ratios pair by pair."""
    return [scale * a / b for a, b in zip(over, under, strict=True)]


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def in_turn(jobs: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    """Seconds of each job, ``repeats`` each after a warm-up; jobs alternate, so that other load slows all of them."""
    rounds = []
    for _ in range(repeats + 1):
        times = []
        for job in jobs:
            synchronize(device)
            start = time.perf_counter()
            job()
            synchronize(device)
            times.append(time.perf_counter() - start)
        rounds.append(times)
    return [list(times) for times in zip(*rounds[1:], strict=True)]


class Timer:
    """Times calls on a GPU; holds the buffer that flushes the L2."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self.sink = torch.zeros((), dtype=torch.int64, device=device)

    def _dirty(self) -> None:
        self.flush.add_(1)

    def _read(self) -> None:
        torch.sum(self.flush, dim=0, dtype=torch.int64, out=self.sink)

    def _times(self, call: Callable[[], object], before: Callable[[], object], reps: int) -> list[float]:
        pairs = []
        for _ in range(reps):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def cold(self, call: Callable[[], object], reps: int = 30) -> Spread:
        """Time `call` with a dirty L2."""
        graph = capture(call)
        self._times(graph.replay, self.flush.zero_, 3)
        return spread(self._times(graph.replay, self._dirty, reps), 3)

    def clean(self, call: Callable[[], object], reps: int = 30) -> Spread:
        """Time `call` with an L2 full of clean foreign lines."""
        graph = capture(call)
        self._times(graph.replay, self._read, 3)
        return spread(self._times(graph.replay, self._read, reps), 3)

    def eager(self, call: Callable[[], object], reps: int = 10) -> Spread:
        """Time `call` outside a graph with a dirty L2; the gaps between its kernels count."""
        call()
        # one at a time: a queue of several calls would hide the gaps
        return spread([self._times(call, self._dirty, 1)[0] for _ in range(reps)], 3)

    def warm(self, call: Callable[[], object], calls: int = 20) -> Spread:
        """Time `calls` calls in one graph, per call."""
        graph = capture(call, calls)
        self._times(graph.replay, lambda: None, 2)
        return spread([t / calls for t in self._times(graph.replay, lambda: None, 10)], 3)
