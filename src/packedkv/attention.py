"""Reference attention, in float32, over dequantized chunks of keys and values, merged by log-sum-exp."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Site, saturated
from packedkv.errors import ShapeError


class Partial(NamedTuple):
    """Attention over a subset of the tokens, normalised over that subset."""

    out: Tensor  # [B, HQ, n, D]; zeros for a query that sees no token of the subset
    lse: Tensor  # float32 [B, HQ, n]: log-sum-exp of the scores (natural); -inf for such a query


class Seen(NamedTuple):
    """Which of the N cached tokens the newest n queries see; query i is token N - n + i.

    ``mask``, boolean (True = seen) or additive and broadcastable to ``[B, HQ, n, N]``, replaces everything but
    ``softcap``: scores become ``softcap * tanh(score / softcap)``, unless it is 0.
    """

    causal: bool = True  # whether tokens after the query are hidden
    window: int = 0  # tokens that a query sees, itself included; 0: all before it. Only with ``causal``
    chunk: int = 0  # chunked attention: a query sees its own chunk of so many tokens only; 0: no chunks
    place: int = 0  # with chunks, the absolute position of the oldest cached token
    start: tuple[int, ...] = ()  # left padding: how many of the oldest tokens of each sequence are hidden; empty: none
    softcap: float = 0.0
    mask: Tensor | None = None

    @property
    def flash(self) -> bool:
        """Whether flash attention can compute it: no soft cap and no explicit mask."""
        return not self.softcap and self.mask is None

    @property
    def plain(self) -> bool:
        """Whether every query sees all tokens up to its own."""
        return self.flash and self.causal and not (self.window or self.chunk or any(self.start))

    def edges(self, n: int, total: int) -> list[int]:
        """Query indices at which a chunk begins, with 0 before and n after them."""
        if not self.chunk or self.mask is not None:
            return [0, n]
        begun = self.place + total - n
        return [0, *range(self.chunk - begun % self.chunk, n, self.chunk), n]

    def first(self, row: int, n: int, total: int) -> int:
        """Oldest token that query ``row`` may see, padding aside."""
        position = total - n + row
        if self.mask is not None or not self.causal:
            return 0
        if self.chunk:
            return max(0, (self.place + position) // self.chunk * self.chunk - self.place)
        return max(0, position - self.window + 1) if self.window else 0

    def of_rows(self, row: int, end: int) -> "Seen":
        """The same rules for the queries ``[row, end)`` only."""
        mask = self.mask
        return self if mask is None or mask.shape[-2] == 1 else self._replace(mask=mask[..., row:end, :])


BEFORE_IT = Seen()
"""All tokens up to the query's own."""


def merge(a: Partial, b: Partial) -> Partial:
    """Join two partials over disjoint tokens, in float32; exact up to rounding, in either order."""
    lse = torch.logaddexp(a.lse, b.lse)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)  # no token seen on either side
    wa, wb = ((x.lse - safe).exp()[..., None] for x in (a, b))
    return Partial(a.out.float() * wa + b.out.float() * wb, lse)


def with_sinks(part: Partial, sinks: Tensor | None) -> Tensor:
    """Output of a partial over all tokens, with learned logits ``[HQ]`` added to the softmax's denominator."""
    if sinks is None:
        return part.out
    weight = torch.sigmoid(part.lse - sinks.float().view(1, -1, 1))
    return part.out * weight[..., None].to(part.out.dtype)


def partial(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, softcap: float = 0.0) -> Partial:
    """Attention of ``q [B, HQ, n, D]`` over ``k, v [B, H, t, D]`` in float32; ``bias`` broadcasts to scores.

    ``softcap`` above 0 makes a score ``softcap * tanh(score / softcap)`` before the bias is added.
    """
    b, hq, n, d = q.shape
    h, t = k.shape[1], k.shape[2]
    grouped = q.float().reshape(b, h, hq // h * n, d)
    s = (grouped @ k.float().transpose(2, 3) * scale).reshape(b, hq, n, t)
    if softcap:
        s = softcap * (s / softcap).tanh()
    if bias is not None:
        s = s + bias
    m = s.amax(-1)
    p = (s - m.masked_fill(m == -torch.inf, 0.0)[..., None]).exp()
    total = p.sum(-1)
    acc = (p.reshape(b, h, hq // h * n, t) @ v.float()).reshape(b, hq, n, v.shape[-1])
    return Partial(acc / total.clamp_min(1e-38)[..., None], m + total.log())


def check_queries(q: Tensor, batch: int, site: Site) -> None:
    """Raise ShapeError unless queries ``[B, HQ, n, D]`` fit a cache of so many sequences and the heads of ``site``."""
    heads = site.num_heads
    if q.shape[0] != batch or not heads or q.shape[1] % heads or q.shape[3] != site.head_dim:
        raise ShapeError(
            f"attend: q {tuple(q.shape)} does not fit a cache of batch={batch}, kv_heads={heads}, "
            f"head_dim={site.head_dim}; query heads must be a multiple of the KV heads, which are one or more."
        )


def attend_parts(
    q: Tensor,
    parts: Iterable[tuple[Tensor, Tensor]],
    total: int,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of the newest queries over dequantized keys and values ``[B, H, t, D]``, in one or more ``parts``.

    ``q [B, HQ, n, D]`` is in the model basis, after ``rounded_queries``. The parts are oldest first, of ``total``
    tokens. The result and the other arguments are as in ``packedkv.cache.layer.attend``.
    """
    first, out = 0, None
    for k, v in parts:
        last = first + k.shape[2]
        part = partial(q, k, v, scale, _bias(q, mask, causal, first, last, total), softcap)
        out, first = part if out is None else merge(out, part), last
    assert out is not None
    return saturated(with_sinks(out, sinks), q.dtype)


def rounded_queries(q: Tensor, codec: Codec, params: Params, kv_heads: int) -> Tensor:
    """Round queries ``[B, HQ, n, D]`` in the code basis if the codec rounds queries; else return them."""
    if not codec.query_error:
        return q
    b, hq, n, d = q.shape
    folded = q.float().reshape(b, kv_heads, hq // kv_heads * n, d)
    return codec.from_code(codec.query_to_code(folded, params), params).reshape(q.shape)


def additive(mask: Tensor) -> Tensor:
    """Return what a mask, boolean (True = seen) or additive, adds to scores: float32 of its shape."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)


def _bias(q: Tensor, mask: Tensor | None, causal: bool, first: int, last: int, total: int) -> Tensor | None:
    if mask is not None:
        return additive(mask[..., first:last])
    n = q.shape[2]
    if not causal or n == 1 or last <= total - n + 1:
        return None
    rows = torch.arange(total - n, total, device=q.device)[:, None]
    return additive(torch.arange(first, last, device=q.device)[None, :] <= rows)
