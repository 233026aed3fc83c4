"""Whisper with packed caches: word errors, what they cost in bits, and how far the next word's distribution moves.

    python benchmarks/speech_clips.py CLIPS ...
    python benchmarks/speech.py CLIPS --out FILE [--model base] [--specs saw-int4,...] [--kl]

Clips are padded to 30 s as Whisper takes them, so a stream's cross-attention holds 1,500 frames. Text is the most
likely token at each step, at most ``--tokens``. Of each preset, the cache of the decoder and that of the
cross-attention are packed, and every call attends what is stored, the first too (``prefill="decoded"``):

- ``wer_reference``, ``wer_16bit``: word errors against the reference text (where there is one) and against the text
  with 16-bit caches, as shares of these words: insertions, deletions and substitutions. Words are lower case, without
  punctuation; digits are spelled out one by one.
- ``kl``: of the next token's distribution, 16 bit to packed, in nats: mean over the tokens of the 16-bit text, which
  both are given, and its largest.
- ``bytes``: of one stream at its end, of the decoder's cache and of the cross-attention's.

``--specs paper`` are the names of ``parts.py``, at OCTOPUS's protocol: values in groups of 16 channels, and the newest
token in 16 bit, as a token is what this model makes at a time.
"""

import argparse
import json
import re
import sys
import time
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import whisper
from parts import PAPER, paper_scheme, part_of
from speech_clips import DIGITS
from tokenizers import Tokenizer
from torch import Tensor
from transformers import WhisperFeatureExtractor

import kvcodec
import kvcodec.integrations.transformers.cache  # registers the attention function
from kvcodec.cli.stamp import stamp
from kvcodec.integrations.transformers.argument import passing

DENSE = "dense"
SPECS = (
    "int-8,fp8,int-4,saw-int4,kivi-4,kivi-2,octopus-4,octopus-3,octopus-2,turboquant-4,turboquant-3,turboquant-2,"
    "turboquant-qjl-3,hqmq-s96_r4,ghost-4,ghost-3,ghost-2"
)
UNIT, GROUP = 1, 16
"""Newest tokens in 16 bit and channels of a value that share a scale in names of ``parts.py``."""
SPELLED = dict(zip("0123456789", DIGITS, strict=True))


def words(text: str) -> list[str]:
    """Words of a text as they are compared.

    >>> words("Ask not, 42-line types!")
    ['ask', 'not', 'four', 'two', 'line', 'types']
    """
    spelled = re.sub(r"\d", lambda digit: f" {SPELLED[digit[0]]} ", text.lower())
    return re.sub(r"[^a-z' ]", " ", spelled).replace("'", "").split()


def word_errors(found: Sequence[str], wanted: Sequence[str]) -> int:
    """Least number of insertions, deletions and substitutions.

    >>> word_errors("a b d".split(), "a c d e".split())
    2
    """
    row = list(range(len(found) + 1))
    for i, word in enumerate(wanted, 1):
        before, row[0] = row[0], i
        for j, own in enumerate(found, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (own != word))
    return row[-1]


class Speaker:
    """Whisper, step by step, on caches that are handed in."""

    def __init__(self, name: str, most: int) -> None:
        self.model, config, tokenizer = whisper.load(name)
        self.model.set_attn_implementation("kvcodec")
        self.tokenizer, self.most = Tokenizer.from_file(str(tokenizer)), most
        many = (
            ["<|en|>", "<|transcribe|>"] if self.tokenizer.token_to_id("<|transcribe|>") and name != "tiny.en" else []
        )
        names = ["<|startoftranscript|>", *many, "<|notimestamps|>"]
        self.prompt = [self.tokenizer.token_to_id(token) for token in names]
        self.end = self.tokenizer.token_to_id("<|endoftext|>")
        self.never, self.never_first = config["suppress_ids"], config["suppress_ids_begin"]
        self.features = WhisperFeatureExtractor(feature_size=self.model.config.num_mel_bins)

    @torch.inference_mode()
    def frames(self, clips: Sequence[np.ndarray[Any, Any]]) -> Tensor:
        """The encoder's output ``[B, 1500, width]``."""
        given = self.features(list(clips), sampling_rate=16_000, return_tensors="pt").input_features
        return torch.cat([self.model.model.encoder(x).last_hidden_state for x in given.split(1)])

    def step(self, frames: Tensor, tokens: Tensor, cache: Any) -> Tensor:
        """Logits of the token behind ``tokens [B, n]``: ``[B, V]``."""
        given = {"encoder_outputs": (frames,), "decoder_input_ids": tokens}
        return self.model(**given, **passing(self.model, cache)).logits[:, -1]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def listen(self, frames: Tensor, cache: Any) -> Tensor:
        """Most likely tokens ``[B, n]``; behind its end a clip has end tokens."""
        tokens, found = torch.tensor([self.prompt]).expand(len(frames), -1), []
        over = torch.zeros(len(frames), dtype=torch.bool)
        while len(found) < self.most and not bool(over.all()):
            logits = self.step(frames, tokens, cache)
            logits[:, [*self.never, *([] if found else self.never_first)]] = -torch.inf
            tokens = logits.argmax(-1).masked_fill(over, self.end)[:, None]
            over |= tokens[:, 0] == self.end
            found.append(tokens)
        return torch.cat(found, 1)

    @torch.inference_mode()
    def log_probabilities(self, frames: Tensor, text: Tensor, cache: Any) -> Tensor:
        """Log-probabilities of each next token, given ``text [B, n]``: ``[B, n, V]``."""
        tokens, found = torch.tensor([self.prompt]).expand(len(frames), -1), []
        for i in range(text.shape[1]):
            found.append(self.step(frames, tokens, cache).log_softmax(-1))
            tokens = text[:, i : i + 1]
        return torch.stack(found, 1)

    def cache(self, spec: str) -> Any:
        """An empty cache; where no kernels read it, decoded tokens are kept, because time is not measured."""
        scheme = paper_scheme(spec, UNIT, GROUP) if part_of(spec)[1] else spec
        cache = kvcodec.cache_for(self.model, scheme, prefill="decoded", probe="off")
        for layer in cache.layer_caches:
            layer.remember = bool(cache.unfused)
        return cache

    def texts(self, tokens: Tensor) -> list[str]:
        return [self.tokenizer.decode([t for t in row if t != self.end]) for row in tokens.tolist()]


