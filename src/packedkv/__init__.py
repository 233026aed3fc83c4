"""packedkv: compressed KV caches, 3-5x smaller with every byte counted, behind one codec interface.

A public name is imported from its module on first use: ``packedkv --help`` loads no torch.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from packedkv.version import __version__ as __version__

if TYPE_CHECKING:
    from packedkv.cache.frames import FrameCache
    from packedkv.cache.layer import LayerCache
    from packedkv.codec import Codec, Params, Payload, Sample, Site
    from packedkv.compressed import Compressed, compress, fake_quant
    from packedkv.description import describe
    from packedkv.errors import (
        FitError,
        FormatError,
        KVError,
        ModelError,
        PackedKVWarning,
        ShapeError,
        SpecError,
        UnsupportedError,
    )
    from packedkv.integrations.transformers.cache import cache_for, load_cache, restore_attention
    from packedkv.layout import Field, Layout
    from packedkv.registry import from_json, get, load_file, names, presets, register
    from packedkv.scheme import KVScheme

__all__ = [  # noqa: RUF022  grouped by use, not by alphabet
    "presets", "get", "names", "describe", "register", "load_file", "from_json",
    "compress", "fake_quant", "Compressed", "LayerCache", "FrameCache", "cache_for", "load_cache", "restore_attention",
    "Codec", "KVScheme", "Layout", "Field", "Site", "Sample", "Params", "Payload",
    "KVError", "SpecError", "ShapeError", "FitError", "FormatError", "ModelError", "UnsupportedError",
    "PackedKVWarning",
]  # fmt: skip

_HOMES = {
    "cache.frames": ("FrameCache",),
    "cache.layer": ("LayerCache",),
    "codec": ("Codec", "Params", "Payload", "Sample", "Site"),
    "compressed": ("Compressed", "compress", "fake_quant"),
    "description": ("describe",),
    "errors": ("FitError", "FormatError", "PackedKVWarning", "KVError", "ModelError", "ShapeError", "SpecError",
               "UnsupportedError"),
    "integrations.transformers": ("cache_for", "load_cache", "restore_attention"),
    "layout": ("Field", "Layout"),
    "registry": ("from_json", "get", "load_file", "names", "presets", "register"),
    "scheme": ("KVScheme",),
}  # fmt: skip
_HOME_OF = {name: f"packedkv.{module}" for module, names_there in _HOMES.items() for name in names_there}


def __getattr__(name: str) -> Any:
    """Import a public name from its module, or a submodule, and keep it here."""
    if name in _HOME_OF:
        value = globals()[name] = getattr(_import_module(_HOME_OF[name]), name)
        return value
    if not name.startswith("_") and _find_spec(f"packedkv.{name}"):
        return _import_module(f"packedkv.{name}")
    raise AttributeError(f"module 'packedkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
