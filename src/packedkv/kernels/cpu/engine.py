"""The engine of CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES
from packedkv.kernels.constants import NO_CONSTANTS
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, attend, concatenated, workspace_bytes
from packedkv.kernels.cpu.encode import encode, prepared
from packedkv.kernels.cpu.layer import ranges
from packedkv.kernels.cpu.mean import CpuMean, cpu_mean
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.engine import Engine
from packedkv.kernels.tokens import ChunkTokens, GroupTokens, NewTokens, Rules, StepTokens
from packedkv.ops.rope import Rotary
from packedkv.store.pages import PageStore, write_sink_rows


class CpuEngine(Engine):
    """Reads and writes the pages of one layer with the CPU kernels; PyTorch writes what they do not."""

    refuses_at_once = True
    mean: CpuMean | None = None
    common: Any = None
    """What the calls of the encode kernels have in common; made at the first."""

    def _find(self) -> None:
        self.name = f"cpu {library.variant()}"
        self.spec = cpu_spec(self.codecs["key"], self.codecs["value"], self.head_dim, self.page_tokens)
        self.readers, self.encoders = {"key": self.spec.key, "value": self.spec.value}, self.spec.encoders
        dtypes = {role: codec.held_dtype(torch.float32) for role, codec in self.codecs.items()}
        self.rounded = tuple(role for role in ROLES if dtypes[role] == torch.float16)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the spec, which holds functions, and what holds numbers of this process."""
        return {name: x for name, x in super().__getstate__().items() if name not in ("spec", "common")}

    def hold_without(self, mean: Tensor, rotary: Rotary, *, look: bool = True) -> None:
        self.mean = cpu_mean(mean, rotary)

    def encode(self, new: NewTokens, store: PageStore) -> None:
        if not new.x:
            return
        if self.common is None:
            self.common = prepared(self.spec)
        encode(new, store.pages, store.table, common=self.common, constants=self.writing, rounded=self.rounded)
        if new.sink:
            self._keep(new, store)

    def _keep(self, new: NewTokens, store: PageStore) -> None:
        """Write the 16-bit rows of the new tokens; those behind the pages are dropped."""
        for role, x in new.x.items():
            at = new.first[:, None].long() + torch.arange(x.shape[2])
            column = (at // self.page_tokens).clamp(max=store.table.shape[1] - 1)
            slots = store.table.gather(1, column).long() * self.page_tokens + at % self.page_tokens
            write_sink_rows(store.layout, store.pages, role, x, slots.masked_fill(at >= store.capacity, -1), new.sink)

    def attend_step(self, q: Tensor, tokens: StepTokens, rules: Rules) -> Tensor:
        batch = q.shape[0]
        at, first, last = _as_list(tokens.origin, batch), _as_list(tokens.start, batch), tokens.seq_lens.tolist()
        dense_k, dense_v = tokens.dense_k, tokens.dense_v
        if tokens.dense_at is not None and dense_k is not None and dense_v is not None:
            dense_k, dense_v = (x.index_select(0, tokens.dense_at) for x in (dense_k, dense_v))
        width = 0 if dense_k is None else dense_k.shape[2]
        dense_first, dense_last = _as_list(tokens.dense_start, batch), _as_list(tokens.dense_lens, batch, width)
        pieces: list[list[Piece]] = [
            [Piece(max(0, last[b] - first[b]), first[b], first[b], at[b] + first[b]), Piece(max(0, z - a), ~a, ~a)]
            for b, (a, z) in enumerate(zip(dense_first, dense_last, strict=True))
        ]
        # ``tokens.workspace`` is not used: the kernels have memory of their own
        dense = dense_k, dense_v
        return self._attend()(q, tokens.pages, tokens.table, pieces, rules, dense=dense, mean=self.mean)[0]

    def attend_chunk(self, q: Tensor, tokens: ChunkTokens, rules: Rules) -> Tensor:
        """Sink and window are pieces of dense tokens, the slots between them a piece of the pages."""
        batch, first, sink = q.shape[0], tokens.first, tokens.sink_tokens
        sinks, windows = tokens.sink or (None, None), tokens.window or (None, None)
        dense = concatenated(sinks[0], windows[0]), concatenated(sinks[1], windows[1])
        window = tokens.total - sink - (tokens.last - first)
        pieces = [
            [Piece(sink, ~0, ~0), Piece(tokens.last - first, first, first, at + first), Piece(window, ~sink, ~sink)]
            for at in _as_list(tokens.origin, batch)
        ]
        seen = ranges(rules.seen, batch, q.shape[2], tokens.total)
        return self._attend()(q, tokens.pages, tokens.table, pieces, rules, dense=dense, seen=seen, mean=self.mean)[0]

    def attend_groups(self, q: Tensor, tokens: GroupTokens, rules: Rules) -> Tensor:
        """Group by group."""
        n, length = q.shape[2], tokens.length
        begin, out, attended = length - tokens.dense[0].shape[2], torch.empty_like(q), self._attend()
        for base in range(begin, length, tokens.group):
            first, last = max(base, length - n), min(base + tokens.group, length)
            rows = slice(first - length + n, last - length + n)
            pieces = [Piece(base, 0, 0), Piece(last - base, begin - base - 1, begin - base - 1)]
            seen = ranges(rules.seen, 1, last - first, last)
            part = attended(q[:, :, rows], tokens.pages, tokens.table, [pieces], rules, dense=tokens.dense, seen=seen)
            out[:, :, rows] = part[0]
        return out

    def _attend(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return ``attend`` with the layer's kernels and constants."""
        key, value = (self.reading.get(role, NO_CONSTANTS) for role in ROLES)
        return partial(attend, spec=self.spec, key=key, value=value)

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        return workspace_bytes(q)

    def chunk_workspace_bytes(self, q: Tensor, heads: int, packed: int, dense: int, flash: bool) -> int:
        """As ``workspace_bytes``; a mask comes on top."""
        return workspace_bytes(q) + 4 * dense * q.numel() // q.shape[2]


def _as_list(x: Tensor | None, batch: int, default: int = 0) -> list[int]:
    return [default] * batch if x is None else x.tolist()
