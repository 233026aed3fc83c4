"""Many random programs in several processes: ``python -m tests.fuzz --sequences 20000 --workers 16 --seed 1``."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from tests.fuzz import Fault, run_seeds

TOGETHER = 10
"""Seeds of a task."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs of consecutive seeds; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--sequences", type=int, default=300, help="programs to run")
    parser.add_argument("--workers", type=int, default=1, help="processes, each of one thread")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow")
    parser.add_argument("--level", choices=("bare", "models"), default="", help="run programs of one level only")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    given = parser.parse_args(arguments)

    begin, counts, faults = time.monotonic(), Counter[str](), list[Fault]()
    end = given.seed + given.sequences
    tasks = [range(at, min(at + TOGETHER, end)) for at in range(given.seed, end, TOGETHER)]
    pool = ProcessPoolExecutor(given.workers, get_context("spawn"), torch.set_num_threads, (1,))
    running = {}
    done = said = 0
    try:
        while tasks or running:
            while tasks and len(running) < 2 * given.workers:
                seeds = tasks.pop(0)
                running[pool.submit(run_seeds, seeds, given.level)] = seeds
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                own, found = task.result()
                done += len(running.pop(task))
                counts += own
                faults += found
                print(*(f"\n{fault}" for fault in found), sep="\n", end="", flush=True)
            passed = time.monotonic() - begin
            if passed > said + 10 or not (tasks or running):
                said = passed
                print(f"{done} of {given.sequences} sequences, {len(faults)} faults, {passed:.0f} s", flush=True)
            if passed > 60 * given.minutes:
                tasks = []
    except BrokenProcessPool:
        print(f"a worker died; it ran one of these seeds: {sorted(s for seeds in running.values() for s in seeds)}")
        return 1
    finally:
        pool.shutdown(cancel_futures=True)
    for name, count in sorted(counts.items()):
        print(f"{name:14}{count}")
    print(f"seeds {given.seed} to {given.seed + done - 1}: {len(faults)} faults {[fault.seed for fault in faults]}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
