"""From names to schemes: ``@register``, ``get("octopus-4")``, ``presets()``, and codecs loaded from files.

A spec is ``name[-bits][:key=value,...]``: ``octopus-4``, ``saw-int4:block=64,rotate=kv``, ``kivi-2:window=64``.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packedkv.atomic import whole_file
from packedkv.codec import ROLES, Codec, Dense
from packedkv.errors import FormatError, KVError, SpecError, check_former_name, nearest
from packedkv.ops.hadamard import Norm
from packedkv.ops.scale_search import Scale
from packedkv.scheme import KVScheme, Mean, mix_of, recent_of

Recipe = Callable[..., KVScheme]
FORMAT, VERSION = "packedkv-recipe", 1
Mark = Literal["recommended", "paper", "baseline"]
"""Status of a preset: recommended for use, a method as its paper has it, or a baseline to compare with."""


@dataclass(frozen=True)
class Option:
    """One option of a recipe, read from its signature and docstring."""

    name: str
    type: Any
    default: Any
    doc: str

    @property
    def choices(self) -> tuple[Any, ...]:
        """Allowed values, or an empty tuple."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def type_name(self) -> str:
        """Short text of the type, e.g. ``int`` or ``k|kv|none``."""
        if self.choices:
            return "|".join(str(c) for c in self.choices)
        if isinstance(self.type, types.UnionType):
            return "|".join("none" if t is type(None) else t.__name__ for t in self.type.__args__)
        return str(getattr(self.type, "__name__", self.type))

    def parse(self, text: str, spec: str) -> Any:
        """Turn the text of a spec into a value of the option's type."""
        kinds = self.type.__args__ if isinstance(self.type, types.UnionType) else (self.type,)
        words = {str(choice): choice for choice in self.choices}
        words |= {"none": None} if type(None) in kinds else {}
        words |= {"true": True, "false": False} if bool in kinds else {}
        if text in words:
            return words[text]
        for kind in (kind for kind in kinds if kind in (int, float, str)):
            with suppress(ValueError):
                return kind(text)
        allowed = "true|false" if bool in kinds else self.type_name
        raise SpecError(f"{spec!r}: option {self.name}={text!r} is not allowed; expected {allowed}.")


COMMON = {
    "sink": Option("sink", int, 0, "First tokens that stay in 16 bit for ever."),
    "window": Option("window", int, 0, "Newest tokens that stay in 16 bit, or in the codecs of recent."),
    "recent": Option(
        "recent",
        str | None,
        None,
        "Age tiers: preset whose codecs hold the newest window tokens, e.g. int-8; older ones are decoded from it "
        "and encoded anew.",
    ),
    "mean": Option(
        "mean",
        Mean,
        "auto",
        "Encode keys without their mean before RoPE (pre) or after it (post); auto: pre where it halves the "
        "error that the model's key biases cause.",
    ),
}
"""Options of every method: fields of the scheme. A recipe with a default of its own has it among its parameters."""

SHARED: dict[str, tuple[Any, str]] = {
    "scale": (
        Scale,
        "own: the method's own norms or ranges; search: of 13 multiples of each the one of least squared error, the "
        "bytes' form unchanged.",
    ),
    "norm": (Norm, "How norms are stored; the paper's is fp32."),
}
"""Types and texts of options that several methods share."""


@dataclass(frozen=True)
class Method:
    """A registered recipe with its presets."""

    name: str
    recipe: Recipe
    source: str
    presets: Mapping[str, Mapping[str, Any]]
    marks: Mapping[str, Mark]

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The recipe's own parameters."""
        return inspect.signature(self.recipe).parameters

    @cached_property
    def options(self) -> dict[str, Option]:
        """Options by name: the recipe's parameters in their order, and those of every method."""
        hints = typing.get_type_hints(self.recipe)
        docs = _option_docs(self.recipe)
        docs = {name: text for name, (hint, text) in SHARED.items() if hints.get(name) == hint} | docs
        options = {n: Option(n, hints[n], p.default, docs.get(n, "")) for n, p in self.parameters.items()}
        return options | {name: option for name, option in COMMON.items() if name not in options}

    def scheme(self, options: Mapping[str, Any]) -> KVScheme:
        """Return the recipe's scheme with a value for each of ``options``."""
        scheme = self.recipe(**{name: value for name, value in options.items() if name in self.parameters})
        if not isinstance(scheme, KVScheme):
            raise SpecError(f"the recipe of {self.name!r} returned {type(scheme).__name__}; return a KVScheme.")
        common = {name: options[name] for name in COMMON if name not in self.parameters}
        if common.get("recent") is not None:
            common["recent"] = _recent(common["recent"])
        return replace(scheme, **common)


