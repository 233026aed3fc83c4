"""Packed caches for transformers: ``cache_for``, ``load_cache`` and ``KVCache``.

Asking for one of them imports transformers and registers the attention function ``kvcodec``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcodec.integrations.transformers.cache import KVCache, cache_for, load_cache

__all__ = ["KVCache", "cache_for", "load_cache"]


def __getattr__(name: str) -> Any:
    """Import transformers only on first use."""
    if name in __all__:
        from kvcodec.integrations.transformers import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
