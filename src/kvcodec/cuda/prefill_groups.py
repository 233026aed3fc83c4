"""Attention of a chunk of a prompt where each query reads its own group of tokens in 16 bit and those before it packed.

Three parts, joined by their log-sum-exps, each of them flash attention with no mask but the causal one::

    packed, before the chunk    every query sees all of it
    packed, in the chunk        a query in group j sees groups 0 .. j - 1 (``staircase``)
    16 bit                      a query sees its own group up to itself: groups are the batch

The staircase is cut as binary numbers are: of any two groups, at one level of spans of 2, 4, 8 ... groups the earlier
one lies in the first half of a span and the later one in its second half. At each level the second halves attend to the
first halves, all of it, and all spans are one batch.
"""

import torch
from torch import Tensor

from kvcodec.cuda.prefill import Scored, attend_pages, into_codes, join, out_of_codes, rows_at_once, score, unpack
from kvcodec.cuda.sides import SideTensors


def staircase(q: Tensor, k: Tensor, v: Tensor, unit: int, scale: float) -> Scored:
    """Attention of ``q [1, HQ, t, D]`` where a query sees the groups of ``unit`` tokens before its own.

    Parameters
    ----------
    q : Tensor ``[1, HQ, t, D]``
        t a multiple of ``unit``.
    k, v : Tensor ``[1, H, t - unit, D]``
        Of all groups but the last.
    unit : int
    scale : float

    Returns
    -------
    Scored
        Float32; lse = -inf for the first group, which sees nothing.
    """
    tokens, half = q.shape[2], unit
    out = torch.zeros(*q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    while half < tokens:
        spans = tokens // (2 * half)
        if spans:
            late = _spans(q, half, spans, 1)
            part = score(late, _spans(k, half, spans, 0), _spans(v, half, spans, 0), scale)
            end = spans * 2 * half
            to, sums = (x[:, :, :end].unflatten(2, (spans, 2 * half))[:, :, :, half:] for x in (out, lse))
            _add(to, sums, Scored(*(x.transpose(0, 1)[None] for x in part)))
        last = spans * 2 * half
        if last + half < tokens:  # a span whose second half is short
            early = slice(last, last + half)
            part = score(q[:, :, last + half :], k[:, :, early], v[:, :, early], scale)
            _add(out[:, :, last + half :], lse[:, :, last + half :], part)
        half *= 2
    return Scored(out, lse)


def _spans(x: Tensor, half: int, spans: int, which: int) -> Tensor:
    """First (0) or second (1) halves of the first spans, ``[spans, H, half, D]``."""
    halves = x[0, :, which * half :].unfold(1, half, 2 * half)[:, :spans]  # [H, spans, D, half], a view
    return halves.permute(1, 0, 3, 2)


def _add(out: Tensor, lse: Tensor, part: Scored) -> None:
    new = join(Scored(out, lse), part)
    out.copy_(new.out)
    lse.copy_(new.lse)


def attend_groups(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, table: Tensor, length: int, unit: int, *, pair: str,
    key: SideTensors, value: SideTensors, scale: float, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of a sequence's newest n tokens, each over its own group in 16 bit and packed ones before it.

    Parameters
    ----------
    q : Tensor ``[1, HQ, n, D]``
        Model basis; query i belongs to token length - n + i.
    k, v : Tensor ``[1, H, t, D]``
        16 bit, model basis: the tokens from the beginning of the first query's group on.
    pages, table, pair, key, value
        As ``prefill.unpack``; whole groups of the ``length`` tokens lie there already.
    length : int
    unit : int
        Tokens of a group; blocks of both codecs and tiles of 32 divide it.
    scale : float
    sinks : Tensor ``[HQ]``, optional
        One learned logit per query head that only joins the softmax's denominator.

    Returns
    -------
    Tensor ``[1, HQ, n, D]`` of q's dtype.
    """
    n, constants = q.shape[2], {"pair": pair, "key": key, "value": value}
    begin, out = length - k.shape[2], torch.empty_like(q)
    step, row = max(unit, rows_at_once(q) // unit * unit), 0
    while row < n:
        at = length - n + row  # place of the first of these queries
        base = at // unit * unit
        last = min(length, base + step)
        part = q[:, :, row : row + last - at]
        own = slice(base - begin, last - begin)
        total = _dense(part, k[:, :, own], v[:, :, own], unit, scale, at - base)
        inside = (last - 1) // unit * unit - base
        if inside:
            units = _padded(into_codes(part, key), at - base, inside + unit)
            found = staircase(units, *unpack(pages, table, base, inside, **constants), unit, scale)  # type: ignore[arg-type]
            rows = slice(at - base, last - base)
            total = join(total, Scored(out_of_codes(found.out[:, :, rows], value), found.lse[:, :, rows]))
        if base:
            total = join(total, attend_pages(part, pages, table, 0, base, scale=scale, **constants))  # type: ignore[arg-type]
        if sinks is not None:
            logit = sinks.float().view(1, -1, 1).expand(part.shape[:3])
            total = join(total, Scored(torch.zeros((), device=q.device), logit))
        out[:, :, row : row + last - at] = total.out
        row += last - at
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, unit: int, scale: float, skip: int) -> Scored:
    """Attention of each query to its own group; ``k, v`` begin with a group, ``q`` with its token ``skip``."""
    tokens = -(-k.shape[2] // unit) * unit
    padded = (_padded(x, at, tokens) for x, at in ((q, skip), (k, 0), (v, 0)))
    # what is padded stands behind all that a query sees
    queries, keys, values = (x[0].unflatten(1, (-1, unit)).transpose(0, 1) for x in padded)
    found = score(queries, keys, values, scale, causal=True)
    rows = slice(skip, skip + q.shape[2])
    out, lse = (x.transpose(0, 1).flatten(1, 2)[None, :, rows] for x in found)
    return Scored(out, lse)


def _padded(x: Tensor, first: int, tokens: int) -> Tensor:
    """``x [1, H, t, D]`` at place ``first`` of so many tokens, zeros around it."""
    fresh = x.new_zeros(*x.shape[:2], tokens, x.shape[3])
    fresh[:, :, first : first + x.shape[2]] = x
    return fresh
