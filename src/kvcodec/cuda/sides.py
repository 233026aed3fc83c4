"""Which C++ struct reads or writes which codec, and what it needs besides bytes: tables, factors, a rotation.

One entry per codec class. A codec of another package adds its own with ``add_reader`` and ``add_encoder``: a function
of (codec, head_dim, role) that returns a ``Reader`` or ``Encoder``, or the reason why there is none.

Between the bases the kernels know two linear maps, in this order for queries and new tokens: times a factor per head
and channel (``[B or 1, H, D]``, a constant of the site), then a block-diagonal Hadamard. Outputs go back the other way.
"""

import importlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Role
from kvcodec.codecs.dense import Dense
from kvcodec.codecs.fp8 import Fp8
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.innerq import InnerQ
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.cuda.build import CSRC
from kvcodec.errors import UnsupportedError
from kvcodec.ops.hadamard import power_of_two_divisor

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Multiples of 32: a lane of a warp holds every 32nd channel of a row."""


@dataclass(frozen=True)
class Reader:
    """How the decode kernels read one role.

    Parameters
    ----------
    type : str
        The C++ struct, with its template arguments.
    header : str
        File that defines it.
    folder : str
        Where that file is.
    block : int
        Tokens per block.
    shared : int
        Bytes of look-up tables in shared memory, the struct's ``TABLE``.
    tables : callable, optional
        Params -> uint8 ``[H or 1, bytes]`` on their device: what the struct's ``fill`` reads.
    factor : str
        Name of the constant ``[B or 1, H, D]`` that multiplies queries (keys) or outputs (values); empty: none.
    order : int
        Hadamard order; 1 for none.
    table_name : str
        Equal names have equal tables at every site; empty: each site has its own.
    borrowing : str
        The struct for values that uses the keys' table of the same name, which lies before its own place.
    also : tuple of str
        Further files that the struct needs.
    queries : int
        Vectors that the kernel makes of a query; 2 for sketches.
    """

    type: str
    header: str
    folder: str = str(CSRC)
    block: int = 1
    shared: int = 0
    tables: Callable[[Params], Tensor] | None = None
    factor: str = ""
    order: int = 1
    table_name: str = ""
    borrowing: str = ""
    also: tuple[str, ...] = ()
    queries: int = 1


Form = Literal["rows", "blocks", "table"]


@dataclass(frozen=True)
class Encoder:
    """How the encode kernels write one role; as ``Reader``.

    Parameters
    ----------
    type, header, folder, tables, order, block
        As ``Reader``; ``tables`` is what the struct gets.
    factor : str
        Name of the constant ``[B or 1, H, D]`` that new tokens are multiplied with, or divided by.
    divide : bool
    form : {"rows", "blocks", "table"}
        Kernel around the struct: ``encode_side`` of encode.cuh (a row at a time), ``encode_blocks`` of
        encode_blocks.cuh (a block of tokens), ``encode_with_table`` of encode_table.cuh.
    shared : int
        With form="table": bytes of dynamic shared memory, ``table_bytes``; the program asserts it.
    """

    type: str
    header: str
    folder: str = str(CSRC)
    tables: Callable[[Params], Tensor] | None = None
    factor: str = ""
    divide: bool = False
    order: int = 1
    block: int = 1
    form: Form = "rows"
    shared: int = 0


def includes(*sides: "Reader | Encoder") -> list[str]:
    """Lines that include what the structs of these sides need."""
    names = {name for side in sides for name in (side.header, *(side.also if isinstance(side, Reader) else ()))}
    return [f'#include "{name}"' for name in sorted(names)]


Find = Callable[[Codec, int, Role], "Reader | str"]
FindEncoder = Callable[[Codec, int, Role], "Encoder | str"]
_READERS: dict[type[Codec], Find] = {}
_ENCODERS: dict[type[Codec], FindEncoder] = {}


def add_reader(codec: type[Codec], find: Find) -> None:
    """Say how a class of codecs is read; subclasses need an entry of their own."""
    _READERS[codec] = find


def add_encoder(codec: type[Codec], find: FindEncoder) -> None:
    """Say how a class of codecs is written; subclasses need an entry of their own."""
    _ENCODERS[codec] = find


def reader(codec: Codec, head_dim: int, role: Role) -> Reader | str:
    """Return how keys or values of this codec are read, or the reason why they cannot be."""
    _load()
    found = _READERS.get(type(codec))
    if found is None:
        return f"no CUDA kernel reads {codec}"
    return _dims(codec, head_dim) or found(codec, head_dim, role)


def encoder(codec: Codec, head_dim: int, role: Role) -> Encoder | str:
    """Return how keys or values of this codec are written, or the reason why the PyTorch reference must do it."""
    _load()
    found = _ENCODERS.get(type(codec))
    if found is None:
        return f"no CUDA kernel encodes {codec}"
    return _dims(codec, head_dim) or found(codec, head_dim, role)


@lru_cache(maxsize=1)
def _load() -> None:
    """Let the package's own codecs with tables add their entries; that module imports this one."""
    importlib.import_module("kvcodec.cuda.sides_tables")


