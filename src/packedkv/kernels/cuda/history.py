"""Attention of many query tokens over packed pages, which are unpacked part by part for flash attention.

A prefill chunk has tens to thousands of queries, so it is compute-bound: the pages are unpacked once per chunk of
history, at memory speed, and the tensor cores read 16-bit numbers. Keys and values are not rotated back: queries are
rotated into the basis of the codes and outputs out of it, at a cost proportional to the queries. Dense tokens are
rotated as well and placed beside the unpacked ones, so that one call attends to all. What a matrix has mixed is brought
back to the model's basis instead, token by token on the tensor cores.

Unpacked numbers are fp16, whatever the model's dtype: a rotation may gather a common mean of all channels in one
channel, where bf16 would lose the low bits. Above 65504 they saturate, which only a rotated key of that size reaches.

Decode attention does not round codes to 16 bits and this does, so the two agree up to the error of 16-bit attention
over decoded keys and values.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.attention import Partial, Seen, merge, with_sinks
from packedkv.codec import saturated
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.constants import Constants
from packedkv.kernels.cuda.arguments import UnpackArgs
from packedkv.kernels.cuda.basis import DIVIDE, Part, change_basis, out_of_codes, queries_to_change
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.cuda.decode import decode_spec_of
from packedkv.kernels.cuda.launch import Machine, machine
from packedkv.kernels.flash import REFERENCE_ROWS, SCORE_BYTES, by_flash, score
from packedkv.kernels.mean import KeyMean, checked
from packedkv.kernels.spec import DecodeSpec, align, definitions, includes
from packedkv.kernels.tokens import ChunkTokens, Rules

STAGING_BYTES = 1 << 30
"""Most bytes of unpacked keys and values at a time."""
QUERY_BYTES = 1 << 28
"""Most bytes of float32 queries at a time; for each further batch of queries the history is unpacked again."""
WARPS = 4


def tile_tokens(spec: DecodeSpec) -> int:
    """Tokens that a warp unpacks: 16, or 32 where a codec has blocks of tokens."""
    return 32 if spec.blocked else 16


def shared_bytes(spec: DecodeSpec, warps: int = WARPS, halvings: int = 0) -> int:
    """Bytes of dynamic shared memory of the kernel; the program asserts that its own number is this one."""
    spec = spec.halved(halvings)
    tables = _round(sum(align(n) for x in (spec.key, spec.value) for n in (x.shared, x.by_head)))
    need = tables + warps * (_round(spec.tile_bytes(tile_tokens(spec))) + 32 * (spec.head_dim + 8))
    return max(need, spec.key.reach, spec.value.reach)


def _round(n: int) -> int:
    return -(-n // 128) * 128


def config_for(spec: DecodeSpec, machine: Machine) -> tuple[int, int]:
    """Warps of a CTA, and how often the room of its look-up tables is halved.

    Always as often as can be: a block fills its tables for a few tokens, and blocks share a multiprocessor.

    Raises
    ------
    UnsupportedError
    """
    tries = [(warps, spec.halvings) for warps in (WARPS, 2, 1)]
    for which in tries:
        if shared_bytes(spec, *which) <= machine.shared_block:
            return which
    raise UnsupportedError(
        f"unpacking {spec.name}: needs {shared_bytes(spec, *tries[-1])} bytes of shared memory in a block; this GPU "
        f"has {machine.shared_block}."
    )


def program(spec: DecodeSpec, warps: int = WARPS, halvings: int = 0) -> Program:
    """Return the source of ``kv_unpack`` for a spec and a ``config_for`` it."""
    source = "\n".join(
        [
            *definitions(halvings),
            '#include "unpack.cuh"',
            *includes(spec.key, spec.value),
            f"using Unpack = kv::Unpacker<{spec.key.type}, {spec.value.type}, {spec.head_dim}, {spec.page_tokens}, "
            f"{tile_tokens(spec)}, {warps}{f', {spec.pairs}' if spec.pairs else ''}>;",
            f"static_assert(Unpack::SHARED == {shared_bytes(spec, warps, halvings)}, "
            '"shared memory as the host counts it (Reader.shared is TABLE?)");',
            f"KV_KERNEL void KV_BOUNDS({warps * 32}, 1) kv_unpack(KV_GRID_CONSTANT kv::UnpackArgs a) "
            "{ Unpack::run(a); }",
            "",
        ]
    )
    folders = tuple(dict.fromkeys((Program("").folders[0], spec.key.folder, spec.value.folder)))
    return Program(source, folders=folders)


class Plan(NamedTuple):
    """What unpacking launches: computed once per spec and device, because every layer of every call needs it."""

    spec: DecodeSpec
    kernel: Kernel
    tile: int
    warps: int
    shared: int


@lru_cache(maxsize=256)
def _kernel(spec: DecodeSpec, device: torch.device) -> Kernel:
    return load(program(spec, *config_for(spec, machine(device))), ("kv_unpack",), device, f"unpacking {spec.name}")[0]


@lru_cache(maxsize=256)
def plan_of(text: str, device: torch.device) -> Plan:
    """Return the plan of a spec, ``decode.text_of``."""
    spec = decode_spec_of(text)
    warps, halvings = config_for(spec, machine(device))
    return Plan(spec, _kernel(spec, device), tile_tokens(spec), warps, shared_bytes(spec, warps, halvings))


class Packed(NamedTuple):
    """Tokens in pages, and what reads them.

    Parameters
    ----------
    pages : Tensor uint8 ``[num_pages, H, page_bytes]``
    table : Tensor int32 ``[B, max_pages]``
    spec : str
        ``decode.text_of`` a spec.
    key, value : Constants
    mean, placed
        As ``decode.decode_attention``.
    """

    pages: Tensor
    table: Tensor
    spec: str
    key: Constants
    value: Constants
    mean: KeyMean | None = None
    placed: Tensor | None = None


def unpack(packed: Packed, first: int, count: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Unpack tokens ``[first, first + count)`` of every sequence.

    Parameters
    ----------
    packed : Packed
    first, count : int
        ``first`` a multiple of ``tile_tokens``.
    dtype : torch.dtype
        fp16 or bf16.

    Returns
    -------
    (Tensor ``[B, H, count, D]``, Tensor ``[B, H, count, D]``)
        Keys and values in the basis of the codes, the heads of a token side by side.

    Raises
    ------
    ShapeError
        ``first`` does not begin a tile, or the tokens exceed the table.
    """
    batch, heads, dim = packed.table.shape[0], packed.pages.shape[1], decode_spec_of(packed.spec).head_dim
    k, v = _room(batch, count, heads, dim, packed.pages.device, dtype)
    _unpack_into(packed, first, count, k, v, 0)
    return k, v


