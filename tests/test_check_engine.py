"""The comparison of the vLLM plugin with vLLM's files says what is not there, of files made up for it."""

from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
def script() -> ModuleType:
    spec = util.spec_from_file_location("check_engine", ROOT / "scripts/check_engine.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing(script: ModuleType, file: str = "", old: str = "", new: str = "") -> list[str]:
    files = {name: text.replace(old, new) if name == file else text for name, text in ENGINE.items()}
    assert not file or files != ENGINE
    return sorted(set(script.missing_names(script.Engine(files.get), PLUGIN, "ours.py")))


def test_what_is_there_is_not_reported(script: ModuleType) -> None:
    assert missing(script) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("vllm/config/__init__.py", "*", "Other", "ours.py: vllm.config.Sizes is not defined"),
        ("vllm/config/whole.py", "name", "title", "ours.py: config.name is not defined"),
        ("vllm/config/sizes.py", "block", "page", "ours.py: config.sizes.block is not defined"),
        ("vllm/config/sizes.py", "total", "sum", "ours.py: sizes.total is not defined"),
        ("vllm/backend.py", "where", "at", "ours.py: Ours.put does not take 'at'"),
        ("vllm/backend.py", "def get", "def find", "ours.py: Ours.get: vLLM's class has no such method"),
    ],
)
def test_what_is_gone_is_reported(file: str, old: str, new: str, said: str, script: ModuleType) -> None:
    assert missing(script, file, old, new) == [said]
