"""Kernels of ``ultra-tq``: keys rounded to 16 levels, rotated; its values are ``group_int``."""

import math

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.ultra_tq import GROUP, Norm, UltraTQ
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import group_levels, level_bytes, level_table, nearest_level, walls_of
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.ops.hadamard import power_of_two_divisor


def reader(codec: UltraTQ, head_dim: int, role: Role) -> Reader:
    """Keys only: 16 levels, over 4 where blocks have norms."""
    if role == "value":
        raise UnsupportedError(f"the kernels read Ultra-TQ's keys, not {codec} as values")
    return Reader(
        f"kv::ReadUltraTQ<{head_dim}, {flag(codec.norm == 'block')}>",
        "read_levels.cuh",
        shared=level_bytes(4),
        tables=lambda params: read_table(params, codec.norm),
        order=power_of_two_divisor(head_dim),
        layer_invariant=True,
    )


def cpu_reader(codec: UltraTQ, head_dim: int, role: Role) -> CpuReader:
    """16 levels; with norms of tokens all channels are one group."""
    order, (group, unit) = power_of_two_divisor(head_dim), _norms(codec, head_dim)
    return CpuReader(
        "group levels", (group,), tables=lambda params: group_levels(unit, params["levels"][0]), order=order
    )


def encoder(codec: UltraTQ, head_dim: int, role: Role) -> Encoder:
    """The nearest of 16 levels, looked up in shared memory."""
    order, (group, unit) = power_of_two_divisor(head_dim), _norms(codec, head_dim)
    name = f"kv::UltraTqRow<{head_dim}, {flag(group > 0)}, {int(math.log2(unit))}>"
    return Encoder(
        name, "encode_ultra_tq.cuh", tables=nearest_level(4), order=order, form="table", layer_invariant=True
    )


def cpu_encoder(codec: UltraTQ, head_dim: int, role: Role) -> CpuEncoder:
    """The nearest of 16 levels by their walls; behind them the unit of the norms."""
    order, (group, unit) = power_of_two_divisor(head_dim), _norms(codec, head_dim)

    def tables(params: Params) -> Tensor:
        walls = walls_of(params["levels"][0])
        return torch.cat([walls, torch.tensor([[unit]], dtype=torch.float64).view(torch.uint8).to(walls)], 1)

    return CpuEncoder("group levels", (group,), tables=tables, order=order)


def _norms(codec: UltraTQ, head_dim: int) -> tuple[int, float]:
    """Channels that share a norm, 0 for all, and the norms' unit, 2^r of the codec."""
    if codec.norm == "token":
        return 0, 1.0
    return GROUP, 2.0 ** max(0, math.ceil(math.log2(power_of_two_divisor(head_dim) / GROUP) / 2))


def read_table(params: Params, norm: Norm) -> Tensor:
    """Table of ``ReadUltraTQ``: the levels, over 4 when blocks have norms of their own, uint8 ``[1, 1024]``."""
    levels = params["levels"][0].double()
    return level_table(levels / 4 if norm == "block" else levels, 4)[None]
