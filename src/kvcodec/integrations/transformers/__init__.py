"""Packed caches for transformers: ``cache_for``; importing this registers the attention function ``kvcodec``."""

from kvcodec.integrations.transformers.cache import KVCache, cache_for, load_cache

__all__ = ["KVCache", "cache_for", "load_cache"]
