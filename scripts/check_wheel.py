"""Check that a wheel holds every tracked file of ``src`` (data files and ``py.typed`` too) and nothing else.

Except the compiled CPU kernels, all of which must be in it, in a wheel of their platform.
"""

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

ALWAYS = ("kvcodec/py.typed", "kvcodec/__init__.py", "kvcodec/cli/main.py")
CPU = "kvcodec/kernels/cpu"


def main(wheel: str) -> int:
    """Compare and report; 1 when something is missing."""
    held = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("kvcodec/")}
    tracked = subprocess.run(["git", "ls-files", "src"], capture_output=True, text=True, check=True).stdout
    kernels = runpy.run_path(str(Path(__file__).parents[1] / "src" / CPU / "compile.py"))
    compiled = {f"{CPU}/{kernels['file_name'](variant)}" for variant in kernels["variants"]()}
    wanted = {line.removeprefix("src/") for line in tracked.splitlines()} | set(ALWAYS) | compiled
    missing, foreign = sorted(wanted - held), sorted(held - wanted)
    for name in missing:
        print(f"{wheel}: {name} is missing; is it excluded in pyproject.toml?")
    for name in foreign:
        print(f"{wheel}: {name} is not tracked by git; add it or delete it.")
    if wheel.endswith("-any.whl"):
        print(f"{wheel}: named for any platform, but it holds compiled files; see hatch_build.py.")
        return 1
    if not missing and not foreign:
        print(f"{wheel}: all {len(held)} files of the packages are in it.")
    return 1 if missing or foreign else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
