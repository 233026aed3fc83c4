"""Which C++ struct reads or writes which codec, and what it needs besides bytes: tables, factors, a rotation.

One entry per codec class. A codec of another package adds its own with ``add_reader`` and ``add_encoder``: a function
of (codec, head_dim, role) that returns a ``Reader`` or ``Encoder``, or the reason why there is none.

Between the bases the kernels know two linear maps, in this order for queries and new tokens: times a factor per head
and channel (``[B or 1, H, D]``, a constant of the site), then a block-diagonal Hadamard. Outputs go back the other way.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeVar

from torch import Tensor

from kvcodec.codec import Codec, Dense, Params, Role
from kvcodec.codecs.fp8 import Fp8
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.innerq import InnerQ
from kvcodec.codecs.med import Med
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.octopus_qjl import OctopusQJL
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.codecs.wrapper import inside
from kvcodec.kernels import outliers
from kvcodec.kernels import tables_vector as vector
from kvcodec.kernels.build import CSRC
from kvcodec.kernels.constants import SideTensors as SideTensors
from kvcodec.kernels.constants import tensors_for as tensors_for
from kvcodec.kernels.encode_tables import row_encoder
from kvcodec.kernels.tables import turboquant_table, ultra_tq_table, with_sketch
from kvcodec.ops.hadamard import power_of_two_divisor

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Multiples of 32: a lane of a warp holds every 32nd channel of a row."""


@dataclass(frozen=True)
class Reader:
    """How the decode kernels read one role.

    Parameters
    ----------
    type, header, folder : str
        The C++ struct with its template arguments, the file that defines it, and where that file is.
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
    lends, borrower : str
        Name of the tables' contents, and the struct that reads the tables of keys which lend the same: values then
        need none of their own.
    both : str
        The struct when one codec holds keys and values; empty: ``type``.
    also : tuple of str
        Further files that the struct needs.
    queries : int
        Vectors that the kernel makes of a query; 2 for sketches.
    scratch : int
        Bytes of shared memory that each warp wants for itself, the struct's ``SCRATCH``.
    reach : int
        Least bytes of shared memory that ``both`` takes, its ``REACH``.
    tile : int
        The longest tile where sequences are many; look-ups that meet in a bank want more warps instead.
    warps : int
        Warps of a CTA where two share a multiprocessor; of keys.
    team_warps : int
        Warps of all teams of a CTA, at most; of keys.
    alike : bool
        Whether the tables are the same in all layers, unless their constants come from a sample.
    """

    type: str
    header: str
    folder: str = str(CSRC)
    block: int = 1
    shared: int = 0
    tables: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    factor: str = ""
    order: int = 1
    lends: str = ""
    borrower: str = ""
    both: str = ""
    also: tuple[str, ...] = ()
    queries: int = 1
    scratch: int = 0
    reach: int = 0
    tile: int = 64
    warps: int = 4
    team_warps: int = 8
    alike: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it takes a factor."""
        return bool(self.factor)


Form = Literal["rows", "blocks", "table"]


@dataclass(frozen=True)
class Encoder:
    """How the encode kernels write one role; as ``Reader``.

    Parameters
    ----------
    type, header, folder, tables, order, block, alike
        As ``Reader``; ``tables`` is what the struct gets.
    factor : str
        Name of the constant ``[B or 1, H, D]`` that new tokens are multiplied with, or divided by.
    divide : bool
    form : {"rows", "blocks", "table"}
        Kernel around the struct: ``encode_side`` of encode.cuh (a row at a time), ``encode_blocks`` of
        encode_blocks.cuh (a block of tokens), ``encode_with_table`` of encode_table.cuh.
    own : str
        Name of a constant ``[B or 1, H]`` that the struct takes in the place of a factor; empty: none.
    """

    type: str
    header: str
    folder: str = str(CSRC)
    tables: Callable[[Params], Tensor] | None = field(default=None, repr=False, compare=False)
    factor: str = ""
    divide: bool = False
    order: int = 1
    block: int = 1
    form: Form = "rows"
    own: str = ""
    alike: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it takes a factor, or a constant of its own in the place of one."""
        return bool(self.factor or self.own)


def includes(*sides: "Reader | Encoder") -> list[str]:
    """Lines that include what the structs of these sides need."""
    names = {name for side in sides for name in (side.header, *(side.also if isinstance(side, Reader) else ()))}
    return [f'#include "{name}"' for name in sorted(names)]


