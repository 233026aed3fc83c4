"""The packed store of one layer: a pool of pages and a block table, as engines have them and kernels read them."""

import math
import mmap
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, ROLES, Payload, Role, storage_dtype
from packedkv.layout import PageLayout

HUGE = 2 << 20
"""Bytes of a huge page of x86 and, with small pages of 4 KiB, of ARM; elsewhere the advice is void."""


class PageStore:
    """Pages that grow as slots are written: slot ``s`` of sequence ``b`` is at ``s % P`` in page ``table[b, s // P]``.

    ``pages`` is uint8 ``[num_pages, H, page_bytes]``, ``table`` int32 ``[B, M]``. ``capacity``: slots to
    allocate at once; 0 grows on demand, by 1/32 (at least one page).
    """

    def __init__(self, layout: PageLayout, batch: int, heads: int, device: torch.device, capacity: int = 0) -> None:
        self.layout, self.heads, self.in_order = layout, heads, True
        self.growth_bytes = 0  # largest pool that was copied to grow: both copies existed for a moment
        columns = -(-capacity // layout.page_tokens)
        self.table = _ids(0, batch, columns, device, stream_of(device))
        # zeroed, not empty: unused slots must not hold NaN scales that a masked kernel could multiply by 0
        self.pages = zeroed_pool((batch * columns, heads, layout.page_bytes), device)

    @classmethod
    def over(cls, layout: PageLayout, pages: Tensor, table: Tensor) -> "PageStore":
        """Return a store over pages that the caller owns."""
        store = cls.__new__(cls)
        store.layout, store.heads, store.pages, store.table = layout, pages.shape[1], pages, table
        store.growth_bytes, store.in_order = 0, False
        return store

    @property
    def capacity(self) -> int:
        """Slots per sequence that fit without growing."""
        return self.table.shape[1] * self.layout.page_tokens

    def ensure(self, slots: int, *, exact: bool = False) -> None:
        """Grow so that ``slots`` slots per sequence fit; ``exact`` skips the reserve (a prefill)."""
        missing = -(-(slots - self.capacity) // self.layout.page_tokens)
        if missing > 0:
            self._grow(missing if exact else max(missing, self.table.shape[1] // 32))

    def _grow(self, columns: int) -> None:
        batch, first = self.table.shape[0], self.pages.shape[0]
        grown = zeroed_pool((first + batch * columns, *self.pages.shape[1:]), self.pages.device)  # as in ``__init__``
        if first:
            self.growth_bytes = max(self.growth_bytes, self.pages.nbytes)
            grown[:first] = self.pages
        self.pages = grown
        if batch == 1 and self.in_order:
            first, columns = 0, self.pages.shape[0]
        ids = _ids(first, batch, columns, self.table.device, stream_of(self.table.device))
        self.table = torch.cat([self.table, ids], 1) if first else ids

    def write(self, role: str, first_slot: int, payload: Payload) -> None:
        """Write the blocks of ``payload`` (fields ``[B, H, M, *shape]``) from ``first_slot`` on."""
        slots = self._slots(role, first_slot, next(iter(payload.values())).shape[2])
        write_blocks(self.layout, self.pages, role, slots, payload)

    def read(self, role: str, first_slot: int, last_slot: int) -> Payload:
        """Copy out the blocks that cover slots ``[first_slot, last_slot)``; fields ``[B, H, M, *shape]``."""
        unit = self.layout.side(role).block_tokens
        count = -(-last_slot // unit) - first_slot // unit
        page, block = _where(self.layout, role, self._slots(role, first_slot, count))
        return {
            plane.field.name: self.layout.view_plane(self.pages, plane)[page, :, block].transpose(1, 2)
            for plane in self.layout.planes
            if plane.role == role
        }

    def _slots(self, role: str, first_slot: int, count: int) -> Tensor:
        """Slots of the pool ``[B, M]`` at which ``count`` blocks begin, the first one with ``first_slot`` in it."""
        unit, tokens = self.layout.side(role).block_tokens, self.layout.page_tokens
        place = (torch.arange(count, device=self.table.device) + first_slot // unit) * unit
        return self.table[:, place // tokens].long() * tokens + place % tokens

    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (with repeats), each with pages of its own."""
        batch, columns = len(indices), self.table.shape[1]
        ids = self.table[indices.to(self.table.device)].long()
        self.pages = self.pages[ids.flatten()]
        fresh = torch.arange(batch * columns, device=self.table.device, dtype=torch.int32)
        self.table, self.in_order = fresh.view(batch, columns), True

    def keep(self, columns: list[int]) -> None:
        """Keep these columns of pages of every sequence, in this order; free the others."""
        self.table = self.table[:, columns]
        self.select(torch.arange(self.table.shape[0]))

    def put_last(self, first: int, last: int) -> None:
        """Put the columns ``[first, last)`` behind all others, which move up; pages and table keep their addresses."""
        if self.in_order:  # until now caches may share it
            with torch.inference_mode(False):
                self.table, self.in_order = self.table.clone(), False
        behind = self.table[:, first:]
        behind.copy_(behind.roll(first - last, 1))

    def trim(self, slots: int) -> None:
        """Free the pages behind the first ``slots`` slots."""
        columns = -(-slots // self.layout.page_tokens)
        if columns < self.table.shape[1]:
            self.keep(list(range(columns)))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the store."""
        yield self.pages
        yield self.table


@lru_cache(maxsize=16)
def _ids(first: int, batch: int, columns: int, device: torch.device, stream: int) -> Tensor:
    """Return page ids from ``first`` on, ``[batch, columns]``: read-only, shared by the layers of a model."""
    with torch.inference_mode(False):
        ids = torch.arange(first, first + batch * columns, dtype=torch.int32, device=device)
        return ids.view(batch, columns)


def stream_of(device: torch.device) -> int:
    """Return the handle of torch's current stream; other streams do not synchronise with its tensors."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))  # that of ``current_stream``, in a tenth of its time


def write_blocks(layout: PageLayout, pages: Tensor, role: str, slots: Tensor, payload: Payload) -> None:
    """Write blocks to any places of a pool, ``pages`` uint8 ``[num_pages, H, page_bytes]``.

    ``slots`` int64 ``[B, M]``: where each block begins; slot s of the pool is place ``s % P`` of page ``s // P``. The
    fields of ``payload`` are ``[B, H, M, *shape]``.
    """
    for plane in layout.planes:
        if plane.role == role:
            page, block = _where(layout, role, slots)
            # advanced indices that are not adjacent put their axes first: [B, M, H, *shape]
            layout.view_plane(pages, plane)[page, :, block] = payload[plane.field.name].transpose(1, 2)


def _where(layout: PageLayout, role: str, slots: Tensor) -> tuple[Tensor, Tensor]:
    return slots // layout.page_tokens, slots % layout.page_tokens // layout.side(role).block_tokens


def zeroed_pool(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return uint8 zeros ``[*shape]``; a CPU takes memory from the system only when it is written to.

    Attention reads every page of a long context once per step. With memory in pages of 4 KiB, address translation takes
    a tenth to a quarter of the time. Linux therefore gets the advice to use huge pages.
    """
    size = math.prod(shape)
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    # Linux aligns whole numbers of huge pages; the last one, in part unused, stays in small pages
    memory = mmap.mmap(-1, -(-size // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel built without them: small pages serve
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size // HUGE * HUGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(shape)


def rows_bytes(sink: int, head_dim: int) -> int:
    """Bytes of the rows of ``sink`` tokens of one head, keys and values."""
    return len(ROLES) * 2 * sink * head_dim


def sink_rows(layout: PageLayout, pages: Tensor, sink: int, dtype: torch.dtype) -> Tensor:
    """View the rows of all pages as ``dtype`` (fp16 or bf16), ``[num_pages, H, 2, sink, D]``: keys, then values.

    An engine's page has its first tokens in 16 bit behind its planes. Attention reads the rows of a sequence's first
    page instead of their codes; all pages have rows, so that a page's bytes depend on its own tokens alone.
    ``pages``: uint8 ``[num_pages, H, bytes]``, longer than the layout by ``rows_bytes`` or more.
    """
    head_dim = layout.key.head_dim
    raw = pages[..., layout.page_bytes : layout.page_bytes + rows_bytes(sink, head_dim)]
    return raw.view(dtype).unflatten(-1, (len(ROLES), sink, head_dim))


def write_sink_rows(layout: PageLayout, pages: Tensor, role: Role, x: Tensor, slots: Tensor, sink: int) -> None:
    """Write the rows of those new tokens that are among the first of their page; this synchronises on a GPU.

    ``x [B, H, n, D]`` is in the model basis. A row with NaN, Inf or a magnitude above 65504 is stored as zeros, as its
    codes are. ``slots`` int64 ``[B, n]`` are as in ``pages.write_blocks``; below 0: the token is not stored.
    """
    sequence, token = ((slots >= 0) & (slots % layout.page_tokens < sink)).nonzero(as_tuple=True)
    if not len(token):
        return
    where, x = slots[sequence, token], x[sequence, :, token]
    stored = x.to(storage_dtype(x.dtype)).masked_fill((~(x.abs() <= FP16_MAX)).any(-1, keepdim=True), 0.0)
    rows = sink_rows(layout, pages, sink, stored.dtype)
    rows[where // layout.page_tokens, :, ROLES.index(role), where % layout.page_tokens] = stored