@dataclass(frozen=True)
class LayerChoice:
    """One line of a recipe."""

    key: str  # specs whose key (value) codec the layer takes
    value: str
    sink: int | None = None  # None, as for window: the larger of the two specs' own, ``dense`` not counted
    window: int | None = None


_METHODS: dict[str, Method] = {}
_LOADED: dict[str, list[str]] = {}
"""Presets of the files that ``load_file`` loaded, by path: their own, and those of modules that they import."""
_search: Literal["before", "running", "done"] = "before"
"""State of the search for codecs."""
_DISCOVERY = threading.RLock()  # re-entrant: a codec's file may look up a spec while it is imported


def register(
    name: str,
    *,
    source: str,
    presets: tuple[str, ...] | Mapping[str, Mapping[str, Any]] = (),
    mark: Mark = "paper",
    recommended: tuple[str, ...] = (),
) -> Callable[[Recipe], Recipe]:
    """Register a recipe under ``name``, the method and the spec without options.

    Raises SpecError if another file has registered the name, or this file has, imported as another module; or if a
    parameter of the recipe has no type or no default.

    Parameters
    ----------
    source : str
        The paper or system: title or arXiv id and section.
    presets : tuple of str, or mapping of str to options
        Spec strings that tables, tests and docs cover. ``("x-4", "x-2")`` means ``bits=4`` and ``bits=2``.
    mark, recommended
        Mark of the presets, and those that are marked as recommended instead.
    """

    def add(recipe: Recipe) -> Recipe:
        expanded = presets if isinstance(presets, Mapping) else {p: _suffix(name, p) for p in presets}
        expanded = expanded or {name: {}}
        marks: dict[str, Mark] = {p: "recommended" if p in recommended else mark for p in expanded}
        for p in inspect.signature(recipe).parameters.values():
            if inspect.Parameter.empty in (p.annotation, p.default):
                raise SpecError(
                    f"the recipe of {name!r}: parameter {p.name!r} is an option and needs a type and a default; write "
                    f"e.g. {p.name}: int = 4."
                )
        old = _METHODS.get(name)
        if old is not None and _origin(old.recipe) != _origin(recipe):
            raise SpecError(f"codec name {name!r} is taken by {old.recipe.__module__}; choose another name.")
        if old is not None and old.recipe.__module__ != recipe.__module__:  # codecs of two classes, one without kernels
            raise SpecError(
                f"codec {name!r} is registered already, by {inspect.getfile(recipe)}; load or import that file once. "
                f"A file that imports it is given alone."
            )
        _METHODS[name] = Method(name, recipe, source, expanded, marks)
        return recipe

    return add


def get(spec: "str | KVScheme") -> KVScheme:
    """Build the scheme that ``spec`` names; the path of a ``.json`` file is a recipe (``docs/advise.md``).

    Raises SpecError for an unknown name or option (with the nearest known ones) or a value that is not allowed,
    FormatError for a recipe file that cannot be read.

    >>> str(get("saw-int4:rotate=kv,block=64"))
    'saw-int4:block=64,rotate=kv'
    """
    if isinstance(spec, KVScheme):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"got {type(spec).__name__}; expected a spec such as 'saw-int4' or a KVScheme.")
    if spec.endswith(".json"):
        return read_recipe(spec)
    method, base, defaults, given = _parse(spec)
    changed = {k: v for k, v in given.items() if v != defaults[k]}
    text = ",".join(f"{k}={_text(changed[k])}" for k in method.options if k in changed)
    return replace(method.scheme(defaults | given), spec=f"{base}:{text}" if text else base)