Find = Callable[[Codec, int, Role], "Reader | str"]
FindEncoder = Callable[[Codec, int, Role], "Encoder | str"]
_READERS: dict[type, Find] = {}
_ENCODERS: dict[type, FindEncoder] = {}


def add_reader(codec: type, find: Find) -> None:
    """Say how a class of codecs is read; subclasses need an entry of their own."""
    _READERS[codec] = find


def add_encoder(codec: type, find: FindEncoder) -> None:
    """Say how a class of codecs is written; subclasses need an entry of their own."""
    _ENCODERS[codec] = find


def reader(codec: Codec, head_dim: int, role: Role) -> Reader | str:
    """Return how keys or values of this codec are read, or the reason why they cannot be."""
    found = _READERS.get(type(codec))
    return f"no CUDA kernel reads {codec}" if found is None else _asked(found, codec, head_dim, role)


def encoder(codec: Codec, head_dim: int, role: Role) -> Encoder | str:
    """Return how keys or values of this codec are written, or the reason why the PyTorch reference must do it."""
    found = _ENCODERS.get(type(codec))
    return f"no CUDA kernel encodes {codec}" if found is None else _asked(found, codec, head_dim, role)


_Side = TypeVar("_Side", Reader, Encoder)


@lru_cache(maxsize=1024)  # every layer of every cache asks
def _asked(find: Callable[[Codec, int, Role], _Side | str], codec: Codec, head_dim: int, role: Role) -> _Side | str:
    return _dims(codec, head_dim) or find(codec, head_dim, role)


def _dims(codec: Codec, head_dim: int) -> str:
    if head_dim in HEAD_DIMS:
        return ""
    return f"the CUDA kernels take head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dim} ({codec})"


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
    return Reader(f"kv::ReadSaw<{dim}>", "read_saw.cuh", order=codec.block_for(dim), tile=32, warps=6)


def _group_int(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, GroupInt)
    if codec.along == "channels" and codec.group == 0:
        return Reader(f"kv::ReadInt<{dim}, {codec.bits}, {_bool(codec.symmetric)}>", "read_int.cuh")
    if codec.symmetric or codec.group != 32:
        return f"in groups the kernels read asymmetric integers, 32 to a group, not {codec}"
    if codec.along == "channels":
        return Reader(
            f"kv::ReadGroupInt<{dim}, {codec.bits}, {codec.group}>",
            "read_group.cuh",
            shared=LEVEL_TABLE[2] if codec.bits == 2 and dim % 128 else 0,
        )
    if role == "value":
        return f"along tokens the kernels read keys, not {codec} as values"
    tile = 64 if dim < 192 else 32  # of 64 tokens the registers do not hold what more channels need
    return Reader(f"kv::ReadTokenInt<{dim}, {codec.bits}>", "read_group.cuh", block=32, tile=tile)


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


def _ultraquant(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, UltraQuant)
    if codec.queries != "exact":
        return f"the kernels do not round queries, as {codec} does"
    real = codec.scale == "real"
    name = f"kv::ReadUltraQuant<{dim}, kv::TABLE_{{}}, {_bool(real)}>"
    return Reader(
        name.format("OWN"),
        "read_ultraquant.cuh",
        shared=LEVEL_TABLE[4],
        order=power_of_two_divisor(dim) if codec.rotate else 1,
        lends=f"E2M1, real {real}",
        borrower=name.format("BORROWED"),
    )


def _turboquant(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, TurboQuant)
    name = f"kv::ReadTurboQuant<{dim}, {codec.bits}, {_bool(codec.norm == 'fp32')}, {{}}>"
    return Reader(
        name.format("false"),
        "read_levels.cuh",
        shared=LEVEL_TABLE[codec.bits],
        tables=lambda params: turboquant_table(params, dim),
        factor="signs",
        order=power_of_two_divisor(dim),
        lends=f"levels of {codec.bits} bits, {dim} channels",
        borrower=name.format("true"),
        alike=True,
    )


def _ultra_tq(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, UltraTQ)
    if role == "value":
        return f"the kernels read Ultra-TQ's keys, not {codec} as values"
    return Reader(
        f"kv::ReadUltraTQ<{dim}, {_bool(codec.norm == 'block')}>",
        "read_levels.cuh",
        shared=LEVEL_TABLE[4],
        tables=lambda params: ultra_tq_table(params, codec.norm),
        order=power_of_two_divisor(dim),
        alike=True,
    )


