"""CUDA sources compiled for GPUs that need not be there, and their machine code read: registers, spills, instructions.

NVRTC compiles, as it does for users (kvcodec.cuda.build), or nvcc where the packages of NVRTC are not installed. The
disassembler is the one in triton's wheel, which the extra "test" pins; budgets are written against that and NVRTC 13.0.
"""

import collections
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple
from unittest import mock

import pytest

from tests.cuda.harness import CACHE, HEADERS

ARCHITECTURES = (80, 90, 100)


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
    loops : list of (int, int)
        First and last instruction of each loop, by the first.
    """

    name: str
    registers: int
    stack: int
    shared: int
    code: list[str]
    loops: list[tuple[int, int]]

    def spills(self) -> list[str]:
        """Instructions that read or write a thread's local memory."""
        return [x for x in self.code if opcode(x) in ("LDL", "STL")]

    def loops_with(self, *opcodes: str) -> list[list[str]]:
        """Instructions of the innermost loops that hold all of ``opcodes``, e.g. ``"HMMA", "LDGSTS"``."""
        found = [(a, b) for a, b in self.loops if set(opcodes) <= {opcode(x) for x in self.code[a : b + 1]}]
        inner = [(a, b) for a, b in found if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)]
        return [self.code[a : b + 1] for a, b in inner]

    def loop_with(self, *opcodes: str) -> list[str]:
        """The only innermost loop that holds all of ``opcodes``."""
        found = self.loops_with(*opcodes)
        assert len(found) == 1, f"{self.name}: {len(found)} loops with {', '.join(opcodes)}"
        return found[0]


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
        cubin.write_bytes(_by_nvrtc(source, arch, fma) or _by_nvcc(source, arch, fma, folder))
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


def _by_nvrtc(source: str, arch: int, fma: bool) -> bytes | None:
    from kvcodec.cuda.build import Program, compile_program

    from kvcodec.errors import UnsupportedError

    try:
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(CACHE)):  # not the user's
            return compile_program(Program(source, fma=fma), f"sm_{arch}")
    except UnsupportedError:  # not installed
        return None


def _by_nvcc(source: str, arch: int, fma: bool, folder: str) -> bytes:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs NVRTC (cuda-core and nvidia-cuda-nvrtc) or nvcc")
    file, out = pathlib.Path(folder, "kernel.cu"), pathlib.Path(folder, "nvcc.cubin")
    file.write_text(source)
    options = ("-std=c++17", f"-arch=sm_{arch}", "-cubin", "--expt-relaxed-constexpr", f"-fmad={str(fma).lower()}")
    _run(nvcc, *options, "-I", str(HEADERS), "-o", str(out), str(file))
    return out.read_bytes()


def _usage(text: str, name: str) -> tuple[int, int, int]:
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def _code(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
    loops: dict[int, int] = {}
    for i, x in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", x)
        # a branch to itself ends the program; of several branches back to one head the last one ends its loop
        if target and (head := labels.get(target.group(1), i)) < i:
            loops[head] = i
    while code and opcode(code[-1]) == "NOP":
        code.pop()
    return code, sorted(loops.items())


def main() -> None:
    """Print what each kernel of a file became: python -m tests.cuda.offline FILE.cu [ARCH ...]."""
    source = pathlib.Path(sys.argv[1]).read_text()
    for arch in map(int, sys.argv[2:] or map(str, ARCHITECTURES)):
        for k in compile_kernels(source, arch).values():
            print(f"sm_{arch} {k.name}: {k.registers} registers, {k.stack} bytes of stack, {len(k.code)} instructions")
            for a, b in k.loops:
                print(f"  loop {a}-{b}: {b - a + 1} instructions {mix(k.code[a : b + 1])}")


if __name__ == "__main__":
    main()
