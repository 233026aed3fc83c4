"""KVScheme: a key codec, a value codec, and which tokens and layers stay dense."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal, get_args

from packedkv.codec import ROLES, Codec, Dense, Role, page_layout
from packedkv.errors import SpecError
from packedkv.layout import PageLayout

Mean = Literal["auto", "pre", "post", "none"]
"""Mean that is subtracted from keys before they are encoded; see ``KVScheme``."""
MEANS = get_args(Mean)


@dataclass(frozen=True)
class KVScheme:
    """Key codec + value codec + sink, window and dense layers.

    Parameters
    ----------
    key, value : Codec
    sink : int
        First tokens, which always stay dense.
    window : int
        Newest tokens, dense or packed by ``recent``, as is the unfinished block.
    dense_key_layers, dense_value_layers : int
        Number of first AND of last layers with dense keys (values).
    mean : {"none", "pre", "post", "auto"}
        ``pre``: the mean of a head's keys before RoPE, rotated to the token's position, is subtracted before encoding
        and added when keys are dequantized. ``post``: the same with one mean after RoPE for all positions. Neither
        costs bytes of a token. ``auto`` is decided when a cache is made for a model: ``pre`` if it halves the error of
        attention scores on the model's key biases (``packedkv.key_bias``) or if the codec requests it
        (``Codec.without_mean``), else ``none``; ``none`` without a model. Dense keys keep their mean.
    recent : KVScheme or None
        Age tiers: its codecs store the newest ``window`` tokens. Tokens that leave the window are dequantized and
        encoded by ``key`` and ``value``, in blocks of both roles. The codecs must encode each token alone, with
        constants that need no data.
    spec : str
        The canonical spec this scheme came from; empty for one built by hand. Not part of equality.
    layers : tuple of KVScheme
        For a mixture (``mix_of``): the scheme of each KV layer, in order. The other fields are from the first layer;
        bits are means over the layers, and methods about one codec raise if layers differ.
    """

    key: Codec
    value: Codec
    sink: int = 0
    window: int = 0
    dense_key_layers: int = 0
    dense_value_layers: int = 0
    mean: Mean = "none"
    recent: "KVScheme | None" = None
    spec: str = field(default="", compare=False)
    layers: "tuple[KVScheme, ...]" = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("sink", "window", "dense_key_layers", "dense_value_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise SpecError(f"{name}={value!r}: expected an integer >= 0.")
        if self.mean not in MEANS:
            raise SpecError(f"mean={self.mean!r}: expected one of {', '.join(MEANS)}.")
        if self.recent is not None:
            _check_recent(self, self.recent)

    def __str__(self) -> str:
        """Return the spec; for a scheme built by hand its repr, for a mixture its layers' schemes."""
        if self.spec or not self.layers:
            return self.spec or repr(self)
        return f"mix of {len(self.layers)} layers: {', '.join(dict.fromkeys(map(str, self.layers)))}"

    def codec(self, role: Role) -> Codec:
        """Codec of one role; SpecError if layers of a mixture have different ones."""
        if self.layers and len({layer.codec(role) for layer in self.layers}) > 1:
            raise SpecError(
                f"{self}: its layers have different codecs; ask for one layer with for_layer(i, {len(self.layers)})."
            )
        return self.key if role == "key" else self.value

    @property
    def query_error(self) -> float:
        """Largest ``Codec.query_error`` of the keys' codecs; above 0 attention rounds queries as well."""
        return max(scheme.key.query_error for scheme in self.layer_schemes)

    @property
    def is_fitted(self) -> bool:
        """Whether a codec has constants that are fitted on data, or the keys' mean is one."""
        return any(s.key.needs or s.value.needs or s.mean in ("pre", "post") for s in self.layer_schemes)

    def layout_versions(self, head_dim: int | None) -> dict[str, Any]:
        """``Layout.version`` of each role, one or one per layer: saved constants are valid only for these.

        ``head_dim`` None: heads of several sizes; the versions are those at 128, where bytes of each codec changed.
        """
        by_role = {
            role: [layer.codec(role).layout(head_dim or 128).version for layer in self.layer_schemes] for role in ROLES
        }
        return {role: versions[0] if len(set(versions)) == 1 else versions for role, versions in by_role.items()}

    def for_layer(self, layer: int, num_layers: int) -> "KVScheme":
        """Scheme of one layer: boundary layers get ``Dense`` for the roles that stay dense there.

        Raises SpecError if there is no such layer, or a mixture is for another number of layers.
        """
        if self.layers and num_layers != len(self.layers):
            raise SpecError(
                f"{self} is a recipe for {len(self.layers)} KV layers, not for {num_layers}; "
                f"make one for this model with `packedkv advise`."
            )
        if not 0 <= layer < num_layers:
            raise SpecError(f"layer={layer}: expected 0 <= layer < num_layers={num_layers}.")
        if self.layers:
            return self.layers[layer]
        edge = min(layer, num_layers - 1 - layer)
        dense = edge < self.dense_key_layers, edge < self.dense_value_layers
        if (scheme := self._of_layers.get(dense)) is None:
            key, value = (Dense() if of else codec for of, codec in zip(dense, (self.key, self.value), strict=True))
            mean: Mean = "none" if isinstance(key, Dense) else self.mean
            recent = recent_of(key, value, self.recent, self.recent)
            scheme = self
            if self.dense_key_layers or self.dense_value_layers or mean != self.mean:
                scheme = replace(
                    self, key=key, value=value, dense_key_layers=0, dense_value_layers=0, mean=mean, recent=recent
                )
            self._of_layers[dense] = scheme
        return scheme

    @cached_property
    def _of_layers(self) -> "dict[tuple[bool, bool], KVScheme]":
        """Schemes of layers by what stays dense there: keys, values."""
        return {}

    def with_means(self, means: "Sequence[Mean]") -> "KVScheme":
        """Return the scheme with a decided ``mean``; ``means`` has the mean of each of a model's layers, in order.

        Without ``layers`` a scheme has one mean: ``none`` where all layers have none, else what the others have.
        """
        if self.layers:
            return mix_of([replace(layer, mean=m) for layer, m in zip(self.layers, means, strict=True)], self.spec)
        kinds = sorted(set(means) - {"none"})
        return replace(self, mean=kinds[0] if kinds else "none")

    def allows(self, other: "KVScheme") -> bool:
        """Whether ``other`` is this scheme, with ``mean=auto`` decided in any way."""
        if self.layers:
            same = len(other.layers) == len(self.layers)
            return same and all(layer.allows(theirs) for layer, theirs in zip(self.layers, other.layers, strict=True))
        return (replace(other, mean="auto") if self.mean == "auto" else other) == self

    @property
    def layer_schemes(self) -> "tuple[KVScheme, ...]":
        """Every scheme of a layer by the recipe alone: this scheme, or the schemes of a mixture, in order."""
        return self.layers or (self,)

    def without_windows(self) -> "KVScheme":
        """Return the same codecs with sink = window = 0, as ``fake_quant`` uses them."""
        layers = tuple(layer.without_windows() for layer in self.layers)
        return replace(self, sink=0, window=0, recent=None, layers=layers)

    def key_bits(self, head_dim: int) -> float:
        """Effective bits of an encoded key element, from the layout; windows and dense layers not counted."""
        return fmean(layer.key.layout(head_dim).effective_bits for layer in self.layer_schemes)

    def value_bits(self, head_dim: int) -> float:
        """Effective bits of an encoded value element, from the layout."""
        return fmean(layer.value.layout(head_dim).effective_bits for layer in self.layer_schemes)

    def effective_bits(self, head_dim: int) -> float:
        """Mean of ``key_bits`` and ``value_bits``."""
        return (self.key_bits(head_dim) + self.value_bits(head_dim)) / 2

    def nominal_bits(self, head_dim: int) -> float:
        """Bits of the codes alone, as papers print them."""
        codecs = [codec for layer in self.layer_schemes for codec in (layer.key, layer.value)]
        return fmean(codec.layout(head_dim).nominal_bits for codec in codecs)

    def encoded_tokens(self, role: Role, tokens: int) -> int:
        """How many of ``tokens`` are encoded, by the closed form; SpecError if layers of a mixture differ."""
        if self.layers:
            count, *others = {layer.encoded_tokens(role, tokens) for layer in self.layers}
            if others:
                raise SpecError(f"{self}: its layers encode different numbers of tokens; ask for one with for_layer.")
            return count
        unit = self.unit(role)
        return unit * max(0, (tokens - self.sink - self.window) // unit)

    def unit(self, role: Role) -> int:
        """Tokens of a role that leave the window together; with age tiers, tokens of both roles."""
        if self.recent is None:
            return self.codec(role).block_tokens
        return math.lcm(self.key.block_tokens, self.value.block_tokens)

    def recent_tokens(self, role: Role, tokens: int) -> int:
        """Number of ``tokens`` that the codecs of ``recent`` store."""
        return 0 if self.recent is None else max(0, tokens - self.sink - self.encoded_tokens(role, tokens))

    def page_layout(self, head_dim: int, page_tokens: int | None = None, *, value_dim: int | None = None) -> PageLayout:
        """Byte map of a page; ``page_tokens`` defaults to 64 rounded up to whole blocks."""
        return page_layout(self.codec("key"), self.codec("value"), head_dim, value_dim or head_dim, page_tokens)

    def to_json(self) -> str:
        """Return JSON from which ``registry.from_json`` rebuilds an equal scheme; equal layers are written once."""
        if self.layers:
            texts = [replace(layer, spec="").to_json() for layer in self.layers]
            kinds = list(dict.fromkeys(texts))
            layers = [kinds.index(text) for text in texts]
            return json.dumps({"schemes": [json.loads(text) for text in kinds], "layers": layers, "spec": self.spec})
        data: dict[str, Any] = {k: v for k, v in asdict(self).items() if k not in ("key", "value", "recent", "layers")}
        if self.mean == "none":  # as before there was a choice: older versions read it
            del data["mean"]
        if self.recent is not None:
            data["recent"] = json.loads(self.recent.to_json())
        return json.dumps({**data, "key": self.key.config(), "value": self.value.config()})


def recent_of(key: Codec, value: Codec, of_key: KVScheme | None, of_value: KVScheme | None) -> KVScheme | None:
    """Return ``recent`` of a layer whose two codecs are from different schemes; None if both roles stay dense."""
    key_codec = Dense() if of_key is None or isinstance(key, Dense) else of_key.key
    value_codec = Dense() if of_value is None or isinstance(value, Dense) else of_value.value
    if isinstance(key_codec, Dense) and isinstance(value_codec, Dense):
        return None
    given = dict.fromkeys(str(scheme) for scheme in (of_key, of_value) if scheme is not None)
    return KVScheme(key_codec, value_codec, spec="/".join(given))


def _check_recent(scheme: KVScheme, recent: KVScheme) -> None:
    if scheme.window == 0:
        raise SpecError(
            f"recent={recent}: it holds the newest tokens, as many as window says, which is 0; give both, e.g. "
            f"recent={recent},window=1024, or recent=none."
        )
    if isinstance(scheme.key, Dense) and isinstance(scheme.value, Dense):
        raise SpecError(f"recent={recent}: older tokens are dense, more than the newest ones; use recent=none.")
    for role in ROLES:
        codec = recent.codec(role)
        if codec.block_tokens > 1 or codec.needs or codec.query_error:
            raise SpecError(
                f"recent={recent}: {type(codec).__name__} encodes tokens in groups, is fitted on data or rounds "
                f"queries; tokens stay recent one by one, so give a preset that does none of it, e.g. int-8 or fp8."
            )


def mix_of(layers: Sequence[KVScheme], spec: str = "") -> KVScheme:
    """Make a mixture: one scheme for each KV layer, whose own rules for outer layers are ignored.

    Raises SpecError if there is no layer, or a mixture among them.
    """
    if not layers or any(layer.layers for layer in layers):
        raise SpecError("a mixture takes at least one scheme, each of one layer.")
    first = layers[0]
    schemes = tuple(replace(layer, dense_key_layers=0, dense_value_layers=0) for layer in layers)
    return KVScheme(first.key, first.value, first.sink, first.window, recent=first.recent, spec=spec, layers=schemes)
