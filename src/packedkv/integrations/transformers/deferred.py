"""Work of a forward pass on a GPU that is deferred to its end: appends that fill a cache, and checks of any append.

The host, which limits short prompts, then encodes faster than between layers, and reads all numbers at one
synchronization.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.checks import largest
from packedkv.codec import FP16_MAX, ROLES
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.rope import new_number
from packedkv.probe import OutlierProbe, synchronizes
from packedkv.store.positions import NOT_CONSECUTIVE

DEFERRED_BYTES = 64 << 20
"""Most bytes of K and V whose appends are deferred; beyond, the layers so far are encoded at once."""


class DeferringLayer(Protocol):
    """What deferred work needs of a cache layer."""

    cache: LayerCache
    index: int
    prefill: Literal["exact", "decoded"]
    filled: bool  # whether the layer has received its first tokens
    can_defer: bool  # whether the first tokens may be appended at the pass's end
    has_deferred: bool  # whether they are to be appended then

    def undo(self) -> Callable[[], None]:
        """Return a function that undoes every later append."""

    def reset(self) -> None:
        """Drop every token."""


class PendingAppend(NamedTuple):
    """Tokens that fill a layer, to be appended at the pass's end."""

    layer: DeferringLayer
    keys: Tensor
    values: Tensor
    positions: Tensor | None
    flag: Tensor


class PendingCheck(NamedTuple):
    """What to read after a pass that appends several tokens to a layer."""

    layer: DeferringLayer
    tokens: int
    undo: Callable[[], None] | None = None  # None: the layer was empty
    flag: Tensor | None = None  # int [1], raised by the kernels that encode if a codec cannot hold a token
    largest: tuple[Tensor, ...] = ()  # magnitudes of the tokens, where these kernels do not see all of them
    dense: Sequence[Tensor] = ()  # tensors of the cache with the tokens that they do not see
    earlier: Tensor | None = None  # int [1], the layer's own flag: of a token of an earlier decode step

    @property
    def disorder(self) -> Tensor | None:
        """Flag of a layer whose keys are held without their mean: whether positions are not in order."""
        cache = self.layer.cache
        return cache.slots.broken if isinstance(cache, FusedLayerCache) and cache.slots is not None else None

    def where(self) -> str:
        """Role and position of a token that cannot be held: in the pages a row of zeros, otherwise as it came."""
        cache = self.layer.cache
        first = max(0, len(cache) - self.tokens)
        skipped = self.tokens - (len(cache) - first)
        for role, x in zip(ROLES, cache.decode(first, len(cache)), strict=True):
            lost = ~(x.abs() <= FP16_MAX).all(-1) | (x == 0).all(-1)
            if bool(lost.any()):
                b, h, t = lost.nonzero()[0].tolist()
                return f" ({role}s[batch={b}, head={h}, token={skipped + t}])"
        return ""


