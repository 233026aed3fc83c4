"""Kernels of ``fp8``."""

from packedkv.codec import Role
from packedkv.codecs.fp8 import Fp8
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag


def reader(codec: Fp8, head_dim: int, role: Role) -> Reader:
    return Reader(f"kv::ReadFp8<{head_dim}, {flag(codec.scaled)}>", "read_fp8.cuh", uneven=True)


def cpu_reader(codec: Fp8, head_dim: int, role: Role) -> CpuReader:
    return CpuReader("fp8", (int(codec.scaled),))


def encoder(codec: Fp8, head_dim: int, role: Role) -> Encoder:
    return Encoder(f"kv::EncodeFp8<{head_dim}, {flag(codec.scaled)}>", "encode_fp8.cuh", uneven=True)


def cpu_encoder(codec: Fp8, head_dim: int, role: Role) -> CpuEncoder:
    return CpuEncoder("fp8", (int(codec.scaled),))
