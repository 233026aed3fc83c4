"""The engine of CPUs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packedkv.attention import Seen
from packedkv.codec import ROLES, Role
from packedkv.kernels.constants import NO_CONSTANTS
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import Piece, attend, workspace_bytes
from packedkv.kernels.cpu.encode import encode, prepared
from packedkv.kernels.cpu.held import attend_held, ranges
from packedkv.kernels.cpu.library import EncodeArgsStruct
from packedkv.kernels.cpu.mean import CpuMean, cpu_mean
from packedkv.kernels.cpu.spec import cpu_spec
from packedkv.kernels.engine import Engine
from packedkv.kernels.flash import Flash
from packedkv.kernels.mean import Turned
from packedkv.ops.rope import Rotary
from packedkv.store.kept_rows import keep_rows
from packedkv.store.pages import PageStore
from packedkv.store.role import RoleState


class CpuEngine(Engine):
    """Reads and writes the pages of one layer with the CPU kernels; PyTorch writes what they do not."""

    refuses_at_once = True
    mean: CpuMean | None = None
    common: EncodeArgsStruct | None = None
    """What the calls of the encode kernels have in common; made at the first."""

    def _find(self) -> None:
        self.name = f"cpu {library.variant()}"
        self.spec = cpu_spec(self.codecs["key"], self.codecs["value"], self.head_dim, self.page_tokens)
        self.readers = {"key": self.spec.key, "value": self.spec.value}
        self.encoders = {role: self.spec.encoder(role) for role in ROLES}
        held = {role: codec.held_dtype(torch.float32) for role, codec in self.codecs.items()}
        self.rounded = tuple(role for role in ROLES if held[role] == torch.float16)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the spec, which holds functions, and what holds numbers of this process."""
        return {name: x for name, x in super().__getstate__().items() if name not in ("spec", "common")}

    def hold_without(self, mean: Tensor, rotary: Rotary, *, look: bool = True) -> None:
        """As ``Engine.hold_without``; a look costs nothing here."""
        self.mean = cpu_mean(mean, rotary)

    def encode(
        self,
        new: Mapping[Role, Tensor],
        store: PageStore,
        first: Tensor,
        bad: Tensor,
        less: Turned | None = None,
        kept: int = 0,
    ) -> None:
        """As ``Engine.encode``; float32 tokens are rounded to fp16 first where caches hold them so."""
        if not new:
            return
        if self.common is None:
            self.common = prepared(self.spec)
        encode(
            new, store.pages, store.table, first, bad, common=self.common, constants=self.writing,
            rounded=self.rounded, less=less,
        )  # fmt: skip
        if kept:
            self._keep(new, store, first, kept)

    def _keep(self, new: Mapping[Role, Tensor], store: PageStore, first: Tensor, kept: int) -> None:
        """Write the 16-bit rows of the new tokens; those behind the pages are dropped."""
        for role, x in new.items():
            at = first[:, None].long() + torch.arange(x.shape[2])
            column = (at // self.page_tokens).clamp(max=store.table.shape[1] - 1)
            slots = store.table.gather(1, column).long() * self.page_tokens + at % self.page_tokens
            keep_rows(store.layout, store.pages, role, x, slots.masked_fill(at >= store.capacity, -1), kept)

    def attend(
        self,
        q: Tensor,
        store: PageStore,
        seq_lens: Tensor,
        *,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
        start: Tensor | None = None,
        dense_k: Tensor | None = None,
        dense_v: Tensor | None = None,
        dense_lens: Tensor | None = None,
        dense_start: Tensor | None = None,
        dense_at: Tensor | None = None,
        workspace: Tensor | None = None,
        placed: Tensor | None = None,
    ) -> Tensor:
        """As ``Engine.attend``; the kernels have memory of their own, so ``workspace`` is not used."""
        batch = q.shape[0]
        at = _as_list(placed, batch, 0)
        first, last = _as_list(start, batch, 0), seq_lens.tolist()
        if dense_at is not None and dense_k is not None and dense_v is not None:
            dense_k, dense_v = (x.index_select(0, dense_at) for x in (dense_k, dense_v))
        dense = 0 if dense_k is None else dense_k.shape[2]
        dense_first, dense_last = _as_list(dense_start, batch, 0), _as_list(dense_lens, batch, dense)
        pieces: list[list[Piece]] = [
            [Piece(max(0, last[b] - first[b]), first[b], first[b], at[b] + first[b]), Piece(max(0, z - a), ~a, ~a)]
            for b, (a, z) in enumerate(zip(dense_first, dense_last, strict=True))
        ]
        return self._attend(
            q, store, pieces, dense_k=dense_k, dense_v=dense_v, scale=scale, softcap=softcap, sinks=sinks,
            mean=self.mean,
        )  # fmt: skip

    def attend_pages(
        self,
        q: Tensor,
        store: PageStore,
        length: int,
        *,
        scale: float,
        sinks: Tensor | None,
        seen: Seen,
        placed: Tensor | None = None,
        sink: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The sink is a piece of dense tokens, the rest a piece of the pages."""
        dense_k, dense_v = sink or (None, None)
        t = 0 if dense_k is None else dense_k.shape[2]
        pieces = [Piece(t, ~0, ~0), Piece(length - t, t, t, _as_list(placed, 1, 0)[0] + t)]
        return self._attend(
            q, store, [pieces], dense_k=dense_k, dense_v=dense_v, scale=scale, softcap=seen.softcap, sinks=sinks,
            seen=ranges(seen, 1, q.shape[2], length), mean=self.mean,
        )  # fmt: skip

    def attend_groups(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        store: PageStore,
        length: int,
        group: int,
        *,
        scale: float,
        sinks: Tensor | None,
        seen: Seen,
        flash: Flash | None = None,
    ) -> Tensor:
        """As ``Engine.attend_groups``, group by group; ``flash`` is a GPU's."""
        n, begin, out = q.shape[2], length - key.shape[2], torch.empty_like(q)
        for base in range(begin, length, group):
            first, last = max(base, length - n), min(base + group, length)
            rows = slice(first - length + n, last - length + n)
            out[:, :, rows] = self._attend(
                q[:, :, rows], store, [[Piece(base, 0, 0), Piece(last - base, begin - base - 1, begin - base - 1)]],
                dense_k=key, dense_v=value, scale=scale, softcap=seen.softcap, sinks=sinks,
                seen=ranges(seen, 1, last - first, last),
            )  # fmt: skip
        return out

    def _attend(self, q: Tensor, store: PageStore, pieces: list[list[Piece]], **options: Any) -> Tensor:
        """Attention over pieces of the pages and of dense tokens; options as ``attend.attend``."""
        key, value = self.reading["key"], self.reading["value"]
        return attend(q, store.pages, store.table, pieces, spec=self.spec, key=key, value=value, **options)[0]

    def attend_many(
        self,
        q: Tensor,
        roles: Mapping[Role, RoleState],
        store: PageStore,
        *,
        scale: float,
        sinks: Tensor | None,
        seen: Seen,
        placed: Tensor | None = None,
        recurring: bool = False,
    ) -> Tensor:
        """By ``held.attend_held``, which reads sink, run and window where they lie."""
        key, value = (self.reading.get(role, NO_CONSTANTS) for role in ROLES)
        runs = None
        if self.mean is not None and placed is not None:  # one run of slots, behind the sink
            state = roles["key"]
            first = state.runs[0][0] if state.runs else 0
            runs = [(state.sink.shape[2] + state.encoded + state.window.shape[2], placed + first - state.sink.shape[2])]
        return attend_held(
            q, roles, store, spec=self.spec, key=key, value=value, scale=scale, seen=seen, sinks=sinks,
            mean=self.mean, runs=runs,
        ).out  # fmt: skip

    def workspace_bytes(self, q: Tensor, store: PageStore, dense: bool) -> int:
        """Scratch of each thread, and of the merge."""
        return workspace_bytes(q)

    def many_workspace_bytes(self, q: Tensor, store: PageStore, packed: int, dense: int, flash: bool) -> int:
        """As ``Engine.many_workspace_bytes``; a mask comes on top."""
        return workspace_bytes(q) + 4 * dense * q.numel() // q.shape[2]


def _as_list(x: Tensor | None, batch: int, default: int) -> list[int]:
    """Numbers of an int32 ``[B]`` on the CPU."""
    return [default] * batch if x is None else x.tolist()
