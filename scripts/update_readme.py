"""Write the generated blocks of README.md and of docs/ from result files and sources; ``--check`` only compares.

Blocks lie between ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` in the page that BLOCKS names. Each module of
``blocks`` has one subject and says which blocks and figures it makes, and from which files.
"""

import argparse
import re
import sys
from pathlib import Path

from blocks import cpu, front, ghost, key_biases, media, modules, quality, speed
from blocks.sources import MissingResultError

ROOT = Path(__file__).resolve().parents[1]
SUBJECTS = (front, quality, speed, cpu, key_biases, ghost, media, modules)
BLOCKS = {name: block for subject in SUBJECTS for name, block in subject.BLOCKS.items()}


def block_in(text: str, name: str) -> str:
    """What stands between a block's markers."""
    match = re.search(rf"<!-- {name}:start -->\n(.*?)\n?<!-- {name}:end -->", text, re.S)
    if match is None:
        raise MissingResultError(f"{BLOCKS[name][0]} has no markers for the block {name!r}.")
    return match[1]


def main() -> int:
    """Update or compare every block; 1 when a result is missing or, with ``--check``, a block differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    failed = False
    for name, (page, make) in BLOCKS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        try:
            old, new = block_in(text, name), make(ROOT)
        except MissingResultError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        if old != new:
            print(f"{page}, {name}: {'differs' if check else 'updated'}")
            failed |= check
            if not check:
                begin = text.index(f"<!-- {name}:start -->\n") + len(f"<!-- {name}:start -->\n")
                end = text.index(f"\n<!-- {name}:end -->", begin - 1)
                (ROOT / page).write_text(text[:begin] + new + text[end:], encoding="utf-8")
    if not check:
        for subject in (quality, speed, cpu, ghost, media):
            subject.write_figures(ROOT)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
