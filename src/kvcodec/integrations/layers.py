"""One model layer of a packed cache: what transformers calls, on top of a ``LayerCache``.

``PackedLayer`` serves full attention, ``WindowedLayer`` sliding and chunked attention. Every token is encoded once, on
arrival; what ``update`` returns depends on the layer's way of attention: decoded K and V, or a handle to itself.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcodec import staged
from kvcodec.cache import LayerCache
from kvcodec.codec import FP16_MAX, ROLES, check_tensor, largest
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.integrations.attention import PackedKV
from kvcodec.integrations.plan import Attention
from kvcodec.probe import OutlierProbe, waits

Prefill = Literal["exact", "decoded"]

CHUNK_TOKENS = 1024
"""Tokens decoded at a time; bounds what a read needs beyond its result."""
APPEND_TOKENS = 4096
"""Tokens of a prefill encoded at a time; bounds the float32 copies that encoding needs."""
DECODE_COPIES = 10
"""Upper bound of the float32 copies of a chunk that a codec's decode holds at once; a test counts them."""


class FirstFill:
    """What is noted on a GPU while a model's first prefill fills its layers, and looked at once, when all are full.

    A look at a number waits for the GPU. In the middle of a prefill that costs more than the number did.

    Parameters
    ----------
    layers : int
        Layers that a prefill fills.
    probe : OutlierProbe, optional
    """

    def __init__(self, layers: int, probe: OutlierProbe | None = None) -> None:
        self.layers, self.probe = layers, probe
        self.noted: dict[int, tuple[PackedLayer, tuple[Tensor, ...]]] = {}

    def notes(self, layer: "PackedLayer", keys: Tensor, values: Tensor) -> bool:
        """Note the largest magnitudes of what will fill an empty layer, for ``settle``; False: not here."""
        if not waits(keys) or keys.shape[2] == 1 or (layer.attention, layer.prefill) != ("fused", "exact"):
            return False
        self.noted[layer.index] = layer, (largest(keys), largest(values))
        return True

    def full(self, layer: "PackedLayer", keys: Tensor) -> None:
        """Take notice of a layer that was filled with these keys."""
        self.noted.setdefault(layer.index, (layer, ()))
        if self.probe is not None:
            self.probe(layer.index, layer.cache, keys)
        if not waits(keys) or len(self.noted) == self.layers:
            self.settle()

    def settle(self) -> None:
        """Look at what was noted.

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the tokens; the layers are empty again.
        """
        if self.probe is not None:
            self.probe.measure()  # before the wait
        filled, self.noted = self.noted, {}
        sizes = [
            (layer.index, role, x) for layer, both in filled.values() for role, x in zip(ROLES, both, strict=False)
        ]
        for device in {x.device for _, _, x in sizes}:  # of a model on several GPUs
            here = [one for one in sizes if one[2].device == device]
            for (index, role, _), size in zip(here, torch.stack([x for _, _, x in here]).tolist(), strict=True):
                if not size <= FP16_MAX:  # NaN as well
                    for layer, _ in filled.values():
                        layer.reset()
                    raise ValueError(
                        f"layer {index}: a {role} of the prefill is not finite or above 65504; codecs store finite "
                        f"values within the fp16 range. Check the model's dtype (fp16 overflow?) or the attention "
                        f"mask. The cache is empty again."
                    )
        if self.probe is not None:
            self.probe.settle()

    def forget(self, layer: "PackedLayer") -> None:
        """Drop what was noted of a layer."""
        self.noted.pop(layer.index, None)
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
    fill : FirstFill, optional
        Told of the append that fills the empty layer; one object for all layers of a model.
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
        fill: FirstFill | None = None,
    ) -> None:
        super().__init__()
        self.cache, self.index, self.attention, self.prefill = cache, index, attention, prefill
        self.fill = fill or FirstFill(1)
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
            NaN, Inf or |x| > 65504 in the new tokens, with the position; of a prefill on a GPU without it, and when
            the last layer is filled.
        """
        first = not self.filled
        if first or key_states.shape[2] > 1:
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
            self.fill.full(self, keys.detach())
        elif self.fill.noted:  # not every layer took part in the prefill
            self.fill.settle()

    def _append(self, keys: Tensor, values: Tensor) -> None:
        n = keys.shape[2]
        scheme, given = self.cache.scheme, self.cache.fitted  # given constants need no sample of the whole prefill
        sampled = any(scheme.codec(role).needs_sample and role not in given for role in ROLES)
        if not self.filled and self.fill.notes(self, keys, values):
            self.cache.append(keys, values, checked=True)  # type: ignore[call-arg]
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
        self.fill.forget(self)
        self.filled = self.is_initialized = False

    def offload(self) -> None:
        """Refuse: packed layers stay where they are."""
        raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")

    def prefetch(self) -> None:
        """Refuse, as ``offload``."""
        self.offload()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to keep (older callers)."""
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
        if self.filled:
            indices = torch.as_tensor(indices)
            self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
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
        fill: FirstFill | None = None,
        *,
        window: int,
        kind: str,
    ) -> None:
        super().__init__(cache, index, attention, prefill, fill)
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
