"""Attention of a step's prompt chunks over an engine's pages: one launch per stage for all requests.

A chunk is the newest tokens of a request, which are in the pages already. The pages of all requests are unpacked end to
end, and flash attention takes each request as a sequence of its own. A prompt's queries are several times its keys, as
query heads share them; so keys and values are brought back to the model's basis and dtype as they are unpacked, and
queries and outputs stay as they are (``history``, for few queries over many keys, does the opposite)::

    pages     unpacked                         kv_unpack
    first tokens in 16 bit, over the unpacked  kv_basis    where pages keep them
    attention                                  flash
    sinks                                      kv_basis    where there are any; and float32 from and to 16 bit

With a sliding window a request is read from the page of the first token that its first query sees: pages before it may
hold other requests' tokens. Its slots are counted from there.

Memory is that of the step, shared by its layers, and what launches pass is filled in once for every layer.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from packedkv.codec import ROLES
from packedkv.kernels.constants import NO_CONSTANTS
from packedkv.kernels.cuda.arguments import UnpackArgs
from packedkv.kernels.cuda.basis import COPY, MULTIPLY, Joined, Part, change_basis
from packedkv.kernels.cuda.history import Packed, filled_args, plan_of
from packedkv.kernels.flash import Flash, Ragged, ragged_attention
from packedkv.kernels.tokens import Rules

Chunk = tuple[int, int, int, int]
"""Newest tokens of a request: row of a block table, first query, last query (exclusive), tokens of the request."""


class Sight(NamedTuple):
    """Which tokens of its request a chunk reads.

    Parameters
    ----------
    window : int
        Tokens that a query sees, itself included; 0: all before it.
    page_tokens : int
    """

    window: int = 0
    page_tokens: int = 1

    def origin(self, chunk: Chunk) -> int:
        """First of these tokens: that of the page of the first token that its first query sees."""
        if not self.window:
            return 0
        _, first, last, length = chunk
        return max(0, length - (last - first) - self.window + 1) // self.page_tokens * self.page_tokens


class Chunks(NamedTuple):
    """Newest tokens of several requests, and what each reads of its request's tokens.

    Parameters
    ----------
    first, last : int
        Queries of the step.
    table : Tensor int32 ``[B, M]``
        Block ids of the tokens that are read.
    kept_at : Tensor int32 ``[B, ...]``
        First of them the block with the request's first tokens; below 0: they are not read.
    placed : Tensor int32 ``[B]``
        The position of slot 0 of each.
    ragged : Ragged
        Queries counted from ``first``; keys are the tokens that are read.
    tokens : int
        Of all requests.
    room : Room
    """

    first: int
    last: int
    table: Tensor
    kept_at: Tensor
    placed: Tensor
    ragged: Ragged
    tokens: int
    room: "Room"

    @classmethod
    def of(cls, requests: Sequence[Chunk], table: Tensor, room: "Room", sight: Sight | None = None) -> Self:
        """Return the chunks of neighbouring requests; one asynchronous transfer to the device.

        Parameters
        ----------
        requests : list of Chunk
            Rows and queries without gaps.
        table : Tensor int32 ``[R, M]``
        room : Room
            Of the step.
        sight : Sight, optional
            By default all tokens are read.
        """
        row, first, *_ = requests[0]
        sight = sight or Sight()
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
        placed, own = numbers[2 * count + 2 :], table[row : row + count]
        kept_at = own
        if any(origins):
            kept_at = torch.where(placed == 0, own[:, 0], -1)[:, None]
            own = shifted(own, placed // sight.page_tokens, -(-ragged.most_keys // sight.page_tokens))
        return cls(first, last, own, kept_at, placed, ragged, keys[-1], room)


def shifted(table: Tensor, first: Tensor, columns: int) -> Tensor:
    """So many columns of ``table [B, M]`` from ``first [B]`` on; those behind its last one mean nothing."""
    at = first.long()[:, None] + torch.arange(columns, device=table.device)
    return table.gather(1, at.clamp_(max=table.shape[1] - 1))


def gathered(requests: Sequence[Chunk], most: int, sight: Sight | None = None) -> tuple[list[list[Chunk]], list[Chunk]]:
    """Return lists of neighbouring requests that read at most so many tokens together, and those that read more alone.

    ``requests`` and ``sight`` as those of ``Chunks.of``, with gaps.
    """
    together: list[list[Chunk]] = []
    sight = sight or Sight()
    alone, held = [], 0
    for request in requests:
        row, begin, _, length = request
        length -= sight.origin(request)
        if length > most:
            alone.append(request)
            continue
        last = together[-1][-1] if together else None
        if last is None or (last[0] + 1, last[2]) != (row, begin) or held + length > most:
            together.append([])
            held = 0
        together[-1].append(request)
        held += length
    return together, alone


class Room:
    """Scratch memory that the layers of a step share, one after the other."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}
        self.held: dict[tuple[str, torch.Size], Tensor] = {}

    def get(self, what: str, shape: torch.Size, device: torch.device, dtype: torch.dtype = torch.float16) -> Tensor:
        """Return memory of this shape, the same for each ``what`` until a larger one is asked for.

        A ``what`` always has the same dtype.
        """
        if (found := self.held.get((what, shape))) is None:
            flat, count = self.flat.get(what), shape.numel()
            if flat is None or flat.numel() < count:
                flat = self.flat[what] = torch.empty(count, dtype=dtype, device=device)
                self.held = {key: x for key, x in self.held.items() if key[0] != what}
            found = self.held[what, shape] = flat[:count].view(shape)
        return found


