"""A cache of a codec whose constants are calibrated: the split of calls does not show, and it can be saved."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import packedkv
from packedkv.codec import Params, Role
from packedkv.files.caches import load_layers, save_layers


def check_filled_and_saved(
    scheme: packedkv.KVScheme, params: Mapping[Role, Params], k: Tensor, v: Tensor, folder: Path
) -> packedkv.LayerCache:
    """Filled token by token as at once, and loaded as it was saved; returns it with the first token once more."""
    one, many = (packedkv.LayerCache(scheme, params=params) for _ in range(2))
    one.append(k, v)
    for n in range(k.shape[2]):
        many.append(k[:, :, n : n + 1], v[:, :, n : n + 1])
    for a, b in zip(one.decode(), many.decode(), strict=True):
        assert torch.equal(a, b)
    save_layers(folder / "c.safetensors", [one], {})
    (loaded,), _ = load_layers(folder / "c.safetensors")
    assert scheme.allows(loaded.scheme)
    for cache in (one, loaded):
        cache.append(k[:, :, :1], v[:, :, :1])
    for a, b in zip(one.decode(), loaded.decode(), strict=True):
        assert torch.equal(a, b)
    return one