class Deferred:
    """Appends and checks of one forward pass of several tokens, done at its end.

    If a pass stops half-way, they are done before the next call adds, changes or reads anything. ``layers``: number of
    layers that a pass fills. ``probe`` measures the keys of the pass that fills the empty layers.
    """

    def __init__(self, layers: int, probe: OutlierProbe | None = None) -> None:
        self.layers, self.probe, self.cache = layers, probe, new_number()
        self.checks: dict[int, PendingCheck] = {}  # of deferred appends as well
        self.appends: list[PendingAppend] = []
        self.flags: dict[torch.device, list[Tensor]] = {}  # zeros that no append has used

    def append(self, layer: DeferringLayer, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> bool:
        """Append several tokens to a fused layer, checked by ``settle``; False: nothing was appended.

        Those that fill the layer may be appended at the pass's end.
        """
        cache, first = layer.cache, not layer.filled
        if not isinstance(cache, FusedLayerCache) or keys.shape[2] == 1 or not synchronizes(keys):
            return False
        if layer.prefill != "exact" if first else cache.static:  # a static cache synchronizes anyway
            return False
        if not (flags := self.flags.setdefault(keys.device, [])):  # one launch for all layers
            flags += torch.zeros(self.layers, dtype=torch.int32, device=keys.device).split(1)
        flag = flags.pop()
        new = PendingAppend(layer, keys, values, positions, flag)
        if first and not cache.static and layer.can_defer:
            if not self.appends:  # the GPU has little to do yet
                cache.expect(positions, keys.shape[0])
            self.appends.append(new)
            self.checks[layer.index] = PendingCheck(layer, keys.shape[2])
            layer.has_deferred = True
            if len(self.appends) * (keys.nbytes + values.nbytes) > DEFERRED_BYTES:
                self.flush()
            return True
        undo = None if first else layer.undo()
        earlier = cache.bad if cache.unchecked else None
        cache.append(keys, values, positions, flag=flag)
        self._check_later(cache, new, undo, earlier)
        return True

    def _check_later(
        self, cache: FusedLayerCache, new: PendingAppend, undo: Callable[[], None] | None, earlier: Tensor | None
    ) -> None:
        cache.unchecked = False  # ``settle`` reads its flag as well
        # numbers, not the tokens themselves: a pass would keep all layers' alive
        unseen = cache.unflagged(new.keys)
        most = (largest(new.keys), largest(new.values)) if unseen is None else ()
        dense = [x for x in unseen or () if x.numel()]
        layer = new.layer
        self.checks[layer.index] = PendingCheck(layer, new.keys.shape[2], undo, new.flag, most, dense, earlier)

    def flush(self) -> None:
        """Do the deferred appends. If one fails, its layer and the later ones are empty again."""
        appends, self.appends = self.appends, []
        for new in appends:
            new.layer.has_deferred = False
        done, begun = 0, []
        try:
            for new in appends:  # all layers begin, so that their constants are fitted together
                cache = new.layer.cache
                assert isinstance(cache, FusedLayerCache)
                begun.append((cache, cache.begin_append(new.keys, new.values, new.positions, flag=new.flag)))
            for new, (cache, leaving) in zip(appends, begun, strict=True):
                cache.end_append(leaving)
                self._check_later(cache, new, None, None)
                done += 1
                if self.probe is not None:
                    self.probe(new.layer.index, cache, new.keys)
        finally:
            for new in appends[done:]:
                new.layer.reset()

    def appended(self, layer: DeferringLayer, keys: Tensor, first: bool) -> None:
        """Record that a layer has these keys; after the last layer of a pass, ``settle``."""
        if first:
            self.checks.setdefault(layer.index, PendingCheck(layer, keys.shape[2]))
            if self.probe is not None and not layer.has_deferred:
                self.probe(layer.index, layer.cache, keys)
        if self.checks and (not synchronizes(keys) or len(self.checks) == self.layers):
            self.settle()

    def settle(self) -> None:
        """Run the deferred appends and checks (one synchronization per device).

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the tokens; every layer is restored to its state before the pass.
        """
        if not self.checks:
            return
        if self.appends:
            self.flush()
        if self.probe is not None:
            self.probe.measure()  # launches, before the synchronization
        checks, self.checks = list(self.checks.values()), {}
        for device in {x.device for c in checks for x in (c.flag, c.earlier, *c.largest, *c.dense) if x is not None}:
            self._read(checks, device)
        if self.probe is not None:
            self.probe.settle()

    def _read(self, checks: Sequence[PendingCheck], device: torch.device) -> None:
        """Read all numbers of a device at once; raise for the first layer with a token that cannot be held."""
        disorder = {id(x): x for c in checks if (x := c.disorder) is not None and x.device == device}
        dense = [x for c in checks for x in c.dense if x.device == device]
        # each number with its check and the largest that is allowed
        looks: list[tuple[PendingCheck | None, Tensor, float]] = [(None, x, 0) for x in disorder.values()]
        looks += [(c, x, 0) for c in checks for x in (c.flag, c.earlier) if x is not None and x.device == device]
        looks += [(c, x, FP16_MAX) for c in checks for x in c.largest if x.device == device]
        looks += [(None, get_total_norm(dense, torch.inf), FP16_MAX)] if dense else []  # a few launches for all
        numbers = torch.cat([x.view(1) for _, x, _ in looks]).tolist()
        for (check, x, limit), number in zip(looks, numbers, strict=True):
            if number <= limit:  # false for NaN
                continue
            if id(x) in disorder:
                self._undo(checks)
                for flag in disorder.values():
                    flag.zero_()
                raise UnsupportedError(NOT_CONSECUTIVE)
            if check is None:
                check = next(c for c in checks if c.dense and not float(get_total_norm(c.dense, torch.inf)) <= FP16_MAX)
            self._refuse(checks, check, number if x is check.earlier else 0)

    def _refuse(self, checks: Sequence[PendingCheck], check: PendingCheck, earlier: float) -> None:
        """Undo the pass and raise; ``earlier``: what the flag of earlier steps says, which is another error."""
        where = "" if earlier else check.where()
        self._undo(checks)
        if earlier and isinstance(check.layer.cache, FusedLayerCache):
            check.layer.cache.refuse(earlier)
        what, now = ("prefill", "empty again") if check.undo is None else ("call", "as it was before the call")
        raise ValueError(
            f"layer {check.layer.index}: a key or value of the {what} is not finite or above 65504{where}; "
            f"codecs store finite values within the fp16 range. Check the model's dtype (fp16 overflow?) or "
            f"the attention mask. The cache is {now}."
        )

    def _undo(self, checks: Sequence[PendingCheck]) -> None:
        for check in checks:
            (check.undo or check.layer.reset)()

    def forget(self, layer: DeferringLayer) -> None:
        """Drop what is deferred of a layer."""
        if layer.has_deferred:
            layer.has_deferred = False
            self.appends = [new for new in self.appends if new.layer is not layer]
        self.checks.pop(layer.index, None)
        if self.probe is not None:
            self.probe.forget(layer.index)
