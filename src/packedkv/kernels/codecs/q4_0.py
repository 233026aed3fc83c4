"""CPU kernels of ``q4_0``: groups of 32 in the rotated basis. No CUDA kernel reads them."""

from packedkv.codec import Role
from packedkv.codecs.q4_0 import Q40
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader


def cpu_reader(codec: Q40, head_dim: int, role: Role) -> CpuReader:
    return CpuReader("q4_0", order=codec.order_for(head_dim))


def cpu_encoder(codec: Q40, head_dim: int, role: Role) -> CpuEncoder:
    return CpuEncoder("q4_0", order=codec.order_for(head_dim))
