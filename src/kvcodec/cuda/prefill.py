"""Attention of many query tokens over packed pages: unpacked chunk by chunk into dense memory, for flash attention.

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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvcodec.attention import partial
from kvcodec.codec import FP16_MAX
from kvcodec.cuda.attention import Pair, _at, _side, pair_of
from kvcodec.cuda.build import Kernel, Program, load
from kvcodec.cuda.sides import SideTensors, includes
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.ops.hadamard import block_hadamard

STAGING_BYTES = 1 << 30
"""Most bytes of unpacked keys and values at a time."""
WARPS = 4

ARGS = struct.Struct("<6Q3q4i")
"""``kv::UnpackArgs``, field by field."""


class Scored(NamedTuple):
    """Normalised attention over some tokens, ``[B, HQ, n, D]``, and its log-sum-exp ``[B, HQ, n]`` (fp32, natural)."""

    out: Tensor
    lse: Tensor


def join(a: Scored, b: Scored) -> Scored:
    """Attention over the tokens of both; either may have seen nothing (lse = -inf)."""
    lse = torch.logaddexp(a.lse, b.lse)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    wa, wb = ((x.lse - safe).exp()[..., None] for x in (a, b))
    return Scored(a.out.float() * wa + b.out.float() * wb, lse)


def tile_tokens(pair: Pair) -> int:
    """Tokens that a warp unpacks: 16, or a block."""
    return 32 if pair.blocked else 16


def shared_bytes(pair: Pair) -> int:
    """Bytes of dynamic shared memory of the kernel; the program asserts that its own number is this one."""
    tables = _round(-(-pair.key.shared // 16) * 16 + -(-pair.value.shared // 16) * 16)
    return tables + WARPS * (_round(pair.tile_bytes(tile_tokens(pair))) + 32 * (pair.head_dim + 8))


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
        raise UnsupportedError(
            f"unpacking {pair.key.type}: keys with a sketch are not unpacked; use streamed attention."
        )
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
    x = q.float()
    if key.factor is not None:
        x = x * key.factor.repeat_interleave(q.shape[1] // key.factor.shape[1], 1)[:, :, None]
    return block_hadamard(x, key.order).clamp(-FP16_MAX, FP16_MAX).half()


def out_of_codes(x: Tensor, value: SideTensors) -> Tensor:
    """Outputs ``[B, HQ, n, D]`` back from the basis of the values' codes, float32."""
    x = block_hadamard(x.float(), value.order)
    if value.factor is not None:
        x = x * value.factor.repeat_interleave(x.shape[1] // value.factor.shape[1], 1)[:, :, None]
    return x


def score(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> Scored:
    """Attention of ``q [B, HQ, n, D]`` over dense ``k, v [B, H, t, D]``; ``causal``: t = n, token i sees 0..i."""
    if k.shape[2] == 0:
        return Scored(torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float))
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(q, k.to(q.dtype), v.to(q.dtype), 0.0, causal, False, scale=scale)
        return Scored(out, lse[..., : q.shape[2]])
    bias = torch.full((q.shape[2], k.shape[2]), -torch.inf, device=q.device).triu(1) if causal else None
    part = partial(q, k, v, scale, bias)
    return Scored(part.acc / part.l[..., None], part.m + part.l.log())


def attend_pages(
    q: Tensor, pages: Tensor, table: Tensor, first: int, last: int, *, pair: str, key: SideTensors,
    value: SideTensors, scale: float,
) -> Scored:  # fmt: skip
    """Attention of every query over the packed tokens ``[first, last)`` of its sequence, none of them hidden.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
        Model basis.
    pages, table, pair, key, value
        As ``unpack``.
    first, last : int
        Slots.
    scale : float

    Returns
    -------
    Scored
        Model basis, float32.
    """
    read = pair_of(pair)
    heads, dim, tile = pages.shape[1], read.head_dim, tile_tokens(read)
    coded = into_codes(q, key)
    per_token = 2 * 2 * q.shape[0] * heads * dim
    chunk = max(tile, STAGING_BYTES // per_token // tile * tile)
    begin = first // tile * tile
    total: Scored | None = None
    while begin < last:
        count = min(chunk, last - begin)
        k, v = unpack(pages, table, begin, count, pair=pair, key=key, value=value)
        skip = max(0, first - begin)
        part = score(coded, k[:, :, skip:], v[:, :, skip:], scale)
        total = part if total is None else join(total, part)
        begin += count
    if total is None:
        return score(q, q[:, :heads, :0], q[:, :heads, :0], scale)
    return Scored(out_of_codes(total.out, value), total.lse)
