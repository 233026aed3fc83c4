"""How a transformers model rotates keys by their positions, for caches that hold keys without their mean.

A hook on the rotary embedding records the positions of a forward pass for its thread; each layer of a cache takes them
once. Neither a model nor a cache holds positions.
"""

import inspect
import itertools
import sys
import threading
import uuid
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.errors import UnsupportedError
from packedkv.ops.rope import Rotary
from packedkv.store.positions import computed_of

PLACES = (0, 1, 7, 100, 1000)
"""Positions at which a ``Rotary`` is compared with the model."""
ALIKE = 1e-2
"""Largest difference there, where numbers are of size 1: float32 angles of the model are good to 1e-4."""
CHANGING = ("dynamic", "longrope")
"""Types of RoPE whose frequencies depend on the length: an earlier key is rotated by others than a later one."""


class _Newest(threading.local):
    """The positions of this thread's newest forward pass, and the name of the hook that recorded them."""

    positions: Tensor | None = None
    hook: str = ""


_newest = _Newest()
_numbers = itertools.count(1)


def record_positions(positions: Tensor, hook: str) -> None:
    """Record the positions ``[B or 1, n]`` of the forward pass that this thread begins; ``hook``: its hook's name."""
    _newest.positions, _newest.hook = positions.detach(), hook


def take_positions(taken: int, cache: int, hook: "PositionHook | None") -> tuple[Tensor | None, int]:
    """Positions ``[B or 1, n]`` of this thread's forward pass, and the number of the pass.

    All layers of a pass get the same tensor. None: no pass was recorded, or the newest one is known to be another: of
    another model, or this layer has taken its positions already, or a layer of another cache has. ``taken``: number of
    the pass whose positions the layer took last. ``cache``: number of the layer's cache.
    """
    positions = _newest.positions
    if positions is None or hook is None or hook.name != _newest.hook:
        return None, taken
    if torch.compiler.is_compiling():  # numbers would become guards: one graph per pass
        return positions, taken
    computed = computed_of(positions)
    number = computed.setdefault("pass", 0) or next(_numbers)
    computed["pass"] = number
    if number == taken or computed.setdefault("cache", cache) != cache:
        return None, taken
    return positions, number


def new_number() -> int:
    """Return a number that no other cache or pass of this process has."""
    return next(_numbers)


