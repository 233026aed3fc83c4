"""Keys or values of one layer: codec, constants, dense sink, slots of the pages, dense window."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Payload, Role, Site, saturated
from packedkv.errors import FitError
from packedkv.store.pages import PageStore


@dataclass(eq=False, repr=False)
class RoleSite:
    """Codec and constants of the keys, or of the values, of one layer."""

    role: Role
    codec: Codec  # for the model's dtype (``for_dtype``)
    site: Site
    params: Params | None = None  # None: they are fitted on the first prefill
    seeded: bool = False  # whether constants that need no sample follow from codec and site alone: not those of a file

    def check_batch(self, batch: int) -> None:
        """Raise FitError unless the constants are of one sequence or of ``batch``."""
        sizes = {len(x) for x in (self.params or {}).values() if x.ndim} - {1, batch}
        if sizes:
            raise FitError(
                f"the {self.role} constants of layer {self.site.layer} are of {sizes.pop()} sequences, the cache has "
                f"{batch}; pass constants of one, or of the batch."
            )

    def encode(self, x: Tensor) -> Payload:
        """Encode whole blocks of tokens ``[B, H, n, D]``, model basis."""
        assert self.params is not None
        return self.codec.encode(self.codec.to_code(x.float(), self.params), self.params)

    def read(self, store: PageStore, first: int, last: int, dtype: torch.dtype, mean: Tensor | None = None) -> Tensor:
        """Dequantize the slots ``[first, last)`` of every sequence: ``[B, H, last - first, D]`` of ``dtype``.

        ``mean`` broadcasts to that shape and is added; it was subtracted before encoding.
        """
        skip = first % self.codec.block_tokens
        assert self.params is not None
        x = self.codec.decode(store.read(self.role, first, last), self.params)
        x = self.codec.from_code(x, self.params)[:, :, skip : skip + last - first]
        return saturated(x if mean is None else x + mean, dtype)


class RoleState(RoleSite):
    """Keys or values of a layer: dense sink and window ``[B, H, t, D]`` (model basis), live runs of slots in pages.

    A slot is never rewritten while its token is cached: cropping or evicting inside a block leaves dead slots.
    """

    def __init__(self, of: RoleSite, sink: Tensor, window: Tensor) -> None:
        super().__init__(of.role, of.codec, of.site, of.params, of.seeded)
        self.sink, self.window = sink, window
        self.runs: list[tuple[int, int]] = []
        self.remembered: Tensor | None = None

    @property
    def encoded(self) -> int:
        """Live encoded tokens."""
        return sum(b - a for a, b in self.runs)

    @property
    def next_slot(self) -> int:
        """Slot of the next block to write: the first block boundary after the last live slot."""
        unit = self.codec.block_tokens
        return -(-self.runs[-1][1] // unit) * unit if self.runs else 0

    def extend(self, slots: int) -> None:
        """Mark ``slots`` more slots live from ``next_slot`` on."""
        first = self.next_slot
        if self.runs and self.runs[-1][1] == first:
            self.runs[-1] = (self.runs[-1][0], first + slots)
        else:
            self.runs.append((first, first + slots))

    def write(self, store: PageStore, x: Tensor, mean: Tensor | None = None) -> None:
        """Encode whole blocks of tokens ``[B, H, n, D]``, model basis, less ``mean``, into the next slots."""
        payload, n = self.encode(x if mean is None else x.float() - mean), x.shape[2]
        store.ensure(self.next_slot + n, exact=n > 1 and not self.runs)
        store.write(self.role, self.next_slot, payload)

    def remove(self, first: int, last: int) -> None:
        """Drop the encoded tokens ``[first, last)``, counted among the live encoded ones."""
        live, at = [], 0
        for a, b in self.runs:
            for lo, hi in ((0, first), (last, at + b - a)):
                x, y = a + max(lo - at, 0), a + min(hi, at + b - a) - at
                if x < y:
                    live.append((x, y))
            at += b - a
        self.runs = live

    @property
    def dense_tokens(self) -> int:
        """Number of dense tokens."""
        return self.sink.shape[2] + self.window.shape[2]

    # -- dense tokens ----------------------------------------------------------------------------------------------

    def to_sink(self, x: Tensor, room: int) -> Tensor:
        """Put the first ``room`` of new tokens into the sink; return the others."""
        if (count := min(max(room, 0), x.shape[2])) == 0:
            return x
        first = x.narrow(2, 0, count)
        self.sink = torch.cat([self.sink, first], 2) if self.sink.shape[2] else first.clone()
        return x.narrow(2, count, x.shape[2] - count)

    def pending(self, x: Tensor) -> Tensor:
        """Tokens of the window, then ``x``."""
        return torch.cat([self.window, x], 2) if self.window.shape[2] else x

    def to_window(self, x: Tensor, count: int) -> Tensor:
        """Put new tokens into the window; return the oldest ``count`` tokens, which leave it."""
        old, width = self.window, self.window.shape[2]
        total = width + x.shape[2]
        if count == total:
            if not width:
                return x
            self.window = no_tokens(x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)
            return torch.cat([old, x], 2)
        if width and count <= width:  # each copied once: most steps
            self.window = torch.cat([old.narrow(2, count, width - count), x], 2)
            return old.narrow(2, 0, count)
        pending = self.pending(x)
        # a clone: a view would keep the prefill's 16-bit tensor alive
        self.window = pending.narrow(2, count, total - count).clone()
        return pending.narrow(2, 0, count)


def empty_roles(sites: Mapping[Role, RoleSite], like: Tensor) -> dict[Role, RoleState]:
    """Return the state of an empty layer for tokens ``[B, H, n, D]`` of this batch, dtype and device.

    Raises FitError if the constants are of another number of sequences.
    """
    batch, heads = like.shape[:2]
    roles = {}
    for role, of in sites.items():
        of.check_batch(batch)
        empty = no_tokens(batch, heads, of.site.head_dim, of.codec.held_dtype(like.dtype), like.device)
        roles[role] = RoleState(of, empty, empty)
    return roles


@lru_cache(maxsize=64)
def no_tokens(batch: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty sink or window, shared by the layers of a model."""
    with torch.inference_mode(False):
        return torch.empty(batch, heads, 0, head_dim, dtype=dtype, device=device)
