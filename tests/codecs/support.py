"""What tests of several codecs share: random tensors, measures of error, and encoders by definition."""

from functools import lru_cache

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from packedkv.codec import Codec, Params, Sample, Site, roundtrip


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normal_fp16(*shape: int, seed: int = 0) -> Tensor:
    """Normal values that fp16 holds exactly, float32."""
    return normal(*shape, seed=seed).half().float()


def uneven(heads: int, tokens: int, dim: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    """Rows whose RoPE pairs differ in size by a factor of 100, each head in another order; exact in fp16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(1, -1, dim // 2)[torch.randperm(dim // 2, generator=generator)]
    rows = torch.stack([sizes.roll(head) for head in range(heads)])
    x = torch.randn(batch, heads, tokens, dim, generator=generator) * torch.cat([rows, rows], -1)[:, None]
    return x.half().float()


def unit_keys(n: int, dim: int = 128, heads: int = 1, seed: int = 0) -> Tensor:
    """``[1, heads, n, dim]`` with |k|^2 = dim, so that MSE per coordinate is free of the spread of the norms."""
    x = normal(1, heads, n, dim, seed=seed)
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def tokens(n: int, dim: int = 64, heads: int = 1, batch: int = 1, seed: int = 0) -> Tensor:
    """Normal tokens ``[batch, heads, n, dim]``, float32."""
    return normal(batch, heads, n, dim, seed=seed)


def fitted(codec: Codec, dim: int = 128, heads: int = 1, seed: int = 0, sample: Tensor | None = None) -> Params:
    """Constants of a key codec."""
    return codec.fit(Site(0, "key", heads, dim, seed), Sample(sample))


def relative_mse(x: Tensor, y: Tensor) -> float:
    """|y - x|^2 / |x|^2."""
    return float((y - x).square().sum() / x.square().sum())


def error(codec: Codec, x: Tensor, sample: Tensor | None = None) -> float:
    """Relative MSE of what comes back of ``x``."""
    return relative_mse(x, roundtrip(codec, x, fitted(codec, x.shape[-1], x.shape[1], sample=sample)))


@lru_cache
def score_errors(codec: Codec, heads: int) -> tuple[float, float]:
    """Mean |q.k - q.k^| and the slope of q.k^ - q.k over q.k; each head draws its own signs."""
    k, q = normal(1, heads, 256, 128, seed=1), normal(1, heads, 64, 128, seed=2)
    true = q @ k.transpose(2, 3)
    error = q @ roundtrip(codec, k, fitted(codec, heads=heads)).transpose(2, 3) - true
    return float(error.abs().mean()), float((error * true).sum() / true.square().sum())


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
