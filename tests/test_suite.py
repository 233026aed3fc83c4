"""The suite itself: what else is installed beside it must not matter, and scripts name tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_scripts_name_is_there() -> None:
    """Files and tests, ``{a,b}`` expanded: a missing one would stop CI late, or be left out in silence."""
    named = [
        found
        for script in (ROOT / "scripts").iterdir()
        if script.is_file()
        for found in re.findall(r"((?:lab/)?tests/[\w/]+\.py)(?:::([\w{},]+))?", script.read_text(encoding="utf-8"))
    ]
    assert any(name for _, name in named)
    for file, name in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        begin, several, end = re.fullmatch(r"(\w*)(?:\{([\w,]+)\})?(\w*)", name).groups()
        for middle in (several or "").split(","):
            assert not name or f"def {begin}{middle}{end}(" in text, f"{file} has no {begin}{middle}{end}"
