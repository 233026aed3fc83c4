"""Orthonormal Sylvester Hadamard, whole or block-diagonal.

H_1 = 1, H_2h = [[H, H], [H, -H]] / sqrt 2: symmetric and its own inverse.

The product is taken in float64 with the +-1 matrix and scaled afterwards. Sums of 16-bit inputs are then exact, so the
result does not depend on how a matrix product orders them: one token alone gives the same bits as a whole prefill,
which a float32 GEMM does not guarantee (GEMV and GEMM add in different orders).
"""

from functools import lru_cache

import torch
from torch import Tensor


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
    """Apply diag(H, ..., H) of order ``block`` to the last axis; its own inverse.

    Parameters
    ----------
    x : Tensor ``[..., D]``
        ``D`` a multiple of ``block``; ``block = 1`` changes nothing.

    Returns
    -------
    Tensor float32 ``[..., D]``

    Examples
    --------
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
