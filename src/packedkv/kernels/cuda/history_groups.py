"""Attention of a chunk of a prompt where each query reads its own group of tokens in 16 bit and those before it packed.

A query at place r of a group of G tokens sees, in three parts that are joined by their log-sum-exps::

    packed, at least G tokens before it     causal attention with the keys moved by G places
    packed, the rest of the group before    places r + 1 .. G - 1 of it: causal with queries and keys in reverse order
    16 bit, its own group                   places 0 .. r: causal

so that flash attention needs only the causal mask. In the last two, groups are the batch.
"""

import torch
from torch import Tensor

from packedkv.attention import Partial, merge, with_sinks
from packedkv.kernels.cuda.basis import into_codes, out_of_codes
from packedkv.kernels.cuda.history import STAGING_BYTES, Packed, attend_pages, rows_at_once, staged_bytes, unpack
from packedkv.kernels.flash import Flash, lone, score
from packedkv.kernels.tokens import GroupTokens, Rules


def attend_groups(q: Tensor, packed: Packed, tokens: GroupTokens, rules: Rules) -> Tensor:
    """Causal attention of the newest ``q [1, HQ, n, D]``; as ``Engine.attend_groups``."""
    (k, v), length, unit, scale = tokens.own, tokens.length, tokens.group, rules.scale
    n, begin, out = q.shape[2], length - k.shape[2], torch.empty_like(q)
    step, row = max(unit, rows_at_once(q) // unit * unit), 0
    while row < n:
        at = length - n + row  # place of the first of these queries
        base = at // unit * unit
        last = min(length, base + step)
        part = q[:, :, row : row + last - at]
        own = slice(base - begin, last - begin)
        total = _dense(part, k[:, :, own], v[:, :, own], unit, scale, at - base)
        blind = max(0, unit - at)  # queries of the first group
        if at + blind < last:
            seeing = part[:, :, blind:]
            before = _distant(seeing, packed, at + blind, unit, scale, tokens.flash)
            before = merge(before, _near(seeing, packed, at + blind, unit, scale))
            own_group = Partial(total.out[:, :, blind:], total.lse[:, :, blind:])
            seen = merge(own_group, before)
            total = Partial(*(torch.cat([a[:, :, :blind], b], 2) for a, b in zip(total, seen, strict=True)))
        out[:, :, row : row + last - at] = with_sinks(total, rules.sinks)
        row += last - at
    return out


def _distant(q: Tensor, packed: Packed, at: int, unit: int, scale: float, flash: Flash | None) -> Partial:
    """Attention of queries in the slots ``at, at + 1, ...`` to the slots at least ``unit`` before them."""
    count = at + q.shape[2] - unit
    if flash is None or staged_bytes(packed.pages, q, count) > STAGING_BYTES:
        return attend_pages(q, packed, 0, count, scale, causal=True)
    rows, k, v = (x[0].transpose(0, 1) for x in (into_codes(q, packed.key), *unpack(packed, 0, count)))
    out = torch.empty_like(rows)
    lse = flash(rows, k, v, lone(len(rows), count, q.device), scale, 0.0, out)
    return Partial(out_of_codes(out.transpose(0, 1)[None], packed.value), lse[None])


def _near(q: Tensor, packed: Packed, at: int, unit: int, scale: float) -> Partial:
    """Attention of the same queries to the slots of the previous group that are fewer than ``unit`` away."""
    base, last = at // unit * unit, at + q.shape[2]
    groups = -(-(last - base) // unit)
    k, v = unpack(packed, base - unit, groups * unit)
    padded = _padded(into_codes(q, packed.key), at - base, groups * unit)
    # places of a group in reverse order: key c is seen by the queries from c + 1 on
    queries, keys, values = (_groups(x, unit).flip(2) for x in (padded, k, v))
    found = score(queries[:, :, 1:], keys[:, :, :-1], values[:, :, :-1], scale)
    out = torch.nn.functional.pad(found.out.flip(2), (0, 0, 0, 1))
    lse = torch.nn.functional.pad(found.lse.flip(2), (0, 1), value=-torch.inf)
    rows = slice(at - base, last - base)
    out, lse = (x.transpose(0, 1).flatten(1, 2)[None, :, rows] for x in (out, lse))
    return Partial(out_of_codes(out, packed.value), lse)


def _groups(x: Tensor, unit: int) -> Tensor:
    """Groups of ``x [1, H, t, D]`` as the batch, ``[t / unit, H, unit, D]``."""
    return x[0].unflatten(1, (-1, unit)).transpose(0, 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, unit: int, scale: float, skip: int) -> Partial:
    """Attention of each query to its own group; ``k, v`` begin with a group, ``q`` with its token ``skip``."""
    tokens = -(-k.shape[2] // unit) * unit
    padded = (_padded(x, at, tokens) for x, at in ((q, skip), (k, 0), (v, 0)))
    # padding lies after everything that a query sees
    queries, keys, values = (_groups(x, unit) for x in padded)
    found = score(queries, keys, values, scale)
    rows = slice(skip, skip + q.shape[2])
    out, lse = (x.transpose(0, 1).flatten(1, 2)[None, :, rows] for x in found)
    return Partial(out, lse)


def _padded(x: Tensor, first: int, tokens: int) -> Tensor:
    """``x [1, H, t, D]`` at place ``first`` of so many tokens, zeros around it."""
    fresh = x.new_zeros(*x.shape[:2], tokens, x.shape[3])
    fresh[:, :, first : first + x.shape[2]] = x
    return fresh
