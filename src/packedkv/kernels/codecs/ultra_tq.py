"""Kernels of ``ultra-tq``: keys rounded to 16 levels, rotated; its values are ``group_int``."""

import math

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.ultra_tq import UltraTQ
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import group_levels, level_bytes, level_table, nearest_level, walls_of
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag


def reader(codec: UltraTQ, head_dim: int, role: Role) -> Reader:
    """Keys only: 16 levels, over 4 where blocks have norms."""
    if role == "value":
        raise UnsupportedError(f"the kernels read Ultra-TQ's keys, not {codec} as values")
    unit = 4 if codec.norm == "block" else 1
    return Reader(
        f"kv::ReadUltraTQ<{head_dim}, {flag(codec.norm == 'block')}>",
        "read_levels.cuh",
        shared=level_bytes(4),
        tables=lambda params: level_table(params["levels"][0].double() / unit, 4)[None],
        order=codec.order_for(head_dim),
        layer_invariant=True,
    )


def cpu_reader(codec: UltraTQ, head_dim: int, role: Role) -> CpuReader:
    """16 levels; with norms of tokens all channels are one group."""
    unit, order = codec.unit(head_dim), codec.order_for(head_dim)
    return CpuReader(
        "group levels", (codec.group,), tables=lambda params: group_levels(unit, params["levels"][0]), order=order
    )


def encoder(codec: UltraTQ, head_dim: int, role: Role) -> Encoder:
    """The nearest of 16 levels, looked up in shared memory."""
    name = f"kv::UltraTqRow<{head_dim}, {flag(codec.group > 0)}, {int(math.log2(codec.unit(head_dim)))}>"
    order, tables = codec.order_for(head_dim), nearest_level(4)
    return Encoder(name, "encode_ultra_tq.cuh", tables=tables, order=order, form="table", layer_invariant=True)


def cpu_encoder(codec: UltraTQ, head_dim: int, role: Role) -> CpuEncoder:
    """The nearest of 16 levels by their walls; behind them the unit of the norms."""

    def tables(params: Params) -> Tensor:
        unit = torch.tensor([[codec.unit(head_dim)]], dtype=torch.float64, device="cpu").view(torch.uint8)
        return torch.cat([walls := walls_of(params["levels"][0]), unit.to(walls)], 1)

    return CpuEncoder("group levels", (codec.group,), tables=tables, order=codec.order_for(head_dim))
