"""Means of keys before RoPE, for benches without a model: every pair of channels has one, and no model has more."""

from dataclasses import replace

import torch

from packedkv.ops.rope import Rotary
from packedkv.scheme import KVScheme
from packedkv.store.site import MeanRemoval

BASE = 1e6
"""Of RoPE, as in Qwen2.5."""
SIZE = 3.0
"""Standard deviation of a mean's channels, of keys whose own is 1."""


def decided(scheme: KVScheme) -> KVScheme:
    """Decide ``mean=auto`` of a layer: codecs that are made for keys without their mean (``ghost``) hold them so."""
    if scheme.mean != "auto":
        return scheme
    return replace(scheme, mean="pre" if scheme.key.without_mean else "none")


def mean_of(scheme: KVScheme, heads: int, head_dim: int, device: torch.device) -> MeanRemoval | None:
    """Return what a layer of a ``decided`` scheme subtracts from its keys; None: nothing."""
    if scheme.mean not in ("pre", "post"):
        return None
    given = SIZE * torch.randn(1, heads, head_dim, generator=torch.Generator().manual_seed(1))
    frequencies = BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    rotary = Rotary(frequencies.to(device)) if scheme.mean == "pre" else None
    return MeanRemoval("pre" if rotary else "post", rotary, given.to(device), "weights")
