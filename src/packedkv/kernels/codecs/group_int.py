"""Kernels of plain integers in groups: ``int``, ``kivi``, and the values of ``octopus`` and ``ultra-tq``."""

from packedkv.codec import Role
from packedkv.codecs.group_int import GroupInt
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import level_bytes
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag

GROUPS = (32, 64, 128)
"""Numbers that share a scale, where not all channels of a token do."""
SIZES = "32, 64 or 128"
MOST_TOKENS = 256
"""Of a block that CPU kernels write; ``kv::MOST_TOKENS``."""


def reader(codec: GroupInt, head_dim: int, role: Role) -> Reader:
    if codec.along == "channels" and codec.group == 0:
        name = f"kv::ReadInt<{head_dim}, {codec.bits}, {flag(codec.symmetric)}>"
        return Reader(name, "read_int.cuh", uneven=head_dim * codec.bits % 32 == 0)  # whole words
    if codec.symmetric or codec.group not in GROUPS:
        raise UnsupportedError(f"in groups the kernels read asymmetric integers, {SIZES} to a group, not {codec}")
    if codec.along == "channels":
        if role == "key" and codec.group != 32:
            raise UnsupportedError(f"along channels the kernels read keys in groups of 32, not {codec} as keys")
        name = f"kv::ReadGroupInt<{head_dim}, {codec.bits}, {codec.group}>"
        if codec.bits == 2 and (head_dim % 128 or codec.group != 32):
            return Reader(name, "read_group.cuh", shared=level_bytes(2), computes=True)
        return Reader(name, "read_group.cuh")
    if role == "value":
        raise UnsupportedError(f"along tokens the kernels read keys, not {codec} as values")
    tile = 64 if head_dim < 192 else 32  # with more channels a tile of 64 tokens does not fit the registers
    numbers = f"{head_dim}, {codec.bits}" + (f", {codec.group}" if codec.group != 32 else "")
    return Reader(f"kv::ReadTokenInt<{numbers}>", "read_group.cuh", block=codec.group, tile=tile)


def cpu_reader(codec: GroupInt, head_dim: int, role: Role) -> CpuReader:
    kind = " symmetric" if codec.symmetric else ""
    if codec.along == "tokens":
        return CpuReader(f"tokens{codec.bits}{kind}", (codec.group,))
    if codec.group % 16:
        raise UnsupportedError(f"the CPU kernels read groups of 16, 32, ... channels, not {codec}")
    return CpuReader(f"int{codec.bits}{kind}", (codec.group, int(codec.interleaves(head_dim))))


def encoder(codec: GroupInt, head_dim: int, role: Role) -> Encoder:
    if codec.group not in (0, *GROUPS):
        raise UnsupportedError(f"the kernels write groups of {SIZES} or of all channels, not {codec}")
    numbers = f"<{head_dim}, {codec.bits}, {codec.group}, {flag(codec.symmetric)}>"
    if codec.along == "channels":
        return Encoder(f"kv::EncodeGroupInt{numbers}", "encode_int.cuh", uneven=codec.group == 0 and codec.bits != 3)
    return Encoder(f"kv::EncodeTokensInt{numbers}", "encode_blocks.cuh", block=codec.group, form="blocks")


def cpu_encoder(codec: GroupInt, head_dim: int, role: Role) -> CpuEncoder:
    kind = " symmetric" if codec.symmetric else ""
    if codec.along == "tokens":
        if codec.group > MOST_TOKENS:
            raise UnsupportedError(f"the CPU kernels write groups of at most {MOST_TOKENS} tokens, not {codec}")
        return CpuEncoder(f"tokens{codec.bits}{kind}")
    if codec.group % 16:
        raise UnsupportedError(f"the CPU kernels write groups of 16, 32, ... channels, not {codec}")
    return CpuEncoder(f"int{codec.bits}{kind}", (codec.group, int(codec.interleaves(head_dim))))
