"""Keys without their mean, and ghost: the library's tokens, whatever the scheduler does with the requests."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from packedkv.errors import BrokenPresetError, UnsupportedError
from packedkv.integrations.vllm.layer import EngineLayer
from tests.serve.biased import Biased
from tests.serve.engines import engine, generate, layers, library, metric, prompts

IDS = prompts(40, 2, 33)
"""One is shorter than ghost's dense first tokens."""
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16, "block_size": 16}


def sources(llm: Any) -> set[str]:
    found = [layer.impl.packed for layer in layers(llm).values() if isinstance(layer.impl.packed, EngineLayer)]
    return {"none" if one.site.mean is None else f"{one.site.mean.kind} {one.site.mean.source}" for one in found}


@pytest.mark.parametrize("preset", ["saw-int4", "turboquant-4:mean=pre"])
def test_the_weights_give_the_mean(preset: str, biased: Biased) -> None:
    """Chunks of prompts, requests beside each other, steps and a cached prefix."""
    want = [library(biased.model, preset, ids) for ids in IDS]
    dense = [library(biased.model, "dense", ids) for ids in IDS]
    broken = [library(biased.model, f"{preset.split(':')[0]}:mean=none", ids, probe="off") for ids in IDS]
    assert broken != dense
    with engine(biased.folder, {"preset": preset}, **CHUNKS) as llm:
        assert sources(llm) == {"pre weights"}
        assert generate(llm, IDS) == want
        assert generate(llm, IDS[:1]) == want[:1]
        assert metric(llm, "prefix_cache_hits") == 32


@pytest.mark.parametrize("spec", ["ghost-3", "ghost-3:transform=klt", "int-8:mean=post"])
def test_a_file_gives_the_constants(spec: str, biased: Biased, tmp_path: Path) -> None:
    fitted = biased.fitted(spec, tmp_path / "fitted.safetensors")
    want = [library(biased.model, spec, ids, params=fitted) for ids in IDS]
    with engine(biased.folder, {"preset": spec, "params": str(tmp_path / "fitted.safetensors")}, **CHUNKS) as llm:
        assert sources(llm) == {f"{'post' if 'post' in spec else 'pre'} params"}
        assert generate(llm, IDS) == want
        assert generate(llm, IDS[:1]) == want[:1]
        assert metric(llm, "prefix_cache_hits") == 32


def test_the_reference_serves_them_as_well(biased: Biased, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU kernels are not compiled, or do not read a codec."""
    want = [library(biased.model, "saw-int4", ids) for ids in IDS]
    monkeypatch.setattr("packedkv.kernels.cpu.library.refusal", lambda _: "not here")
    with engine(biased.folder, {"preset": "saw-int4"}, **CHUNKS) as llm:
        assert all(layer.impl.packed.unserved for layer in layers(llm).values())
        assert generate(llm, IDS) == want
        assert generate(llm, IDS[:1]) == want[:1]


@pytest.mark.nightly
def test_drafts_read_the_same_bytes(biased: Biased, tmp_path: Path) -> None:
    """In blocks of the size that a server chooses, in which ghost's dense first tokens take a quarter bit a number."""
    ids = [[*own, *own[:20], *own[:9]] for own in prompts(40, 2, 33)]
    file = tmp_path / "fitted.safetensors"
    biased.fitted("ghost-3", file)
    given = {"preset": "ghost-3", "params": str(file)}
    with engine(biased.folder, given) as llm:
        want = generate(llm, ids, 24)
        cache = next(iter(layers(llm).values())).kv_cache
        assert cache.shape[2:] == (128, 2 * 64 * 3 // 8 + 2 * 4 * 64 * 2 // 128)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(biased.folder, given, speculative_config=drafts) as llm:
        assert generate(llm, ids, 24) == want
        drafted, accepted = (metric(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
        assert drafted > accepted, (drafted, accepted)  # some are rejected


ROPES: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 256}, "pre"),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
        "pre",
    ),
    "linear": ({"factor": 4.0}, "pre"),
    "dynamic": ({"factor": 2.0}, "pre"),  # the engine turns all keys by the frequencies of the longest request
    "longrope": (
        {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 2.0, "original_max_position_embeddings": 256},
        "post",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in ("yarn", "linear") else n for n in ROPES]
)
def test_rotary_embeddings(name: str, biased: Biased, tmp_path: Path) -> None:
    """The frequencies and the scaling of the model, or the mean after RoPE."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    (rope, kind), config = ROPES[name], copy.deepcopy(biased.model.config)
    config.rope_parameters = {"rope_theta": 10_000.0, "rope_type": name, **rope}
    config.save_pretrained(tmp_path)
    for file in biased.folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    with engine(tmp_path, {"preset": "saw-int4", "probe": "warn"}, **CHUNKS) as llm:
        assert sources(llm) == {f"{kind} weights"}
        found = generate(llm, IDS)
        assert generate(llm, IDS[:1]) == found[:1]
        assert metric(llm, "prefix_cache_hits") == 32
        packed = next(iter(layers(llm).values())).impl.packed
    if name in ("yarn", "llama3", "linear"):
        own = Qwen2RotaryEmbedding(config)
        torch.testing.assert_close(packed.turning.frequencies, own.inv_freq, rtol=3e-7, atol=0)
        assert packed.turning.scaling == pytest.approx(own.attention_scaling, abs=1e-6)


def test_what_cannot_be_served_is_refused(biased: Biased, llama: Any) -> None:
    for preset, error, sentence, model in (
        ("saw-int4:mean=none", BrokenPresetError, r"breaks on the key biases of .*'saw-int4:mean=pre'", biased),
        (
            "saw-int4:mean=pre",
            UnsupportedError,
            r'weights add no large bias to keys; run packedkv fit MODEL "saw',
            llama,
        ),
        ("ghost-3", UnsupportedError, r'run packedkv fit MODEL "ghost-3" --text TEXT -o FILE', biased),
        ("kivi-4:window=0,mean=pre", UnsupportedError, r"unfinished ones beside the pages keep their mean", biased),
    ):
        with pytest.raises(error, match=sentence), engine(model.folder, {"preset": preset}):
            pass
