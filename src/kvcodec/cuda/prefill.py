"""Attention of many query tokens over packed pages: unpacked chunk by chunk, dense, for flash attention.

A chunk of a prompt has tens to thousands of queries, so arithmetic and not memory decides: the pages are unpacked once
per chunk of history, at the speed of memory, and the tensor cores see 16-bit numbers. Nothing is rotated back: queries
go into the basis of the codes, outputs come out of it, which costs as much as the queries are long.

Numbers are staged as fp16, whatever the model's dtype: a rotation may gather a common mean of all channels in one,
whose last bits bf16 would lose. Beyond 65504 they saturate, which only a rotated key of such a size can reach.

Pitfall: decode attention does not round codes to 16 bits, this does; the two agree to the error of 16-bit attention
over decoded keys and values.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcodec.attention import partial
from kvcodec.codec import FP16_MAX
from kvcodec.cuda.attention import Pair, _at, _side, pair_of
from kvcodec.cuda.build import Kernel, Program, load
from kvcodec.cuda.sides import SideTensors, includes
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.ops.hadamard import hadamard_signs

STAGING_BYTES = 1 << 30
"""Most bytes of unpacked keys and values at a time."""
QUERY_BYTES = 1 << 28
"""Most bytes of float32 queries at a time; where there are more, the history is unpacked again for the next ones."""
FLASH_DIM = 256
"""Largest head_dim of PyTorch's flash attention."""
REFERENCE_ROWS = 256
"""Query rows scored at a time where flash attention cannot be used."""
WARPS = 4

ARGS = struct.Struct("<6Q3q4i")
"""``kv::UnpackArgs``, field by field."""


class Scored(NamedTuple):
    """Normalised attention over some tokens, ``[B, HQ, n, D]``, and its log-sum-exp ``[B, HQ, n]`` (fp32, natural)."""

    out: Tensor
    lse: Tensor


Flash = Callable[[Tensor, Tensor, Tensor, float], Scored]
"""(q ``[1, HQ, n, D]``, k, v ``[1, H, t, D]``, scale) to causal attention of the newest n of t tokens; n <= t."""


def join(a: Scored, b: Scored) -> Scored:
    """Attention over the tokens of both; either may have seen nothing (lse = -inf)."""
    lse = torch.logaddexp(a.lse, b.lse)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    wa, wb = ((x.lse - safe).exp()[..., None] for x in (a, b))
    return Scored(a.out.float() * wa + b.out.float() * wb, lse)


def with_sinks(seen: Scored, sinks: Tensor | None) -> Scored:
    """Join learned logits ``[HQ]``, which add to the softmax's denominator alone."""
    if sinks is None:
        return seen
    logit = sinks.float().view(1, -1, 1).expand(seen.lse.shape)
    return join(seen, Scored(torch.zeros((), device=logit.device), logit))


def tile_tokens(pair: Pair) -> int:
    """Tokens that a warp unpacks: 16, or a block."""
    return 32 if pair.blocked else 16


