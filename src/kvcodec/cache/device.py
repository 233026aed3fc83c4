"""FusedLayerCache: a LayerCache whose writes and attention run in the fused kernels.

Same pages, same bytes, same results as ``LayerCache``; what differs is who reads and writes them. Lengths live on the
device, so a decode step of a cache with a fixed capacity neither synchronises nor reallocates: it can be captured in a
CUDA graph and traced by ``torch.compile``. Host bookkeeping is brought up to date only when a host operation (decode,
crop, select, nbytes ...) needs it.

There is no fall-back: a scheme, head_dim or device that the kernels cannot take is refused with a reason. Where a codec
has a kernel to be read but none to be encoded, PyTorch encodes it into the same pages; ``kernels`` says so.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcodec.attention import Seen
from kvcodec.cache import many as staged
from kvcodec.cache.host import LayerCache, RoleState
from kvcodec.codec import ROLES, Role, check_tensors
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels.engine import Engine, choose, refusal
from kvcodec.scheme import KVScheme

ONE_RUN = "fused attention reads one run of tokens; evict(keep > 0) leaves two. Use attention='streamed'."


def fused_refusal(
    scheme: KVScheme, head_dim: int, device: torch.device, capacity: int = 0, page_tokens: int | None = None
) -> str:
    """Return why the fused kernels cannot serve this scheme here, or ``""`` if they can.

    ``capacity`` and ``page_tokens`` as in ``FusedLayerCache``.
    """
    return refusal(scheme, head_dim, device, page_tokens, static=capacity > 0)


class FusedLayerCache(LayerCache):
    """The packed cache of one layer, served by the fused kernels.

    Tokens leave the window for keys and values together, in blocks of the least common multiple of both codecs'
    ``block_tokens``: where one codec groups 32 tokens, the other one's window holds up to 31 tokens more than in
    ``LayerCache`` (and is counted with them).

    Parameters
    ----------
    scheme, layer, seed, params, page_tokens
        As ``LayerCache``.
    capacity : int
        Tokens to allocate pages for. With a capacity the cache is *static*: it never grows or synchronises in a decode
        step. 0 grows on demand.

    Raises
    ------
    UnsupportedError
        At the first append, if the kernels cannot take the scheme, head_dim or device; the text says why.
    """

    seq_lens: Tensor | None = None
    """Slots written per sequence, int32 ``[B]`` on the device; None until the first append."""
    held: Tensor | None = None
    """Static caches with a sink or window: tokens held dense, int32 ``[B]`` on the device."""
    engine: Engine | None = None
    unchecked = False
    """Of a cache that grows: whether a single token has come since the device's flag was last found to be 0."""
    fresh = False
    """Whether this append allocates: the device's lengths are 0, and are not read."""

    @property
    def unit(self) -> int:
        """Tokens that leave the window together."""
        return math.lcm(self.scheme.key.block_tokens, self.scheme.value.block_tokens)

    @property
    def holds_dense(self) -> bool:
        """Whether a token may be held dense: in the sink, the window, or an unfinished block."""
        return bool(self.scheme.sink or self.scheme.window or self.unit > 1)

    def kernels(self) -> dict[str, str]:
        """What serves this layer: ``decode``, ``encode.key``, ``encode.value``; empty before the first append."""
        if self.engine is None:
            return {}
        return {"decode": self.engine.name, **{f"encode.{role}": self.engine.written_by(role) for role in ROLES}}

    def reset(self) -> None:
        """Forget every token; a static cache keeps its pages, because captured graphs hold their addresses."""
        if self.seq_lens is not None and self.reserve:
            for tensor in (self.seq_lens, self.first, self.bad, *(() if self.held is None else (self.held,))):
                tensor.zero_()
            for role, state in self.roles.items():
                if state.codec.needs_sample and role not in self.fitted and self.engine is not None:
                    state.params, self.engine.ready = None, False  # the next prefill's
            self.start = 0
            self.emptied = True
            return
        self.emptied = self.unchecked = False
        self.seq_lens = self.held = self.engine = None
        self._host_length = 0
        super().reset()

    @property
    def length(self) -> int:
        """Live tokens per sequence; reads the device when the cache is static."""
        if self.seq_lens is None or not self.reserve:
            return self._host_length
        return 0 if self.fresh else int(self.device_length())

    @length.setter
    def length(self, value: int) -> None:
        self._host_length = value

    def device_length(self) -> Tensor:
        """Live tokens of a static cache, on the device."""
        assert self.seq_lens is not None
        encoded = self.seq_lens[0] - self.first[0]
        return encoded if self.held is None else encoded + self.held[0]

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        key, value = (self.scheme.codec(role).for_dtype(keys.dtype) for role in ROLES)
        scheme = replace(self.scheme, key=key, value=value)
        try:
            engine = choose(scheme, keys.shape[-1], keys.device, self.page_tokens, static=self.reserve > 0)
        except UnsupportedError as error:
            raise UnsupportedError(f"fused attention: {error}. Use attention='decoded' or 'streamed'.") from error
        super()._allocate(keys, values)
        assert self.store is not None
        self.engine = engine
        self.fresh, batch = True, keys.shape[0]
        sizes = [batch, batch, 1]  # slots written, first live slot, flag
        if self.reserve:  # compiled graphs know their addresses
            zeros = [torch.zeros(n, dtype=torch.int32, device=keys.device) for n in sizes]
        else:
            zeros = list(torch.zeros(sum(sizes), dtype=torch.int32, device=keys.device).split(sizes))
        self.seq_lens, self.first, self.bad = zeros
        if self.reserve:
            if self.holds_dense:
                self._allocate_dense(batch)
            _stay(self.store.pages, self.store.table, self.seq_lens, self.first, self.bad)

    def _allocate_dense(self, batch: int) -> None:
        """Make the buffers of a static cache's sink and window, sink first."""
        width = self.scheme.sink + self.scheme.window + self.unit
        self.buffers: dict[Role, Tensor] = {}
        for role in ROLES:
            held = self.roles[role].dense("sink")
            self.buffers[role] = held.new_zeros(batch, held.shape[1], width, held.shape[3])
        device = self.buffers["key"].device
        self.held = torch.zeros(batch, dtype=torch.int32, device=device)
        self.spare = torch.zeros(1, dtype=torch.int32, device=device)  # flags of an encode that may not count
        self.places = torch.arange(width, dtype=torch.int64, device=device)
        _stay(*self.buffers.values(), self.held, self.spare, self.places)

    def _unit(self, state: RoleState) -> int:
        return self.unit

    def append(self, keys: Tensor, values: Tensor, *, flag: Tensor | None = None) -> None:
        """Encode and write what leaves the window, in one launch where the codecs allow.

        Several tokens at once are checked as in ``LayerCache``. One is not (that would synchronise): NaN, Inf or a
        magnitude above 65504 is stored as a zero row and raises a device flag that ``check`` reads. With a ``flag``,
        int32 ``[1]``, several are not checked either: the caller looks at it later, and at what ``flags_all`` leaves.
        """
        n = keys.shape[2]
        if n == 1:
            self.unchecked = self.unchecked or not self.reserve
        elif flag is None:
            earlier = (self.bad,) if self.unchecked and self.seq_lens is not None else ()
            self.refuse(*check_tensors(keys, values, *earlier))  # by one look at the device
        if self.emptied:  # other sequences than before the reset get pages of their own
            self.emptied = False
            b, h, _, d = self.roles["key"].dense("sink").shape
            if (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype) != (b, h, d, self._dtype):
                self.seq_lens = None
                self.reset()
        self._check_shapes(keys, values)
        if self.store is None:
            self._allocate(keys, values)
        assert self.store is not None
        assert self.seq_lens is not None
        both = zip(ROLES, (keys, values), strict=True)
        new: dict[Role, Tensor] = {role: x.to(self.roles[role].dense("sink").dtype) for role, x in both}
        if self.reserve and self.holds_dense:
            if n == 1 and self.engine is not None and self.engine.ready:
                self._step(new)
            else:
                self._append_static(new, flag)
                self.fresh = False
            return
        if self.holds_dense or any(s.params is None for s in self.roles.values()):
            new = {role: self._pass_window(self.roles[role], x) for role, x in new.items()}
        if not self.reserve:
            self._host_length += n
            runs = self.roles["key"].runs
            self.store.ensure((runs[-1][1] if runs else 0) + new["key"].shape[2], exact=n > 1)
        if (n := new["key"].shape[2]) == 0:
            return
        if self.reserve and n > 1:
            self._check_room(n)
        self._write(new, self.seq_lens, self.bad if flag is None else flag)
        self.seq_lens.add_(n)
        self.fresh = False
        if not self.reserve:
            for state in self.roles.values():
                state.extend(n)

    def flags_all(self, keys: Tensor) -> bool:
        """Whether appending raises the flag for every number that codecs cannot hold: all go to the kernels at once."""
        assert self.engine is not None
        return not self.holds_dense and keys.dtype == self.roles["key"].dense("sink").dtype and self.engine.flags_all

    def state(self) -> tuple[Any, ...]:
        """What an append to a cache that grows replaces, for ``go_back``; nothing is copied.

        Sink and window are new tensors after an append; slots behind the end are written again by the next one.
        """
        roles = [(role, s.sink, s.window, list(s.runs)) for role, s in self.roles.items()]
        return roles, self.start, self._host_length, self.unchecked

    def go_back(self, state: tuple[Any, ...]) -> None:
        """Forget what has been appended since ``state``; pages that it needed are freed."""
        roles, self.start, self._host_length, self.unchecked = state
        for role, sink, window, runs in roles:
            now = self.roles[role]
            now.sink, now.window, now.runs = sink, window, runs
        self._forget_decoded()
        self._free_dead_pages()
        self._push()

    def _check_room(self, n: int) -> None:
        """Refuse tokens for which a static cache has no slots (evicted slots stay used)."""
        assert self.store is not None
        if (0 if self.fresh or self.seq_lens is None else int(self.seq_lens[0])) + n > self.store.capacity:
            raise ShapeError(
                f"the static cache holds {self.store.capacity} tokens per sequence; {self.length} + {n} do not "
                f"fit. Make it larger (max_len) or crop it."
            )

    def _write(self, new: dict[Role, Tensor], first: Tensor, bad: Tensor) -> None:
        assert self.engine is not None
        assert self.store is not None
        self._prepare()
        self.engine.encode(new, self.roles, self.store, first, bad)

    def _prepare(self) -> bool:
        """Hand the constants to the engine; False before the first token where they are taken from a prefill."""
        assert self.engine is not None
        if not self.engine.ready:
            if any(state.params is None for state in self.roles.values()):
                return False
            self.engine.prepare(self.roles)
            if self.reserve:
                _stay(*self.engine.tensors())
        return True

    def _append_static(self, new: dict[Role, Tensor], flag: Tensor | None) -> None:
        """Append to a static cache that holds tokens dense; reads the lengths from the device."""
        assert self.seq_lens is not None
        assert self.held is not None
        self._pull()
        leaving = {role: self._pass_window(self.roles[role], x) for role, x in new.items()}
        self._prepare()  # also without tokens: the next step may be a captured one
        if n := leaving["key"].shape[2]:
            self._check_room(n)
            self._write(leaving, self.seq_lens, self.bad if flag is None else flag)
            self.seq_lens.add_(n)
        self._push_dense()

    def _step(self, new: dict[Role, Tensor]) -> None:
        """Append one token to a static cache that holds tokens dense, without a look at the lengths.

        A block that is full is encoded and makes room. Which step that is, only the device knows, so every step encodes
        the oldest block; in the others it goes to slots behind the capacity, where it is dropped.
        """
        assert self.seq_lens is not None
        assert self.held is not None
        assert self.store is not None
        sink, unit, width = self.scheme.sink, self.unit, self.places.shape[0]
        at = self.held[:1].long().clamp_(max=width - 1)
        for role, x in new.items():
            self.buffers[role].index_copy_(2, at, x)
        full = (self.held + 1 >= width).to(torch.int32)  # [B], all alike
        oldest = {role: buffer[:, :, sink : sink + unit] for role, buffer in self.buffers.items()}
        self._write(oldest, torch.where(full > 0, self.seq_lens, self.store.capacity), self.spare)
        self.bad.copy_(torch.maximum(self.bad, self.spare * full[:1]))
        self.spare.zero_()
        gone = (full[:1] * unit).long()
        kept = (self.places + torch.where(self.places >= sink, gone, 0)).clamp_(max=width - 1)
        for buffer in self.buffers.values():
            buffer.copy_(buffer.index_select(2, kept))
        self.seq_lens.add_(full * unit)
        self.held.add_(1 - full * unit)

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
        """Fused attention over the packed pages: of one query token per sequence, or of the newest n (``staged``).

        Parameters
        ----------
        q : Tensor ``[B, HQ, n, D]``
        scale, sinks, mask, causal
            As ``kvcodec.attention.attend``; the last two of several query tokens alone.
        start : Tensor int32 ``[B]``, optional
            Left padding: tokens before it are not attended.
        softcap : float
            Scores become ``softcap * tanh(score / softcap)``; 0: they stay. CUDA kernels only.

        Raises
        ------
        UnsupportedError
            For a mask of one query token; for several where ``staged.refusal`` says why not.
        """
        many = q.shape[2] != 1
        if mask is not None and not many:
            raise UnsupportedError("fused attention takes no mask of a single query token; pass start= for padding.")
        without = self.emptied or (not self.reserve and self._host_length == 0)
        if self.store is None or without or not self._prepare():
            raise ShapeError("attend: the cache is empty; append keys and values first.")
        site = self.roles["key"].site
        if q.shape[0] != self.batch or q.shape[1] % site.num_heads or q.shape[3] != site.head_dim:
            raise ShapeError(
                f"attend: q {tuple(q.shape)} does not fit a cache of batch={self.batch}, "
                f"kv_heads={site.num_heads}, head_dim={site.head_dim}; query heads must be a multiple of the KV heads."
            )
        if many:
            self.synchronize()
            seen = Seen(causal, start=() if start is None else tuple(start.tolist()), softcap=softcap, mask=mask)
            return staged.attend(self, q, scale=scale, sinks=sinks, seen=seen)
        assert self.seq_lens is not None
        assert self.engine is not None
        dense: dict[str, Tensor | None] = {}
        first = self.first
        if self.holds_dense:
            dense = self._dense()
            if start is not None:
                first, dense["dense_start"] = self._start_from(start)
        elif start is not None:
            first = self.first + start
        return self.engine.attend(
            q,
            self.store,
            self.seq_lens,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            sinks=sinks,
            start=first,
            softcap=softcap,
            **dense,
        )

    def _dense(self) -> dict[str, Tensor | None]:
        """Tokens held dense, sink first, and of a static cache how many they are."""
        if self.held is not None:
            return {"dense_k": self.buffers["key"], "dense_v": self.buffers["value"], "dense_lens": self.held}
        parts = ((s.dense("sink"), s.dense("window")) for s in self.roles.values())
        both = [window if not sink.shape[2] else torch.cat([sink, window], 2) for sink, window in parts]
        return {"dense_k": both[0], "dense_v": both[1]}

    def _start_from(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """First live slot, and first live token of those held dense, where the first ``start`` tokens are padding.

        Tokens lie as sink, pages, window: what padding takes of the pages it has taken of the sink before, and of the
        window only after it has taken all pages.
        """
        assert self.seq_lens is not None
        sink = self.scheme.sink if self.held is not None else self.roles["key"].dense("sink").shape[2]
        encoded = self.seq_lens - self.first
        behind = (start - encoded).clamp(min=sink)
        dense_start = torch.minimum(start, behind).to(torch.int32)
        return self.first + (start - sink).clamp(min=0), dense_start

    def workspace_bytes(self, q: Tensor) -> int:
        """Upper bound of what ``attend`` needs beside the cache for one query token."""
        if self.engine is None or self.store is None:
            return 0
        return self.engine.workspace_bytes(q, self.store, self.holds_dense)

    def check(self) -> None:
        """Raise if a decode step met what it could not stop for (one host sync).

        Raises
        ------
        ValueError
            A token was NaN, Inf or above 65504 in magnitude; it was stored as a zero row.
        ShapeError
            A captured or compiled step went on when the static cache was full; its tokens were dropped.
        """
        self.refuse(int(self.bad.item()) if self.seq_lens is not None else 0)

    def refuse(self, flag: float = 0) -> None:
        """Raise what ``check`` raises for a flag that is not 0."""
        self.unchecked = flag != 0
        if flag == 2:
            assert self.store is not None
            raise ShapeError(
                f"layer {self.layer}: the static cache of {self.store.capacity} tokens per sequence is full; later "
                f"tokens were dropped. Make it larger (max_len)."
            )
        if flag:
            raise ValueError(
                f"layer {self.layer}: a key or value appended in a decode step is not finite or above 65504; it was "
                f"stored as a zero row. Check the model's dtype (fp16 overflow?)."
            )

    # -- host operations: bring the host state up to date first, and the device state afterwards ---------------------

    def _pull(self) -> None:
        """Set the host's runs from the device's lengths (a static cache's host state is stale)."""
        if self.reserve and self.seq_lens is not None:
            first = last = count = 0
            if not self.fresh:
                numbers = [self.first[:1], self.seq_lens[:1], *(() if self.held is None else (self.held[:1],))]
                first, last, *held = torch.cat(numbers).tolist()  # one look at the device
                count = held[0] if held else 0
            for role, state in self.roles.items():
                state.runs = [(first, last)] if last > first else []
                if self.held is not None:
                    sink = min(count, self.scheme.sink)
                    state.sink, state.window = self.buffers[role][:, :, :sink], self.buffers[role][:, :, sink:count]

    def _push_dense(self) -> None:
        """Move sink and window of the host's state back to a static cache's buffers."""
        if self.held is None:
            return
        # copies: what is written may be what is read
        parts = {role: torch.cat([s.dense("sink"), s.dense("window")], 2) for role, s in self.roles.items()}
        if self.held.shape[0] != self.batch:
            self._allocate_dense(self.batch)
        for role, state in self.roles.items():
            count = parts[role].shape[2]
            self.buffers[role][:, :, :count] = parts[role]
            state.sink = state.window = parts[role].new_empty(*parts[role].shape[:2], 0, parts[role].shape[3])
            self.held.fill_(count)

    def _push(self) -> None:
        """Set the device's lengths from the host's runs."""
        if self.seq_lens is None or self.store is None:
            return
        if len(runs := self.roles["key"].runs) > 1:
            raise UnsupportedError(ONE_RUN)
        first, last = runs[0] if runs else (0, 0)
        if self.reserve and last <= self.store.capacity:  # what did not fit has been cropped away
            self.bad.masked_fill_(self.bad == 2, 0)
        if self.seq_lens.shape[0] == self.batch:  # in place: captured graphs hold the addresses
            self.seq_lens.fill_(last)
            self.first.fill_(first)
        else:
            like = self.seq_lens
            self.seq_lens, self.first = like.new_full((self.batch,), last), like.new_full((self.batch,), first)
        self._push_dense()

    def decode(self, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Decoded keys and values, as ``LayerCache.decode`` (PyTorch reference path)."""
        self.synchronize()
        return super().decode(first, last)

    def synchronize(self) -> None:
        """Bring the host's runs, sink and window up to date; raises what ``check`` raises (host syncs)."""
        self._pull()
        if self.reserve or self.unchecked:
            self.check()  # a full static cache has no slots for its last tokens

    def select(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self._pull()
        super().select(indices)
        if self.engine is not None:
            self.engine.ready = False  # constants may belong to a sequence
        self._push()

    def _remove(self, first: int, last: int) -> None:
        self._pull()
        if first and last < self.length:
            raise UnsupportedError(ONE_RUN)
        if self.reserve and first < last < self.length:
            raise UnsupportedError("a static cache does not use evicted slots again; leave max_len (capacity) out.")
        self._check_block(first)
        super()._remove(first, last)
        self._push()

    def _check_block(self, length: int) -> None:
        """Refuse to crop into a block of tokens: the next block could not begin behind it in one run of slots."""
        state = self.roles.get("key")
        if self.unit == 1 or state is None or not state.runs:
            return
        encoded = length - state.dense("sink").shape[2]
        over = (state.runs[-1][0] + encoded) % self.unit
        if 0 < encoded < state.encoded and over:
            raise UnsupportedError(
                f"crop({length}) cuts a block of {self.unit} tokens that is encoded already, behind which the fused "
                f"kernels cannot go on; crop to {length - over}, or use attention='streamed'."
            )

    def _free_dead_pages(self) -> None:
        if not self.reserve:  # captured graphs hold the pages' addresses
            super()._free_dead_pages()

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, as ``LayerCache.nbytes``; also raises what ``check`` raises."""
        self._pull()
        self.check()
        if self.held is None:
            return super().nbytes()
        for role, state in self.roles.items():  # the buffers count as the windows that they are
            state.sink, state.window = self.buffers[role][:, :, :0].clone(), self.buffers[role]
        try:
            return super().nbytes()
        finally:
            self._pull()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held for the sequences, as ``LayerCache.tensors``."""
        if self.held is None or self.store is None:
            yield from super().tensors()
            return
        yield from self.store.tensors()
        yield from self.buffers.values()


def _stay(*tensors: Tensor) -> None:
    """Tell compiled graphs that these tensors keep their addresses."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
