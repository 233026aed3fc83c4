"""How a model takes its cache, and wrappers around models.

The model's signature decides, not transformers' version: a model's own code may use the older name under a newer one.
"""

import inspect
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from packedkv.errors import UnsupportedError

KNOWN_VERSIONS = "5.17 to 5.24"
"""Versions of transformers that the tests ran with."""
NAMES = ("cache", "past_key_values")
"""Names that are known, the newest first."""


def unwrapped(model_or_config: Any) -> Any:
    """Return the model inside ``PeftModel``, ``torch.compile``, ``DataParallel``, DDP or FSDP, or the model."""
    model = model_or_config
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        peft = getattr(model, "get_base_model", None)
        inside = peft() if callable(peft) else getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            return model_or_config
        model = inside
    return model


def cache_argument(model: Any) -> str:
    """Name of the argument of ``model.forward`` that takes the cache; UnsupportedError if it has none of ``NAMES``."""
    forward = model.forward
    of_class = getattr(type(model), "forward", None)
    name = _argument(of_class) if getattr(forward, "__func__", None) is of_class is not None else _find(forward)
    if name is None:
        raise UnsupportedError(
            f"{type(model).__name__}: its forward takes no cache, neither as {NAMES[0]!r} nor as {NAMES[1]!r}. "
            f"packedkv takes decoder-only models with attention; if this is one, transformers {transformers_version} "
            f"gives the argument another name: install a transformers that this version of packedkv knows "
            f"({KNOWN_VERSIONS}), or a newer packedkv."
        )
    return name


def _find(forward: Any) -> str | None:
    taken = inspect.signature(forward).parameters
    return next((name for name in NAMES if name in taken), None)


_argument = lru_cache(maxsize=64)(_find)
"""Of the function of a class: a signature is slow to ask for."""


def passing(model: Any, cache: Any) -> dict[str, Any]:
    """Keyword argument that hands a cache to a model, also inside a wrapper, or to its ``generate``.

    >>> from types import SimpleNamespace
    >>> passing(SimpleNamespace(forward=lambda input_ids, past_key_values=None: None), "a cache")
    {'past_key_values': 'a cache'}
    """
    return {cache_argument(unwrapped(model)): cache}
