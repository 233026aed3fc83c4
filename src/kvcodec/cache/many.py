"""Attention of several query tokens over a fused cache: pages unpacked on the GPU, part by part, to 16-bit numbers.

The paths ``staged`` (flash attention over these) and ``scored`` (scores in PyTorch: soft caps, masks of any shape) of
``attention="fused"``: a chunk of a prompt, a second turn, the tokens of assisted decoding. They serve what ``refusal``
does not name; all else is streamed (``kvcodec.attention.attend``), and a cache's report says how often each ran.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcodec.attention import BEFORE_IT, Seen
from kvcodec.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from kvcodec.cache.device import FusedLayerCache


def refusal(cache: "FusedLayerCache") -> str:
    """Return why several query tokens cannot be attended to here, or ``""`` if they can."""
    return "the cache is empty" if cache.engine is None else ""


@torch.no_grad()
def attend(
    cache: "FusedLayerCache",
    q: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    seen: Seen = BEFORE_IT,
) -> Tensor:
    """Attention of the newest tokens ``q [B, HQ, n, D]``, which the cache holds already.

    The host's state of the cache must be up to date (``synchronize``).

    Parameters
    ----------
    scale, sinks
        As ``kvcodec.attention.attend``.
    seen : Seen
        Which tokens a query sees; default: all up to its own.

    Raises
    ------
    UnsupportedError
        If ``refusal`` says so.
    ShapeError
        If the cache holds fewer than n tokens, or ``seen`` does not fit it.
    """
    if why := refusal(cache):
        raise UnsupportedError(f"attention of {q.shape[2]} query tokens: {why}. Use kvcodec.attention.attend.")
    assert cache.engine is not None
    assert cache.store is not None
    n, held = q.shape[2], tokens(cache)
    if n > held:
        raise ShapeError(f"attend: {n} queries over {held} tokens; queries are tokens held.")
    if len(seen.start) not in (0, q.shape[0]) or (seen.window and not seen.causal):
        raise ShapeError(
            f"attend: start of {len(seen.start)} sequences, window={seen.window}, causal={seen.causal}; one start for "
            f"each of {q.shape[0]} sequences or none is taken, and a window of causal attention."
        )
    if seen.mask is not None and (seen.mask.shape[-1] != held or seen.mask.shape[-2] not in (1, n)):
        raise ShapeError(f"attend: mask {tuple(seen.mask.shape)} does not fit {n} queries over {held} tokens.")
    if not cache.engine.ready:
        cache.engine.prepare(cache.roles)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return cache.engine.attend_many(q, cache.roles, cache.store, scale=scale, sinks=sinks, seen=seen)


def tokens(cache: "FusedLayerCache") -> int:
    """Tokens held per sequence, as the host knows them."""
    state = cache.roles["key"]
    return state.dense("sink").shape[2] + state.encoded + state.dense("window").shape[2]


def workspace_bytes(cache: "FusedLayerCache", q: Tensor, flash: bool = True) -> int:
    """Upper bound of what ``attend`` needs beside the cache; ``flash``: as ``Seen.flash``."""
    if cache.engine is None or cache.store is None:
        return 0
    packed = cache.roles["key"].encoded
    return cache.engine.many_workspace_bytes(q, cache.store, packed, tokens(cache) - packed, flash)
