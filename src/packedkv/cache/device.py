"""Lengths, dense tokens and positions of a static cache: on the device, where a step changes them without the host."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from packedkv.codec import Role
from packedkv.errors import UnsupportedError
from packedkv.ops.rope import Rotary
from packedkv.store.positions import NOT_CONSECUTIVE, angles_near, first_of
from packedkv.store.site import RoleState

BROKEN_ORDER = 3
"""Value of a cache's flag: the position of a step's token does not follow the cached ones."""


class DeviceLengths:
    """Lengths, sink and window of a static cache. Every tensor keeps its address while the batch stays the same.

    ``unit``: tokens that leave the window together.
    """

    fresh = True  # whether all lengths are known to be 0, so that the device is not read

    def __init__(
        self, roles: Mapping[Role, RoleState], batch: int, sink: int, window: int, unit: int, device: torch.device
    ) -> None:
        self.sink, self.unit, self.width = sink, unit, sink + window + unit
        self.last = torch.zeros(batch, dtype=torch.int32, device=device)  # slots written of each sequence
        self.first = torch.zeros_like(self.last)  # first live slot: always 0, because evicted slots are not used again
        self.bad = torch.zeros(1, dtype=torch.int32, device=device)  # the cache's error flag
        self.dense: Tensor | None = None  # with a sink, window or blocks: dense tokens of each sequence, int32 [B]
        self.buffers: dict[Role, Tensor] = {}  # dense tokens [B, H, width, D], sink first
        if self.width > 1:
            self._allocate(roles, batch)
        keep_addresses(self.last, self.first, self.bad)

    def _allocate(self, roles: Mapping[Role, RoleState], batch: int) -> None:
        device = self.last.device
        for role, state in roles.items():
            self.buffers[role] = state.sink.new_zeros(batch, state.sink.shape[1], self.width, state.sink.shape[3])
        self.dense = torch.zeros(batch, dtype=torch.int32, device=device)
        self.spare = torch.zeros(1, dtype=torch.int32, device=device)  # flag of an encode that may be dropped
        self.places = torch.arange(self.width, dtype=torch.int64, device=device)
        keep_addresses(*self.buffers.values(), self.dense, self.spare, self.places)

    def zero(self) -> None:
        """Set all lengths and the flag to 0."""
        self.last.zero_()
        self.bad.zero_()
        if self.dense is not None:
            self.dense.zero_()

    @property
    def tokens(self) -> Tensor:
        """Live tokens of each sequence, int32 ``[B]``."""
        return self.last if self.dense is None else self.last + self.dense

    def read(self, roles: Mapping[Role, RoleState]) -> int:
        """Set the host's runs, sink and window (one synchronisation); return the live tokens of a sequence."""
        last = count = 0
        if not self.fresh:
            numbers = self.last[:1] if self.dense is None else torch.cat([self.last[:1], self.dense[:1]])
            last, *dense = numbers.tolist()
            count = dense[0] if dense else 0
        for role, state in roles.items():
            state.runs = [(0, last)] if last else []
            if self.dense is not None:
                sink = min(count, self.sink)
                state.sink, state.window = self.buffers[role][:, :, :sink], self.buffers[role][:, :, sink:count]
        return last + count

    def write(self, roles: Mapping[Role, RoleState], batch: int) -> None:
        """Set lengths and buffers from the host's runs, sink and window."""
        if self.last.shape[0] != batch:  # else in place: captured graphs hold the addresses
            self.last, self.first = self.last.new_zeros(batch), self.last.new_zeros(batch)
        self.last.fill_(roles["key"].encoded)
        self.write_dense(roles, batch)

    def write_dense(self, roles: Mapping[Role, RoleState], batch: int) -> None:
        """Copy the host's sink and window to the buffers."""
        if self.dense is None:
            return
        # copies: source and destination may overlap
        parts = {role: torch.cat([state.sink, state.window], 2) for role, state in roles.items()}
        if self.dense.shape[0] != batch:
            self._allocate(roles, batch)
        for role, state in roles.items():
            count = parts[role].shape[2]
            self.buffers[role][:, :, :count] = parts[role]
            state.sink = state.window = parts[role].new_empty(*parts[role].shape[:2], 0, parts[role].shape[3])
            self.dense.fill_(count)

    def add_dense(self, new: Mapping[Role, Tensor]) -> tuple[dict[Role, Tensor], Tensor]:
        """Put one token behind the dense ones; return the oldest block, and whether it leaves: int32 ``[B]``.

        Only the device knows in which step the buffers are full; all sequences are alike.
        """
        assert self.dense is not None
        at = self.dense[:1].long().clamp_(max=self.width - 1)
        for role, x in new.items():
            self.buffers[role].index_copy_(2, at, x)
        full = (self.dense + 1 >= self.width).to(torch.int32)
        return {role: buffer[:, :, self.sink : self.sink + self.unit] for role, buffer in self.buffers.items()}, full

    def drop_oldest(self, full: Tensor) -> None:
        """Finish a step: where the buffers were full, the oldest block is in the pages."""
        assert self.dense is not None
        shift = (full[:1] * self.unit).long()
        order = (self.places + torch.where(self.places >= self.sink, shift, 0)).clamp_(max=self.width - 1)
        for buffer in self.buffers.values():
            buffer.copy_(buffer.index_select(2, order))
        self.last.add_(full * self.unit)
        self.dense.add_(1 - full * self.unit)


