"""CPU kernels of ``q4_0``; no CUDA kernel reads it."""

from packedkv.codec import Role
from packedkv.codecs.q4_0 import Q40
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader


def cpu_reader(codec: Q40, head_dim: int, role: Role) -> CpuReader:
    """Groups of 32 in the rotated basis."""
    return CpuReader("q4_0", order=codec.order_for(head_dim))


def cpu_encoder(codec: Q40, head_dim: int, role: Role) -> CpuEncoder:
    """Groups of 32 in the rotated basis."""
    return CpuEncoder("q4_0", order=codec.order_for(head_dim))
