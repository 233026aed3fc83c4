"""Check, before the first token, whether a preset works on the biases that a model adds to its keys.

A bias can be a hundred times as large as the differences between tokens; a codec that encodes each token alone then
spends most of its levels on it. Keys k and queries q are made from the weights (``key_layer.py``), k^ by the codec::

    e = scale * q . (k^ - k),     error = sqrt(mean over heads, queries and tokens of (e - mean over tokens of e)^2)

in nats, centred because softmax ignores a constant: a weight in attention is wrong by a factor of about exp(error). On
Qwen2.5-Coder-1.5B the error is within a factor of 2.3 of the error on a text, and orders presets as perplexity does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from packedkv.codec import Codec, Dense, Params
from packedkv.errors import BrokenPresetError, ShapeError, SpecError, nearest
from packedkv.key_layer import KeyLayer
from packedkv.registry import get, with_option
from packedkv.scheme import KVScheme, Mean

Fitted = Mapping[int, Mapping[Any, Params]] | None
"""Fitted constants by layer and role."""
Probe = Literal["refuse", "warn", "off"]
"""What to do about a preset that breaks on a model's keys: ``refuse`` it, ``warn``, or skip the check (``off``)."""
LIMIT = 3.0
"""Error in nats from which a preset breaks. Measured on Qwen2.5-Coder-1.5B: octopus-3, the worst that holds (perplexity
14.1; uncompressed 13.1), has 2.8; fp8 (16.7) has 3.5; all that lose more have 4.8 or above."""
GAIN = 2.0
"""``mean=auto``: keys are encoded without their mean where this divides the error of the scores by so much or more. On
Qwen2.5-Coder-1.5B codecs that encode each token alone gain a factor of 5 or more, groups along tokens 1.3."""
ALTERNATIVES = ("kivi-tq-4", "kivi-4", "octopus-4", "int-8")
"""Presets tried, in this order, where one breaks; octopus-4 keeps the outer layers' keys dense."""
LAYERS = 4
"""How many of the layers that share a codec are measured: those where bias times query is largest."""


def probe_option(given: bool | str) -> Probe:
    """Read the option ``probe``: True is ``refuse``, False is ``off``; SpecError for another value.

    >>> probe_option(True), probe_option("warn"), probe_option(False)
    ('refuse', 'warn', 'off')
    """
    if isinstance(given, bool):
        return "refuse" if given else "off"
    if given not in get_args(Probe):
        allowed = ", ".join(get_args(Probe))
        raise SpecError(f"probe={given!r}: expected one of {allowed}.{nearest(str(given), get_args(Probe))}")
    return given  # type: ignore[return-value]


@dataclass(frozen=True)
class BiasError:
    """Errors of one layer's attention scores under a codec, in nats, with the key biases and without."""

    layer: int
    error: float
    plain: float

    @property
    def broken(self) -> bool:
        """Whether the codec fails because of the biases."""
        return not self.error < LIMIT and not self.error < 2 * self.plain  # NaN counts as broken


