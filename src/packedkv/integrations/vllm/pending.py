"""Pending tokens of unfinished groups: one slot per running request, found again in every step. No engine is imported.

A codec that encodes G tokens together leaves up to G - 1 tokens of each request unencoded between two steps. They are
held in 16 bit in a pool of slots of G tokens each, beside the pages. This module assigns slots to requests and computes
the numbers of a step that follow from it::

    tokens of a request     0 ........ packed | ........ length        packed = (length - 1) // G * G
                            groups in pages   | 1..G in the slot

A request attends to its newest token's own group as the slot holds it, and to the groups before as the pages do: see
``groups.py``. The step that completes a group encodes it, and the next token begins another.

With drafts a slot has two halves, which groups take in turn, because the draft that completes a group may be rejected:
the next step then goes on in the group before, and completes it again. So the slot is kept as long as a step's tokens
are not all accepted for certain, and each query of a request has its own length, group and half.

An unfinished group belongs to one request, because requests share only whole blocks, which are whole groups. Its slot
is found in one of two ways:

- the runner reports each request's row in its table of requests (vLLM's second model runner): the slot is that row,
  which is the request's until it ends or is preempted;
- otherwise by the block that holds the next token, which no other request has while this one lives. The end of
  a request is not reported, so its slot is reused when it is the least recently used. That slot is never a paused
  request's: a scheduler that skips a running request for lack of budget admits no new one in that step, so since then
  only requests that were already running took slots, at most one each, and there are enough slots for all of them.
  Completed groups free their slots. (Pipeline stages alternate between batches: there are slots for each.)

If a request continues a group whose beginning is not in its slot, ``put`` raises instead of reading wrong tokens; on a
GPU a step or two later, because nothing here synchronises. Shapes are fixed, and the tensors that graphs read keep
their addresses.
"""

from typing import Any

import torch
from torch import Tensor

from packedkv.errors import UnsupportedError

FREE = -1


