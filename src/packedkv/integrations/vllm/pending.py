"""Pending tokens of unfinished groups: one slot per running request, found again in every step. No engine is imported.

A pool beside the pages stores in 16 bit what a codec that encodes G tokens together leaves unencoded between two
steps::

    tokens of a request     0 ........ packed | ........ seq_len       packed = (seq_len - 1) // G * G
                            groups in pages   | 1..G in the slot

With drafts a slot has two halves for alternating groups, because the draft that completes a group may be rejected. The
next step then resumes the group before, and completes it again. A request therefore keeps its slot until all tokens of
a step are certainly accepted, and each query of a request has its own length, group and half.

An unfinished group belongs to one request, because requests share only whole blocks, which are whole groups. Its slot
is found in one of two ways:

- By row: vLLM's second model runner reports each request's row in its table of requests, which the request keeps until
  it ends or is preempted.
- By block: no other request has the block of the next token while this request lives. vLLM does not report the end of a
  request, so a new request takes the least recently used slot. That slot never belongs to a paused request: a scheduler
  that skips a running request for lack of budget admits no new one in that step. Since then only requests that were
  already running took slots, at most one each, and there is a slot for each of them. Completed groups free their slots.
  (Pipeline stages alternate between batches: each batch has its own slots.)

Shapes are fixed, nothing synchronises, and the tensors that graphs read keep their addresses.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.errors import UnsupportedError

FREE = -1


class _Rows(NamedTuple):
    """A step's batch, a row per request: bool or int64 ``[B]``, and ``block_table [B, M]``.

    ``computed, seq_len``: tokens before and after this step. ``real``: the row has a request. ``resumes``: the step
    begins inside a group, whose first tokens are in a slot. ``pends``: the request needs a slot after this step.
    ``first_block, last_block``: blocks of the step's first and last token.
    """

    block_table: Tensor
    computed: Tensor
    seq_len: Tensor
    real: Tensor
    resumes: Tensor
    pends: Tensor
    first_block: Tensor
    last_block: Tensor


class PendingGroups:
    """Slots of unfinished groups, and a step's indices by row of the batch, or by query.

    ``slots``: the most requests that run at once; one more slot, number ``slots``, is for rows without a request.
    ``unit``: G. ``page_tokens``: of a block; a multiple of G. ``rows``: most rows of a batch, or queries of its decode
    steps. ``halves``: of a slot; 2 with drafts, of which a request may have fewer than G in a step. ``longest``: tokens
    from there on, of drafts behind the longest request, are in no group; 0: there are none.
    """

    def __init__(
        self,
        slots: int,
        unit: int,
        page_tokens: int,
        rows: int,
        device: torch.device,
        halves: int = 1,
        longest: int = 0,
    ) -> None:
        self.slots, self.unit, self.page_tokens, self.device = slots, unit, page_tokens, device
        self.halves, self.longest = halves, longest
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        # slot of the row's request; half of a slot that has the row's newest token, or the query's; its place there
        self.slot, self.at, self.place = torch.zeros(3, rows, dtype=torch.int64, device=device)
        # tokens that are read from pages, and from the slot; block and place to which a group that this step completes
        # is encoded; place ``page_tokens``: none is completed
        self.packed, self.dense_len, self.page, self.first = torch.zeros(4, rows, dtype=torch.int32, device=device)
        # of each slot: the blocks that its halves' groups belong to, its request's tokens, the step of its last use
        self.block = torch.full((halves, slots + 1), FREE, dtype=torch.int64, device=device)
        self.tokens, self.used = torch.full((2, slots + 1), FREE, dtype=torch.int64, device=device)
        self.lost = torch.zeros(1, dtype=torch.bool, device=device)
        self.lost_on_host = torch.zeros(1, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.step = 0

    def blank(self, rows: int) -> None:
        """Set the indices of a batch without requests, for graph capture; assignments do not change."""
        for index in (self.place, self.packed, self.dense_len, self.page):
            index[:rows] = 0
        self.slot[:rows], self.at[:rows] = self.slots, self.slots * self.halves
        self.first[:rows] = self.page_tokens

    def put(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        slot_mapping: Tensor,
        req_idx: Any = None,
        queries: int | None = None,
    ) -> None:
        """Assign slots to the batch of a step, and set its indices.

        ``block_table`` int32 ``[B, M]``. ``seq_lens`` int32 ``[B]``: this step's tokens included; 0: no request.
        ``query_start_loc`` int32 ``[B + 1]``: first query of each row. ``slot_mapping`` int64 ``[T]``: slot of the
        pages for each query; below 0 it is not stored, and its row has no request. Nor has a row whose newest token is
        in block 0, which engines never assign. ``req_idx`` ``[R]``, R <= B: row of each request in the runner's table.
        ``queries``: set the indices of so many first queries; by default those of each row's newest one.

        Raises
        ------
        UnsupportedError
            A request resumes a group whose first tokens are not in its slot; on a GPU a step or two later.
        """
        self.step += 1
        rows = self._rows(block_table, seq_lens, query_start_loc, slot_mapping)
        slot = self._find(rows) if req_idx is None else self._by_row(req_idx, rows)
        self._check(rows, slot)
        self._assign(rows, slot)
        count = slot.shape[0]
        if queries is None:
            self.slot[:count] = slot
            self._set(slot, rows.real, rows.seq_len - 1, rows.last_block)
            return
        # each query is a sequence of its own, which ends with the query
        query, ends = self.order[:queries], query_start_loc[1 : count + 1]
        row = torch.searchsorted(ends, query, right=True).clamp_(max=count - 1)
        position = rows.seq_len[row] - (ends[row] - query)
        real = rows.real[row] & (position >= 0)
        if self.longest:
            real &= position < self.longest
        self.blank(self.order.shape[0])  # a graph may have more queries than the step
        self.slot[:count] = slot
        self._set(slot[row], real, position, self._block_of(rows.block_table[row], position))

    def _rows(self, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, slot_mapping: Tensor) -> _Rows:
        count, seq_len = seq_lens.shape[0], seq_lens.long()
        block_table, begin = block_table[:count], query_start_loc[:count].long()
        new = (query_start_loc[1 : count + 1] - query_start_loc[:count]).long()
        computed = seq_len - new
        first_block, last_block = (self._block_of(block_table, at) for at in (computed, seq_len - 1))
        stored = slot_mapping[begin.clamp(max=slot_mapping.shape[0] - 1)] >= 0  # not drafts behind the longest request
        real = stored & (seq_len > 0) & (new > 0) & (last_block > 0)
        resumes, pends = real & (computed % self.unit != 0), real & (seq_len % self.unit != 0)
        if self.halves > 1:
            pends |= real & (new > 1)  # some of these tokens are drafts that may be rejected
        return _Rows(block_table, computed, seq_len, real, resumes, pends, first_block, last_block)

    def _block_of(self, block_table: Tensor, position: Tensor) -> Tensor:
        column = (position.clamp(min=0) // self.page_tokens).clamp_(max=block_table.shape[1] - 1)
        return block_table.gather(1, column[:, None])[:, 0].long()

    def _half(self, position: Tensor) -> Tensor:
        return position.clamp(min=0) // self.unit % self.halves

    def _set(self, slot: Tensor, real: Tensor, position: Tensor, block: Tensor) -> None:
        """Set the indices of tokens at these positions."""
        count, unit = slot.shape[0], self.unit
        position = torch.where(real, position, -1)
        base = position.clamp(min=0) // unit * unit
        self.at[:count] = torch.where(real, slot, self.slots) * self.halves + self._half(base)
        self.place[:count] = position.clamp(min=0) % unit
        self.packed[:count] = base
        self.dense_len[:count] = position + 1 - base
        self.page[:count] = torch.where(real, block, 0)
        completes = real & ((position + 1) % unit == 0)
        self.first[:count] = torch.where(completes, base % self.page_tokens, self.page_tokens)

    def _by_row(self, req_idx: Any, rows: _Rows) -> Tensor:
        slot = torch.full(rows.real.shape, self.slots, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        slot[: len(req_idx)] = torch.as_tensor(req_idx, dtype=torch.int64)
        return torch.where(rows.resumes | rows.pends, slot.to(self.device, non_blocking=True), self.slots)

    def _find(self, rows: _Rows) -> Tensor:
        """Slot of each row: the one with the block of its group, or else the least recently used."""
        block, used = self.block[:, : self.slots], self.used[: self.slots]
        # match[b, s]: slot s has the first tokens of the group in which row b begins this step
        same_block = block[self._half(rows.computed)] == rows.first_block[:, None]
        match = rows.resumes[:, None] & same_block
        if self.halves > 1:
            begins = (rows.real & ~rows.resumes)[:, None]
            tokens, computed = self.tokens[None, : self.slots], rows.computed[:, None]
            # the slot has drafts of this group, all of them rejected: the row writes them again
            match |= begins & same_block & (tokens > computed)
            # all drafts were accepted and completed the group before: its slot is free, also for another row
            previous_block = self._block_of(rows.block_table, rows.computed - 1)[:, None]
            complete = begins & (block[self._half(rows.computed - 1)] == previous_block) & (tokens == computed)
            used.masked_fill_(complete.any(0), FREE)
        known = match.any(1)
        # the n-th row without a slot takes the n-th oldest slot that no row of this step has
        oldest = torch.where(match.any(0), self.step, used).argsort(stable=True)
        unknown = rows.pends & ~known
        nth = (unknown.cumsum(0) - 1).clamp(0, self.slots - 1)
        return torch.where(known, match.int().argmax(1), torch.where(unknown, oldest[nth], self.slots))

    def _check(self, rows: _Rows, slot: Tensor) -> None:
        """Raise if a slot does not have the first tokens of its row's group."""
        tokens = self.tokens[slot]
        if self.halves == 1:
            right = tokens == rows.computed
        else:  # some of the slot's tokens may be rejected drafts
            right = (tokens >= rows.computed) & (self.block[self._half(rows.computed), slot] == rows.first_block)
        self.lost |= (rows.resumes & ~right).any()
        self.lost_on_host.copy_(self.lost, non_blocking=True)  # on a GPU a later step reads it
        if bool(self.lost_on_host):
            raise UnsupportedError(
                f"packedkv: a request goes on in a group of {self.unit} tokens whose beginning is not here, because "
                "the engine paused or moved it; serve such requests with a preset that encodes each token alone, such "
                "as saw-int4."
            )

    def _assign(self, rows: _Rows, slot: Tensor) -> None:
        """Record what slots contain after this step; slots of complete groups become free, as the extra slot is."""
        group = (rows.seq_len - 1).clamp(min=0) // self.unit
        # a slot with a block that now has a row's newest token: its request has ended, and the block was assigned again
        ended = (rows.pends[:, None, None] & (self.block[None] == rows.last_block[:, None, None])).any(0).any(0)
        freed = torch.where(rows.real & ~rows.pends, slot, self.slots)
        filled = torch.where(rows.pends, slot, self.slots)
        block = torch.full_like(self.block[:, :1], FREE).expand(-1, len(slot)).clone()
        if self.halves > 1:  # the group before is in the other half if this step wrote to it
            other = self._block_of(rows.block_table, group * self.unit - 1)
            other = torch.where(rows.computed // self.unit < group, other, FREE)
            block.scatter_(0, ((group + 1) % 2)[None], other[None])
        block.scatter_(0, (group % self.halves)[None], rows.last_block[None])
        used = torch.full_like(rows.seq_len, self.step)
        for state, new in ((self.tokens, rows.seq_len), (self.used, used), (self.block, block)):
            state.masked_fill_(ended, FREE)
            state.index_fill_(-1, freed, FREE)  # an assignment would synchronise
            state[..., filled] = new
            state[..., self.slots :] = FREE
