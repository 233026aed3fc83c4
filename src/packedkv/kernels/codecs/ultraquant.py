"""Kernels of ``ultraquant``: E2M1 with a scale per 32 channels, keys rotated."""

import math
import struct

import torch

from packedkv.codec import Role
from packedkv.codecs.ultraquant import GROUP, UltraQuant, decode_e2m1
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import group_levels, level_bytes
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.ops.hadamard import power_of_two_divisor

_CODES = torch.arange(16)


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
        order=power_of_two_divisor(head_dim) if codec.rotate else 1,
        shares_table_with=f"E2M1, real {real}",
        borrowing_type=name.format("BORROWED"),
    )


def cpu_reader(codec: UltraQuant, head_dim: int, role: Role) -> CpuReader:
    if codec.queries != "exact":
        raise UnsupportedError(f"the kernels do not round queries, as {codec} does")
    order, real = power_of_two_divisor(head_dim) if codec.rotate else 1, codec.scale == "real"
    unit = 2.0 ** math.ceil(math.log2(order) / 2)
    return CpuReader(
        "group levels", (GROUP, 0, int(not real)), tables=lambda _: group_levels(unit, decode_e2m1(_CODES)),
        order=order,
    )  # fmt: skip


def encoder(codec: UltraQuant, head_dim: int, role: Role) -> Encoder:
    """The bits of c stand in the program, as the reference multiplies in double."""
    order = power_of_two_divisor(head_dim) if codec.rotate else 1
    bits = int.from_bytes(struct.pack(">d", codec.c), "big")  # of the double
    unit = math.ceil(math.log2(order) / 2)
    name = f"kv::EncodeUltraquant<{head_dim}, 0x{bits:x}ull, {flag(codec.scale == 'real')}, {unit}>"
    return Encoder(name, "encode_ultraquant.cuh", order=order)


def cpu_encoder(codec: UltraQuant, head_dim: int, role: Role) -> CpuEncoder:
    """c and the unit of the rotation are its table."""
    order = power_of_two_divisor(head_dim) if codec.rotate else 1
    numbers = torch.tensor([[codec.c, 2.0 ** math.ceil(math.log2(order) / 2)]], dtype=torch.float64)
    options, tables = (GROUP, 0, int(codec.scale == "pow2")), lambda _: numbers.view(torch.uint8)
    return CpuEncoder("e2m1", options, tables=tables, order=order)
