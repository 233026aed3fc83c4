"""Change queries, dense keys and values, and outputs into the basis of the codes, or back to the model's.

One launch takes several tensors: a dozen small operations in every layer take the host longer than the GPU.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.kernels.constants import NO_CONSTANTS, Constants
from packedkv.kernels.cuda.arguments import MOST_PARTS, BasisArgs
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.structs import KINDS, address, step_of

MULTIPLY, DIVIDE, MULTIPLY_AFTER, COPY = range(4)
"""What the factor of a role's constants does: before the rotation, or after it. COPY: there is neither."""
WARPS = 4
MOST_BLOCKS = 2048


class Joined(NamedTuple):
    """Outputs over other tokens, and sinks, with which outputs ``x`` over some tokens are merged."""

    lse: Tensor  # float32 [H, t]: log-sum-exps of x; either infinity: over no token
    other: Tensor | None = None  # outputs over other tokens, of x's shape, dtype and strides
    other_lse: Tensor | None = None  # float32 [H, t], strided as lse
    sinks: Tensor | None = None  # float32 [H]: learned logits that only join the softmax's denominator


class Part(NamedTuple):
    """Rows to be changed: ``x [B, H, t, D]`` of ``KINDS``, last axis contiguous, to ``out [B, H, T, D]``.

    Or of one sequence ``x [t, H, D]`` to ``out [T, H, D]``. By default all rows of ``x``; otherwise ``tokens`` of them
    from ``first`` on. They go to ``out`` from ``to`` on.

    With ``at [B, ...]`` and ``ends [B + 1]``, both int32, those of sequence b are ``x[at[b, 0]]``, and go to the rows
    of ``out [1, H, T, D]`` from ``ends[b]`` on, as many as lie below ``ends[b + 1]``; none where ``at`` is negative.
    With ``source`` or ``target``, int32 ``[tokens]``, row t is row ``source[t]`` of ``x``, and goes to row
    ``target[t]`` of ``out``, or nowhere where that is negative.
    """

    x: Tensor
    out: Tensor
    side: Constants = NO_CONSTANTS
    way: int = COPY
    first: int = 0
    tokens: int | None = None
    to: int = 0
    at: Tensor | None = None
    ends: Tensor | None = None
    source: Tensor | None = None
    target: Tensor | None = None
    joined: Joined | None = None


def program(head_dim: int) -> Program:
    """Return the source of ``kv_basis`` for a head_dim."""
    return Program(
        '#include "basis.cuh"\n'
        f"KV_KERNEL void KV_BOUNDS({WARPS * 32}, 1) kv_basis(KV_GRID_CONSTANT kv::BasisArgs a) "
        f"{{ kv::change_basis<{head_dim}, {WARPS}>(a); }}\n"
    )


@lru_cache(maxsize=16)
def _kernel(head_dim: int, device: torch.device) -> Kernel:
    return load(program(head_dim), ("kv_basis",), device, f"rows of {head_dim} channels")[0]


def rows_of_warp(head_dim: int) -> int:
    """Rows that a warp has at a time, ``kv::RowLanes::ROWS``."""
    return 32 // max(4, 1 << (head_dim // max(8, head_dim // 32) - 1).bit_length())


def change_basis(parts: Sequence[Part]) -> None:
    """Change up to ``MOST_PARTS`` tensors of the same batch and head_dim in one launch."""
    parts = [part for part in parts if part.x.numel() and part.tokens != 0]
    if not parts:
        return
    assert len(parts) <= MOST_PARTS
    args, most = BasisArgs(), 0
    for rows, part in zip(args.parts, parts, strict=False):
        x, out, side, way, first, chosen, to, at, ends, source, target, joined = part
        if x.dim() == 3:
            batch, (tokens, heads, dim) = 1, x.shape
            rows.token, rows.head, _ = x.stride()
            rows.out_token, rows.out_head, _ = out.stride()
        else:
            batch, heads, tokens, dim = x.shape
            rows.batch, rows.head, rows.token, _ = x.stride()
            rows.out_batch, rows.out_head, rows.out_token, _ = out.stride()
        if at is not None and ends is not None:
            batch, rows.at, rows.at_step, rows.ends = at.shape[0], at.data_ptr(), at.stride(0), ends.data_ptr()
        if chosen is not None:
            tokens = chosen
        # without slices: each takes the host as long as filling this struct
        rows.x = x.data_ptr() + first * rows.token * x.itemsize
        rows.out = out.data_ptr() + to * rows.out_token * out.itemsize
        rows.block, rows.way = side.order, way
        rows.kind, rows.out_kind = KINDS[x.dtype], KINDS[out.dtype]
        rows.heads, rows.tokens, rows.group = heads, tokens, 1
        if (factor := side.factor) is not None:
            rows.factor, rows.group = factor.data_ptr(), heads // factor.shape[1]
            rows.factor_batch = step_of(factor)
        rows.source, rows.target = address(source), address(target)
        if joined is not None:
            rows.lse, rows.lse_head = joined.lse.data_ptr(), joined.lse.stride(0)
            rows.other, rows.other_lse = address(joined.other), address(joined.other_lse)
            rows.sinks = address(joined.sinks)
        # whether all rows begin at multiples of 16 bytes, so that they are loaded and stored as vectors
        sizes = x.itemsize * (rows.batch | rows.head | rows.token)
        sizes |= out.itemsize * (rows.out_batch | rows.out_head | rows.out_token)
        rows.wide = not (sizes | rows.x | rows.out | (rows.other or 0)) % 16
        most = max(most, heads * tokens)
    blocks = min(-(-most // (WARPS * rows_of_warp(dim))), MOST_BLOCKS)
    _kernel(dim, x.device).launch((blocks, batch, len(parts)), WARPS * 32, 0, args)


def queries_to_change(q: Tensor, key: Constants) -> tuple[Tensor, list[Part]]:
    """Queries ``[B, HQ, n, D]`` in the basis of the keys' codes, fp16; ``change_basis`` fills them by the part."""
    if key.order == 1 and key.factor is None and q.dtype == torch.float16:
        return q, []
    part = _copied(q, key, MULTIPLY, torch.float16)
    return part.out, [part]


def out_of_codes(x: Tensor, value: Constants, dtype: torch.dtype | None = None) -> Tensor:
    """Outputs ``[B, HQ, n, D]`` back from the basis of the values' codes.

    In ``dtype``; by default in their own, in float32 if there is a factor.
    """
    if dtype is None:
        dtype = x.dtype if value.factor is None else torch.float32
    if value.order == 1 and value.factor is None:
        return x.to(dtype)
    part = _copied(x, value, MULTIPLY_AFTER, dtype)
    change_basis([part])
    return part.out


def _copied(x: Tensor, side: Constants, way: int, dtype: torch.dtype) -> Part:
    """Rows to be changed to a copy in which the heads of a token lie side by side."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    out = torch.empty(batch, tokens, heads, dim, dtype=dtype, device=x.device).transpose(1, 2)
    return Part(x, out, side, way)
