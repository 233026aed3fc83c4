"""One model layer of a packed cache: what transformers calls, on top of a ``LayerCache``.

``PackedLayer`` serves full attention, ``WindowedLayer`` sliding and chunked attention. Every token is encoded once, on
arrival; what ``update`` returns depends on the layer's way of attention: decoded K and V, or a handle to itself.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcodec.cache import many as staged
from kvcodec.cache.device import FusedLayerCache
from kvcodec.cache.host import LayerCache
from kvcodec.codec import FP16_MAX, ROLES, check_tensor, largest
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.integrations.transformers.attention import PackedKV
from kvcodec.integrations.transformers.plan import Attention
from kvcodec.probe import OutlierProbe, waits

Prefill = Literal["exact", "decoded"]

CHUNK_TOKENS = 1024
"""Tokens decoded at a time; bounds what a read needs beyond its result."""
APPEND_TOKENS = 4096
"""Tokens of a prefill encoded at a time; bounds the float32 copies that encoding needs."""
DECODE_COPIES = 10
"""Upper bound of the float32 copies of a chunk that a codec's decode holds at once; a test counts them."""


class Note(NamedTuple):
    """A layer that was given several tokens in this forward pass.

    Parameters
    ----------
    layer : PackedLayer
    before : tuple or None
        What ``PackedLayer.go_back`` takes; None: the layer was empty.
    wrong : tuple of Tensor
        Numbers on the device, one each, that are above a bound or NaN if codecs cannot hold the tokens.
    bound : float
    earlier : Tensor, optional
        The layer's own flag: whether a token of an earlier decode step could not be held.
    """

    layer: "PackedLayer"
    before: tuple[Any, ...] | None = None
    wrong: tuple[Tensor, ...] = ()
    bound: float = 0.0
    earlier: Tensor | None = None


