"""StaticCache: a cache of fixed capacity for the fused kernels; lengths live on the device.

A decode step neither synchronises nor allocates: it can be captured in a CUDA graph and traced by ``torch.compile``.
Every tensor keeps its address. The host's runs, sink and window are brought up to date only when a host operation
(decode, crop, select, nbytes ...) needs them.

Keys that are held without their mean: the device keeps the position of slot 0 (``placed``), and each step compares the
position that the model gives its token with the one that follows. Constants that are fitted on first tokens are fitted
when the cache is filled, whose call must bring so many: no step waits for more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packedkv.cache.device import DeviceCache
from packedkv.checks import check_tensors
from packedkv.codec import Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.mean import Turned
from packedkv.ops.precision import without_modes
from packedkv.ops.rope import Rotary
from packedkv.store.positions import NOT_CONSECUTIVE, angles_near, consecutive, first_of

BROKEN_ORDER = 3
"""Value of the flag ``bad``: the position of a step's token does not follow those held."""


class StaticCache(DeviceCache):
    """The packed cache of one layer, served by the fused kernels; ``capacity`` tokens are allocated at once.

    Parameters
    ----------
    As ``DeviceCache``.
    """

    dense_len: Tensor | None = None
    """With a sink, window or blocks: tokens held dense, int32 ``[B]`` on the device."""
    fresh = False
    """Whether this append allocates: the lengths are known to be 0, so the device is not read."""
    emptied = False
    """Whether nothing was appended since a reset that kept the pages."""
    cropped = False
    """Whether tokens were removed since the last append."""
    placed: Tensor | None = None
    """Position of slot 0 of each sequence, int32 ``[B]`` on the device, where positions are needed."""
    turning: Rotary | None = None
    """How the mean of the keys turns, on the device; None: they keep it."""
    newest: Tensor | None = None
    """In a step, the position of its token ``[B or 1, 1]``."""
    kept_mean: Tensor | None = None
    """Where a mean of first tokens lies, whose address captured graphs hold."""

    @property
    def holds_dense(self) -> bool:
        """Whether a token may be held dense: in the sink, the window or an unfinished block."""
        return bool(self.scheme.sink or self.scheme.window or self.unit > 1)

    def reset(self) -> None:
        """Forget every token; the pages stay, because captured graphs hold their addresses."""
        if self.store is None:
            self._forget_all()
            return
        for tensor in (self.seq_lens, self.first, self.bad, self.dense_len):
            if tensor is not None:
                tensor.zero_()
        for role, state in self.roles.items():
            if state.codec.needs and role not in self.fitted and self.engine is not None:
                state.params, self.engine.ready = None, False  # fitted again on the next prefill
        if self.site.mean is not None and self.site.mean.given is None and self.engine is not None:
            self.mean, self.engine.ready = None, False
        if self.placed is not None:
            self.placed.fill_(self.scheme.sink)
        self.start = 0
        self.emptied = True

    def _forget_all(self) -> None:
        """Drop the allocation as well."""
        self.engine = self.seq_lens = self.bad = self.dense_len = None
        self.placed = self.turning = self.newest = self.kept_mean = None
        self.emptied = False
        super().reset()

    @property
    def length(self) -> int:
        """Live tokens per sequence; reads the device."""
        return 0 if self.seq_lens is None or self.fresh else int(self.device_length())

    @length.setter
    def length(self, value: int) -> None:
        """Do nothing: ``refresh`` sets the device's lengths from the host's state."""

    def device_length(self) -> Tensor:
        """Live tokens, on the device."""
        assert self.seq_lens is not None
        encoded = self.seq_lens[0] - self.first[0]
        return encoded if self.dense_len is None else encoded + self.dense_len[0]

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        self._start(keys, values, self.reserve)
        assert self.store is not None
        self.store.table = self.store.table.clone()  # a copy of its own: caches share the table
        self.fresh, batch = True, keys.shape[0]
        sizes = batch, batch, 1
        zeros = (torch.zeros(n, dtype=torch.int32, device=keys.device) for n in sizes)
        self.seq_lens, self.first, self.bad = zeros
        if self.holds_dense:
            self._allocate_dense(batch)
        _keep_addresses(self.store.pages, self.store.table, self.seq_lens, self.first, self.bad)
        if self.places_tokens:
            self.placed = torch.full_like(self.seq_lens, self.scheme.sink)
            _keep_addresses(self.placed)
        if (mean := self.site.mean) is not None:
            turning, device = mean.turning, keys.device
            on_device = turning.frequencies.device == device
            self.turning = turning if on_device else replace(turning, frequencies=turning.frequencies.to(device))
            _keep_addresses(self.turning.frequencies)
        self._stay_constants()

    def _allocate_dense(self, batch: int) -> None:
        """Allocate the buffers that hold sink and window, sink first."""
        width = self.scheme.sink + self.scheme.window + self.unit
        self.buffers: dict[Role, Tensor] = {}
        for role, state in self.roles.items():
            self.buffers[role] = state.sink.new_zeros(batch, state.sink.shape[1], width, state.sink.shape[3])
        device = self.buffers["key"].device
        self.dense_len = torch.zeros(batch, dtype=torch.int32, device=device)
        self.spare = torch.zeros(1, dtype=torch.int32, device=device)  # flag of an encode that may be dropped
        self.places = torch.arange(width, dtype=torch.int64, device=device)
        _keep_addresses(*self.buffers.values(), self.dense_len, self.spare, self.places)

    def _prepare(self) -> bool:
        assert self.engine is not None
        was_ready = self.engine.ready
        if not was_ready and self.mean is not None and self.site.mean is not None and self.site.mean.given is None:
            if self.kept_mean is None or self.kept_mean.shape != self.mean.shape:
                self.kept_mean = self.mean
            elif self.kept_mean is not self.mean:
                self.mean = self.kept_mean.copy_(self.mean)
        ready = super()._prepare()
        if ready and not was_ready:
            self._stay_constants()
        return ready

    def _stay_constants(self) -> None:
        assert self.engine is not None
        _keep_addresses(*self.engine.tensors())

    @without_modes
    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor | None = None, *, flag: Tensor | None = None
    ) -> None:
        """As ``DeviceCache.append``; raises if there are no slots left, for a single token only in ``check``.

        Raises
        ------
        UnsupportedError
            Positions that are not in order, of a single token only in ``check``; or the call that fills the cache
            brings fewer tokens than constants are fitted on.
        """
        n, empty = keys.shape[2], self.fresh or self.emptied or self.store is None or not self.is_fitted
        if n != 1 and flag is None:
            check_tensors(keys, values)
        if self.emptied:  # another shape or dtype than before the reset: allocate again
            self.emptied = n == 0
            b, h, _, d = self.roles["key"].sink.shape
            if (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype) != (b, h, d, self._dtype):
                self._forget_all()
            self.fresh = n > 1 and self.store is not None
        self.check_shapes(keys, values)
        if self.store is not None:
            return self._append(keys, values, positions, flag, empty)
        try:
            self._allocate(keys, values)
            self._append(keys, values, positions, flag, empty)
        except BaseException:  # refused first tokens leave no batch and no dtype behind
            self._forget_all()
            raise

    def _append(self, keys: Tensor, values: Tensor, positions: Tensor | None, flag: Tensor | None, empty: bool) -> None:
        n = keys.shape[2]
        assert self.seq_lens is not None
        assert self.bad is not None
        new = self._held(keys, values)
        ready = self.engine is not None and self.engine.ready
        if self.holds_dense and not (n == 1 and ready):
            self._pull()
        if self.places_tokens and n:
            self._place(n, positions, empty)
        if self.holds_dense and n == 1 and ready:
            if self.fresh:  # the first append was refused
                self.fresh = False
            self._step(new)
            self.newest = None
            return
        if self.holds_dense or not self.is_fitted:
            new = self._pass_dense(new)
        self._prepare()  # even without tokens: the next step may be captured
        if count := new["key"].shape[2]:
            if self.holds_dense or count > 1:
                self._check_room(count)
            self._write(new, self.seq_lens, self.bad if flag is None else flag)
            self.seq_lens.add_(count)
        self._push_dense()
        self.fresh, self.newest = self.fresh and n == 0, None

    def _place(self, n: int, positions: Tensor | None, empty: bool) -> None:
        """Record the positions of new tokens: several are checked once for all layers, a single one on the device."""
        assert self.placed is not None
        assert self.seq_lens is not None
        sink, device = self.scheme.sink, self.placed.device
        if n > 1 and positions is not None and self.needs_order and not consecutive(positions):
            raise UnsupportedError(NOT_CONSECUTIVE)
        if empty or (n > 1 and self.length == 0):
            if positions is None:
                positions = torch.arange(n, device=device)[None]
            self.placed.copy_((first_of(positions) + sink).expand_as(self.placed))
            self.positions.runs = [(n, (self.placed - sink).long())]
            self._check_fit(n)
            self.newest = positions if n == 1 else None
            return
        held = self.seq_lens if self.dense_len is None else self.seq_lens + self.dense_len
        expected = self.placed - sink + held
        if positions is not None and len(expected) > 1 and (n > 1 or self.cropped):
            first = first_of(positions)  # sequences of padding alone are moved right before the new tokens
            self.placed.add_(torch.where((expected <= 1) & (first <= 0), first - expected, 0))
            expected, self.cropped = self.placed - sink + held, False
        if not self.needs_order:
            self.newest = expected[:, None] if n == 1 else None
        elif n > 1:
            if positions is not None and bool((first_of(positions) != expected).any()):
                raise UnsupportedError(NOT_CONSECUTIVE)
            self.newest = None
        elif positions is None:
            self.newest = expected[:, None]
        else:
            assert self.bad is not None
            wrong = (positions[:, 0] != expected).any().to(torch.int32) * BROKEN_ORDER
            self.bad.copy_(torch.maximum(self.bad, wrong))
            self.newest = positions

    def _check_fit(self, n: int) -> None:
        """Raise if constants are fitted on more tokens than the first call brings."""
        if self.is_fitted or (wanted := self.site.fit_tokens) <= 1:
            return
        sink = min(self.scheme.sink, n)
        if n < sink + wanted + (padding := self._most_padding(sink)):
            beside = sink + padding
            raise UnsupportedError(
                f"layer {self.layer}: {self.scheme} fits its constants on the first {wanted} tokens"
                f"{f' behind {beside}' if beside else ''}, and the first call brings {n}: a static cache does not wait "
                f"for more. Pass params= from `packedkv fit`, or leave max_len (capacity) out."
            )

    def _less(self, new: Mapping[Role, Tensor]) -> dict[str, Any]:
        if self.turning is None or self.mean is None or "key" not in new:
            return {}
        assert self.placed is not None
        assert self.seq_lens is not None
        count = new["key"].shape[2]
        if self.newest is None:
            ahead = torch.arange(count, device=self.placed.device)
            angles = self.turning.angles((self.placed + self.seq_lens)[:, None] + ahead)
        else:  # a step: what leaves the window, if anything does
            angles = angles_near(self.newest, self.turning, 1 - count - self.scheme.window, count)
        return {"less": Turned(self.mean, *angles, self.turning.interleaved)}

    def _placed(self) -> dict[str, Any]:
        return {} if self.turning is None else {"placed": self.placed}

    def _check_room(self, n: int) -> None:
        """Raise if there are no slots for n tokens (evicted slots stay used)."""
        assert self.store is not None
        assert self.seq_lens is not None
        if (0 if self.fresh else int(self.seq_lens[0])) + n > self.store.capacity:
            raise ShapeError(
                f"the static cache holds {self.store.capacity} tokens per sequence; {self.length} + {n} do not "
                f"fit. Make it larger (max_len) or crop it."
            )

    def _step(self, new: Mapping[Role, Tensor]) -> None:
        """Append one token where a sink or window is held, without reading the lengths.

        When the buffer is full its oldest block is encoded. Only the device knows in which step that is, so every step
        encodes the oldest block; in the others it goes to slots beyond the capacity, where it is dropped.
        """
        assert self.seq_lens is not None
        assert self.dense_len is not None
        assert self.bad is not None
        assert self.store is not None
        sink, unit, width = self.scheme.sink, self.unit, self.places.shape[0]
        at = self.dense_len[:1].long().clamp_(max=width - 1)
        for role, x in new.items():
            self.buffers[role].index_copy_(2, at, x)
        full = (self.dense_len + 1 >= width).to(torch.int32)  # [B], all equal
        oldest = {role: buffer[:, :, sink : sink + unit] for role, buffer in self.buffers.items()}
        self._write(oldest, torch.where(full > 0, self.seq_lens, self.store.capacity), self.spare)
        self.bad.copy_(torch.maximum(self.bad, self.spare * full[:1]))
        self.spare.zero_()
        gone = (full[:1] * unit).long()
        kept = (self.places + torch.where(self.places >= sink, gone, 0)).clamp_(max=width - 1)
        for buffer in self.buffers.values():
            buffer.copy_(buffer.index_select(2, kept))
        self.seq_lens.add_(full * unit)
        self.dense_len.add_(1 - full * unit)

    def _is_empty(self) -> bool:
        return self.emptied

    def _device_lengths(self) -> tuple[Tensor, Tensor]:
        assert self.seq_lens is not None
        return self.seq_lens, self.first

    def _dense(self) -> dict[str, Tensor | None]:
        return {"dense_k": self.buffers["key"], "dense_v": self.buffers["value"], "dense_lens": self.dense_len}

    def _sink_tokens(self) -> int:
        return self.scheme.sink

    # -- the host's state and the device's ---------------------------------------------------------------------------

    def _pull(self) -> None:
        """Set the host's runs, sink and window from the device's lengths (one synchronisation)."""
        if self.seq_lens is None:
            return
        first = last = count = 0
        if not self.fresh:
            numbers = [self.first[:1], self.seq_lens[:1], *(() if self.dense_len is None else (self.dense_len[:1],))]
            first, last, *dense = torch.cat(numbers).tolist()
            count = dense[0] if dense else 0
        for role, state in self.roles.items():
            state.runs = [(first, last)] if last > first else []
            if self.dense_len is not None:
                sink = min(count, self.scheme.sink)
                state.sink, state.window = self.buffers[role][:, :, :sink], self.buffers[role][:, :, sink:count]
        if self.placed is not None:
            held = last - first + count
            self.positions.runs = [(held, (self.placed - self.scheme.sink).long())] if held else []

    def _push_dense(self) -> None:
        """Copy sink and window of the host's state back to the buffers."""
        if self.dense_len is None:
            return
        # copies: source and destination may overlap
        parts = {role: torch.cat([s.sink, s.window], 2) for role, s in self.roles.items()}
        if self.dense_len.shape[0] != self.batch:
            self._allocate_dense(self.batch)
        for role, state in self.roles.items():
            count = parts[role].shape[2]
            self.buffers[role][:, :, :count] = parts[role]
            state.sink = state.window = parts[role].new_empty(*parts[role].shape[:2], 0, parts[role].shape[3])
            self.dense_len.fill_(count)

    def refresh(self) -> None:
        """Set the device's lengths and buffers from the host's runs, sink and window."""
        if self.seq_lens is None or self.bad is None or self.store is None:
            return
        runs = self.roles["key"].runs
        first, last = runs[0] if runs else (0, 0)
        if last <= self.store.capacity:  # what did not fit has been cropped away
            self.bad.masked_fill_(self.bad == 2, 0)
        if self.seq_lens.shape[0] == self.batch:  # in place: captured graphs hold the addresses
            self.seq_lens.fill_(last)
            self.first.fill_(first)
        else:
            like = self.seq_lens
            self.seq_lens, self.first = like.new_full((self.batch,), last), like.new_full((self.batch,), first)
        self._push_dense()

    def refuse(self, flag: float = 0) -> None:
        """Raise the error that a non-zero flag stands for."""
        if flag == BROKEN_ORDER:
            raise UnsupportedError(NOT_CONSECUTIVE)
        super().refuse(flag)

    def synchronize(self) -> None:
        """Bring the host's runs, sink and window up to date; raises what ``check`` raises (synchronises)."""
        self._pull()
        self.check()  # a full cache has no slots for its last tokens

    @without_modes
    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self._pull()
        super().select(indices)
        if self.placed is not None and self.store is not None:
            index = torch.as_tensor(indices, device=self.placed.device)
            placed = self.placed[index if index.dtype == torch.bool else index.long()]
            self.placed = self.placed.copy_(placed) if placed.shape == self.placed.shape else placed
        self.refresh()

    def _remove(self, first: int, last: int) -> None:
        self._pull()
        self._one_run(first, last)
        if first < last < self.length:
            raise UnsupportedError("a static cache does not use evicted slots again; leave max_len (capacity) out.")
        self.cropped |= first < last
        super()._remove(first, last)
        self.refresh()

    def _free_dead_pages(self) -> None:
        """Keep all pages: captured graphs hold their addresses."""

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, as ``LayerCache.nbytes``; also raises what ``check`` raises."""
        self.synchronize()
        if self.dense_len is None:
            return super().nbytes()
        for role, state in self.roles.items():  # the buffers count as windows
            state.sink, state.window = self.buffers[role][:, :, :0].clone(), self.buffers[role]
        try:
            return super().nbytes()
        finally:
            self._pull()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held for the sequences, as ``LayerCache.tensors``."""
        if self.dense_len is None or self.store is None:
            yield from super().tensors()
            return
        yield from self.store.tensors()
        yield from self.buffers.values()


def _keep_addresses(*tensors: Tensor) -> None:
    """Mark tensors as static for torch.compile: compiled graphs rely on their addresses."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
