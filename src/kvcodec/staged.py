"""Attention of several query tokens over a fused cache: pages unpacked on the GPU, chunk by chunk, for flash attention.

The path ``staged`` of ``attention="fused"``: a chunk of a prompt, a second turn, the tokens of assisted decoding. It
serves what ``refusal`` does not name; all else is streamed (``kvcodec.attention.attend``), and a cache's report says
how often either ran.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcodec.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from kvcodec.fused import FusedLayerCache


def refusal(cache: "FusedLayerCache", softcap: float = 0.0) -> str:
    """Return why several query tokens cannot be attended to here, or ``""`` if they can."""
    if torch.compiler.is_compiling():
        return "a compiled step takes one query token"
    if softcap:
        return f"there is no soft cap (got {softcap})"
    return "the cache is empty" if cache.engine is None else cache.engine.many_refusal()


@torch.no_grad()
def attend(cache: "FusedLayerCache", q: Tensor, *, scale: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of the newest tokens ``q [B, HQ, n, D]``, which the cache holds already.

    Parameters
    ----------
    scale, sinks
        As ``kvcodec.attention.attend``.

    Raises
    ------
    UnsupportedError
        If ``refusal`` says so.
    ShapeError
        If the cache holds fewer than n tokens.
    ValueError
        If a token that a decode step appended was not finite.
    """
    if why := refusal(cache):
        raise UnsupportedError(f"attention of {q.shape[2]} query tokens: {why}. Use kvcodec.attention.attend.")
    assert cache.engine is not None
    assert cache.store is not None
    cache.synchronize()
    state = cache.roles["key"]
    held = state.dense("sink").shape[2] + state.encoded + state.dense("window").shape[2]
    if q.shape[2] > held:
        raise ShapeError(f"attend: {q.shape[2]} queries over {held} tokens; queries are tokens held.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return cache.engine.attend_many(q, cache.roles, cache.store, scale=scale, sinks=sinks)


def workspace_bytes(cache: "FusedLayerCache", q: Tensor) -> int:
    """Upper bound of what ``attend`` needs beside the cache."""
    if cache.engine is None or cache.store is None:
        return 0
    packed = cache.roles["key"].encoded
    return cache.engine.many_workspace_bytes(q, cache.store, packed, len(cache) - packed)
