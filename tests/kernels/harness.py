"""Kernels of packedkv/kernels/csrc compiled by g++ against emulator.h, and called with PyTorch tensors.

A test writes a few lines of C++ that include the headers under test and launch them::

    library = build('''
        #include "platform.cuh"
        KV_KERNEL void twice(const float* x, float* y) { y[kv::thread()] = 2 * x[kv::thread()]; }
        extern "C" void run(const float* x, float* y) { kv::launch(1, 1, 1, 32, 0, twice, x, y); }
    ''')
    library.call("run", x, Out(y))

What emulator.h finds wrong (deadlock, access out of bounds, undefined behaviour) is raised as EmulationError.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from packedkv.kernels.cuda.build import Program, included

ROOT = pathlib.Path(__file__).parents[2]
HEADERS = ROOT / "src/packedkv/kernels/csrc"
FOLDERS = (str(HEADERS), str(ROOT / "tests/kernels"))
CACHE = ROOT / ".pytest_cache/emulated"
# what a GPU faults on or leaves undefined: traps, so that it is raised with the thread's number
_CHECKS = "alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow,return,unreachable"
# -Og: compiling is most of these tests' time, -O1 takes nearly twice as long, and what it saves at the run is less
FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-fPIC", "-DKV_EMULATE", "-Wall", "-Werror=return-type", "-Werror=uninitialized"),
    "-ffp-contract=off",  # add and mul of platform.cuh are rounded one by one
    "-fno-strict-aliasing",  # as nvcc: bytes are read as words
    *("-fsanitize=" + _CHECKS, "-fsanitize-undefined-trap-on-error"),
    "-fno-gnu-unique",
)
LINK = ("-shared", "-Wl,-Bsymbolic")  # a kernel named as a function of libc is not that function


class EmulationError(RuntimeError):
    """What the emulator found wrong with a kernel."""


class Out(NamedTuple):
    """An argument of Library.call that the kernel may write."""

    tensor: torch.Tensor


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _Buffer(NamedTuple):
    tensor: torch.Tensor
    start: int  # address of the tensor's copy
    base: int  # address and size of the allocation
    size: int
    write: bool


class Memory:
    """Copies of tensors that end at a page nobody may touch; those not ``write`` are read-only."""

    def __init__(self, library: "Library") -> None:
        self._library = library
        self._buffers: list[_Buffer] = []

    def put(self, tensor: torch.Tensor, write: bool = False) -> int:
        """Address of a copy of ``tensor`` (any strides: the gaps are copied too), as aligned as it was to 16 bytes."""
        if tensor.device.type != "cpu":
            raise ValueError(f"tensor on {tensor.device}")
        for other in self._buffers:
            if other.tensor is tensor and other.write == write:
                return other.start
        bytes_, offset = _extent(tensor), tensor.data_ptr() % 16
        size = offset + bytes_
        base = self._library.raw.kv_emulated_alloc(size)
        if not base:
            raise MemoryError(size)
        ctypes.memmove(base + offset, tensor.data_ptr(), bytes_)
        if not write:
            self._library.raw.kv_emulated_protect(base, size)
        self._buffers.append(_Buffer(tensor, base + offset, base, size, write))
        return base + offset

    def _close(self, back: bool) -> None:
        over = []
        for i, b in enumerate(self._buffers):
            bytes_ = _extent(b.tensor)
            if back and b.write:
                ctypes.memmove(b.tensor.data_ptr(), b.start, bytes_)
            slack = ctypes.string_at(b.base + b.size, -b.size % 16)
            if slack.strip(b"\xff"):
                over.append(f"wrote behind the end of buffer {i}: {tuple(b.tensor.shape)} {b.tensor.dtype}")
            self._library.raw.kv_emulated_free(b.base, b.size)
        self._buffers.clear()
        if back and over:
            raise EmulationError("; ".join(over))


class Library:
    """A compiled source."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.raw = ctypes.CDLL(str(path))
        self.raw.kv_emulated_error.restype = ctypes.c_char_p
        self.raw.kv_emulated_alloc.restype = ctypes.c_void_p
        self.raw.kv_emulated_alloc.argtypes = [ctypes.c_size_t]
        self.raw.kv_emulated_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.raw.kv_emulated_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.raw.kv_emulated_seed.argtypes = [ctypes.c_uint64]
        self.raw.kv_emulated_exchanges.restype = ctypes.c_int64

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        """Buffers for a call; at the end those with ``write`` go back to their tensors.

        Raises ``EmulationError`` where a kernel wrote behind the end of one.
        """
        memory = Memory(self)
        try:
            yield memory
        except BaseException:
            memory._close(back=False)
            raise
        memory._close(back=True)

    def enter(self, name: str, *args: Any, seed: int = 0, result: Any = None) -> Any:
        """Call ``name`` with plain ctypes arguments; raise ``EmulationError`` for what a launch inside found wrong.

        ``seed``: order of blocks, warps and lanes, 0 for one after another; ``result``: the ctypes type it returns.
        """
        function = self.raw[name]
        function.restype = result
        self.raw.kv_emulated_clear()
        self.raw.kv_emulated_seed(seed)
        value = function(*args)
        if error := self.raw.kv_emulated_error():
            raise EmulationError(self._located(error.decode()))
        return value

    def call(self, name: str, *args: Any, seed: int = 0, result: Any = None) -> Any:
        """Call ``name``: tensors become pointers (written only as ``Out(tensor)``), None a null pointer.

        An int is passed as int64_t, a float as double, ctypes values as they are. Other arguments are as in ``enter``.
        """
        with self.memory() as memory:
            return self.enter(name, *(_argument(memory, a) for a in args), seed=seed, result=result)

    def _located(self, message: str) -> str:
        tool = shutil.which("addr2line")
        code = re.search(r"at code (0x[0-9a-f]+)", message)
        if not tool or not code:
            return message
        command = [tool, "-i", "-s", "-e", str(self.path), code.group(1)]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        return f"{message} ({' in '.join(x for x in lines if x)})"