def _octopus(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Octopus)
    if role == "value":
        return f"the kernels read OCTOPUS' keys, not {codec} as values"
    if not (name := vector.octopus_reader(codec, dim)):
        return f"the table of directions of {codec} does not fit into shared memory"
    return Reader(
        name,
        "read_octopus.cuh",
        shared=vector.octopus_shared(codec),
        tables=vector.octopus_tables(codec),
        factor="signs",
        order=power_of_two_divisor(dim),
        warps=6,
        alike=True,
    )


def _sketched(stage: Reader | str, codec: Codec, dim: int) -> Reader | str:
    """Keys of a stage and the signs of a sketch of what it leaves over."""
    if isinstance(stage, str):
        return stage
    if dim & (dim - 1):
        return f"the kernels sketch at head_dim 64, 128 and 256, not {dim} ({codec})"
    assert stage.tables is not None
    return Reader(
        f"kv::ReadSketch<{stage.type}, {dim}>",
        "read_sketch.cuh",
        shared=stage.shared,
        tables=with_sketch(stage.tables),
        factor=stage.factor,
        order=stage.order,
        also=(stage.header,),
        queries=2,
    )


def _octopus_qjl(codec: Codec, dim: int, role: Role) -> Reader | str:
    return _sketched(_octopus(codec, dim, role), codec, dim)


def _turboquant_qjl(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, TurboQuantQJL)
    if role == "value" or codec.variant != "correct":
        return f"the kernels read keys of variant=correct, not {codec} as {role}s"
    return _sketched(_turboquant(codec.stage, dim, role), codec, dim)


def _hqmq(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Hqmq)
    if not (name := vector.hqmq_reader(codec, dim)):
        return f"the kernels read packing=ceil, not {codec}"
    shared, reach = vector.hqmq_shared(codec), vector.hqmq_reach(codec)
    both, tile = vector.hqmq_reader(codec, dim, role), 16 if codec.s >= 96 else 64  # eight copies or fewer
    tables = vector.hqmq_tables
    return Reader(name, "read_hqmq.cuh", shared=shared, tables=tables, both=both, reach=reach, tile=tile, team_warps=16)


def _med(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Med)
    inner = reader(codec.inner, dim, role)
    if isinstance(inner, str):
        return inner
    rest = outliers.rest_of(codec.inner, dim)
    if not rest:
        return f"the kernels read outliers beside hqmq and integers of group 0, not {codec}"
    passes, scratch = outliers.passes_of(codec, dim, inner.shared)

    def around(name: str) -> str:
        return name and f"kv::ReadMed<{name}, {dim}, {min(codec.slots, dim // 4)}, {passes}, {rest}>"

    tables = inner.tables
    return replace(
        inner,
        type=around(inner.type),
        both=around(inner.both),
        borrower=around(inner.borrower),
        header="read_med.cuh",
        also=(*inner.also, inner.header),
        tables=None if tables is None else lambda params: tables(inside(params)),
        scratch=scratch,
    )


LEVEL_TABLE = {1: 32768, 2: 32768, 3: 8192, 4: 32768, 5: 4096, 6: 8192}
"""Bytes of ``kv::LevelTable`` by bits."""


def _bool(x: bool) -> str:
    return "true" if x else "false"


for _codec, _find in (
    (Dense, _dense),
    (SawInt4, _saw),
    (GroupInt, _group_int),
    (Fp8, _fp8),
    (InnerQ, _innerq),
    (UltraQuant, _ultraquant),
    (UltraTQ, _ultra_tq),
    (TurboQuant, _turboquant),
    (Octopus, _octopus),
    (OctopusQJL, _octopus_qjl),
    (TurboQuantQJL, _turboquant_qjl),
    (Hqmq, _hqmq),
    (Med, _med),
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


def _write_with_table(codec: Codec, dim: int, role: Role) -> Encoder | str:
    found = row_encoder(codec, dim)
    if found is None:
        return f"no CUDA kernel encodes {codec}"
    return Encoder(
        found.type,
        found.header,
        tables=found.tables,
        factor=found.factor,
        order=found.order,
        form="table",
        own=found.own,
        alike=found.alike,
    )


for _kind, _write in (
    (Dense, _write_dense),
    (SawInt4, _write_saw),
    (GroupInt, _write_group_int),
    (Fp8, _write_fp8),
    (InnerQ, _write_innerq),
    (UltraQuant, _write_ultraquant),
    *((kind, _write_with_table) for kind in (TurboQuant, TurboQuantQJL, UltraTQ, Octopus, OctopusQJL, Hqmq, Med)),
):
    add_encoder(_kind, _write)
