"""Attention of many query tokens over dense 16-bit keys and values, and the sums by which its parts are joined.

PyTorch's flash attention is called by its operator, not by ``scaled_dot_product_attention``: that one has no
log-sum-exp, no window and no mask that ends at the last key, takes a copy of the keys for each query head of a group,
and may choose cuDNN, which plans anew for every length.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvcodec.attention import partial

REFERENCE_ROWS = 256
"""Most query rows scored at a time where flash attention cannot be used."""
SCORE_BYTES = 1 << 28
"""Most bytes of their scores, unless a single row takes more."""


class Scored(NamedTuple):
    """Normalised attention over some tokens, ``[B, HQ, n, D]``, and its log-sum-exp ``[B, HQ, n]`` (fp32, natural)."""

    out: Tensor
    lse: Tensor


Flash = Callable[[Tensor, Tensor, Tensor, float], Scored]
"""(q ``[1, HQ, n, D]``, k, v ``[1, H, t, D]``, scale) to causal attention of the newest n of t tokens; n <= t."""


class Rules(NamedTuple):
    """Which of t keys are seen by queries, of which the last one belongs to the last key.

    Parameters
    ----------
    causal : bool
        Whether later keys are hidden.
    before : int or None
        Keys that a query sees before its own; None: all.
    start : tuple of int
        By sequence, the first key that is seen; empty: the oldest.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: they stay.
    mask : Tensor, optional
        Boolean (True = seen) or additive, broadcastable to ``[B, HQ, n, t]``; takes the place of the first three.
    """

    causal: bool = True
    before: int | None = None
    start: tuple[int, ...] = ()
    softcap: float = 0.0
    mask: Tensor | None = None

    @property
    def flash(self) -> bool:
        """Whether flash attention follows them."""
        return not self.softcap and self.mask is None


CAUSAL = Rules()


def join(a: Scored, b: Scored) -> Scored:
    """Attention over the tokens of both; either may have seen nothing (lse = -inf)."""
    lse = torch.logaddexp(a.lse, b.lse)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    wa, wb = ((x.lse - safe).exp()[..., None] for x in (a, b))
    return Scored(a.out.float() * wa + b.out.float() * wb, lse)


def with_sinks(seen: Scored, sinks: Tensor | None) -> Tensor:
    """Attention when learned logits ``[HQ]`` add to the softmax's denominator alone."""
    if sinks is None:
        return seen.out
    weight = torch.sigmoid(seen.lse - sinks.float().view(1, -1, 1))
    return seen.out * weight[..., None].to(seen.out.dtype)


def score(q: Tensor, k: Tensor, v: Tensor, scale: float, rules: Rules = CAUSAL) -> Scored:
    """Attention of ``q [B, HQ, n, D]`` over dense ``k, v [B, H, t, D]``; HQ a multiple of H.

    Flash attention for 16-bit queries on a GPU, of head_dim 256 at most; otherwise, and for what it does not know (soft
    caps, masks), the reference, rows by rows.
    """
    if k.shape[2] == 0:
        return Scored(torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32))
    if not (rules.flash and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)):
        return _by_rows(q, k, v, scale, rules)
    if rules.start:
        return _ragged(q, k.to(q.dtype), v.to(q.dtype), scale, rules)
    # the operator's tensors are [B, tokens, heads, D]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2), k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2), None, None, q.shape[2],
        k.shape[2], 0.0, rules.causal and rules.before is None, False, scale=scale, **_window(rules),
    )  # fmt: skip
    return Scored(out.transpose(1, 2), lse)


def _window(rules: Rules) -> dict[str, int]:
    """What the operator takes for a window; its masks end at the last key."""
    if rules.before is None:
        return {}
    return {"window_size_left": rules.before, "window_size_right": 0 if rules.causal else -1}


def _ragged(q: Tensor, k: Tensor, v: Tensor, scale: float, rules: Rules) -> Scored:
    """Flash attention where sequences begin at different keys: as sequences of different lengths, one behind another.

    What lies between two of them, hidden keys and unused rows, is a sequence without queries.
    """
    batch, hq, n, dim = q.shape
    t, heads = k.shape[2], k.shape[1]
    if k.stride(0) % k.stride(2) or k.stride() != v.stride():
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    pitch = k.stride(0) // k.stride(2) if batch > 1 else t
    rows = (batch - 1) * pitch + t
    k, v = (x.as_strided((rows, heads, dim), (x.stride(2), x.stride(1), 1)) for x in (k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2).reshape(-1, hq, dim), k, v, *_edges(rules.start, n, t, pitch, str(q.device)), n, t, 0.0,
        rules.causal and rules.before is None, False, scale=scale, **_window(rules),
    )  # fmt: skip
    lse = lse.view(hq, batch, n).transpose(0, 1)
    # a query without any key has +inf there
    return Scored(out.view(batch, n, hq, dim).transpose(1, 2), lse.masked_fill(lse == torch.inf, -torch.inf))


@lru_cache(maxsize=64)
def _edges(start: tuple[int, ...], n: int, t: int, pitch: int, device: str) -> tuple[Tensor, Tensor]:
    """First query and first key of each sequence and of what lies before it: int32 ``[2 B + 1]``; layers share them."""
    queries, keys = [0], [0]
    for b, first in enumerate(start):
        queries += [b * n, (b + 1) * n]
        keys += [b * pitch + min(first, t), b * pitch + t]
    # not inference tensors, whatever the mode of the call that comes first
    with torch.inference_mode(mode=False):
        edges = torch.tensor([queries, keys], dtype=torch.int32, device=device)
        return edges[0], edges[1]


def _by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, rules: Rules) -> Scored:
    n, t = q.shape[2], k.shape[2]
    step = max(1, min(REFERENCE_ROWS, SCORE_BYTES // (4 * q.shape[0] * q.shape[1] * t)))
    outs, sums = [], []
    for first in range(0, n, step):
        rows = q[:, :, first : first + step]
        part = partial(rows, k, v, scale, _bias(rules, n, t, first, first + rows.shape[2], q.device), rules.softcap)
        outs.append(part.acc / part.l.clamp_min(1e-38)[..., None])
        sums.append(part.m + part.l.log())
    return Scored(torch.cat(outs, 2), torch.cat(sums, 2)) if len(outs) > 1 else Scored(outs[0], sums[0])


def _bias(rules: Rules, n: int, t: int, first: int, last: int, device: torch.device) -> Tensor | None:
    """What is added to the scores of the queries ``[first, last)`` of n; None: nothing."""
    if rules.mask is not None:
        mask = rules.mask[..., first:last, :] if rules.mask.shape[-2] > 1 else rules.mask
        if mask.dtype != torch.bool:
            return mask.float()
        return torch.zeros(mask.shape, device=device).masked_fill_(~mask, -torch.inf)
    own = torch.arange(t - n + first, t - n + last, device=device)[:, None]
    keys = torch.arange(t, device=device)
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if rules.causal:
        hidden = hidden | (keys > own)
    if rules.before is not None:
        hidden = hidden | (keys < own - rules.before)
    if rules.start:
        hidden = hidden | (keys < torch.tensor(rules.start, device=device)[:, None, None, None])
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
