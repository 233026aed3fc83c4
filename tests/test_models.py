"""Where models and texts come from, and what is said when they do not."""

import hashlib
import importlib.util

import pytest
import torch

from packedkv.errors import ModelError
from packedkv.models import loading as models
from packedkv.models.loading import load, load_text
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


def test_progress_of_loading_is_shown_on_standard_error(tmp_path, capfd):
    path = str(save_tiny(tmp_path / "model"))
    capfd.readouterr()
    load(path)
    out, err = capfd.readouterr()
    assert out == ""
    assert f"loading {path} in float32: " in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder/at/all", r"no such file or folder; pass a folder with config.json, a .gguf file, a hub id"),
        ("missing.gguf", r"model 'missing.gguf': no such file or folder"),
    ],
    ids=["folder", "gguf"],
)
def test_a_path_that_does_not_exist(name, message):
    with pytest.raises(ModelError, match=message):
        load(name, progress=False)


def test_folders_and_files_that_are_no_models(tmp_path):
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
