"""Describe a spec as plain JSON values: bits, bytes, options, layout, kernels."""

import inspect
import math
from typing import Any

from packedkv.codec import ROLES
from packedkv.errors import UnsupportedError
from packedkv.kernels.spec import decode_spec, encode_spec
from packedkv.registry import get, method_of, options_of
from packedkv.scheme import KVScheme


def describe(spec: str, head_dim: int = 128) -> dict[str, Any]:
    """Describe a spec as plain JSON values, with bits and bytes at this head_dim.

    Of a mixture bits are means over layers, counts the largest of a layer, ``layers`` describes each, and there is
    neither a layout nor an option.

    Returns
    -------
    dict
        ``spec, method, source, summary, key_bits, value_bits, effective_bits, nominal_bits, block_tokens, sink, window,
        recent, dense_key_layers, dense_value_layers, page_tokens, page_bytes, options, layout, kernels``.
    """
    scheme = get(spec)
    every = scheme.layer_schemes
    pages = [layer.page_layout(head_dim) for layer in every]
    layers = [{"layer": i, "scheme": str(layer)} for i, layer in enumerate(scheme.layers)]
    options: list[dict[str, Any]] = []
    if scheme.layers:
        places: dict[str, list[str]] = {}
        for i, layer in enumerate(scheme.layers):
            places.setdefault(str(layer), []).append(str(i))
        method, source = "recipe", "a recipe file: key codec/value codec per layer"
        summary = "; ".join(f"layers {', '.join(at)}: {text}" for text, at in places.items())
    else:
        entry, values = method_of(spec), options_of(spec)
        method, source = entry.name, entry.source
        summary = (inspect.getdoc(entry.recipe) or "").split("\n\n")[0].replace("\n", " ")
        for o in entry.options.values():
            about = {"name": o.name, "type": o.type_name, "value": values[o.name], "default": o.default}
            options.append({**about, "choices": list(o.choices), "doc": o.doc})
    return {
        "spec": str(scheme),
        "method": method,
        "source": source,
        "summary": summary,
        "head_dim": head_dim,
        "key_bits": scheme.key_bits(head_dim),
        "value_bits": scheme.value_bits(head_dim),
        "effective_bits": scheme.effective_bits(head_dim),
        "nominal_bits": scheme.nominal_bits(head_dim),
        "block_tokens": max(layer.codec(role).block_tokens for layer in every for role in ROLES),
        "sink": max(layer.sink for layer in every),
        "window": max(layer.window for layer in every),
        "recent": "+".join(dict.fromkeys(str(layer.recent) for layer in every if layer.recent is not None)) or None,
        "dense_key_layers": scheme.dense_key_layers,
        "dense_value_layers": scheme.dense_value_layers,
        "page_tokens": max(page.page_tokens for page in pages),
        "page_bytes": max(page.page_bytes for page in pages),
        "options": options,
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
            for page in ([] if scheme.layers else pages)
            for p in page.planes
        ],
        "kernels": kernels_for(scheme, head_dim),
        **({"layers": layers} if layers else {}),
    }


def kernels_for(scheme: KVScheme, head_dim: int = 128) -> dict[str, str]:
    """Kernels of a scheme on a GPU: ``{"encode": ..., "decode": ...}``, each ``cuda`` or ``none``.

    ``encode`` may name both roles, ``key cuda, value none``: a role without a kernel is encoded by PyTorch. Of a
    mixture all that its layers have are named. cuda-core is not imported.
    """
    kernels = [_kernels_for(layer, head_dim) for layer in dict.fromkeys(scheme.layer_schemes)]
    return {way: " and ".join(dict.fromkeys(one[way] for one in kernels)) for way in ("encode", "decode")}


def _kernels_for(scheme: KVScheme, head_dim: int) -> dict[str, str]:
    step = math.lcm(16, scheme.key.block_tokens, scheme.value.block_tokens)
    try:
        decode_spec(scheme.key, scheme.value, head_dim, step)
    except UnsupportedError:
        return {"encode": "none", "decode": "none"}
    encoders = encode_spec(scheme.key, scheme.value, head_dim, step).encoders
    written = {role: "cuda" if role in encoders else "none" for role in ROLES}
    same = written["key"] == written["value"]
    encode = written["key"] if same else ", ".join(f"{role} {by}" for role, by in written.items())
    return {"encode": encode, "decode": "cuda"}