def _argument(memory: Memory, value: Any) -> Any:
    if isinstance(value, Out):
        return ctypes.c_void_p(memory.put(value.tensor, write=True))
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(memory.put(value))
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return value


def _run(command: Sequence[str], source: str) -> str:
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{_errors(done.stderr) or done.stderr[-20000:]}\n{' '.join(command)}")
    return done.stdout


def _errors(output: str) -> str:
    """Return a compiler's errors, each with its notes, from the first ``error:`` on; no warnings and source lines."""
    kept: list[str] = []
    in_error = False
    for line in output.splitlines():
        if kind := re.search(r"\b(error|warning): ", line):
            in_error = kind[1] == "error"
        if in_error and (kind or " note: " in line):
            kept.append(line)
    return "\n".join(kept[:20])


@functools.cache
def _prune() -> None:
    for old in CACHE.glob("*.*"):
        if old.is_file() and old.stat().st_mtime < time.time() - 3 * 86400:
            old.unlink(missing_ok=True)


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "-dumpfullversion", "-dumpmachine"], "")


def _kept(
    kind: str,
    command: Sequence[str],
    source: str,
    folders: Sequence[str] = (),
    more: Sequence[str] = (),
    file: str = "-",
) -> pathlib.Path:
    """Compile ``source``, or a ``file`` of that text.

    The result lives in a cache by the source, the files it includes, the compiler and its arguments.
    """
    made_of = [source.encode(), *included(Program(source, folders=(*FOLDERS, *folders))).values()]
    made_of += [x.encode() for x in (_version(command[0]), *command, *more)]
    digest = hashlib.sha256()
    for part in made_of:
        digest.update(b"%d\0" % len(part) + part)
    path = CACHE / f"{digest.hexdigest()[:24]}.{kind}"
    if path.exists():
        os.utime(path)
    else:
        CACHE.mkdir(parents=True, exist_ok=True)
        _prune()
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _run([*command, *more, "-o", f"{folder}/made", file], source)
            os.replace(f"{folder}/made", path)
    return path


def _searched(folders: Sequence[str]) -> tuple[str, ...]:
    return tuple(x for folder in folders for x in ("-I", folder))


@functools.cache
def _precompiled(command: tuple[str, ...]) -> str:
    """Path to include ``platform.cuh`` by: all sources begin with it, and its parsing is a fifth of their time."""
    command = tuple(x if x != "c++" else "c++-header" for x in command)
    header = HEADERS / "platform.cuh"
    return str(_kept("gch", command, header.read_text(), file=str(header)).with_suffix(""))


@functools.cache
def build(source: str, flags: tuple[str, ...] = (), folders: tuple[str, ...] = ()) -> Library:
    """Compile C++ that includes headers of csrc; the library lives in a cache by all it is made of.

    Skips the test when there is no g++. Headers are searched in ``folders`` too, after csrc.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    command = (compiler, "-x", "c++", *_searched(FOLDERS), *FLAGS, *flags)
    more = ("-include", _precompiled(command), *LINK)
    return Library(_kept("so", (*command, *_searched(folders)), source, folders, more))


def same_for_any_order(run: Callable[[int], Sequence[torch.Tensor]]) -> None:
    """Assert that ``run(seed)`` gives the same bytes for seeds 0 to 3: else threads race."""

    def as_bytes(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.contiguous().view(-1).view(torch.uint8).clone() for x in outputs]

    expected = as_bytes(run(0))
    for seed in (1, 2, 3):
        for i, (a, b) in enumerate(zip(expected, as_bytes(run(seed)), strict=True)):
            assert torch.equal(a, b), f"output {i} differs between the orders 0 and {seed}: a race"
