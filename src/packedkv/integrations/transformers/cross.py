"""Cross-attention layers of a packed cache: K and V of an encoder's output, written once and read at every step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from packedkv.codec import Role
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.layers import PackedCacheLayer


class CrossCache(Cache):  # type: ignore[misc]
    """The cross-attention layers of a packed cache.

    T5Gemma's ``generate`` replaces it by another object of this class, made of a config. One without layers stands
    for the layers that are there: they are packed, and see all of an encoder's output.
    """

    def __init__(self, layers: Sequence[Any] = (), *, offloading: bool = False, **_config: Any) -> None:
        if offloading:
            raise UnsupportedError("a packed cache is not offloaded; it is small enough to stay on the device.")
        super().__init__(layers=list(layers))


class CrossLayer(PackedCacheLayer):
    """Cache of one cross-attention layer.

    The first pass fills it; from then on the model takes ``keys`` and ``values`` instead of updating it. The scheme's
    sink and window do not apply: none of the encoder's tokens is the first or the newest of a text.
    """

    is_cross = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As ``PackedCacheLayer.update``, once.

        Raises
        ------
        UnsupportedError
            The layer holds an encoder's output already.
        """
        if self.filled:
            raise UnsupportedError(
                f"cross-attention layer {self.index} holds {len(self.cache)} tokens of an encoder's output, and "
                f"{key_states.shape[2]} more came; it is written once for each input. Call cache.reset() before the "
                f"next input, or use another cache."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    @property
    def keys(self) -> Any:
        """Keys ``[B, H, N, D]``, decoded for this read, or the layer's handle: attention reads them at every step."""
        return self._attended("key")

    @keys.setter
    def keys(self, given: None) -> None:
        """Do nothing: transformers' constructor sets None."""

    @property
    def values(self) -> Any:
        """Values, as ``keys``."""
        return self._attended("value")

    @values.setter
    def values(self, given: None) -> None:
        """As for ``keys``."""

    def _attended(self, role: Role) -> Any:
        if not self.filled:
            return None
        return self.read(role) if self.attention == "decoded" else self.handles[role == "value"]

    def note(self) -> str:
        """Return a short description of what is special about this layer."""
        return "cross-attention, written once, no sink and no window"
