"""Encoders by definition share these: dense float64 rotations, awkward keys, and where a choice is clear."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

MARGIN = 1e-6
"""Choices that differ by less may fall either way: keys are rotated in float32, the definition is float64."""

by_definition = settings(
    derandomize=True, max_examples=20, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def sylvester(order: int) -> Tensor:
    """+-1 matrix: the sign at (i, j) is the parity of the bits that i and j share."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)], dtype=torch.float64
    )


def hadamard(dim: int, order: int | None = None) -> Tensor:
    """Orthonormal blocks of ``order`` along the diagonal, float64; None: of the largest power of two in ``dim``."""
    order = order or dim & -dim
    return torch.block_diag(*[sylvester(order) / order**0.5] * (dim // order))


def rotated_unit(x: Tensor, signs: Tensor) -> Tensor:
    """u of ``x [..., D]``: divided by its length, signs flipped, Hadamard in blocks of the power of two in D."""
    unit = x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return unit * signs.double() @ hadamard(x.shape[-1])


def nearest(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest of ``levels [n]`` or ``[..., n]``, the lowest on a tie; and whether it is clearly so."""
    return smallest((x[..., None] - levels).abs())


def smallest(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the smallest cost along the last axis, the lowest on a tie; and whether the next is above the margin."""
    best = cost.argmin(-1)
    if cost.shape[-1] == 1:
        return best, torch.ones_like(best, dtype=torch.bool)
    low, second = cost.topk(2, largest=False).values.unbind(-1)
    return best, second - low > MARGIN


@st.composite
def key_batches(draw, dims: tuple[int, ...] = (64, 80, 128), tokens: int = 8) -> Tensor:
    """``[1, 1, tokens, D]`` float32, exact in fp16: normal, one loud channel, mostly zeros, or few whole numbers."""
    dim, seed = draw(st.sampled_from(dims)), draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, tokens, dim, generator=generator)
    kind = draw(st.sampled_from(("normal", "loud", "sparse", "whole")))
    if kind == "loud":
        x[..., draw(st.integers(0, dim - 1))] *= 30
    elif kind == "sparse":
        x *= torch.rand(x.shape, generator=generator) < 0.1
        x[:, :, 0] = 0
    elif kind == "whole":
        x = x.round()
    return (x * 2.0 ** draw(st.integers(-8, 8))).half().float()
