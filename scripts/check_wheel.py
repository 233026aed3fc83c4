"""Check that distributions hold every tracked file of their package (data files and ``py.typed`` too) and nothing else.

A wheel for a platform holds all compiled CPU kernels besides. An sdist holds the tracked files that build and test the
library, and is smaller than ``MOST_BYTES``.
"""

import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU = "packedkv/kernels/cpu"
MOST_BYTES = 3_000_000


def tracked(*folders: str) -> set[str]:
    """Tracked files of some folders, by their path in the repository."""
    return set(
        subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=True).stdout.split("\n")
    )


def kernels(tag: str) -> set[str]:
    """Compiled files of a wheel for a platform tag."""
    if tag.endswith("-any"):
        return set()
    compiling = runpy.run_path(str(ROOT / "src" / CPU / "compile.py"))
    variants = compiling["variants"]("aarch64" if tag.endswith("aarch64") else "x86_64")
    return {f"{CPU}/{compiling['file_name'](variant)}" for variant in variants}


def check(path: Path) -> bool:
    """Print what a distribution lacks or has too much; return whether it is right."""
    if path.suffix == ".whl":
        source, package = (
            ("lab/src", "packedkv_lab/") if path.name.startswith("packedkv_lab-") else ("src", "packedkv/")
        )
        wanted = {line.removeprefix(f"{source}/") for line in tracked(source)} - {""}
        wanted |= kernels(path.stem) if package == "packedkv/" else set()
        files = {name for name in zipfile.ZipFile(path).namelist() if name.startswith(package)}
    else:
        top = path.name.removesuffix(".tar.gz") + "/"
        with tarfile.open(path) as archive:
            files = {name.removeprefix(top) for name in archive.getnames()}
        files -= {"PKG-INFO", "README.md", "LICENSE", "pyproject.toml", ".gitignore"}
        wanted = tracked("src", "tests", "hatch_build.py", "CHANGELOG.md", "CITATION.cff", "constraints.txt") - {""}
    for name in sorted(wanted - files):
        print(f"{path}: {name} is missing; is it excluded in pyproject.toml?")
    for name in sorted(files - wanted):
        print(f"{path}: {name} is not tracked by git; add it or delete it.")
    if path.suffix != ".whl" and path.stat().st_size >= MOST_BYTES:
        print(f"{path}: {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}.")
        return False
    print(f"{path}: {len(files)} files, {path.stat().st_size:,} bytes")
    return files == wanted


if __name__ == "__main__":
    results = [check(Path(name)) for name in sys.argv[1:]]
    sys.exit(not all(results))
