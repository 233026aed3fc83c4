"""Times of one call inside a CUDA graph, in microseconds, with the L2 cache in a known state.

Three states before the call, because a packed cache may fit the L2 and a bf16 one may not:

- ``cold``: 512 MB were written, so the L2 is full of dirty lines whose write-back the call pays for;
- ``clean``: 512 MB were read, so the L2 is full of foreign lines that cost nothing to drop;
- ``warm``: the same call ran just before, several calls in one graph.

A graph with one call includes its launch (about 3 us with nothing in it).
"""

from collections.abc import Callable

import torch

from packedkv.fitting.samples import capture
from packedkv_lab.bench.record import spread

FLUSH_BYTES = 512 << 20


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Timer:
    """Holds the flush buffer.

    Parameters
    ----------
    device : torch.device or str
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self.sink = torch.zeros((), dtype=torch.int64, device=device)

    def _replay(self, graph: torch.cuda.CUDAGraph, before: Callable[[], object], reps: int) -> list[float]:
        pairs = []
        for _ in range(reps):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            begin.record()
            graph.replay()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [b.elapsed_time(e) * 1e3 for b, e in pairs]

    def cold(self, call: Callable[[], object], reps: int = 30) -> dict[str, float]:
        """Time `call` with a dirty L2."""
        graph = capture(call)
        self._replay(graph, self.flush.zero_, 3)
        return spread(self._replay(graph, lambda: self.flush.add_(1), reps), 3)

    def clean(self, call: Callable[[], object], reps: int = 30) -> dict[str, float]:
        """Time `call` with an L2 full of clean foreign lines."""
        graph = capture(call)

        def read() -> None:
            torch.sum(self.flush, dim=0, dtype=torch.int64, out=self.sink)

        self._replay(graph, read, 3)
        return spread(self._replay(graph, read, reps), 3)

    def eager(self, call: Callable[[], object], reps: int = 10) -> dict[str, float]:
        """Time `call` outside a graph with a dirty L2; the gaps between its kernels count."""
        call()
        times = []
        for _ in range(reps):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.add_(1)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return spread(times, 3)

    def warm(self, call: Callable[[], object], calls: int = 20, reps: int = 10) -> dict[str, float]:
        """Time `calls` calls in one graph, per call."""
        graph = capture(call, calls)
        self._replay(graph, lambda: None, 2)
        return spread([t / calls for t in self._replay(graph, lambda: None, reps)], 3)
