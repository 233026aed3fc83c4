"""A layer whose codecs encode G tokens together, over an engine's pages: complete groups packed, others in 16 bit.

**Which keys a token attends to**: its own group, up to itself, in 16 bit; every group before it, dequantized. The rule
depends on positions in the sequence only, so chunked prefill, prefix-cache hits and preemption do not change results.

=========  ====================================  ====================================================================
by         a group in                            attention
=========  ====================================  ====================================================================
kernels    ``Engine.encode`` for decode steps    decode steps: ``attend_step``, the slot's tokens as dense ones;
           of all slots, incomplete groups to    a GPU's chunks: ``GroupChunkReader``, for all requests at once;
           nowhere; a GPU's chunks               ``Engine.attend_groups`` for a CPU's chunks, and for a GPU's that are
           ``GroupChunkReader.take``             too long or that flash attention does not support (the reference, if
                                                 these have a sliding window or a soft cap)
reference  the codec itself                      ``attention.attend_parts``, over dequantized groups and the chunk's
                                                 tokens beside each other, with a mask
=========  ====================================  ====================================================================
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Role, storage_dtype
from packedkv.integrations.vllm.layer import CHUNK_TOKENS, EngineLayer
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.integrations.vllm.servable import group_tokens
from packedkv.kernels.cuda.prefill_groups import GroupChunkReader, GroupChunks
from packedkv.kernels.tokens import GroupTokens, Rules, StepTokens
from packedkv.scheme import KVScheme


class GroupedLayer(EngineLayer):
    """Constants, pages and slots of one layer; arguments of methods as ``EngineLayer`` lists them.

    ``recent`` is a dict of role to 16-bit Tensor ``[1, H, t, D]``: a request's tokens from the start of its first new
    token's group on. ``slots``: requests that run at once. ``halves``: of a slot, as ``PendingGroups``.
    """

    def __init__(self, scheme: KVScheme, *, slots: int, halves: int = 1, **options: Any) -> None:
        super().__init__(scheme, **options)
        self.holds_dense = True
        self.unit, self.slots, self.halves = group_tokens(self.scheme), slots, halves
        shape, dtype = ((slots + 1) * halves * self.unit, self.heads, self.head_dim), storage_dtype(self.dtype)
        self.flat_rows: dict[Role, Tensor] = {r: torch.zeros(shape, dtype=dtype, device=self.device) for r in ROLES}
        self.slot_rows = {r: x.unflatten(0, (-1, self.unit)).transpose(1, 2) for r, x in self.flat_rows.items()}

    @property
    def pending_bytes(self) -> int:
        """Count the slots' bytes."""
        return sum(x.nbytes for x in self.flat_rows.values())

    # -- several tokens of one request ---------------------------------------------------------------------------------

    def take_chunk(
        self,
        keys: Tensor,
        values: Tensor,
        cache: Tensor,
        blocks: Tensor,
        seq_len: int,
        slot: Tensor,
        *,
        kernels: bool = False,
    ) -> dict[Role, Tensor]:
        """Encode the groups that a request's newest tokens complete; the rest stays pending in its slot.

        ``slot``: int64 ``[1]``, the request's. ``kernels``: encode with kernels instead of the codec itself; on a GPU
        nothing synchronises then. Returns ``recent``.
        """
        computed, unit = seq_len - keys.shape[0], self.unit
        begin = computed // unit * unit  # of the first new token's group
        whole, rest = (seq_len - begin) // unit * unit, seq_len % unit
        # halves of the slot for the first new token's group, the last complete group, and the incomplete one
        edges = begin, begin + whole - unit, begin + whole
        first, complete, incomplete = (slot * self.halves + at // unit % self.halves for at in edges)
        recent: dict[Role, Tensor] = {}
        for role, x in zip(ROLES, (keys, values), strict=True):
            rows = self.slot_rows[role]
            old = rows.index_select(0, first)[:, :, : computed - begin]
            recent[role] = torch.cat([old, x.transpose(0, 1)[None].to(rows.dtype)], 2)
            if rest:
                padded = rows.new_zeros(1, *rows.shape[1:])
                padded[:, :, :rest] = recent[role][:, :, whole:]
                rows.index_copy_(0, incomplete, padded)
            if whole and self.halves > 1:  # drafts that may be rejected
                rows.index_copy_(0, complete, recent[role][:, :, whole - unit : whole])
        if whole:
            groups: dict[Role, Tensor] = {role: x[:, :, :whole] for role, x in recent.items()}
            if kernels:
                key, value = (groups[role][0].transpose(0, 1) for role in ROLES)
                self.encode_chunk(key, value, cache, blocks, begin + whole)
            else:
                for role, x in groups.items():
                    self.write_run(role, x, cache, blocks, begin)
        return recent

    def attend_request(
        self, q: Tensor, cache: Tensor, blocks: Tensor, seq_len: int, rules: Rules, recent: dict[Role, Tensor]
    ) -> Tensor:
        """Attention of one request's newest queries by the reference."""
        n, unit, window = q.shape[0], self.unit, rules.seen.window
        begin, packed = seq_len - recent["key"].shape[2], (seq_len - 1) // unit * unit
        first = min(max(0, seq_len - n - window + 1), packed) if window else 0
        # keys: dequantized tokens [first, packed), then dense ones [begin, seq_len), which overlap; the mask chooses
        at = torch.arange(seq_len - n, seq_len, device=q.device)[:, None]
        decoded, dense = (torch.arange(a, b, device=q.device)[None] for a, b in ((first, packed), (begin, seq_len)))
        group = at // unit * unit
        mask = torch.cat([decoded < group, (dense >= group) & (dense <= at)], 1)
        if window:
            mask &= torch.cat([decoded, dense], 1) > at - window
        pieces = (x.to(self.dtype).split(CHUNK_TOKENS, 2) for x in (recent["key"], recent["value"]))
        parts = chain(self._decoded(cache, blocks, first, packed), zip(*pieces, strict=True))
        return self._attend_parts(q, parts, mask.shape[1], rules, mask)

    def prefill_request(
        self, q: Tensor, cache: Tensor, blocks: Tensor, seq_len: int, rules: Rules, recent: dict[Role, Tensor]
    ) -> Tensor:
        """Attention of one request's newest queries by kernels; on a GPU, windows and soft caps use the reference."""
        engine, pages = self.engine(cache.shape[2]), self.pages(cache)[1]
        if self.batched and (rules.seen.window or rules.seen.softcap):
            return self.attend_request(q, cache, blocks, seq_len, rules, recent)
        tokens = GroupTokens(pages, blocks[None], seq_len, self.unit, (recent["key"], recent["value"]))
        return engine.attend_groups(q.transpose(0, 1)[None], tokens, rules)[0].transpose(0, 1)

    # -- prompts of several requests, by a GPU's kernels, one launch per stage -----------------------------------------

    def prefill_bytes(self, tokens: int, length: int, query_heads: int, rules: Rules) -> int:
        """Add a copy of the new tokens next to the groups before them."""
        row = 2 * self.heads * self.head_dim
        beside = row * (3 * tokens + self.unit) * torch.float32.itemsize
        return super().prefill_bytes(tokens, length, query_heads, rules) + beside

    def store_chunks(self, keys: Tensor, values: Tensor, cache: Tensor, chunks: GroupChunks) -> tuple[Tensor, Tensor]:
        """Store prompt chunks; returns keys and values ``[own, H, D]`` for ``attend_chunk_groups``."""
        writer, reader = self.pool(cache)
        assert isinstance(reader, GroupChunkReader)
        return reader.take(keys, values, chunks, self.flat_rows, writer)

    def attend_chunk_groups(
        self, q: Tensor, kv: tuple[Tensor, Tensor], cache: Tensor, chunks: GroupChunks, rules: Rules, out: Tensor
    ) -> None:
        """Attention of prompt chunks, into ``out``, if ``takes_chunks``; tokens of unfinished groups go to slots."""
        _, reader = self.pool(cache)
        assert isinstance(reader, GroupChunkReader)
        reader.attend_groups(q, kv, chunks, self.flat_rows, rules, out)

    # -- decode steps, by kernels: one token of each request, or its newest token and its drafts -----------------------

    def store_steps(self, keys: Tensor, values: Tensor, cache: Tensor, pending: PendingGroups) -> dict[Role, Tensor]:
        """Store new tokens; returns the group of each, by role, 16 bit ``[B, H, G, D]``.

        ``pending``, updated for this step, has the indices of these tokens first. Shapes are fixed, and nothing
        synchronises.
        """
        n = keys.shape[0]
        at, place = pending.at[:n], pending.place[:n]
        dense: dict[Role, Tensor] = {}
        for role, x in zip(ROLES, (keys, values), strict=True):
            rows = self.slot_rows[role]
            rows[at, :, place] = x.to(rows.dtype)
            dense[role] = rows.index_select(0, at)
        # an incomplete group is sent behind its page, where nothing is stored
        self._encode(dense, cache, pending.page[:n, None], pending.first[:n])
        return dense

    def attend_steps(
        self, q: Tensor, dense: dict[Role, Tensor], tokens: StepTokens, pending: PendingGroups, rules: Rules
    ) -> Tensor:
        """Attend with each of these tokens as a sequence of its own; ``dense``: of ``store_steps``."""
        n, cache = q.shape[0], tokens.pages
        packed, start, dense_start = pending.packed[:n], None, None
        if rules.seen.window:
            oldest = (tokens.seq_lens - rules.seen.window).clamp_(min=0)
            start, dense_start = torch.minimum(oldest, packed), (oldest - packed).clamp_(min=0)
        tokens = tokens._replace(
            pages=self.pages(cache)[1],
            seq_lens=packed,
            start=start,
            dense_k=dense["key"],
            dense_v=dense["value"],
            dense_lens=pending.dense_len[:n],
            dense_start=dense_start,
        )
        return self.engine(cache.shape[2]).attend_step(q[:, :, None], tokens, rules)[:, :, 0]
