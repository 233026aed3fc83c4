"""The CPU kernels for AArch64 on this machine: a cross compiler makes them, QEMU's user mode runs them.

``Emulated`` stands for the library that ``packedkv.kernels.cpu.library`` loads. Each call goes to a process of another
architecture with the memory that its pointers lead to, and what that process wrote comes back. Nothing tells how many
bytes lie behind an address, so ``Tensor.data_ptr`` is watched, from which every address comes but that of ``pieces``.
"""

import ctypes
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu.library import ArgsStruct, EncodeArgsStruct, RoleStruct

COMPILER = "aarch64-linux-gnu-g++"
MACHINES = ("qemu-aarch64", "qemu-aarch64-static")
DRIVER = Path(__file__).parent / "aarch64_driver.cpp"
BUILT = Path(__file__).parents[2] / ".pytest_cache" / "aarch64"
ATTEND, ENCODE, UNPACK = range(3)
PIECE_BYTES = 32


def missing() -> str:
    """What this machine lacks, or ``""``."""
    if shutil.which(COMPILER) is None:
        return f"needs a cross compiler for AArch64, {COMPILER} (Debian: g++-aarch64-linux-gnu)"
    if not any(map(shutil.which, MACHINES)):
        return f"needs QEMU's user mode, {MACHINES[0]} (Debian: qemu-user)"
    return ""


@cache
def program() -> Path:
    """Path of the kernels with their driver, compiled once for these sources."""
    flags = [flag for flag in sources.FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]
    command = [COMPILER, *flags, *sources.ARM["neon"], *sources.QUIET, "-static", '-DKV_DIGEST=""', f"-I{sources.HERE}"]
    mark = hashlib.sha256(repr(command).encode() + DRIVER.read_bytes() + sources.digest().encode()).hexdigest()[:32]
    path = BUILT / mark
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        files = [DRIVER, *sorted(sources.HERE.glob("*.cpp"))]
        subprocess.run([*command, *map(str, files), "-o", str(part)], check=True)
        part.replace(path)
    return path


class Emulated:
    """The kernels' entry points, each run by a process of the other architecture."""

    def __init__(self) -> None:
        machine = next(filter(None, map(shutil.which, MACHINES)))
        self.process = subprocess.Popen([machine, program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.seen: dict[int, int] = {}

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    @contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note which storages addresses are taken of."""
        plain = torch.Tensor.data_ptr

        def data_ptr(x: Tensor) -> int:
            storage = x.untyped_storage()
            self.seen[storage.data_ptr()] = storage.nbytes()
            return plain(x)

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "data_ptr", data_ptr)
            yield

    def kv_attend(self, args: ArgsStruct) -> None:
        """As of ``library.load``."""
        self.seen[args.pieces or 0] = PIECE_BYTES * args.batch * args.pieces_each
        self._call(ATTEND, bytes(args), _pointers(ArgsStruct))

    def kv_encode(self, args: EncodeArgsStruct) -> None:
        """As of ``library.load``."""
        self._call(ENCODE, bytes(args), _pointers(EncodeArgsStruct))

    def kv_unpack(self, role: RoleStruct, page: int, head: int, dim: int, first: int, count: int, out: int) -> None:
        """As of ``library.load``."""
        numbers = struct.pack("6q", page, head, dim, first, count, out) + bytes(role)
        self._call(UNPACK, numbers, [0, 5, *(6 + at for at in _pointers(RoleStruct))])

    def _call(self, function: int, numbers: bytes, places: Sequence[int]) -> None:
        addresses = struct.unpack(f"{len(numbers) // 8}Q", numbers)
        used = [at for at in places if addresses[at]]
        regions = {}
        for at in used:
            begin = next(a for a, size in reversed(self.seen.items()) if a <= addresses[at] < a + size)
            regions[begin] = self.seen[begin]
        self.seen.clear()
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(struct.pack("4Q", function, len(addresses), len(regions), len(used)) + numbers)
        for begin, size in regions.items():
            stdin.write(struct.pack("2Q", begin, size) + ctypes.string_at(begin, size))
        stdin.write(struct.pack(f"{len(used)}Q", *used))
        stdin.flush()
        for begin, size in regions.items():
            if len(found := stdout.read(size)) < size:
                raise RuntimeError(f"the emulated kernels ended with status {self.process.wait()}")
            ctypes.memmove(begin, found, size)


def _pointers(kind: Any, first: int = 0) -> list[int]:
    """Places of pointers among the 8-byte words of a struct."""
    found = []
    for name, type_, *_ in kind._fields_:
        at = first + getattr(kind, name).offset // 8
        if type_ is ctypes.c_void_p:
            found.append(at)
        elif issubclass(type_, ctypes.Structure):
            found += _pointers(type_, at)
    return found
