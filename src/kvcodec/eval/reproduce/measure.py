"""What several papers' tables measure: Gaussian tensors, relative MSE, bytes of a token."""

import torch
from torch import Tensor

from kvcodec.codec import Site, roundtrip
from kvcodec.registry import get
from kvcodec.scheme import KVScheme


def relative_mse(x: Tensor, scheme: KVScheme) -> float:
    """Relative MSE of the key codec on ``x``."""
    params = scheme.key.fit(Site(0, "key", x.shape[1], x.shape[3]))
    return float((roundtrip(scheme.key, x, params) - x).square().sum() / x.square().sum())


def gauss(quick: bool, dim: int = 128) -> Tensor:
    """Draw N(0, 1) keys ``[1, 1, N, dim]``, N = 65536 or, quick, 8192."""
    return torch.randn(1, 1, 8192 if quick else 65536, dim, generator=torch.Generator().manual_seed(0))


def token_bytes(spec: str, layers: int, kv_heads: int, dim: int) -> int:
    """Cache bytes of one token of a model, windows aside."""
    scheme = get(spec)
    per_head = sum(c.layout(dim).block_bytes / c.block_tokens for c in (scheme.key, scheme.value))
    return round(layers * kv_heads * per_head)
