"""Attention of many query tokens over dense 16-bit keys and values: flash attention, or scores in PyTorch.

PyTorch's operator is called, because ``scaled_dot_product_attention`` returns no log-sum-exp, has no window and no mask
that ends at the last key, and copies the keys for each query head of a group. Where shapes recur, cuDNN's operator
takes three quarters of the time on an H100, after a plan for each length of some 40 ms.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.attention import BEFORE_IT, Partial, Seen, additive, partial

REFERENCE_ROWS = 256
"""Most query rows scored at a time where flash attention cannot be used."""
SCORE_BYTES = 1 << 28
"""Most bytes of their scores, unless a single row takes more."""
WIDEST = 256
"""Largest head_dim of PyTorch's flash attention."""
_forward = torch.ops.aten._flash_attention_forward.default  # which of the overloads need not be found at each call
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default


class Ragged(NamedTuple):
    """Sequences of different lengths that lie end to end: queries, and the keys that they see."""

    queries: Tensor  # int32 [B + 1]: where each begins; the last number is the total
    keys: Tensor  # likewise
    most_queries: int  # of the longest
    most_keys: int
    window: int = 0  # keys that a query sees, its own included; 0: all before it


Flash = Callable[[Tensor, Tensor, Tensor, Ragged, float, float, Tensor], Tensor]
"""(q ``[n, HQ, D]``, k, v ``[t, H, D]``, ragged, scale, softcap, out ``[n, HQ, D]``): causal attention, into ``out``,
of each sequence's newest queries over its keys; returns its log-sum-exps ``[HQ, n]``. A query without a key has the
output 0 and the log-sum-exp of either infinity. ``softcap``: as ``attention.Seen``; 0: none."""


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float, softcap: float, out: Tensor
) -> Tensor:
    """PyTorch's ``Flash``; of wider heads, with a soft cap and on a CPU sequence by sequence, by scores."""
    if q.is_cuda and q.shape[2] <= WIDEST and not softcap:
        result, lse, *_ = _forward(
            q, k, v, ragged.queries, ragged.keys, ragged.most_queries, ragged.most_keys, 0.0, not ragged.window, False,
            scale=scale, **_window(Seen(window=ragged.window)),
        )  # fmt: skip
        out.copy_(result)
        return lse
    sums, rows, keys = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), *(x.tolist() for x in ragged[:2])
    for (a, b), (c, d) in zip(pairwise(rows), pairwise(keys), strict=True):
        one, one_k, one_v = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        out[a:b], sums[:, a:b] = 0.0, -torch.inf
        seeing = max(a, b - (d - c))
        if seeing < b:
            seen = Seen(window=ragged.window, softcap=softcap)
            part = _by_rows(one[:, :, seeing - a :], one_k, one_v, scale, seen)
            out[seeing:b], sums[:, seeing:b] = part.out[0].transpose(0, 1).to(out.dtype), part.lse[0]
    return sums


def by_flash(seen: Seen, head_dim: int) -> bool:
    """Whether flash attention can compute it: no soft cap, no explicit mask, at most ``WIDEST`` channels."""
    return seen.flash and head_dim <= WIDEST


def score(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen = BEFORE_IT, *, recurring: bool = False) -> Partial:
    """Attention of ``q [B, HQ, n, D]`` over dense ``k, v [B, H, t, D]``; HQ a multiple of H.

    ``seen`` has no chunks; its last query belongs to the last key. Flash attention for 16-bit queries on a GPU with
    head_dim up to ``WIDEST``; otherwise, and for soft caps and masks, the reference, some query rows at a time.

    ``recurring``: these shapes come again and again. Queries that see every key are then attended by cuDNN where it
    takes them.
    """
    if k.shape[2] == 0:
        return Partial(torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32))
    if not (by_flash(seen, q.shape[3]) and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)):
        return _by_rows(q, k, v, scale, seen)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if seen.start:
        return _ragged(q, k, v, scale, seen)
    if recurring and not (seen.causal or seen.window):
        # PyTorch plans at the first call of each shape, in each thread
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
        if torch.backends.cuda.can_use_cudnn_attention(params):
            out, lse, *_ = _cudnn(q, k, v, None, True, scale=scale)
            return Partial(out, lse.view(q.shape[:3]))
    # the operator's tensors are [B, tokens, heads, D]
    out, lse, *_ = _forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2], 0.0,
        seen.causal and not seen.window, False, scale=scale, **_window(seen),
    )  # fmt: skip
    return Partial(out.transpose(1, 2), lse)


