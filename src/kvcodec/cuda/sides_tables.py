"""Sides of the codecs that look codes up: levels, FP4, triplets, quaternions; readers and encoders. Entries as in ``sides``.

Values that have the levels of the keys use the keys' table: shared memory is what bounds how many warps run.
"""

from kvcodec.codec import Codec, Role
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.octopus_qjl import OctopusQJL
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec.codecs.ultra_tq import UltraTQ
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.cuda.encode_tables import row_encoder
from kvcodec.cuda.hqmq_tables import PAIRS, SIDE
from kvcodec.cuda.sides import Encoder, Reader, add_encoder, add_reader
from kvcodec.cuda.tables import level_bytes, turboquant_table, ultra_tq_table, with_sketch
from kvcodec.cuda.tables_vector import (
    hqmq_reader,
    hqmq_shared,
    hqmq_tables,
    octopus_reader,
    octopus_shared,
    octopus_tables,
)
from kvcodec.ops.hadamard import power_of_two_divisor


def _flag(x: bool) -> str:
    return "true" if x else "false"


def _turboquant(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, TurboQuant)
    own, borrowed = (
        f"kv::ReadTurboQuant<{dim}, {codec.bits}, {_flag(codec.norm == 'fp32')}, {_flag(b)}>" for b in (False, True)
    )
    return Reader(
        own, "read_levels.cuh", shared=level_bytes(codec.bits), tables=lambda params: turboquant_table(params, dim),
        factor="signs", order=power_of_two_divisor(dim), table_name=f"turboquant-{codec.bits}", borrowing=borrowed,
    )  # fmt: skip


def _ultra_tq(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, UltraTQ)
    if role == "value":
        return f"the kernels read Ultra-TQ's keys, not {codec} as values"
    return Reader(
        f"kv::ReadUltraTQ<{dim}, {_flag(codec.norm == 'block')}>", "read_levels.cuh", shared=level_bytes(4),
        tables=lambda params: ultra_tq_table(params, codec.norm), order=power_of_two_divisor(dim),
    )  # fmt: skip


def _ultraquant(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, UltraQuant)
    if codec.queries != "exact":
        return f"the kernels multiply exact queries, not those of {codec}"
    order = power_of_two_divisor(dim) if codec.rotate else 1
    if codec.scale == "real":
        return f"the kernels read scale=pow2, not {codec}"
    way = "kv::TABLE_NONE" if role == "key" else "kv::TABLE_OWN"
    name = f"kv::ReadUltraQuant<{dim}, {way}>"
    return Reader(name, "read_ultraquant.cuh", shared=0 if role == "key" else level_bytes(4), order=order)


def _octopus(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Octopus)
    if not (name := octopus_reader(codec, dim)) or role == "value":
        return f"the kernels read keys of directions of at most 6 bits, not {codec} as {role}s"
    return Reader(
        name, "read_octopus.cuh", shared=octopus_shared(codec), tables=octopus_tables(codec), factor="signs",
        order=power_of_two_divisor(dim),
    )  # fmt: skip


def _hqmq(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, Hqmq)
    if not (name := hqmq_reader(codec, dim)):
        return f"the kernels read packing=ceil, not {codec}"
    return Reader(name, "read_hqmq.cuh", shared=hqmq_shared(codec), tables=hqmq_tables)


def _octopus_qjl(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, OctopusQJL)
    return _sketched(_octopus(codec, dim, role), codec, dim)


def _turboquant_qjl(codec: Codec, dim: int, role: Role) -> Reader | str:
    assert isinstance(codec, TurboQuantQJL)
    if role == "value" or codec.variant != "correct":
        return f"the kernels read keys of variant=correct, not {codec} as {role}s"
    return _sketched(_turboquant(codec.stage, dim, role), codec, dim)


def _sketched(stage: Reader | str, codec: Codec, dim: int) -> Reader | str:
    if isinstance(stage, str):
        return stage
    if dim & (dim - 1):
        return f"the kernels sketch at head_dim 64, 128 and 256, not {dim} ({codec})"
    assert stage.tables is not None
    return Reader(
        f"kv::ReadSketch<{stage.type}, {dim}>", "read_sketch.cuh", shared=stage.shared,
        tables=with_sketch(stage.tables), factor=stage.factor, order=stage.order, also=(stage.header,), queries=2,
    )  # fmt: skip


def _write(codec: Codec, dim: int, role: Role) -> Encoder | str:
    found = row_encoder(codec, dim)
    if found is None:
        return f"no CUDA kernel encodes {codec}"
    return Encoder(
        found.type, found.header, tables=found.tables, factor=found.factor, order=found.order, form="table",
        shared=_encode_shared(codec, dim),
    )  # fmt: skip


def _encode_shared(codec: Codec, dim: int) -> int:
    """Bytes of shared memory, ``kv::table_bytes``: tables of a head, and scratch of 8 warps."""

    def levels(bits: int) -> int:
        return 16 + 72 * 2**bits

    def room(codes: int) -> int:  # kv::stream_room
        return -(-codes // 8) * 8 + 16

    if isinstance(codec, Octopus):
        table = levels(codec.direction_bits) + levels(codec.norm_bits) + 16 * 4**codec.direction_bits
        table = table if table <= 96 * 1024 else 0  # read from global memory
        scratch = 16 * (dim + 24) + 8 * room(-(-dim // 3))
    elif isinstance(codec, Hqmq):
        table = -(-(20 * PAIRS[codec.s] + 2 * SIDE**3 + 24 * 24) // 16) * 16 + 16 * codec.s
        scratch = 16 * room(dim // 4)
    else:
        bits = codec.bits if isinstance(codec, TurboQuant) else 4
        table, scratch = levels(bits), 0 if bits in (2, 4) else 16 * room(dim // 4)
    return table + 8 * scratch


for _codec, _find in (
    (TurboQuant, _turboquant),
    (TurboQuantQJL, _turboquant_qjl),
    (UltraTQ, _ultra_tq),
    (UltraQuant, _ultraquant),
    (Octopus, _octopus),
    (OctopusQJL, _octopus_qjl),
    (Hqmq, _hqmq),
):
    add_reader(_codec, _find)
for _codec in (TurboQuant, TurboQuantQJL, UltraTQ, Octopus, OctopusQJL, Hqmq):
    add_encoder(_codec, _write)
