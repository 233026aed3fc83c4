"""FP4 (E2M1) codes and power-of-two (UE8M0) scales of the OCP microscaling formats, as UltraQuant uses them.

E2M1: bit 3 is the sign, bits 0-2 name a magnitude; UE8M0: a byte names a power of two::

    code & 7    0    1    2    3    4    5    6    7
    magnitude   0   0.5   1   1.5   2    3    4    6            byte b = 2^(b - 127), 255 is NaN and never written

Every step is one elementwise IEEE operation or an exact one, so CPU and GPU write the same bytes.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_BIAS = 127
UE8M0_LARGEST = 254


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of float ``x``; ties go to the even code, beyond 6 saturates.

    A negative number that rounds to zero keeps its sign, code 8, as hardware casts do.

    >>> encode_e2m1(torch.tensor([0.25, 0.75, 2.5, 5.0, 9.0, -0.5])).tolist()
    [0, 2, 4, 6, 7, 9]
    """
    y = x.abs()
    # the code as a function of the magnitude is the minimum of three lines of slope 2, 1 and 1/2 (it is concave);
    # rounding half to even preserves this, because neighbouring lines meet at an even code
    code = torch.minimum((y * 2).round_(), y.round() + 2)
    code = torch.minimum(code, (y / 2).round_() + 4).clamp_max_(7)
    return code.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of integer ``codes`` in 0..15; float32 of the same shape."""
    return _levels(codes.device)[codes.int()]


@lru_cache(maxsize=32)
def _levels(device: torch.device) -> Tensor:
    """Values of all codes, float32 ``[16]``: made once, because the copy to a GPU waits for it."""
    with torch.inference_mode(False):
        levels = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32)
        return torch.cat([levels, -levels]).to(device)


def nearest_ue8m0(y: Tensor) -> Tensor:
    """Bytes of the powers of two nearest to ``y`` on a log scale, ``clip(round(log2 y), -127, 127) + 127``; 0 for 0.

    Decided on mantissa and exponent, not by a logarithm, whose last bit differs between machines. There is no tie:
    sqrt(1/2) is not a floating point number.

    Parameters
    ----------
    y : Tensor float64, non-negative

    Returns
    -------
    Tensor uint8 of y's shape

    Examples
    --------
    >>> nearest_ue8m0(torch.tensor([0.0, 1.0, 1.41, 1.42, 2.0**-130], dtype=torch.float64)).tolist()
    [0, 127, 127, 128, 0]
    """
    mantissa, exponent = torch.frexp(y)  # y = mantissa 2^exponent, 1/2 <= mantissa < 1
    exponent = exponent - (mantissa < math.sqrt(0.5)).to(exponent.dtype)
    byte = (exponent + UE8M0_BIAS).clamp(0, UE8M0_LARGEST)
    return torch.where(y > 0, byte, 0).to(torch.uint8)


def ue8m0_value(byte: Tensor) -> Tensor:
    """``2^(byte - 127)``, exact: float32 of the same shape, for bytes 0..254."""
    bits = byte.int()
    # the byte is the float32's exponent field; only 2^-127 is subnormal
    return torch.where(bits > 0, bits << 23, 1 << 22).to(torch.int32).view(torch.float32)


def ue8m0_reciprocal(byte: Tensor) -> Tensor:
    """``2^(127 - byte)``, exact: what to multiply by instead of dividing."""
    return ue8m0_value(UE8M0_LARGEST - byte.int())
