"""The CPU kernels of each instruction set that this machine runs."""

import os
from pathlib import Path

import pytest

from packedkv.kernels.cpu import compile as sources
from packedkv.kernels.cpu import library

KERNELS = Path(os.environ.get("CPU_KERNELS", sources.HERE))
"""Where compiled kernels are; ``scripts/test-sanitized`` names another folder."""
ORDER = ("portable", "avx2", "avx512")
ABLE = [v for v in ORDER[: 1 + ORDER.index(library.variant())] if v in sources.variants()]
"""Instruction sets that this machine runs."""


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile the kernels where they are missing."""
    sources.compile_missing()


@pytest.fixture(params=ABLE)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, compiled: None) -> str:
    """The kernels of one instruction set serve."""
    use(request.param, monkeypatch)
    name: str = request.param
    return name


def use(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of this instruction set serve from now on."""
    monkeypatch.setattr(library, "chosen", lambda: KERNELS / sources.file_name(variant))
