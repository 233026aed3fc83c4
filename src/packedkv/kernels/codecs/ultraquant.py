"""Kernels of ``ultraquant``: E2M1 with a scale per 32 channels, keys rotated."""

import math
import struct

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.ultraquant import GROUP, UltraQuant, decode_e2m1
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import group_levels, level_bytes
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag


def reader(codec: UltraQuant, head_dim: int, role: Role) -> Reader:
    if codec.queries != "exact":
        raise UnsupportedError(f"the kernels do not round queries, as {codec} does")
    real = codec.scale == "real"
    name = f"kv::ReadUltraQuant<{head_dim}, kv::TABLE_{{}}, {flag(real)}>"
    return Reader(
        name.format("OWN"),
        "read_ultraquant.cuh",
        shared=level_bytes(4),
        computes=True,
        order=codec.order_for(head_dim),
        shares_table_with=f"E2M1, real {real}",
        borrowing_type=name.format("BORROWED"),
    )


def cpu_reader(codec: UltraQuant, head_dim: int, role: Role) -> CpuReader:
    if codec.queries != "exact":
        raise UnsupportedError(f"the kernels do not round queries, as {codec} does")

    def tables(_params: Params) -> Tensor:
        return group_levels(codec.unit(head_dim), decode_e2m1(torch.arange(16, device="cpu")))

    options = GROUP, 0, int(codec.scale != "real")
    return CpuReader("group levels", options, tables=tables, order=codec.order_for(head_dim))


def encoder(codec: UltraQuant, head_dim: int, role: Role) -> Encoder:
    """The bits of c stand in the program, as the reference multiplies in double."""
    bits, unit = struct.pack(">d", codec.c).hex(), int(math.log2(codec.unit(head_dim)))
    name = f"kv::EncodeUltraquant<{head_dim}, 0x{bits}ull, {flag(codec.scale == 'real')}, {unit}>"
    return Encoder(name, "encode_ultraquant.cuh", order=codec.order_for(head_dim))


def cpu_encoder(codec: UltraQuant, head_dim: int, role: Role) -> CpuEncoder:
    """c and the unit of the rotation are its table."""

    def tables(_params: Params) -> Tensor:
        return torch.tensor([[codec.c, codec.unit(head_dim)]], dtype=torch.float64, device="cpu").view(torch.uint8)

    options = GROUP, 0, int(codec.scale == "pow2")
    return CpuEncoder("e2m1", options, tables=tables, order=codec.order_for(head_dim))