def shared_bytes(pair: Pair) -> int:
    """Bytes of dynamic shared memory of the kernel; the program asserts that its own number is this one."""
    tables = _round(-(-pair.key.shared // 16) * 16 + -(-pair.value.shared // 16) * 16)
    need = tables + WARPS * (_round(pair.tile_bytes(tile_tokens(pair))) + 32 * (pair.head_dim + 8))
    return max(need, pair.key.reach, pair.value.reach)


def _round(n: int) -> int:
    return -(-n // 128) * 128


def program(pair: Pair) -> Program:
    """Return the source of ``kv_unpack`` for a pair.

    Raises
    ------
    UnsupportedError
        Keys are held with a sketch: their second part is in another basis than the first.
    """
    if pair.key.queries > 1:
        raise UnsupportedError(f"{pair.key.type}: keys with a sketch are not unpacked; use attention='streamed'.")
    source = "\n".join(
        [
            '#include "unpack.cuh"',
            *includes(pair.key, pair.value),
            f"using Unpack = kv::Unpacker<{pair.key.type}, {pair.value.type}, {pair.head_dim}, {pair.page_tokens}, "
            f"{tile_tokens(pair)}, {WARPS}>;",
            f'static_assert(Unpack::SHARED == {shared_bytes(pair)}, "shared memory as the host counts it");',
            f"KV_KERNEL void KV_BOUNDS({WARPS * 32}, 1) kv_unpack(KV_GRID_CONSTANT kv::UnpackArgs a) "
            "{ Unpack::run(a); }",
            "",
        ]
    )
    folders = tuple(dict.fromkeys((Program("").folders[0], pair.key.folder, pair.value.folder)))
    return Program(source, folders=folders)


@lru_cache(maxsize=256)
def _kernel(pair: Pair, device: torch.device) -> Kernel:
    return load(program(pair), ("kv_unpack",), device, f"unpacking {pair.name}")[0]


def unpack(
    pages: Tensor, table: Tensor, first: int, count: int, *, pair: str, key: SideTensors, value: SideTensors,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Unpack tokens ``[first, first + count)`` of every sequence.

    Parameters
    ----------
    pages : Tensor uint8 ``[num_pages, H, page_bytes]``
    table : Tensor int32 ``[B, max_pages]``
    first, count : int
        ``first`` a multiple of 16, with blocks of 32.
    pair : str
        ``attention.text_of`` a pair.
    key, value : SideTensors
    dtype : torch.dtype
        fp16 or bf16.

    Returns
    -------
    (Tensor ``[B, H, count, D]``, Tensor ``[B, H, count, D]``)
        Keys and values in the basis of the codes.

    Raises
    ------
    ShapeError
        ``first`` does not begin a tile, or the table does not reach.
    """
    read = pair_of(pair)
    batch, heads, tile = table.shape[0], pages.shape[1], tile_tokens(read)
    if first % tile or first < 0 or first + count > table.shape[1] * read.page_tokens:
        raise ShapeError(
            f"unpack: tokens [{first}, {first + count}) of a table of {table.shape[1]} pages of {read.page_tokens}; "
            f"first must be a multiple of {tile} and the tokens lie inside."
        )
    k, v = (torch.empty(batch, heads, count, read.head_dim, dtype=dtype, device=pages.device) for _ in range(2))
    if k.numel():
        k_table, _, k_head, *_ = _side(key.tables, key.factor, key.order)
        v_table, _, v_head, *_ = _side(value.tables, value.factor, value.order)
        args = ctypes.create_string_buffer(ARGS.size)
        ARGS.pack_into(
            args, 0, _at(pages), _at(table), k_table, v_table, _at(k), _at(v), k_head, v_head, table.stride(0), heads,
            first, count, int(dtype == torch.bfloat16),
        )  # fmt: skip
        grid = (-(-count // (tile * WARPS)), heads, batch)
        _kernel(read, pages.device).launch(grid, WARPS * 32, shared_bytes(read), args)
    return k, v


def into_codes(q: Tensor, key: SideTensors) -> Tensor:
    """Queries ``[B, HQ, n, D]`` in the basis of the keys' codes, fp16."""
    x = q.float() * _per_query(key.factor, q) if key.factor is not None else q
    return _rotated(x.half().clamp(-FP16_MAX, FP16_MAX), key.order).clamp_(-FP16_MAX, FP16_MAX)


def out_of_codes(x: Tensor, value: SideTensors) -> Tensor:
    """Outputs ``[B, HQ, n, D]`` back from the basis of the values' codes, in their dtype; float32 with a factor."""
    x = _rotated(x, value.order)
    return x.float() * _per_query(value.factor, x) if value.factor is not None else x


def _per_query(factor: Tensor, x: Tensor) -> Tensor:
    """One factor per channel of every query head."""
    return factor.repeat_interleave(x.shape[1] // factor.shape[1], 1)[:, :, None]


def _rotated(x: Tensor, order: int) -> Tensor:
    """``block_hadamard`` of ``x [B, HQ, n, D]`` by float32 sums, rounded to its dtype once: one pass of tensor cores.

    Signs are exact in every dtype, and the product's own factor takes the norm. Rows are taken as a model's projections
    leave them, the heads of a token side by side.
    """
    if order == 1:
        return x
    rows = x.transpose(1, 2)
    signs = _signs(order, x.shape[3], x.dtype, str(x.device))
    out = torch.addmm(x.new_zeros(1), rows.reshape(-1, x.shape[3]), signs, beta=0, alpha=order**-0.5)
    return out.view(rows.shape).transpose(1, 2)


@lru_cache(maxsize=16)
def _signs(order: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Hadamard matrices of +1 and -1 along the diagonal, ``[D, D]``."""
    signs = hadamard_signs(order, device)
    return torch.block_diag(*[signs] * (width // order)).to(dtype)


def score(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> Scored:
    """Attention of ``q [B, HQ, n, D]`` over dense ``k, v [B, H, t, D]``; ``causal``: t = n, token i sees 0..i.

    Flash attention on a GPU: the operator behind ``scaled_dot_product_attention(enable_gqa=True)``, which alone gives
    the log-sum-exp; like it, it takes HQ a multiple of H. Otherwise, and for float32, the reference, rows by rows.
    """
    if k.shape[2] == 0:
        return Scored(torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float))
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] <= FLASH_DIM:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(q, k.to(q.dtype), v.to(q.dtype), 0.0, causal, False, scale=scale)
        return Scored(out, lse[..., : q.shape[2]])
    outs, sums = [], []
    for first in range(0, q.shape[2], REFERENCE_ROWS):
        rows = q[:, :, first : first + REFERENCE_ROWS]
        seen = first + rows.shape[2] if causal else k.shape[2]
        bias = torch.full((rows.shape[2], seen), -torch.inf, device=q.device).triu(first + 1) if causal else None
        part = partial(rows, k[:, :, :seen], v[:, :, :seen], scale, bias)
        outs.append(part.acc / part.l[..., None])
        sums.append(part.m + part.l.log())
    return Scored(torch.cat(outs, 2), torch.cat(sums, 2))


class Seen:
    """What some consecutive queries have seen so far. The place of a token counts from the place of the first query.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
    scale : float
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self.q, self.scale = q, scale
        self.total: Scored | None = None

    def add(self, k: Tensor, v: Tensor, at: int) -> None:
        """Add tokens ``k, v [B, H, t, D]`` in the places ``at, at + 1, ...``; query i sees the places up to i."""
        n, end = self.q.shape[2], at + k.shape[2]
        old = min(max(-at, 0), k.shape[2])
        if old:
            self._join(0, score(self.q, k[:, :, :old], v[:, :, :old], self.scale))
        first, last = at + old, min(end, n)
        if first < last:
            k, v = (x[:, :, old : last - at] for x in (k, v))
            self._join(first, score(self.q[:, :, first:last], k, v, self.scale, causal=True))
            if last < n:
                self._join(last, score(self.q[:, :, last:], k, v, self.scale))

    def _join(self, first: int, part: Scored) -> None:
        """Add what the queries from ``first`` on have seen."""
        n, rows = self.q.shape[2], slice(first, first + part.lse.shape[2])
        whole = part.lse.shape[2] == n
        if self.total is None and whole:
            self.total = Scored(part.out.float(), part.lse)
            return
        if self.total is None:
            self.total = score(self.q, self.q[:, :1, :0], self.q[:, :1, :0], self.scale)
        old = self.total
        new = join(Scored(old.out[:, :, rows], old.lse[:, :, rows]), part)
        if whole:
            self.total = new
        else:
            old.out[:, :, rows], old.lse[:, :, rows] = new

    def result(self) -> Scored:
        """Return the attention over all tokens that were added; float32."""
        if self.total is None:
            return score(self.q, self.q[:, :1, :0], self.q[:, :1, :0], self.scale)
        return self.total


def attend_pages(
    q: Tensor, pages: Tensor, table: Tensor, first: int, last: int, *, pair: str, key: SideTensors,
    value: SideTensors, scale: float, at: int | None = None,
) -> Scored:  # fmt: skip
    """Attention of every query over the packed tokens ``[first, last)`` of its sequence.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
        Model basis.
    pages, table, pair, key, value
        As ``unpack``.
    first, last : int
        Slots.
    scale : float
    at : int, optional
        Place of token ``first``, counted from that of the first query: query i sees the places up to i. Default: none
        of the tokens is hidden.

    Returns
    -------
    Scored
        Model basis, float32.
    """
    read = pair_of(pair)
    tile = tile_tokens(read)
    seen = Seen(into_codes(q, key), scale)
    at = first - last if at is None else at
    last = min(last, first + q.shape[2] - at)  # what no query sees
    per_token = _token_bytes(q.shape[0], pages.shape[1], read.head_dim)
    chunk = max(tile, STAGING_BYTES // per_token // tile * tile)
    for begin in range(first // tile * tile, last, chunk):
        k, v = unpack(pages, table, begin, min(chunk, last - begin), pair=pair, key=key, value=value)
        skip = max(0, first - begin)
        seen.add(k[:, :, skip:], v[:, :, skip:], at + begin + skip - first)
    found = seen.result()
    return Scored(out_of_codes(found.out, value), found.lse) if first < last else found


def attend_newest(
    q: Tensor, sink: tuple[Tensor, Tensor], window: tuple[Tensor, Tensor], pages: Tensor, table: Tensor, first: int,
    last: int, *, pair: str, key: SideTensors, value: SideTensors, scale: float, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of the newest n tokens of a cache, which lie in it already, over everything that it holds.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
        Model basis; query i belongs to token N - n + i of N.
    sink, window : (Tensor ``[B, H, t, D]``, Tensor ``[B, H, t, D]``)
        Keys and values held dense before and behind the packed ones, model basis.
    pages, table, pair, key, value
        As ``unpack``.
    first, last : int
        Slots of the packed tokens.
    scale : float
    sinks : Tensor ``[HQ]``, optional
        One learned logit per query head that only joins the softmax's denominator.

    Returns
    -------
    Tensor ``[B, HQ, n, D]`` of q's dtype.
    """
    n, before, packed = q.shape[2], sink[0].shape[2], last - first
    oldest = n - before - packed - window[0].shape[2]  # the oldest token's place
    out, step = torch.empty_like(q), rows_at_once(q)
    for row in range(0, n, step):
        part, at = q[:, :, row : row + step], oldest - row
        seen = Seen(part, scale)
        seen.add(*sink, at)
        seen.add(*window, at + before + packed)
        total = seen.result()
        if packed:
            old = attend_pages(
                part, pages, table, first, last, pair=pair, key=key, value=value, scale=scale, at=at + before
            )
            total = join(total, old)
        out[:, :, row : row + step] = with_sinks(total, sinks).out
    return out


def attend_chunk(
    q: Tensor, pages: Tensor, table: Tensor, length: int, *, pair: str, key: SideTensors, value: SideTensors,
    scale: float, window: int = 0, sinks: Tensor | None = None, flash: Flash | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of a sequence's newest n tokens over its first ``length`` slots, where they lie already.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
        Model basis; query i belongs to slot length - n + i.
    pages, table, pair, key, value
        As ``unpack``.
    length : int
    scale : float
    window : int
        Tokens that a query sees, itself included; 0: all before it.
    sinks : Tensor ``[HQ]``, optional
        One learned logit per query head that only joins the softmax's denominator.
    flash : function, optional
        Attends in one call where no ``window`` is given and the history is unpacked at once.

    Returns
    -------
    Tensor ``[B, HQ, n, D]`` of q's dtype.
    """
    n, constants = q.shape[2], {"pair": pair, "key": key, "value": value}
    if flash is not None and not window and staged_bytes(pages, q, length) <= STAGING_BYTES:
        k, v = unpack(pages, table, 0, length, **constants)  # type: ignore[arg-type]
        out, step = torch.empty_like(q), rows_at_once(q)
        for row in range(0, n, step):
            part = into_codes(q[:, :, row : row + step], key)
            end = length - n + row + part.shape[2]
            total = flash(part, k[:, :, :end], v[:, :, :end], scale)
            total = Scored(out_of_codes(total.out, value), total.lse)
            out[:, :, row : row + step] = with_sinks(total, sinks).out
        return out
    out, step = torch.empty_like(q), min(rows_at_once(q), window or n)
    for row in range(0, n, step):
        part = q[:, :, row : row + step]
        at = length - n + row  # slot of the first of these queries
        if window:
            total = _attend_window(part, pages, table, at, window, scale, constants)
        else:
            total = attend_pages(part, pages, table, 0, at + part.shape[2], scale=scale, at=-at, **constants)  # type: ignore[arg-type]
        out[:, :, row : row + step] = with_sinks(total, sinks).out
    return out


def _attend_window(
    q: Tensor, pages: Tensor, table: Tensor, at: int, window: int, scale: float, constants: dict[str, Any]
) -> Scored:
    """At most ``window`` queries, the first of slot ``at``, each over itself and the ``window - 1`` slots before it.

    Of the slots before ``at`` a query sees those from some place on: with queries and keys turned round, the first ones
    up to some place, which is what causal attention computes.
    """
    n, old = q.shape[2], min(at, window - 1)
    tile = tile_tokens(pair_of(constants["pair"]))
    begin = (at - old) // tile * tile
    k, v = unpack(pages, table, begin, at + n - begin, **constants)
    skip = at - old - begin
    turned = into_codes(q, constants["key"])
    before, own = Seen(turned.flip(2), scale), Seen(turned, scale)
    if old:
        before.add(k[:, :, skip : skip + old].flip(2), v[:, :, skip : skip + old].flip(2), n + 1 - window)
    own.add(k[:, :, skip + old :], v[:, :, skip + old :], 0)
    found = before.result()
    total = join(Scored(found.out.flip(2), found.lse.flip(2)), own.result())
    return Scored(out_of_codes(total.out, constants["value"]), total.lse)


def rows_at_once(q: Tensor) -> int:
    """Query rows of ``q [B, HQ, n, D]`` that ``attend_newest`` takes at a time."""
    return max(REFERENCE_ROWS, QUERY_BYTES // max(1, 4 * q.shape[0] * q.shape[1] * q.shape[3]))


def workspace_bytes(q: Tensor, heads: int, packed: int, dense: int) -> int:
    """Bound of what ``attend_newest`` needs beside its arguments, for ``heads`` KV heads and so many tokens."""
    batch, num_q_heads, n, dim = q.shape
    rows = min(n, rows_at_once(q))
    token = _token_bytes(batch, heads, dim)
    staged = min(max(STAGING_BYTES, 32 * token), (packed + 32) * token)
    scores = 4 * 4 * batch * num_q_heads * min(rows, REFERENCE_ROWS) * dense if q.dtype == torch.float32 else 0
    return q.nbytes + staged + 2 * dense * token + scores + 16 * 4 * batch * num_q_heads * rows * dim


def staged_bytes(pages: Tensor, q: Tensor, tokens: int) -> int:
    """Bytes of the first ``tokens`` tokens of every sequence of ``q [B, HQ, n, D]``, unpacked."""
    return tokens * _token_bytes(q.shape[0], pages.shape[1], q.shape[3])


def _token_bytes(batch: int, heads: int, head_dim: int) -> int:
    """Bytes of one token's unpacked key and value in every sequence."""
    return 2 * 2 * batch * heads * head_dim
