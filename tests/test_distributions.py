"""The two wheels: the library works without the laboratory, and the laboratory adds its commands."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from packedkv.cli.main import COMMANDS, LABORATORY

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per wheel, with its files, and one with every other installed package but ours."""
    pytest.importorskip("hatchling")
    made = {name: tmp_path_factory.mktemp(name) for name in ("library", "laboratory", "others")}
    python = [sys.executable, "-m"]
    for name, root in (("library", ROOT), ("laboratory", ROOT / "lab")):
        wheels = tmp_path_factory.mktemp("wheels")
        subprocess.run([*python, "hatchling", "build", "-t", "wheel", "-d", wheels], cwd=root, check=True)
        (file,) = wheels.glob("*.whl")
        options = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*python, "pip", "install", *options, "--target", made[name], file], check=True)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(("packedkv", "_editable")) and path.suffix != ".pth":
            (made["others"] / path.name).symlink_to(path)
    return made


def run(folders: dict[str, Path], names: list[str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these folders and the standard library alone, outside the repository."""
    paths = [str(folders[name]) for name in (*names, "others")]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-S", *command], cwd=folders["others"].parent, env=env, capture_output=True, text=True
    )


def test_the_library_works_without_the_laboratory(folders: dict[str, Path]) -> None:
    program = (
        "import importlib.util, packedkv, torch; x = torch.randn(1, 1, 8, 64);"
        "bits = packedkv.compress('saw-int4', x, x).effective_bits;"
        "print(bits, importlib.util.find_spec('packedkv_lab'), packedkv.__file__)"
    )
    done = run(folders, ["library"], "-c", program)
    assert done.returncode == 0, done.stderr
    bits, laboratory, file = done.stdout.split()
    assert float(bits) == 4.5
    assert laboratory == "None"
    assert file.startswith(str(folders["library"]))
    shown = run(folders, ["library"], "-m", "packedkv", "--help").stdout
    assert all(f"    {name} " in shown for name in COMMANDS)
    assert not any(f"    {name} " in shown for name in LABORATORY)
    assert run(folders, ["library"], "-m", "packedkv", "list").returncode == 0
    done = run(folders, ["library"], "-m", "packedkv", "eval", "model")
    assert done.returncode == 2
    assert "pip install packedkv-lab" in done.stderr


def test_the_laboratory_adds_its_commands(folders: dict[str, Path]) -> None:
    both = ["library", "laboratory"]
    shown = run(folders, both, "-m", "packedkv", "--help").stdout
    assert all(f"    {name} " in shown for name in COMMANDS | LABORATORY)
    for name in LABORATORY:
        done = run(folders, both, "-m", "packedkv", name, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: packedkv {name}")
