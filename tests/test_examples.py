"""The examples run as users run them, and print what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import packedkv
import packedkv.models.loading
from packedkv.models.loading import LoadedModel

EXAMPLES = Path(__file__).parents[1] / "examples"


class Run:
    """Runs an example in this process, which has imported what takes long, and returns what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, name: str, *arguments: str) -> str:
        self.monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return self.capsys.readouterr().out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


def test_one_tensor_shows_every_preset_with_its_bits_and_a_bounded_cache(run: Run) -> None:
    text = run("01_one_tensor.py")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+) +\d+ +([\d.]+) +[\d.]+$", text, re.M)}
    assert list(bits) == packedkv.presets()
    assert bits["saw-int4"] == 4.25
    assert bits["dense"] == 16
    assert "saw-int4 cache: 256 tokens" in text


@pytest.mark.slow
def test_generate_shows_bytes_and_text_for_each_spec(
    run: Run, smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packedkv.models.loading, "load", lambda name: smollm2)  # loaded once for many tests
    generate = smollm2.model.generate
    fewer = {"max_new_tokens": 6}  # each takes all layers of the model
    monkeypatch.setattr(smollm2.model, "generate", lambda **given: generate(**given | fewer))
    text = run("02_generate.py", "dense", "saw-int4")
    bits = {m[1]: float(m[2]) for m in re.finditer(r"^(\S+): \d+ bytes, ([\d.]+) bits", text, re.M)}
    assert list(bits) == ["dense", "saw-int4"]
    assert bits["saw-int4"] < bits["dense"] / 2
    assert len(re.findall(r"^  \.\.\. \w+ .*\w", text, re.M)) == 2


def test_speech_is_transcribed_with_both_caches_packed(run: Run) -> None:
    text = run("05_speech.py")
    sizes = {
        m[1]: (int(m[2]), int(m[3])) for m in re.finditer(r"^(\S+): (\d+) bytes of text, (\d+) bytes of s", text, re.M)
    }
    assert list(sizes) == ["dense", "saw-int4", "kivi-4", "octopus-3"]
    assert (
        sizes["dense"][1] > 2 * 2 * 2 * 1500 * 128
    )  # layers, keys and values, bytes, frames, channels; and free slots
    assert 3.5 < sizes["dense"][1] / sizes["saw-int4"][1] < 3.8
    assert len(re.findall(r"^  \[\d+(, \d+)+\]$", text, re.M)) == 4


def test_a_video_rolls_on_and_ends_as_pictures(run: Run, tmp_path: Path) -> None:
    text = run("06_video.py", str(tmp_path))
    rows = re.findall(r"^(\S+): frames \[0, 18, 19, 20, 21, 22\] of 23, (\d+) bytes, PSNR ([\d.]+) dB$", text, re.M)
    assert [row[0] for row in rows] == ["dense", "saw-int4", "octopus-3", "octopus-2"]
    assert [int(row[1]) for row in rows] == sorted((int(row[1]) for row in rows), reverse=True)
    assert float(rows[1][2]) > 20
    picture = (tmp_path / "saw-int4.pgm").read_bytes()
    assert picture.startswith(b"P5 384 16 255\n")
    assert len(set(picture[-384 * 16 :])) > 20


@torch.no_grad()
def test_bare_tensors_are_attended_as_in_one_masked_call() -> None:
    example = runpy.run_path(str(EXAMPLES / "04_bare_tensors.py"))
    errors = example["main"]()
    assert set(errors) == {"stream a", "stream b"}
    assert all(0 < error < 0.2 for error in errors.values())
    layer, chunk, keep = example["ChunkCausalAttention"](), example["CHUNK"], example["KEEP"]
    x = torch.randn(2, 6 * chunk, 256)
    cache = packedkv.LayerCache(packedkv.get("saw-int4"))
    streamed = torch.cat([layer(part, cache) for part in x.split(chunk, 1)], 1)
    assert len(cache) == keep
    q, k, v = layer.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    k, v = packedkv.fake_quant("saw-int4", k, v)
    at = torch.arange(6 * chunk)
    end = (at // chunk + 1) * chunk
    mask = (at[None, :] < end[:, None]) & (at[None, :] >= end[:, None] - keep)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = layer.out(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-5)
