"""The layers of a packed cache that transformers calls, on top of a ``LayerCache``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from packedkv.attention import Seen
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, State
from packedkv.checks import check_tensor
from packedkv.codec import ROLES, Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.transformers.deferred import Deferred
from packedkv.integrations.transformers.plan import ATTENTION_NAME, Attention
from packedkv.integrations.transformers.rope import PositionHook, take_positions
from packedkv.probe import synchronizes
from packedkv.store.positions import consecutive

Prefill = Literal["exact", "decoded"]

CHUNK_TOKENS = 1024
"""Tokens decoded at a time; bounds the memory that a read needs beyond its result."""
APPEND_TOKENS = 4096
"""Tokens of a prefill encoded at a time; bounds the float32 copies that encoding needs."""
DECODE_COPIES = 10
"""Upper bound of the float32 copies of a chunk that a codec's decode holds at once; verified by a test."""
LAYER = "packedkv_layer"
"""Attribute of the keys that fill a layer and that attention gets as they are: the layer."""


class PackedKV:
    """Handle that stands for the K or V of a packed layer; any use of it as a tensor raises ``UnsupportedError``."""

    def __init__(self, layer: "PackedCacheLayer", role: Role) -> None:
        self.layer, self.role = layer, role

    def __getitem__(self, index: Any) -> Tensor:  # Whisper's return_dict_in_generate
        return self.layer.read(self.role)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and tracing probe for special methods
            raise AttributeError(name)
        raise UnsupportedError(
            f"the model used {name!r} of keys or values that are still packed: its attention is not "
            f"{ATTENTION_NAME!r}, or it changes K and V behind the cache. Make the cache after the model's attention "
            f"was set, or use attention='decoded'."
        )


class PackedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Cache of one layer of full, sliding or chunked attention.

    A sliding or chunked layer holds the newest ``window - 1`` tokens, without the scheme's sink. With
    ``activate_past_recording`` older tokens stay until the next ``crop``, so that a rollback finds them. An exact
    prefill longer than the window skips tokens that no later query sees, so the group boundaries of a token-grouped
    codec depend on the prefill's length. ``window``: tokens a query sees, itself included; 0: all. ``kind``: the type
    of layer, as transformers names it.
    """

    has_deferred = False
    """Whether tokens of the layer are to be appended at the pass's end."""
    is_cross = False
    """Whether the layer holds K and V of an encoder's output."""
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        cache: LayerCache,
        index: int,
        attention: Attention,
        prefill: Prefill,
        deferred: Deferred | None = None,
        *,
        window: int = 0,
        kind: str = "full_attention",
    ) -> None:
        # without the base's, which sets ``keys`` and ``values``
        self._cache, self.index, self.attention, self.prefill = cache, index, attention, prefill
        self.deferred = deferred or Deferred(1)
        self.window, self.kind, self.is_sliding = window, kind, window > 0
        self.can_defer = not window  # what no later query sees is dropped after attention
        self.is_compileable = cache.static
        self.sampled = cache.site.fit_tokens == 1  # constants are fitted on the whole prefill
        self.handles = PackedKV(self, "key"), PackedKV(self, "value")
        self.workspace_bytes = 0
        self.calls = dict.fromkeys(("exact", "decoded", "streamed", "fused", "staged", "scored"), 0)
        self.compiled = False
        self.counted = 0  # tokens of a static cache
        self.dropped = 0  # oldest tokens, which have left the window
        self.record_past = False
        self.filled = self.is_initialized = False
        self.hides_more: bool | None = None  # whether masks hide more than left padding; None: not known
        self.hook: PositionHook | None = None  # records the positions of new tokens
        self.taken = 0  # number of the pass whose positions were taken last

    @property
    def cache(self) -> LayerCache:
        """The packed tokens; deferred ones are appended first."""
        if self.has_deferred:
            self.deferred.flush()
        return self._cache

    @cache.setter
    def cache(self, cache: LayerCache) -> None:
        self._cache = cache

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index}, {self.cache.scheme}, tokens={len(self.cache)})"

    @property
    def batch_size(self) -> int:
        """Sequences held."""
        if self.cache.store is None:
            raise AttributeError("batch_size")  # as transformers expects
        return self.cache.batch

    @property
    def keys(self) -> Any:
        """Keys ``[B, H, N, D]`` of all tokens held, decoded for this read; None before the first token."""
        return self._shown("key")

    @property
    def values(self) -> Any:
        """Values, as ``keys``."""
        return self._shown("value")

    def _shown(self, role: Role) -> Any:
        return self.read(role) if self.filled else None

    def read(self, role: Role) -> Tensor:
        """Copy K or V ``[B, H, N, D]`` of all tokens held out of the cache."""
        if role == "key":
            self.calls["decoded"] += 1
        return self._decoded(role, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the LayerCache allocates at the first append

    def activate_past_recording(self) -> None:
        self.record_past = self.is_sliding

    # -- new tokens ------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new tokens ``[B, H, n, D]``, encode what leaves the scheme's window, and return what attention reads.

        That is K and V ``[B, H, N, D]`` of the tokens that queries of this call can see, or handles to this layer
        (``streamed``, ``fused``).

        Raises
        ------
        ValueError
            NaN, Inf or |x| > 65504 in the new tokens, with the position. For a fused cache on a GPU it is raised once
            the last layer has its tokens, without the position.
        """
        if self.attention == "decoded" and torch.compiler.is_compiling():
            return self._update_apart(key_states, value_states)
        first, fresh, keys, values = not self.filled, key_states.shape[2], key_states, value_states
        if keys.dtype != values.dtype:  # autocast: a projection gives 16 bit, RoPE leaves float32; attention has 16 bit
            narrow = min(values.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
            keys, values = keys.to(narrow), values.to(narrow)
        exact = first and self.prefill == "exact"
        # no later query sees the older tokens of an exact prefill: they are not encoded
        skip = max(fresh - self.window + 1, 0) if exact and self.window and not self.record_past else 0
        several = torch.compiler.is_compiling() and (first or fresh > 1)
        (self._take_several if several else self._take)(keys, values, skip, first)
        if exact:
            self.calls["exact"] += 1
            if self.attention == "fused" and not torch.compiler.is_compiling():
                setattr(keys, LAYER, self)  # where the attention function finds the layer, to read its mask
            return keys, values
        if self.attention != "decoded":
            return self.handles
        start = len(self.cache) - fresh - self._past(self.get_seq_length() - fresh)
        self.calls["decoded"] += 1
        out = self._decoded("key", start), self._decoded("value", start)
        self._drop_unseen()
        return out

    _update_apart = torch.compiler.disable(update)  # lengths on the host would make one graph per step

    def _take(self, keys: Tensor, values: Tensor, skip: int, first: bool) -> None:
        """Append new tokens, but the first ``skip`` of them."""
        if self.is_compileable and not torch.compiler.is_compiling():
            self._count(keys.shape[2], first)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        if skip:
            self._append(keys[:, :, skip:], values[:, :, skip:])
            self.dropped = skip
        else:
            self._append(keys, values)
        self.filled = self.is_initialized = True
        if first or (keys.shape[2] > 1 and not torch.compiler.is_compiling()):
            self.hides_more = None
        if first or self.deferred.checks:
            self.deferred.appended(self, keys, first)

    _take_several = torch.compiler.disable(_take)  # pages are allocated, lengths read on the host

    def _count(self, fresh: int, first: bool) -> None:
        """Raise for tokens beyond a static cache's pages. Counts on the host, so not in captured or compiled steps."""
        if first or fresh > 1:
            self.counted = 0 if first else len(self.cache)
        self.counted += fresh
        if self.counted > self.cache.reserve:
            raise self._too_many(self.counted, "static cache")

    def _too_many(self, tokens: int, what: str) -> ShapeError:
        return ShapeError(
            f"layer {self.index}: token {tokens} does not fit the {what} of max_len={self._cache.reserve}; make it "
            f"with a larger max_len, or crop it."
        )

    def _append(self, keys: Tensor, values: Tensor) -> None:
        n = keys.shape[2]
        reserve = 0 if self.is_compileable else self._cache.reserve  # a static cache counts apart
        if reserve and (total := self.get_seq_length() + n) > reserve:
            raise self._too_many(total, "cache")
        if self.deferred.checks and (n == 1 or self.index in self.deferred.checks):  # that pass has ended
            self.deferred.settle()
        positions = self._positions(keys)
        if self.deferred.append(self, keys, values, positions):
            return
        if n <= APPEND_TOKENS or self.attention == "fused" or (self.sampled and not self.filled):
            self.cache.append(keys, values, positions)
            return
        for name, x in (("keys", keys), ("values", values)):
            check_tensor(name, x)  # all tokens before any is stored
        try:
            for at in range(0, n, APPEND_TOKENS):
                part = slice(at, at + APPEND_TOKENS)
                placed = None if positions is None else positions[:, part]
                self.cache.append(keys[:, :, part], values[:, :, part], placed)
                if at == 0 and self.cache.store is not None:  # pages for the whole prefill at once
                    held = self.cache.length + n - APPEND_TOKENS
                    encoded = (self.cache.scheme.encoded_tokens(role, held) for role in ROLES)
                    self.cache.store.ensure(max(encoded), exact=True)
        except BaseException:
            if not self.filled:  # drop an incomplete prefill
                self.cache.reset()
            raise

    def _positions(self, keys: Tensor) -> Tensor | None:
        """Positions of the newest tokens, ``[B, n]`` or ``[1, n]``, where the cache needs them; None: in order."""
        if not self.cache.places_tokens:
            return None
        mean, n = self.cache.site.mean, keys.shape[2]
        positions, self.taken = take_positions(self.taken, self.deferred.cache, self.hook)
        if positions is not None and positions.shape[-1] != n:  # the same tensor in all layers, where it may be
            positions = positions[..., -n:] if n else positions[..., :0]
        known = positions is not None and tuple(positions.shape) in ((1, n), (len(keys), n))
        if not self.cache.needs_order:
            return positions if known and consecutive(positions) else None
        if positions is None or not known:
            why = (
                f" (the model gave {tuple(positions.shape)});"
                if positions is not None
                else ": the cache was made for another model, or unpickled in another process. Make it with cache_for "
                "for the model that runs, and save it with cache.save and load_cache; or"
            )
            raise UnsupportedError(
                f"layer {self.index}: the positions of {n} new tokens are not known{why} use mean=post or mean=none."
            )
        assert mean is not None
        if not self.filled and n and mean.given is not None and not synchronizes(keys):
            rest = keys.float() - mean.at(mean.given.to(keys.device), positions)
            if float(rest.square().sum()) > float(keys.float().square().sum()):
                raise UnsupportedError(
                    f"layer {self.index}: keys without their mean are larger than with it, so this model rotates its "
                    f"keys in another way than its rotary embedding says; use mean=post or mean=none."
                )
        return positions

    # -- reads -----------------------------------------------------------------------------------------------------

    def _decoded(self, role: Role, first: int) -> Tensor:
        """Decode tokens ``[first, length)``, a chunk at a time."""
        cache, last = self.cache, len(self.cache)
        end = min(first + CHUNK_TOKENS, last)
        out = cache.decode_role(role, first, end).contiguous()  # models take views
        peak = _chunk_bytes(out)
        if end < last:
            whole = out.new_empty(*out.shape[:2], last - first, out.shape[3])
            whole[:, :, : end - first] = out
            del out
            for a in range(end, last, CHUNK_TOKENS):
                b = min(a + CHUNK_TOKENS, last)
                whole[:, :, a - first : b - first] = cache.decode_role(role, a, b)
            out = whole
        if not torch.compiler.is_compiling():  # lengths may be symbols there
            # the other role's result may exist as well
            self.workspace_bytes = max(self.workspace_bytes, 2 * out.nbytes + peak)
        return out

    def attended(self, path: str, need: Callable[[], int]) -> None:
        """Record which path read the pages, and drop what no later query sees; ``need`` bounds the bytes it took."""
        if torch.compiler.is_compiling():  # counters would become guards: one graph per step
            self.compiled = True
        else:
            self.calls[path] += 1
            self.workspace_bytes = max(self.workspace_bytes, need())
        self._drop_unseen()

    def streamed_bytes(self, query: Tensor) -> int:
        """Bound of what attention over pages decoded a chunk at a time needs."""
        batch, heads, n, dim = query.shape
        chunk = min(CHUNK_TOKENS, len(self.cache))
        rows = query.new_empty(batch, self.cache.roles["key"].site.num_heads, chunk, dim, device="meta")
        scores = 4 * batch * heads * n * chunk * 4
        return _chunk_bytes(rows) + scores + 6 * query.numel() * 4

    def reach(self, held: int) -> Seen:
        """How far back a query sees with ``held`` tokens."""
        if self.kind == "chunked_attention":
            return Seen(chunk=self.window, place=self.get_seq_length() - held)
        return Seen(window=self.window)

    def _past(self, seen: int) -> int:
        """How many of the tokens seen a next query sees."""
        return min(seen, self.window - 1) if self.window else seen

    def _drop_unseen(self, recorded: bool = False) -> None:
        """Evict what no later query sees; with ``recorded`` the recorded past as well."""
        if not self.window or (self.record_past and not recorded):
            return
        if (old := len(self.cache) - self.window + 1) > 0:
            self.cache.evict(old)
            self.dropped += old

    # -- undoing ---------------------------------------------------------------------------------------------------

    def undo(self) -> Callable[[], None]:
        """Return a function that undoes every later append, and the eviction after attention."""
        cache = self.cache
        assert isinstance(cache, FusedLayerCache)
        assert cache.store is not None
        return partial(self._go_back, cache.state(), cache.store.pages, cache.store.table, self.dropped)

    def _go_back(self, state: State, pages: Tensor, table: Tensor, dropped: int) -> None:
        cache = self.cache
        assert isinstance(cache, FusedLayerCache)
        assert cache.store is not None
        if self.window:  # pages may have been dropped after attention; they are few
            cache.store.pages, cache.store.table, self.dropped = pages, table, dropped
        cache.go_back(state)

    # -- transformers' interface -----------------------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Tokens seen, evicted ones included; a device tensor for a static cache, which must not synchronize."""
        if isinstance(self.cache, FusedLayerCache) and self.cache.static:
            return self.cache.device_length() if self.filled else 0
        return self.dropped + self.cache.length

    def get_max_length(self) -> int:
        return self.cache.reserve if self.is_compileable else self.window or -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length == 0:  # ``generate`` leaves out tokens that the cache should hold already
            raise UnsupportedError(
                f"no new tokens: the cache holds {self.get_seq_length()}, as many as the prompt or more. A prompt goes "
                f"on where the cache ends; call cache.reset() before another text."
            )
        if self.is_compileable:
            return self.cache.reserve, 0
        seen = self.get_seq_length()
        past = self._past(seen)
        return past + query_length, seen - past

    def reset(self) -> None:
        self.deferred.forget(self)
        self.cache.reset()
        self.dropped = 0
        self.filled = self.is_initialized = False

    def offload(self) -> None:
        raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to keep (older callers).

        Also drops the recorded past; 0 does only that.

        Raises
        ------
        RuntimeError
            If the tokens that would become visible again have been evicted.
        """
        self.deferred.settle()
        seen = self.dropped + len(self.cache)
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a device tensor
        keep = min(tokens_to_remove, seen) if tokens_to_remove > 0 else max(seen + tokens_to_remove, 0)
        if keep < seen:
            if keep - self.dropped < self._past(keep):
                raise RuntimeError(
                    f"layer {self.index}: crop by {seen - keep} tokens needs older ones that left the window of "
                    f"{self.window}; call cache.activate_past_recording() before generating."
                )
            self.cache.crop(keep - self.dropped)
            self.counted = keep
            self.filled = keep > 0
            self.hides_more = self.hides_more and None
        self._drop_unseen(recorded=True)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.deferred.settle()
        if self.filled:
            self.hides_more = self.hides_more and None  # the sequences that are left may hide less
            indices = torch.as_tensor(indices)
            self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.deferred.settle()
        if self.filled:
            self.cache.repeat(repeats)


class CrossLayer(PackedCacheLayer):
    """Cache of one cross-attention layer.

    The first pass fills it; from then on the model takes ``keys`` and ``values`` instead of updating it. The scheme's
    sink and window do not apply: none of the encoder's tokens is the first or the newest of a text.
    """

    is_cross = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.filled:
            raise UnsupportedError(
                f"cross-attention layer {self.index} holds {len(self.cache)} tokens of an encoder's output, and "
                f"{key_states.shape[2]} more came; it is written once for each input. Call cache.reset() before the "
                f"next input, or use another cache."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def _shown(self, role: Role) -> Any:
        packed = self.filled and self.attention != "decoded"
        return self.handles[role == "value"] if packed else super()._shown(role)


class CrossCache(Cache):  # type: ignore[misc]
    """The cross-attention layers of a packed cache.

    T5Gemma's ``generate`` replaces it by another object of this class, made of a config. One without layers stands
    for the layers that are there: they are packed, and see all of an encoder's output.
    """

    def __init__(self, layers: Sequence[Any] = (), *, offloading: bool = False, **_config: Any) -> None:
        if offloading:
            raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")
        super().__init__(layers=list(layers))


def _chunk_bytes(chunk: Tensor) -> int:
    """Bound of what decoding one chunk of K or V takes beyond the result, in bytes."""
    batch, heads, tokens, dim = chunk.shape
    return batch * heads * min(tokens, CHUNK_TOKENS) * dim * 4 * DECODE_COPIES
