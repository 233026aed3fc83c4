"""Bytes of a whole model's cache at a context, for the presets of a run, as ``packedkv advise`` counts them."""

from packedkv.cli.page.rows import UNCOMPRESSED, number
from packedkv.errors import KVError
from packedkv_lab.report.results import Results, mapping

CONTEXT = 32_768
"""Default context, in tokens of a sequence, of the page's column of bytes."""
CONTEXTS = (2**8, 2**23)
"""Smallest and largest context."""


def sizes(results: Results, tokens: int = CONTEXT) -> tuple[dict[str, float], list[str]]:
    """Bytes of each spec at a context, the uncompressed model's among them, and the specs that were scaled.

    Both are empty where the model's shape is not known.
    """
    import torch

    from packedkv.cli.advise.expected import layer_bytes
    from packedkv.registry import get

    model = mapping(results.about.get("model"))
    layers, heads, head_dim = (int(number(model.get(key)) or 0) for key in ("layers", "kv_heads", "head_dim"))
    if min(layers, heads, head_dim) < 1:
        return {}, []
    elements = 2 * layers * tokens * heads * head_dim
    nbytes: dict[str, float] = {UNCOMPRESSED: 2 * elements}
    scaled = []
    for spec in results.specs:
        try:
            schemes = [get(spec).for_layer(i, layers) for i in range(layers)]
            nbytes[spec] = sum(layer_bytes(scheme, tokens, heads, head_dim, torch.float16) for scheme in schemes)
        except KVError:
            bits = next((r["effective_bits"] for r in results.rows if r.spec == spec and r["effective_bits"]), None)
            if bits is not None:
                nbytes[spec] = elements * bits / 8
                scaled.append(spec)
    return nbytes, scaled
