"""Prefill over pages of token groups: prompt chunks of all requests with one launch per stage, as in ``prefill``.

Each query reads its own group of G tokens, up to itself, in 16 bit, and every group before it from the pages. A query
at place r of a group sees, in two parts that are joined by their log-sum-exps::

    packed, at least G tokens before it     causal attention with the keys moved by G places
    the G tokens up to itself               places r + 1 .. G - 1 of the group before, packed, and places 0 .. r of its
                                            own, in 16 bit: a window of G over the two groups beside each other

In the second part every group is a sequence of its own. A sliding window of W tokens is one of W - G in the first part
and of at most W in the second. A request that is too long for that is attended alone (``attend_groups``).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from packedkv.attention import Partial, Seen, merge, with_sinks
from packedkv.codec import ROLES, Role
from packedkv.kernels.cuda.basis import MULTIPLY, Joined, Part, change_basis, out_of_codes
from packedkv.kernels.cuda.encode import SlotWriter
from packedkv.kernels.cuda.prefill import (
    Chunk,
    ChunkReader,
    Packed,
    Sight,
    Workspace,
    attend_pages,
    dtype_of,
    rows_at_once,
    shifted,
    unpack,
)
from packedkv.kernels.flash import Ragged, score
from packedkv.kernels.tokens import Dense, GroupTokens, Rules


class GroupChunks(NamedTuple):
    """Newest tokens of several requests, whose own tokens are those from the beginning of their first group on.

    Own tokens lie group by group, those of all requests behind each other.
    """

    first: int  # queries [first, last) of the step
    last: int
    table: Tensor  # int32 [B, M]: block ids
    straight: bool  # whether own tokens are the new ones as they came
    slots: Tensor  # int64 [own]: slot of the pages of each own token; < 0: its group is not complete
    beside: Tensor  # int32 [own]: row of each own token beside its group before; < 0: there is no such token
    new_to: Tensor  # int32 [n]: own token of each new one
    old: Tensor  # int32: pending tokens of the first groups, row of the slots
    old_to: Tensor  # and own token
    unfinished: Tensor  # int32: own tokens of unfinished groups
    unfinished_to: Tensor  # and their rows of the slots
    distant: Ragged  # queries, and tokens at least a group before their request's newest one, as far as they are read
    local: Ragged  # queries, and the tokens of their group and the one before
    near: Tensor  # int32 [B, 3], kv::UnpackArgs::near
    most: int  # packed tokens of the longest request
    keys: int  # rows of ``distant``
    beside_keys: int  # rows of ``local``
    unit: int
    room: Workspace

    @classmethod
    def of(
        cls,
        requests: Sequence[Chunk],
        table: Tensor,
        slot: Tensor,
        unit: int,
        page_tokens: int,
        room: Workspace,
        halves: int = 1,
        window: int = 0,
    ) -> Self:
        """Return the chunks of neighbouring requests, as ``Chunks.of``; one asynchronous transfer to the device.

        ``slot``, int64 ``[R]``: the slot of pending tokens of each row of ``table``. Groups of ``unit`` tokens take the
        ``halves`` of a slot in turns.
        """
        row, first, *_ = requests[0]
        sight = Sight(window, page_tokens)
        arrays, straight, most, most_queries, most_keys, columns = _host_numbers(requests, unit, sight, halves)
        parts = [np.ascontiguousarray(x, dtype=np.int32).ravel() for x in arrays.values()]
        flat = torch.from_numpy(np.concatenate(parts))
        if table.is_cuda:
            flat = flat.pin_memory().to(table.device, non_blocking=True)
        numbers = dict(zip(arrays, flat.split([len(x) for x in parts]), strict=True))
        table = table[row : row + len(requests)]
        if columns:
            table = shifted(table, numbers["skipped"], columns)
        pages = table[numbers["row"], numbers["column"]].long()
        slots = torch.where(numbers["place"] < 0, -1, pages * page_tokens + numbers["place"])
        rows = slot[row : row + len(requests)].int() * (halves * unit)
        old = rows.index_select(0, numbers["old_row"]) + numbers["old_place"]
        unfinished_to = rows.index_select(0, numbers["unfinished_row"]) + numbers["unfinished_place"]
        keys, group_keys = (int(arrays[name][-1]) for name in ("keys", "group_keys"))
        return cls(
            first, requests[-1][2], table, straight, slots, numbers["beside"], numbers["new_to"], old,
            numbers["old_to"], numbers["unfinished"], unfinished_to,
            Ragged(numbers["queries"], numbers["keys"], most_queries, most_keys, max(0, window - unit)),
            Ragged(numbers["group_queries"], numbers["group_keys"], unit, 2 * unit, min(unit, window or unit)),
            numbers["near"], most, keys, group_keys, unit, room,
        )  # fmt: skip


def _starts(counts: Any) -> Any:
    return np.concatenate([[0], np.cumsum(counts)])


def _host_numbers(
    requests: Sequence[Chunk], unit: int, sight: Sight, halves: int
) -> tuple[dict[str, Any], bool, int, int, int, int]:
    """Numbers of ``GroupChunks`` that are known on the host, and the columns of the tables that are read, 0: all.

    Slots are counted from the first page that is read. It holds the group before the first own one unless the first
    query does not see it; then none is read.
    """
    page_tokens, window = sight.page_tokens, sight.window
    _, first, last, length = np.array(requests, dtype=np.int64).T
    new = last - first
    origin = np.array([sight.origin(request) for request in requests], dtype=np.int64)
    origin = np.minimum(origin, (length - new) // unit * unit // page_tokens * page_tokens)
    length = length - origin
    before = length - new
    begin, packed = before // unit * unit, (length - 1) // unit * unit
    groups = -(-(length - begin) // unit)
    distant = np.maximum(length - unit, 0) * (not 0 < window <= unit)
    begun = before - begin  # tokens that are pending
    straight = not begun.any() and not ((length - begin)[:-1] % unit).any()

    # groups, and the tokens of each
    request = np.repeat(np.arange(len(new)), groups)
    base = begin[request] + unit * (np.arange(len(request)) - np.repeat(_starts(groups)[:-1], groups))
    queries = np.minimum(base + unit, length[request]) - np.maximum(base, before[request])
    counts = np.minimum(base + unit, length[request]) - base
    keys = counts + unit * (base > 0)
    key_starts = _starts(keys)[:-1]

    # own tokens, whole groups of them but where they are as they came
    at = (base[:, None] + np.arange(unit)).ravel()
    group = np.repeat(np.arange(len(base)), unit)
    place = np.tile(np.arange(unit), len(base))
    of = request[group]
    there, complete = at < length[of], base[group] + unit <= length[of]
    numbers = {
        "row": of,
        "column": np.where(there, at // page_tokens, 0),
        "place": np.where(complete, at % page_tokens, -1),
        "beside": np.where(there, key_starts[group] + keys[group] - counts[group] + place, -1),
    }
    if straight:
        numbers = {name: x[there] for name, x in numbers.items()}
        unfinished = np.flatnonzero(~complete[there])
    else:
        unfinished = np.flatnonzero(there & ~complete)
    old = np.flatnonzero(at < before[of])
    lost = np.flatnonzero(there & ~complete)
    in_slot = (at + origin[of]) % (halves * unit)
    numbers |= {
        "new_to": np.flatnonzero(there & (at >= before[of])),
        "old_row": of[old],
        "old_place": in_slot[old],
        "old_to": old,
        "unfinished": unfinished,
        "unfinished_row": of[lost],
        "unfinished_place": in_slot[lost],
        "queries": _starts(new),
        "keys": _starts(distant),
        "skipped": origin // page_tokens,
        "group_queries": _starts(queries),
        "group_keys": _starts(keys),
    }
    # group n of a request goes before the own group n + 1, which the first own group's keys say the place of
    first_group = _starts(groups)[:-1]
    offset = key_starts[first_group] - unit * (begin == 0) - 2 * (begin - unit)
    numbers["near"] = np.stack([np.maximum(begin - unit, 0), packed, offset], 1)
    columns = -(-int(length.max()) // page_tokens) if origin.any() else 0
    return numbers, bool(straight), int(packed.max()), int(new.max()), int(distant.max()), columns


class GroupChunkReader(ChunkReader):
    """Prompt chunks over one pool of pages of token groups; ``ChunkReader``'s arguments."""

    def take(
        self, keys: Tensor, values: Tensor, chunks: GroupChunks, slots: Mapping[Role, Tensor], writer: SlotWriter
    ) -> Dense:
        """Encode the groups that new tokens ``[n, H, D]`` complete; returns all own tokens, ``[own, H, D]``.

        ``slots``: pending tokens of each role, ``[rows, H, D]``.
        """
        dense, dtype = (keys, values), slots["key"].dtype
        if not chunks.straight or keys.dtype != dtype:
            shape, room = torch.Size((chunks.slots.shape[0], *keys.shape[1:])), chunks.room
            dense = room.get("own key", shape, keys.device, dtype), room.get("own value", shape, keys.device, dtype)
            parts = []
            for role, x, to in zip(ROLES, (keys, values), dense, strict=True):
                parts.append(Part(x, to, target=chunks.new_to))
                parts.append(_copied(slots[role], to, chunks.old, chunks.old_to))
            change_basis(parts)
        writer.write(*dense, chunks.slots)
        return dense

    def attend_groups(
        self, q: Tensor, dense: Dense, chunks: GroupChunks, slots: Mapping[Role, Tensor], rules: Rules, out: Tensor
    ) -> None:
        """As ``ChunkReader.attend``, and copy own tokens, as ``take`` returned them, of unfinished groups to slots."""
        room, args, device, dtype = chunks.room, self.args, q.device, dtype_of(q)
        sinks, softcap = rules.sinks, rules.seen.softcap
        heads, dim = dense[0].shape[1:]
        shape = torch.Size((chunks.beside_keys, heads, dim))
        beside_k, beside_v = (room.get(f"beside {role}", shape, device, dtype) for role in ROLES)
        given, parts = q, []
        if q.dtype != dtype:
            given = room.get("query", q.shape, device, dtype)
            parts.append(Part(q, given, way=MULTIPLY))
        for x, to in zip(dense, (beside_k, beside_v), strict=True):
            parts.append(Part(x, to, target=chunks.beside))
        if len(chunks.unfinished):
            for role, x in zip(ROLES, dense, strict=True):
                parts.append(_copied(x, slots[role], chunks.unfinished, chunks.unfinished_to))
        change_basis(parts)

        shape = torch.Size((chunks.keys, heads, dim))
        k, v = (room.get(role, shape, device, dtype) for role in ROLES)
        if chunks.most:
            args.near, args.near_group = chunks.near.data_ptr(), chunks.unit
            args.near_keys, args.near_values = beside_k.data_ptr(), beside_v.data_ptr()
            self.unpack(chunks.table, chunks.distant.keys, chunks.most, k, v, None)
        direct = not chunks.keys and out.dtype == dtype and sinks is None
        output = out if direct else room.get("output", q.shape, device, dtype)
        lse = self.flash(given, beside_k, beside_v, chunks.local, rules.scale, softcap, output)
        if direct:
            return
        other = distant = None
        if chunks.keys:
            other = room.get("distant output", q.shape, device, dtype)
            distant = self.flash(given, k, v, chunks.distant, rules.scale, softcap, other)
        joined = Joined(lse, other, distant, None if sinks is None else sinks.float())
        change_basis([Part(output, out, joined=joined)])


