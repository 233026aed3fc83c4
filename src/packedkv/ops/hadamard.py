"""Orthonormal Sylvester Hadamard rotations, whole or block-diagonal, plain or behind random signs.

H_1 = 1, H_2h = [[H, H], [H, -H]] / sqrt 2: symmetric and its own inverse. Where D is no power of two, H is
block-diagonal of the largest power of two that divides D (80: 16, 96: 32, 192: 64). With signs s in {-1, +1}^D of each
head, R x = H (s * x) and R^-1 y = s * (H y).

The product is taken in float64 with the +-1 matrix and scaled afterwards. Sums of 16-bit inputs are then exact, so the
result does not depend on the order of additions: one token alone gives the same bits as a whole prefill, which a
float32 GEMM does not guarantee.
"""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import Params, Site
from packedkv.layout import Field
from packedkv.ops.sums import row_norm

Norm = Literal["fp16", "fp32"]
"""Dtype of a stored norm."""


@lru_cache(maxsize=32)
def hadamard_signs(order: int, device: str = "cpu") -> Tensor:
    """Return the +-1 Sylvester matrix of ``order`` (a power of two), float64 ``[order, order]``."""
    if order < 1 or order & (order - 1):
        raise ValueError(f"order={order} is not a power of two.")
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < order:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h.to(device)


def block_hadamard(x: Tensor, block: int) -> Tensor:
    """Apply diag(H, ..., H) of order ``block``, which divides D, to ``x [..., D]``; float32, its own inverse.

    >>> block_hadamard(torch.tensor([1.0, 0.0, 0.0, 2.0]), 2).tolist()
    [0.7071067690849304, 0.7071067690849304, 1.4142135381698608, -1.4142135381698608]
    """
    if block == 1:
        return x.float()
    signs = hadamard_signs(block, str(x.device))
    return (x.double().unflatten(-1, (-1, block)) @ signs).mul_(block**-0.5).float().flatten(-2)


def power_of_two_divisor(n: int) -> int:
    """Largest power of two that divides ``n``.

    >>> [power_of_two_divisor(n) for n in (64, 80, 96, 128, 192)]
    [64, 16, 32, 128, 64]
    """
    return n & -n


def random_signs(site: Site, stream: int = 0) -> Tensor:
    """Sample the signs s of each head: float32 ``[1, H, D]`` of +-1."""
    draws = [torch.randint(0, 2, (site.head_dim,), generator=site.generator(h, stream)) for h in range(site.num_heads)]
    return (torch.stack(draws)[None] * 2 - 1).float().to(site.device)


class Rotated:
    """Base of a codec behind H, listed before ``Codec``."""

    def order_for(self, head_dim: int) -> int:
        """Order of the blocks of H; 1: no rotation."""
        return power_of_two_divisor(head_dim)

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        """Rotate ``x [B, H, N, D]``."""
        return block_hadamard(x, self.order_for(x.shape[-1]))

    from_code = to_code  # H is its own inverse


class UnitRotated:
    """Base of a codec of a vector's direction and length, behind R: the constant ``signs [1, H, D]``, a field ``norm``.

    ``norm`` holds gamma / sqrt(D), the root mean square of a row, in 16 or 32 bit.
    """

    norm: Norm

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        """``H (s * x)``; not divided by gamma, so that it is linear."""
        return block_hadamard(x * params["signs"].unsqueeze(2), power_of_two_divisor(x.shape[-1]))

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        """``s * (H x)``: inverse and transpose of ``to_code``."""
        return block_hadamard(x, power_of_two_divisor(x.shape[-1])) * params["signs"].unsqueeze(2)

    @property
    def norm_field(self) -> Field:
        """The norm of one token."""
        return Field("norm", "float16" if self.norm == "fp16" else "float32", (1,), "norms")

    def rounded(self, gamma: Tensor, head_dim: int) -> Tensor:
        """Convert lengths to the numbers of the field."""
        return (gamma / head_dim**0.5).to(self.norm_field.torch_dtype)

    def unit(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """Divide rows by ``factor`` times their lengths gamma, float64; also return the numbers of the field."""
        gamma = row_norm(wide := x.double()) * factor
        return torch.where(gamma > 0, wide / gamma, 0.0), self.rounded(gamma, x.shape[-1])

    def length(self, norm: Tensor, head_dim: int) -> Tensor:
        """Length of rows from the numbers of the field: float32."""
        return norm.float() * head_dim**0.5
