"""Result files, read and checked before anything is shown, and pages written whole; nothing here measures."""

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from packedkv.atomic import whole_file
from packedkv.errors import FormatError, KVError

Json = dict[str, Any]

TEXT, NUMBER, OBJECT = "a text", "a number", "an object"
FIELDS = {
    **dict.fromkeys(("spec", "task", "metric", "unit", "shape", "status", "form", "backend", "cache", "load"), TEXT),
    **dict.fromkeys(("model", "text", "prefill", "better", "gpu", "device", "commit", "run", "continuation"), TEXT),
    **dict.fromkeys(("effective_bits", "key_bits", "value_bits", "cache_bytes", "ratio_to_16bit", "seed"), NUMBER),
    **dict.fromkeys(("value", "low", "high", "items", "count", "planned", "failed", "seconds"), NUMBER),
    **dict.fromkeys(("difference", "difference_low", "difference_high"), NUMBER),
    **dict.fromkeys(("perplexity", "kl", "kl_se", "top1_agreement", "attention_error", "tokens_per_s"), NUMBER),
    **dict.fromkeys(("values", "group", "versions", "sizes", "uncompressed", "server"), OBJECT),
}
"""Types of the fields of a row, the same in every file; any may be null or missing.

``spec`` of ``model`` (or of a kernel at ``shape``) has for ``metric`` in ``unit`` a ``value`` with the interval ``low``
to ``high``, or ``values`` by name (``p20``, ``p50``, ``p80``); null with a ``status`` where nothing was measured. Rows
of ``packedkv compare`` have a field per metric instead. ``gpu``, ``versions``, ``commit``, ``seed`` and ``run`` (its
start) are the provenance of a row.
"""
IS = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    OBJECT: lambda value: isinstance(value, dict),
}

UNCOMPRESSED = "(uncompressed)"


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


# -- files of rows -----------------------------------------------------------------------------------------------------


def read_rows(paths: Iterable[str | Path], needed: Sequence[str] = ("spec",)) -> list[Json]:
    """Rows of result files, in order: ``.json`` holds a list of rows, an object with ``rows``, or one row; ``.jsonl`` a
    row to a line. ``FormatError`` if a row lacks a field of ``needed``.
    """
    rows: list[Json] = []
    for path in map(Path, paths):
        if path.suffix == ".jsonl":
            content: Any = read_json_lines(path, read_bytes(path, "pass a file of results"))
        else:
            content = read_json(path, "pass a file of results")
            content = content.get("rows", [content]) if isinstance(content, dict) else content
        if not isinstance(content, list):
            raise FormatError(f"{path} holds no rows: a list, or an object with rows; pass a file of results.")
        rows += [checked(path, at, row, needed) for at, row in enumerate(content, 1)]
    return rows


def checked(path: Path, at: int, row: Any, needed: Sequence[str] = (), again: str = "measure it again") -> Json:
    """Return a row whose fields are what ``FIELDS`` says."""
    if not isinstance(row, dict):
        raise FormatError(f"{path}, row {at} is damaged: {_short(row)} is no object; {again}.")
    missing = [name for name in needed if row.get(name) is None]
    if missing:
        raise FormatError(f"{path}, row {at} is damaged: it has no {' and no '.join(missing)}; {again}.")
    for name, value in row.items():
        kind = FIELDS.get(name)
        if kind is not None and value is not None and not IS[kind](value):
            raise FormatError(f"{path}, row {at} is damaged: {name} is {_short(value)}, not {kind}; {again}.")
    return row


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def read_bytes(path: Path, otherwise: str) -> bytes:
    """Bytes of a file; ``FormatError`` with ``otherwise`` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path.parent} holds no {path.name} ({error.strerror or error}): {otherwise}.") from error


def read_json(path: Path, otherwise: str) -> Any:
    """Content of a JSON file; ``FormatError`` with ``otherwise`` if it cannot be read."""
    data = read_bytes(path, otherwise)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}); it was cut or altered.") from error


def read_json_lines(path: Path, data: bytes) -> list[Any]:
    """JSON of each line; a truncated last line, left by a killed process, is ignored."""
    end = data.rfind(b"\n") + 1
    rows = [_json(path, at, raw) for at, raw in enumerate(data[:end].splitlines(), 1)]
    with suppress(ValueError):  # a row is an object: no part of it is JSON
        rows.append(json.loads(data[end:]))
    return rows


def _json(path: Path, at: int, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}, line {at} is damaged ({error}); remove that line.") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: an existing file is kept if it fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVError(f"{path} cannot be written ({error.strerror or error}); choose another file.") from error