def _copied(x: Tensor, out: Tensor, source: Tensor, target: Tensor) -> Part:
    """Some rows of ``x [t, H, D]`` to rows of ``out [T, H, D]``."""
    return Part(x, out, tokens=len(source), source=source, target=target)


# -- one request alone -------------------------------------------------------------------------------------------------


def attend_groups(q: Tensor, packed: Packed, tokens: GroupTokens, rules: Rules) -> Tensor:
    """Causal attention of the newest ``q [1, HQ, n, D]``; as ``Engine.attend_groups``."""
    (k, v), length, unit = tokens.dense, tokens.length, tokens.group
    n, begin, out = q.shape[2], length - k.shape[2], torch.empty_like(q)
    step, row = max(unit, rows_at_once(q) // unit * unit), 0
    while row < n:
        at = length - n + row  # place of the first of these queries
        base = at // unit * unit
        last = min(length, base + step)
        part, span = q[:, :, row : row + last - at], slice(base - begin, last - begin)
        total = _local(part, packed, (k[:, :, span], v[:, :, span]), at - base, base, unit, rules.scale)
        blind = max(0, unit - at)  # queries of the first group see no other
        if at + blind < last:
            far = attend_pages(part[:, :, blind:], packed, 0, last - unit, rules.scale, causal=True)
            lse = torch.nn.functional.pad(far.lse, (blind, 0), value=-torch.inf)
            total = merge(total, Partial(torch.nn.functional.pad(far.out, (0, 0, blind, 0)), lse))
        out[:, :, row : row + last - at] = with_sinks(total, rules.sinks)
        row += last - at
    return out


def _local(q: Tensor, packed: Packed, dense: Dense, skip: int, base: int, unit: int, scale: float) -> Partial:
    """Attention of each query to the ``unit`` tokens up to itself: dense ones of its own group, packed ones before it.

    ``dense`` begins with the group at ``base``, ``q`` with its token ``skip``. Groups are the batch; padding lies after
    everything that a query sees.
    """
    groups = -(-dense[0].shape[2] // unit)
    first = max(0, base - unit)
    before = unpack(packed, first, base + (groups - 1) * unit - first)
    both = []
    for old, new, side in zip(before, dense, (packed.key, packed.value), strict=True):
        old = torch.nn.functional.pad(out_of_codes(old, side, q.dtype), (0, 0, unit - (base - first), 0))
        both.append(torch.cat([_groups(old, unit), _groups(_padded(new.to(q.dtype), 0, groups * unit), unit)], 2))
    hidden = () if base else (unit, *[0] * (groups - 1))
    queries = _groups(_padded(q, skip, groups * unit), unit)
    part = score(queries, both[0], both[1], scale, Seen(window=unit, start=hidden))
    rows = slice(skip, skip + q.shape[2])
    return Partial(*(x.transpose(0, 1).flatten(1, 2)[None, :, rows] for x in part))


def _groups(x: Tensor, unit: int) -> Tensor:
    """Groups of ``x [1, H, t, D]`` as the batch, ``[t / unit, H, unit, D]``."""
    return x[0].unflatten(1, (-1, unit)).transpose(0, 1)


def _padded(x: Tensor, first: int, tokens: int) -> Tensor:
    """``x [1, H, t, D]`` at place ``first`` of so many tokens, zeros around it."""
    return torch.nn.functional.pad(x, (0, 0, first, tokens - first - x.shape[2]))
