"""Attention over packed pages and dense tokens by the CPU kernels: the host side of ``attend.h``."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.attention import additive
from packedkv.codec import Role, saturated
from packedkv.kernels.constants import Constants, fill_factor
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.library import ArgsStruct, RoleStruct
from packedkv.kernels.cpu.mean import CpuMean
from packedkv.kernels.cpu.spec import CpuReader, CpuSpec
from packedkv.kernels.structs import KINDS, address, step_of
from packedkv.kernels.tokens import Rules


class Piece(NamedTuple):
    """A run of tokens; its keys and values begin at slot x >= 0, or at dense token ~x."""

    tokens: int
    key: int
    value: int
    position: int = 0  # of the first token; read where keys are held without their mean


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    pieces: Sequence[Sequence[Piece]],
    rules: Rules,
    *,
    spec: CpuSpec,
    key: Constants,
    value: Constants,
    dense: tuple[Tensor | None, Tensor | None] = (None, None),
    seen: tuple[Tensor, Tensor] | None = None,
    mean: CpuMean | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with n query tokens per sequence, ``q [B, HQ, n, D]`` in the model's basis.

    ``pieces`` are the tokens of each sequence, oldest first, as many pieces for each (some may be empty).
    ``rules.seen`` gives the soft cap, and a mask of all these tokens. ``dense``: keys and values ``[B, H, W, D]`` in
    the model's basis; fp16, bf16 or float32. ``seen``, two int32 ``[B, n]``: a query sees the tokens ``[low, high)`` of
    its sequence; default: all. ``mean``: the mean that packed keys are held without.

    Returns the output of q's shape and dtype, zeros where nothing is seen, and the log-sum-exp of the scores, float32
    ``[B, HQ, n]`` (natural, sinks included).
    """
    batch, query_heads, n, dim = q.shape
    heads = pages.shape[1]
    rows = q.float().contiguous()
    out, lse = torch.empty_like(rows), rows.new_empty(batch, query_heads, n)
    if not rows.numel():
        return out.to(q.dtype), lse
    flat = [number for each in pieces for piece in each for number in piece]
    args = ArgsStruct()
    args.q, args.out, args.lse = rows.data_ptr(), out.data_ptr(), lse.data_ptr()
    args.pages, args.table = pages.data_ptr(), table.data_ptr()
    runs = (ctypes.c_int64 * len(flat))(*flat)
    args.pieces, args.pieces_each = ctypes.addressof(runs), len(flat) // 4 // batch
    if seen is not None:
        low, high = (x.contiguous() for x in seen)
        args.low, args.high = low.data_ptr(), high.data_ptr()
    if (mask := rules.seen.mask) is not None:
        mask = additive(mask).expand(batch, query_heads, n, mask.shape[-1])
        mask = mask if mask.stride(3) == 1 else mask.contiguous()
        args.mask = mask.data_ptr()
        args.mask_batch, args.mask_head, args.mask_row, _ = mask.stride()
    sinks = None if rules.sinks is None else rules.sinks.float().contiguous()
    args.sinks = address(sinks)
    args.page_bytes, args.page_tokens = pages.shape[2], spec.page.page_tokens
    args.table_row = table.stride(0)
    args.batch, args.heads, args.group = batch, heads, query_heads // heads
    args.queries, args.dim, args.threads = n, dim, torch.get_num_threads()
    args.scale, args.softcap = rules.scale, rules.seen.softcap
    buffers = [_fill(args.key, spec, "key", key, dense[0]), _fill(args.value, spec, "value", value, dense[1])]
    if mean is not None:
        _fill_mean(args.mean, mean)
    library.library().kv_attend(args)
    del buffers  # alive until here
    return saturated(out, q.dtype), lse


def concatenated(*parts: Tensor | None) -> Tensor | None:
    """Dense tokens ``[B, H, t, D]`` behind each other; None: there are none."""
    tensors = [x for x in parts if x is not None and x.shape[2]]
    return None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors, 2)


def workspace_bytes(q: Tensor) -> int:
    """Upper bound of what ``attend`` needs beside the cache for ``q [B, HQ, n, D]``."""
    threads, dim = torch.get_num_threads(), q.shape[3]
    scratch = threads * 4 * (3 * 64 * dim + 48 * dim + 64 * 48)
    return 4 * q.numel() * 3 + (4 * threads + 1) * 4 * (q.numel() + 2 * q.numel() // dim) + scratch


def unpack(spec: CpuSpec, role: Role, page: Tensor, head: int, constants: Constants, first: int, count: int) -> Tensor:
    """Unpack tokens ``[first, first + count)`` of one head's page, uint8 ``[page_bytes]``: float32 ``[count, D]``.

    In the basis of the codes.
    """
    struct = RoleStruct()
    _fill(struct, spec, role, constants, None)
    out = torch.empty(count, dim := spec.page.key.head_dim)
    library.library().kv_unpack(struct, page.data_ptr(), head, dim, first, count, out.data_ptr())
    return out


def fill_constants(struct: Any, constants: Constants) -> None:
    """Set where the tables, the factor and the matrix of a role lie."""
    if (tables := constants.tables) is not None:
        struct.tables, struct.tables_head = tables.data_ptr(), tables.shape[-1] if tables.shape[-2] > 1 else 0
        struct.tables_batch = step_of(tables) if tables.dim() == 3 else 0
    fill_factor(struct, constants)


def _fill_mean(struct: Any, mean: CpuMean) -> None:
    if mean.turning is not None and mean.table is not None:
        struct.turning, struct.table = mean.turning.data_ptr(), mean.table.data_ptr()
        struct.pairs, struct.fast, struct.turning_batch = mean.turning.shape[3], mean.fast, step_of(mean.turning)
        struct.table_head = mean.table.shape[1] if len(mean.table) > 1 else 0
    if mean.still is not None:
        struct.still, struct.still_batch = mean.still.data_ptr(), step_of(mean.still)


def _fill(struct: Any, spec: CpuSpec, role: Role, constants: Constants, dense: Tensor | None) -> Tensor | None:
    """Set the fields of one role; returns a tensor that must outlive the call."""
    reader: CpuReader = getattr(spec, role)
    struct.reader = library.number_of(library.chosen(), "reader", reader.name)
    fill_constants(struct, constants)
    struct.order = constants.order
    planes = spec.planes(role)
    struct.planes[: len(planes)] = [plane.offset for plane in planes]
    struct.options[: len(reader.options)] = reader.options
    if dense is None:
        return None
    if dense.stride(3) != 1:
        dense = dense.contiguous()
    size = dense.element_size()
    struct.dense, struct.dense_kind = dense.data_ptr(), KINDS[dense.dtype]
    struct.dense_batch, struct.dense_head, struct.dense_token = (size * x for x in dense.stride()[:3])
    return dense
