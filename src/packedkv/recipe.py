"""Recipe files: a key codec and a value codec for each layer of a model, as readable JSON (``docs/advise.md``).

``registry.read_recipe`` makes schemes of the lines.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packedkv.atomic import whole_file
from packedkv.codec import ROLES
from packedkv.errors import FormatError, KVError, SpecError, check_former_name

FORMAT, VERSION = "packedkv-recipe", 1


@dataclass(frozen=True)
class LayerChoice:
    """One line of a recipe."""

    key: str  # specs whose key (value) codec the layer takes
    value: str
    sink: int | None = None  # None, as for window: the larger of the two specs' own, ``dense`` not counted
    window: int | None = None


def read_choices(path: str | Path) -> tuple[list[LayerChoice], dict[str, Any]]:
    """Lines of a recipe file and its ``about``; raises ``FormatError``."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a FIFO would not end
            raise FormatError(f"the recipe {str(path)!r} cannot be read: it is not a regular file.")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"the recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
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
    wanted = "expected key and value (specs), and at most sink and window (whole numbers)"
    raise FormatError(f"{path}, layer {i}: got {line!r}; {wanted}.")


def write_choices(path: str | Path, choices: Sequence[LayerChoice], about: Mapping[str, Any] | None = None) -> None:
    """Write a recipe file atomically; SpecError unless its name ends in ``.json``, KVError if it cannot be written."""
    path = Path(path)
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