def _dims(codec: Codec, head_dim: int) -> str:
    if head_dim in HEAD_DIMS:
        return ""
    return f"the CUDA kernels take head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dim} ({codec})"


class SideTensors(NamedTuple):
    """What the kernels get for one role of a layer, on its device.

    Parameters
    ----------
    tables : Tensor uint8 ``[H or 1, bytes]`` or None
    factor : Tensor float32 ``[B or 1, H, D]`` or None
    order : int
    """

    tables: Tensor | None
    factor: Tensor | None
    order: int


def tensors_for(side: Reader | Encoder, params: Params, heads: int, head_dim: int) -> SideTensors:
    """Build the tensors of one role from the site's constants.

    Raises
    ------
    UnsupportedError
        The constants do not have the shape that the kernels take.
    """
    tables = factor = None
    if side.tables is not None:
        tables = side.tables(params).contiguous()
        if tables.dtype != torch.uint8 or tables.dim() != 2 or tables.shape[0] not in (1, heads):
            raise UnsupportedError(
                f"{side.type}: tables are {tables.dtype} {list(tables.shape)}; expected uint8 [{heads} or 1, bytes]."
            )
    if side.factor:
        factor = params[side.factor].float()
        factor = factor.expand(factor.shape[0], heads, head_dim).contiguous()
    return SideTensors(tables, factor, side.order)


# -- the codecs of this package --------------------------------------------------------------------------------------


def _dense(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Dense)
    if codec.dtype == "float32":
        return f"the kernels read 16-bit numbers, not {codec}"
    return Reader(f"kv::ReadDense<{dim}, {_bool(codec.dtype == 'bfloat16')}>", "read_dense.cuh")


def _saw(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, SawInt4)
    if (codec.zero, codec.pack) != ("rounded", "neighbours"):
        return f"the kernels read zero=rounded and pack=neighbours, not {codec}"
    return Reader(f"kv::ReadSaw<{dim}>", "read_saw.cuh", order=codec.block_for(dim))


def _group_int(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, GroupInt)
    if codec.symmetric:
        return f"the kernels read asymmetric integers, not {codec}"
    if codec.along == "tokens":
        if role == "value" or codec.group != 32 or codec.bits not in (2, 4):
            return f"along tokens the kernels read keys of 2 or 4 bits in groups of 32, not {codec} as {role}s"
        return Reader(f"kv::ReadTokenInt<{dim}, {codec.bits}>", "read_group.cuh", block=32)
    if codec.group == 0:
        return Reader(f"kv::ReadInt<{dim}, {codec.bits}>", "read_int.cuh")
    if codec.group != 32 or codec.bits not in (2, 3, 4):
        return f"the kernels read 2, 3 or 4 bits in groups of 32 channels, not {codec}"
    return Reader(f"kv::ReadGroupInt<{dim}, {codec.bits}, {codec.group}>", "read_group.cuh")


