"""The result of a command, which the command line writes."""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """``data`` for ``--json``, readable ``text``, and the exit status."""

    data: Any
    text: str
    status: int = 0


def collected(source: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect rows; an interrupt keeps those finished, marked ``partial``."""
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(source)
    except KeyboardInterrupt:
        if not rows:
            raise
        print("packedkv: interrupted: the rows hold what was finished.", file=sys.stderr)
        rows = [row | {"partial": True} for row in rows]
    return rows
