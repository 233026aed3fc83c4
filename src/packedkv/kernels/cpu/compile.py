"""Compile the CPU kernels, once per instruction set: ``python compile.py``; needs nothing but a C++ compiler.

A compiled library holds a digest of its sources, so that one of other sources is neither kept nor loaded.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ARM: dict[str, tuple[str, ...]] = {"neon": ("-march=armv8-a",)}
"""NEON belongs to every 64-bit ARM processor."""
FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
)
"""Hidden: an inline variable with a visible name would be one for all libraries that a process loads."""
QUIET = ("-Wno-maybe-uninitialized", "-Wno-unknown-warning-option")
"""GCC takes its own AVX-512 intrinsics for uninitialised."""


def architecture(machine: str = "") -> str:
    """Architecture of a machine, by default of this one, as wheels name it."""
    machine = (machine or platform.machine()).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def variants(machine: str = "") -> dict[str, tuple[str, ...]]:
    """Instruction sets that are compiled for an architecture, and their flags."""
    # the levels of x86's psABI: Haswell and later, Skylake-X and Zen 4 and later
    x86: dict[str, tuple[str, ...]] = {
        "portable": ("-march=x86-64",),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4",),
    }
    return {"x86_64": x86, "aarch64": ARM}.get(architecture(machine), {"portable": ()})


def file_name(variant: str) -> str:
    """File name of the library of an instruction set."""
    return f"libpackedkv_{variant}.so"


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, g++ or clang++; None: there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def digest(machine: str = "") -> str:
    """Digest of the sources and flags."""
    sha = hashlib.sha256(repr((FLAGS, variants(machine))).encode())
    for path in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp"))):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:32]


def missing(folder: Path = HERE, machine: str = "") -> list[str]:
    """Variants that are not compiled from these sources."""
    mark = digest(machine).encode()
    paths = {variant: folder / file_name(variant) for variant in variants(machine)}
    return [variant for variant, path in paths.items() if not path.exists() or mark not in path.read_bytes()]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into the folder: two installations at once compile once."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no Unix: both compile, and the later file stays
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def compile_missing(folder: Path = HERE, more: tuple[str, ...] = (), machine: str = "") -> list[Path]:
    """Compile the variants that are missing in a folder, with ``more`` flags; returns their files.

    For another ``machine`` than this one ``$CXX`` is its cross compiler.

    Raises FileNotFoundError if there is no C++ compiler, CalledProcessError if it fails: its messages are on stderr.
    """
    if not missing(folder, machine):
        return []
    if (cxx := compiler()) is None:
        raise FileNotFoundError("the CPU kernels need a C++ compiler: install g++ or clang++, or set CXX.")
    with _alone(folder), tempfile.TemporaryDirectory() as objects:
        wanted, mark = missing(folder, machine), f'-DKV_DIGEST="{digest(machine)}"'
        flags = {variant: (*FLAGS, *variants(machine)[variant], *QUIET, *more, mark) for variant in wanted}
        parts = [(variant, source) for source in sorted(HERE.glob("*.cpp")) for variant in wanted]

        def compile_one(part: tuple[str, Path]) -> None:
            variant, source = part
            command = [cxx, *flags[variant], "-c", str(source), "-o", f"{objects}/{variant}-{source.stem}.o"]
            subprocess.run(command, check=True)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, parts))
        made = []
        for variant in wanted:
            path = folder / file_name(variant)
            part = path.with_suffix(f".{os.getpid()}")  # replaced at once: another process may have the old one loaded
            linked = map(str, sorted(Path(objects).glob(f"{variant}-*.o")))
            subprocess.run([cxx, *flags[variant], "-shared", *linked, "-o", str(part)], check=True)
            part.replace(path)
            made.append(path)
        return made


if __name__ == "__main__":
    try:
        compile_missing()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}\nWithout its CPU kernels packedkv attends with PyTorch, which is slower.")
