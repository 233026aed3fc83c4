"""Bytes of a whole model's cache at a context, for presets of a run: from layouts, sinks, windows and dense layers.

Partly filled pages, block tables and constants are left out: they are below a percent at contexts worth compressing.
For a spec unknown to this process (of a user's codec file) the bytes are scaled from the measured bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packedkv.cli.page.rows import UNCOMPRESSED, number
from packedkv.errors import KVError
from packedkv_lab.report.results import Results, mapping

if TYPE_CHECKING:
    from packedkv.scheme import KVScheme

CONTEXT = 32_768
"""Default context, in tokens of a sequence, of the page's column of bytes."""
CONTEXTS = (2**8, 2**23)
"""Smallest and largest context."""
DENSE_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """What a model's cache holds per token."""

    layers: int
    heads: int
    head_dim: int


def shape_of(about: Mapping[str, object]) -> Shape | None:
    """Shape of the run's model; None where ``run.json`` does not state it."""
    model = mapping(about.get("model"))
    found = [number(model.get(key)) for key in ("layers", "kv_heads", "head_dim")]
    if any(n is None or n < 1 for n in found):
        return None
    return Shape(*(int(n or 0) for n in found))


def bytes_at(scheme: "KVScheme | None", tokens: int, shape: Shape, bits: float | None = None) -> float | None:
    """Bytes of one sequence's cache.

    Parameters
    ----------
    scheme : KVScheme or None
        None: ``bits`` an element.
    bits : float or None
        Bits an element, K and V together; None: unknown, and so are the bytes.
    """
    from packedkv.codec import ROLES

    elements = tokens * shape.heads * shape.head_dim
    if scheme is None:
        return None if bits is None else 2 * shape.layers * elements * bits / 8
    total = 0.0
    for i in range(shape.layers):
        own = scheme.for_layer(i, shape.layers)
        for role in ROLES:
            encoded = own.encoded_tokens(role, tokens)
            recent = own.recent_tokens(role, tokens)
            held = float(shape.head_dim * DENSE_BYTES * (tokens - encoded - recent))
            held += encoded * own.codec(role).layout(shape.head_dim).token_bytes
            if own.recent is not None:
                held += recent * own.recent.codec(role).layout(shape.head_dim).token_bytes
            total += shape.heads * held
    return total


def sizes(results: Results, tokens: int = CONTEXT) -> tuple[dict[str, float], list[str]]:
    """Bytes of each spec at a context, the uncompressed model's among them, and the specs that were scaled.

    Both are empty where the model's shape is not known.
    """
    from packedkv.registry import get

    shape = shape_of(results.about)
    if shape is None:
        return {}, []
    found: dict[str, float] = {}
    scaled: list[str] = []
    for spec in (UNCOMPRESSED, *results.specs):
        scheme: KVScheme | None = None
        bits: float | None = 16.0
        if spec != UNCOMPRESSED:
            bits = next((r["effective_bits"] for r in results.rows if r.spec == spec and r["effective_bits"]), None)
            try:
                scheme = get(spec)
                scheme.key_bits(shape.head_dim), scheme.value_bits(shape.head_dim)
                scheme.for_layer(shape.layers - 1, shape.layers)
            except KVError:
                scheme = None
                scaled.append(spec)
        held = bytes_at(scheme, tokens, shape, bits)
        if held is not None:
            found[spec] = held
    return found, [spec for spec in scaled if spec in found]
