"""Load models and sample texts by path or name: ``packedkv.models.load``, ``packedkv.models.load_text``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packedkv.models.loading import LoadedModel, SampleText, load, load_text

__all__ = ["LoadedModel", "SampleText", "load", "load_text"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: loading needs torch, and ``packedkv --help`` does not."""
    if name in __all__:
        return getattr(import_module("packedkv.models.loading"), name)
    raise AttributeError(f"module 'packedkv.models' has no attribute {name!r}")
