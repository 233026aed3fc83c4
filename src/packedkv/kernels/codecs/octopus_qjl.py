"""Kernels of ``octopus-qjl``'s keys: those of ``octopus`` and the signs of a sketch."""

from packedkv.codec import Role
from packedkv.codecs.octopus_qjl import OctopusQJL
from packedkv.kernels.codecs import octopus, sketch
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader
from packedkv.ops.hadamard import power_of_two_divisor


def reader(codec: OctopusQJL, head_dim: int, role: Role) -> Reader:
    return sketch.sketched(octopus.reader(codec, head_dim, role), codec, head_dim)


def cpu_reader(codec: OctopusQJL, head_dim: int, role: Role) -> CpuReader:
    return sketch.cpu_sketched(octopus.cpu_reader(codec, head_dim, role, straight=True), codec, head_dim)


def encoder(codec: OctopusQJL, head_dim: int, role: Role) -> Encoder:
    return Encoder(
        f"kv::OctopusQjlRow<{octopus.row_arguments(codec, head_dim)}>",
        "encode_qjl.cuh",
        tables=sketch.written(octopus.write_tables(codec), "rho"),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        form="table",
    )


def cpu_encoder(codec: OctopusQJL, head_dim: int, role: Role) -> CpuEncoder:
    return sketch.cpu_sketched(octopus.cpu_encoder(codec, head_dim, role), codec, head_dim)
