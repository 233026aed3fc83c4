"""Random tensors and measures of error that the tests of several codecs share."""

from functools import lru_cache

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Site, roundtrip


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


def fitted(codec: Codec, dim: int = 128, heads: int = 1, seed: int = 0) -> Params:
    """Constants of a key codec that needs no sample."""
    return codec.fit(Site(0, "key", heads, dim, seed))


def relative_mse(x: Tensor, y: Tensor) -> float:
    """|y - x|^2 / |x|^2."""
    return float((y - x).square().sum() / x.square().sum())


@lru_cache
def score_errors(codec: Codec, heads: int) -> tuple[float, float]:
    """Mean |q.k - q.k^| and the slope of q.k^ - q.k over q.k; each head draws its own signs."""
    k, q = normal(1, heads, 256, 128, seed=1), normal(1, heads, 64, 128, seed=2)
    true = q @ k.transpose(2, 3)
    error = q @ roundtrip(codec, k, fitted(codec, heads=heads)).transpose(2, 3) - true
    return float(error.abs().mean()), float((error * true).sum() / true.square().sum())
