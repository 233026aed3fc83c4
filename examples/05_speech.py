"""Transcribe speech with packed caches: both caches of a Whisper model are compressed.

The cache of the decoder grows with the text. The cache of cross-attention stores the encoder's output, 1,500 frames for
30 s of sound. It is written once and read for every token; with many streams it takes nearly all of the memory.

Run: python examples/05_speech.py                        (tiny random weights: no download, meaningless text)
     python examples/05_speech.py openai/whisper-base speech.wav     (16 kHz, mono, 16 bit)
"""

import sys
import wave
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from packedkv import cache_for

RATE = 16_000


def tiny() -> WhisperForConditionalGeneration:
    """Make a Whisper of two layers with random weights."""
    config = WhisperConfig(
        vocab_size=64, d_model=128, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config).eval()


def sound(path: str | None) -> Any:
    """Return samples at 16 kHz: of a file, or of a second of a rising tone."""
    if path is None:
        return np.sin(np.cumsum(np.linspace(0.05, 0.5, RATE))).astype(np.float32)
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: expected 16 kHz, mono, 16 bit")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def main(name: str | None = None, path: str | None = None) -> None:
    """Transcribe once with each preset."""
    torch.manual_seed(0)
    model = tiny() if name is None else WhisperForConditionalGeneration.from_pretrained(name).eval()
    tokenizer = None if name is None else AutoTokenizer.from_pretrained(name)
    listen = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    heard = listen(sound(path), sampling_rate=RATE, return_tensors="pt").input_features
    for spec in ("dense", "saw-int4", "kivi-4", "octopus-3"):
        cache = cache_for(model, spec)  # for one input: reset() it before the next
        # from transformers 5.24 on the argument is named `cache`; `past_key_values` works and warns
        tokens = model.generate(heard, past_key_values=cache, max_new_tokens=60 if name else 12, do_sample=False)
        text = str(tokens[0].tolist()) if tokenizer is None else tokenizer.decode(tokens[0], skip_special_tokens=True)
        layers, own = cache.report()["layers"], model.config.decoder_layers
        sizes = [sum(layer["total_bytes"] for layer in part) for part in (layers[:own], layers[own:])]
        print(f"{spec}: {sizes[0]} bytes of text, {sizes[1]} bytes of sound\n  {text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
