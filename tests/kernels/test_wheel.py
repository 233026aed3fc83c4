"""A wheel compiles kernels ahead without repository, GPU and network; what finds them compiled needs no compiler."""

import json
import os
import re
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
LAUNCH = """
import sys
from types import ModuleType, SimpleNamespace

import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.kernels.cuda import basis, build, decode, encode, prefill
from packedkv.kernels.codecs import ghost, innerq
from packedkv.kernels.cuda.engine import CudaEngine

said, loaded = [], []
for name, held in (
    ("vllm", {}),
    ("vllm.config", {"VllmConfig": object}),
    ("vllm.logger", {"init_logger": lambda _: SimpleNamespace(info=lambda text, *given: said.append(text % given))}),
):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(held)
from packedkv.integrations.vllm import precompile as ahead

scheme = packedkv.get(sys.argv[1])
ahead.architecture = lambda device: "sm_90"
grouped = scheme.key.block_tokens > 1
packed = SimpleNamespace(engine=lambda page: CudaEngine(scheme.key, scheme.value, 64, page), heads=2, sink=0,
                         dtype=torch.bfloat16, holds_dense=grouped, takes_several=lambda rules: not grouped)
impl = SimpleNamespace(packed=packed, head_size=64, num_heads=8, rules=SimpleNamespace(softcap=0.0))
config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=8000),
                         scheduler_config=SimpleNamespace(max_num_seqs=64))
ahead.precompile([impl], 64, config, torch.device("cpu"), 3)

def load(program, names, device, label=""):
    loaded.append(build.compile_program(program, "sm_90", label))
    return tuple(SimpleNamespace(launch=lambda *given, **more: None) for _ in names)

for module in (basis, decode, encode, ghost, innerq, prefill):
    module.load = load
build.refusal = lambda device: ""
cache = FusedLayerCache(scheme)
for tokens in (100, 1):
    cache.append(*torch.zeros(2, 1, 2, tokens, 64, dtype=torch.bfloat16))
for heads, queries in ((8, 1), (8, 3)):
    cache.attend(torch.zeros(1, heads, queries, 64, dtype=torch.bfloat16))
assert all(cubin.startswith(b"\\x7fELF") for cubin in loaded)
print(*said, len(loaded), sep="\\n")
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


@pytest.mark.nightly
@pytest.mark.parametrize("spec", ["turboquant-4", "kivi-4"])
def test_a_server_and_caches_with_a_filled_folder_compile_nothing(wheel: Installed, tmp_path: Path, spec: str) -> None:
    """The command as it is installed, all of its programs; then a process without any compiler that asks for them."""
    command = [str(wheel.target / "bin/packedkv"), "compile", spec, "--head-dim", "64", "--group", "4"]
    for more in ([], ["--served", "3", "--page-tokens", "64"]):
        done = run(tmp_path, wheel, *command, *more, "--json", "out.json", compiler=True)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
        assert row["arch"] == "sm_90"
        assert row["compiled"] > 0
    done = run(tmp_path, wheel, "-c", LAUNCH, spec, compiler=False)
    assert done.returncode == 0, done.stderr
    served, launched = done.stdout.splitlines()
    assert re.fullmatch(r"packedkv: \d+ programs, of which 0 are compiled now", served)
    assert int(launched) >= 2
    # an empty folder cannot serve it
    (empty := tmp_path / "empty").mkdir()
    done = run(empty, wheel, "-c", LAUNCH, spec, compiler=False)
    assert done.returncode == 1
    assert "UnsupportedError: the CUDA kernels need cuda-core, which is not installed" in done.stderr
