"""Kernels of ``saw-int4``: rows of four bits with a scale and an integer zero point, rotated."""

from packedkv.codec import Role
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag


def reader(codec: SawInt4, head_dim: int, role: Role) -> Reader:
    if (codec.zero, codec.pack) != ("rounded", "neighbours"):
        raise UnsupportedError(f"the kernels read zero=rounded and pack=neighbours, not {codec}")
    return Reader(
        f"kv::ReadSaw<{head_dim}>", "read_saw.cuh", order=codec.order_for(head_dim), tile=32, warps=6, uneven=True
    )


def cpu_reader(codec: SawInt4, head_dim: int, role: Role) -> CpuReader:
    if codec.pack != "neighbours":
        raise UnsupportedError(f"the CPU kernels read pack=neighbours, not {codec}")
    return CpuReader("saw", order=codec.order_for(head_dim))


def encoder(codec: SawInt4, head_dim: int, role: Role) -> Encoder:
    if codec.pack != "neighbours":
        raise UnsupportedError(f"the kernels write pack=neighbours, not {codec}")
    name = f"kv::EncodeSaw<{head_dim}, {flag(codec.zero == 'float')}>"
    return Encoder(name, "encode_saw.cuh", order=codec.order_for(head_dim), uneven=True)


def cpu_encoder(codec: SawInt4, head_dim: int, role: Role) -> CpuEncoder:
    if codec.pack != "neighbours":
        raise UnsupportedError(f"the CPU kernels write pack=neighbours, not {codec}")
    return CpuEncoder("saw", (int(codec.zero == "float"),), order=codec.order_for(head_dim))