def _fp8(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Fp8)
    return Reader(f"kv::ReadFp8<{dim}, {_bool(codec.scaled)}>", "read_fp8.cuh")


def _innerq(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, InnerQ)
    factor = "norm" if codec.norm else ""
    if codec.along == "channels":
        if role == "value":
            return f"along channels the kernels read InnerQ's keys, not {codec} as values"
        return Reader(f"kv::ReadInnerKey<{dim}, {codec.width}>", "read_group.cuh", factor=factor)
    if role == "key":
        return f"along tokens the kernels read InnerQ's values, not {codec} as keys"
    return Reader(
        f"kv::ReadInnerValue<{dim}, {codec.width}, {_bool(codec.hybrid)}>", "read_group.cuh", block=32, factor=factor
    )


def _bool(x: bool) -> str:
    return "true" if x else "false"


for _codec, _find in (
    (Dense, _dense),
    (SawInt4, _saw),
    (GroupInt, _group_int),
    (Fp8, _fp8),
    (InnerQ, _innerq),
):
    add_reader(_codec, _find)


def _write_dense(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, Dense)
    if codec.dtype == "float32":
        return f"the kernels write 16-bit numbers, not {codec}"
    return Encoder(f"kv::EncodeDense<{dim}, {_bool(codec.dtype == 'bfloat16')}>", "encode_dense.cuh")


def _write_saw(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, SawInt4)
    if codec.pack != "neighbours":
        return f"the kernels write pack=neighbours, not {codec}"
    name = f"kv::EncodeSaw<{dim}, {_bool(codec.zero == 'float')}>"
    return Encoder(name, "encode_saw.cuh", order=codec.block_for(dim))


def _write_group_int(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, GroupInt)
    if codec.group not in (0, 32):
        return f"the kernels write groups of 32 or of all channels, not {codec}"
    if codec.along == "channels":
        name = f"kv::EncodeGroupInt<{dim}, {codec.bits}, {codec.group}, {_bool(codec.symmetric)}>"
        return Encoder(name, "encode_int.cuh")
    name = f"kv::EncodeTokensInt<{dim}, {codec.bits}, {codec.group}, {_bool(codec.symmetric)}>"
    return Encoder(name, "encode_blocks.cuh", block=codec.group, form="blocks")


def _write_fp8(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, Fp8)
    return Encoder(f"kv::EncodeFp8<{dim}, {_bool(codec.scaled)}>", "encode_fp8.cuh")


def _write_innerq(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, InnerQ)
    factor, reading = "norm" if codec.norm else "", f"kv::{codec.symmetric.upper()}"
    if codec.along == "channels":
        name = f"kv::EncodeInnerq<{dim}, {codec.bits}, {reading}>"
        return Encoder(name, "encode_innerq.cuh", factor=factor, divide=True)
    name = f"kv::EncodeTokensInnerq<{dim}, {codec.bits}, {reading}, {_bool(codec.hybrid)}>"
    return Encoder(name, "encode_blocks.cuh", factor=factor, divide=True, block=codec.block_tokens, form="blocks")


def _write_ultraquant(codec: Codec, dim: int, role: Role) -> Encoder | str:
    assert isinstance(codec, UltraQuant)
    order = power_of_two_divisor(dim) if codec.rotate else 1
    bits = int.from_bytes(struct.pack(">d", codec.c), "big")  # of the double
    unit = math.ceil(math.log2(order) / 2)
    name = f"kv::EncodeUltraquant<{dim}, 0x{bits:x}ull, {_bool(codec.scale == 'real')}, {unit}>"
    return Encoder(name, "encode_ultraquant.cuh", order=order)


for _codec, _write in (
    (Dense, _write_dense),
    (SawInt4, _write_saw),
    (GroupInt, _write_group_int),
    (Fp8, _write_fp8),
    (InnerQ, _write_innerq),
    (UltraQuant, _write_ultraquant),
):
    add_encoder(_codec, _write)
