"""Load models and sample texts by path or name: ``kvcodec.models.load``, ``kvcodec.models.load_text``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcodec.models.loading import LoadedModel, SampleText, load, load_text

__all__ = ["LoadedModel", "SampleText", "load", "load_text"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: loading needs torch, and ``kvcodec --help`` does not."""
    if name in __all__:
        return getattr(import_module("kvcodec.models.loading"), name)
    raise AttributeError(f"module 'kvcodec.models' has no attribute {name!r}")