def _record(hook: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Forward pre-hook of a rotary embedding; a function of this module, so that the model can be pickled."""
    positions = args[1] if len(args) > 1 else options.get("position_ids")
    if isinstance(positions, Tensor):
        record_positions(positions, hook)


class PositionHook:
    """Owner of the hook that records positions on one rotary embedding; the hook is removed with its owner.

    A copied model has the hook of its original, which records under the same ``name``, so their caches share the owner.
    A copied hook without an owner stays; the newest hook of an embedding records last. A deep copy of the owner is the
    owner itself. Pickled, it is a name, by which this process finds it again; another process finds nothing.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self.name = uuid.uuid4().hex
        self.embeddings = weakref.WeakSet[nn.Module]()  # of the copies too
        handle = embedding.register_forward_pre_hook(partial(_record, self.name), with_kwargs=True)
        weakref.finalize(self, handle.remove)
        _by_name[self.name] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PositionHook":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name. The model keeps the hook from then on, for the cache that may be unpickled."""
        for embedding in list(self.embeddings):
            _kept[embedding] = self
        return _unpickled, (self.name,)


_LOCK = threading.RLock()
_kept: "weakref.WeakKeyDictionary[nn.Module, PositionHook]" = weakref.WeakKeyDictionary()
_by_name: "weakref.WeakValueDictionary[str, PositionHook]" = weakref.WeakValueDictionary()


def _name_on(embedding: nn.Module) -> str | None:
    """Name of the newest hook that records the positions of a rotary embedding."""
    hooks = reversed(embedding._forward_pre_hooks.values())
    return next((hook.args[0] for hook in hooks if isinstance(hook, partial) and hook.func is _record), None)


def _unpickled(name: str) -> PositionHook | None:
    return _by_name.get(name)


class Rope:
    """The rotary embedding of one model, which all layers share and which is called with positions."""

    def __init__(self, model: Any) -> None:
        self.name, self.config = type(model).__name__, getattr(model, "config", None)
        decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model  # without a vision tower
        found = list[Any]()
        self._sources = dict[int, str]()  # by layer, the Python module of its attention
        for module in decoder.modules():
            if isinstance(getattr(module, "inv_freq", None), Tensor):
                found.append(module)
            if isinstance(layer := getattr(module, "layer_idx", None), int):
                self._sources.setdefault(layer, type(module).__module__)
        if len(found) != 1 or list(inspect.signature(found[0].forward).parameters)[:2] != ["x", "position_ids"]:
            raise UnsupportedError(
                f"{self.name}: mean=pre needs one rotary embedding that all layers share and that is called with "
                f"position_ids; this model has {len(found) or 'none'}. Use mean=post or mean=none."
            )
        self.embedding = found[0]
        self._rotaries: dict[str, Rotary] = {}

    def hook(self) -> PositionHook:
        """Return the owner of the hook; while a cache keeps it, the same one."""
        with _LOCK:
            owner = _by_name.get(_name_on(self.embedding) or "") or PositionHook(self.embedding)
            owner.embeddings.add(self.embedding)
            return owner

    def rotary(self, layer: int) -> Rotary:
        """How the model rotates the keys of a layer; see ``rotary_of``."""
        if (source := self._sources.get(layer)) is None:
            raise UnsupportedError(f"{self.name}: no module of layer {layer} was found; use mean=post or mean=none.")
        if source not in self._rotaries:
            self._check_fixed()
            self._rotaries[source] = self._compared(getattr(sys.modules[source], "apply_rotary_pos_emb", None))
        return self._rotaries[source]

    def _check_fixed(self) -> None:
        """Raise if keys are not rotated by fixed frequencies and one position per token."""
        text: Any = self.config
        text = text.get_text_config(decoder=True) if hasattr(text, "get_text_config") else text
        rope = getattr(text, "rope_parameters", None) or {}
        for own in [rope, *(r for r in rope.values() if isinstance(r, dict))]:
            if (kind := own.get("rope_type", "default")) in CHANGING:
                why = f"those of rope_type {kind!r} change with the length"
            elif "mrope_section" in own:
                why = "a token has positions on several axes here (M-RoPE)"
            else:
                continue
            raise UnsupportedError(
                f"{self.name}: mean=pre needs keys that are rotated by fixed frequencies; {why}. Use mean=post or "
                f"mean=none."
            )

    def _compared(self, turn: Any) -> Rotary:
        frequencies: Tensor = self.embedding.inv_freq.detach().float()
        scaling = float(getattr(self.embedding, "attention_scaling", 1.0))
        places = torch.tensor([PLACES], device=frequencies.device)
        x = torch.linspace(-1, 1, 2 * len(PLACES) * len(frequencies), device=frequencies.device)
        x = x.view(1, 1, len(PLACES), -1).sin()
        try:
            cos, sin = self.embedding.forward(x, places)  # without the hook: this is no pass of the model
            wanted = turn(x, x, cos, sin)[1].float()
        except Exception:  # a function of another kind, or none
            wanted = x.new_empty(0)
        for interleaved in (False, True):
            rotary = Rotary(frequencies, scaling, interleaved)
            if wanted.shape == x.shape and bool((rotary.turn(x, places) - wanted).abs().amax() < ALIKE):
                return rotary
        raise UnsupportedError(
            f"{self.name}: mean=pre takes pairs of channels rotated by the frequencies of the rotary embedding, and "
            f"this model rotates its keys in another way. Use mean=post or mean=none."
        )


_ropes: "weakref.WeakKeyDictionary[nn.Module, Rope]" = weakref.WeakKeyDictionary()


def _rope_of(model: nn.Module) -> Rope:
    with _LOCK:
        if (known := _ropes.get(model)) is None:
            known = _ropes[model] = Rope(model)
        return known


def rotary_of(model: nn.Module, layer: int) -> Rotary:
    """How a model rotates the keys of a layer.

    Raises
    ------
    UnsupportedError
        The layers do not share one rotary embedding that is called with positions, the layer is not found, the
        frequencies change with the length, positions are not one number per token, or the rotation is unknown here.
    """
    return _rope_of(model).rotary(layer)


def has_rotary(model: nn.Module, layer: int) -> bool:
    """Whether ``mean=pre`` can follow how the model rotates the keys of a layer."""
    try:
        rotary_of(model, layer)
    except UnsupportedError:
        return False
    return True


def hook_of(model_or_config: Any) -> PositionHook | None:
    """Return the owner of the hook that records positions; None: no module of the model is called with them."""
    try:
        return _rope_of(model_or_config).hook() if isinstance(model_or_config, nn.Module) else None
    except UnsupportedError:
        return None
