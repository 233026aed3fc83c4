"""KVScheme: what a paper means by "method": a key codec, a value codec, and what stays dense.

The first ``sink`` tokens (by absolute position, for ever) and the newest ``window`` tokens are held in 16 bit; the
tokens between are encoded, oldest first, in units of the codec's ``block_tokens``, each exactly once::

    encoded_end = sink + unit * max(0, (N - sink - window) // unit)

so data that is encoded never changes, whatever the split into prefill and decode.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from kvcodec.codec import ROLES, Codec, Role
from kvcodec.errors import SpecError
from kvcodec.layout import PageLayout, page_tokens_for


@dataclass(frozen=True)
class KVScheme:
    """Key codec + value codec + sink, window and dense layers.

    Parameters
    ----------
    key, value : Codec
    sink : int
        First tokens that stay dense for ever.
    window : int
        Newest tokens that stay dense; the unfinished block stays dense as well.
    dense_key_layers, dense_value_layers : int
        How many of the first AND of the last layers hold keys (values) dense.
    spec : str
        The canonical spec this scheme came from; empty for one built by hand. Not part of equality.
    """

    key: Codec
    value: Codec
    sink: int = 0
    window: int = 0
    dense_key_layers: int = 0
    dense_value_layers: int = 0
    spec: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Refuse negative counts."""
        for name in ("sink", "window", "dense_key_layers", "dense_value_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise SpecError(f"{name}={value!r}: expected an integer >= 0.")

    def __str__(self) -> str:
        """Return the spec, or the repr of a scheme built by hand."""
        return self.spec or repr(self)

    def codec(self, role: Role) -> Codec:
        """Codec of one role."""
        return self.key if role == "key" else self.value

    @property
    def query_error(self) -> float:
        """``Codec.query_error`` of the keys' codec; above 0 attention rounds queries as well."""
        return self.key.query_error

    @property
    def is_fitted(self) -> bool:
        """Whether a codec takes constants from data."""
        return any(codec.needs_sample or codec.needs_queries for codec in (self.key, self.value))

    def layout_versions(self, head_dim: int) -> dict[str, Any]:
        """``Layout.version`` of each role: what saved constants go with."""
        return {role: self.codec(role).layout(head_dim).version for role in ROLES}

    def for_layer(self, layer: int, num_layers: int) -> "KVScheme":
        """Scheme of one layer: boundary layers get ``Dense`` for the roles that stay dense there."""
        from kvcodec.codecs.dense import Dense  # a brick; codecs import this module

        if not 0 <= layer < num_layers:
            raise SpecError(f"layer={layer}: expected 0 <= layer < num_layers={num_layers}.")
        edge = min(layer, num_layers - 1 - layer)
        key = Dense() if edge < self.dense_key_layers else self.key
        value = Dense() if edge < self.dense_value_layers else self.value
        return replace(self, key=key, value=value, dense_key_layers=0, dense_value_layers=0)

    def without_windows(self) -> "KVScheme":
        """Return the same codecs with sink = window = 0, as ``fake_quant`` uses them."""
        return replace(self, sink=0, window=0)

    def key_bits(self, head_dim: int) -> float:
        """Effective bits of an encoded key element, from the layout; windows and dense layers not counted."""
        return self.key.layout(head_dim).effective_bits

    def value_bits(self, head_dim: int) -> float:
        """Effective bits of an encoded value element, from the layout."""
        return self.value.layout(head_dim).effective_bits

    def effective_bits(self, head_dim: int) -> float:
        """Mean of ``key_bits`` and ``value_bits``."""
        return (self.key_bits(head_dim) + self.value_bits(head_dim)) / 2

    def nominal_bits(self, head_dim: int) -> float:
        """Bits of the codes alone, as papers print them."""
        layouts = self.key.layout(head_dim), self.value.layout(head_dim)
        return sum(layout.nominal_bits for layout in layouts) / 2

    def encoded_tokens(self, role: Role, tokens: int) -> int:
        """How many of ``tokens`` are encoded (the closed form in the module's text)."""
        unit = self.codec(role).block_tokens
        return unit * max(0, (tokens - self.sink - self.window) // unit)

    def page_layout(self, head_dim: int, page_tokens: int | None = None, *, value_dim: int | None = None) -> PageLayout:
        """Byte map of a page; ``page_tokens`` defaults to 64 rounded up to whole blocks."""
        return page_layout(self.key, self.value, head_dim, value_dim or head_dim, page_tokens)

    def to_json(self) -> str:
        """Return JSON from which ``registry.from_json`` rebuilds an equal scheme."""
        data: dict[str, Any] = {k: v for k, v in asdict(self).items() if k not in ("key", "value")}
        return json.dumps({**data, "key": self.key.config(), "value": self.value.config()})


@lru_cache(maxsize=256)  # every layer of every cache asks
def page_layout(key: Codec, value: Codec, key_dim: int, value_dim: int, page_tokens: int | None = None) -> PageLayout:
    """Byte map of a page of two codecs; ``page_tokens`` as in ``KVScheme.page_layout``."""
    layouts = key.layout(key_dim), value.layout(value_dim)
    return PageLayout(*layouts, page_tokens or page_tokens_for(*layouts))
