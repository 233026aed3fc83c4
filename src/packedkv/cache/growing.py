"""GrowingCache: a cache for the fused kernels whose pages grow; the host knows every length.

Kernels read lengths from device tensors that all layers share: a step writes them once per model, not once per layer,
and there is no device state to keep consistent with the host's.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.cache.device import DeviceCache
from packedkv.checks import check_tensors
from packedkv.codec import ROLES, Params, Role
from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda.fit import Sample
from packedkv.kernels.engine import Engine
from packedkv.kernels.mean import Turned
from packedkv.ops.precision import without_modes
from packedkv.store.pages import stream_of
from packedkv.store.positions import NOT_CONSECUTIVE, SlotPositions
from packedkv.store.role import RoleState
from packedkv.store.site import Removed


class State(NamedTuple):
    """What an append replaces, without copies.

    Sink and window are new tensors after an append; slots behind the end are written again by the next one.
    """

    roles: list[tuple[Role, Tensor, Tensor, list[tuple[int, int]], Params | None]]
    mean: Tensor | None
    start: int
    length: int
    unchecked: bool
    positions: list[tuple[int, Tensor]]
    slots: tuple[SlotPositions | None, int]


class Leaving(NamedTuple):
    """Half of an append: tokens that leave the window, in whole blocks, by role; how many came.

    Parameters
    ----------
    new : dict of Tensor
    tokens : int
    flag : Tensor int32 ``[1]``, optional
        As in ``append``.
    flagged : bool
        Whether the encoder says at once that the token cannot be held.
    placed : tuple
        Runs of positions, positions of the slots and ``slots_freed`` before the append.
    was_broken : bool
        Whether positions were out of order before a token that may be refused at once.
    """

    new: dict[Role, Tensor]
    tokens: int
    flag: Tensor | None
    flagged: bool
    placed: tuple[list[tuple[int, Tensor]], SlotPositions | None, int]
    was_broken: bool
    first: bool


class GrowingCache(DeviceCache):
    """The packed cache of one layer, served by the fused kernels; pages are allocated as tokens come.

    Parameters
    ----------
    As ``DeviceCache``, without a capacity.
    """

    unchecked = False
    """Whether a single token was appended since the device's flag was last checked."""

    slots: SlotPositions | None = None
    """Positions of the slots, where keys are held without their mean."""
    slots_freed = 0
    """By how much the numbers of the slots are lower than they were, because pages before them were freed."""

    def reset(self) -> None:
        """Forget everything, the allocation included."""
        self.engine = self.bad = self.slots = None
        self.unchecked = False
        super().reset()

    @property
    def seq_lens(self) -> Tensor | None:  # type: ignore[override]
        """Slots written per sequence, int32 ``[B]`` on the device; None until the first append."""
        return None if self.store is None else self._device_lengths()[0]

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> None:
        """As ``DeviceCache.append``; pages grow where they are full.

        With a mean before RoPE the device compares ``positions`` with those of the tokens held. Several tokens that are
        not in order are refused, and nothing is stored; a single one, or several with a ``flag``, raise another flag,
        which ``check`` reads. By default positions count up from the tokens held.
        """
        self.end_append(self.begin_append(keys, values, positions, flag=flag))

    @without_modes
    def begin_append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> Leaving:
        """First half of ``append``: tokens go to the sink and the window, and constants that are missing are fitted.

        Fits of several layers, of which each began, are launched together by the first ``end_append``.
        """
        n = keys.shape[2]
        if n != 1 and flag is None:
            earlier = (self.bad,) if self.unchecked and self.bad is not None else ()
            self.refuse(*check_tensors(keys, values, *earlier))  # one synchronisation
        self.check_shapes(keys, values)
        if self.store is not None:
            return self._begin(keys, values, positions, flag, first=False)
        try:
            self._start(keys, values, self.reserve)  # pages come with the tokens that leave, which may have to wait
            return self._begin(keys, values, positions, flag, first=True)
        except BaseException:  # refused first tokens leave no batch and no dtype behind
            self.reset()
            raise

    def _begin(
        self, keys: Tensor, values: Tensor, positions: Tensor | None, flag: Tensor | None, first: bool
    ) -> Leaving:
        assert self.engine is not None
        n = keys.shape[2]
        refused = n == 1 and self.engine.refuses_at_once
        flagged = refused and self._flags_now(keys)
        if refused and not flagged:
            check_tensors(keys, values)
        self.unchecked |= n == 1 and not refused
        placed = list(self.positions.runs), self.slots, self.slots_freed
        was_broken = flagged and self.slots is not None and bool(self.slots.broken)
        if self.places_tokens and n:
            self._place(keys, positions, now=n != 1 and flag is None)
        new: dict[Role, Tensor] = {"key": keys, "value": values} if flagged else self._held(keys, values)
        if self.holds_dense or not self.is_fitted:
            new = self._pass_dense(new, self._waits())
        return Leaving(new, n, flag, flagged, placed, was_broken, first)

    @without_modes
    def end_append(self, leaving: Leaving) -> None:
        """Second half of ``append``: tokens that leave the window are encoded."""
        try:
            self._end(leaving)
        except BaseException:
            if leaving.first:
                self.reset()
            raise

    def _end(self, leaving: Leaving) -> None:
        assert self.store is not None
        assert self.engine is not None
        self.engine.launch_fits()
        new, n, flag, flagged, placed, was_broken, _ = leaving
        if (count := new["key"].shape[2]) == 0:
            self.length += n
            return
        runs = self.roles["key"].runs
        last = runs[-1][1] if runs else 0
        self.store.ensure(last + count, exact=n > 1)
        self._renumber(last)
        if flag is None and (flag := self.bad) is None:
            flag = self.bad = torch.zeros(1, dtype=torch.int32, device=new["key"].device)
        self._write(new, _number(last, self.batch, new["key"].device), flag)
        if flagged and (number := flag.item()):
            flag.zero_()
            if self.slots is not None and not was_broken:
                self.slots.broken.zero_()
            self.positions.runs, self.slots, self.slots_freed = placed
            check_tensors(new["key"], new["value"])  # says where; the slot is free still, for the next token
            self.refuse(number)
        for state in self.roles.values():
            state.extend(count)
        self.length += n

    def expect(self, positions: Tensor | None, batch: int) -> None:
        """Read now what an append of these ``positions`` to the empty cache would read, which synchronises."""
        if positions is not None and self.site.fit_tokens > 1:
            _ = SlotPositions.starting(positions, batch, self.scheme.sink).least

    def _place(self, keys: Tensor, positions: Tensor | None, *, now: bool) -> None:
        """Record the positions of new tokens; ``now``: read them from the device, which synchronises."""
        n, sink, before = keys.shape[2], self.scheme.sink, self.slots
        at = self.start + self.length - sink - self.slots_freed
        if before is None:
            if positions is None:
                positions = torch.arange(n, device=keys.device)[None]
            self.slots, self.slots_freed = SlotPositions.starting(positions, keys.shape[0], sink), 0
            at = -sink
        slots = self.slots
        assert slots is not None
        if positions is not None:
            self.slots = slots = slots.follow(positions, at, check=self.needs_order)
            if now and int(slots.broken):
                slots.broken.zero_()
                self.slots = before
                raise UnsupportedError(NOT_CONSECUTIVE)
        runs = self.positions.runs
        if not runs:
            runs.append((n, slots.begin(at)))
            return
        if before is not None and slots is not before:  # padding may have been moved
            if len(runs) == 1:
                runs[0] = runs[0][0], slots.begin(at - runs[0][0])
            else:
                move = slots.placed - before.placed
                runs[:] = [(count, start + move) for count, start in runs]
        self.positions.extend(n)

    def _renumber(self, slot: int) -> None:
        """The next token that is encoded goes to ``slot``, whatever was freed before."""
        if self.slots is None:
            return
        key = self.roles["key"]
        token = self.start + key.sink.shape[2] + key.encoded  # of all that were appended
        if moved := token - self.scheme.sink - self.slots_freed - slot:
            self.slots, self.slots_freed = self.slots.moved(moved), self.slots_freed + moved

    def _most_padding(self, sink: int) -> int:
        if self.slots is None or self.start:
            return super()._most_padding(sink)
        first = self.slots.least - self.scheme.sink - self.slots_freed  # position of the first token
        return max(0, -first - sink)

    def _fit(self, behind: Mapping[Role, Tensor], whole: Mapping[Role, Tensor] | None) -> None:
        assert self.engine is not None
        if samples := self._samples(self.engine, behind, whole):
            for role, found in self.engine.fit(samples).items():
                self.roles[role].params = found.params
                if found.mean is not None:
                    self.mean = found.mean
        if not self.is_fitted:
            super()._fit(behind, whole)

    def _samples(
        self, engine: Engine, behind: Mapping[Role, Tensor], whole: Mapping[Role, Tensor] | None
    ) -> dict[Role, Sample]:
        """What kernels fit constants on, and the keys' mean, of the roles that they fit; arguments as in ``_fit``."""
        slots, sink, tokens, mean = self.slots, self.roles["key"].sink.shape[2], self.site.fit_tokens, self.site.mean
        missing = [self.roles[role] for role in ROLES if self.roles[role].params is None and engine.fits(role)]
        if tokens <= 1:  # all that came
            own = [state for state in missing if state.role == "value" or mean is None]
            return {s.role: Sample(self._all(s, behind[s.role]) if whole is None else whole[s.role]) for s in own}
        if slots is None or self.start or self.slots_freed or sink != self.scheme.sink:
            return {}  # slot 0 is not the first token behind the sink
        padded, found = self._most_padding(sink), {}
        padding = slots.padding if padded else None
        for state in missing:
            pending = self._pending(state, behind[state.role])
            angles = back = energy = None
            turned = False
            if state.role == "key" and mean is not None:
                if mean.rotary is None or mean.kind != "pre" or self.mean is not None:
                    continue
                leaving = (pending.shape[2] - self.scheme.window) // self.unit * self.unit  # as ``_less`` will ask
                count = max(tokens + padded, leaving)
                angles, turned = slots.angles(mean.rotary, 0, count), mean.rotary.interleaved
                back = None if mean.rotary.scaling == 1.0 else slots.angles_back(mean.rotary, count)
            if state.role == "key" and self.site.energy is not None:
                energy = self.site.energy.to(pending.device)
            every = state.codec.fit_every
            found[state.role] = Sample(pending, -(-tokens // every), every, padding, angles, back, turned, energy)
        return found

    def _all(self, state: RoleState, behind: Tensor) -> Tensor:
        """Tokens of a role that were held dense, and those of ``behind``."""
        return torch.cat([state.sink, self._pending(state, behind)], 2)

    def removed_from_newest(self, n: int) -> Removed | None:
        """As ``LayerCache.removed_from_newest``; layers share the angles."""
        mean = self.site.mean
        if mean is None or mean.rotary is None or self.slots is None or self.mean is None:
            return None
        slot = self.start + self.length - n - self.scheme.sink - self.slots_freed
        return Removed(self.mean, mean.rotary, self.slots.angles(mean.rotary, slot, n))

    def _removed(self, slot: int, count: int) -> Tensor | None:
        mean = self.site.mean
        if mean is None or self.slots is None or self.mean is None:
            return None
        if mean.rotary is None:
            return self.mean[:, :, None]
        return mean.rotary.turned(self.mean[:, :, None], *self.slots.angles(mean.rotary, slot, count))

    def _less(self, new: Mapping[Role, Tensor]) -> dict[str, Any]:
        mean = self.site.mean
        if mean is None or self.slots is None or self.mean is None or "key" not in new:
            return {}
        turning = mean.turning
        angles = self.slots.angles(turning, self.roles["key"].next_slot, new["key"].shape[2])
        return {"less": Turned(self.mean, *angles, turning.interleaved)}

    def _placed(self) -> dict[str, Any]:
        return {} if self.slots is None or self.site.mean is None else {"placed": self.slots.placed}

    def check(self) -> None:
        """As ``DeviceCache.check``.

        Raises
        ------
        UnsupportedError
            Positions were not in order, and keys are held without their mean before RoPE.
        """
        if self.slots is not None and int(self.slots.broken):
            raise UnsupportedError(NOT_CONSECUTIVE)
        super().check()

    @without_modes
    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        super().select(indices)
        if self.slots is not None:
            index = torch.as_tensor(indices, device=self.slots.placed.device)
            index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
            self.slots = self.slots.select(index)

    def _free_dead_pages(self) -> None:
        """Pages that are freed lower the numbers of the slots behind them."""
        runs = self.roles["key"].runs
        before = runs[0][0] if runs else 0
        super()._free_dead_pages()
        if self.slots is not None and runs and (moved := before - self.roles["key"].runs[0][0]):
            self.slots, self.slots_freed = self.slots.moved(moved), self.slots_freed + moved

    def unflagged(self, keys: Tensor) -> list[Tensor] | None:
        """As ``DeviceCache.unflagged``; tokens that stay dense lie in the sink and the window."""
        if not self._are_flagged(keys):
            return None
        return [x for state in self.roles.values() for x in (state.sink, state.window)]

    def _flags_now(self, keys: Tensor) -> bool:
        """Whether the CPU kernels flag what ``check_tensors`` refuses: they see every token before it is rounded."""
        assert self.engine is not None
        held = self.roles["key"].sink.dtype
        seen = held == keys.dtype or (held, keys.dtype) == (torch.float16, torch.float32)
        known = all(state.params is not None for state in self.roles.values())
        return known and not self.holds_dense and seen and self.engine.flags_all

    def refuse(self, flag: float = 0) -> None:
        """Raise the error that a non-zero flag stands for."""
        self.unchecked = flag != 0
        super().refuse(flag)

    def state(self) -> State:
        """What an append replaces, for ``go_back``."""
        roles = [(role, s.sink, s.window, list(s.runs), s.params) for role, s in self.roles.items()]
        slots = self.slots, self.slots_freed
        return State(roles, self.mean, self.start, self.length, self.unchecked, list(self.positions.runs), slots)

    def go_back(self, state: State) -> None:
        """Undo the appends since ``state``; their pages are freed."""
        self.start, self.length, self.unchecked = state.start, state.length, state.unchecked
        self.positions.runs, (self.slots, self.slots_freed) = state.positions, state.slots
        fitted, self.mean = self.is_fitted, state.mean
        for role, sink, window, runs, params in state.roles:
            now = self.roles[role]
            now.sink, now.window, now.runs, now.params = sink, window, runs, params
        if fitted and not self.is_fitted and self.engine is not None:
            self.engine.ready = False
        self._forget_decoded()
        self._free_dead_pages()

    def _is_empty(self) -> bool:
        return self.length == 0

    def _device_lengths(self) -> tuple[Tensor, Tensor]:
        assert self.store is not None
        runs = self.roles["key"].runs
        first, last = runs[0] if runs else (0, 0)
        device = self.store.table.device
        return _number(last, self.batch, device), _number(first, self.batch, device)

    def _dense(self) -> dict[str, Tensor | None]:
        both = {
            role: state.window if not state.sink.shape[2] else torch.cat([state.sink, state.window], 2)
            for role, state in self.roles.items()
        }
        return {"dense_k": both["key"], "dense_v": both["value"]}

    def _sink_tokens(self) -> int:
        return self.roles["key"].sink.shape[2]

    def synchronize(self) -> None:
        """Raise what ``check`` raises, if a single token was appended since the last check."""
        if self.unchecked:
            self.check()

    def refresh(self) -> None:
        """Do nothing: the device keeps no lengths of its own."""

    def evict(self, n: int, keep: int = 0) -> None:
        """As ``LayerCache.evict``.

        Raises
        ------
        UnsupportedError
            Tokens in the middle of the pages; or, with a mean before RoPE, the newest ones, which would leave a gap in
            the positions.
        """
        if n > 0 and self.needs_order and self._sink_tokens() < keep == self.length - n:
            raise UnsupportedError(
                f"evict({n}, keep={keep}): the newest tokens cannot be evicted where keys are held without their mean "
                f"before RoPE, because later tokens would leave a gap in the positions; use crop({keep})."
            )
        super().evict(n, keep)

    def _remove(self, first: int, last: int) -> None:
        self._one_run(first, last)
        if self.slots is not None and first < last:
            self.slots = self.slots.cropped()
        super()._remove(first, last)

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, as ``LayerCache.nbytes``; also raises what ``check`` raises."""
        self.check()
        return super().nbytes()


def _number(number: int, batch: int, device: torch.device) -> Tensor:
    """The number for every sequence, int32 ``[batch]``: shared by layers, never written to."""
    if device.type != "cuda":
        return _numbers(number, batch, device, 0)
    if torch.cuda.is_current_stream_capturing():  # its memory belongs to the graph
        return torch.full((batch,), number, dtype=torch.int32, device=device)
    return _numbers(number, batch, device, stream_of(device))


@lru_cache(maxsize=64)
def _numbers(number: int, batch: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), number, dtype=torch.int32, device=device)
