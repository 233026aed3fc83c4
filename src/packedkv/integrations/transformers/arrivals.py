"""Work deferred to the end of a forward pass on a GPU: the appends that fill a cache, and the checks of any append.

A pass that fills a cache attends the fresh K and V, so all layers' tokens may be encoded later, one layer after the
other: the host, which short prompts wait for, is quicker so than between the model's own layers. Reading a number
synchronises with the GPU, which is expensive in the middle of a pass: numbers are noted layer by layer and read once.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from packedkv.cache.device import DeviceCache
from packedkv.cache.growing import GrowingCache, State
from packedkv.cache.host import LayerCache
from packedkv.checks import largest, largest_of
from packedkv.codec import FP16_MAX, ROLES
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.rope import new_number
from packedkv.probe import OutlierProbe, waits
from packedkv.store.positions import NOT_CONSECUTIVE

HELD = 64 << 20
"""Bytes of K and V that wait for a pass's end at most; where they are more, the layers so far are encoded at once."""


class Before(NamedTuple):
    """State of a fused layer before a call, for ``PackedCacheLayer.go_back``.

    Parameters
    ----------
    cache : State
    pages, table : Tensor
        Of its store.
    seen : int
        Tokens seen, including those that have left a window.
    """

    cache: State
    pages: Tensor
    table: Tensor
    seen: int


class PackedLayer(Protocol):
    """What deferred appends and checks need of a packed cache layer."""

    cache: LayerCache
    index: int
    prefill: Literal["exact", "decoded"]
    filled: bool
    """Whether the layer has received its first tokens."""
    may_wait: bool
    """Whether the first tokens may be appended at the pass's end."""
    waits: bool
    """Whether tokens of the layer wait for the pass's end."""

    def state(self) -> Before:
        """Return what an append replaces."""

    def go_back(self, state: Before) -> None:
        """Restore a state."""

    def reset(self) -> None:
        """Drop every token."""


class Note(NamedTuple):
    """A layer to which this forward pass has appended several tokens.

    Parameters
    ----------
    layer : PackedLayer
    tokens : int
        How many.
    before : Before or None
        None: the layer was empty.
    flag : Tensor int ``[1]``, optional
        On the device, raised by the kernels that encode, if a codec cannot hold a token.
    largest : tuple of Tensor
        Largest magnitudes of the tokens, where these kernels have not looked at all of them.
    dense : list of Tensor
        Tensors of the cache that hold those at which they have not looked.
    earlier : Tensor int ``[1]``, optional
        The layer's own flag: whether a token of an earlier decode step could not be held.
    """

    layer: PackedLayer
    tokens: int
    before: Before | None = None
    flag: Tensor | None = None
    largest: tuple[Tensor, ...] = ()
    dense: Sequence[Tensor] = ()
    earlier: Tensor | None = None


class Waiting(NamedTuple):
    """Tokens that fill a layer, to be appended at the pass's end."""

    layer: PackedLayer
    keys: Tensor
    values: Tensor
    positions: Tensor | None
    flag: Tensor


