"""A server that fits constants at its first start, and finds them at the next one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from packedkv.cli.main import main
from packedkv.errors import FormatError, UnsupportedError
from tests.serve.biased import Biased
from tests.serve.engines import engine, generate, layers, library, prompts
from tests.serve.test_parallel import by_two

pytestmark = pytest.mark.nightly

IDS = prompts(40, 7)
GIVEN = {"preset": "ghost-3", "params": "fit"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packedkv" / "params"


def served(folder: Path, given: dict[str, Any]) -> tuple[list[list[int]], str]:
    """Greedy tokens, and the identity of the pages."""
    with engine(folder, given, block_size=16) as llm:
        return generate(llm, IDS), next(iter(layers(llm).values())).impl.digest


def test_the_first_start_fits_and_the_second_one_finds_the_file(
    biased: Biased, cache: Path, tmp_path: Path, told: list[str]
) -> None:
    def log() -> list[str]:
        """Lines about fitting, since the last call."""
        lines = [line for line in told if "fit" in line]
        told.clear()
        return lines

    first = served(biased.folder, GIVEN)
    (file,) = cache.glob("*.safetensors")
    lines = log()
    assert lines[0] == f"packedkv: fitting ghost-3 to {biased.folder} on cpu in float32"
    assert any(line.startswith("packedkv fit: drawing tokens") for line in lines)
    assert lines[-1].endswith(f"kept in {file} for the next start")
    assert served(biased.folder, GIVEN) == first
    assert log() == [f"packedkv: constants of ghost-3 were fitted before and lie in {file}"]
    own = tmp_path / "own"
    assert main(["fit", str(biased.folder), "ghost-3", "-o", str(own)]) == 0
    assert served(biased.folder, {"preset": "ghost-3", "params": str(own)}) == first
    assert first[0] == [library(biased.model, "ghost-3", ids, params=own) for ids in IDS]


def test_two_processes_read_one_file(biased: Biased, cache: Path, tmp_path: Path) -> None:
    found = by_two(biased.folder, GIVEN, tmp_path)
    (file,) = cache.glob("*.safetensors")
    assert found == [library(biased.model, "ghost-3", ids, params=file) for ids in IDS]


def test_processes_with_two_files_do_not_start(biased: Biased, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packedkv.integrations.vllm import bind

    own = bind._largest_on_any_process

    def beside_another(numbers: list[int]) -> list[int]:
        """As if another process had the number 1."""
        return own(numbers) if len(numbers) != 2 or numbers[0] != -numbers[1] else [max(numbers[0], 1), -1]

    biased.fitted("ghost-3", tmp_path / "fitted")
    monkeypatch.setattr(bind, "_largest_on_any_process", beside_another)
    with pytest.raises(UnsupportedError, match="fitted is not the same file on all hosts"):
        served(biased.folder, {"preset": "ghost-3", "params": str(tmp_path / "fitted")})


def test_a_file_of_another_models_weights_is_refused(biased: Biased, tmp_path: Path) -> None:
    """Of the same shape."""
    biased.fitted("ghost-3", tmp_path / "fitted")
    other = tmp_path / "other"
    shutil.copytree(biased.folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.1 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"was fitted to biased, whose .* is not that of .*other; run packedkv"):
        served(other, {"preset": "ghost-3", "params": str(tmp_path / "fitted")})
