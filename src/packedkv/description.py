"""Describe a spec as plain JSON values: bits, bytes, options, layout, kernels."""

import inspect
from typing import Any

from packedkv.codec import ROLES
from packedkv.kernels import spec as kernels
from packedkv.registry import get, method_of, options_of
from packedkv.scheme import KVScheme


def describe(spec: str, head_dim: int = 128) -> dict[str, Any]:
    """Describe a spec as plain JSON values.

    Parameters
    ----------
    spec : str
    head_dim : int
        Bits and bytes are computed for this head_dim.

    Returns
    -------
    dict
        ``spec, method, source, summary, key_bits, value_bits, effective_bits, nominal_bits, block_tokens, sink, window,
        recent, dense_key_layers, dense_value_layers, page_tokens, page_bytes, options, layout, kernels``.
    """
    scheme = get(spec)
    if scheme.layers:
        return _describe_mix(scheme, head_dim)
    method = method_of(spec)
    values = options_of(spec)
    page = scheme.page_layout(head_dim)
    return {
        "spec": str(scheme),
        "method": method.name,
        "source": method.source,
        "summary": (inspect.getdoc(method.recipe) or "").split("\n\n")[0].replace("\n", " "),
        "head_dim": head_dim,
        "key_bits": scheme.key_bits(head_dim),
        "value_bits": scheme.value_bits(head_dim),
        "effective_bits": scheme.effective_bits(head_dim),
        "nominal_bits": scheme.nominal_bits(head_dim),
        "block_tokens": max(scheme.key.block_tokens, scheme.value.block_tokens),
        "sink": scheme.sink,
        "window": scheme.window,
        "recent": None if scheme.recent is None else str(scheme.recent),
        "dense_key_layers": scheme.dense_key_layers,
        "dense_value_layers": scheme.dense_value_layers,
        "page_tokens": page.page_tokens,
        "page_bytes": page.page_bytes,
        "options": [
            {
                "name": o.name,
                "type": o.type_name,
                "value": values[o.name],
                "default": o.default,
                "choices": list(o.choices),
                "doc": o.doc,
            }
            for o in method.options.values()
        ],
        "layout": [
            {
                "role": p.role,
                "field": p.field.name,
                "part": p.field.part,
                "dtype": p.field.dtype,
                "shape": list(p.field.shape),
                "block_tokens": page.page_tokens // p.blocks,
                "page_offset": p.offset,
            }
            for p in page.planes
        ],
        "kernels": kernels_for(scheme, head_dim),
    }


def _describe_mix(mix: KVScheme, head_dim: int) -> dict[str, Any]:
    """Describe a mixture: bits are means over layers, ``layers`` describes each layer, page sizes are the largest."""
    kinds: dict[str, list[int]] = {}
    for i, layer in enumerate(mix.layers):
        kinds.setdefault(str(layer), []).append(i)
    summary = "; ".join(f"layers {', '.join(map(str, at))}: {kind}" for kind, at in kinds.items())
    pages = [layer.page_layout(head_dim) for layer in mix.layers]
    return {
        "spec": str(mix),
        "method": "recipe",
        "source": "a recipe file: key codec/value codec per layer",
        "summary": summary,
        "head_dim": head_dim,
        "key_bits": mix.key_bits(head_dim),
        "value_bits": mix.value_bits(head_dim),
        "effective_bits": mix.effective_bits(head_dim),
        "nominal_bits": mix.nominal_bits(head_dim),
        "block_tokens": max(s.codec(role).block_tokens for s in mix.layers for role in ROLES),
        "sink": max(layer.sink for layer in mix.layers),
        "window": max(layer.window for layer in mix.layers),
        "recent": "+".join(dict.fromkeys(str(s.recent) for s in mix.layers if s.recent is not None)) or None,
        "dense_key_layers": 0,
        "dense_value_layers": 0,
        "page_tokens": max(page.page_tokens for page in pages),
        "page_bytes": max(page.page_bytes for page in pages),
        "options": [],
        "layout": [],
        "kernels": kernels_for(mix, head_dim),
        "layers": [{"layer": i, "scheme": str(layer)} for i, layer in enumerate(mix.layers)],
    }


def kernels_for(scheme: KVScheme, head_dim: int = 128) -> dict[str, str]:
    """Return the kernels of a scheme on a GPU: ``{"encode": ..., "decode": ...}``, each ``cuda`` or ``none``.

    ``encode`` may name both roles (``key cuda, value none``); PyTorch encodes a role without a kernel. A mixture has
    one name if it applies to all layers, else all names. cuda-core is not imported.
    """
    found = [kernels.kernels_for(layer, head_dim) for layer in dict.fromkeys(scheme.layer_schemes)]
    return {way: " and ".join(dict.fromkeys(one[way] for one in found)) for way in ("encode", "decode")}
