"""FusedLayerCache: a LayerCache whose pages kernels write and read; static caches have their lengths on the device."""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.attention import BEFORE_IT, Seen, check_queries
from packedkv.cache.device import BROKEN_ORDER, DeviceLengths, StepPositions, keep_addresses
from packedkv.cache.layer import LayerCache, State
from packedkv.checks import check_shapes, check_tensors
from packedkv.codec import ROLES, Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.choose import Kernels
from packedkv.kernels.engine import Engine, FirstTokens
from packedkv.kernels.mean import RotatedMean
from packedkv.kernels.tokens import ChunkTokens, NewTokens, Rules, StepTokens
from packedkv.ops.precision import without_modes
from packedkv.scheme import KVScheme
from packedkv.shared import SHARED
from packedkv.store.pages import PageStore, stream_of
from packedkv.store.positions import NOT_CONSECUTIVE, SlotPositions, consecutive
from packedkv.store.site import LayerSite, Removed, RoleSite, empty_roles

ONE_RUN = (
    "fused attention reads one run of packed tokens; evict(keep > 0) leaves two, unless it keeps the scheme's sink. "
    "Use attention='streamed'."
)


class Leaving(NamedTuple):
    """First half of an append, for ``end_append``."""

    new: dict[Role, Tensor]  # tokens that leave the window, in whole blocks
    tokens: int  # of the append
    flag: Tensor | None
    # positions before a token that its encoder refuses at once, if it cannot be stored
    before: tuple[list[tuple[int, Tensor]], SlotPositions | None] | None
    was_broken: bool  # whether positions were out of order before that token
    first: bool  # whether the append allocated the cache