class Arrivals:
    """What is noted on a GPU while a forward pass gives several tokens to each layer, and looked at once, at its end.

    A look at a number waits for the GPU. In the middle of a pass that costs more than the number did. A pass that
    stopped in its middle is looked at before the next call adds, changes or reads anything.

    Parameters
    ----------
    layers : int
        Layers that a pass fills.
    probe : OutlierProbe, optional
        Judges the keys of the pass that fills the empty layers.
    """

    def __init__(self, layers: int, probe: OutlierProbe | None = None) -> None:
        self.layers, self.probe = layers, probe
        self.noted: dict[int, Note] = {}
        self.flags: dict[torch.device, tuple[Tensor, ...]] = {}  # 0 between passes

    def append(self, layer: "PackedLayer", keys: Tensor, values: Tensor) -> bool:
        """Append several tokens to a fused layer, and note what ``settle`` has to look at; False: nothing was done."""
        cache, first = layer.cache, not layer.filled
        if not waits(keys) or keys.shape[2] == 1 or layer.attention != "fused":
            return False
        if layer.prefill != "exact" if first else cache.reserve:  # a static cache looks at its lengths anyway
            return False
        assert isinstance(cache, FusedLayerCache)
        if (flags := self.flags.get(keys.device)) is None:
            zeros = torch.zeros(self.layers, dtype=torch.int32, device=keys.device)
            flags = self.flags[keys.device] = zeros.split(1)
        flag, earlier = flags[len(self.noted) % self.layers], cache.bad if cache.unchecked else None
        before = None if first else layer.state()
        try:
            cache.append(keys, values, flag=flag)
        except BaseException:
            self.flags = {}  # this one may be up
            raise
        cache.unchecked = False  # looked at in ``settle`` as well
        if cache.flags_all(keys):
            self.noted[layer.index] = Note(layer, before, (flag,), earlier=earlier)
        else:
            both = largest(keys), largest(values)
            self.noted[layer.index] = Note(layer, before, both, FP16_MAX, earlier)
        return True

    def came(self, layer: "PackedLayer", keys: Tensor, first: bool) -> None:
        """Take notice of a layer that these keys were appended to."""
        if first:
            self.noted.setdefault(layer.index, Note(layer))
            if self.probe is not None:
                self.probe(layer.index, layer.cache, keys)
        if self.noted and (not waits(keys) or len(self.noted) == self.layers):
            self.settle()

    def settle(self) -> None:
        """Look at what was noted.

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the tokens; every layer that was noted is as it was before the pass.
        """
        if not self.noted:
            return
        if self.probe is not None:
            self.probe.measure()  # before the wait
        noted, self.noted = list(self.noted.values()), {}
        looks = [(n, n.bound, x) for n in noted for x in n.wrong]
        looks += [(n, -1.0, n.earlier) for n in noted if n.earlier is not None]  # before this pass
        for device in {x.device for *_, x in looks}:  # of a model on several GPUs
            here = [one for one in looks if one[2].device == device]
            numbers = torch.cat([x.view(1) for *_, x in here]).tolist()
            for (note, bound, _), number in zip(here, numbers, strict=True):
                if number <= max(bound, 0.0):  # NaN is not
                    continue
                self._go_back(noted)
                if bound < 0:
                    note.layer.cache.refuse(number)  # type: ignore[attr-defined]
                what, now = ("prefill", "empty again") if note.before is None else ("call", "as it was before the call")
                raise ValueError(
                    f"layer {note.layer.index}: a key or value of the {what} is not finite or above 65504; codecs "
                    f"store finite values within the fp16 range. Check the model's dtype (fp16 overflow?) or the "
                    f"attention mask. The cache is {now}."
                )
        if self.probe is not None:
            self.probe.settle()

    def _go_back(self, noted: Sequence[Note]) -> None:
        self.flags = {}
        for note in noted:
            if note.before is None:
                note.layer.reset()
            else:
                note.layer.go_back(note.before)

    def forget(self, layer: "PackedLayer") -> None:
        """Drop what was noted of a layer."""
        if self.noted.pop(layer.index, None):
            self.flags = {}  # its own may be up, and nobody will look
        if self.probe is not None:
            self.probe.forget(layer.index)


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Cache of one full-attention layer.

    Parameters
    ----------
    cache : LayerCache
        Where the packed tokens are.
    index : int
        Layer of the model.
    attention : {"decoded", "streamed", "fused"}
    prefill : {"exact", "decoded"}
        What the call that fills the empty layer attends: the fresh K and V, or what is stored.
    arrivals : Arrivals, optional
        Told of what is appended; one object for all layers of a model.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        cache: LayerCache,
        index: int,
        attention: Attention,
        prefill: Prefill,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__()
        self.cache, self.index, self.attention, self.prefill = cache, index, attention, prefill
        self.arrivals = arrivals or Arrivals(1)
        self.is_compileable = attention == "fused" and cache.reserve > 0
        self.handle = PackedKV(self)
        self.workspace_bytes = 0
        self.calls = dict.fromkeys(("exact", "decoded", "streamed", "fused", "staged", "scored"), 0)
        self.compiled = False
        self.counted = 0
        self.filled = False
        self.mask_checked = False

    def __repr__(self) -> str:
        """Return layer, scheme and tokens held."""
        return f"{type(self).__name__}({self.index}, {self.cache.scheme}, tokens={len(self.cache)})"

    @property
    def batch_size(self) -> int:
        """Sequences held; absent before the first token, as transformers expects."""
        if self.cache.store is None:
            raise AttributeError("batch_size")
        return self.cache.batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the LayerCache allocates at the first append."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new tokens, encode what leaves the window, and return what attention shall read.

        Parameters
        ----------
        key_states, value_states : Tensor ``[B, H, n, D]``

        Returns
        -------
        (keys, values)
            ``[B, H, N, D]`` each, or a handle to this layer twice (``streamed``, ``fused``).

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the new tokens, with the position; of a fused cache on a GPU without it, and
            when the tokens have come to the last layer.
        """
        first = not self.filled
        if torch.compiler.is_compiling() and (first or key_states.shape[2] > 1):
            self._take_several(key_states, value_states, first)
        else:
            self._take(key_states, value_states, first)
        if first and self.prefill == "exact":
            self.calls["exact"] += 1
            return key_states, value_states
        return self._stored(key_states.shape[2])

    def _take(self, keys: Tensor, values: Tensor, first: bool) -> None:
        if self.is_compileable and not torch.compiler.is_compiling():
            self._count(keys.shape[2], first)
        self._append(keys.detach(), values.detach())
        self._arrived(keys, first)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # pages are allocated, lengths looked at on the host
    def _take_several(self, keys: Tensor, values: Tensor, first: bool) -> None:
        self._take(keys, values, first)

    def _count(self, fresh: int, first: bool) -> None:
        """Refuse tokens beyond a static cache's pages; counted on the host, so a captured or compiled step is not."""
        if first or fresh > 1:
            self.counted = 0 if first else len(self.cache)
        self.counted += fresh
        if self.counted > self.cache.reserve:
            raise ShapeError(
                f"layer {self.index}: token {self.counted} does not fit the static cache of max_len="
                f"{self.cache.reserve}; make it with a larger max_len, or crop it."
            )

    def _arrived(self, keys: Tensor, first: bool) -> None:
        self.filled = self.is_initialized = True
        if first:
            self.mask_checked = False
        if first or self.arrivals.noted:
            self.arrivals.came(self, keys.detach(), first)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        n = keys.shape[2]
        if self.arrivals.noted and (n == 1 or self.index in self.arrivals.noted):  # that pass is over
            self.arrivals.settle()
        scheme, given = self.cache.scheme, self.cache.fitted  # given constants need no sample of the whole prefill
        sampled = any(scheme.codec(role).needs_sample and role not in given for role in ROLES)
        if self.arrivals.append(self, keys, values):
            return
        if n <= APPEND_TOKENS or self.attention == "fused" or (sampled and not self.filled):
            self.cache.append(keys, values)
            return
        for name, x in (("keys", keys), ("values", values)):
            check_tensor(name, x)  # all of it before any of it is stored
        try:
            for at in range(0, n, APPEND_TOKENS):
                self.cache.append(keys[:, :, at : at + APPEND_TOKENS], values[:, :, at : at + APPEND_TOKENS])
                if at == 0 and self.cache.store is not None:
                    self.cache.store.ensure(self.cache.length + n - APPEND_TOKENS, exact=True)
        except BaseException:
            if not self.filled:  # half a prefill is no prefill
                self.cache.reset()
            raise

    def _stored(self, fresh: int) -> tuple[Any, Any]:
        """Hand over what is held: a handle, or decoded K and V."""
        if self.attention == "decoded":
            return self._decoded(0)
        return self.handle, self.handle

    def _decoded(self, first: int) -> tuple[Tensor, Tensor]:
        """Decode tokens ``[first, length)``, a chunk at a time into tensors of their final size."""
        cache, last = self.cache, len(self.cache)
        end = min(first + CHUNK_TOKENS, last)
        out = cache.decode(first, end)
        peak = _chunk_bytes(out)
        if end < last:
            whole = tuple(x.new_empty(*x.shape[:2], last - first, x.shape[3]) for x in out)
            _fill(whole, 0, out)
            del out  # one decoded chunk at a time
            for a in range(end, last, CHUNK_TOKENS):
                _fill(whole, a - first, cache.decode(a, min(a + CHUNK_TOKENS, last)))
            out = whole[0], whole[1]
        self.calls["decoded"] += 1
        self.workspace_bytes = max(self.workspace_bytes, sum(x.nbytes for x in out) + peak)
        return out

    def attended(self, path: str, query: Tensor) -> None:
        """Note, after attention over the pages, which path ran and what it needed at most."""
        if torch.compiler.is_compiling():  # counters would be guards: one graph per step
            self.compiled = True
            return
        self.calls[path] += 1
        batch, heads, n, dim = query.shape
        if path == "streamed":
            chunk = min(CHUNK_TOKENS, len(self.cache))
            rows = [
                x.new_empty(batch, self.cache.roles["key"].site.num_heads, chunk, dim, device="meta")
                for x in (query, query)
            ]
            scores = 4 * batch * heads * n * chunk * 4
            need = _chunk_bytes((rows[0], rows[1])) + scores + 6 * query.numel() * 4
        elif path != "fused":
            need = staged.workspace_bytes(self.cache, query, path == "staged")  # type: ignore[arg-type]
        else:
            need = self.cache.workspace_bytes(query)  # type: ignore[attr-defined]
        self.workspace_bytes = max(self.workspace_bytes, need)

    def state(self) -> tuple[Any, ...]:
        """What an append to this fused layer, and what attention drops after it, replace."""
        assert isinstance(self.cache, FusedLayerCache)
        return (self.cache.state(),)

    def go_back(self, state: tuple[Any, ...]) -> None:
        """Be as when ``state`` was called, as if nothing had been appended since."""
        assert isinstance(self.cache, FusedLayerCache)
        self.cache.go_back(*state)

    def reach(self, held: int) -> tuple[int, int, int]:
        """How far back a query sees when so many tokens are held: ``window, chunk, place`` of ``Seen``."""
        return 0, 0, 0

    # -- what transformers asks ------------------------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Tokens seen; a device tensor for a static cache, which must not synchronise."""
        if self.is_compileable:
            return self.cache.device_length() if self.filled else 0  # type: ignore[attr-defined]
        return self.cache.length

    def get_max_length(self) -> int:
        """Tokens that fit; -1 for a cache that grows."""
        return self.cache.reserve if self.is_compileable else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that the next call needs."""
        if self.is_compileable:
            return self.cache.reserve, 0
        return self.cache.length + query_length, 0

    def reset(self) -> None:
        """Forget every token."""
        self.cache.reset()
        self.arrivals.forget(self)
        self.filled = self.is_initialized = False

    def offload(self) -> None:
        """Refuse: packed layers stay where they are."""
        raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")

    def prefetch(self) -> None:
        """Refuse, as ``offload``."""
        self.offload()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to keep (older callers)."""
        self.arrivals.settle()
        held, tokens_to_remove = len(self.cache), int(tokens_to_remove)  # assisted decoding counts on the device
        keep = min(tokens_to_remove, held) if tokens_to_remove > 0 else max(held + tokens_to_remove, 0)
        if keep < held:
            self.cache.crop(keep)
            self.counted = keep
            self.filled = keep > 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (numbers, or a boolean mask)."""
        self.arrivals.settle()
        if self.filled:
            indices = torch.as_tensor(indices)
            self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self.arrivals.settle()
        if self.filled:
            self.cache.repeat(repeats)

    # -- accounting ------------------------------------------------------------------------------------------------

    def note(self) -> str:
        """Return one phrase on what is particular about this layer."""
        return "full attention"


class WindowedLayer(PackedLayer):
    """Cache of one sliding- or chunked-attention layer: the newest ``window - 1`` tokens, packed.

    The scheme's sink is off here (the first tokens leave like any other). With ``activate_past_recording`` older
    tokens stay until the next ``crop``, so that a rollback finds them. An exact prefill longer than the window skips
    what no later query sees, so the group edges of a codec that groups tokens follow the prefill's end there.

    Parameters
    ----------
    window : int
        Tokens a query sees, itself included.
    kind : str
        ``sliding_attention`` or ``chunked_attention``.
    """

    is_sliding = True

    def __init__(
        self,
        cache: LayerCache,
        index: int,
        attention: Attention,
        prefill: Prefill,
        arrivals: Arrivals | None = None,
        *,
        window: int,
        kind: str,
    ) -> None:
        super().__init__(cache, index, attention, prefill, arrivals)
        self.window, self.kind = window, kind
        self.cumulative_length = 0
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Keep older tokens until the next ``crop``."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As ``PackedLayer.update``; returns the tokens that a query of this call can see."""
        first, fresh = not self.filled, key_states.shape[2]
        past = min(self.cumulative_length, self.window - 1)
        exact = first and self.prefill == "exact"
        # nobody will see the older tokens of an exact prefill again: they are not even encoded
        skip = max(fresh - self.window + 1, 0) if exact and not self.record_past else 0
        self._append(key_states[:, :, skip:].detach(), value_states[:, :, skip:].detach())
        self.cumulative_length += fresh  # not before: a refused token was not seen
        self._arrived(key_states, first)
        if exact:
            self.calls["exact"] += 1
            return key_states, value_states
        if self.attention != "decoded":
            return self._stored(fresh)
        out = self._decoded(len(self.cache) - past - fresh)
        self._restrict()
        return out

    def attended(self, path: str, query: Tensor) -> None:
        """As ``PackedLayer.attended``; then forget what no later query sees."""
        super().attended(path, query)
        self._restrict()

    def reach(self, held: int) -> tuple[int, int, int]:
        """As ``PackedLayer.reach``."""
        if self.kind == "chunked_attention":
            return 0, self.window, self.cumulative_length - held
        return self.window, 0, 0

    def state(self) -> tuple[Any, ...]:
        """As ``PackedLayer.state``; pages are dropped here, and they are few."""
        store = self.cache.store
        assert store is not None
        return *super().state(), store.pages, store.table, self.cumulative_length

    def go_back(self, state: tuple[Any, ...]) -> None:
        """As ``PackedLayer.go_back``."""
        before, pages, table, self.cumulative_length = state
        assert self.cache.store is not None
        self.cache.store.pages, self.cache.store.table = pages, table
        super().go_back((before,))

    def _restrict(self) -> None:
        if not self.record_past:
            self._drop_old()

    def _drop_old(self) -> None:
        if (old := len(self.cache) - self.window + 1) > 0:
            self.cache.evict(old)

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the window."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that the next call needs."""
        past = min(self.cumulative_length, self.window - 1)
        return past + query_length, self.cumulative_length - past

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """As ``PackedLayer.crop``; also drops the recorded past. 0 does only that.

        Raises
        ------
        RuntimeError
            If the tokens that would become visible again have been evicted.
        """
        self.arrivals.settle()
        seen, tokens_to_remove = self.cumulative_length, int(tokens_to_remove)
        keep = min(tokens_to_remove, seen) if tokens_to_remove > 0 else max(seen + tokens_to_remove, 0)
        remove = seen - keep
        if remove:
            if len(self.cache) - remove < min(keep, self.window - 1):
                raise RuntimeError(
                    f"layer {self.index}: crop by {remove} tokens needs older ones that left the window of "
                    f"{self.window}; call cache.activate_past_recording() before generating."
                )
            self.cache.crop(len(self.cache) - remove)
            self.cumulative_length = keep
            self.filled = keep > 0
        self._drop_old()

    def note(self) -> str:
        """Return one phrase on what is particular about this layer."""
        return f"{self.kind}, window {self.window}: the newest {self.window - 1} tokens, no sink"


def _fill(whole: tuple[Tensor, ...], at: int, parts: tuple[Tensor, Tensor]) -> None:
    for x, part in zip(whole, parts, strict=True):
        x[:, :, at : at + part.shape[2]] = part


def _chunk_bytes(chunk: tuple[Tensor, Tensor]) -> int:
    """Bound of what decoding one chunk of K and V takes beyond the result, in bytes."""
    tokens = [min(x.shape[2], CHUNK_TOKENS) for x in chunk]
    each = [x.shape[0] * x.shape[1] * t * x.shape[3] * 4 for x, t in zip(chunk, tokens, strict=True)]
    return max(each) * DECODE_COPIES
