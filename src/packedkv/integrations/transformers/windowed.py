"""Layers of sliding and chunked attention of a packed cache: the newest ``window - 1`` tokens, packed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packedkv.cache.host import LayerCache
from packedkv.integrations.transformers.arrivals import Arrivals, Before
from packedkv.integrations.transformers.layers import PackedCacheLayer, Prefill, in_one_dtype
from packedkv.integrations.transformers.plan import Attention


class WindowedLayer(PackedCacheLayer):
    """Cache of one sliding- or chunked-attention layer: the newest ``window - 1`` tokens, packed.

    The scheme's sink does not apply here (the first tokens leave the window like any other). With
    ``activate_past_recording`` older tokens stay until the next ``crop``, so that a rollback finds them. An exact
    prefill longer than the window skips tokens that no later query sees, so the group boundaries of a token-grouped
    codec depend on the prefill's length.

    Parameters
    ----------
    window : int
        Tokens a query sees, itself included.
    kind : str
        ``sliding_attention`` or ``chunked_attention``.
    """

    may_wait = False  # what no query sees is dropped after attention
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
        """As ``PackedCacheLayer.update``; returns the tokens that a query of this call can see."""
        if self.attention == "decoded" and torch.compiler.is_compiling():
            return self._update_apart(key_states, value_states)
        first, fresh = not self.filled, key_states.shape[2]
        key_states, value_states = in_one_dtype(key_states, value_states)
        past = min(self.cumulative_length, self.window - 1)
        exact = first and self.prefill == "exact"
        # no later query sees the older tokens of an exact prefill: they are not encoded
        skip = max(fresh - self.window + 1, 0) if exact and not self.record_past else 0
        self._append(key_states[:, :, skip:].detach(), value_states[:, :, skip:].detach())
        self.cumulative_length += fresh  # only now: a rejected token was not seen
        self._arrived(key_states, first)
        if exact:
            return self._exact(key_states, value_states)
        if self.attention != "decoded":
            return self._stored(fresh)
        out = self._decoded(len(self.cache) - past - fresh)
        self._restrict()
        return out

    def attended(self, path: str, need: Callable[[], int]) -> None:
        """As ``PackedCacheLayer.attended``; then drop what no later query sees."""
        super().attended(path, need)
        self._restrict()

    def reach(self, held: int) -> tuple[int, int, int]:
        """The window's tokens, or the chunk's and the position of the oldest token held."""
        if self.kind == "chunked_attention":
            return 0, self.window, self.cumulative_length - held
        return self.window, 0, 0

    def state(self) -> Before:
        """As ``PackedCacheLayer.state``; this layer has seen more tokens than it holds."""
        return super().state()._replace(seen=self.cumulative_length)

    def go_back(self, state: Before) -> None:
        """As ``PackedCacheLayer.go_back``; pages that were dropped after attention are restored (they are few)."""
        assert self.cache.store is not None
        self.cache.store.pages, self.cache.store.table = state.pages, state.table
        self.cumulative_length = state.seen
        super().go_back(state)

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
        self._check_fresh(query_length)
        past = min(self.cumulative_length, self.window - 1)
        return past + query_length, self.cumulative_length - past

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """As ``PackedCacheLayer.crop``; also drops the recorded past. 0 does only that.

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
            self.hides_more = self.hides_more and None
        self._drop_old()

    def note(self) -> str:
        """Return a short description of what is special about this layer."""
        return f"{self.kind}, window {self.window}: the newest {self.window - 1} tokens, no sink"
