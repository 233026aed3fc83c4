"""kvcodec: KV caches 3-5x smaller, at their true bits, behind one contract.

Importing this package touches neither CUDA nor transformers.
"""

from typing import TYPE_CHECKING, Any

from kvcodec.cache.host import LayerCache
from kvcodec.codec import Codec, Params, Payload, Site
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
from kvcodec.layout import Field, Layout
from kvcodec.registry import from_json, get, load_file, names, presets, register
from kvcodec.scheme import KVScheme
from kvcodec.version import __version__ as __version__

if TYPE_CHECKING:
    from kvcodec.integrations.transformers.cache import cache_for, load_cache

__all__ = [  # noqa: RUF022  grouped by use, not by alphabet
    "presets", "get", "names", "describe", "register", "load_file", "from_json",
    "compress", "fake_quant", "Compressed", "LayerCache", "cache_for", "load_cache",
    "Codec", "KVScheme", "Layout", "Field", "Site", "Params", "Payload",
    "KVError", "SpecError", "ShapeError", "FitError", "FormatError", "ModelError", "UnsupportedError",
    "KVCodecWarning",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what needs transformers only when it is asked for."""
    if name in ("cache_for", "load_cache"):
        from kvcodec.integrations import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module 'kvcodec' has no attribute {name!r}")
