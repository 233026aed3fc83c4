"""The emulated machine in the place of a GPU: what the operators launch on CPU tensors runs there."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from packedkv.kernels.codecs import ghost, innerq
from packedkv.kernels.cuda import basis, build, encode, prefill
from packedkv.kernels.cuda import decode as attention
from packedkv.kernels.cuda import engine as cuda_engine
from packedkv.kernels.cuda.build import Program
from tests.kernels import harness

_LAUNCH = """
extern "C" void run_{name}(const {args}* a, int x, int y, int z, int threads, int shared) {{
  kv::launch(x, y, z, threads, shared, {name}, *a);
}}
"""


ARGS = {"kv_encode": "kv::EncodeArgs", "kv_unpack": "kv::UnpackArgs", "kv_basis": "kv::BasisArgs"}


class Emulated:
    """Stands for ``build.Kernel``: the same launch, on the CPU."""

    def __init__(self, library: harness.Library, name: str) -> None:
        self.library, self.name = library, name
        self.launches: list[tuple[tuple[int, int, int], int, int, bool]] = []

    def launch(self, grid: Any, threads: int, shared: int, args: Any, *, early: bool = False) -> None:
        self.launches.append((grid, threads, shared, early))
        self.library.enter(f"run_{self.name}", ctypes.byref(args), *grid, threads, shared)


def emulated(program: Program, names: tuple[str, ...], args: str) -> tuple[Emulated, ...]:
    source = program.source + "".join(_LAUNCH.format(name=n, args=args) for n in names)
    library = harness.build(source, folders=tuple(x for x in program.folders if x != str(build.CSRC)))
    return tuple(Emulated(library, name) for name in names)


@contextmanager
def loaded_by(load: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another function loads programs, on any device; what it loaded is forgotten."""
    for module in (attention, basis, encode, ghost, innerq, prefill):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(build, "refusal", lambda device: "")
    plans = attention._plan, basis._kernel, cuda_engine._kernels, prefill.plan_of
    kept = *plans, encode._launches, ghost._fit_kernel, innerq._fit_kernel
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Operators that launch on the emulator; what they launched, by kernel."""
    made: dict[str, Any] = {}

    def load(program: Program, names: Any, device: torch.device, label: str = "") -> Any:
        args = ARGS.get(names[0], "kv::DecodeArgs")
        if names[0] == "kv_fit":
            args = "kv::FitGhostLayers" if "ghost" in program.source else "kv::FitNormArgs"
        kernels = emulated(program, tuple(names), args)
        made.update(zip(names, kernels, strict=True))
        return kernels

    with loaded_by(load, monkeypatch):
        yield made


@pytest.fixture
def asked(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Programs that operators load on the emulator."""
    found: list[Program] = []

    def record(program: Program, *rest: Any, make: Any = emulated) -> Any:
        found.append(program)
        return make(program, *rest)

    monkeypatch.setitem(globals(), "emulated", record)
    return found
