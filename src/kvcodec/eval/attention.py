"""What a measuring run does to a model's attention, and undoes: watch it, or let it read a packed cache."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from kvcodec.errors import UnsupportedError
from kvcodec.params import LayerParams
from kvcodec.registry import get
from kvcodec.scheme import KVScheme

Prefill = Literal["decoded", "exact"]
RECORDER = "kvcodec_recorder"

Watcher = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], None]
"""Called with (module, query, key, value, mask, options) as the attention function receives them, after RoPE."""


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run the block with another attention implementation; the model's own is set again however it ends."""
    own = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def watched(model: Any, seen: Watcher) -> Iterator[None]:
    """Show every attention call of the block to ``seen``; the model computes what it always does.

    Raises
    ------
    UnsupportedError
        If the block ran through and nothing was seen: the model does not use transformers' attention interface.
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
        # transformers keeps what was registered: it must not keep alive what was recorded
        watcher = _blind
    if not calls:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention layer was seen; its attention does not go through transformers' "
            f"attention interface, so its keys, values and queries cannot be recorded."
        )


def _blind(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> None:
    """See nothing: what is registered once a block has ended."""


def attention_of(scheme: KVScheme) -> Literal["decoded", "streamed"]:
    """How a run reads a scheme's cache: ``streamed`` where queries are rounded inside attention, else ``decoded``."""
    return "streamed" if scheme.query_error else "decoded"


@contextmanager
def packed_cache(
    model: Any,
    spec: str | KVScheme,
    *,
    prefill: Prefill = "decoded",
    seed: int = 0,
    params: LayerParams | None = None,
    probe: bool = True,
) -> Iterator[Any]:
    """Give an empty ``KVCache``, and the model the attention that the scheme needs for the time of the block."""
    from kvcodec.integrations import transformers  # registers the attention function
    from kvcodec.integrations.plan import ATTENTION_NAME

    scheme = get(spec)
    way = attention_of(scheme)
    name = model.config._attn_implementation if way == "decoded" else ATTENTION_NAME
    with implementation(model, name):
        yield transformers.cache_for(
            model, scheme, prefill=prefill, attention=way, seed=seed, params=params, probe=probe
        )
