"""CUDA sources compiled for GPUs that need not be there, and their machine code read: registers, spills, instructions.

NVRTC compiles, as for users (``packedkv.kernels.cuda.build``). The disassembler is the one in triton's wheel, which the
extra "test" pins; budgets are written against that and NVRTC 13.0.
"""

import collections
import functools
import heapq
import importlib.util
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import NamedTuple
from unittest import mock

import pytest

from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda.build import Program, compile_program
from tests.kernels.harness import CACHE

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""sm_103 and sm_121 are compiled (test_machine_code.py), but the disassembler does not know them."""


class Kernel(NamedTuple):
    """What a kernel became.

    Parameters
    ----------
    registers : int
        Per thread.
    stack : int
        Bytes per thread in local memory: spilled registers, or arrays with computed indices.
    shared : int
        Bytes per block that are not asked for at the launch; the GPU's own included.
    code : list of str
        Instructions in order, without the padding behind the last one.
    loops : list of Loop
        Smallest first.
    """

    name: str
    registers: int
    stack: int
    shared: int
    code: list[str]
    loops: list["Loop"]

    def spills(self) -> list[str]:
        """Instructions that read or write a thread's local memory."""
        return [x for x in self.code if opcode(x) in ("LDL", "STL")]

    def loops_with(self, *opcodes: str) -> list["Loop"]:
        """Innermost loops that hold all of ``opcodes``, e.g. ``"HMMA", "LDGSTS"``."""
        found = [x for x in self.loops if set(opcodes) <= set(mix(x.code))]
        return [x for x in found if not any(y.blocks < x.blocks for y in found)]

    def loop_with(self, *opcodes: str) -> "Loop":
        """The only innermost loop that holds all of ``opcodes``."""
        found = self.loops_with(*opcodes)
        assert len(found) == 1, f"{self.name}: {len(found)} loops with {', '.join(opcodes)}"
        return found[0]


class Loop(NamedTuple):
    """A loop: all blocks from which its head can be reached again, through no other entry.

    Parameters
    ----------
    head : int
        The block where it starts; a block has the number of its first instruction.
    blocks : frozenset of int
        What belongs to it, inner loops included.
    flow : dict of int to (list of str, list of int)
        Instructions and successors of the kernel's blocks.
    """

    head: int
    blocks: frozenset[int]
    flow: "dict[int, tuple[list[str], list[int]]]"

    @property
    def code(self) -> list[str]:
        """Instructions in the order of the program, those of rare branches too."""
        return [x for block in sorted(self.blocks) for x in self.flow[block][0]]

    def shortest(self, name: str, count: int = 1) -> list[str]:
        """Instructions of the shortest way around with at least ``count`` of ``name``: rare branches are not taken.

        Raises
        ------
        AssertionError
            No way around has that many; inner loops may be taken more than once.
        """
        start = (self.head, 0)
        queue: list[tuple[int, tuple[int, int], tuple[int, ...]]] = [(0, start, ())]
        seen: set[tuple[int, int]] = set()
        while queue:
            length, (block, have), path = heapq.heappop(queue)
            if block == self.head and path and have >= count:
                return [x for passed in path for x in self.flow[passed][0]]
            if (block, have) in seen and path:
                continue
            seen.add((block, have))
            code, successors = self.flow[block]
            have = min(count, have + sum(opcode(x) == name for x in code))
            for after in successors:
                if after in self.blocks and (after != self.head or have >= count):
                    heapq.heappush(queue, (length + len(code), (after, have), (*path, block)))
        raise AssertionError(f"no way around the loop has {count} {name}")


def opcode(instruction: str) -> str:
    """The first word without predicate and modifiers: ``@!P0 LDS.128 R4, [R2]`` -> ``LDS``."""
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]


def mix(code: list[str]) -> dict[str, int]:
    """How often each operation occurs, most frequent first."""
    return dict(collections.Counter(map(opcode, code)).most_common())


def compile_kernels(source: str, arch: int = 90, fma: bool = True) -> dict[str, Kernel]:
    """Compile for ``sm_<arch>`` and return the kernels by name.

    Skips the test, with the reason, when there is no compiler or disassembler.

    Parameters
    ----------
    source : str
        Text that includes headers of csrc.
    fma : bool
        Whether a multiply and an add may become one operation.
    """
    return _compiled(source, arch, fma)


