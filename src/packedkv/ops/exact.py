"""Matrix products with exact sums: the result does not depend on order of additions, block size or thread count.

A float64 sum of products of integers is exact as long as it stays within 2^53. So rows are rounded to a grid, integers
times a power of two per row, and multiplied as integers: one token alone gives the same bits as a whole prefill, on CPU
and GPU. A float GEMM guarantees neither.
"""

import torch
from torch import Tensor

from packedkv.errors import ShapeError

MANTISSA = 53
ROTATION_BITS = 24
"""Bits of a rotation's entries and of a row beneath its largest component; float32 keeps the entries exactly."""
KERNEL_BITS = 15
"""The same, where kernels multiply: an entry is two numbers of 8 bits, whose products a tensor core sums exactly."""


def to_grid(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round each row of ``x [..., D]`` to multiples of ``2^-bits`` of the power of two above its largest component.

    Returns float64 integers ``[..., D]`` of magnitude at most ``2^bits``, and units ``[..., 1]``, powers of two:
    ``x = integers * units`` to half a unit.

    >>> to_grid(torch.tensor([3.0, -0.4, 0.0]), 4)
    (tensor([12., -2.,  0.], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    """
    wide = x.double()
    exponent = torch.frexp(wide.abs().amax(-1, keepdim=True)).exponent.long() - bits
    # from its bits: the rounding of pow and exp2 depends on the device
    unit = ((exponent + 1023) << 52).view(torch.float64)
    return (wide / unit).round_(), unit


def dot_bits(head_dim: int) -> int:
    """Bits of two rows on grids whose ``head_dim`` products sum exactly.

    >>> [dot_bits(d) for d in (64, 80, 128, 256)]
    [23, 23, 23, 22]
    """
    return (MANTISSA - (head_dim - 1).bit_length()) // 2


def cut_rotation(rotation: Tensor, bits: int = ROTATION_BITS) -> Tensor:
    """Round a matrix to multiples of ``2^-bits``, held in float32 without further error.

    With 24 bits an orthogonal one stays so to about ``2^-25`` per entry of ``R R^T``, as good as float32 can hold one:
    its transpose is its inverse and its dual.
    """
    return (rotation.double() * 2.0**bits).round_().mul_(2.0**-bits).float()


def rotate_exactly(x: Tensor, rotation: Tensor, bits: int = ROTATION_BITS) -> Tensor:
    """``x R`` with exact sums: float32 ``[..., D]``.

    ``|sum_i x_i R_ij| <= |x| |R_j|`` for every part of the sum: with 24 bits each and columns of length 1 it stays
    within ``2^48 sqrt(D)``, which is exact up to D = 1024; a larger D raises ShapeError.

    ``x [..., D]`` is rounded to ``2^-bits`` of each row's largest component, 24 at most; float32 itself rounds at
    ``2^-24``. ``rotation [D, D]`` is of ``cut_rotation``, columns of length 1, or the transpose of an orthogonal one.
    """
    dim = x.shape[-1]
    if dim > 4 ** (MANTISSA - 2 * ROTATION_BITS):
        raise ShapeError(f"rotate_exactly: head_dim={dim} is above 1024, where sums are not exact; use a smaller one.")
    whole, unit = to_grid(x, bits)
    product = whole @ (rotation.double() * 2.0**bits).round_()
    # + 0: a sum of zeros may be -0 or +0
    return product.add_(0.0).mul_(unit * 2.0**-bits).float()