class KeyBiases:
    """The layers of one model that add a bias to their keys.

    ``order``: all layers that cache keys, because a scheme may treat outer layers differently.
    """

    removable: Callable[[KVScheme], Mean]
    """Which mean the keys of a layer with this scheme can be encoded without: ``pre``, ``post``, or ``none``."""

    def __init__(self, name: str, layers: Iterable[KeyLayer], order: Sequence[int]) -> None:
        self.name, self.order, key_layers = name, list(order), list(layers)
        self.removable = lambda scheme: "pre"
        self.known: dict[int, KeyLayer] = {}
        self.unread: dict[int, str] = {}
        """Layers that have a bias whose values cannot be read, and why: their projections cannot be called alone."""
        for layer in key_layers:
            try:
                layer.size  # noqa: B018
            except Exception as error:  # modules of any form, sharding and quantization are called
                self.unread[layer.index] = str(error)
            else:
                self.known[layer.index] = layer
        self.layers = {index: layer for index, layer in self.known.items() if layer.size > 0}
        self._parameters = [b for layer in key_layers for b in layer.biases]

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyBiases":
        """Return these biases: the copy of a cache is of the same model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle None: a cache is pickled without its model."""
        return type(None), ()

    def versions(self) -> tuple[Any, ...]:
        """Return a key that changes when the biases are written to or moved."""
        return tuple((b.data_ptr(), 0 if b.is_inference() else b._version) for b in self._parameters)

    def __bool__(self) -> bool:
        """Whether any bias is larger than the differences between tokens."""
        return bool(self.layers)

    def at(self, layer: int, codec: Codec, params: Params | None = None, *, mean: Mean = "none") -> BiasError | None:
        """Return the errors of one layer whose keys are encoded without this mean; None: small biases or dense keys."""
        if layer not in self.layers or isinstance(codec, Dense):
            return None
        key_layer = self.layers[layer]
        error = key_layer.error(codec, params, mean=mean)
        # the error without biases is measured only where it decides
        return BiasError(layer, error, key_layer.error(codec, params, mean="pre") if not error < LIMIT else 0.0)

    def holds(self, layer: int, codec: Codec, mean: Mean = "none") -> bool:
        """Whether the scores of one layer are known to be nearly right; False: they are not, or it is unknown."""
        errors = self.at(layer, codec, mean=mean)
        return errors is not None and errors.error < LIMIT

    def worst(self, scheme: KVScheme, params: Fitted = None) -> BiasError | None:
        """Return the largest error of a scheme, a broken layer before others; None: no layer has one.

        ``mean=auto`` is decided as ``means`` does.
        """
        maxima = [
            max(errors, key=_badness)
            for group, members in self._groups(scheme).items()
            if (errors := self._errors(group.codec, self._decided(group, members, params), members, params))
        ]
        return max(maxima, key=_badness, default=None)

    def means(self, scheme: KVScheme, params: Fitted = None) -> list[Mean]:
        """``mean`` of every layer's scheme, in order; ``auto`` is decided.

        By codec: where the mean divides the error by ``GAIN``, layers whose biases are large encode keys without it.
        So do layers whose biases cannot be read. Everywhere else keys keep it.
        """
        schemes = [scheme.for_layer(place, len(self.order)) for place in range(len(self.order))]
        decided: dict[int, Mean] = {}
        for group, members in self._groups(scheme).items():
            mean = self._decided(group, members, params)
            for index in members:  # with age tiers a layer has two codecs: one that gains decides
                decided[index] = decided.get(index, mean) if mean == "none" else mean
        for index, of in zip(self.order, schemes, strict=True):
            if index in self.unread and of.mean == "auto" and not isinstance(of.key, Dense):
                decided[index] = self.removable(of)
        defaults: list[Mean] = ["none" if of.mean == "auto" else of.mean for of in schemes]
        return [decided.get(index, mean) for index, mean in zip(self.order, defaults, strict=True)]

    def _groups(self, scheme: KVScheme) -> dict["_Group", list[int]]:
        """Layers with large biases whose keys are encoded alike; with age tiers by each of two codecs."""
        groups: dict[_Group, list[int]] = {}
        for place, index in enumerate(self.order):
            layer = scheme.for_layer(place, len(self.order))
            for codec in (layer.key,) if layer.recent is None else (layer.key, layer.recent.key):
                if index in self.layers and not isinstance(codec, Dense):
                    groups.setdefault(_Group(codec, layer.mean, self.removable(layer)), []).append(index)
        return groups

    def _decided(self, group: "_Group", members: Sequence[int], params: Fitted) -> Mean:
        if group.mean != "auto":
            return group.mean
        if group.removable == "none" or group.codec.without_mean:
            return group.removable
        with_mean, without = (
            max((e.error for e in self._errors(group.codec, mean, members, params)), default=0.0)
            for mean in ("none", group.removable)
        )
        return "none" if with_mean < GAIN * without else group.removable  # NaN counts as a gain

    def _errors(self, codec: Codec, mean: Mean, members: Sequence[int], params: Fitted) -> list[BiasError]:
        """Errors of those of the layers where bias times query is largest."""
        measured = sorted(members, key=lambda i: -self.layers[i].size)[:LAYERS]
        fitted = params if params and codec.needs else {}
        given = [(fitted.get(index) or {}).get("key") for index in measured]
        errors = [self.at(index, codec, constants, mean=mean) for index, constants in zip(measured, given, strict=True)]
        return [error for error in errors if error is not None]

    def check(
        self,
        scheme: KVScheme,
        *,
        params: Fitted = None,
        alternatives: Sequence[str] = ALTERNATIVES,
        starts: Callable[[str], bool] = lambda spec: True,
        further: str = "pass probe='warn' to go on",
    ) -> None:
        """Raise BrokenPresetError if a scheme breaks on the biases; the text says how, and which specs do not.

        ``alternatives``: specs to try behind the scheme's own with another mean. ``starts``: whether a spec is accepted
        where this scheme was given; others are not named. ``further``: how to use the scheme anyway.
        """
        if not self or (worst := self.worst(scheme, params)) is None or not worst.broken:
            return
        head, channel, bias, share = self.layers[worst.layer].where()
        text = (
            f"{scheme} breaks on the key biases of {self.name}: in layer {worst.layer}, KV head {head}, channel "
            f"{channel}, {bias:.0f} is added to every key, {share:.0f} times what differs between tokens, and encoding "
            f"moves attention scores by {worst.error:.1f} nats (without biases by {worst.plain:.1f}; up to {LIMIT:g} "
            f"does little harm)."
        )
        tried = (*_without_mean(scheme, self.removable(scheme)), *alternatives)
        holding = [f"{spec!r} ({e})" for spec in tried if (e := self._holds(spec)) is not None and starts(spec)]
        if not holding:
            raise BrokenPresetError(f"{text} Every preset tried does; use 'dense', or {further}.")
        raise BrokenPresetError(f"{text} Use {' or '.join(holding)}, or {further}.")

    def broken(self, specs: Iterable[str]) -> dict[str, str]:
        """Return which specs break on the biases, and how."""
        reasons = {}
        for spec in specs:
            try:
                self.check(get(spec))
            except BrokenPresetError as error:
                reasons[spec] = str(error)
        return reasons

    def summary(self, scheme: KVScheme, means: Sequence[Mean]) -> str:
        """Return a line for a log: the biases, the mean of each layer as ``means`` decided, the error of the scores."""
        count, choice = len(self.layers), "+".join(sorted(set(means) - {"none"})) or "none"
        if not count:
            why = next(iter(self.unread.values()))
            return f"{self.name} adds biases to keys whose values cannot be read ({why}): mean={choice}"
        *_, bias, share = max((layer.where() for layer in self.layers.values()), key=lambda at: at[3])
        worst, baseline = self.worst(scheme), self.worst(scheme.with_means(["none"] * len(scheme.layer_schemes)))
        moved = "" if worst is None else f"; {scheme} moves attention scores by {worst.error:.2g} nats"
        moved += "" if choice == "none" or baseline is None else f", with mean=none by {baseline.error:.2g}"
        return (
            f"{self.name} adds large biases to the keys of {count} of {len(self.order)} layers (up to {abs(bias):.0f}, "
            f"{share:.0f} times what differs between tokens): mean={choice}{moved}"
        )

    def _holds(self, spec: str) -> str | None:
        scheme = get(spec)
        try:
            worst = self.worst(scheme)
        except ShapeError:
            return None
        if worst is None or worst.broken:
            return None if worst else "outer layers dense"
        dense = "outer layers dense, " if scheme.dense_key_layers else ""
        return f"{dense}{worst.error:.1f} nats"


class _Group(NamedTuple):
    """Layers whose keys are encoded alike: their codec, ``mean`` as given, and the mean that they can do without."""

    codec: Codec
    mean: Mean
    removable: Mean


def _badness(error: BiasError) -> tuple[bool, float]:
    return error.broken, error.error


def _without_mean(scheme: KVScheme, mean: Mean) -> tuple[str, ...]:
    """Spec of the same scheme without the keys' mean; empty for a recipe or a scheme that already removes it."""
    if not scheme.spec or scheme.layers or scheme.mean != "none" or mean == "none":
        return ()
    return (with_option(scheme.spec, "mean", mean),)