class FusedLayerCache(LayerCache):
    """The packed cache of one layer whose pages kernels write and read.

    Tokens leave the window for keys and values together, in blocks of the least common multiple of both codecs'
    ``block_tokens``: where one codec groups G tokens, the other one's window holds up to G - 1 tokens more than in
    ``LayerCache`` (and is counted with them).

    ``capacity``: tokens of a *static* cache, whose lengths, sink and window lie on the device and whose tensors keep
    their addresses: a decode step can be captured in a CUDA graph or traced by ``torch.compile``; 0: pages grow.
    ``kernels``: of this page size and kind of cache, where layers share them. Raises UnsupportedError at the first
    append, if the kernels cannot take the scheme, head_dim or device; the text says why.
    """

    engine: Engine | None = None  # reads and writes the pages; None until the first append
    bad: Tensor | None = None  # error flag int32 [1] on the device: decode steps do not synchronise; see ``check``
    # of a growing cache: whether a single token was appended since the flag was last checked; positions of the slots
    unchecked = False
    slots: SlotPositions | None = None
    # of a static cache: what is on the device, from the first append on; positions of the slots; whether nothing was
    # appended since a reset that kept the pages; memory of a mean of first tokens, whose address captured graphs hold
    lengths: DeviceLengths | None = None
    steps: StepPositions | None = None
    emptied = False
    mean_address: Tensor | None = None

    def __init__(
        self,
        scheme: KVScheme | LayerSite,
        *,
        page_tokens: int | None = None,
        capacity: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        self.static = capacity > 0
        super().__init__(scheme, page_tokens=page_tokens, capacity=capacity)
        self.unit = math.lcm(self.scheme.key.block_tokens, self.scheme.value.block_tokens)  # leave the window together
        self.together = self.unit if self.unit > 1 else None
        self.served_by = kernels or Kernels(page_tokens, static=self.static)

    def reset(self) -> None:
        """Forget everything; of a static cache the pages stay, because captured graphs hold their addresses."""
        if self.lengths is None or self.engine is None:
            self._forget_all()
            return
        self.lengths.zero()
        for role, state in self.roles.items():
            if state.codec.needs and role not in self.site.fitted:
                state.params, self.engine.ready = None, False  # fitted again on the next prefill
        if self.site.mean is not None and self.site.mean.given is None:
            self.mean, self.engine.ready = None, False
        if self.steps is not None:
            self.steps.origin.fill_(self.scheme.sink)
        self.start, self.emptied = 0, True

    def _forget_all(self) -> None:
        self.engine = self.bad = self.slots = self.lengths = self.steps = self.mean_address = None
        self.unchecked = self.emptied = False
        super().reset()

    @property
    def length(self) -> int:
        """Live tokens per sequence; of a static cache read from the device."""
        if self.lengths is None:
            return self._length
        return 0 if self.lengths.fresh else int(self.lengths.tokens[0])

    @length.setter
    def length(self, value: int) -> None:
        self._length = value  # ``refresh`` sets the lengths of a static cache

    def device_length(self) -> Tensor:
        """Live tokens of a static cache, on the device: a copy, which later steps do not change."""
        assert self.lengths is not None
        return self.lengths.tokens[0].clone()

    @property
    def holds_dense(self) -> bool:
        """Whether a token may be dense: in the sink, the window or an unfinished block; or until constants are fitted.

        A static cache does not wait for a fit.
        """
        scheme = self.scheme
        may = bool(scheme.sink or scheme.window or self.unit > 1)
        return may or (not self.static and self.site.fit_tokens > 1 and not self.is_fitted)

    def kernels(self) -> dict[str, str]:
        """Return the kernels by use: ``decode``, ``encode.key``, ``encode.value``; empty before the first append."""
        if self.engine is None:
            return {}
        return {"decode": self.engine.name, **{f"encode.{role}": self.engine.written_by(role) for role in ROLES}}

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> None:
        """Encode and write what leaves the window, in one launch where the codecs allow.

        Several tokens are checked as in ``LayerCache``. A single one is not (that would synchronise): NaN, Inf or a
        magnitude above 65504 is stored as a zero row and raises a device flag that ``check`` reads; so do, in a static
        cache, tokens for which there are no slots.

        With a mean before RoPE several tokens at ``positions`` out of order are refused, and nothing is stored. A
        single one, or several with a ``flag`` in a growing cache, raise another flag that ``check`` reads. With
        ``flag`` (int32 ``[1]``) several tokens are not checked either: kernels raise this flag, which the caller reads
        later, and the caller checks the numbers that ``unflagged`` returns.

        Raises ValueError and ShapeError as ``LayerCache.append``; ShapeError also for several tokens for which a static
        cache has no slots; UnsupportedError if positions are out of order, the kernels do not support the tensors, or
        the call that fills a static cache brings fewer tokens than constants are fitted on.
        """
        self.end_append(self.begin_append(keys, values, positions, flag=flag))

    @without_modes
    def begin_append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> Leaving | None:
        """First half of ``append``: tokens go to the sink and the window, and missing constants are fitted.

        Fits of several layers, of which each began, are launched together by the first ``end_append``. None: nothing is
        left to do.
        """
        n = keys.shape[2]
        if n != 1 and flag is None:
            earlier = (self.bad,) if self.unchecked and self.bad is not None else ()
            self.refuse(*check_tensors(keys, values, *earlier))  # one synchronisation
        lengths = self.lengths
        empty = lengths is not None and (self.emptied or lengths.fresh or not self.is_fitted)
        if self.emptied:
            self._fill_again(keys)
        check_shapes(keys, values, *self.template)
        if self.store is not None:
            return self._begin(keys, values, positions, flag, empty, first=False)
        try:
            self._start(keys, values)
            return self._begin(keys, values, positions, flag, True, first=True)
        except BaseException:  # refused first tokens leave no batch and no dtype behind
            self._forget_all()
            raise

    def _fill_again(self, keys: Tensor) -> None:
        """Begin anew after a reset; other shapes or another dtype than before need another allocation."""
        self.emptied = keys.shape[2] == 0
        b, h, _, d = self.roles["key"].sink.shape
        if (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype) != (b, h, d, self.dtype):
            self._forget_all()
        elif self.lengths is not None:
            self.lengths.fresh = keys.shape[2] > 1

    def _begin(
        self, keys: Tensor, values: Tensor, positions: Tensor | None, flag: Tensor | None, empty: bool, first: bool
    ) -> Leaving | None:
        assert self.engine is not None
        n, before, was_broken = keys.shape[2], None, False
        if self.lengths is None:
            # CPU kernels refuse a bad token at once; on a GPU the flag waits for ``check``
            at_once = n == 1 and self.engine.refuses_at_once
            if at_once and self._flags_now(keys):
                before = list(self.positions.runs), self.slots
                was_broken = self.slots is not None and bool(self.slots.broken)
            elif at_once:
                check_tensors(keys, values)
            self.unchecked |= n == 1 and not at_once
            if self.places_tokens and n:
                self._place(keys, positions, now=n != 1 and flag is None)
        else:
            # a step changes the device's lengths only; any other call goes through the host's
            steps = n == 1 and self.engine.ready
            if self.holds_dense and not steps:
                self._read_lengths()
            if self.places_tokens and n:
                self._place_steps(n, positions, empty, self.lengths)
            if self.holds_dense and steps:
                self._step(self._rounded(keys, values), self.lengths)
                return None
        new: dict[Role, Tensor] = {"key": keys, "value": values} if before else self._rounded(keys, values)
        if self.holds_dense or not self.is_fitted:
            new = self._pass_dense(new, not self.static and self._waits())
        return Leaving(new, n, flag, before, was_broken, first)

    @without_modes
    def end_append(self, leaving: Leaving | None) -> None:
        """Second half of ``append``: tokens that leave the window are encoded."""
        if leaving is None:
            return
        try:
            if self.lengths is None:
                self._end(leaving)
            else:
                self._end_static(leaving, self.lengths)
        except BaseException:
            if leaving.first:
                self._forget_all()
            raise

    def _end(self, leaving: Leaving) -> None:
        assert self.store is not None
        assert self.engine is not None
        self.engine.launch_fits()
        new, n, flag, before, was_broken, _ = leaving
        if (count := new["key"].shape[2]) == 0:
            self.length += n
            return
        runs = self.roles["key"].runs
        last = runs[-1][1] if runs else 0
        self.store.ensure(last + count, exact=n > 1)
        if self.slots is not None:  # the next encoded token has slot ``last``
            key = self.roles["key"]
            token = self.start + key.sink.shape[2] + key.encoded  # of all that were appended
            self.slots = self.slots.moved(self._slot(self.slots, token) - last)
        if flag is None and (flag := self.bad) is None:
            flag = self.bad = torch.zeros(1, dtype=torch.int32, device=new["key"].device)
        self._write(new, _number(last, self.batch, new["key"].device), flag)
        if before is not None and (number := flag.item()):
            flag.zero_()
            if self.slots is not None and not was_broken:
                self.slots.broken.zero_()
            self.positions.runs, self.slots = before
            check_tensors(new["key"], new["value"])  # says where; the slot is free still, for the next token
            self.refuse(number)
        for state in self.roles.values():
            state.extend(count)
        self.length += n

    def _end_static(self, leaving: Leaving, lengths: DeviceLengths) -> None:
        self._prepare()  # even without tokens: the next step may be captured
        if count := leaving.new["key"].shape[2]:
            assert self.store is not None
            capacity = self.store.capacity  # evicted slots stay used
            if (self.holds_dense or count > 1) and (0 if lengths.fresh else int(lengths.last[0])) + count > capacity:
                raise ShapeError(
                    f"the static cache holds {capacity} tokens per sequence; {self.length} + {count} do not fit. Make "
                    f"it larger (max_len) or crop it."
                )
            self._write(leaving.new, lengths.last, lengths.bad if leaving.flag is None else leaving.flag)
            lengths.last.add_(count)
        lengths.write_dense(self.roles, self.batch)
        lengths.fresh = lengths.fresh and leaving.tokens == 0
        if self.steps is not None:
            self.steps.newest = None

    def _step(self, new: Mapping[Role, Tensor], lengths: DeviceLengths) -> None:
        """Append one token to a static cache with a sink or window, without reading the lengths.

        When the buffer is full its oldest block is encoded. Only the device knows in which step that is, so every step
        encodes the oldest block; in the others it goes to slots beyond the capacity, where it is dropped.
        """
        assert self.store is not None
        lengths.fresh = False  # if the first append was refused
        oldest, full = lengths.add_dense(new)
        self._write(oldest, torch.where(full > 0, lengths.last, self.store.capacity), lengths.spare)
        lengths.bad.copy_(torch.maximum(lengths.bad, lengths.spare * full[:1]))
        lengths.spare.zero_()
        lengths.drop_oldest(full)
        if self.steps is not None:
            self.steps.newest = None

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Allocate constants, kernels and pages for the first tokens."""
        heads, head_dim = keys.shape[1], keys.shape[3]
        if values.shape[3] != head_dim:
            raise UnsupportedError(
                f"fused attention: keys have head_dim {head_dim}, values {values.shape[3]}; the kernels take one. "
                f"Use attention='decoded' or 'streamed'."
            )
        try:
            chosen = self.served_by.serve(self.scheme, head_dim, keys.dtype, keys.device)
        except UnsupportedError as error:
            raise UnsupportedError(f"fused attention: {error}. Use attention='decoded' or 'streamed'.") from error
        site, mean = self.site, self.site.mean
        where = chosen.name, site.layer, site.seed, site.first_head, heads
        find = partial(site.roles, heads, (head_dim, head_dim), keys.dtype, keys.device)

        def build() -> tuple[Mapping[Role, RoleSite], Engine]:
            # without those of a file, and before a fit, they are the same in all caches
            roles = find() if site.fitted else SHARED.get(("roles", *where), keys.device, find, _constants_of)
            engine = chosen.engine.fresh()
            if mean is not None and mean.given is not None:
                engine.hold_without(mean.given.to(keys.device), mean.turning)
            if all(role.params is not None for role in roles.values()) and (mean is None or mean.given is not None):
                engine.prepare(roles)
            return roles, engine

        if site.is_seeded and (mean is None or mean.given is not None):  # the same in all caches, and never written to
            key = *where, None if mean is None else mean.name
            roles, self.engine = SHARED.get(
                key, keys.device, build, lambda ready: [*_constants_of(ready[0]), *ready[1].tensors()]
            )
        else:
            roles, self.engine = build()
        # a growing cache gets pages when the first tokens leave the window
        store = PageStore(chosen.layout, keys.shape[0], heads, keys.device, self.reserve)
        self.roles, self.store, self.dtype = empty_roles(roles, keys), store, keys.dtype
        self.mean = None if self.mean is None else self.mean.to(keys.device)
        if self.static:
            self._start_static(store, self.engine)

    def _start_static(self, store: PageStore, engine: Engine) -> None:
        store.table = store.table.clone()  # a copy of its own: caches share the table
        device, scheme = store.pages.device, self.scheme
        self.lengths = DeviceLengths(self.roles, self.batch, scheme.sink, scheme.window, self.unit, device)
        self.bad = self.lengths.bad
        keep_addresses(store.pages, store.table)
        if self.places_tokens:
            mean = self.site.mean
            self.steps = StepPositions(self.lengths.last, scheme.sink, None if mean is None else mean.turning)
        keep_addresses(*engine.tensors())

    def _prepare(self) -> bool:
        """Pass the constants to the engine; False if they need more tokens to be fitted."""
        assert self.engine is not None
        if self.engine.ready:
            return True
        if not self.is_fitted:
            return False
        mean = self.site.mean
        if mean is not None and mean.given is None and self.mean is not None:
            if self.static:  # the same memory after every fit
                old = self.mean_address
                if old is not None and old.shape == self.mean.shape:
                    self.mean = old.copy_(self.mean)
                self.mean_address = self.mean
            self.engine.hold_without(self.mean, mean.turning, look=False)  # of first tokens no pair is zero
        self.engine.prepare(self.roles)
        if self.static:
            keep_addresses(*self.engine.tensors())
        return True

    def _write(self, new: Mapping[Role, Tensor], first: Tensor, bad: Tensor) -> None:
        """Encode tokens into the slots from ``first`` on, by kernels or, where there are none, by the codec."""
        assert self.engine is not None
        assert self.store is not None
        self._prepare()
        if not self.engine.flags_all:
            for role in ROLES:
                if self.engine.written_by(role) == "torch":
                    self._encode(self.roles[role], new[role])
            new = {role: x for role, x in new.items() if self.engine.written_by(role) != "torch"}
        self.engine.encode(NewTokens(new, first, bad, **self._less(new)), self.store)

    def unflagged(self, keys: Tensor) -> list[Tensor] | None:
        """Tensors with the tokens just appended that no kernel has checked for NaN, Inf and overflow.

        A kernel that encodes flags every number that codecs cannot store. None: the caller checks all tokens.
        """
        assert self.engine is not None
        if keys.dtype != self.roles["key"].sink.dtype or not self.engine.flags_all:
            return None  # kernels do not encode both roles, or see rounded numbers
        if self.lengths is not None:
            return None if self.holds_dense else []
        return [x for state in self.roles.values() for x in (state.sink, state.window)]

    def _flags_now(self, keys: Tensor) -> bool:
        """Whether the CPU kernels flag what ``check_tensors`` refuses: they see every token before it is rounded."""
        assert self.engine is not None
        dense = self.roles["key"].sink.dtype
        seen = dense == keys.dtype or (dense, keys.dtype) == (torch.float16, torch.float32)
        known = all(state.params is not None for state in self.roles.values())
        return known and not self.holds_dense and seen and self.engine.flags_all

    # -- positions, and the mean that keys are encoded without -------------------------------------------------------

    def expect(self, positions: Tensor | None, batch: int) -> None:
        """Read now what an append of these ``positions`` to the empty cache would read, which synchronises."""
        if positions is not None and self.site.fit_tokens > 1:
            _ = SlotPositions.starting(positions, batch, self.scheme.sink).least

    def _slot(self, slots: SlotPositions, token: int) -> int:
        """Number of the slot of a token, counted from the first one that was appended."""
        return token - self.scheme.sink - slots.freed

    def _place(self, keys: Tensor, positions: Tensor | None, *, now: bool) -> None:
        """Record the positions of new tokens; ``now``: read them from the device, which synchronises."""
        n, before = keys.shape[2], self.slots
        if before is None:
            if positions is None:
                positions = torch.arange(n, device=keys.device)[None]
            self.slots, at = SlotPositions.starting(positions, keys.shape[0], self.scheme.sink), -self.scheme.sink
        else:
            at = self._slot(before, self.start + self.length)
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
                move = slots.origin - before.origin
                runs[:] = [(count, start + move) for count, start in runs]
        self.positions.extend(n)

    def _place_steps(self, n: int, positions: Tensor | None, empty: bool, lengths: DeviceLengths) -> None:
        """``_place`` for a static cache: compare the position of a single token on the device."""
        assert self.steps is not None
        if n > 1 and self.needs_order and positions is not None and not consecutive(positions):
            raise UnsupportedError(NOT_CONSECUTIVE)
        if empty or (n > 1 and self.length == 0):
            self.steps.begin(n, positions)
            self.positions.runs = self.steps.run(n)
            self._check_fit(n)
        else:
            self.steps.follow(n, positions, lengths.tokens, lengths.bad, ordered=self.needs_order)

    def _check_fit(self, n: int) -> None:
        """Raise if constants are fitted on more tokens than the first call brings."""
        if self.is_fitted or (tokens := self.site.fit_tokens) <= 1:
            return
        sink = min(self.scheme.sink, n)
        if n < sink + tokens + (padding := self._most_padding(sink)):
            beside = sink + padding
            raise UnsupportedError(
                f"layer {self.site.layer}: {self.scheme} fits its constants on the first {tokens} tokens"
                f"{f' behind {beside}' if beside else ''}, and the first call brings {n}: a static cache does not wait "
                f"for more. Pass params= from `packedkv fit`, or leave max_len (capacity) out."
            )

    def _most_padding(self, sink: int) -> int:
        if self.slots is None or self.start:
            return super()._most_padding(sink)
        first = self.slots.least + self._slot(self.slots, 0)  # position of the first token
        return max(0, -first - sink)

    def _fit(self, behind: Mapping[Role, Tensor], whole: Mapping[Role, Tensor] | None) -> None:
        assert self.engine is not None
        if not self.static and (samples := self._samples(self.engine, behind, whole)):
            for role, fitted in self.engine.fit(samples).items():
                self.roles[role].params = fitted.params
                if fitted.mean is not None:
                    self.mean = fitted.mean
        if not self.is_fitted:
            super()._fit(behind, whole)

    def _samples(
        self, engine: Engine, behind: Mapping[Role, Tensor], whole: Mapping[Role, Tensor] | None
    ) -> dict[Role, FirstTokens]:
        """Return the tokens on which kernels fit constants, and the keys' mean, by role; arguments as in ``_fit``."""
        slots, sink, tokens, mean = self.slots, self.roles["key"].sink.shape[2], self.site.fit_tokens, self.site.mean
        missing = [self.roles[role] for role in ROLES if self.roles[role].params is None and engine.fits(role)]
        if tokens <= 1:  # all tokens of the call
            if whole is None:
                whole = {s.role: torch.cat([s.sink, s.pending(behind[s.role])], 2) for s in missing}
            return {s.role: FirstTokens(whole[s.role]) for s in missing if s.role == "value" or mean is None}
        if slots is None or self.start or slots.freed or sink != self.scheme.sink:
            return {}  # slot 0 is not the first token behind the sink
        padded, samples = self._most_padding(sink), dict[Role, FirstTokens]()
        padding = slots.padding if padded else None
        for state in missing:
            pending = state.pending(behind[state.role])
            angles = back = energy = None
            interleaved = False
            if state.role == "key" and mean is not None:
                if mean.rotary is None or mean.kind != "pre" or self.mean is not None:
                    continue
                leaving = (pending.shape[2] - self.scheme.window) // self.unit * self.unit  # as ``_less`` will ask
                count = max(tokens + padded, leaving)
                angles, interleaved = slots.angles(mean.rotary, 0, count), mean.rotary.interleaved
                back = None if mean.rotary.scaling == 1.0 else slots.angles_back(mean.rotary, count)
            if state.role == "key" and self.site.energy is not None:
                energy = self.site.energy.to(pending.device)
            every = state.codec.fit_every
            samples[state.role] = FirstTokens(
                pending, -(-tokens // every), every, padding, angles, back, interleaved, energy
            )
        return samples

    def removed_from_newest(self, n: int) -> Removed | None:
        """Return the removed mean as ``LayerCache``; layers share the angles."""
        mean = self.site.mean
        if self.static:
            return super().removed_from_newest(n)
        if self.slots is None or mean is None or mean.rotary is None:
            return None
        return self._removed(self._slot(self.slots, self.start + self.length - n), n)

    def _removed(self, slot: int, count: int) -> Removed | None:
        """Return what is subtracted from the keys of ``count`` slots from ``slot`` on; None: they keep their mean."""
        mean = self.site.mean
        if mean is None or self.slots is None or self.mean is None:
            return None
        return Removed(self.mean, mean.turning, self.slots.angles(mean.turning, slot, count))

    def _less(self, new: Mapping[Role, Tensor]) -> dict[str, Any]:
        """The engine's arguments for keys that are encoded without their mean."""
        if self.site.mean is None or self.mean is None or "key" not in new:
            return {}
        count = new["key"].shape[2]
        if self.steps is not None and self.steps.rotary is not None and self.lengths is not None:
            turning, angles = self.steps.rotary, self.steps.angles(count, self.lengths.last, self.scheme.window)
        elif (removed := self._removed(self.roles["key"].next_slot, count)) is not None:
            _, turning, angles = removed
        else:
            return {}
        return {"less": RotatedMean(self.mean, *angles, turning.interleaved)}

    def _origin(self) -> dict[str, Any]:
        """The engine's arguments for reading keys that are encoded without their mean."""
        places = self.slots or self.steps
        return {} if places is None or self.site.mean is None else {"origin": places.origin}

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        mask: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunk: int = 1024,
        start: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Fused attention over the packed pages: ``attend_token``, or ``attend_chunk`` of several query tokens.

        Arguments as ``packedkv.cache.layer.attend``, ``mask`` and ``causal`` only with several query tokens (else
        UnsupportedError). ``start`` (int32 ``[B]``): left padding, which is not attended.
        """
        if q.shape[2] == 1:
            if mask is not None:
                raise UnsupportedError(
                    "fused attention takes no mask of a single query token; pass start= for padding."
                )
            return self.attend_token(q, scale=scale, sinks=sinks, start=start, softcap=softcap)
        seen = Seen(causal, start=() if start is None else tuple(start.tolist()), softcap=softcap, mask=mask)
        return self.attend_chunk(q, scale=scale, sinks=sinks, seen=seen)

    @without_modes
    def attend_token(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        start: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention of one query token per sequence, ``[B, HQ, 1, D]``; arguments as ``attend``."""
        engine, store = self._readable(q)
        if not engine.ready:  # all tokens are dense
            seen = Seen(start=() if start is None else tuple(start.tolist()), softcap=softcap)
            return self.attend_chunk(q, scale=scale, sinks=sinks, seen=seen)
        seq_lens, first = self._device_lengths()
        dense: dict[str, Any] = self._dense() if self.holds_dense else {}
        if start is not None and self.holds_dense:
            first, dense["dense_start"] = self._start_from(start, seq_lens, first)
        elif start is not None:
            first = first + start
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        tokens = StepTokens(store.pages, store.table, seq_lens, start=first, **dense, **self._origin())
        return engine.attend_step(q, tokens, Rules(scale, Seen(softcap=softcap), sinks))

    @torch.no_grad()
    @without_modes
    def attend_chunk(
        self, q: Tensor, *, scale: float | None = None, sinks: Tensor | None = None, seen: Seen = BEFORE_IT
    ) -> Tensor:
        """Attention of the newest n tokens, which the cache holds already; ``q [B, HQ, n, D]``.

        Pages are unpacked on the GPU, part by part, to 16 bit: for flash attention, or for scores in PyTorch
        (soft caps, any mask). Synchronises the host's state. ``scale`` and ``sinks`` are as in
        ``packedkv.cache.layer.attend``; ``seen`` says which tokens a query sees. Raises ShapeError if the cache holds
        fewer than n tokens, or ``seen`` does not fit it.
        """
        engine, store = self._readable(q)
        self.synchronize()
        n, total = q.shape[2], self.host_tokens()
        if n > total:
            raise ShapeError(f"attend: {n} queries over {total} tokens; queries are tokens held.")
        if len(seen.start) not in (0, q.shape[0]) or (seen.window and not seen.causal):
            raise ShapeError(
                f"attend: start of {len(seen.start)} sequences, window={seen.window}, causal={seen.causal}; one start "
                f"for each of {q.shape[0]} sequences or none is taken, and a window of causal attention."
            )
        if seen.mask is not None and (seen.mask.shape[-1] != total or seen.mask.shape[-2] not in (1, n)):
            raise ShapeError(f"attend: mask {tuple(seen.mask.shape)} does not fit {n} queries over {total} tokens.")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        full = self.rolls and self.start > 0  # from the first eviction on the cache is as long at every frame
        key, value = self.roles["key"], self.roles["value"]
        first, last = key.runs[0] if key.runs else (0, 0)
        tokens = ChunkTokens(
            store.pages, store.table, first, last, (key.sink, value.sink), (key.window, value.window), recurring=full,
            **self._origin(),
        )  # fmt: skip
        return engine.attend_chunk(q, tokens, Rules(scale, seen, sinks))

    def host_tokens(self) -> int:
        """Tokens per sequence, as the host knows them."""
        return self.roles["key"].encoded + self.roles["key"].dense_tokens

    def _readable(self, q: Tensor) -> tuple[Engine, PageStore]:
        """Validate queries; return the engine and the pages."""
        empty = self.emptied if self.static else self.length == 0  # without synchronising
        if self.store is None or self.engine is None or empty or not (self._prepare() or self.host_tokens()):
            raise ShapeError("attend: the cache is empty; append keys and values first.")
        check_queries(q, self.batch, self.roles["key"].site)
        return self.engine, self.store

    def _device_lengths(self) -> tuple[Tensor, Tensor]:
        """Slots written and first live slot of each sequence, int32 ``[B]`` on the device."""
        if self.lengths is not None:
            return self.lengths.last, self.lengths.first
        assert self.store is not None
        runs = self.roles["key"].runs
        first, last = runs[0] if runs else (0, 0)
        device = self.store.table.device
        return _number(last, self.batch, device), _number(first, self.batch, device)

    def _dense(self) -> dict[str, Tensor | None]:
        """Dense tokens, sink first, as ``StepTokens`` has them."""
        if self.lengths is not None:
            buffers = self.lengths.buffers
            return {"dense_k": buffers["key"], "dense_v": buffers["value"], "dense_lens": self.lengths.dense}
        both = {
            role: state.window if not state.sink.shape[2] else torch.cat([state.sink, state.window], 2)
            for role, state in self.roles.items()
        }
        return {"dense_k": both["key"], "dense_v": both["value"]}

    def _start_from(self, start: Tensor, seq_lens: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """First live slot, and first visible dense token, where the first ``start`` tokens are padding.

        Tokens lie in the order sink, pages, window, so padding covers the sink before any page, and all pages before
        any token of the window.
        """
        sink = self.scheme.sink if self.static else self.roles["key"].sink.shape[2]
        behind = (start - (seq_lens - first)).clamp(min=sink)
        dense_start = torch.minimum(start, behind).to(torch.int32)
        return first + (start - sink).clamp(min=0), dense_start

    def workspace_bytes(self, q: Tensor) -> int:
        """Upper bound of what ``attend_token`` needs beside the cache."""
        if self.engine is None or self.store is None:
            return 0
        return self.engine.workspace_bytes(q, self.store, self.holds_dense)

    def chunk_workspace_bytes(self, q: Tensor, flash: bool = True) -> int:
        """Upper bound of what ``attend_chunk`` needs beside the cache; ``flash``: as ``flash.by_flash``."""
        if self.engine is None or self.store is None:
            return 0
        key = self.roles["key"]
        return self.engine.chunk_workspace_bytes(q, self.store.heads, key.encoded, key.dense_tokens, flash)

    # -- errors flagged on the device ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the errors that decode steps have flagged (one synchronisation).

        Raises ValueError if a token was NaN, Inf or above 65504 in magnitude and was stored as a zero row; ShapeError
        if a captured or compiled step dropped tokens because the static cache was full; UnsupportedError if positions
        were not in order, and keys are encoded without their mean before RoPE.
        """
        if self.slots is not None and int(self.slots.broken):
            raise UnsupportedError(NOT_CONSECUTIVE)
        self.refuse(0 if self.bad is None else int(self.bad.item()))

    def refuse(self, flag: float = 0) -> None:
        """Raise the error that a non-zero flag stands for."""
        self.unchecked = flag != 0 and not self.static
        if flag == BROKEN_ORDER:
            raise UnsupportedError(NOT_CONSECUTIVE)
        if flag == 2:
            assert self.store is not None
            raise ShapeError(
                f"layer {self.site.layer}: the static cache of {self.store.capacity} tokens per sequence is full; "
                f"later tokens were dropped. Make it larger (max_len)."
            )
        if flag:
            raise ValueError(
                f"layer {self.site.layer}: a key or value appended in a decode step is not finite or above 65504; it "
                f"was stored as a zero row. Check the model's dtype (fp16 overflow?)."
            )

    # -- host operations -----------------------------------------------------------------------------------------------

    def _read_lengths(self) -> None:
        """Bring the host's runs, sink, window and positions of a static cache up to date (one synchronisation)."""
        if self.lengths is not None:
            tokens = self.lengths.read(self.roles)
            if self.steps is not None:
                self.positions.runs = self.steps.run(tokens)

    def synchronize(self) -> None:
        """Bring the host's state up to date; raises what ``check`` raises (synchronises)."""
        self._read_lengths()
        if self.static or self.unchecked:
            self.check()  # a full static cache has no slots for its last tokens

    def refresh(self) -> None:
        """Bring the device's state of a static cache up to date after a change of the host's."""
        if self.lengths is not None and self.store is not None:
            if self.roles["key"].encoded <= self.store.capacity:  # what did not fit has been cropped away
                self.lengths.bad.masked_fill_(self.lengths.bad == 2, 0)
            self.lengths.write(self.roles, self.batch)

    def decode_role(
        self, role: Role, first: int = 0, last: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Dequantize as ``LayerCache``, once the host knows the lengths; also raises what ``check`` raises."""
        self.synchronize()
        return super().decode_role(role, first, last, dtype)

    def _select(self, index: Tensor) -> None:
        self._read_lengths()
        super()._select(index)
        if self.slots is not None:
            self.slots = self.slots.select(index)
        if self.steps is not None:
            self.steps.select(index)
        token_mean = self.site.mean is not None and self.site.mean.given is None
        if self.engine is not None and (token_mean or not self.site.is_seeded):
            self.engine.ready = False  # constants may belong to a sequence
        self.refresh()

    def evict(self, n: int, keep: int = 0) -> None:
        """Evict as ``LayerCache``.

        Raises UnsupportedError for tokens in the middle of the pages, or any but the newest of a static cache; or, with
        a mean before RoPE, the newest ones of a growing cache, which would leave a gap in the positions.
        """
        newest = n > 0 and self.needs_order and not self.static and keep == self.length - n
        if newest and self.roles["key"].sink.shape[2] < keep:
            raise UnsupportedError(
                f"evict({n}, keep={keep}): the newest tokens cannot be evicted where keys are held without their mean "
                f"before RoPE, because later tokens would leave a gap in the positions; use crop({keep})."
            )
        super().evict(n, keep)

    def _remove(self, first: int, last: int) -> None:
        self._read_lengths()
        self._one_run(first, last)
        if self.static and first < last < self.length:
            raise UnsupportedError("a static cache does not use evicted slots again; leave max_len (capacity) out.")
        if self.slots is not None and first < last:
            self.slots = self.slots.cropped()
        if self.steps is not None:
            self.steps.cropped |= first < last
        super()._remove(first, last)
        self.refresh()

    def _one_run(self, first: int, last: int) -> None:
        """Raise if removing tokens would leave two runs of slots, or a run that ends inside a block."""
        state = self.roles.get("key")
        if first == last:
            return
        if first and last < self.length and (state is None or first != state.sink.shape[2]):
            raise UnsupportedError(ONE_RUN)
        if self.unit == 1 or state is None or not state.runs:
            return
        encoded = first - state.sink.shape[2]
        over = (state.runs[-1][0] + encoded) % self.unit
        if 0 < encoded < state.encoded and over:
            raise UnsupportedError(
                f"crop({first}) cuts a block of {self.unit} tokens that is encoded already, behind which the fused "
                f"kernels cannot go on; crop to {first - over}, or use attention='streamed'."
            )

    def _free_dead_pages(self) -> None:
        """Free dead pages and renumber the slots behind them; a static cache keeps all pages."""
        if self.static:
            return
        runs = self.roles["key"].runs
        before = runs[0][0] if runs else 0
        super()._free_dead_pages()
        if self.slots is not None and runs:
            self.slots = self.slots.moved(before - self.roles["key"].runs[0][0])

    def go_back(self, state: State) -> None:
        """Undo the appends since ``state``; their pages are freed."""
        fitted = self.is_fitted
        self._restore(state)
        if fitted and not self.is_fitted and self.engine is not None:
            self.engine.ready = False
        self._forget_decoded()
        self._free_dead_pages()

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, as ``LayerCache.nbytes``; also raises what ``check`` raises."""
        self._read_lengths()
        self.check()
        return super().nbytes()

    def _dense_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of a static cache count as windows."""
        if self.lengths is None or self.lengths.dense is None:
            yield from super()._dense_tensors()
        else:
            yield from ((f"{role}.window", buffer) for role, buffer in self.lengths.buffers.items())


def _constants_of(roles: Mapping[Role, RoleSite]) -> list[Tensor]:
    return [x for role in roles.values() for x in (role.params or {}).values()]


def _number(number: int, batch: int, device: torch.device) -> Tensor:
    """The number for every sequence, int32 ``[batch]``: shared by layers, never written to."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # its memory belongs to the graph
        return torch.full((batch,), number, dtype=torch.int32, device=device)
    return _numbers(number, batch, device, stream_of(device))


@lru_cache(maxsize=64)
def _numbers(number: int, batch: int, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((batch,), number, dtype=torch.int32, device=device)