class PendingGroups:
    """Slots of unfinished groups, and a step's numbers by row of the batch, or by query.

    Parameters
    ----------
    slots : int
        As many as requests run at once; one more slot, number ``slots``, is for rows without a request.
    unit : int
        G, tokens of a group.
    page_tokens : int
        Of a block; a multiple of G.
    rows : int
        Most rows of a batch, or queries of its decode steps.
    device : torch.device
    halves : int
        Of a slot: 2 with drafts, of which a request may have fewer than G in a step.
    longest : int
        Tokens from there on, of drafts behind the longest request, are in no group; 0: there are none.

    Attributes
    ----------
    slot : Tensor int64 ``[rows]``
        Slot of the row's request.
    at, place : Tensor int64 ``[rows]``
        Half of a slot of the row's newest token, or of the query; and its place there.
    packed, dense_len : Tensor int32 ``[rows]``
        Tokens that are read from pages, and from the slot.
    page, first : Tensor int32 ``[rows]``
        Block and place to which a group that this step completes is encoded; place ``page_tokens``: none is completed.
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
        self.slot, self.at, self.place = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.packed, self.dense_len, self.page, self.first = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)
        )
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        # blocks that hold the groups of the halves
        self.block = torch.full((halves, slots + 1), FREE, dtype=torch.int64, device=device)
        self.end = torch.full((slots + 1,), FREE, dtype=torch.int64, device=device)  # tokens of the slot's request
        self.seen = torch.full((slots + 1,), FREE, dtype=torch.int64, device=device)  # step of its last use
        self.lost = torch.zeros(1, dtype=torch.bool, device=device)
        self.told = torch.zeros(1, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.step = 0

    def blank(self, rows: int) -> None:
        """Set the numbers of a batch without requests, for graph capture; assignments do not change."""
        for numbers, none in (
            *((self.slot, self.slots), (self.at, self.slots * self.halves), (self.place, 0), (self.packed, 0)),
            *((self.dense_len, 0), (self.page, 0), (self.first, self.page_tokens)),
        ):
            numbers[:rows] = none

    def put(
        self,
        table: Tensor,
        lengths: Tensor,
        starts: Tensor,
        where: Tensor,
        requests: Any = None,
        queries: int | None = None,
    ) -> None:
        """Assign slots to the batch of a step, and set its numbers.

        Parameters
        ----------
        table : Tensor int32 ``[B, M]``
            Block ids.
        lengths : Tensor int32 ``[B]``
            Tokens, those of this step included; 0: a row without a request.
        starts : Tensor int32 ``[B + 1]``
            First query of each row.
        where : Tensor int64 ``[T]``
            Slot of the pages for each query; below 0: it is not stored, and its row has no request. Neither has a row
            whose newest token is in block 0, which engines never assign.
        requests : array of int ``[R]``, optional
            Row of each request in the runner's table; R <= B.
        queries : int, optional
            Numbers are those of so many first queries; by default of the rows' newest ones.

        Raises
        ------
        UnsupportedError
            A request continues a group whose beginning is not in its slot.
        """
        self.step += 1
        rows, unit = lengths.shape[0], self.unit
        table, length = table[:rows], lengths.long()
        new = (starts[1 : rows + 1] - starts[:rows]).long()
        before, newest = length - new, self._block(table, length - 1)
        # of drafts behind the longest request nothing is stored
        stored = where[starts[:rows].long().clamp(max=where.shape[0] - 1)] >= 0
        real = stored & (length > 0) & (new > 0) & (newest > 0)
        begun, left = real & (before % unit != 0), real & (length % unit != 0)
        if self.halves > 1:
            left |= real & (new > 1)  # which of them are accepted is not known yet
        half, block = before // unit % self.halves, self._block(table, before)
        if requests is None:
            slot = self._find(half, block, before, real, begun, left, table)
        else:
            slot = self._rows(requests, rows, begun | left)
        end = self.end[slot]
        found = end == before if self.halves == 1 else (end >= before) & (self.block[half, slot] == block)
        self.lost |= (begun & ~found).any()
        self._remember(slot, real, left, before, length, table)
        if queries is None:
            self.slot[:rows] = slot
            self._set(slot, real, length - 1, newest)
        else:
            at = self.order[:queries]
            row = torch.searchsorted(starts[1 : rows + 1], at, right=True).clamp_(max=rows - 1)
            position = length[row] - (starts[row + 1] - at)
            real = real[row] & (position >= 0)
            if self.longest:
                real &= position < self.longest
            self.blank(self.order.shape[0])  # a graph may hold more queries than the step has
            self.slot[:rows] = slot
            self._set(slot[row], real, position, self._block(table[row], position))
        self._check()

    def _block(self, table: Tensor, position: Tensor) -> Tensor:
        """Block of a token of each row of the table."""
        column = (position.clamp(min=0) // self.page_tokens).clamp_(max=table.shape[1] - 1)
        return table.gather(1, column[:, None])[:, 0].long()

    def _set(self, slot: Tensor, real: Tensor, position: Tensor, block: Tensor) -> None:
        """Numbers of tokens at these positions."""
        count, unit = slot.shape[0], self.unit
        position = torch.where(real, position, -1)
        base = position.clamp(min=0) // unit * unit
        self.at[:count] = torch.where(real, slot, self.slots) * self.halves + base // unit % self.halves
        self.place[:count] = position.clamp(min=0) % unit
        self.packed[:count] = base
        self.dense_len[:count] = position + 1 - base
        self.page[:count] = torch.where(real, block, 0)
        ends = real & ((position + 1) % unit == 0)
        self.first[:count] = torch.where(ends, base % self.page_tokens, self.page_tokens)

    def _rows(self, requests: Any, rows: int, wanted: Tensor) -> Tensor:
        found = torch.full((rows,), self.slots, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        found[: len(requests)] = torch.as_tensor(requests, dtype=torch.int64)
        return torch.where(wanted, found.to(self.device, non_blocking=True), self.slots)

    def _find(
        self, half: Tensor, block: Tensor, before: Tensor, real: Tensor, begun: Tensor, left: Tensor, table: Tensor
    ) -> Tensor:
        """Slot of each row: the one with the block of its group, or else the least recently used."""
        own = begun[:, None] & (self.block[half, : self.slots] == block[:, None])
        if self.halves > 1:  # or the one that has rejected drafts there
            rejected = (real & ~begun)[:, None] & (self.end[None, : self.slots] > before[:, None])
            own |= rejected & (self.block[half, : self.slots] == block[:, None])
            # one whose tokens are all accepted, and in pages, is free: its request may take another one
            whole = (real & ~begun)[:, None] & (self.end[None, : self.slots] == before[:, None])
            last = self._block(table, before - 1)
            held = self.block[(before - 1).clamp(min=0) // self.unit % self.halves, : self.slots] == last[:, None]
            self.seen[: self.slots].masked_fill_((whole & held).any(0), FREE)
        known, used = own.any(1), own.any(0)
        oldest = torch.where(used, self.step, self.seen[: self.slots]).argsort(stable=True)
        fresh = left & ~known
        nth = (fresh.cumsum(0) - 1).clamp(0, self.slots - 1)
        return torch.where(known, own.int().argmax(1), torch.where(fresh, oldest[nth], self.slots))

    def _remember(
        self, slot: Tensor, real: Tensor, left: Tensor, before: Tensor, length: Tensor, table: Tensor
    ) -> None:
        """Free the slots of complete groups, keep the others; the extra slot stays free."""
        group = (length - 1).clamp(min=0) // self.unit
        newest = self._block(table, length - 1)
        # a block was reassigned: the request that had it before has ended
        over = (left[:, None, None] & (self.block[None] == newest[:, None, None])).any(0).any(0)
        gone = torch.where(real & ~left, slot, self.slots)
        kept = torch.where(left, slot, self.slots)
        blocks = torch.full_like(self.block[:, :1], FREE).expand(-1, len(slot)).clone()
        if self.halves > 1:  # of the group before only what this step has written there, or an earlier one
            earlier = self._block(table, group * self.unit - 1)
            blocks.scatter_(0, ((group + 1) % 2)[None], torch.where(before // self.unit < group, earlier, FREE)[None])
        blocks.scatter_(0, (group % self.halves)[None], newest[None])
        for numbers, new in ((self.end, length), (self.seen, torch.full_like(length, self.step))):
            numbers.masked_fill_(over, FREE)
            numbers.index_fill_(0, gone, FREE)  # an assignment would synchronise
            numbers[kept] = new
            numbers[self.slots :] = FREE
        self.block.masked_fill_(over[None], FREE)
        self.block.index_fill_(1, gone, FREE)
        self.block[:, kept] = blocks
        self.block[:, self.slots :] = FREE

    def _check(self) -> None:
        # on a GPU the copy is asynchronous: the next step sees it
        self.told.copy_(self.lost, non_blocking=True)
        if bool(self.told):
            raise UnsupportedError(
                f"packedkv: a request goes on in a group of {self.unit} tokens whose beginning is not here, because "
                f"the engine paused or moved it; serve such requests with a preset that encodes each token alone, such "
                f"as saw-int4."
            )
