"""A mixture: a scheme per layer, keys and values chosen apart; a KVScheme like any other, kept as a recipe file.

A recipe is JSON that people can write::

    {"format": "kvcodec-recipe", "version": 1,
     "layers": [{"key": "int-8", "value": "hqmq-s96_r4"},
                {"key": "kivi-4", "value": "dense", "window": 64}]}

one entry per layer that caches K and V, in the model's order. ``key`` takes the key codec of a spec, ``value`` the
value codec of another; what those presets say about outer layers is not asked, because the recipe names every layer.
A layer has one sink and one window: by default the larger of the two presets', ``dense`` not counted. ``about`` may
hold anything; ``kvcodec advise`` writes there what it measured.

The path of such a file is a spec: ``cache_for(model, "recipe.json")``, ``--specs recipe.json,saw-int4``.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvcodec.codec import ROLES, Codec, Role
from kvcodec.errors import FormatError, KVError, SpecError
from kvcodec.layout import PageLayout
from kvcodec.registry import from_json, get
from kvcodec.scheme import KVScheme

FORMAT, VERSION = "kvcodec-recipe", 1


@dataclass(frozen=True)
class LayerChoice:
    """One line of a recipe.

    Parameters
    ----------
    key, value : str
        Specs whose key (value) codec the layer takes.
    sink, window : int or None
        None: the larger of the two specs' own, ``dense`` not counted.
    """

    key: str
    value: str
    sink: int | None = None
    window: int | None = None

    def scheme(self) -> KVScheme:
        """Scheme of the layer."""
        from kvcodec.codecs.dense import Dense

        for spec in (self.key, self.value):
            if spec.endswith(".json"):
                raise SpecError(f"{spec!r}: a recipe's layer takes a preset, not another recipe.")
        key, value = get(self.key), get(self.value)
        held = [s for s, c in ((key, key.key), (value, value.value)) if not isinstance(c, Dense)]
        sink, window = (max((getattr(s, name) for s in held), default=0) for name in ("sink", "window"))
        return KVScheme(
            key.key,
            value.value,
            sink if self.sink is None else self.sink,
            window if self.window is None else self.window,
            spec=f"{key}/{value}",
        )


@dataclass(frozen=True)
class Mix(KVScheme):
    """A scheme per layer; make it with ``mix_of``.

    ``key`` and ``value`` are the first layer's; ``codec(role)`` gives them only where all layers agree.

    Parameters
    ----------
    layers : tuple of KVScheme
        Of the model's KV layers, in order; their own outer layers are not asked.
    """

    layers: tuple[KVScheme, ...] = ()

    def __str__(self) -> str:
        """Return the recipe's path, or a count of what the layers take."""
        if self.spec:
            return self.spec
        kinds = dict.fromkeys(str(layer) for layer in self.layers)
        return f"mix of {len(self.layers)} layers: {', '.join(kinds)}"

    @property
    def query_error(self) -> float:
        """Largest of all layers."""
        return max(layer.query_error for layer in self.layers)

    @property
    def is_fitted(self) -> bool:
        """Whether a codec of any layer takes constants from data."""
        return any(layer.is_fitted for layer in self.layers)

    def codec(self, role: Role) -> Codec:
        """Codec of one role, if all layers have the same.

        Raises
        ------
        SpecError
            If they differ.
        """
        if len({layer.codec(role) for layer in self.layers}) > 1:
            raise SpecError(
                f"{self}: its layers have different codecs; ask for one layer with for_layer(i, {len(self.layers)})."
            )
        return super().codec(role)

    def for_layer(self, layer: int, num_layers: int) -> KVScheme:
        """Scheme of one layer.

        Raises
        ------
        SpecError
            If the mixture is for another number of layers.
        """
        if num_layers != len(self.layers):
            raise SpecError(
                f"{self} is a recipe for {len(self.layers)} KV layers, not for {num_layers}; "
                f"make one for this model with `kvcodec advise`."
            )
        if not 0 <= layer < num_layers:
            raise SpecError(f"layer={layer}: expected 0 <= layer < num_layers={num_layers}.")
        return self.layers[layer]

    def without_windows(self) -> "Mix":
        """Return the same codecs with sink = window = 0."""
        return mix_of([layer.without_windows() for layer in self.layers], self.spec)

    def layout_versions(self, head_dim: int) -> dict[str, Any]:
        """``Layout.version`` of each role: one, or one per layer."""
        found = {role: [layer.codec(role).layout(head_dim).version for layer in self.layers] for role in ROLES}
        return {role: versions[0] if len(set(versions)) == 1 else versions for role, versions in found.items()}

    def key_bits(self, head_dim: int) -> float:
        """Effective bits of a key element, the layers' mean."""
        return self._mean(lambda layer: layer.key_bits(head_dim))

    def value_bits(self, head_dim: int) -> float:
        """Effective bits of a value element, the layers' mean."""
        return self._mean(lambda layer: layer.value_bits(head_dim))

    def nominal_bits(self, head_dim: int) -> float:
        """Bits of the codes alone, the layers' mean."""
        return self._mean(lambda layer: layer.nominal_bits(head_dim))

    def encoded_tokens(self, role: Role, tokens: int) -> int:
        """As ``KVScheme.encoded_tokens``, if all layers agree.

        Raises
        ------
        SpecError
            If they differ.
        """
        found = {layer.encoded_tokens(role, tokens) for layer in self.layers}
        if len(found) > 1:
            raise SpecError(f"{self}: its layers encode different numbers of tokens; ask for one layer with for_layer.")
        return found.pop()

    def page_layout(self, head_dim: int, page_tokens: int | None = None, *, value_dim: int | None = None) -> PageLayout:
        """As ``KVScheme.page_layout``, if all layers agree.

        Raises
        ------
        SpecError
            If they differ.
        """
        for role in ROLES:
            self.codec(role)
        return super().page_layout(head_dim, page_tokens, value_dim=value_dim)

    def to_json(self) -> str:
        """Return JSON from which ``registry.from_json`` rebuilds an equal mixture; equal layers are written once."""
        texts = [replace(layer, spec="").to_json() for layer in self.layers]
        kinds = list(dict.fromkeys(texts))
        layers = [kinds.index(text) for text in texts]
        return json.dumps({"schemes": [json.loads(text) for text in kinds], "layers": layers, "spec": self.spec})

    def _mean(self, bits: Callable[[KVScheme], float]) -> float:
        return sum(map(bits, self.layers)) / len(self.layers)


