"""What all tests of kernels share: the emulated machine, the CPU kernels, and an error where one waits for a GPU."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm import layer as served
from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library
from packedkv.kernels.cuda import build
from packedkv.kernels.cuda.engine import CudaEngine
from tests.kernels.emulation import asked, machine

__all__ = ["asked", "machine"]
KERNELS = Path(os.environ.get("CPU_KERNELS", sources.HERE))
"""Folder of compiled CPU kernels; ``scripts/test-sanitized`` names another one."""
ORDER = ("portable", "avx2", "avx512")
ABLE = [v for v in ORDER[: 1 + ORDER.index(library.variant())] if v in sources.variants()]
"""Instruction sets that this machine runs."""


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile the CPU kernels where they are missing."""
    sources.compile_missing()


@pytest.fixture(scope="session")
def compiler() -> None:
    """The compiler of CUDA kernels, or the reason why there is none."""
    pytest.importorskip("cuda.core")
    try:
        build.compiler_version()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ABLE)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, compiled: None) -> str:
    """The CPU kernels of one instruction set."""
    use(request.param, monkeypatch)
    name: str = request.param
    return name


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def use(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the CPU kernels of an instruction set."""
    monkeypatch.setattr(library, "chosen", lambda: KERNELS / sources.file_name(variant))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The emulated machine, and a GPU, where tests reach the last position that there may be."""
    if request.param == "cpu":
        request.getfixturevalue("machine")
    return torch.device(request.param)


class Server(NamedTuple):
    """What serves a layer: "cuda" (emulated), "cpu" or "gpu"; the device of tensors; launches on the emulator."""

    name: str
    device: torch.device
    launches: dict[str, Any]

    def counted(self) -> dict[str, int]:
        """Launches of each kernel."""
        return {name: len(kernel.launches) for name, kernel in self.launches.items()}


@pytest.fixture
def emulated(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """CUDA engines are chosen although tensors lie on the CPU."""
    monkeypatch.setattr(
        served, "choose", lambda s, dim, device, tokens, *, static: CudaEngine(s.key, s.value, dim, tokens)
    )
    return machine


@pytest.fixture(params=["cuda", "cpu"])
def served_by(request: pytest.FixtureRequest) -> Server:
    """The CUDA kernels, emulated, the CPU kernels or, where ``by`` says it, a GPU."""
    if request.param == "gpu":
        return Server("gpu", torch.device("cuda"), {})
    made = request.getfixturevalue("emulated" if request.param == "cuda" else "compiled")
    return Server(request.param, torch.device("cpu"), {} if made is None else made)


def by(names: str, **rows: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by the server and other arguments: ``rows`` of ``cuda``, ``cpu`` and ``gpu``."""
    made = [
        pytest.param(name, *(row if isinstance(row, tuple) else (row,)), marks=[pytest.mark.gpu] * (name == "gpu"))
        for name, given in rows.items()
        for row in given
    ]
    return pytest.mark.parametrize(f"served_by, {names}", made, indirect=["served_by"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def unsynchronised() -> Iterator[None]:
    """What waits for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")  # once per process
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