class ChunkReader:
    """Attention of prompt chunks over one pool of pages.

    Parameters
    ----------
    packed : Packed
        The pages, and what reads them; its table and ``placed`` are not used.
    kept : Tensor ``[num_pages, H, 2, t, D]``, optional
        16-bit keys and values of the first tokens of every page: those of a request's first page are read in the place
        of its first t tokens.
    flash : Flash, optional
        The engine's own flash attention; by default PyTorch's.
    """

    def __init__(self, packed: Packed, kept: Tensor | None = None, flash: Flash | None = None) -> None:
        self.packed, self.kept, self.flash = packed, kept, flash or ragged_attention
        self.plan = plan_of(packed.spec, packed.pages.device)
        self.args: UnpackArgs = filled_args(packed, self.plan)
        if self.packed.key.order != 1 or self.packed.key.factor is not None:
            self.args.k_order, self.args.k_factor = packed.key.order, _address_of(packed.key.factor)
        if self.packed.value.order != 1 or self.packed.value.factor is not None:
            self.args.v_order, self.args.v_factor = packed.value.order, _address_of(packed.value.factor)

    def attend(self, q: Tensor, chunks: Chunks, rules: Rules, out: Tensor) -> None:
        """Causal attention of the chunks' queries over their requests' tokens.

        Parameters
        ----------
        q : Tensor ``[n, HQ, D]``
            Model basis; the chunks' queries.
        chunks : Chunks
            Their window takes the place of that of ``rules``.
        rules : Rules
        out : Tensor ``[n, HQ, D]``
            Of q's dtype; written.
        """
        sinks = rules.sinks
        room, device, dtype = chunks.room, q.device, dtype_of(q)
        shape = torch.Size((chunks.tokens, self.packed.pages.shape[1], q.shape[2]))
        k, v = (room.get(role, shape, device, dtype) for role in ROLES)
        given = q
        if q.dtype != dtype:
            given = room.get("query", q.shape, device, dtype)
            change_basis([Part(q, given, NO_CONSTANTS, MULTIPLY)])
        self.unpack(chunks.table, chunks.ragged.keys, chunks.ragged.most_keys, k, v, chunks.placed)
        if self.kept is not None:
            self._put_kept(chunks, k, v)
        direct = out.dtype == dtype and sinks is None
        found = out if direct else room.get("output", q.shape, device, dtype)
        lse = self.flash(given, k, v, chunks.ragged, rules.scale, rules.seen.softcap, found)
        if not direct:
            joined = None if sinks is None else Joined(lse, sinks=sinks.float())
            change_basis([Part(found, out, NO_CONSTANTS, COPY, joined=joined)])

    def unpack(self, table: Tensor, keys: Tensor, most: int, k: Tensor, v: Tensor, placed: Tensor | None) -> None:
        """Unpack the first tokens of every request end to end, into ``k, v [t, H, D]``.

        ``keys`` as in ``Ragged``; ``most``: tokens of the longest; ``placed`` as in ``Chunks``.
        """
        args, plan = self.args, self.plan
        args.page_table, args.table_row = table.data_ptr(), table.stride(0)
        args.keys, args.values, args.ends = k.data_ptr(), v.data_ptr(), keys.data_ptr()
        args.out_token, args.out_head, _ = k.stride()
        args.kind = int(k.dtype == torch.bfloat16)
        if placed is not None and self.packed.mean is not None:
            args.mean.placed = placed.data_ptr()
        blocks = -(-most // (plan.tile * plan.warps))
        plan.kernel.launch((blocks, k.shape[1], table.shape[0]), plan.warps * 32, plan.shared, args)

    def _put_kept(self, chunks: Chunks, k: Tensor, v: Tensor) -> None:
        """Write first tokens over the unpacked ones."""
        assert self.kept is not None
        parts = []
        for place, out in enumerate((k, v)):
            held, at, ends = self.kept[:, :, place], chunks.kept_at, chunks.ragged.keys
            parts.append(Part(held, out.transpose(0, 1)[None], NO_CONSTANTS, COPY, at=at, ends=ends))
        change_basis(parts)


def dtype_of(q: Tensor) -> torch.dtype:
    """What flash attention computes with: the model's dtype, fp16 for float32."""
    return torch.float16 if q.dtype == torch.float32 else q.dtype


def _address_of(factor: Tensor | None) -> int | None:
    """Address of a factor ``[1, H, D]``, or of none."""
    return None if factor is None else factor.data_ptr()
