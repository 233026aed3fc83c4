"""One model layer of a packed cache with full attention: what transformers calls, on top of a ``LayerCache``.

Every token is encoded once, on arrival; what ``update`` returns depends on the attention mode: decoded K and V, or a
handle to itself. ``windowed.py`` has the layers of sliding and chunked attention, ``cross.py`` those that hold an
encoder's output.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from packedkv.cache.growing import GrowingCache
from packedkv.cache.host import LayerCache
from packedkv.cache.static import StaticCache
from packedkv.checks import check_tensor
from packedkv.codec import ROLES, Role
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.integrations.transformers.arrivals import Arrivals, Before
from packedkv.integrations.transformers.plan import ATTENTION_NAME, Attention
from packedkv.integrations.transformers.rope import PositionHook, take_positions
from packedkv.probe import waits
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
    """Handle that stands for the K or V of a packed layer; any use of it as a tensor raises ``UnsupportedError``.

    An index decodes: it copies K or V out of the cache (Whisper's ``return_dict_in_generate``).
    """

    def __init__(self, layer: "PackedCacheLayer", role: Role) -> None:
        self.layer, self.role = layer, role

    def __getitem__(self, index: Any) -> Tensor:
        """Tensors of ``[B, H, N, D]``, decoded for this read."""
        return self.layer.read(self.role)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and tracing probe for special methods
            raise AttributeError(name)
        raise UnsupportedError(
            f"the model used {name!r} of keys or values that are still packed: its attention is not "
            f"{ATTENTION_NAME!r}, or it changes K and V behind the cache. Call "
            f"model.set_attn_implementation({ATTENTION_NAME!r}), or use attention='decoded'."
        )


class PackedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Cache of one full-attention layer.

    Parameters
    ----------
    cache : LayerCache
        Holds the packed tokens.
    index : int
        Layer of the model.
    attention : {"decoded", "streamed", "fused"}
    prefill : {"exact", "decoded"}
        What the call that fills the empty layer attends: the fresh K and V, or what is stored.
    arrivals : Arrivals, optional
        Notified of appended tokens; one object for all layers of a model.
    """

    may_wait = True
    """Whether the tokens that fill the layer may be appended at the pass's end."""
    waits = False
    """Whether tokens of the layer wait for that."""
    is_sliding = False
    is_cross = False
    """Whether the layer holds K and V of an encoder's output."""
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
        self._cache, self.index, self.attention, self.prefill = cache, index, attention, prefill
        self.arrivals = arrivals or Arrivals(1)
        self.is_compileable = isinstance(cache, StaticCache)
        self.sampled = cache.site.fit_tokens == 1  # constants are fitted on the whole prefill
        self.handles = PackedKV(self, "key"), PackedKV(self, "value")
        self.workspace_bytes = 0
        self.calls = dict.fromkeys(("exact", "decoded", "streamed", "fused", "staged", "scored"), 0)
        self.compiled = False
        self.counted = 0
        self.filled = False
        self.hides_more: bool | None = None  # whether masks hide more than left padding; None: not known
        self.hook: PositionHook | None = None  # records the positions of new tokens
        self.taken = 0  # number of the pass whose positions were taken last

    @property
    def cache(self) -> LayerCache:
        """The packed tokens; those that wait for the pass's end are appended first."""
        if self.waits:
            self.arrivals.flush()
        return self._cache

    @cache.setter
    def cache(self, cache: LayerCache) -> None:
        self._cache = cache

    def __repr__(self) -> str:
        """Return layer, scheme and tokens held."""
        return f"{type(self).__name__}({self.index}, {self.cache.scheme}, tokens={len(self.cache)})"

    @property
    def batch_size(self) -> int:
        """Sequences held; absent before the first token, as transformers expects."""
        if self.cache.store is None:
            raise AttributeError("batch_size")
        return self.cache.batch

    @property
    def keys(self) -> Any:
        """Keys ``[B, H, N, D]`` of all tokens held, decoded for this read; None before the first token."""
        return self.read("key") if self.filled else None

    @keys.setter
    def keys(self, given: None) -> None:
        """Do nothing: transformers' constructor sets None."""

    @property
    def values(self) -> Any:
        """Values, as ``keys``."""
        return self.read("value") if self.filled else None

    @values.setter
    def values(self, given: None) -> None:
        """As for ``keys``."""

    def read(self, role: Role) -> Tensor:
        """Copy K or V ``[B, H, N, D]`` of all tokens held out of the cache."""
        if role == "key":
            self.calls["decoded"] += 1
        return self._decoded_role(role, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the LayerCache allocates at the first append."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new tokens, encode what leaves the window, and return what attention reads.

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
            NaN, Inf or |x| > 65504 in the new tokens, with the position. For a fused cache on a GPU it is raised once
            the last layer has its tokens, without the position.
        """
        if self.attention == "decoded" and torch.compiler.is_compiling():
            return self._update_apart(key_states, value_states)
        first = not self.filled
        key_states, value_states = in_one_dtype(key_states, value_states)
        if torch.compiler.is_compiling() and (first or key_states.shape[2] > 1):
            self._take_several(key_states, value_states, first)
        else:
            self._take(key_states, value_states, first)
        if first and self.prefill == "exact":
            return self._exact(key_states, value_states)
        return self._stored(key_states.shape[2])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths on the host would make one graph per step
    def _update_apart(self, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        return self.update(keys, values)

    def _exact(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fresh K and V; the attention function finds the layer at the keys, to read its mask."""
        self.calls["exact"] += 1
        if self.attention == "fused" and not torch.compiler.is_compiling():
            setattr(keys, LAYER, self)
        return keys, values

    def _take(self, keys: Tensor, values: Tensor, first: bool) -> None:
        if self.is_compileable and not torch.compiler.is_compiling():
            self._count(keys.shape[2], first)
        if keys.requires_grad or values.requires_grad:
            keys, values = keys.detach(), values.detach()
        self._append(keys, values)
        self._arrived(keys, first)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # pages are allocated, lengths looked at on the host
    def _take_several(self, keys: Tensor, values: Tensor, first: bool) -> None:
        self._take(keys, values, first)

    def _count(self, fresh: int, first: bool) -> None:
        """Raise for tokens beyond a static cache's pages. Counts on the host, so not in captured or compiled steps."""
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
        if first or (keys.shape[2] > 1 and not torch.compiler.is_compiling()):
            self.hides_more = None
        if first or self.arrivals.noted:
            self.arrivals.came(self, keys, first)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        n = keys.shape[2]
        self._check_length(n)
        if self.arrivals.noted and (n == 1 or self.index in self.arrivals.noted):  # that pass has ended
            self.arrivals.settle()
        positions = self._positions(keys)
        if self.arrivals.append(self, keys, values, positions):
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
                if at == 0 and self.cache.store is not None:
                    held = self.cache.length + n - APPEND_TOKENS
                    encoded = (self.cache.scheme.encoded_tokens(role, held) for role in ROLES)
                    self.cache.store.ensure(max(encoded), exact=True)
        except BaseException:
            if not self.filled:  # drop an incomplete prefill
                self.cache.reset()
            raise

    def _check_length(self, fresh: int) -> None:
        """Raise before a token is stored that exceeds ``max_len``. A static cache counts apart.

        Raises
        ------
        ShapeError
        """
        held = self._cache
        if held.reserve and not self.is_compileable and (total := self.get_seq_length() + fresh) > held.reserve:
            raise ShapeError(
                f"layer {self.index}: token {total} does not fit the cache of max_len={held.reserve}; make it with a "
                f"larger max_len, or crop it."
            )

    def _positions(self, keys: Tensor) -> Tensor | None:
        """Positions of the newest tokens, ``[B, n]`` or ``[1, n]``, where the cache needs them; None: in order.

        Raises
        ------
        UnsupportedError
            They are unknown though the mean before RoPE needs them, or the mean is not what the model adds to its keys.
        """
        if not self.cache.places_tokens:
            return None
        mean, n = self.cache.site.mean, keys.shape[2]
        positions, self.taken = take_positions(self.taken, self.arrivals.cache, self.hook)
        if positions is not None and positions.shape[-1] != n:  # the same tensor in all layers, where it may be
            positions = positions[..., -n:] if n else positions[..., :0]
        known = positions is not None and tuple(positions.shape) in ((1, n), (len(keys), n))
        if not self.cache.needs_order:
            return positions if known and consecutive(positions) else None
        if positions is None or not known:
            raise UnsupportedError(self._unknown_positions(n, positions))
        assert mean is not None
        if not self.filled and n and mean.given is not None and not waits(keys):
            rest = keys.float() - mean.at(mean.given.to(keys.device), positions)
            if float(rest.square().sum()) > float(keys.float().square().sum()):
                raise UnsupportedError(
                    f"layer {self.index}: keys without their mean are larger than with it, so this model turns its "
                    f"keys in another way than its rotary embedding says; use mean=post or mean=none."
                )
        return positions

    def _unknown_positions(self, n: int, positions: Tensor | None) -> str:
        where = f"layer {self.index}: the positions of {n} new tokens are not known"
        if positions is not None:
            return f"{where} (the model gave {tuple(positions.shape)}); use mean=post or mean=none."
        return (
            f"{where}: the cache was made for another model, or unpickled in another process. Make it with cache_for "
            f"for the model that runs, and save it with cache.save and load_cache; or use mean=post or mean=none."
        )

    def _stored(self, fresh: int) -> tuple[Any, Any]:
        """Return what is held: a handle, or decoded K and V."""
        if self.attention == "decoded":
            return self._decoded(0)
        return self.handles

    def _decoded(self, first: int) -> tuple[Tensor, Tensor]:
        """Decode tokens ``[first, length)``, a chunk at a time into tensors of their final size."""
        out = self._decoded_role("key", first), self._decoded_role("value", first)
        self.calls["decoded"] += 1
        return out

    def _decoded_role(self, role: Role, first: int) -> Tensor:
        """As ``_decoded``, of one role; besides the result, one decoded chunk is in memory at a time."""
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
        """Note, after attention over the pages, which path ran; ``need`` bounds the bytes that it needed."""
        if torch.compiler.is_compiling():  # counters would become guards: one graph per step
            self.compiled = True
            return
        self.calls[path] += 1
        self.workspace_bytes = max(self.workspace_bytes, need())

    def streamed_bytes(self, query: Tensor) -> int:
        """Bound of what attention over pages decoded a chunk at a time needs."""
        batch, heads, n, dim = query.shape
        chunk = min(CHUNK_TOKENS, len(self.cache))
        rows = query.new_empty(batch, self.cache.roles["key"].site.num_heads, chunk, dim, device="meta")
        scores = 4 * batch * heads * n * chunk * 4
        return _chunk_bytes(rows) + scores + 6 * query.numel() * 4

    def state(self) -> Before:
        """State of this layer, whose pages grow, that an append and the eviction after attention replace."""
        assert isinstance(self.cache, GrowingCache)
        assert self.cache.store is not None
        return Before(self.cache.state(), self.cache.store.pages, self.cache.store.table, self.cache.length)

    def go_back(self, state: Before) -> None:
        """Restore ``state``, undoing every append since."""
        assert isinstance(self.cache, GrowingCache)
        self.cache.go_back(state.cache)

    def reach(self, held: int) -> tuple[int, int, int]:
        """How far back a query sees with ``held`` tokens: ``window, chunk, place`` of ``Seen``."""
        return 0, 0, 0

    # -- transformers' interface -----------------------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Tokens seen; a device tensor for a static cache, which must not synchronise."""
        if isinstance(self.cache, StaticCache):
            return self.cache.device_length() if self.filled else 0
        return self.cache.length

    def get_max_length(self) -> int:
        """Tokens that fit; -1 for a cache that grows."""
        return self.cache.reserve if self.is_compileable else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that the next call needs."""
        self._check_fresh(query_length)
        if self.is_compileable:
            return self.cache.reserve, 0
        return self.cache.length + query_length, 0

    def _check_fresh(self, fresh: int) -> None:
        """Raise for a pass without tokens: ``generate`` leaves out those that the cache should hold already."""
        if fresh == 0:
            raise UnsupportedError(
                f"no new tokens: the cache holds {self.get_seq_length()}, as many as the prompt or more. A prompt goes "
                f"on where the cache ends; call cache.reset() before another text."
            )

    def reset(self) -> None:
        """Forget every token."""
        self.arrivals.forget(self)
        self.cache.reset()
        self.filled = self.is_initialized = False

    def offload(self) -> None:
        """Raise: packed layers are not offloaded."""
        raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")

    def prefetch(self) -> None:
        """Raise, as ``offload``."""
        self.offload()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; a positive number is the length to keep (older callers)."""
        self.arrivals.settle()
        held, tokens_to_remove = len(self.cache), int(tokens_to_remove)  # assisted decoding passes a device tensor
        keep = min(tokens_to_remove, held) if tokens_to_remove > 0 else max(held + tokens_to_remove, 0)
        if keep < held:
            self.cache.crop(keep)
            self.counted = keep
            self.filled = keep > 0
            self.hides_more = self.hides_more and None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (numbers, or a boolean mask)."""
        self.arrivals.settle()
        if self.filled:
            self.hides_more = self.hides_more and None  # the sequences that are left may hide less
            indices = torch.as_tensor(indices)
            self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self.arrivals.settle()
        if self.filled:
            self.cache.repeat(repeats)

    # -- accounting ------------------------------------------------------------------------------------------------

    def note(self) -> str:
        """Return a short description of what is special about this layer."""
        return "full attention"


def in_one_dtype(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V in the narrower of their dtypes.

    Under ``torch.autocast`` a projection gives 16 bit and RoPE leaves float32; the attention that follows computes in
    16 bit.
    """
    if keys.dtype != values.dtype:
        narrow = min(values.dtype, keys.dtype, key=lambda dtype: dtype.itemsize)
        keys, values = keys.to(narrow), values.to(narrow)
    return keys, values


def _chunk_bytes(chunk: Tensor) -> int:
    """Bound of what decoding one chunk of K or V takes beyond the result, in bytes."""
    batch, heads, tokens, dim = chunk.shape
    return batch * heads * min(tokens, CHUNK_TOKENS) * dim * 4 * DECODE_COPIES
