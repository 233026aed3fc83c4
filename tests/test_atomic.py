"""Files are written whole: beside other writers and readers, through planted links, and when the writer is killed."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import packedkv
from packedkv.atomic import SUFFIX, whole_file
from packedkv.files import container
from packedkv.files.caches import load_layers, save_layers
from packedkv.files.params import read_params
from packedkv.registry import LayerChoice, read_choices, write_recipe

KILLED = """
import os, signal, sys
from pathlib import Path
from packedkv.atomic import whole_file
with whole_file(Path(sys.argv[1])) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def cache_of(tokens: int) -> packedkv.LayerCache:
    cache = packedkv.LayerCache(packedkv.get("int-8"))
    cache.append(*torch.randn(2, 1, 2, tokens, 64, generator=torch.Generator().manual_seed(tokens)))
    return cache


def test_several_threads_save_to_one_path_while_others_read(tmp_path):
    path, lengths, failed = tmp_path / "cache", (200, 300, 400), []
    save_layers(path, [cache_of(lengths[0])], {})
    done = threading.Event()

    def write(cache: packedkv.LayerCache) -> None:
        try:
            for _ in range(15):
                save_layers(path, [cache], {})
        except Exception as error:
            failed.append(error)

    def read() -> None:
        try:
            while not done.is_set():
                assert len(load_layers(path)[0][0]) in lengths
        except Exception as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(cache_of(n),)) for n in lengths]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert failed == []
    assert list(tmp_path.iterdir()) == [path]


def test_header_and_tensors_are_those_of_one_file(tmp_path, monkeypatch):
    """Another process replaces the path between the two looks at it."""
    path, load = tmp_path / "cache", container.load_file
    save_layers(path, [cache_of(200)], {})

    def replaced_first(*arguments):
        monkeypatch.setattr(container, "load_file", load)
        save_layers(path, [cache_of(300)], {})
        return load(*arguments)

    monkeypatch.setattr(container, "load_file", replaced_first)
    assert len(load_layers(path)[0][0]) == 300


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals of Unix")
def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    path = tmp_path / "note"
    path.write_text("whole")
    with whole_file(path) as part:
        part.write_text("being written")
        killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert path.read_text() == "whole"
        assert len(list(tmp_path.glob(f".*{SUFFIX}"))) == 2
        with whole_file(tmp_path / "another") as other:
            other.write_text("of another name")
        assert list(tmp_path.glob(f".*{SUFFIX}")) == [part.parent]
    assert path.read_text() == "being written"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another", "note"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "note"
    path.write_text("whole")

    def interrupted() -> None:
        with whole_file(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("note", "whole")]


def test_planted_links_are_not_followed(tmp_path):
    """Whoever may write to the folder plants links under names that a temporary file had, and at the path itself."""
    victim, path = tmp_path / "victim", tmp_path / "r.json"
    victim.write_text("precious")
    for name in (".r.json.part", f".r.json.{os.getpid()}.part", "r.json", f".0{SUFFIX}"):
        (tmp_path / name).symlink_to(victim)
    write_recipe(path, [LayerChoice("int-4", "int-8")])
    assert read_choices(path)[0] == [LayerChoice("int-4", "int-8")]
    assert victim.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_what_is_no_regular_file_is_refused(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for read in (load_layers, read_params, read_choices):
        with pytest.raises(packedkv.FormatError, match="not a regular file"):
            read(fifo)


def test_deeply_nested_json_is_refused(tmp_path):
    nested, path = "[" * 100_000 + "]" * 100_000, tmp_path / "file"
    path.write_text(nested)
    with pytest.raises(packedkv.FormatError, match="not JSON"):
        read_choices(path)
    for text in (nested, '{"__metadata__": {"packedkv-cache": ' + f'"{nested}"' + "}}"):
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
        with pytest.raises(packedkv.FormatError, match="JSON"):
            load_layers(path)
