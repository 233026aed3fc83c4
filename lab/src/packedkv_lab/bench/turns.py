"""Jobs timed in turn on any device, and what the rows of `bench cache`, `codec` and `decode --device cpu` share."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from packedkv.cli.stamp import commit, device_name, versions
from packedkv.errors import ShapeError
from packedkv_lab.bench.record import Row
from packedkv_lab.bench.timing import synchronize

Progress = Callable[[str], None]


def positive(bench: str, sizes: Mapping[str, int]) -> None:
    """Raise ``ShapeError`` unless every size is at least 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ShapeError(f"{bench}: {name}={value}; expected a number >= 1.")


def stamped(shape: str, device: torch.device, repeats: int, seed: int) -> Row:
    """Fields of every row of a run."""
    about = {"device": device_name(device), "versions": versions(), "commit": commit()}
    return {"repeats": repeats, "shape": shape, **about, "seed": seed}


@torch.no_grad()
def in_turn(jobs: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    """Seconds of each job, ``repeats`` each after a warm-up.

    Jobs alternate, so that other load on the machine slows all of them.
    """
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


def ratios(over: Sequence[float], under: Sequence[float], scale: float = 1.0) -> list[float]:
    """Ratios pair by pair."""
    return [scale * a / b for a, b in zip(over, under, strict=True)]
