"""Result rows: the plain-text table, and JSON files that are written atomically."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packedkv.cli.page.rows import read_json_lines, write_whole
from packedkv.cli.page.tables import aligned, cell, columns_of, with_reference
from packedkv.errors import KVError

Row = dict[str, Any]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table of plain text, the uncompressed model on top; the columns are the report's."""
    shown = with_reference(rows)
    columns = columns_of(shown)
    lines = [[c.heading for c in columns]] + [[cell(row, c) for c in columns] for row in shown]
    return "\n".join(aligned(lines, ruled=True))


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities become null, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def write_json(target: str | Path, data: Any) -> None:
    """Write ``data`` as JSON to a file, atomically; ``-`` is standard output."""
    text = json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    if str(target) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_whole(Path(target), text)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``{"rows": [...]}`` as JSON with one row per line, atomically; errors as ``write_json``."""
    lines = [json.dumps(plain(row), allow_nan=False, ensure_ascii=False) for row in rows]
    write_whole(path, '{"rows": [\n' + ",\n".join(lines) + "\n]}\n")


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row as one line of JSON; ``KVError`` if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")
    except OSError as error:
        raise KVError(
            f"{path} cannot be written ({error.strerror or error}); what was measured so far is kept there."
        ) from error


def resumed_lines(path: Path) -> list[Any]:
    """JSON of the lines of a file that is continued; a torn last line, left by a killed process, is cut off."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    rows = read_json_lines(path, whole)
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return rows


def check_writable(folder: str | Path) -> Path:
    """Make ``folder`` and verify that a file can be written there, before hours of work."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise KVError(
            f"the folder {path} cannot be written ({error.strerror or error}); choose another one or fix its rights."
        ) from error
    return path
