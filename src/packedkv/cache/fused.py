"""FusedLayerCache: the cache of one layer for the fused kernels, growing or static."""

from collections.abc import Mapping

import torch

from packedkv.cache.device import DeviceCache
from packedkv.cache.growing import GrowingCache
from packedkv.cache.static import StaticCache
from packedkv.codec import Params, Role
from packedkv.kernels.choose import refusal
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite


def FusedLayerCache(  # named as the class that it replaced
    scheme: KVScheme | LayerSite,
    *,
    layer: int = 0,
    seed: int = 0,
    params: Mapping[Role, Params] | None = None,
    page_tokens: int | None = None,
    capacity: int = 0,
    first_head: int = 0,
    remember: bool = False,
) -> DeviceCache:
    """Make the cache of one layer whose writes and attention run in the fused kernels.

    Parameters
    ----------
    scheme, layer, seed, params, page_tokens, first_head, remember
        As ``LayerCache``.
    capacity : int
        Tokens to allocate pages for. With a capacity the cache is a ``StaticCache``: it never grows or synchronises in
        a decode step. 0: a ``GrowingCache``.

    Raises
    ------
    UnsupportedError
        At the first append, if the kernels cannot take the scheme, head_dim or device; the text says why.
    """
    kind = StaticCache if capacity else GrowingCache
    return kind(
        scheme, layer=layer, seed=seed, params=params, page_tokens=page_tokens, capacity=capacity,
        first_head=first_head, remember=remember,
    )  # fmt: skip


def fused_refusal(
    scheme: KVScheme, head_dim: int, device: torch.device, capacity: int = 0, page_tokens: int | None = None
) -> str:
    """Return why the fused kernels cannot serve this scheme here without ``params``, or ``""`` if they can.

    ``capacity`` and ``page_tokens`` as in ``FusedLayerCache``.
    """
    return refusal(scheme, head_dim, device, page_tokens, static=capacity > 0)