def read_choices(path: str | Path) -> tuple[list[LayerChoice], dict[str, Any]]:
    """Lines of a recipe file and its ``about``; raises ``FormatError``."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a FIFO would not end
            raise OSError("it is not a regular file")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"the recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no recipe: it is not JSON ({error}).") from error
    mark = data.get("format") if isinstance(data, dict) else None
    check_former_name(path, (mark,), FORMAT, f'set its "format" to "{FORMAT}"')
    if mark != FORMAT:
        raise FormatError(f'{path} is no recipe; one begins with {{"format": "{FORMAT}", "version": {VERSION}, ...}}.')
    if data.get("version") != VERSION:
        raise FormatError(f"{path} is a recipe of version {data.get('version')!r}, this packedkv reads {VERSION}.")
    lines = data.get("layers")
    if not isinstance(lines, list) or not lines:
        raise FormatError(f"{path}: layers must be a list with one object per KV layer.")
    if not isinstance(about := data.get("about", {}), dict):
        raise FormatError(f"{path}: about is {type(about).__name__}; expected an object, or nothing.")
    return [_choice(path, i, line) for i, line in enumerate(lines)], about


def _choice(path: str | Path, i: int, line: Any) -> LayerChoice:
    if isinstance(line, dict) and {*ROLES} <= line.keys() <= {*ROLES, "sink", "window"}:
        counts = [line.get("sink"), line.get("window")]
        if all(isinstance(line[role], str) for role in ROLES) and all(c is None or type(c) is int for c in counts):
            return LayerChoice(**line)
    rule = "expected key and value (specs), and at most sink and window (whole numbers)"
    raise FormatError(f"{path}, layer {i}: got {line!r}; {rule}.")


def write_recipe(path: str | Path, choices: Sequence[LayerChoice], about: Mapping[str, Any] | None = None) -> KVScheme:
    """Write a recipe file atomically and return its mixture.

    Raises SpecError for an unknown spec or a name that does not end in ``.json``, KVError if it cannot be written.
    """
    mix, path = mix_of([scheme_of(choice) for choice in choices], str(path)), Path(path)
    if path.suffix != ".json":
        raise SpecError(f"{path}: name a recipe NAME.json, so that its path is known as one.")
    rows = [{k: v for k, v in asdict(choice).items() if v is not None} for choice in choices]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = f'"format": "{FORMAT}",\n "version": {VERSION}'
    text = f'{{{head},\n "layers": [\n  {lines}\n ],\n "about": {json.dumps(dict(about or {}), indent=2)}}}\n'
    try:
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVError(f"the recipe {path} cannot be written: {error.strerror or error}.") from error
    return mix


def scheme_of(choice: LayerChoice) -> KVScheme:
    """Scheme of the layer that a line of a recipe describes; SpecError for a spec that is a recipe itself."""
    for spec in (choice.key, choice.value):
        if spec.endswith(".json"):
            raise SpecError(f"{spec!r}: a recipe's layer takes a preset, not another recipe.")
    key, value = get(choice.key), get(choice.value)
    schemes = [s for s, c in ((key, key.key), (value, value.value)) if not isinstance(c, Dense)]
    sink, window = (max((getattr(s, name) for s in schemes), default=0) for name in ("sink", "window"))
    window = window if choice.window is None else choice.window
    return KVScheme(
        key.key,
        value.value,
        sink if choice.sink is None else choice.sink,
        window,
        mean="none" if isinstance(key.key, Dense) else key.mean,
        recent=recent_of(key.key, value.value, key.recent, value.recent) if window else None,
        spec=f"{key}/{value}",
    )


def read_recipe(path: str | Path) -> KVScheme:
    """Read a recipe file; its path is the mixture's spec.

    Raises FormatError as ``read_choices``, and SpecError for a spec that does not exist; the text names the layer.
    """

    def at(layer: int, choice: LayerChoice) -> KVScheme:
        try:
            return scheme_of(choice)
        except SpecError as error:
            raise SpecError(f"{path}, layer {layer}: {error}") from error

    return mix_of([at(layer, choice) for layer, choice in enumerate(read_choices(path)[0])], str(path))


def split_specs(text: str) -> list[str]:
    """Specs of a comma-separated list; an item with ``=`` and no ``:`` belongs to the spec before it.

    >>> split_specs("int-4, kivi-2:window=64,sink=4,fp8")
    ['int-4', 'kivi-2:window=64,sink=4', 'fp8']
    """

    specs: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        if specs and "=" in item and ":" not in item:
            specs[-1] += f",{item}"
        else:
            specs.append(item)
    return specs


def method_of(spec: str) -> Method:
    """Return the method that a spec names."""
    return _parse(spec)[0]


def options_of(spec: str) -> dict[str, Any]:
    """Return every option of a spec with the value it has there."""
    _, _, defaults, given = _parse(spec)
    return defaults | given


def with_option(spec: str, name: str, value: Any) -> str:
    """Return a spec with one option changed, in its canonical form.

    >>> with_option("saw-int4:mean=none,sink=4", "mean", "pre")
    'saw-int4:sink=4,mean=pre'
    """
    base, _, tail = spec.partition(":")
    items = [item for item in filter(None, tail.split(",")) if item.partition("=")[0].strip() != name]
    return str(get(f"{base}:{','.join([*items, f'{name}={_text(value)}'])}"))


def names() -> list[str]:
    """Registered methods, sorted."""
    return sorted(_methods())


def presets(mark: Mark | None = None) -> list[str]:
    """All preset specs, or those with one mark: ``dense`` first, then by method.

    >>> presets("recommended")
    ['ghost-4', 'ghost-3', 'ghost-2', 'kivi-4', 'kivi-tq-4', 'saw-int4']
    """
    if mark is not None and mark not in typing.get_args(Mark):
        raise SpecError(f"mark={mark!r} is not allowed; use {', '.join(typing.get_args(Mark))}, or None for all.")
    methods = _methods()
    order = sorted(methods, key=lambda n: (n != "dense", n))
    return [p for name in order for p, label in methods[name].marks.items() if mark in (None, label)]


def from_json(text: str) -> KVScheme:
    """Rebuild a scheme from ``KVScheme.to_json``; other text, or a codec class not loaded here, raises FormatError."""
    try:
        data = json.loads(text)
        if "layers" in data:
            kinds = [from_json(json.dumps(kind)) for kind in data["schemes"]]
            return mix_of([kinds[i] for i in data["layers"]], data["spec"])
        key, value, recent = _codec(data.pop("key")), _codec(data.pop("value")), data.pop("recent", None)
        return KVScheme(key=key, value=value, recent=recent and from_json(json.dumps(recent)), **data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, (FormatError, SpecError)):
            raise
        raise FormatError(f"not a packedkv scheme: {error}; expected the JSON of KVScheme.to_json().") from error


def load_file(path: str | Path) -> list[str]:
    """Import one codec file from outside the package; return the presets it added.

    The file may import others of its folder. Loaded again, it is read anew, but not the modules that it imports. Raises
    SpecError if the file does not exist, is no .py file or not Python, imports a module that is not found, registers
    nothing, or registers a name that another file has registered.
    """
    path = Path(path)
    before = set(presets())
    module_spec = importlib.util.spec_from_file_location(f"packedkv_file_{path.stem}", path)
    if not path.is_file():
        raise SpecError(f"codec file {str(path)!r} was not found; pass the path of a .py file.")
    if module_spec is None or module_spec.loader is None:
        raise SpecError(f"codec file {str(path)!r} is no .py file; pass the path of one.")
    module = importlib.util.module_from_spec(module_spec)
    former = sys.modules.get(module_spec.name)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    folder = str(path.absolute().parent)
    sys.path.append(folder)  # last: a file there hides no installed module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_spec.name]
        if former is not None:
            sys.modules[module_spec.name] = former
        if isinstance(error, SyntaxError):
            raise SpecError(f"codec file {path} is not Python: {error}.") from error
        if isinstance(error, ModuleNotFoundError):
            cure = "install it or put its folder on PYTHONPATH"
            raise SpecError(f"codec file {path} imports {error.name}, which is not found; {cure}.") from error
        raise
    finally:
        sys.path.remove(folder)
    # a file that is loaded again after an edit registers known names, or imports what does
    origin = str(module_spec.origin)
    again = _LOADED.get(origin, [])
    added = [p for p in presets() if p not in before or p in again or inspect.getfile(method_of(p).recipe) == origin]
    if not added:
        raise SpecError(
            f"{path} registers no new preset; decorate its recipe with @packedkv.register. If it imports a file that "
            f"was loaded or imported before, load this one alone."
        )
    _LOADED[origin] = added
    return added


def codec_classes() -> dict[str, type[Codec]]:
    """Every codec class that is loaded, by name."""
    _methods()
    classes: dict[str, type[Codec]] = {}
    todo: list[Any] = [Codec]
    while todo:
        for cls in todo.pop().__subclasses__():
            # a class of the package is never replaced by one of the same name from elsewhere, nor any by a class of a
            # file that was refused
            old = classes.get(cls.__name__)
            if old is None or (not old.__module__.startswith("packedkv.") and cls.__module__ in sys.modules):
                classes[cls.__name__] = cls
            todo.append(cls)
    return classes


def _codec(config: dict[str, Any]) -> Codec:
    config = dict(config)
    name = config.pop("codec")
    classes = codec_classes()
    if name not in classes:
        raise FormatError(
            f"unknown codec class {name!r}; this installation knows {', '.join(sorted(classes))}. "
            f"Install or load the file that defines it, or update packedkv."
        )
    built = {k: _codec(v) if isinstance(v, dict) and "codec" in v else v for k, v in config.items()}
    return classes[name](**built)


def _methods() -> dict[str, Method]:
    global _search
    if _search == "done":
        return _METHODS
    with _DISCOVERY:
        if _search == "before":
            _search = "running"
            try:
                package = importlib.import_module("packedkv.codecs")
                for info in pkgutil.iter_modules(package.__path__):
                    importlib.import_module(f"packedkv.codecs.{info.name}")
                for entry in importlib.metadata.entry_points(group="packedkv.codecs"):
                    entry.load()
            except BaseException:
                _search = "before"
                raise
            _search = "done"
    return _METHODS


def _parse(spec: str) -> tuple[Method, str, dict[str, Any], dict[str, Any]]:
    """Return method and name of a spec, the options of the name, and those that the spec changes."""
    methods = _methods()
    base, _, tail = spec.strip().partition(":")
    by_preset = {p: m for m in methods.values() for p in m.presets}
    method = by_preset.get(base) or methods.get(base)
    if method is None:
        match = re.fullmatch(r"(.+)-(\d+)", base)
        method = methods.get(match[1]) if match else None
        if method is None or "bits" not in method.options:
            raise SpecError(
                f"unknown codec {base!r}.{nearest(base, [*by_preset, *methods])} "
                f"`packedkv list`, in Python `packedkv.presets()`, names all {len(by_preset)} presets."
            )
        method.options["bits"].parse(match[2], spec)  # type: ignore[index]  # refuses int-7 by name
    given: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, text = item.partition("=")
        key = key.strip()
        if key not in method.options:
            raise SpecError(
                f"{spec!r}: {method.name} has no option {key!r}.{nearest(key, method.options)} "
                f"Its options: {', '.join(method.options) or 'none'}."
            )
        if not equals:
            raise SpecError(f"{spec!r}: option {key!r} has no value; write {key}=VALUE.")
        if key in given:
            raise SpecError(f"{spec!r}: option {key!r} is given twice; give it once.")
        given[key] = method.options[key].parse(text.strip(), spec)
    defaults = {o.name: o.default for o in method.options.values()}
    return method, base, defaults | dict(method.presets.get(base, _suffix(method.name, base))), given


def _recent(text: str) -> KVScheme | None:
    """Return the scheme of ``recent=text``, without its own sink, window and dense layers."""
    refusal = f"recent={text!r} is not allowed; expected none or a preset, e.g. int-8 or fp8"
    try:
        scheme = get(text)
    except SpecError as error:
        raise SpecError(f"{refusal}: {error}") from error
    if scheme.layers:
        raise SpecError(f"{refusal}, not a recipe; a recipe's layers may each have a preset with its own recent=.")
    return recent_of(scheme.key, scheme.value, scheme, scheme)


def _suffix(name: str, base: str) -> dict[str, Any]:
    match = re.fullmatch(re.escape(name) + r"-(\d+)", base)
    return {"bits": int(match[1])} if match else {}


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _origin(recipe: Recipe) -> tuple[str, str]:
    return inspect.getfile(recipe), recipe.__qualname__


def _option_docs(recipe: Recipe) -> dict[str, str]:
    """Texts of options: of the recipe's docstring, else of the fields of its codecs, else of ``COMMON``."""
    docs = _parameter_docs(recipe)
    if not inspect.signature(recipe).parameters.keys() <= docs.keys():
        scheme = recipe()
        codecs = (scheme.key, scheme.value) if isinstance(scheme, KVScheme) else ()
        for cls in (cls for codec in codecs for cls in type(codec).__mro__ if issubclass(cls, Codec)):
            docs = _parameter_docs(cls) | docs
    return {name: option.doc for name, option in COMMON.items()} | docs


def _parameter_docs(documented: Any) -> dict[str, str]:
    """Read the ``Parameters`` section of a numpy docstring: name -> text."""
    match = re.search(r"Parameters\n-+\n(.*?)(?:\n\n[A-Z]\w+\n-+\n|\Z)", inspect.getdoc(documented) or "", re.S)
    docs: dict[str, str] = {}
    current: list[str] = []
    for line in match[1].splitlines() if match else []:
        if line and not line[0].isspace():
            current = [n.strip() for n in line.split(":")[0].split(",")]
            docs.update(dict.fromkeys(current, ""))
        else:
            for name in current:
                docs[name] = f"{docs[name]} {line.strip()}".strip()
    return docs
