"""Attention of many query tokens over packed pages, which are unpacked to 16 bit for flash attention.

*A cache's chunk* (``attend_chunk``) has few queries over many keys. Keys and values stay in the basis of the codes;
queries are rotated into it and outputs out of it, and dense tokens are rotated as well. Unpacked numbers are fp16,
whatever the model's dtype: a rotation may gather a common mean of all channels in one channel, where bf16 would lose
the low bits. Above 65504 they saturate, which only a rotated key of that size reaches.

*An engine's prompt chunks* (``ChunkReader``) have several times as many queries as keys, as query heads share keys.
Pages of all requests are unpacked end to end in the model's basis and dtype, and flash attention takes each request as
a sequence of its own, with one launch per stage::

    pages     unpacked                         kv_unpack
    first tokens in 16 bit, over the unpacked  kv_basis    where pages keep them
    attention                                  flash
    sinks                                      kv_basis    where there are any; and float32 from and to 16 bit
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from packedkv.attention import Partial, Seen, merge, with_sinks
from packedkv.codec import ROLES, saturated
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.constants import Constants
from packedkv.kernels.cuda.arguments import UnpackArgs, fill_mean
from packedkv.kernels.cuda.basis import DIVIDE, MULTIPLY, Joined, Part, change_basis, out_of_codes, queries_to_change
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.cuda.launch import Machine, machine
from packedkv.kernels.flash import REFERENCE_ROWS, SCORE_BYTES, Flash, Ragged, by_flash, ragged_attention, score
from packedkv.kernels.mean import KeyMean, checked
from packedkv.kernels.spec import DecodeSpec, align, definitions, includes, spec_of
from packedkv.kernels.structs import address, step_of
from packedkv.kernels.tokens import ChunkTokens, Rules

STAGING_BYTES = 1 << 30
"""Most bytes of unpacked keys and values at a time."""
QUERY_BYTES = 1 << 28
"""Most bytes of float32 queries at a time; for each further batch of queries the history is unpacked again."""
WARPS = 4


def shared_bytes(spec: DecodeSpec, warps: int = WARPS, table_shrink: int = 0) -> int:
    """Bytes of dynamic shared memory of the kernel; the program asserts that its own number is this one."""
    spec = spec.halved(table_shrink)
    tables = align(sum(align(n) for x in (spec.key, spec.value) for n in (x.shared, x.by_head)), 128)
    need = tables + warps * (align(spec.tile_bytes(spec.least_tile), 128) + 32 * (spec.head_dim + 8))
    return max(need, spec.key.min_shared, spec.value.min_shared)


def config_for(spec: DecodeSpec, machine: Machine) -> tuple[int, int]:
    """Warps of a CTA, and how often the room of its look-up tables is halved; raises UnsupportedError if nothing fits.

    Always as often as can be: a block fills its tables for a few tokens, and blocks share a multiprocessor.
    """
    tries = [(warps, spec.table_shrink) for warps in (WARPS, 2, 1)]
    for which in tries:
        if shared_bytes(spec, *which) <= machine.shared_block:
            return which
    raise UnsupportedError(
        f"unpacking {spec.name}: needs {shared_bytes(spec, *tries[-1])} bytes of shared memory in a block; this GPU "
        f"has {machine.shared_block}."
    )


def program(spec: DecodeSpec, warps: int = WARPS, table_shrink: int = 0) -> Program:
    """Return the source of ``kv_unpack`` for a spec and a ``config_for`` it."""
    return Program.of(
        [
            *definitions(table_shrink),
            '#include "unpack.cuh"',
            *includes(spec.key, spec.value),
            f"using Unpack = kv::Unpacker<{spec.key.type}, {spec.value.type}, {spec.head_dim}, {spec.page_tokens}, "
            f"{spec.least_tile}, {warps}{f', {spec.pairs}' if spec.pairs else ''}>;",
            f"static_assert(Unpack::SHARED == {shared_bytes(spec, warps, table_shrink)}, "
            '"shared memory as the host counts it (Reader.shared is TABLE?)");',
            f"KV_KERNEL void KV_BOUNDS({warps * 32}, 1) kv_unpack(KV_GRID_CONSTANT kv::UnpackArgs a) "
            "{ Unpack::run(a); }",
        ],
        (spec.key.folder, spec.value.folder),
    )


class Plan(NamedTuple):
    """Cached launch parameters of the unpack kernel."""

    spec: DecodeSpec
    kernel: Kernel
    tile: int
    warps: int
    shared: int


@lru_cache(maxsize=256)
def plan_of(text: str, device: torch.device) -> Plan:
    """Return the plan of a spec, ``spec.text_of``."""
    spec = spec_of(text, DecodeSpec)
    config = config_for(spec, machine(device))
    kernel = load(program(spec, *config), ("kv_unpack",), device, f"unpacking {spec.name}")[0]
    return Plan(spec, kernel, spec.least_tile, config[0], shared_bytes(spec, *config))


class Packed(NamedTuple):
    """Tokens in pages, and what reads them; ``spec``, ``mean`` and ``origin`` as of ``decode.decode_attention``."""

    pages: Tensor
    table: Tensor
    spec: str
    key: Constants
    value: Constants
    mean: KeyMean | None = None
    origin: Tensor | None = None


def unpack(packed: Packed, first: int, count: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Unpack tokens ``[first, first + count)`` of every sequence to fp16 or bf16, in the basis of the codes.

    Returns keys and values ``[B, H, count, D]``, the heads of a token side by side. Raises ShapeError if ``first`` is
    no multiple of ``DecodeSpec.least_tile``, or the tokens exceed the table.
    """
    batch, heads, dim = packed.table.shape[0], packed.pages.shape[1], spec_of(packed.spec, DecodeSpec).head_dim
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
    checked("unpack", plan.spec.pairs, packed.mean, packed.origin, batch, heads)
    args.out_batch, args.out_head, args.out_token, _ = k.stride()
    skip = 2 * row * k.stride(2)
    args.keys, args.values = k.data_ptr() + skip, v.data_ptr() + skip
    args.first, args.count, args.kind = first, count, int(k.dtype == torch.bfloat16)
    plan.kernel.launch((-(-count // (plan.tile * plan.warps)), heads, batch), plan.warps * 32, plan.shared, args)


def filled_args(packed: Packed, plan: Plan) -> Any:
    """Return the arguments that do not depend on a call; tensors of ``packed`` must outlive them."""
    args = UnpackArgs()
    args.pages, args.page_bytes, args.heads = packed.pages.data_ptr(), packed.pages.shape[2], packed.pages.shape[1]
    for role, side in (("k", packed.key), ("v", packed.value)):
        if side.tables is not None:
            setattr(args, f"{role}_table", side.tables.data_ptr())
            setattr(args, f"{role}_table_head", step_of(side.tables))
        setattr(args, f"{role}_matrix", None if side.matrix is None else side.matrix[-1].data_ptr())
    if (mean := packed.mean) is not None:
        fill_mean(args.mean, mean, packed.origin)
        args.block = packed.key.order
        if (factor := packed.key.factor) is not None:
            args.factor, args.factor_batch = factor.data_ptr(), step_of(factor)
    return args


def _room(
    batch: int, rows: int, heads: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Memory of keys and values ``[B, H, rows, D]``, the heads of a token side by side.

    It is freed after the call, so that the next layer reuses it. Sizes are rounded up to eighths of a power of two, so
    that a growing history reuses it too.
    """
    pitch = align(rows, max(32, 1 << max(0, rows.bit_length() - 4)))
    size = batch * pitch * heads * dim
    both = torch.empty(2 * size, dtype=dtype, device=device)
    shape, strides = (batch, heads, rows, dim), (pitch * heads * dim, dim, heads * dim, 1)
    return both.as_strided(shape, strides), both.as_strided(shape, strides, size)


# -- attention ---------------------------------------------------------------------------------------------------------


def staged(
    packed: Packed, tokens: ChunkTokens, low: int, high: int, beside: Sequence[Part] = ()
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, high - low, D]`` of the tokens ``[low, high)`` in the basis of the codes, fp16.

    ``beside`` is changed in the same launch as the dense tokens.
    """
    before, count = tokens.sink_tokens, tokens.last - tokens.first
    spec = spec_of(packed.spec, DecodeSpec)
    batch, heads, dim = packed.table.shape[0], packed.pages.shape[1], spec.head_dim
    first, last = (tokens.first + min(max(at - before, 0), count) for at in (low, high))
    skip = first % spec.least_tile if first < last else 0  # kernels begin at a tile boundary
    k, v = _room(batch, skip + high - low, heads, dim, packed.pages.device)
    if first < last:  # first, because skipped tokens are written to rows that the sink overwrites
        _unpack_into(packed, first - skip, last - first + skip, k, v, max(before - low, 0))
    if skip:
        k, v = k[:, :, skip:], v[:, :, skip:]
    parts = [*beside]
    for dense, begin in ((tokens.sink, 0), (tokens.window, before + count)):
        if dense is None or not (length := dense[0].shape[2]) or low >= begin + length or high <= begin:
            continue
        part, to = max(low - begin, 0), max(begin - low, 0)
        rows = min(high - begin, length) - part
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
        part = _attend_range(rows, packed, tokens, low, high, rules.scale, seen.of_rows(row, end))
        outs.append(out_of_codes(with_sinks(part, rules.sinks), packed.value, q.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def attend_pages(q: Tensor, packed: Packed, first: int, last: int, scale: float, *, causal: bool = False) -> Partial:
    """Attention of ``q [B, HQ, n, D]`` over the slots ``[first, last)``, in the model's basis.

    ``causal``: the last query sees all of them, the query before it all but the last, and so on; n <= last - first.
    """
    tokens = ChunkTokens(packed.pages, packed.table, first, last)
    part = _attend_range(q, packed, tokens, 0, last - first, scale, Seen(causal=causal))
    return Partial(out_of_codes(part.out, packed.value), part.lse)


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
        result = score(q, k, v, scale, part, recurring=tokens.recurring)
        del k, v  # one part at a time
        total = result if total is None else merge(total, result)
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
    staged = most * 9 // 8 + (64 + 4 * dense) * token  # rounded up by ``_room``; copies of dense tokens
    if flash:
        # partial results: with few queries flash attention splits the keys
        blocks = batch * num_q_heads * -(-rows // 64)
        splits = min(-(-tokens // 64), max(1, 512 // blocks))
        return q.nbytes + staged + 4 * 64 * blocks * (dim + 1) * splits + 16 * 4 * batch * num_q_heads * rows * dim
    scores = 4 * max(SCORE_BYTES, 4 * batch * num_q_heads * tokens)
    scores = min(scores, 16 * batch * num_q_heads * rows * tokens)
    return q.nbytes + 3 * staged + scores + 16 * 4 * batch * num_q_heads * rows * dim


def _token_bytes(batch: int, heads: int, head_dim: int) -> int:
    """Bytes of one token's unpacked key and value in every sequence."""
    return 2 * 2 * batch * heads * head_dim


# -- prompt chunks of several requests ---------------------------------------------------------------------------------

Chunk = tuple[int, int, int, int]
"""Newest tokens of a request: row of a block table, first query, last query (exclusive), tokens of the request."""


class Sight(NamedTuple):
    """Which tokens of its request a chunk reads; ``window`` as in ``Ragged``."""

    window: int = 0
    page_tokens: int = 1

    def origin(self, chunk: Chunk) -> int:
        """First token of the page of the first token that its first query sees."""
        if not self.window:
            return 0
        _, first, last, length = chunk
        return max(0, length - (last - first) - self.window + 1) // self.page_tokens * self.page_tokens


EVERY_TOKEN = Sight()


class Workspace:
    """Scratch memory that the layers of a step share, one after the other."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}
        self.views: dict[tuple[str, torch.Size], Tensor] = {}

    def get(self, what: str, shape: torch.Size, device: torch.device, dtype: torch.dtype = torch.float16) -> Tensor:
        """Return memory of this shape: the same for each ``what``, always of one dtype, until more is needed."""
        if (memory := self.views.get((what, shape))) is None:
            flat, count = self.flat.get(what), shape.numel()
            if flat is None or flat.numel() < count:
                flat = self.flat[what] = torch.empty(count, dtype=dtype, device=device)
                self.views = {key: x for key, x in self.views.items() if key[0] != what}
            memory = self.views[what, shape] = flat[:count].view(shape)
        return memory


class Chunks(NamedTuple):
    """Newest tokens of several requests, and the tokens that each reads."""

    first: int  # queries [first, last) of the step
    last: int
    table: Tensor  # int32 [B, M]: block ids of the tokens that are read
    sink_blocks: Tensor  # int32 [B, ...], first of them the block with the request's first tokens; < 0: not read
    origin: Tensor  # int32 [B]: the position of slot 0 of each
    ragged: Ragged  # queries counted from ``first``; keys are the tokens that are read
    tokens: int  # of all requests
    room: Workspace

    @classmethod
    def of(cls, requests: Sequence[Chunk], table: Tensor, room: Workspace, sight: Sight = EVERY_TOKEN) -> Self:
        """Return the chunks of neighbouring requests, without gaps; one asynchronous transfer to the device.

        ``table``: int32 ``[R, M]``. ``sight``: by default all tokens are read.
        """
        row, first, *_ = requests[0]
        origins = [sight.origin(request) for request in requests]
        last, queries, keys = requests[-1][2], [0], [0]
        for (_, _, end, length), origin in zip(requests, origins, strict=True):
            queries.append(end - first)
            keys.append(keys[-1] + length - origin)
        device, count = table.device, len(requests)
        numbers = torch.tensor([*queries, *keys, *origins], dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = numbers.to(device, non_blocking=True)
        ragged = Ragged(
            numbers[: count + 1],
            numbers[count + 1 : 2 * count + 2],
            max(end - begin for _, begin, end, _ in requests),
            max(b - a for a, b in pairwise(keys)),
            sight.window,
        )
        positions, blocks = numbers[2 * count + 2 :], table[row : row + count]
        sink_blocks = blocks
        if any(origins):
            sink_blocks = torch.where(positions == 0, blocks[:, 0], -1)[:, None]
            blocks = shifted(blocks, positions // sight.page_tokens, -(-ragged.most_keys // sight.page_tokens))
        return cls(first, last, blocks, sink_blocks, positions, ragged, keys[-1], room)


def shifted(table: Tensor, first: Tensor, columns: int) -> Tensor:
    """So many columns of ``table [B, M]`` from ``first [B]`` on; those behind its last one mean nothing."""
    at = first.long()[:, None] + torch.arange(columns, device=table.device)
    return table.gather(1, at.clamp_(max=table.shape[1] - 1))


def gathered(requests: Sequence[Chunk], most: int, sight: Sight = EVERY_TOKEN) -> tuple[list[list[Chunk]], list[Chunk]]:
    """Return lists of neighbouring requests that read at most so many tokens together, and those that read more alone.

    ``requests`` may have gaps.
    """
    together: list[list[Chunk]] = []
    alone, tokens = [], 0
    for request in requests:
        row, begin, _, length = request
        length -= sight.origin(request)
        if length > most:
            alone.append(request)
            continue
        last = together[-1][-1] if together else None
        if last is None or (last[0] + 1, last[2]) != (row, begin) or tokens + length > most:
            together.append([])
            tokens = 0
        together[-1].append(request)
        tokens += length
    return together, alone


class ChunkReader:
    """Attention of prompt chunks over one pool of pages; the table and ``origin`` of ``packed`` are not used.

    ``page_sinks [num_pages, H, 2, t, D]``: 16-bit keys and values of the first tokens of every page. The tokens of a
    request's first page are read in the place of its first t tokens. ``flash``: the engine's own flash attention, or
    PyTorch's.
    """

    def __init__(self, packed: Packed, page_sinks: Tensor | None = None, flash: Flash | None = None) -> None:
        self.packed, self.page_sinks, self.flash = packed, page_sinks, flash or ragged_attention
        self.plan = plan_of(packed.spec, packed.pages.device)
        self.args = filled_args(packed, self.plan)
        for role, side in (("k", packed.key), ("v", packed.value)):  # back to the model's basis
            if side.order != 1 or side.factor is not None:
                setattr(self.args, f"{role}_order", side.order)
                setattr(self.args, f"{role}_factor", address(side.factor))

    def attend(self, q: Tensor, chunks: Chunks, rules: Rules, out: Tensor) -> None:
        """Causal attention of queries ``q [n, HQ, D]``, model basis, over their requests' tokens, written to ``out``.

        ``chunks`` are of this layer's window.
        """
        room, device, dtype, sinks = chunks.room, q.device, dtype_of(q), rules.sinks
        shape = torch.Size((chunks.tokens, self.packed.pages.shape[1], q.shape[2]))
        k, v = (room.get(role, shape, device, dtype) for role in ROLES)
        given = q
        if q.dtype != dtype:
            given = room.get("query", q.shape, device, dtype)
            change_basis([Part(q, given, way=MULTIPLY)])
        self.unpack(chunks.table, chunks.ragged.keys, chunks.ragged.most_keys, k, v, chunks.origin)
        if self.page_sinks is not None:  # first tokens over the unpacked ones
            outs, at, ends = (x.transpose(0, 1)[None] for x in (k, v)), chunks.sink_blocks, chunks.ragged.keys
            change_basis([Part(self.page_sinks[:, :, place], to, at=at, ends=ends) for place, to in enumerate(outs)])
        direct = out.dtype == dtype and sinks is None
        output = out if direct else room.get("output", q.shape, device, dtype)
        lse = self.flash(given, k, v, chunks.ragged, rules.scale, rules.seen.softcap, output)
        if not direct:
            joined = None if sinks is None else Joined(lse, sinks=sinks.float())
            change_basis([Part(output, out, joined=joined)])

    def unpack(self, table: Tensor, keys: Tensor, most: int, k: Tensor, v: Tensor, origin: Tensor | None) -> None:
        """Unpack the first tokens of every request end to end, into ``k, v [t, H, D]``.

        ``keys`` as in ``Ragged``; ``most``: tokens of the longest; ``origin`` as in ``Chunks``.
        """
        args, plan = self.args, self.plan
        args.page_table, args.table_row = table.data_ptr(), table.stride(0)
        args.keys, args.values, args.ends = k.data_ptr(), v.data_ptr(), keys.data_ptr()
        args.out_token, args.out_head, _ = k.stride()
        args.kind = int(k.dtype == torch.bfloat16)
        if origin is not None and self.packed.mean is not None:
            args.mean.placed = origin.data_ptr()
        blocks = -(-most // (plan.tile * plan.warps))
        plan.kernel.launch((blocks, k.shape[1], table.shape[0]), plan.warps * 32, plan.shared, args)


def dtype_of(q: Tensor) -> torch.dtype:
    """What flash attention computes with: the model's dtype, fp16 for float32."""
    return torch.float16 if q.dtype == torch.float32 else q.dtype
