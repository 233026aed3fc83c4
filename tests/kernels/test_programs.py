"""What is compiled ahead is what caches and servers ask for."""

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cli.main import main
from packedkv.errors import UnsupportedError
from packedkv.kernels.cuda import build, launch, programs
from packedkv.kernels.cuda.build import Program
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.programs import Steps, of_scheme
from packedkv.kernels.spec import decode_spec
from packedkv.kernels.tokens import Rules
from tests.kernels.conftest import normal

DIM = 64


@pytest.mark.parametrize(
    ("spec", "capacity"), [("int-8", 256), ("kivi-4:sink=2", 0), ("innerq-base", 256), ("hqmq-s24_r3", 0)]
)
def test_caches_ask_for_no_other_programs(spec: str, capacity: int, asked: list[Program]) -> None:
    scheme = packedkv.get(spec).for_layer(8, 24)
    cache = FusedLayerCache(scheme, capacity=capacity)
    k, v = normal(2, 2, 2, 230, DIM).half()
    cache.append(k[:, :, :227], v[:, :, :227])
    for at in range(227, 230):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        for heads in (4, 16):
            cache.attend(torch.randn(2, heads, 1, DIM).half())
    cache.attend(torch.randn(2, 4, 3, DIM).half())
    known = of_scheme(scheme, DIM, launch.H200, Steps(dense=(None, torch.float16)), dtype=torch.float16)
    assert len(set(asked)) >= 4
    assert set(asked) <= {one.program for one in known}


@pytest.mark.parametrize("spec", ["saw-int4", "octopus-3", "hqmq-s96_r4", "kivi-2", "ghost-3", "turboquant-4"])
def test_every_choice_of_launch_constants_is_foreseen(spec: str) -> None:
    """Any number of sequences, on any number of multiprocessors."""
    scheme, rng = packedkv.get(spec), random.Random(0)
    pair = decode_spec(scheme.key, scheme.value, 128, scheme.page_layout(128).page_tokens)
    for arch, heads, dense in (("sm_90", 4, False), ("sm_90", 8, True), ("sm_80", 4, False), ("sm_89", 8, False)):
        there = launch.machine_of(arch)
        try:
            known = launch.configs_for(pair, there, dense, heads)
        except UnsupportedError:
            continue
        for _ in range(300):
            own = there._replace(sms=rng.randint(20, 200))
            units, capacity = int(10 ** rng.uniform(0, 4.5)), int(10 ** rng.uniform(1, 5))
            config = launch.config_for(pair, units, capacity, own, dense, heads)
            assert config._replace(splits=1) in known


def test_dense_layers_and_keys_without_their_mean_have_programs_of_their_own() -> None:
    octopus = " ".join(one.label for one in of_scheme(packedkv.get("octopus-3"), 128, launch.H200))
    assert "kv::ReadDense<128, true> and kv::ReadGroupInt" in octopus  # of the outer layers
    assert "kv::ReadOctopus<128, 4, 2, false> and kv::ReadGroupInt" in octopus
    ghost = of_scheme(packedkv.get("ghost-3"), 128, launch.H200)
    assert sum(one.label.startswith("fitting Ghost") for one in ghost) == 1  # keys and values in one launch
    assert any(", 64>;" in one.program.source for one in ghost)  # all 64 pairs of channels have a mean
    plain, given = packedkv.get("saw-int4"), Steps((4,), (None,), heads=(8, 16, 2048), capacity=8192)
    every, biased, served = (
        {one.program for one in of_scheme(plain, 128, launch.H200, steps, means=means)}
        for steps, means in ((None, False), (None, True), (given, False))
    )
    assert served < every < biased
    assert all(any(f"{pairs}>;" in program.source for program in biased) for pairs in (16, 32, 48, 64))


# -- compiling -------------------------------------------------------------------------------------------------------

SPEC = ("saw-int4", "--head-dim", "64", "--group", "4")


