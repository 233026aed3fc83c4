"""A layer whose codecs encode G tokens together, over an engine's pages: complete groups packed, others in 16 bit.

A complete group is stored in the pages as ``EngineLayer``'s tokens are. Until then its tokens are pending in a slot
(``pending.py``). The step that completes a group encodes it.

**What a token reads**: its own group, up to itself, in 16 bit; every group before it, decoded. The rule depends on
positions in the sequence only, so chunked prefill, prefix-cache hits and preemption do not change results. In the
library's own cache a complete group is read decoded, even by its own tokens of the same call; here a token's own group
is always dense, also for the token that completes it.

=========  ====================================  ====================================================================
by         a group in                            attention
=========  ====================================  ====================================================================
kernels    ``Engine.encode``: for decode steps   decode steps: ``Engine.attend``, the slot's tokens as dense ones;
           of all slots, those that are not      a GPU's chunks: ``GroupChunkReader``, for all requests at once; too
           complete to nowhere; a GPU's chunks   long ones, those that flash attention does not take and a CPU's
           ``GroupChunkReader.take``             ``Engine.attend_groups``, on a GPU with a sliding window or a soft cap
                                                 the reference
reference  the codec itself                      ``attention.attend_parts``, over decoded groups and the chunk's tokens
                                                 beside each other, with a mask
=========  ====================================  ====================================================================
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Role, storage_dtype
from packedkv.integrations.vllm.layer import CHUNK_TOKENS, EngineLayer, Rules
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.integrations.vllm.servable import group_tokens
from packedkv.kernels.cuda.prompts_groups import GroupChunkReader, GroupChunks
from packedkv.kernels.tokens import GroupTokens, StepTokens
from packedkv.scheme import KVScheme


class GroupedLayer(EngineLayer):
    """Constants, pages and slots of one layer.

    Parameters
    ----------
    scheme, **options
        As ``EngineLayer``.
    slots : int
        Requests that run at once.
    halves : int
        Of a slot, as ``PendingGroups``.
    """

    def __init__(self, scheme: KVScheme, *, slots: int, halves: int = 1, **options: Any) -> None:
        super().__init__(scheme, **options)
        self.holds_dense = True
        self.unit, self.slots, self.halves = group_tokens(self.scheme), slots, halves
        shape = ((slots + 1) * halves * self.unit, self.heads, self.head_dim)
        held = storage_dtype(self.dtype)
        self.flat_rows: dict[Role, Tensor] = {r: torch.zeros(shape, dtype=held, device=self.device) for r in ROLES}
        self.slot_rows = {r: x.unflatten(0, (-1, self.unit)).transpose(1, 2) for r, x in self.flat_rows.items()}

    @property
    def pending_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(x.nbytes for x in self.flat_rows.values())

    # -- several tokens of one request ---------------------------------------------------------------------------------

    def take_chunk(
        self,
        keys: Tensor,
        values: Tensor,
        cache: Tensor,
        row: Tensor,
        length: int,
        slot: Tensor,
        *,
        kernels: bool = False,
    ) -> dict[Role, Tensor]:
        """Encode the groups that a request's newest tokens complete; the rest stays pending in its slot.

        Parameters
        ----------
        keys, values : Tensor ``[n, H, D]``
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        row : Tensor int32 ``[M]``
            Block ids of the request.
        length : int
            Tokens of the request, these n included.
        slot : Tensor int64 ``[1]``
            The request's.
        kernels : bool
            Encode with kernels instead of the codec itself; on a GPU nothing synchronises then.

        Returns
        -------
        dict of role to Tensor ``[1, H, t, D]``
            16 bit: the tokens from the start of the first new token's group on.
        """
        n = keys.shape[0]
        begin = (length - n) // self.unit * self.unit
        whole, rest = (length - begin) // self.unit * self.unit, length % self.unit
        edges = begin, begin + whole - self.unit, begin + whole
        first, before, last = (slot * self.halves + at // self.unit % self.halves for at in edges)
        own: dict[Role, Tensor] = {}
        for role, x in zip(ROLES, (keys, values), strict=True):
            rows = self.slot_rows[role]
            old = rows.index_select(0, first)[:, :, : length - n - begin]
            own[role] = torch.cat([old, x.transpose(0, 1)[None].to(rows.dtype)], 2)
            if rest:
                kept = rows.new_zeros(1, *rows.shape[1:])
                kept[:, :, :rest] = own[role][:, :, whole:]
                rows.index_copy_(0, last, kept)
            if whole and self.halves > 1:  # drafts that may be rejected
                rows.index_copy_(0, before, own[role][:, :, whole - self.unit : whole])
        if whole:
            groups: dict[Role, Tensor] = {role: x[:, :, :whole] for role, x in own.items()}
            if kernels:
                key, value = (groups[role][0].transpose(0, 1) for role in ROLES)
                self.encode_chunk(key, value, cache, row, begin + whole)
            else:
                for role, x in groups.items():
                    self.write_run(role, x, cache, row, begin)
        return own

    def attend_own(
        self, q: Tensor, cache: Tensor, row: Tensor, length: int, rules: Rules, own: dict[Role, Tensor]
    ) -> Tensor:
        """Attention of one request's newest queries by the reference; arguments as ``attend``.

        Parameters
        ----------
        own : dict of role to Tensor ``[1, H, t, D]``
            As ``take_chunk`` returned it.
        """
        n, unit = q.shape[0], self.unit
        begin, packed = length - own["key"].shape[2], (length - 1) // unit * unit
        first = min(max(0, length - n - rules.window + 1), packed) if rules.window else 0
        at = torch.arange(length - n, length, device=q.device)[:, None]
        decoded, dense = (torch.arange(a, b, device=q.device)[None] for a, b in ((first, packed), (begin, length)))
        group = at // unit * unit
        mask = torch.cat([decoded < group, (dense >= group) & (dense <= at)], 1)
        if rules.window:
            mask &= torch.cat([decoded, dense], 1) > at - rules.window
        pieces = (x.to(self.dtype).split(CHUNK_TOKENS, 2) for x in (own["key"], own["value"]))
        parts = chain(self._decoded(cache, row, first, packed), zip(*pieces, strict=True))
        return self._attend_parts(q, parts, mask.shape[1], rules, mask)

    def prefill_own(
        self, q: Tensor, cache: Tensor, row: Tensor, length: int, rules: Rules, own: dict[Role, Tensor]
    ) -> Tensor:
        """As ``attend_own``, by kernels; on a GPU soft caps and sliding windows use the reference."""
        engine, pages = self.engine(cache.shape[2]), self.pages(cache)[1]
        if self.batched and not rules.kernels.seen.plain:
            return self.attend_own(q, cache, row, length, rules, own)
        read = GroupTokens(pages, row[None], length, self.unit, (own["key"], own["value"]), self.flash)
        return engine.attend_groups(q.transpose(0, 1)[None], read, rules.kernels)[0].transpose(0, 1)

    # -- prompts of several requests -----------------------------------------------------------------------------------

    def prefill_bytes(self, tokens: int, length: int, query_heads: int, rules: Rules) -> int:
        """As ``EngineLayer.prefill_bytes``, plus a copy of the new tokens next to the groups before them."""
        row = 2 * self.heads * self.head_dim
        beside = row * (3 * tokens + self.unit) * torch.float32.itemsize
        return super().prefill_bytes(tokens, length, query_heads, rules) + beside

    def store_chunks(self, keys: Tensor, values: Tensor, cache: Tensor, chunks: GroupChunks) -> tuple[Tensor, Tensor]:
        """Store prompt chunks of several requests by a GPU's kernels, one launch per stage.

        Parameters
        ----------
        keys, values : Tensor ``[n, H, D]``
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        chunks : GroupChunks

        Returns
        -------
        (Tensor ``[own, H, D]``, Tensor ``[own, H, D]``)
            For ``attend_chunk_groups``.
        """
        pool = self.pool(cache)
        assert isinstance(pool.reader, GroupChunkReader)
        return pool.reader.take(keys, values, chunks, self.flat_rows, pool.writer)

    def attend_chunk_groups(
        self, q: Tensor, own: tuple[Tensor, Tensor], cache: Tensor, chunks: GroupChunks, rules: Rules, out: Tensor
    ) -> None:
        """Attention of prompt chunks of several requests by a GPU's kernels; tokens of unfinished groups go to slots.

        Parameters
        ----------
        q, out : Tensor ``[n, HQ, D]``
        own : (Tensor ``[own, H, D]``, Tensor ``[own, H, D]``)
            As ``store_chunks`` returned them.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        chunks : GroupChunks
            Of this layer's window.
        rules : Rules
            Where ``takes_chunks``.
        """
        reader = self.pool(cache).reader
        assert isinstance(reader, GroupChunkReader)
        reader.attend_groups(q, own, chunks, self.flat_rows, rules.kernels, out)

    # -- decode steps --------------------------------------------------------------------------------------------------

    def store_steps(self, keys: Tensor, values: Tensor, cache: Tensor, pending: PendingGroups) -> dict[Role, Tensor]:
        """Store new tokens by kernels: one of each request, or a request's newest and its drafts.

        Shapes are fixed, nothing synchronises.

        Parameters
        ----------
        keys, values : Tensor ``[B, H, D]``
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        pending : PendingGroups
            Updated for this step; its first B numbers are those of these tokens.

        Returns
        -------
        dict of role to Tensor ``[B, H, G, D]``
            16 bit: the group of each.
        """
        n = keys.shape[0]
        at, place = pending.at[:n], pending.place[:n]
        dense: dict[Role, Tensor] = {}
        for role, x in zip(ROLES, (keys, values), strict=True):
            self.slot_rows[role][at, :, place] = x.to(self.slot_rows[role].dtype)
        for role in ROLES:
            dense[role] = self.slot_rows[role].index_select(0, at)
        # an incomplete group is sent behind its page, where nothing is stored
        self._encode(dense, cache, pending.page[:n, None], pending.first[:n])
        return dense

    def attend_steps(
        self,
        q: Tensor,
        dense: dict[Role, Tensor],
        cache: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        pending: PendingGroups,
        rules: Rules,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Attend with each of these tokens as a sequence of its own, by kernels; nothing synchronises.

        Parameters
        ----------
        q : Tensor ``[B, HQ, D]``
        dense : dict of role to Tensor ``[B, H, G, D]``
            As ``store_steps`` returned it.
        cache : Tensor uint8 ``[num_blocks, H, N, C]``
        table : Tensor int32 ``[B, M]``
        seq_lens : Tensor int32 ``[B]``
            Tokens up to the new one.
        pending : PendingGroups
            Updated for this step; its first B numbers are those of these tokens.
        rules : Rules
        workspace : Tensor float32, optional
            Of ``workspace_bytes``.

        Returns
        -------
        Tensor ``[B, HQ, D]`` of q's dtype.
        """
        n = q.shape[0]
        packed = pending.packed[:n]
        start = dense_start = None
        if rules.window:
            oldest = (seq_lens - rules.window).clamp_(min=0)
            start, dense_start = torch.minimum(oldest, packed), (oldest - packed).clamp_(min=0)
        read = StepTokens(
            self.pages(cache)[1], table, packed, start, dense_k=dense["key"], dense_v=dense["value"],
            dense_lens=pending.dense_len[:n], dense_start=dense_start, workspace=workspace,
        )  # fmt: skip
        return self.engine(cache.shape[2]).attend_step(q[:, :, None], read, rules.kernels)[:, :, 0]
