"""The compiled CPU kernels: which of them this machine runs, loading them, and the structs that they take.

The instruction set is PyTorch's choice, which ``ATEN_CPU_CAPABILITY`` limits.
"""

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.compile import HERE, digest, file_name, variants
from packedkv.kernels.cpu.spec import OPTIONS, PLANES
from packedkv.kernels.structs import structure

PATHS = {name: HERE / file_name(name) for name in variants()}
_SIZES = {"PLANES": PLANES, "OPTIONS": OPTIONS}
RoleStruct = structure(HERE / "attend.h", "Role", **_SIZES)
MeanStruct = structure(HERE / "mean.h", "KeyMean")
ArgsStruct = structure(HERE / "attend.h", "Args", Role=RoleStruct, KeyMean=MeanStruct)
EncodeRoleStruct = structure(HERE / "encode.h", "EncodeRole", **_SIZES)
LessStruct = structure(HERE / "encode.h", "Less")
EncodeArgsStruct = structure(HERE / "encode.h", "EncodeArgs", EncodeRole=EncodeRoleStruct, Less=LessStruct)
"""Arguments of the kernels, by the structs of these headers."""


def refusal(device: torch.device) -> str:
    """Return why the CPU kernels cannot run on ``device``, or ``""`` if they can."""
    if device.type != "cpu":
        return f"device {device} is not a CPU"
    try:
        library()
    except UnsupportedError as error:
        return str(error)
    return ""


def variant() -> str:
    """Instruction set of the kernels on this machine: ``avx512``, ``avx2``, ``neon`` or ``portable``."""
    return _variant(torch.backends.cpu.get_cpu_capability())


@cache
def _variant(capability: str) -> str:
    name = capability.split("_")[0].lower()
    return name if name in variants() else next(iter(variants()))


def library() -> ctypes.CDLL:
    """Return the kernels of this machine's instruction set; raises UnsupportedError if they are missing or stale."""
    return load(chosen())


@cache
def load(path: Path) -> ctypes.CDLL:
    """Load compiled kernels, to run on PyTorch's threads; as ``library``."""
    remedy = f"install a wheel, or in a clone run `python {os.path.relpath(HERE / 'compile.py')}`"
    if not path.exists():
        raise UnsupportedError(f"the CPU kernels are not compiled ({path.name} is missing); {remedy}")
    kernels = ctypes.CDLL(str(path))
    kernels.kv_digest.restype = c_char_p
    if kernels.kv_digest().decode() != digest():
        raise UnsupportedError(f"the CPU kernels are compiled from other sources ({path.name}); {remedy}")
    kernels.kv_reader.restype = kernels.kv_encoder.restype = c_int64
    kernels.kv_encode.argtypes, kernels.kv_encode.restype = (POINTER(EncodeArgsStruct),), None
    kernels.kv_attend.argtypes, kernels.kv_attend.restype = (POINTER(ArgsStruct),), None
    kernels.kv_unpack.argtypes = (POINTER(RoleStruct), c_void_p, *(c_int64,) * 4, c_void_p)
    kernels.kv_unpack.restype = None
    kernels.kv_threads.argtypes, kernels.kv_threads.restype = (c_void_p,), None
    kernels.kv_threads(_parallel())
    return kernels


@cache
def number_of(path: Path, kind: Literal["reader", "encoder"], name: str) -> int:
    """Number by which compiled kernels know a reader or an encoder; raises UnsupportedError if there is none."""
    kernels = load(path)
    find = kernels.kv_reader if kind == "reader" else kernels.kv_encoder
    if (number := int(find(name.encode()))) < 0:
        raise UnsupportedError(f"the CPU kernels have no {kind} {name!r}")
    return number


def chosen() -> Path:
    """Where the kernels of this machine's instruction set are, compiled or not."""
    return PATHS[variant()]


@cache
def _parallel() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that PyTorch has loaded; None: it uses another kind."""
    lib = Path(torch.__file__).parent / "lib"
    for path in (*lib.glob("lib*omp*.so*"), *lib.parent.parent.glob("torch.libs/lib*omp*.so*")):
        try:
            runtime = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):  # not loaded, or without that function
            continue
    return None
