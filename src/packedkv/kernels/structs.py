"""Argument structs of compiled kernels for ctypes, read from the C++ sources that declare them."""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""The number of each dtype in the structs."""
_NUMBERS = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    **{f"int{bits}_t": getattr(ctypes, f"c_int{bits}") for bits in (32, 64)},
}


def structure(path: Path, struct: str, **named: Any) -> Any:
    """Return the ctypes structure of a C++ struct, of its declarations that begin two spaces deep, one on a line.

    ``named``: ctypes structures of the structs within, and sizes of arrays, by their names in C++. Raises ValueError if
    the file has no such struct.
    """
    source = re.sub(r" *//.*", "", path.read_text())
    _, begin, rest = source.partition(f"\nstruct {struct} {{\n")
    body, end, _ = rest.partition("\n};")
    if not (begin and end):
        raise ValueError(f"{path} has no struct {struct}; reinstall packedkv.")
    fields = []
    for kind, names in re.findall(r"^  (?:const )?(\w+)\b([^(;]+);$", body, re.M):
        for name in names.split(","):
            pointer, word, length = re.findall(r"(\*?) *(\w+)(?:\[(\w+)\])?", name)[0]
            one = ctypes.c_void_p if pointer else named.get(kind) or _NUMBERS[kind]
            fields.append((word, one * int(named.get(length, length)) if length else one))
    return type(struct, (ctypes.Structure,), {"_fields_": fields})


def address(x: Tensor | None) -> int | None:
    """Return where a tensor begins; None, a null pointer: there is none."""
    return None if x is None else x.data_ptr()


def step_of(x: Tensor) -> int:
    """Return the stride of the first axis, in numbers; 0 if its only entry serves all."""
    return 0 if x.shape[0] == 1 else x.stride(0)
