"""The CPU kernels of 64-bit ARM processors, emulated: the tests of the other instruction sets, at fewer shapes.

What is checked is what the kernels compute, not how fast.
"""

import ctypes
import hashlib
import inspect
import itertools
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

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codecs.ghost import Ghost
from packedkv.codecs.octopus import Octopus
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.library import ArgsStruct, EncodeArgsStruct, RoleStruct
from packedkv.ops.rope import Rotary
from tests.kernels import test_cpu
from tests.kernels.decode_cases import two_dims_in_turn

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
    """The entry points of ``library.load``, each run by a process of the other architecture."""

    def __init__(self) -> None:
        machine = next(filter(None, map(shutil.which, MACHINES)))
        self.process = subprocess.Popen([machine, program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.seen: dict[int, int] = {}

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
        self.seen[args.pieces or 0] = PIECE_BYTES * args.batch * args.pieces_each
        self._call(ATTEND, bytes(args), _pointers(ArgsStruct))

    def kv_encode(self, args: EncodeArgsStruct) -> None:
        self._call(ENCODE, bytes(args), _pointers(EncodeArgsStruct))

    def kv_unpack(self, role: RoleStruct, page: int, head: int, dim: int, first: int, count: int, out: int) -> None:
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


pytestmark = [
    pytest.mark.aarch64,
    pytest.mark.slow,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


@pytest.fixture(scope="module")
def process() -> Iterator[Emulated]:
    emulated = Emulated()
    yield emulated
    emulated.process.communicate()


@pytest.fixture(autouse=True)
def neon(process: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The emulated kernels serve; readers and encoders have the same numbers everywhere."""
    native = library.chosen()
    monkeypatch.setattr(library, "chosen", lambda: native)
    monkeypatch.setattr(library, "library", lambda: process)
    monkeypatch.setattr(library, "variant", lambda: "neon")
    monkeypatch.setattr(test_cpu, "ABLE", ["neon"])
    monkeypatch.setattr(test_cpu, "use", lambda *_: None)
    with process.watching(monkeypatch):
        yield


def rows() -> Iterator[Any]:
    """Tests of the other instruction sets and their arguments.

    Of encoders the first of each kind of codec and a third of the others; the rest is wide.
    """

    def row(test: Any, *given: Any, marks: Any = ()) -> Any:
        return pytest.param(test, given, marks=marks, id="-".join(map(str, (test.__name__, *given))))

    for spec in (*test_cpu.SERVED, *test_cpu.OTHERS):
        yield row(test_cpu.test_unpacks_what_the_codec_decodes, spec)
    kinds = [type(codec) for codec in test_cpu.CODECS]
    for i, codec in enumerate(test_cpu.CODECS):
        often = i % 3 == 0 or kinds.index(kinds[i]) == i
        yield row(test_cpu.test_bytes_are_the_references, codec, marks=[] if often else [pytest.mark.wide])
    for pair in two_dims_in_turn(test_cpu.SERVED, (64, 80)):
        yield row(test_cpu.test_attention_is_as_exact_as_float32, *pair.values, marks=pair.marks)
    turn = Rotary(1e4 ** -(torch.arange(0, 1, 1 / 16)), scaling=1.2, interleaved=True)
    for spec, codec in (("saw-int4", SawInt4()), ("ghost-3", Ghost(3))):
        yield row(test_cpu.test_means_of_350_are_as_exact_as_float32, spec, turn)
        yield row(test_cpu.test_keys_lose_their_mean, codec, turn, 64)
    for kind in (LayerCache, FusedLayerCache):
        yield row(test_cpu.test_caches_attend_as_the_reference, "kivi-sink-2", kind, "neon")
    yield row(test_cpu.test_splits_over_threads, 5)
    yield row(test_cpu.test_16_bit_queries_and_nan_in_its_row, "neon")
    for codec, number in itertools.product((SawInt4(), Octopus(4, 2)), (torch.nan, -torch.inf, 65520.0)):
        yield row(test_cpu.test_what_cannot_be_held_is_zero_bytes_and_flagged, codec, number)


@pytest.mark.parametrize(("test", "given"), rows())
def test_neon(
    test: Any, given: tuple[Any, ...], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_cpu, "DIMS", (64, 80))
    fixtures = inspect.signature(test).parameters.keys() & {"monkeypatch", "set_threads"}
    test(*given, **{name: request.getfixturevalue(name) for name in fixtures})


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_the_neon_kernels_are_chosen_on_arm(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch calls its own kernels there."""
    monkeypatch.undo()
    monkeypatch.setattr(sources.platform, "machine", lambda: machine)
    library._variant.cache_clear()
    try:
        assert list(sources.variants()) == ["neon"]
        assert {library._variant(name) for name in ("DEFAULT", "SVE256", "NO AVX")} == {"neon"}
    finally:
        library._variant.cache_clear()
