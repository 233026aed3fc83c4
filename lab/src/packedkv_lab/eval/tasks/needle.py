"""Needles in a haystack: numbers hidden in real text, one of which is asked for (after RULER, arXiv:2404.06654)."""

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from packedkv.cli.page.words import agreement
from packedkv_lab.eval.tasks.base import Item, Metric, Scores, TaskSettings
from packedkv_lab.eval.tasks.haystack import Haystack, Place, Prompts, fitted, hide

KEYS = (
    *("Amsterdam", "Berlin", "Cairo", "Dublin", "Edinburgh", "Florence", "Geneva", "Hamburg", "Istanbul", "Jakarta"),
    *("Kyoto", "London", "Madrid", "Nairobi", "Oslo", "Paris", "Quebec", "Rome", "Sydney", "Tokyo", "Utrecht"),
    *("Vienna", "Warsaw", "Zurich"),
)
HEAD = "Some special magic numbers are hidden within the following text. Make sure to memorize them.\n"
ASK = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
DIGITS = 7


class Retrieval(Prompts):
    """A task whose answer is one text of the prompt."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "recall": Metric("higher", "share of answers that hold the text"),
        "prefix": Metric("higher", "share of the text's characters before the first wrong one"),
    }

    def score(self, item: Item, output: str) -> Scores:
        (answer,), text = item.answers, output.strip(" \"'")
        same = agreement(text, answer) / len(answer)
        return {"recall": (float(answer in output), 1.0), "prefix": (same, 1.0)}


class Needle(Retrieval):
    """One hidden number."""

    name = "needle"
    summary = "one number hidden in real text, by length and depth"
    keys = 1

    def item(self, tokenizer: Any, material: Haystack, seed: int, place: Place) -> Item:
        rng = random.Random(f"{self.name} {seed} {place.length} {place.depth} {place.draw}")
        keys = rng.sample(KEYS, self.keys)
        values = [str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in keys]
        depths = [place.depth, *(rng.random() for _ in keys[1:])]
        needles = [(d, NEEDLE.format(key=k, value=v)) for d, k, v in zip(depths, keys, values, strict=True)]
        start, ask = material.start(rng), ASK.format(key=keys[0])

        def build(tokens: int, shift: int) -> str:
            return HEAD + hide(material.piece(start + shift, tokens), needles) + ask

        prompt = fitted(self.name, tokenizer, place.length, build, place.length - 40 - 25 * self.keys)
        return self.made(place, prompt, values[:1], values[0], DIGITS + 5, stop=("\n", "."))

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        return super().about(settings) | {"keys": self.keys}


class MultiKeyNeedle(Needle):
    """One hidden number among three others."""

    name = "needle_multikey"
    summary = "one of four numbers hidden in real text, by length and depth"
    keys = 4
