"""Docs follow the registry: every method has its page, a codec in one file too; links and paths exist."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvcodec

ROOT = Path(__file__).parents[1]
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {ROOT / "docs/api.md"}


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", kvcodec.names())
def test_a_method_has_a_page_with_its_docstring_options_and_presets(make_docs: ModuleType, name: str) -> None:
    page = make_docs.method_page(name)
    presets = kvcodec.registry.method_of(name).presets
    described = kvcodec.describe(next(iter(presets)))
    assert page.startswith(f"# {name}\n")
    assert described["source"] in page
    for option in described["options"]:
        assert f"| `{option['name']}` |" in page
        assert option["doc"], f"option {option['name']} of {name} has no text in the recipe's docstring"
    for preset in presets:
        assert re.search(rf"^\| `{preset}` \| \d", page, re.M)
    assert (ROOT / re.search(r"Code: `(.*?)`", page)[1]).is_file()


def test_the_api_page_has_every_public_name(make_docs: ModuleType) -> None:
    assert re.findall(r"^## (\w+)$", make_docs.api_page(), re.M) == kvcodec.__all__


def test_a_codec_in_one_file_has_its_page(tmp_path: Path) -> None:
    guide = (ROOT / "docs/add-a-codec.md").read_text()
    codec = next(c for c in re.findall(r"```python\n(.*?)```", guide, re.S) if "@register" in c)
    file = tmp_path / "mine.py"
    file.write_text(codec)
    name = re.search(r'@register\(\s*"([\w-]+)"', codec)[1]
    command = [sys.executable, ROOT / "scripts/make_docs.py", "--out", tmp_path / "docs", "--codec-file", file]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    written = {p.stem for p in (tmp_path / "docs/codecs").iterdir()}
    assert written == {*kvcodec.names(), name}
    assert codec.split('"""')[1].splitlines()[0] in (tmp_path / f"docs/codecs/{name}.md").read_text()


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text.read_text())
    missing = [t for t in targets if not (text.parent / t).exists() and text.parent / t not in GENERATED]
    assert not missing


def test_every_target_of_the_makefile_is_explained() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {t for t in targets if f"`make {t}`" not in contributing} == {"help", "clean"}


def test_the_version_stands_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[({re.escape(kvcodec.__version__)}|Unreleased)\]", changelog, re.M)
    assert "### Bits changed" in changelog
