"""Random programs on caches, each checked against an oracle of plain tensors; ``python -m tests.fuzz --help``.

``bare`` programs run on the cache of one layer, ``models`` programs on caches of tiny models of transformers. A seed
stands for one program. A program that fails is made shorter and printed as a script.
"""

import time
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from tests.fuzz.oracle import Mismatch

MODELS_EVERY = 8
"""Of so many seeds one is a program on a model: it takes several times as long."""


class Program(NamedTuple):
    """A program: where it runs (``bare`` or ``models``), its setting and its operations, plain values all."""

    level: str
    setting: dict[str, Any]
    operations: list[list[Any]]


def program_of(seed: int, level: str = "") -> Program:
    """The program of a seed; ``level``: of that level whatever the seed."""
    level = level or ("models" if seed % MODELS_EVERY == MODELS_EVERY - 1 else "bare")
    return Program(level, *import_module(f"tests.fuzz.{level}").program_of(seed))


def fault_of(program: Program) -> str:
    """Run a program; return what is wrong, or ``""``."""
    try:
        import_module(f"tests.fuzz.{program.level}").run(program.setting, program.operations)
    except Mismatch as error:
        return str(error)
    return ""


def shorter(program: Program, seconds: float = 20.0) -> Program:
    """Leave operations out for as long as the program fails, for so long at most."""
    end, size = time.monotonic() + seconds, max(1, len(program.operations) // 2)
    while size:
        at = 0
        while at < len(program.operations) and time.monotonic() < end:
            left = program.operations[:at] + program.operations[at + size :]
            if left and fault_of(program._replace(operations=left)):
                program = program._replace(operations=left)
            else:
                at += size
        size //= 2
    return program


def script(program: Program) -> str:
    """A script that runs the program, from the repository's root."""
    setting = "".join(f"    {name!r}: {value!r},\n" for name, value in program.setting.items())
    operations = "".join(f"    {operation!r},\n" for operation in program.operations)
    return f"from tests.fuzz.{program.level} import run\n\nrun({{\n{setting}}}, [\n{operations}])\n"


class Fault(NamedTuple):
    """A program that failed: its seed, what was wrong, and a shorter one that fails too."""

    seed: int
    text: str
    program: Program

    def __str__(self) -> str:
        return f"# seed {self.seed}: {self.text}\n{script(self.program)}"


def run_seeds(seeds: Iterable[int], level: str = "") -> tuple[Counter[str], list[Fault]]:
    """Run the programs of some seeds; return how many ran, by level and operation, and those that failed."""
    counts: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        program = program_of(seed, level)
        counts[program.level] += 1
        counts.update(f"  {operation[0]}" for operation in program.operations)
        if text := fault_of(program):
            short = shorter(program)
            again = fault_of(short)
            faults.append(Fault(seed, again or f"{text} (passed when run again)", short if again else program))
    return counts, faults