class StepPositions:
    """Positions of the slots of a static cache: slot s of a sequence has position ``origin + s``.

    A step compares the position that the model gives its token with the next one, on the device. ``like`` is int32
    ``[B]``; ``sink`` tokens lie before slot 0; ``rotary`` rotates the keys' mean (None: the keys keep it).
    """

    cropped = False  # whether tokens were removed since the last append
    newest: Tensor | None = None  # in a step, the position of its token, [B or 1, 1]

    def __init__(self, like: Tensor, sink: int, rotary: Rotary | None) -> None:
        self.sink, self.rotary, self.origin = sink, rotary, torch.full_like(like, sink)
        if rotary is not None:
            if rotary.frequencies.device != like.device:
                self.rotary = rotary = replace(rotary, frequencies=rotary.frequencies.to(like.device))
            keep_addresses(rotary.frequencies)
        keep_addresses(self.origin)

    def run(self, tokens: int) -> list[tuple[int, Tensor]]:
        """``Positions.runs`` of a cache of so many tokens."""
        return [(tokens, (self.origin - self.sink).long())] if tokens else []

    def begin(self, n: int, positions: Tensor | None) -> None:
        """Set the positions of the first n tokens."""
        if positions is None:
            positions = torch.arange(n, device=self.origin.device)[None]
        self.origin.copy_((first_of(positions) + self.sink).expand_as(self.origin))
        self.newest = positions if n == 1 else None

    def follow(self, n: int, positions: Tensor | None, tokens: Tensor, bad: Tensor, *, ordered: bool) -> None:
        """Add n tokens behind ``tokens`` (int32 ``[B]``) cached ones.

        ``ordered``: tokens out of order raise, a single one by ``bad``.
        """
        expected = self.origin - self.sink + tokens
        if positions is not None and len(expected) > 1 and (n > 1 or self.cropped):
            first = first_of(positions)  # sequences of padding alone are moved right before the new tokens
            self.origin.add_(torch.where((expected <= 1) & (first <= 0), first - expected, 0))
            expected, self.cropped = self.origin - self.sink + tokens, False
        self.newest = expected[:, None] if n == 1 else None
        if not ordered or positions is None:
            return
        if n > 1:
            if bool((first_of(positions) != expected).any()):
                raise UnsupportedError(NOT_CONSECUTIVE)
            return
        wrong = (positions[:, 0] != expected).any().to(torch.int32) * BROKEN_ORDER
        bad.copy_(torch.maximum(bad, wrong))
        self.newest = positions

    def angles(self, count: int, last: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """``Rotary.angles`` of the ``count`` tokens that leave the window for the slots from ``last`` on."""
        assert self.rotary is not None
        if self.newest is None:
            ahead = torch.arange(count, device=self.origin.device)
            return self.rotary.angles((self.origin + last)[:, None] + ahead)
        return angles_near(self.newest, self.rotary, 1 - count - window, count)

    def select(self, index: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        origin = self.origin[index]
        self.origin = self.origin.copy_(origin) if origin.shape == self.origin.shape else origin


def keep_addresses(*tensors: Tensor) -> None:
    """Mark tensors as static for torch.compile: compiled graphs rely on their addresses."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