def _unpack_into(packed: Packed, first: int, count: int, k: Tensor, v: Tensor, row: int) -> None:
    """Unpack tokens ``[first, first + count)`` into ``k, v [B, H, t, D]``, strided alike, from ``row`` on."""
    plan = plan_of(packed.spec, packed.pages.device)
    if first % plan.tile or first < 0 or first + count > packed.table.shape[1] * plan.spec.page_tokens:
        raise ShapeError(
            f"unpack: tokens [{first}, {first + count}) of a table of {packed.table.shape[1]} pages of "
            f"{plan.spec.page_tokens}; first must be a multiple of {plan.tile} and the tokens lie inside."
        )
    batch, heads = packed.table.shape[0], packed.pages.shape[1]
    if not count * batch:
        return
    args = filled_args(packed, plan)
    args.page_table, args.table_row = packed.table.data_ptr(), packed.table.stride(0)
    checked("unpack", plan.spec.pairs, packed.mean, packed.placed, batch, heads)
    args.out_batch, args.out_head, args.out_token, _ = k.stride()
    skip = 2 * row * k.stride(2)
    args.keys, args.values = k.data_ptr() + skip, v.data_ptr() + skip
    args.first, args.count, args.kind = first, count, int(k.dtype == torch.bfloat16)
    plan.kernel.launch((-(-count // (plan.tile * plan.warps)), heads, batch), plan.warps * 32, plan.shared, args)


def filled_args(packed: Packed, plan: Plan) -> UnpackArgs:
    """Return the arguments that do not depend on a call; tensors of ``packed`` must outlive them."""
    args = UnpackArgs()
    args.pages, args.page_bytes, args.heads = packed.pages.data_ptr(), packed.pages.shape[2], packed.pages.shape[1]
    if (tables := packed.key.tables) is not None:
        args.k_table, args.k_table_head = tables.data_ptr(), 0 if tables.shape[0] == 1 else tables.stride(0)
    if (tables := packed.value.tables) is not None:
        args.v_table, args.v_table_head = tables.data_ptr(), 0 if tables.shape[0] == 1 else tables.stride(0)
    if packed.key.matrix is not None:
        args.k_matrix = packed.key.matrix[-1].data_ptr()
    if packed.value.matrix is not None:
        args.v_matrix = packed.value.matrix[-1].data_ptr()
    if (mean := packed.mean) is not None:
        args.mean.fill(mean, packed.placed)
        args.block = packed.key.order
        if (factor := packed.key.factor) is not None:
            args.factor, args.factor_batch = factor.data_ptr(), 0 if factor.shape[0] == 1 else factor.stride(0)
    return args


def _room(
    batch: int, rows: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Memory of keys and values ``[B, H, rows, D]``, the heads of a token side by side.

    It is freed after the call, so that the next layer reuses it. Sizes are rounded up to eighths of a power of two, so
    that a growing history reuses it too.
    """
    pitch = _pitch(rows)
    size = batch * pitch * heads * dim
    both = torch.empty(2 * size, dtype=dtype, device=device)
    shape, strides = (batch, heads, rows, dim), (pitch * heads * dim, dim, heads * dim, 1)
    return both.as_strided(shape, strides), both.as_strided(shape, strides, size)


def _pitch(rows: int) -> int:
    """Number of rows to allocate."""
    step = max(32, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


# -- attention ---------------------------------------------------------------------------------------------------------


def staged(
    packed: Packed, tokens: ChunkTokens, low: int, high: int, beside: Sequence[Part] = ()
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, high - low, D]`` of the tokens ``[low, high)`` in the basis of the codes, fp16.

    ``beside`` is changed in the same launch as the dense tokens.
    """
    before, count = tokens.sink_tokens, tokens.last - tokens.first
    spec = decode_spec_of(packed.spec)
    batch, heads, dim = packed.table.shape[0], packed.pages.shape[1], spec.head_dim
    first, last = (tokens.first + min(max(at - before, 0), count) for at in (low, high))
    skip = first % tile_tokens(spec) if first < last else 0  # kernels begin at a tile boundary
    k, v = _room(batch, skip + high - low, heads, dim, packed.pages.device)
    if first < last:  # first, because skipped tokens are written to rows that the sink overwrites
        _unpack_into(packed, first - skip, last - first + skip, k, v, max(before - low, 0))
    if skip:
        k, v = k[:, :, skip:], v[:, :, skip:]
    parts = [*beside]
    for dense, begin in ((tokens.sink, 0), (tokens.window, before + count)):
        if dense is None or not (held := dense[0].shape[2]) or low >= begin + held or high <= begin:
            continue
        part, to = max(low - begin, 0), max(begin - low, 0)
        rows = min(high - begin, held) - part
        parts.append(Part(dense[0], k, packed.key, DIVIDE, part, rows, to))
        parts.append(Part(dense[1], v, packed.value, DIVIDE, part, rows, to))
    change_basis(parts)
    return k, v


def attend_chunk(q: Tensor, packed: Packed, tokens: ChunkTokens, rules: Rules) -> Tensor:
    """Attention of the newest ``q [B, HQ, n, D]``, which ``tokens`` include; as ``Engine.attend_chunk``."""
    n, total, seen = q.shape[2], tokens.total, rules.seen
    outs = []
    for row, end, low in _runs(q, total, packed.pages.shape[1], seen):
        high = total - n + end if seen.causal and seen.mask is None else total
        rows = q if end - row == n else q[:, :, row:end]
        found = _attend_range(rows, packed, tokens, low, high, rules.scale, seen.of_rows(row, end))
        outs.append(out_of_codes(with_sinks(found, rules.sinks), packed.value, q.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def attend_pages(q: Tensor, packed: Packed, first: int, last: int, scale: float, *, causal: bool = False) -> Partial:
    """Attention over the packed tokens ``[first, last)`` of a sequence, of every query or, causally, of the newest n.

    Parameters
    ----------
    q : Tensor ``[B, HQ, n, D]``
        Model basis.
    packed : Packed
    first, last : int
        Slots.
    scale : float
    causal : bool
        Whether the last query sees all tokens, the one before it all but the last, and so on; n <= last - first.

    Returns
    -------
    Partial
        Model basis.
    """
    tokens = ChunkTokens(packed.pages, packed.table, first, last)
    found = _attend_range(q, packed, tokens, 0, last - first, scale, Seen(causal=causal))
    return Partial(out_of_codes(found.out, packed.value), found.lse)


def _runs(q: Tensor, total: int, heads: int, seen: Seen) -> Iterator[tuple[int, int, int]]:
    """Ranges of queries processed together: first, last (exclusive), and the oldest token that they may see."""
    n = q.shape[2]
    # at most half of the tokens that are unpacked at a time: see ``_attend_range``
    step = max(1, min(rows_at_once(q), _tokens_at_once(q, heads, seen) // 2))
    oldest = min(seen.start, default=0)
    edges = seen.edges(n, total)
    for begin, stop in pairwise(edges):
        count = -(-(stop - begin) // step)
        for i in range(count):
            row, end = (begin + (stop - begin) * x // count for x in (i, i + 1))
            yield row, end, min(max(oldest, seen.first(row, n, total)), total - n + row)


def _attend_range(
    q: Tensor, packed: Packed, tokens: ChunkTokens, low: int, high: int, scale: float, seen: Seen
) -> Partial:
    """Attention of ``q [B, HQ, n, D]`` over the tokens ``[low, high)``, unpacked part by part; the result in the
    basis of the values' codes.

    The last query belongs to the last token. With a causal mask no part has fewer tokens than there are queries, so
    only the last part needs the causal mask.
    """
    count = -(-(high - low) // _tokens_at_once(q, packed.pages.shape[1], seen))
    total: Partial | None = None
    q, parts = queries_to_change(q, packed.key)
    for i in range(count):
        begin, end = (low + (high - low) * x // count for x in (i, i + 1))
        k, v = staged(packed, tokens, begin, end, () if i else parts)
        if seen.mask is not None:
            part = Seen(causal=False, softcap=seen.softcap, mask=seen.mask[..., begin:end])
        else:
            # counted from the last key of this part, which counts as the last query's
            window = seen.window - (high - end) if seen.window and high - seen.window > begin else 0
            start = tuple(min(max(s - begin, 0), end - begin) for s in seen.start)
            part = Seen(seen.causal and end == high, window, start=start if any(start) else (), softcap=seen.softcap)
        found = score(q, k, v, scale, part, recurring=tokens.recurring)
        del k, v  # one part at a time
        total = found if total is None else merge(total, found)
    assert total is not None
    return total if count == 1 else Partial(saturated(total.out, q.dtype), total.lse)


# -- sizes -------------------------------------------------------------------------------------------------------------


def rows_at_once(q: Tensor) -> int:
    """Query rows of ``q [B, HQ, n, D]`` that are processed at a time."""
    return max(REFERENCE_ROWS, QUERY_BYTES // max(1, 4 * q.shape[0] * q.shape[1] * q.shape[3]))


def _tokens_at_once(q: Tensor, heads: int, seen: Seen) -> int:
    """Tokens of ``heads`` KV heads that are unpacked at a time; fewer where scores need them in float32 as well."""
    part = STAGING_BYTES // (1 if by_flash(seen, q.shape[3]) else 4)
    return max(32, part // _token_bytes(q.shape[0], heads, q.shape[3]))


def workspace_bytes(q: Tensor, heads: int, packed: int, dense: int, flash: bool = True) -> int:
    """Bound of what ``attend_chunk`` needs beside its arguments, for ``heads`` KV heads and so many tokens.

    ``flash``: whether flash attention can compute it (``flash.by_flash``).
    """
    batch, num_q_heads, n, dim = q.shape
    rows, tokens = min(n, rows_at_once(q)), packed + dense
    token = _token_bytes(batch, heads, dim)
    most = min(max(STAGING_BYTES // (1 if flash else 4), 32 * token), (tokens + 32) * token)
    staged = most * 9 // 8 + (64 + 4 * dense) * token  # ``_pitch``; copies of dense tokens
    if flash:
        # partial results: with few queries flash attention splits the keys
        blocks = batch * num_q_heads * -(-rows // 64)
        splits = min(-(-tokens // 64), max(1, 512 // blocks))
        return q.nbytes + staged + 4 * 64 * blocks * (dim + 1) * splits + 16 * 4 * batch * num_q_heads * rows * dim
    scores = 4 * max(SCORE_BYTES, 4 * batch * num_q_heads * tokens)
    scores = min(scores, 16 * batch * num_q_heads * rows * tokens)
    return q.nbytes + 3 * staged + scores + 16 * 4 * batch * num_q_heads * rows * dim


def staged_bytes(pages: Tensor, q: Tensor, tokens: int) -> int:
    """Bytes of the first ``tokens`` tokens of every sequence of ``q [B, HQ, n, D]``, unpacked."""
    return tokens * _token_bytes(q.shape[0], pages.shape[1], q.shape[3])


def _token_bytes(batch: int, heads: int, head_dim: int) -> int:
    """Bytes of one token's unpacked key and value in every sequence."""
    return 2 * 2 * batch * heads * head_dim