class Arrivals:
    """The appends of one forward pass of several tokens, checked once at its end, and the tokens not yet appended.

    If a pass stopped half-way, its tokens are appended and its notes checked before the next call adds, changes or
    reads anything.

    Parameters
    ----------
    layers : int
        Layers that a pass fills.
    probe : OutlierProbe, optional
        Measures the keys of the pass that fills the empty layers.
    """

    def __init__(self, layers: int, probe: OutlierProbe | None = None) -> None:
        self.layers, self.probe, self.cache = layers, probe, new_number()
        self.noted: dict[int, Note] = {}  # those that wait are among them
        self.waiting: list[Waiting] = []
        self.flags: dict[torch.device, tuple[Tensor, ...]] = {}  # 0 between passes

    def append(self, layer: PackedLayer, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> bool:
        """Append several tokens to a fused layer and note what ``settle`` must check; False: nothing was appended.

        Those that fill it may wait for the pass's end.
        """
        cache, first = layer.cache, not layer.filled
        if not isinstance(cache, DeviceCache) or keys.shape[2] == 1 or not waits(keys):
            return False
        grows = isinstance(cache, GrowingCache)
        if layer.prefill != "exact" if first else not grows:  # a static cache synchronises anyway
            return False
        if (flags := self.flags.get(keys.device)) is None:
            zeros = torch.zeros(self.layers, dtype=torch.int32, device=keys.device)
            flags = self.flags[keys.device] = zeros.split(1)
        flag = flags[len(self.noted) % self.layers]
        if first and isinstance(cache, GrowingCache) and layer.may_wait:
            if not self.waiting:  # the GPU has little to do yet
                cache.expect(positions, keys.shape[0])
            self.waiting.append(Waiting(layer, keys, values, positions, flag))
            self.noted[layer.index] = Note(layer, keys.shape[2])
            layer.waits = True
            if len(self.waiting) * (keys.nbytes + values.nbytes) > HELD:
                self.flush()
            return True
        self._append(cache, Waiting(layer, keys, values, positions, flag), None if first else layer.state())
        return True

    def _append(self, cache: DeviceCache, new: Waiting, before: Before | None) -> None:
        earlier = cache.bad if isinstance(cache, GrowingCache) and cache.unchecked else None
        try:
            cache.append(new.keys, new.values, new.positions, flag=new.flag)
        except BaseException:
            self.flags = {}  # this one may be raised
            raise
        self._note(cache, new, before, earlier)

    def _note(self, cache: DeviceCache, new: Waiting, before: Before | None, earlier: Tensor | None) -> None:
        """Note what was appended."""
        layer, keys, values, _, flag = new
        if isinstance(cache, GrowingCache):
            cache.unchecked = False  # ``settle`` reads its flag as well
        # numbers, not the tokens themselves: a pass would keep all layers' alive
        held = cache.unflagged(keys)
        most = (largest(keys), largest(values)) if held is None else ()
        dense = [x for x in held or () if x.numel()]
        self.noted[layer.index] = Note(layer, keys.shape[2], before, flag, most, dense, earlier)

    def flush(self) -> None:
        """Append the tokens that wait. If that fails, layers that have not got theirs are empty again."""
        waiting, self.waiting = self.waiting, []
        for new in waiting:
            new.layer.waits = False
        done, begun = 0, []
        try:
            for new in waiting:  # all layers begin, so that their constants are fitted together
                cache = new.layer.cache
                assert isinstance(cache, GrowingCache)
                begun.append((cache, cache.begin_append(new.keys, new.values, new.positions, flag=new.flag)))
            for new, (cache, leaving) in zip(waiting, begun, strict=True):
                cache.end_append(leaving)
                self._note(cache, new, None, None)
                done += 1
                if self.probe is not None:
                    self.probe(new.layer.index, cache, new.keys)
        except BaseException:
            self.flags = {}  # one may be raised
            raise
        finally:
            for new in waiting[done:]:
                new.layer.reset()

    def came(self, layer: PackedLayer, keys: Tensor, first: bool) -> None:
        """Note that these keys were appended to a layer."""
        if first:
            self.noted.setdefault(layer.index, Note(layer, keys.shape[2]))
            if self.probe is not None and not layer.waits:
                self.probe(layer.index, layer.cache, keys)
        if self.noted and (not waits(keys) or len(self.noted) == self.layers):
            self.settle()

    def settle(self) -> None:
        """Check what was noted (one synchronisation per device).

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the tokens; every layer that was noted is as it was before the pass.
        """
        if not self.noted:
            return
        if self.waiting:
            self.flush()
        if self.probe is not None:
            self.probe.measure()  # launches, before the synchronisation
        noted, self.noted = list(self.noted.values()), {}
        for device in {x.device for n in noted for x in (n.flag, n.earlier, *n.largest, *n.dense) if x is not None}:
            self._check(noted, device)
        if self.probe is not None:
            self.probe.settle()

    def _check(self, noted: Sequence[Note], device: torch.device) -> None:
        """Read all numbers of a device at once; raise for the first layer with a token that cannot be held."""
        placed = {id(x): (n, x) for n in noted if (x := _broken(n)) is not None and x.device == device}
        flags = [(n, x) for n in noted for x in (n.flag, n.earlier) if x is not None and x.device == device]
        most = [(n, x) for n in noted for x in n.largest if x.device == device]
        dense = [x for n in noted for x in n.dense if x.device == device]
        whole = [largest_of(dense)] if dense else []
        looks = (*placed.values(), *flags, *most)
        numbers = torch.cat([*(x.view(1) for _, x in looks), *(x.view(1) for x in whole)]).tolist()
        if any(numbers[: len(placed)]):
            self._go_back(noted)
            for _, x in placed.values():
                x.zero_()
            raise UnsupportedError(NOT_CONSECUTIVE)
        for (note, x), number in zip(flags, numbers[len(placed) :], strict=False):
            if number:
                self._refuse(noted, note, number if x is note.earlier else 0)
        for (note, _), number in zip(most, numbers[len(placed) + len(flags) :], strict=False):
            if not number <= FP16_MAX:  # true for NaN
                self._refuse(noted, note)
        if whole and not numbers[-1] <= FP16_MAX:
            for note in noted:
                if note.dense and not float(largest_of(note.dense)) <= FP16_MAX:
                    self._refuse(noted, note)

    def _refuse(self, noted: Sequence[Note], note: Note, earlier: float = 0) -> None:
        """Undo the pass and raise; ``earlier``: what the flag of earlier steps says, which is another error."""
        where = "" if earlier else _where(note)
        self._go_back(noted)
        if earlier and isinstance(note.layer.cache, DeviceCache):
            note.layer.cache.refuse(earlier)
        what, now = ("prefill", "empty again") if note.before is None else ("call", "as it was before the call")
        raise ValueError(
            f"layer {note.layer.index}: a key or value of the {what} is not finite or above 65504{where}; "
            f"codecs store finite values within the fp16 range. Check the model's dtype (fp16 overflow?) or "
            f"the attention mask. The cache is {now}."
        )

    def _go_back(self, noted: Sequence[Note]) -> None:
        self.flags = {}
        for note in noted:
            if note.before is None:
                note.layer.reset()
            else:
                note.layer.go_back(note.before)

    def forget(self, layer: PackedLayer) -> None:
        """Drop what was noted of a layer, and its tokens that wait."""
        if layer.waits:
            layer.waits = False
            self.waiting = [new for new in self.waiting if new.layer is not layer]
        if self.noted.pop(layer.index, None):
            self.flags = {}  # its own may be raised, and is not read any more
        if self.probe is not None:
            self.probe.forget(layer.index)


def _broken(note: Note) -> Tensor | None:
    """The flag of a layer whose keys are held without their mean: whether positions are not in order."""
    cache = note.layer.cache
    return cache.slots.broken if isinstance(cache, GrowingCache) and cache.slots is not None else None


def _where(note: Note) -> str:
    """Role and position of a token that could not be held: in the pages a row of zeros, otherwise as it came."""
    cache = note.layer.cache
    held = len(cache)
    first = held - min(note.tokens, held)
    for role, x in zip(ROLES, cache.decode(first, held), strict=True):
        lost = ~(x.abs() <= FP16_MAX).all(-1) | (x == 0).all(-1)
        if bool(lost.any()):
            b, h, t = lost.nonzero()[0].tolist()
            return f" ({role}s[batch={b}, head={h}, token={note.tokens - (held - first) + t}])"
    return ""
