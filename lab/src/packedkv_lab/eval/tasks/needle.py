"""Needles in a haystack: numbers hidden in real text, one of which is asked for (after RULER, arXiv:2404.06654).

``needle`` hides one number, ``needle_multikey`` three more under other names, which a model that remembers badly mixes
up. The haystack is the run's text from a random place on, and begins again where it ends. The grid is length x depth.
"""

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from packedkv_lab.eval.tasks.base import AnswerOutput, AnswerTask, Item, Metric, Scores, TaskSettings, item_id
from packedkv_lab.eval.tasks.haystack import Haystack, depths_of, fitted, hide, lengths_of, places

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


class Needle(AnswerTask):
    """One hidden number."""

    name = "needle"
    summary = "one number hidden in real text, by length and depth"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "recall": Metric("higher", "share of answers that hold the number"),
        "prefix": Metric("higher", "share of the number's digits before the first wrong one"),
    }
    default_limit = 30
    keys = 1

    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Draw prompts, cell by cell of the grid."""
        haystack = Haystack(tokenizer, settings.text.text)
        grid = places(self.limit(settings), lengths_of(self.name, settings), depths_of(settings))
        return [self._item(tokenizer, haystack, settings.seed, p.length, p.depth, p.draw) for p in grid]

    def _item(self, tokenizer: Any, haystack: Haystack, seed: int, length: int, depth: float, draw: int) -> Item:
        rng = random.Random(f"{self.name} {seed} {length} {depth} {draw}")
        keys = rng.sample(KEYS, self.keys)
        values = [str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in keys]
        depths = [depth, *(rng.random() for _ in keys[1:])]
        needles = [(d, NEEDLE.format(key=k, value=v)) for d, k, v in zip(depths, keys, values, strict=True)]
        start, ask = haystack.start(rng), ASK.format(key=keys[0])

        def build(tokens: int, shift: int) -> str:
            return HEAD + hide(haystack.piece(start + shift, tokens), needles) + ask

        prompt = fitted(self.name, tokenizer, length, build, length - 40 - 25 * self.keys)
        return Item(
            self.name,
            item_id(self.name, prompt, values[0]),
            "answer",
            {"length": length, "depth": depth},
            context=prompt,
            answers=(values[0],),
            max_new_tokens=DIGITS + 5,
            stop=("\n", "."),
        )

    def score(self, item: Item, output: AnswerOutput) -> Scores:
        """Whether the number is there, and how far it is right."""
        return {"recall": (recall(item, output), 1.0), "prefix": (prefix(item, output), 1.0)}

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        """Text and grid."""
        return {
            "text": settings.text.name,
            "text_sha256": settings.text.sha256,
            "lengths": list(lengths_of(self.name, settings)),
            "depths": list(depths_of(settings)),
            "keys": self.keys,
        }


class MultiKeyNeedle(Needle):
    """One hidden number among three others."""

    name = "needle_multikey"
    summary = "one of four numbers hidden in real text, by length and depth"
    keys = 4


def recall(item: Item, output: AnswerOutput) -> float:
    """1 if an answer stands in the output."""
    return float(any(answer in output.text for answer in item.answers))


def prefix(item: Item, output: AnswerOutput) -> float:
    """Share of the answer's characters that the output begins with."""
    text, answer = output.text.strip(" \"'"), item.answers[0]
    same = next((i for i, (a, b) in enumerate(zip(text, answer, strict=False)) if a != b), min(len(text), len(answer)))
    return same / len(answer)
