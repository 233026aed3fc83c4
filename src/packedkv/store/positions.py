"""Positions of cached tokens, by which RoPE rotated their keys."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from packedkv.errors import UnsupportedError
from packedkv.ops.rope import Rotary

NOT_CONSECUTIVE = (
    "the positions of the new tokens are not consecutive, or do not follow those held (padding in the middle of a "
    "sequence, images or packed sequences?), which keys held without their mean before RoPE need; use mean=post or "
    "mean=none, or attention='decoded' for such padding."
)


T = TypeVar("T")


def consecutive(positions: Tensor | None) -> bool:
    """Whether each row of ``positions [B, n]`` counts up by one, padding at its start aside; None: no."""
    if positions is None or positions.shape[1] == 0:
        return positions is not None
    return _once(positions, "in order", lambda: not int(_call_of(positions).broken))


class Positions:
    """Positions of the live tokens of one layer, as runs of consecutive positions: a few integers, not one per token.

    Sequences of a batch may begin at positions of their own (left padding). Padding may have any position.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, Tensor]] = []  # tokens, and the position of the first: int64 [B], or [1] for all

    def __len__(self) -> int:
        return sum([count for count, _ in self.runs])

    def append(self, positions: Tensor) -> None:
        """Add the positions of new tokens, ``[B or 1, n]``; UnsupportedError if they are not consecutive."""
        n = positions.shape[1]
        if n == 0:
            return
        if not consecutive(positions):
            raise UnsupportedError(NOT_CONSECUTIVE)
        first = first_of(positions).long()
        self._move_padding(first)
        if self.runs and torch.equal(self.runs[-1][1] + self.runs[-1][0], first):
            self.runs[-1] = (self.runs[-1][0] + n, self.runs[-1][1])
        else:
            self.runs.append((n, first))

    def _move_padding(self, first: Tensor) -> None:
        """Place rows that hold nothing but padding right before ``first [B or 1]``, where they reach beyond it."""
        if not self.runs:
            return
        newest = [start + (count - 1) for count, start in self.runs]
        padding = torch.stack(torch.broadcast_tensors(first, *newest)).amax(0) <= 0
        move = torch.where(padding, first - newest[-1] - 1, 0).clamp_max(0)
        if bool(move.any()):
            self.runs = [(count, start + move) for count, start in self.runs]

    def padding(self) -> Tensor:
        """How many of the first tokens are padding: int64 ``[B]``, or ``[1]`` for all."""
        padding, leading = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
        for count, start in self.runs:
            more = (-start).clamp(0, count)
            padding = padding.to(more.device) + torch.where(leading.to(more.device), more, 0)
            leading = leading.to(more.device) & (more == count)
        return padding

    def next(self, n: int, first: int, device: torch.device) -> Tensor:
        """Positions of n tokens that follow the last run, or ``first`` where there is none: int64 ``[B or 1, n]``."""
        count, start = self.runs[-1] if self.runs else (0, torch.tensor([first], device=device))
        return (start + count)[:, None] + torch.arange(n, device=device)

    def extend(self, n: int) -> None:
        """Add n tokens that continue the last run, without reading their positions."""
        self.runs[-1] = (self.runs[-1][0] + n, self.runs[-1][1])

    def of(self, first: int, last: int) -> Tensor:
        """Positions of the live tokens ``[first, last)``: int64 ``[B, last - first]``, or ``[1, last - first]``."""
        if first == last:
            return torch.empty(1, 0, dtype=torch.long)
        parts = [start[:, None] + torch.arange(count, device=start.device) for count, start in self.within(first, last)]
        rows = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(rows, -1) for part in parts], 1)

    def remove(self, first: int, last: int) -> None:
        """Forget the live tokens ``[first, last)``."""
        self.runs = [*self.within(0, first), *self.within(last, len(self))]

    def select(self, indices: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        self.runs = [(n, start if len(start) == 1 else start.index_select(0, indices)) for n, start in self.runs]

    def within(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        """Runs of the live tokens ``[first, last)``: how many, and the position of the first."""
        at = 0
        for count, start in self.runs:
            lo, hi = max(first, at), min(last, at + count)
            if lo < hi:
                yield hi - lo, start + (lo - at)
            at += count


class _Call(NamedTuple):
    """Positions of one call's tokens on their device."""

    first: Tensor  # int32 [B]: of the first token, counted back from the last one; padding has positions below 0
    broken: Tensor  # int32 [1]: not 0 if they do not count up by one, padding aside


COMPUTED = "packedkv_computed"
"""Attribute of a positions tensor: what its layers share."""


def shared(positions: Tensor) -> Tensor:
    """Let all layers that get this tensor, the layers of one forward pass, share what is computed of it."""
    computed_of(positions)
    return positions


def computed_of(positions: Tensor) -> dict[Any, Any]:
    """Return what layers share of this tensor, by name."""
    computed: dict[Any, Any] | None = getattr(positions, COMPUTED, None)
    if computed is None:
        computed = {}
        setattr(positions, COMPUTED, computed)
    return computed


def _once(positions: Tensor, name: Hashable, compute: Callable[[], T]) -> T:
    """Compute something of a tensor once for all layers that share it; of another tensor each time."""
    computed: dict[Any, T] = getattr(positions, COMPUTED, {})
    if (value := computed.get(name)) is None:
        value = computed[name] = compute()
    return value


def part_of(positions: Tensor, first: int, last: int) -> Tensor:
    """Return ``positions[:, first:last]``; layers that share the tensor share the part."""
    return _once(positions, (first, last), lambda: shared(positions[:, first:last]))


def _call_of(positions: Tensor) -> _Call:
    return _once(positions, "call", lambda: _read(positions))


def _read(positions: Tensor) -> _Call:
    """Compare positions ``[B, n]`` with those that count up to the last one.

    The positions of padding mean nothing. Padding is what would lie before position 0, and a row's first tokens while
    all of them have position 0, or all of them 1, as models number it. Of a row of nothing else the last token is taken
    for one at position 0; the next call shows whether it is padding.
    """
    n = positions.shape[1]
    first = (positions[:, -1] - (n - 1)).to(torch.int32)
    if n == 1:
        return _Call(first, first.new_zeros(1))
    expected = first[:, None] + torch.arange(n, device=positions.device)
    alike = ((positions == positions[:, :1]) & (positions <= 1)).to(torch.int32).cumprod(1) > 0
    wrong = ((positions != expected) & (expected >= 0) & ~alike).any().to(torch.int32).view(1)
    return _Call(torch.where(alike[:, -1], 1 - n, first).to(torch.int32), wrong)


def first_of(positions: Tensor) -> Tensor:
    """Position of the first of tokens in order, from the last one back: int32 ``[B or 1]``."""
    return _call_of(positions).first


def angles_near(positions: Tensor, rotary: Rotary, offset: int, count: int) -> tuple[Tensor, Tensor]:
    """``Rotary.angles`` of ``count`` tokens, the first of them ``offset`` behind the first of ``positions``."""

    def angles() -> tuple[Tensor, Tensor]:
        near = torch.arange(offset, offset + count, device=positions.device)
        return rotary.angles(first_of(positions)[:, None] + near)

    return _once(positions, (rotary, offset, count), angles)


def angles_at(positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """``Rotary.angles`` of positions in any order."""
    return _once(positions, rotary.name, lambda: rotary.angles(positions))


@dataclass(eq=False)
class SlotPositions:
    """Positions of the slots of a layer on a GPU, for kernels; only ``least`` synchronises.

    Slot s of a sequence has position ``origin + s``. What does not go on where the last call ended raises ``broken``.
    Layers that begin with the same ``shared`` positions have one, so that each step's check and angles are computed
    once.
    """

    origin: Tensor  # int32 [B]
    broken: Tensor  # int32 [1]
    padded: bool = True  # whether sequences may hold nothing but padding: then several new tokens may move it
    is_cropped: bool = False  # whether tokens were removed since the last call: a single new token may move padding too
    freed: int = 0  # by how much the numbers of the slots are lower than at first, because pages before them were freed
    _angles: tuple[Rotary, int, int, tuple[Tensor, Tensor]] | None = field(default=None, init=False)
    _parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)  # of these angles
    _newest: dict[str, tuple[Hashable, Any]] = field(default_factory=dict, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the constructor's arguments, without what was computed from them."""
        return SlotPositions, (self.origin, self.broken, self.padded, self.is_cropped, self.freed)

    def _once(self, name: str, key: Hashable, compute: Callable[[], T]) -> T:
        """Compute something once for all layers of a pass: the newest key of each name is kept."""
        if (newest := self._newest.get(name)) is None or newest[0] != key:
            newest = self._newest[name] = key, compute()
        value: T = newest[1]
        return value

    @classmethod
    def starting(cls, positions: Tensor, batch: int, sink: int) -> "SlotPositions":
        """Return those of a cache that begins at ``positions [B or 1, n]``; ``sink`` tokens lie before slot 0."""

        def begin() -> SlotPositions:
            first = _call_of(positions).first
            origin = (first + sink).expand(batch).contiguous()
            with torch.inference_mode(False):  # written to by later calls, in whatever mode
                broken = torch.zeros(1, dtype=torch.int32, device=first.device)
            return cls(origin, broken, padded=positions.shape[0] > 1)

        return _once(positions, ("slots", batch, sink), begin)

    def follow(self, positions: Tensor, slot: int, check: bool) -> "SlotPositions":
        """Positions of the slots once tokens at ``positions [B or 1, n]`` follow, the first of them in slot ``slot``.

        Sequences that hold nothing but padding are moved right before the new tokens. With ``check``, tokens that are
        not in order raise ``broken``.
        """
        n = positions.shape[1]
        return _once(positions, (self, slot), lambda: self._follow(_call_of(positions), n, slot, check))

    def _follow(self, call: _Call, n: int, slot: int, check: bool) -> "SlotPositions":
        expected, after = self.origin + slot, self
        if self.padded and (n > 1 or self.is_cropped):
            move = torch.where((expected <= 1) & (call.first <= 0), call.first - expected, 0).to(torch.int32)
            expected, after = expected + move, replace(self, origin=self.origin + move, is_cropped=False)
        if not check:
            return after
        wrong = (call.first != expected).any().to(torch.int32).view(1)
        torch.maximum(self.broken, torch.maximum(wrong, call.broken), out=self.broken)
        return after

    def cropped(self) -> "SlotPositions":
        """The same, after tokens were removed; the same object for layers that share this."""
        if not self.padded or self.is_cropped:
            return self
        return self._once("cropped", None, lambda: replace(self, is_cropped=True))

    def begin(self, slot: int) -> Tensor:
        """Positions of one slot, int64 ``[B]``; the same tensor for layers of one pass, never written to."""
        return self._once("begin", slot, lambda: (self.origin + slot).long())

    def angles(self, rotary: Rotary, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """``Rotary.angles`` of ``count`` slots from ``slot`` on; the same tensors for layers of one pass."""
        last = self._angles
        if last is None or last[0] is not rotary or not last[1] <= slot <= slot + count <= last[1] + last[2]:
            last = self._angles = rotary, slot, count, rotary.angles(self.of(slot, count))
            self._parts = {(slot, count): last[3]}
        if (angles := self._parts.get((slot, count))) is None:
            cosines, sines = (part.narrow(1, slot - last[1], count) for part in last[3])
            angles = self._parts[slot, count] = cosines, sines
        return angles

    def angles_back(self, rotary: Rotary, count: int) -> tuple[Tensor, Tensor]:
        """``Rotary.angles_back`` of the first ``count`` slots; the same tensors for layers of one pass."""
        return self._once("back", (rotary, count), lambda: rotary.angles_back(self.of(0, count)))

    @cached_property
    def padding(self) -> Tensor:
        """How many slots from the first one on hold left padding, int32 ``[B]``."""
        return (-self.origin).clamp_min(0)

    @cached_property
    def least(self) -> int:
        """Smallest of ``origin``; read from the device once for all layers that share this."""
        return int(self.origin.min()) if len(self.origin) else 0

    def of(self, slot: int, count: int) -> Tensor:
        """Positions of ``count`` slots from ``slot`` on, ``[B, count]``."""
        return self.origin[:, None] + torch.arange(slot, slot + count, device=self.origin.device)

    def moved(self, slots: int) -> "SlotPositions":
        """The same tokens in slots with numbers that are lower by ``slots``."""
        return replace(self, origin=self.origin + slots, freed=self.freed + slots) if slots else self

    def select(self, indices: Tensor) -> "SlotPositions":
        """These sequences of the batch, in this order."""
        return replace(self, origin=self.origin.index_select(0, indices))
