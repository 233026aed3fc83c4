"""Change a model's attention for the length of a block: another implementation, or its own with its inputs recorded.

Threads share a model and its config, and their blocks may overlap in any order; a recording sees its own thread only.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import unwrapped

FORMER = "_packedkv_former_attention"
"""Attribute of a model: its implementations before ``use``; a copied or pickled model has them too."""
RECORDER = "packedkv_recorder"
"""Start of the names of attention implementations that record their inputs; a number follows, one for each original."""

Watcher = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], None]
"""Called with (module, query, key, value, mask, options) as the attention function receives them, after RoPE."""


@dataclass
class _Swap:
    """The implementations of one model while blocks change them."""

    original: dict[str, str]
    """By name of the sub-config, ``""`` for the model's own config: what ``set_attn_implementation`` takes."""
    names: dict[object, str] = field(default_factory=dict)
    """Implementations of the open blocks, the newest last."""


@dataclass
class _Recording:
    watcher: Watcher
    calls: int = 0


class _Recordings(threading.local):
    open: tuple[_Recording, ...] = ()


_LOCK = threading.RLock()
_swaps: dict[int, _Swap] = {}  # by id of the model's config, which the open blocks keep alive
_recorders: dict[str, str] = {}  # names of recorders by the implementation that they record
_recordings = _Recordings()


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run the block with another attention implementation; the model's own is always restored."""
    config, block = model.config, object()
    with _LOCK:
        swap = _swaps.setdefault(id(config), _Swap(_implementations(config)))
        swap.names[block] = name
    try:
        with _LOCK:
            model.set_attn_implementation(name)
        yield
    finally:
        with _LOCK:
            del swap.names[block]
            if swap.names:
                model.set_attn_implementation(next(reversed(swap.names.values())))
            else:
                del _swaps[id(config)]
                model.set_attn_implementation(swap.original)


def use(model: Any, text: Any, name: str) -> str | None:
    """Set the attention implementation of the decoder, whose config is ``text``, until ``restore_attention``.

    Returns the former implementation; None if it is this one already.
    """
    with _LOCK:
        swap, before = _swaps.get(id(model.config)), _implementations(model.config)
        key = next((key for key in before if key and getattr(model.config, key) is text), "")
        if key not in before or before[key] == name:
            return None
        vars(model).setdefault(FORMER, {}).setdefault(key, before[key])
        _set(model, swap, {**before, key: name})
        return before[key]


def restore_attention(model: Any) -> None:
    """Set the attention implementation that a model had before ``cache_for`` changed it, if it did."""
    model = unwrapped(model)
    with _LOCK:
        if former := vars(model).pop(FORMER, None):
            _set(model, _swaps.get(id(model.config)), {**_implementations(model.config), **former})


def _set(model: Any, swap: "_Swap | None", names: dict[str, str]) -> None:
    """Set implementations; open blocks record the new one, and restore it at their end."""
    if swap is None:
        model.set_attn_implementation(names)
        return
    swap.original = names
    recorded = {block: _recorder(names[""]) for block, name in swap.names.items() if name in _recorders.values()}
    swap.names.update(recorded)
    model.set_attn_implementation(next(reversed(swap.names.values())))


def _implementations(config: Any) -> dict[str, str]:
    below = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    named = {"": config, **{name: own for name, own in below.items() if own is not None}}
    used = {name: implementation_of(own) for name, own in named.items()}
    return {name: original for name, original in used.items() if original is not None}


def implementation_of(config: Any) -> str | None:
    """Attention implementation of a config, the recorded one while a block of any thread records it."""
    name: str | None = config._attn_implementation
    return next((original for original, recorder in list(_recorders.items()) if recorder == name), name)


@contextmanager
def watched(model: Any, seen: Watcher) -> Iterator[None]:
    """Call ``seen`` with the inputs of this thread's attention calls in the block; the model's results do not change.

    Raises
    ------
    UnsupportedError
        If the block ended without any call: the model does not use transformers' attention interface.
    """
    recording = _Recording(seen)
    with implementation(model, _recorder(model.config._attn_implementation)):
        _recordings.open += (recording,)
        try:
            yield
        finally:
            _recordings.open = tuple(one for one in _recordings.open if one is not recording)
    if not recording.calls:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention layer was seen; its attention does not go through transformers' "
            f"attention interface, so its keys, values and queries cannot be recorded."
        )


def _recorder(original: str) -> str:
    """Name of the implementation that records its inputs and calls ``original``; registered once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        for recording in _recordings.open:
            recording.calls += 1
            recording.watcher(module, query, key, value, attention_mask, options)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return AttentionInterface().get_interface(original, eager)(module, query, key, value, attention_mask, **options)

    if original.startswith(RECORDER):
        return original
    with _LOCK:
        if original not in _recorders:
            name = f"{RECORDER}_{len(_recorders)}"
            # the mask must be built as for the model's own implementation
            AttentionMaskInterface.register(name, AttentionMaskInterface()[original])
            AttentionInterface.register(name, attention)
            _recorders[original] = name
        return _recorders[original]
