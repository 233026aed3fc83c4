"""Kernels of ``ultraquant``: E2M1 with a scale per 32 channels, keys rotated."""

import math
import struct

from kvcodec.codec import Codec, Role
from kvcodec.codecs.ultraquant import UltraQuant
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.spec import Encoder, Reader, flag
from kvcodec.kernels.tables import level_bytes
from kvcodec.ops.hadamard import power_of_two_divisor


def reader(codec: Codec, head_dim: int, role: Role) -> Reader:
    """As ``spec.reader``."""
    assert isinstance(codec, UltraQuant)
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
        lends=f"E2M1, real {real}",
        borrower=name.format("BORROWED"),
    )


def encoder(codec: Codec, head_dim: int, role: Role) -> Encoder:
    """As ``spec.encoder``."""
    assert isinstance(codec, UltraQuant)
    order = power_of_two_divisor(head_dim) if codec.rotate else 1
    bits = int.from_bytes(struct.pack(">d", codec.c), "big")  # of the double
    unit = math.ceil(math.log2(order) / 2)
    name = f"kv::EncodeUltraquant<{head_dim}, 0x{bits:x}ull, {flag(codec.scale == 'real')}, {unit}>"
    return Encoder(name, "encode_ultraquant.cuh", order=order)