def mix_of(layers: Sequence[KVScheme], spec: str = "") -> Mix:
    """Make a mixture of one scheme per KV layer.

    Raises
    ------
    SpecError
        No layer, or a mixture among them.
    """
    if not layers or any(isinstance(layer, Mix) for layer in layers):
        raise SpecError("a mixture takes at least one scheme, each of one layer.")
    first = layers[0]
    own = tuple(replace(layer, dense_key_layers=0, dense_value_layers=0) for layer in layers)
    return Mix(first.key, first.value, first.sink, first.window, spec=spec, layers=own)


def from_data(data: Mapping[str, Any]) -> Mix:
    """Rebuild what ``Mix.to_json`` wrote."""
    kinds = [from_json(json.dumps(kind)) for kind in data["schemes"]]
    return mix_of([kinds[i] for i in data["layers"]], data["spec"])


# -- recipe files ------------------------------------------------------------------------------------------------------


def read_recipe(path: str | Path) -> Mix:
    """Read a recipe file; its path is the mixture's spec.

    Raises
    ------
    FormatError
        The file is missing, no JSON, of a newer version, or its layers are not as the module's text says.
    SpecError
        A spec in it that does not exist; the text names the layer.
    """
    choices, _ = read_choices(path)
    layers = []
    for i, choice in enumerate(choices):
        try:
            layers.append(choice.scheme())
        except SpecError as error:
            raise SpecError(f"{path}, layer {i}: {error}") from error
    return mix_of(layers, str(path))


def read_choices(path: str | Path) -> tuple[list[LayerChoice], dict[str, Any]]:
    """Lines of a recipe file, and what it says about itself; raises ``FormatError`` as ``read_recipe``."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"the recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise FormatError(f"{path} is no recipe: it is not JSON ({error}).") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f'{path} is no recipe; one begins with {{"format": "{FORMAT}", "version": {VERSION}, ...}}.')
    if data.get("version") != VERSION:
        raise FormatError(f"{path} is a recipe of version {data.get('version')!r}, this kvcodec reads {VERSION}.")
    lines = data.get("layers")
    if not isinstance(lines, list) or not lines:
        raise FormatError(f"{path}: layers must be a list with one object per KV layer.")
    return [_choice(path, i, line) for i, line in enumerate(lines)], dict(data.get("about") or {})


def _choice(path: str | Path, i: int, line: Any) -> LayerChoice:
    wanted = "expected key and value (specs), and at most sink and window (whole numbers)"
    if not isinstance(line, dict) or not {"key", "value"} <= line.keys() <= {"key", "value", "sink", "window"}:
        raise FormatError(f"{path}, layer {i}: got {line!r}; {wanted}.")
    counts = [line.get("sink"), line.get("window")]
    if not all(isinstance(line[r], str) for r in ROLES) or not all(c is None or type(c) is int for c in counts):
        raise FormatError(f"{path}, layer {i}: got {line!r}; {wanted}.")
    return LayerChoice(**line)


def write_recipe(path: str | Path, choices: Sequence[LayerChoice], about: Mapping[str, Any] | None = None) -> Mix:
    """Write a recipe file, whole or not at all, and return its mixture.

    Raises
    ------
    SpecError
        A choice that is none.
    KVError
        If the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise SpecError(f"{path}: name a recipe NAME.json, so that its path is known as one.")
    mix = mix_of([choice.scheme() for choice in choices], str(path))
    rows = [{k: v for k, v in asdict(choice).items() if v is not None} for choice in choices]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = f'"format": "{FORMAT}",\n "version": {VERSION}'
    text = f'{{{head},\n "layers": [\n  {lines}\n ],\n "about": {json.dumps(dict(about or {}), indent=2)}}}\n'
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise KVError(f"the recipe {path} cannot be written: {error.strerror or error}.") from error
    return mix


def describe_mix(mix: KVScheme, head_dim: int) -> dict[str, Any]:
    """As ``registry.describe``: bits are means over layers; ``layers`` names each, and no page is the same for all."""
    assert isinstance(mix, Mix)
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
        "dense_key_layers": 0,
        "dense_value_layers": 0,
        "page_tokens": max(page.page_tokens for page in pages),
        "page_bytes": max(page.page_bytes for page in pages),
        "options": [],
        "layout": [],
        "kernels": _kernels(mix, head_dim),
        "layers": [{"layer": i, "scheme": str(layer)} for i, layer in enumerate(mix.layers)],
    }


def _kernels(mix: Mix, head_dim: int) -> dict[str, str]:
    """What serves the layers on a GPU: one name where all are served by it, else all of them."""
    from kvcodec.registry import kernels_for

    found = [kernels_for(layer, head_dim) for layer in dict.fromkeys(mix.layers)]
    return {way: " and ".join(dict.fromkeys(one[way] for one in found)) for way in ("encode", "decode")}
