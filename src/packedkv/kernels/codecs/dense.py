"""Kernels of numbers held dense."""

import torch

from packedkv.codec import Dense, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.kernels.structs import KINDS


def reader(codec: Dense, head_dim: int, role: Role) -> Reader:
    if codec.dtype == "float32":
        raise UnsupportedError(f"the kernels read 16-bit numbers, not {codec}")
    return Reader(f"kv::ReadDense<{head_dim}, {flag(codec.dtype == 'bfloat16')}>", "read_dense.cuh", uneven=True)


def cpu_reader(codec: Dense, head_dim: int, role: Role) -> CpuReader:
    return CpuReader("dense", (KINDS[codec.held_dtype(torch.float16)],))


def encoder(codec: Dense, head_dim: int, role: Role) -> Encoder:
    if codec.dtype == "float32":
        raise UnsupportedError(f"the kernels write 16-bit numbers, not {codec}")
    return Encoder(f"kv::EncodeDense<{head_dim}, {flag(codec.dtype == 'bfloat16')}>", "encode_dense.cuh", uneven=True)


def cpu_encoder(codec: Dense, head_dim: int, role: Role) -> CpuEncoder:
    return CpuEncoder("dense", (KINDS[codec.held_dtype(torch.float16)],))
