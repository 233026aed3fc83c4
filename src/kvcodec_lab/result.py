"""What a command returns to the command line, which writes it."""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What a command found: ``data`` for ``--json``, ``text`` for people, and the exit status."""

    data: Any
    text: str
    status: int = 0


def collected(source: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they come; an interrupt keeps those that came, marked ``partial``."""
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(source)
    except KeyboardInterrupt:
        if not rows:
            raise
        print("kvcodec: interrupted: the rows hold what was finished.", file=sys.stderr)
        rows = [row | {"partial": True} for row in rows]
    return rows
