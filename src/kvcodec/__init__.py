"""kvcodec: compressed KV caches, 3-5x smaller with every byte counted, behind one codec interface.

Importing this package imports nothing else: a public name is imported from its module on first use. So the command
line prints its help without loading torch, and neither CUDA nor transformers is touched before it is needed.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from kvcodec.version import __version__ as __version__

if TYPE_CHECKING:
    from kvcodec.cache.frames import FrameCache
    from kvcodec.cache.host import LayerCache
    from kvcodec.codec import Codec, Params, Payload, Sample, Site
    from kvcodec.compressed import Compressed, compress, fake_quant
    from kvcodec.description import describe
    from kvcodec.errors import (
        FitError,
        FormatError,
        KVCodecWarning,
        KVError,
        ModelError,
        ShapeError,
        SpecError,
        UnsupportedError,
    )
    from kvcodec.integrations.transformers.cache import cache_for, load_cache
    from kvcodec.layout import Field, Layout
    from kvcodec.registry import from_json, get, load_file, names, presets, register
    from kvcodec.scheme import KVScheme

__all__ = [  # noqa: RUF022  grouped by use, not by alphabet
    "presets", "get", "names", "describe", "register", "load_file", "from_json",
    "compress", "fake_quant", "Compressed", "LayerCache", "FrameCache", "cache_for", "load_cache",
    "Codec", "KVScheme", "Layout", "Field", "Site", "Sample", "Params", "Payload",
    "KVError", "SpecError", "ShapeError", "FitError", "FormatError", "ModelError", "UnsupportedError",
    "KVCodecWarning",
]  # fmt: skip

_HOMES = {
    "cache.frames": ("FrameCache",),
    "cache.host": ("LayerCache",),
    "codec": ("Codec", "Params", "Payload", "Sample", "Site"),
    "compressed": ("Compressed", "compress", "fake_quant"),
    "description": ("describe",),
    "errors": ("FitError", "FormatError", "KVCodecWarning", "KVError", "ModelError", "ShapeError", "SpecError",
               "UnsupportedError"),
    "integrations.transformers": ("cache_for", "load_cache"),
    "layout": ("Field", "Layout"),
    "registry": ("from_json", "get", "load_file", "names", "presets", "register"),
    "scheme": ("KVScheme",),
}  # fmt: skip
_HOME_OF = {name: f"kvcodec.{module}" for module, names_there in _HOMES.items() for name in names_there}


def __getattr__(name: str) -> Any:
    """Import a public name from its module, or a submodule, and keep it here."""
    if name in _HOME_OF:
        value = globals()[name] = getattr(_import_module(_HOME_OF[name]), name)
        return value
    if not name.startswith("_") and _find_spec(f"kvcodec.{name}"):
        return _import_module(f"kvcodec.{name}")
    raise AttributeError(f"module 'kvcodec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
