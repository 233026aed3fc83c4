"""Packed caches for transformers; first use imports it and registers the attention function ``packedkv``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packedkv.integrations.transformers.cache import KVCache, cache_for, load_cache, restore_attention

__all__ = ["KVCache", "cache_for", "load_cache", "restore_attention"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from packedkv.integrations.transformers import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