@functools.cache
def _compiled(source: str, arch: int, fma: bool) -> dict[str, Kernel]:
    disassembler, reader = _tool("nvdisasm"), _tool("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "kernel.cubin")
        cubin.write_bytes(_by_nvrtc(source, arch, fma))
        usage = _run(reader, "-res-usage", str(cubin))
        text = _run(disassembler, str(cubin))
    return {
        name: Kernel(name, *_usage(usage, name), *_code(body))
        for name, body in re.findall(r"^\s*\.section\s+\.text\.(\w+),(.*?)(?=^\s*\.section\s|\Z)", text, re.M | re.S)
    }


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        bundled = pathlib.Path(spec.origin).parent / "backends/nvidia/bin" / name
        if bundled.exists():
            return str(bundled)
    if found := shutil.which(name):
        return found
    return pytest.skip(f"needs {name}, which comes with triton")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-20000:]}"
    return done.stdout + done.stderr


def _by_nvrtc(source: str, arch: int, fma: bool) -> bytes:
    try:
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(CACHE)):  # not the user's
            return compile_program(Program(source, fma=fma), f"sm_{arch}")
    except UnsupportedError as error:  # not installed
        pytest.skip(str(error))


def _usage(text: str, name: str) -> tuple[int, int, int]:
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def _code(text: str) -> tuple[list[str], list[Loop]]:
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
    while code and opcode(code[-1]) == "NOP":
        code.pop()
    return code, _loops(_blocks(code, labels))


def _blocks(code: list[str], labels: dict[str, int]) -> dict[int, tuple[list[str], list[int]]]:
    """Runs of instructions without a branch, by the first one's number, and what each may continue with."""
    ends: dict[int, list[int]] = {}
    for i, x in enumerate(code):
        name, follows = opcode(x), [i + 1]
        if name == "BRA" and ".DIV" not in x:  # that one goes where a warp has diverged: never in kernels that may not
            target = re.search(r"`\((\.L_\w+)\)", x)
            assert target, x
            conditional = x.startswith("@") or not re.match(r"BRA\S* `", x)
            follows = [labels[target.group(1)], *([i + 1] if conditional else [])]
        elif name in ("EXIT", "RET"):
            follows = [i + 1] if x.startswith("@") else []
        elif name == "BRX":
            follows = [labels[target] for target in re.findall(r"\.L_\w+", x)]
            assert follows, x
        elif name == "JMX":
            raise NotImplementedError(f"a jump by table: {x}")
        if follows != [i + 1]:
            ends[i] = [t for t in follows if t < len(code)]
    starts = sorted({0, *(t for targets in ends.values() for t in targets), *(i + 1 for i in ends)} - {len(code)})
    blocks = {}
    for first, after in itertools.pairwise([*starts, len(code)]):
        blocks[first] = code[first:after], ends.get(after - 1, [after] if after < len(code) else [])
    return blocks


def _loops(flow: dict[int, tuple[list[str], list[int]]]) -> list[Loop]:
    reached, stack = {0}, [0]
    while stack:
        new = set(flow[stack.pop()][1]) - reached
        reached |= new
        stack += new
    before: dict[int, set[int]] = {b: set() for b in reached}
    for b in reached:
        for after in flow[b][1]:
            before[after].add(b)
    # blocks that every way to a block passes
    passed = {b: set(reached) for b in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for b in sorted(reached - {0}):
            common = {b} | set.intersection(*(passed[p] for p in before[b]))
            changed |= common != passed[b]
            passed[b] = common
    bodies: dict[int, set[int]] = {}
    for b in reached:
        for head in flow[b][1]:
            # a branch to itself ends a program
            if head not in passed[b] or (head == b and len(flow[b][0]) == 1):
                continue
            body, stack = bodies.setdefault(head, {head}), [b]
            while stack:
                if (block := stack.pop()) not in body:
                    body.add(block)
                    stack += before[block]
    loops = [Loop(head, frozenset(body), flow) for head, body in bodies.items()]
    return sorted(loops, key=lambda x: (len(x.code), x.head))
