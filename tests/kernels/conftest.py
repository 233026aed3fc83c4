"""What all tests of kernels share: the emulated machine, the CPU kernels, and a look at what waits for a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.kernels.cpu_variants import compiled, variant
from tests.kernels.emulation import asked, machine

__all__ = ["asked", "compiled", "device", "machine", "unsynchronised", "variant"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The emulated machine, and a GPU, where tests reach the last position that there may be."""
    if request.param == "cpu":
        request.getfixturevalue("machine")
    return torch.device(request.param)


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
