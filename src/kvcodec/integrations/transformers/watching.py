"""Change a model's attention for the length of a block: another implementation, or its own with its inputs recorded."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvcodec.errors import UnsupportedError

RECORDER = "kvcodec_recorder"

Watcher = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], None]
"""Called with (module, query, key, value, mask, options) as the attention function receives them, after RoPE."""


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run the block with another attention implementation; the model's own is always restored."""
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def watched(model: Any, seen: Watcher) -> Iterator[None]:
    """Call ``seen`` with the inputs of every attention call of the block; the model's results do not change.

    Raises
    ------
    UnsupportedError
        If the block ended without any call: the model does not use transformers' attention interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    own = model.config._attn_implementation
    calls, watcher = 0, seen

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        nonlocal calls
        calls += 1
        watcher(module, query, key, value, attention_mask, options)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return AttentionInterface().get_interface(own, eager)(module, query, key, value, attention_mask, **options)

    # the mask must be built as for the model's own implementation
    AttentionMaskInterface.register(RECORDER, AttentionMaskInterface()[own])
    AttentionInterface.register(RECORDER, attention)
    try:
        with implementation(model, RECORDER):
            yield
    finally:
        # transformers keeps registered functions alive, and this one would keep the recording alive
        watcher = _blind
    if not calls:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention layer was seen; its attention does not go through transformers' "
            f"attention interface, so its keys, values and queries cannot be recorded."
        )


def _blind(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Placeholder registered after the block."""
