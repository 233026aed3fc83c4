"""Bytes of a cache, computed from layouts, windows and pages: exactly what ``report()`` would measure."""

from dataclasses import replace
from typing import Any

import torch

from packedkv.codec import ROLES
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.plan import ModelPlan
from packedkv.layout import PageLayout, page_tokens_for
from packedkv.registry import get
from packedkv.scheme import KVScheme

TABLE_ENTRY_BYTES = 4


def layer_bytes(
    scheme: KVScheme, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, *, batch: int = 1, grown: bool = False
) -> int:
    """Bytes that the cache of one layer (``scheme.for_layer``) holds after a prefill of ``tokens``, block table
    included.

    ``grown``: the upper bound for pages that grew token by token, with a reserve of 1/32. Pages of the newer of two age
    tiers are exact to one page, because aged tokens are freed in whole pages.
    """
    codecs = {role: scheme.codec(role).for_dtype(dtype) for role in ROLES}
    layouts = {role: codec.layout(head_dim) for role, codec in codecs.items()}
    page_tokens = page_tokens_for(*layouts.values())
    page = PageLayout(layouts["key"], layouts["value"], page_tokens)
    dense = slots = 0
    for role, codec in codecs.items():
        encoded, recent = scheme.encoded_tokens(role, tokens), scheme.recent_tokens(role, tokens)
        dense += (tokens - encoded - recent) * head_dim * codec.held_dtype(dtype).itemsize
        slots = max(slots, encoded)
    columns = -(-slots // page_tokens)
    if grown and columns:
        columns += max(1, columns // 32)
    nbytes = batch * (heads * dense + columns * (heads * page.page_bytes + TABLE_ENTRY_BYTES))
    if scheme.recent is None:
        return nbytes
    newest = max(scheme.recent_tokens(role, tokens) for role in ROLES)
    return nbytes + layer_bytes(scheme.recent, newest, heads, head_dim, dtype, batch=batch, grown=grown)


def cache_bytes(
    spec: str | KVScheme, plan: ModelPlan, tokens: int, dtype: torch.dtype, *, batch: int = 1, grown: bool = False
) -> int:
    """Bytes of a model's cache after a prefill of ``tokens``: ``cache_for(model, spec).report()["total_bytes"]``.

    Layers with a sliding window hold at most the window, exact to one page, because old tokens are freed in whole
    pages.
    """
    scheme, layers = get(spec), plan.kv_layers
    heads, head_dim = sizes_of(plan)
    total = 0
    for i, layer in enumerate(layers):
        layer_scheme, length = scheme.for_layer(i, len(layers)), tokens
        if layer.window is not None:
            layer_scheme, length = replace(layer_scheme, sink=0), min(tokens, layer.window - 1)
        total += layer_bytes(layer_scheme, length, heads, head_dim, dtype, batch=batch, grown=grown)
    return total


def sizes_of(plan: ModelPlan) -> tuple[int, int]:
    """KV heads and head_dim."""
    if plan.heads is None or plan.head_dim is None:
        raise UnsupportedError(
            f"{plan.name}: its config does not state one number of KV heads and one head_dim of all layers; bytes "
            f"cannot be foretold."
        )
    return plan.heads, plan.head_dim


def dtype_of(model_or_config: Any) -> torch.dtype:
    """Dtype of a model's keys and values; a config without one is taken as bfloat16."""
    dtype = getattr(model_or_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def size(nbytes: float) -> str:
    """Bytes as text, in binary units.

    >>> size(8 * 2**30), size(1536)
    ('8.00 GiB', '1.50 KiB')
    """
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
