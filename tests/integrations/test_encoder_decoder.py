"""Encoder-decoder models: the decoder's cache and the cross-attention's, both packed, in ``generate``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import packedkv
from packedkv.codec import Dense
from packedkv.errors import SpecError, UnsupportedError
from packedkv.integrations.transformers import cache_for, load_cache
from packedkv.integrations.transformers.argument import passing
from packedkv.scheme import mix_of

FRAMES, HEADS, HEAD_DIM, LAYERS = 100, 2, 64, 2
SPECS = ["dense", "int-8", "saw-int4", "kivi-4", "octopus-3", "turboquant-qjl-4"]


@pytest.fixture(scope="module")
def whisper() -> Any:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=120, d_model=HEADS * HEAD_DIM, encoder_layers=1, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_source_positions=FRAMES, max_target_positions=64, num_mel_bins=8, init_std=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def audio() -> Tensor:
    return torch.randn(2, 8, 2 * FRAMES, generator=torch.Generator().manual_seed(1))


def transcribe(model: Any, audio: Tensor, cache: Any = None, **options: Any) -> Any:
    given = {} if cache is None else passing(model, cache)
    return model.generate(input_features=audio, max_new_tokens=16, do_sample=False, **given, **options)


@torch.no_grad()
def steps_of(model: Any, audio: Tensor, cache: Any, tokens: int) -> tuple[Tensor, float]:
    """Greedy tokens, and the smallest margin by which one won."""
    encoded, found, margin = model.model.encoder(audio), [torch.full((2, 1), 3)], torch.inf
    for _ in range(tokens):
        logits = model(encoder_outputs=encoded, decoder_input_ids=found[-1], **passing(model, cache)).logits[:, -1]
        best = logits.topk(2)
        margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        found.append(best.indices[:, :1])
    return torch.cat(found, 1), margin


def with_attention(model: Any, attention: str) -> Any:
    model.set_attn_implementation("sdpa" if attention == "decoded" else "packedkv")
    return model


def test_dense_caches_give_the_models_own_tokens_with_beams_too(whisper: Any, audio: Tensor) -> None:
    with_attention(whisper, "decoded")
    for beams in (1, 3):
        own = transcribe(whisper, audio, num_beams=beams)
        assert torch.equal(transcribe(whisper, audio, cache_for(whisper, "dense"), num_beams=beams), own)


@pytest.mark.parametrize("spec", SPECS)
def test_every_attention_gives_the_tokens_of_the_streamed_reference(whisper: Any, audio: Tensor, spec: str) -> None:
    found = {}
    for attention in ("streamed", "decoded", "fused"):
        cache = cache_for(with_attention(whisper, attention), spec, attention=attention)
        found[attention], margin = steps_of(whisper, audio, cache, 16)
        assert margin > 1e-4  # no tie that rounding would decide
        assert cache.report()["paths"] == {"exact": 2 * LAYERS, attention: 2 * LAYERS * 15}
        assert torch.equal(found[attention], found["streamed"])


def test_the_report_counts_every_byte_of_both_caches(whisper: Any, audio: Tensor) -> None:
    scheme = replace(packedkv.get("saw-int4"), sink=2, window=8)
    cache = cache_for(with_attention(whisper, "decoded"), scheme, page_tokens=4)
    out = transcribe(whisper, audio, cache)
    report = cache.report()
    held = [x for layer in cache.layers for x in layer.cache.tensors()]
    assert report["total_bytes"] == sum(x.untyped_storage().nbytes() for x in held)
    assert report["tokens"] == out.shape[1]
    assert [layer["tokens"] for layer in report["layers"]] == [report["tokens"]] * LAYERS + [FRAMES] * LAYERS
    crossed = report["layers"][LAYERS]
    row = HEAD_DIM * (scheme.key_bits(HEAD_DIM) + scheme.value_bits(HEAD_DIM)) / 8
    codes = sum(n for part, n in crossed["bytes"].items() if part not in ("reserve", "table"))
    assert codes == 2 * HEADS * FRAMES * row
    assert not {"key.sink", "key.window"} & crossed["bytes"].keys()
    assert {"key.sink", "key.window"} <= report["layers"][0]["bytes"].keys()
    assert "cross-attention" in crossed["note"]


def test_the_cross_cache_is_written_once_for_each_input(whisper: Any, audio: Tensor) -> None:
    cache = cache_for(with_attention(whisper, "decoded"), "int-8")
    first = transcribe(whisper, audio, cache)
    more = torch.zeros(2, HEADS, 7, HEAD_DIM)
    with pytest.raises(UnsupportedError, match=r"layer 3 holds 100 tokens .* and 7 more came; .* once for each input"):
        cache.cross_attention_cache.update(more, more, 1)
    cache.reset()
    assert cache.report()["total_bytes"] == 0
    assert torch.equal(transcribe(whisper, audio, cache), first)


def test_a_saved_cache_goes_on_where_it_was(whisper: Any, audio: Tensor, tmp_path: Path) -> None:
    cache = cache_for(with_attention(whisper, "decoded"), "int-8")
    transcribe(whisper, audio, cache)
    cache.save(tmp_path / "speech.safetensors")
    loaded = load_cache(tmp_path / "speech.safetensors", whisper)
    encoded = whisper.model.encoder(audio)
    step = {"encoder_outputs": encoded, "decoder_input_ids": torch.full((2, 1), 5)}
    with torch.no_grad():
        a, b = (whisper(**step, **passing(whisper, c)).logits for c in (cache, loaded))
    torch.testing.assert_close(a, b)
    assert loaded.get_seq_length() == cache.get_seq_length()


def test_sequences_are_selected_and_tokens_cropped_in_both_caches(whisper: Any, audio: Tensor) -> None:
    cache = cache_for(with_attention(whisper, "decoded"), "int-8")
    out = transcribe(whisper, audio, cache)
    held = cache.get_seq_length()
    cache.crop(-(held - 1))
    cache.batch_select_indices(torch.tensor([1]))
    assert [len(layer.cache) for layer in cache.layers] == [1] * LAYERS + [FRAMES] * LAYERS
    encoded, begun = whisper.model.encoder(audio[1:]), torch.cat([torch.tensor([[3]]), out[1:, :1]], 1)
    with torch.no_grad():
        given = {"encoder_outputs": encoded, "decoder_input_ids": begun[:, 1:]}
        packed = whisper(**given, **passing(whisper, cache)).logits[0, -1]
        plain = whisper(encoder_outputs=encoded, decoder_input_ids=begun).logits[0, -1]
    assert float((packed - plain).norm() / plain.norm()) < 0.05


@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_encoder_output_is_not_attended(side: str) -> None:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=50, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.3,
        forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    ids = torch.randint(5, 50, (2, 20))
    mask = (torch.arange(20) < torch.tensor([[20], [9]])).long()
    given = {"input_ids": ids, "attention_mask": mask if side == "right" else mask.flip(1)}
    own = model.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1)
    for attention in ("decoded", "streamed", "fused"):
        cache = cache_for(with_attention(model, attention), "dense", attention=attention)
        options = {**given, **passing(model, cache), "max_new_tokens": 6, "do_sample": False, "num_beams": 1}
        assert torch.equal(model.generate(**options), own)
        assert cache.report()["paths"].get("scored", 0) == (10 if attention == "fused" else 0)


def test_a_decoder_deeper_than_its_encoder_has_all_its_layers() -> None:
    config = T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=16, num_layers=1, num_decoder_layers=3, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    cache = cache_for(model, "dense")
    assert len(cache.layers) == 6
    ids, begun = torch.randint(5, 50, (1, 9)), torch.tensor([[0, 7, 8]])
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=begun[:, :2], **passing(model, cache))
        step = model(input_ids=ids, decoder_input_ids=begun[:, 2:], **passing(model, cache)).logits[0, -1]
        whole = model(input_ids=ids, decoder_input_ids=begun, use_cache=False).logits[0, -1]
    torch.testing.assert_close(step, whole, atol=1e-2, rtol=1e-2)  # dense holds 16 bit


def test_outer_layers_and_recipes_are_those_of_each_stack(whisper: Any) -> None:
    cache = cache_for(whisper, replace(packedkv.get("saw-int4"), dense_key_layers=1))
    assert all(isinstance(layer.cache.scheme.key, Dense) for layer in cache.layers)
    recipe = mix_of([packedkv.get("int-8"), packedkv.get("int-4")])
    bits = [layer.cache.scheme.key_bits(HEAD_DIM) for layer in cache_for(whisper, recipe).layers]
    assert bits[:2] == bits[2:]
    assert bits[0] > bits[1]
    with pytest.raises(SpecError, match="a recipe for 1 KV layers, not for 2"):
        cache_for(whisper, mix_of([packedkv.get("int-8")]))