def read(path: Path) -> np.ndarray[Any, Any]:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


class Counts:
    """What is added up of one preset over the batches."""

    def __init__(self) -> None:
        self.errors = {"reference": 0, "16bit": 0}
        self.words = {"reference": 0, "16bit": 0}
        self.kl, self.tokens, self.largest, self.seconds = 0.0, 0, 0.0, 0.0
        self.self_bytes = self.cross_bytes = self.elements = self.streams = 0
        self.by_set: dict[str, list[int]] = {}
        self.bits: list[float] = []

    def compare(self, kind: str, found: str, wanted: str, name: str) -> None:
        own, asked = words(found), words(wanted)
        wrong = word_errors(own, asked)
        self.errors[kind] += wrong
        self.words[kind] += len(asked)
        if kind == "reference":
            of = self.by_set.setdefault(name, [0, 0])
            of[0] += wrong
            of[1] += len(asked)

    def row(self, spec: str) -> dict[str, Any]:
        held = self.self_bytes + self.cross_bytes
        return {
            "spec": spec, "key_bits": self.bits[0], "value_bits": self.bits[1],
            "effective_bits": held * 8 / self.elements,
            **{f"wer_{kind}": self.errors[kind] / of for kind, of in self.words.items() if of},
            "errors": self.errors, "words": self.words, "errors_and_words_by_set": self.by_set,
            "kl": self.kl / self.tokens, "kl_largest": self.largest,
            "tokens": self.tokens, "streams": self.streams, "seconds": self.seconds,
            "bytes": {"decoder": self.self_bytes / self.streams, "cross": self.cross_bytes / self.streams},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--model", choices=whisper.MODELS, default="base")
    parser.add_argument("--specs", default=SPECS, help="comma-separated; paper: those of parts.py")
    parser.add_argument("--tokens", type=int, default=80, help="of a clip, at most")
    parser.add_argument("--batch", type=int, default=27)
    parser.add_argument("--first", type=int, help="only so many clips")
    parser.add_argument("--kl", action="store_true", help="only KL, in half of the time")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    clips = json.loads((given.clips / "clips.json").read_text())[: given.first]
    specs = PAPER if given.specs == "paper" else given.specs
    speaker, found = Speaker(given.model, given.tokens), {spec: Counts() for spec in [DENSE, *specs.split(",")]}
    for at in range(0, len(clips), given.batch):
        part = clips[at : at + given.batch]
        frames = speaker.frames([read(given.clips / clip["file"]) for clip in part])
        text = speaker.listen(frames, speaker.cache(DENSE))
        plain, base = speaker.texts(text), None
        behind = (text == speaker.end).cumsum(1) - (text == speaker.end).int() > 0  # what follows a clip's end
        for spec, counts in found.items():
            begun = time.process_time()
            cache = speaker.cache(spec)
            said = [] if given.kl else speaker.texts(speaker.listen(frames, cache))
            told = speaker.log_probabilities(frames, text, cache if given.kl else speaker.cache(spec))
            own = len(cache.layers) // 2
            sizes = [layer["total_bytes"] for layer in cache.report()["layers"]]
            counts.self_bytes += sum(sizes[:own])
            counts.cross_bytes += sum(sizes[own:])
            counts.elements += sum(c.elements() for c in cache.layer_caches)
            counts.bits = [cache.scheme.key_bits(64), cache.scheme.value_bits(64)]
            counts.streams += len(part)
            for clip, mine, theirs in zip(part, said, plain, strict=not given.kl):
                counts.compare("16bit", mine, theirs, clip["set"])
                if clip["text"]:
                    counts.compare("reference", mine, clip["text"], clip["set"])
            base = told if base is None else base
            kl = (base.exp() * (base - told)).sum(-1).masked_fill(behind, 0).double()
            counts.kl += float(kl.sum())
            counts.largest = max(counts.largest, float(kl.max()))
            counts.tokens += int((~behind).sum())
            counts.seconds += time.process_time() - begun
            print(at, spec, f"{time.process_time() - begun:.0f} s", file=sys.stderr, flush=True)
            write(given, {name: of for name, of in found.items() if of.streams})


def write(given: argparse.Namespace, found: dict[str, Counts]) -> None:
    """Write the file of the clips so far."""
    rows = [{"model": f"whisper-{given.model}", **counts.row(spec)} for spec, counts in found.items()]
    options = {"batch": given.batch, "tokens": given.tokens, "clips": found[DENSE].streams}
    about = {**stamp(torch.device("cpu"), 0), "options": options}
    given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