def _window(seen: Seen) -> dict[str, int]:
    """The operator's arguments for a window; its masks end at the last key."""
    if not seen.window:
        return {}
    return {"window_size_left": seen.window - 1, "window_size_right": 0 if seen.causal else -1}


def _ragged(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen) -> Partial:
    """Flash attention where sequences begin at different keys: as one batch of sequences of different lengths.

    Hidden keys and unused rows between two of them are passed as a sequence without queries.
    """
    batch, hq, n, dim = q.shape
    t, heads = k.shape[2], k.shape[1]
    if k.stride(0) % k.stride(2) or k.stride() != v.stride():
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    pitch = k.stride(0) // k.stride(2) if batch > 1 else t
    rows = (batch - 1) * pitch + t
    k, v = (x.as_strided((rows, heads, dim), (x.stride(2), x.stride(1), 1)) for x in (k, v))
    out, lse, *_ = _forward(
        q.transpose(1, 2).reshape(-1, hq, dim), k, v, *_edges(seen.start, n, t, pitch, str(q.device)), n, t, 0.0,
        seen.causal and not seen.window, False, scale=scale, **_window(seen),
    )  # fmt: skip
    lse = lse.view(hq, batch, n).transpose(0, 1)
    # a query without any key has +inf there
    return Partial(out.view(batch, n, hq, dim).transpose(1, 2), lse.masked_fill(lse == torch.inf, -torch.inf))


@lru_cache(maxsize=64)
def _edges(start: tuple[int, ...], n: int, t: int, pitch: int, device: str) -> tuple[Tensor, Tensor]:
    """First query and first key of each sequence and of what lies before it: int32 ``[2 B + 1]``; shared by layers."""
    queries, keys = [0], [0]
    for b, first in enumerate(start):
        queries += [b * n, (b + 1) * n]
        keys += [b * pitch + min(first, t), b * pitch + t]
    # not inference tensors, whatever the mode of the call that comes first
    with torch.inference_mode(False):
        edges = torch.tensor([queries, keys], dtype=torch.int32, device=device)
        return edges[0], edges[1]


def _by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen) -> Partial:
    n, t = q.shape[2], k.shape[2]
    step = max(1, min(REFERENCE_ROWS, SCORE_BYTES // (4 * q.shape[0] * q.shape[1] * t)))
    outs, sums = [], []
    for first in range(0, n, step):
        rows = q[:, :, first : first + step]
        part = partial(rows, k, v, scale, _bias(seen, n, t, first, first + rows.shape[2], q.device), seen.softcap)
        outs.append(part.out)
        sums.append(part.lse)
    return Partial(torch.cat(outs, 2), torch.cat(sums, 2)) if len(outs) > 1 else Partial(outs[0], sums[0])


def _bias(seen: Seen, n: int, t: int, first: int, last: int, device: torch.device) -> Tensor | None:
    """What is added to the scores of the queries ``[first, last)`` of n; None: nothing."""
    if seen.mask is not None:
        return additive(seen.mask[..., first:last, :] if seen.mask.shape[-2] > 1 else seen.mask)
    queries = torch.arange(t - n + first, t - n + last, device=device)[:, None]
    keys = torch.arange(t, device=device)
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if seen.causal:
        hidden = hidden | (keys > queries)
    if seen.window:
        hidden = hidden | (keys <= queries - seen.window)
    if seen.start:
        hidden = hidden | (keys < torch.tensor(seen.start, device=device)[:, None, None, None])
    return additive(~hidden)