def test_what_would_be_compiled_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["compile", *SPEC, "--list"]) == 0
    said = capsys.readouterr().out
    assert said.count("missing: decode attention of kv::ReadSaw<64>") > 10
    assert not build.cache_folder().exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["saw-int4", "--arch", "sm_70"], "arch='sm_70': the CUDA kernels know"),
        (["kvarn-k4v2"], "`packedkv list --head-dim 128` says which presets have kernels.\n"),
        (["saw-int4", "--head-dim", "72"], "the CUDA kernels take head_dim"),
        (["saw-int4", "--page-tokens", "63"], "page_tokens=63 is not a multiple of 16; use e.g. 64.\n"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_another_version_of_the_compiler_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = programs.basis.program(64)
    build.write_cached(build.cache_file(program, "sm_90", "nvrtc 13.0"), b"old")
    monkeypatch.setattr(build, "compiler_version", lambda: "nvrtc 13.1")
    assert build.compiled(program, "sm_90") is None
    monkeypatch.setattr(build, "compiler_version", lambda: "nvrtc 13.0")
    assert build.compiled(program, "sm_90") == b"old"

    def missing() -> str:
        raise UnsupportedError("not installed")

    monkeypatch.setattr(build, "compiler_version", missing)
    assert build.compiled(program, "sm_90") == b"old"
    assert build.compiled(program, "sm_80") is None


def test_a_filled_folder_does_not_import_the_compiler(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda-core: its import takes longer than everything else of a process's first cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = programs.basis.program(64)
    build.write_cached(build.cache_file(program, "sm_90", build.compiler_version()), b"compiled")

    def imported() -> None:
        raise AssertionError("cuda-core was imported")

    monkeypatch.setattr(build, "_core", imported)
    build.compiler_version.cache_clear()
    assert build.compile_program(program, "sm_90") == b"compiled"
    with pytest.raises(AssertionError, match="imported"):
        build.compile_program(program, "sm_80")


def test_the_vllm_plugin_compiles_what_it_serves_and_says_so(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself is not needed for it."""
    said: list[str] = []
    logger = SimpleNamespace(info=lambda text, *given: said.append(text % given))
    for name, held in (
        ("vllm", {}),
        ("vllm.config", {"VllmConfig": object}),
        ("vllm.logger", {"init_logger": lambda _: logger}),
    ):
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "packedkv.integrations.vllm.precompile", raising=False)
    ahead = importlib.import_module("packedkv.integrations.vllm.precompile")
    monkeypatch.setattr(ahead, "architecture", lambda device: "sm_90")
    scheme = packedkv.get("saw-int4")
    packed = SimpleNamespace(
        engine=lambda _: CudaEngine(scheme.key, scheme.value, 64, 64), heads=2, dtype=torch.bfloat16, sink=0,
        holds_dense=False,
    )  # fmt: skip
    impl = SimpleNamespace(packed=packed, head_size=64, num_heads=8, rules=Rules(0.125))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8000), scheduler_config=SimpleNamespace(max_num_seqs=64)
    )

    def compile_programs(wanted: list[programs.LabelledProgram], arch: str) -> Any:
        foreseen = {one.program for one in of_scheme(scheme, 64, launch.H200, Steps((4,)), page_tokens=64, served=4)}
        for one in wanted:
            assert one.program in foreseen  # by `packedkv compile`
            build.write_cached(build.cache_file(one.program, arch, build.compiler_version()), b"compiled")
        return [programs.Compiled(one.label, 2048, 1.5) for one in wanted]

    monkeypatch.setattr(ahead, "compile_programs", compile_programs)
    for drafts, queries, line in (
        (False, 1, "packedkv: 5 programs, of which 5 are compiled now"),
        (False, 1, "packedkv: 5 programs, of which 0 are compiled now"),
        (True, 4, "packedkv: 7 programs, of which 2 are compiled now"),
    ):
        said.clear()
        packed.takes_several = lambda rules, drafts=drafts: drafts
        ahead.precompile([impl, impl], 64, config, torch.device("cpu"), queries)
        assert said[0] == line
        assert all(line.endswith(": 1.5 s, 2 KB") for line in said[1:-1])
    monkeypatch.delitem(sys.modules, "packedkv.integrations.vllm.precompile")


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
def wheel(tmp_path_factory: pytest.TempPathFactory, compiler: None) -> Installed:
    pytest.importorskip("hatchling")
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
