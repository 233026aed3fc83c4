"""Kernels of ``turboquant`` and of its keys with a sketch: Lloyd-Max levels of rotated unit vectors."""

from dataclasses import replace

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs import sketch
from packedkv.kernels.codecs.tables import group_levels, level_bytes, level_table, nearest_level, walls_of
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.ops.hadamard import power_of_two_divisor


def reader(codec: TurboQuant, head_dim: int, role: Role) -> Reader:
    if isinstance(codec, TurboQuantQJL):
        if role == "value" or codec.variant != "correct":
            raise UnsupportedError(f"the kernels read keys of variant=correct, not {codec} as {role}s")
        return sketch.sketched(reader(codec.stage, head_dim, role), codec, head_dim)
    name = f"kv::ReadTurboQuant<{head_dim}, {codec.bits}, {flag(codec.norm == 'fp32')}, {{}}>"
    return Reader(
        name.format("false"),
        "read_levels.cuh",
        shared=level_bytes(codec.bits),
        # times sqrt(D), as norms are root mean squares
        tables=lambda params: level_table(params["levels"][0].double() * head_dim**0.5, codec.bits)[None],
        factor="signs",
        order=power_of_two_divisor(head_dim),
        shares_table_with=f"levels of {codec.bits} bits, {head_dim} channels",
        borrowing_type=name.format("true"),
        layer_invariant=True,
        uneven=head_dim * codec.bits % 32 == 0,  # rows of whole words
    )


def cpu_reader(codec: TurboQuant, head_dim: int, role: Role) -> CpuReader:
    if isinstance(codec, TurboQuantQJL):
        if codec.variant != "correct":
            raise UnsupportedError(f"the kernels read variant=correct, not {codec}")
        return sketch.cpu_sketched(cpu_reader(codec.stage, head_dim, role), codec, head_dim)
    return CpuReader(
        f"levels{codec.bits}",
        (int(codec.norm == "fp32"),),
        tables=lambda params: group_levels(head_dim**0.5, params["levels"][0]),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        layer_invariant=True,
    )


def encoder(codec: TurboQuant, head_dim: int, role: Role) -> Encoder:
    """The nearest level of each channel; for TurboQuant-QJL then the signs of the residual's sketch."""
    if isinstance(codec, TurboQuantQJL):
        return sketch.sketched_row(encoder(codec.stage, head_dim, role), "levels")
    return Encoder(
        f"kv::TurboQuantRow<{head_dim}, {codec.bits}, {flag(codec.norm == 'fp32')}>",
        "encode_turboquant.cuh",
        tables=nearest_level(codec.bits),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        form="table",
        layer_invariant=True,
        uneven=codec.bits != 3,
    )


def cpu_encoder(codec: TurboQuant, head_dim: int, role: Role) -> CpuEncoder:
    if isinstance(codec, TurboQuantQJL):
        if codec.variant != "correct":
            raise UnsupportedError(f"the kernels write variant=correct, not {codec}")

        def walls_and_levels(params: Params) -> Tensor:
            levels = params["levels"]
            return torch.cat([walls_of(levels[0]), levels.float().view(torch.uint8)], 1)

        stage = replace(cpu_encoder(codec.stage, head_dim, role), tables=walls_and_levels)
        return sketch.cpu_sketched(stage, codec, head_dim)
    return CpuEncoder(
        f"levels{codec.bits}",
        (int(codec.norm == "fp32"),),
        tables=lambda params: walls_of(params["levels"][0]),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        layer_invariant=True,
    )
