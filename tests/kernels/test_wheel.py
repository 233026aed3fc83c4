"""A wheel compiles kernels ahead without repository, GPU and network; what finds them compiled needs no compiler."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda import build

ROOT = Path(__file__).parents[2]
OFFLINE = """
import socket
def refused(*address):
    raise OSError(f"{address}: there is no network here")
socket.socket.connect, socket.getaddrinfo = refused, refused
"""
NO_COMPILER = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "nvidia", "triton"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
"""
COMMAND = """
import sys
import packedkv
from packedkv.cli.main import main
from packedkv.kernels.cuda import programs
assert packedkv.__file__.startswith(sys.argv[1]), packedkv.__file__
one = programs.LabelledProgram(programs.basis.program(64), "rows of 64 channels")
programs.of_codecs = lambda *given, **more: iter([one])
for arch in sys.argv[2].split(","):
    print(main(["compile", "int-8", "--head-dim", "64", "--arch", arch, "--workers", "1", "--json", f"{arch}.json"]))
"""


class Installed(NamedTuple):
    """A wheel's files in a folder, and folders whose ``sitecustomize`` takes the network away, and the compiler too."""

    target: Path
    offline: Path
    bare: Path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("cuda.core")
    pytest.importorskip("hatchling")
    try:
        build.compiler_version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("wheel")
    made = Installed(*(folder / name for name in Installed._fields))
    python = [sys.executable, "-m"]
    subprocess.run([*python, "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (file,) = folder.glob("*.whl")
    quiet = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*python, "pip", "install", *quiet, "--target", made.target, file], check=True)
    for path, text in ((made.offline, OFFLINE), (made.bare, OFFLINE + NO_COMPILER)):
        path.mkdir()
        (path / "sitecustomize.py").write_text(text)
    return made


def run(folder: Path, wheel: Installed, *command: str, compiler: bool) -> subprocess.CompletedProcess[str]:
    """Run Python with the wheel's packages, elsewhere than in the repository; programs are kept in ``folder``."""
    paths: Sequence[Path] = (wheel.target, wheel.offline if compiler else wheel.bare)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=900
    )


def test_a_wheel_compiles_offline_and_a_filled_folder_needs_no_compiler(wheel: Installed, tmp_path: Path) -> None:
    done = run(tmp_path, wheel, "-c", COMMAND, str(wheel.target), "sm_89", compiler=True)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr
    (row,) = json.loads((tmp_path / "sm_89.json").read_text())["rows"]
    assert row["programs"] == row["compiled"] == 1
    assert row["bytes"] > 10_000
    assert row["seconds"] > 0
    assert len(list((tmp_path / "packedkv/cuda").glob("*.cubin"))) == 1
    assert "int-8 sm_89 1/1" in done.stderr
    # what is there is taken; of another GPU nothing is, and the command says what is missing
    done = run(tmp_path, wheel, "-c", COMMAND, str(wheel.target), "sm_89,sm_90", compiler=False)
    assert done.stdout.splitlines()[-1:] == ["2"], done.stderr
    assert "need cuda-core, which is not installed" in done.stderr
    (row,) = json.loads((tmp_path / "sm_89.json").read_text())["rows"]
    assert (row["programs"], row["compiled"]) == (1, 0)
