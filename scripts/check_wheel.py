"""Check that the wheels hold every tracked file of their package (data files and ``py.typed`` too) and nothing else.

The library's wheel holds all compiled CPU kernels besides, and names its platform.
"""

import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

CPU = "packedkv/kernels/cpu"
SOURCES = {"packedkv-": ("src", "packedkv/"), "packedkv_lab-": ("lab/src", "packedkv_lab/")}
"""Beginning of a wheel's name: folder of its sources, and package."""


def main(wheels: list[str]) -> int:
    """Compare and report; 1 when something is missing or too much."""
    return max(_check(wheel) for wheel in wheels)


def _check(wheel: str) -> int:
    ((source, package),) = [of for name, of in SOURCES.items() if Path(wheel).name.startswith(name)]
    held = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith(package)}
    tracked = subprocess.run(["git", "ls-files", source], capture_output=True, text=True, check=True).stdout
    wanted = {line.removeprefix(f"{source}/") for line in tracked.splitlines()}
    if package == "packedkv/":
        kernels = runpy.run_path(str(Path(__file__).parents[1] / "src" / CPU / "compile.py"))
        wanted |= {f"{CPU}/{kernels['file_name'](variant)}" for variant in kernels["variants"]()}
        if wheel.endswith("-any.whl"):
            print(f"{wheel}: named for any platform, but it holds compiled files; see hatch_build.py.")
            return 1
    missing, foreign = sorted(wanted - held), sorted(held - wanted)
    for name in missing:
        print(f"{wheel}: {name} is missing; is it excluded in pyproject.toml?")
    for name in foreign:
        print(f"{wheel}: {name} is not tracked by git; add it or delete it.")
    if not missing and not foreign:
        print(f"{wheel}: all {len(held)} files of the package are in it.")
    return int(bool(missing or foreign))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
