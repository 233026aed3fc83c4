"""``packedkv bench decode | ... | page``: arguments, files, exit statuses."""

import json
from pathlib import Path

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, Clock
from lab.tests.bench.test_summary import ROWS
from packedkv.cli.main import main
from packedkv_lab.bench import decode, encode, generate, prefill, record, timing
from packedkv_lab.bench.record import DeviceLostError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("what", ["encode", "prefill", "generate"])
def test_without_a_gpu_it_says_what_to_pass(capsys, what):
    assert main(["bench", what]) == 2
    assert f"bench {what} times kernels on a GPU; pass --device cuda" in capsys.readouterr().err


def test_an_engine_that_does_not_exist_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(record, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())
    assert main(["bench", "decode", "--device", "cuda", "--engine", "triton"]) == 2
    assert "--engine triton: there are no such kernels; use cuda, or leave it out" in capsys.readouterr().err


def test_without_cuda_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "decode", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err
    assert main(["bench", "decode", "--device", "nowhere"]) == 2
    assert "times kernels on a GPU; pass --device cuda" in capsys.readouterr().err


@pytest.fixture
def _gpu(monkeypatch):
    monkeypatch.setattr(record, "require_gpu", lambda what, device: CPU)
    monkeypatch.setattr(timing, "Timer", lambda device: Clock())


def rows(specs, shapes, recorder):
    for spec in specs:
        recorder.add(spec, 4.0, "decode_us_cold", "us", shapes[0].name, {"p20": 1.0, "p50": 2.0, "p80": 3.0})


@pytest.mark.usefixtures("_gpu")
def test_rows_page_and_json_of_a_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "decode_rows", rows)
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--shapes", "spine", "--out", str(tmp_path)]
    assert main([*arguments, "--commit", "abc", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["spec"], row["commit"], row["shape"]) == ("int-4", "abc", "llm64k")
    assert json.loads((tmp_path / "decode.json").read_text()) == [row]
    assert "int-4" in (tmp_path / "bench.html").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl", "decode.json", "bench.html"}


@pytest.mark.usefixtures("_gpu")
def test_rows_only_writes_neither_page_nor_json(monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "decode_rows", rows)
    assert main(["bench", "decode", "--device", "cuda", "--specs", "a-b:c,int-4", "--out", str(tmp_path)]) == 2
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--out", str(tmp_path), "--rows-only"]
    assert main(arguments) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl"}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("error", "status"), [(DeviceLostError("lost"), 3), (KeyboardInterrupt(), 130)])
def test_what_ends_a_run_keeps_its_rows(monkeypatch, tmp_path, error, status):
    def broken(*args):
        rows(*args)
        raise error

    monkeypatch.setattr(decode, "decode_rows", broken)
    arguments = ["bench", "decode", "--device", "cuda", "--specs", "int-4", "--out", str(tmp_path), "--rows-only"]
    assert main(arguments) == status
    assert len((tmp_path / "decode.jsonl").read_text().splitlines()) == 1


def test_page_of_a_folder(capsys, tmp_path):
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    assert main(["bench", "page", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"decode.jsonl", "decode.json", "bench.html"}
    assert "saw-int4" in capsys.readouterr().out
    (tmp_path / "decode.jsonl").unlink()
    assert main(["bench", "page", "--out", str(tmp_path)]) == 0  # from the JSON alone


def test_page_adds_the_rows_of_another_folder(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, found in ((here, ROWS[:5]), (there, ROWS[3:])):
        folder.mkdir()
        (folder / "decode.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    assert main(["bench", "page", "--out", str(here)]) == 0
    (here / "decode.jsonl").unlink()  # as in a folder that is committed
    for _ in range(2):  # a second time adds nothing
        assert main(["bench", "page", "--out", str(here), "--add", str(there)]) == 0
        assert json.loads((here / "decode.json").read_text()) == ROWS
    assert not (there / "decode.json").exists()


@pytest.mark.usefixtures("_gpu")
def test_shapes_are_named_in_every_part(monkeypatch, tmp_path):
    told = {}

    def note(part):
        def rows_of(specs, *given, **options):
            told[part] = given, options

        return rows_of

    for module, name in ((encode, "encode"), (prefill, "prefill"), (generate, "generate")):
        monkeypatch.setattr(module, f"{name}_rows", note(name))
    given = {
        "encode": ["--shapes", "video,append"],
        "prefill": ["--shapes", "hqmq,prefill_b8_t8192_q16"],
        "generate": [
            "--shapes", "qwen3_8b_b1_32k", "--ways", "graph,compiled", "--no-dense", "--turns", str(tmp_path / "t"),
        ],
    }  # fmt: skip
    for part, arguments in given.items():
        assert main(["bench", part, "--device", "cuda", *arguments]) == 0
    _, shapes, batches = told["encode"][0]
    assert [s.name for s in shapes] == ["video"]
    assert batches == encode.APPEND_BATCHES
    names = [s.name for s in told["prefill"][0][0]]
    assert len(names) == 11
    assert (names[0], names[-1]) == ("prefill_b1_t2048_q1", "prefill_b8_t8192_q16")
    chosen = told["generate"][1]
    assert (chosen["batches"], chosen["ways"], chosen["dense"]) == ((1,), ["graph", "compiled"], False)
    assert chosen["lock"].path == tmp_path / "t"
    assert main(["bench", "prefill", "--device", "cuda", "--shapes", "spine"]) == 2


def test_page_without_rows_or_folder(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["bench", "page"])
    assert "required: --out" in capsys.readouterr().err
    assert main(["bench", "page", "--out", str(tmp_path)]) == 2
    assert "holds no rows (decode.jsonl, encode.jsonl" in capsys.readouterr().err


@pytest.mark.usefixtures("_gpu")
def test_some_specs_at_some_shapes_beside_the_others(monkeypatch, tmp_path):
    told = []

    def note(specs, shapes, recorder):
        told.append((specs, [s.name for s in shapes]))

    monkeypatch.setattr(decode, "decode_rows", note)
    also = ["--also", "int-4,kivi-2:window=64,sink=4@audio", "--also", "fp8@sweep1,video"]
    assert main(["bench", "decode", "--device", "cuda", *also]) == 0
    assert [(specs, shapes[0], len(shapes)) for specs, shapes in told] == [
        (["int-4", "kivi-2:window=64,sink=4"], "audio", 1), (["fp8"], "llama8b_b1_128", 12),
    ]  # fmt: skip
    assert main(["bench", "decode", "--device", "cuda", "--shapes", "audio", "--specs", "fp8", *also]) == 0
    assert told[2][1] == ["audio"]
    for wrong in ("fp8", "fp8@", "fp9@audio", "fp8@audo"):
        assert main(["bench", "decode", "--device", "cuda", "--also", wrong]) == 2
