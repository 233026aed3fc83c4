"""Print lines and bytes of each area beside its limit, as git tracks the files; exit 1 if one is over by more than 5 %.

The limits are in ``pyproject.toml``, table ``tool.size``: globs of paths, then the limit.
"""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARGIN = 1.05


def main() -> int:
    """Print the table."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    areas = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["size"]
    over = 0
    for area, (*globs, limit) in areas.items():
        wanted = [glob for glob in globs if not glob.startswith("!")]
        left = [glob[1:] for glob in globs if glob.startswith("!")]
        held = [n for n in files if any(fnmatch(n, g) for g in wanted) and not any(fnmatch(n, g) for g in left)]
        if area.endswith("bytes"):
            size = sum((ROOT / name).stat().st_size for name in held)
        else:
            size = sum((ROOT / name).read_bytes().count(b"\n") for name in held)
        too_much = size > limit * MARGIN
        over += too_much
        print(f"{area:36}{size:>12,} of {limit:>9,}{'  over' if too_much else ''}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
