"""Randomised Hadamard rotation: signs per head, then a Hadamard, whole or block-diagonal.

``R x = H (s * x)`` with ``s`` in {-1, +1}^D and H orthonormal: orthogonal, so ``R^-1 y = s * (H y)``. Where D is no
power of two, H is block-diagonal of the largest power of two that divides it (80: 16, 96: 32, 192: 64).
"""

import torch
from torch import Tensor

from packedkv.codec import Site
from packedkv.ops.hadamard import block_hadamard, power_of_two_divisor


def random_signs(site: Site, stream: int = 0) -> Tensor:
    """Signs of a randomised Hadamard: float32 ``[1, H, D]`` of +-1, one draw per head."""
    draws = [torch.randint(0, 2, (site.head_dim,), generator=site.generator(h, stream)) for h in range(site.num_heads)]
    return (torch.stack(draws)[None] * 2 - 1).float().to(site.device)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """``H (s * x)`` over the last axis of ``x [B, H, N, D]``; ``signs [1, H, D]``."""
    return block_hadamard(x * signs.unsqueeze(2), power_of_two_divisor(x.shape[-1]))


def rotate_back(x: Tensor, signs: Tensor) -> Tensor:
    """``s * (H x)``: inverse and transpose of ``rotate``."""
    return block_hadamard(x, power_of_two_divisor(x.shape[-1])) * signs.unsqueeze(2)
