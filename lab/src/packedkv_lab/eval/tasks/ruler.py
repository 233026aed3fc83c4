"""Tasks after RULER (arXiv:2404.06654) that need more than one place of the prompt: ``variable_tracking`` follows a
chain of assignments hidden in real text, ``common_words`` counts. Neither shows a worked example first, as RULER does.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from packedkv.errors import ModelError
from packedkv_lab.eval.tasks.base import Item, Metric, Scores, TaskSettings
from packedkv_lab.eval.tasks.haystack import TEXT_CHARACTERS, Haystack, Place, Prompts, fitted, hide, largest

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Listing(Prompts):
    """A task whose answer is a list of words: the share of them that is named."""

    metrics: ClassVar[Mapping[str, Metric]] = {"recall": Metric("higher", "share of the wanted words that are named")}
    deep = False

    def score(self, item: Item, output: str) -> Scores:
        said = set(re.findall(r"\w+", output))
        return {"recall": (float(sum(word in said for word in item.answers)), float(len(item.answers)))}


class VariableTracking(_Listing):
    """Five variables, each set to the one before; the first holds a number, and all that do are asked for."""

    name = "variable_tracking"
    summary = "a chain of five assignments hidden in real text, by length"
    variables = 5
    head = "Memorize and track the chain of variable assignment hidden in the following text.\n\n"
    ask = (
        "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        "the chain of variable assignment in the text above, {n} variables are assigned the value {value}, they are:"
    )

    def item(self, tokenizer: Any, material: Haystack, seed: int, place: Place) -> Item:
        rng = random.Random(f"{self.name} {seed} {place.length} {place.draw}")
        names: list[str] = []
        while len(names) < self.variables:
            name = "".join(rng.choices(LETTERS, k=5))
            names += [name] * (name not in names)
        value = str(rng.randrange(10_000, 100_000))
        said = [f"VAR {a} = {b}." for a, b in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]
        needles = list(zip(sorted(rng.random() for _ in said), said, strict=True))
        start, ask = material.start(rng), self.ask.format(value=value, n=self.variables)

        def build(tokens: int, shift: int) -> str:
            return self.head + hide(material.piece(start + shift, tokens), needles) + ask

        prompt = fitted(self.name, tokenizer, place.length, build, place.length - 80 - 15 * self.variables)
        return self.made(place, prompt, names, names, 10 * self.variables)


class CommonWords(_Listing):
    """A numbered list in which ten words make up half of the entries; these ten are asked for."""

    name = "common_words"
    summary = "the ten words that fill half of a long list, by length"
    common = 10
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
    )
    ask = (
        "\nQuestion: What are the {n} most common words in the above list? Answer: The top {n} words that appear most "
        "often in the list are:"
    )
    fewest = 4
    """Entries of each common word in the shortest list."""

    def material(self, tokenizer: Any, settings: TaskSettings) -> list[str]:
        words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", settings.text.text[:TEXT_CHARACTERS])))
        if len(words) < 4 * self.common:
            raise ModelError(
                f"{self.name}: the text has {len(words)} different words of 4 to 9 letters, and {4 * self.common} are "
                f"needed; pass a longer --text."
            )
        return words

    def item(self, tokenizer: Any, material: Sequence[str], seed: int, place: Place) -> Item:
        length, rng = place.length, random.Random(f"{self.name} {seed} {place.length} {place.draw}")
        drawn = rng.sample(list(material), len(material))
        wanted, others = drawn[: self.common], drawn[self.common :]
        order = rng.randrange(2**32)

        def build(times: int) -> str:
            """Each common word ``times`` times, and as many entries of other words, each as seldom as may be."""
            entries = [word for word in wanted for _ in range(times)]
            entries += [others[i % len(others)] for i in range(len(entries))]
            random.Random(order).shuffle(entries)
            listed = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
            return self.head + listed + self.ask.format(n=self.common)

        times = largest(tokenizer, length, build, length)
        if times < self.fewest or times * self.common > len(others) * (times - 1):
            raise ModelError(
                f"{self.name}: {length} tokens make a list in which each common word stands {max(times, 0)} times; "
                + ("pass longer --lengths." if times < self.fewest else "the text has too few other words.")
            )
        return self.made(place, build(times), wanted, wanted, 8 * self.common, stop=("\n\n", "Question"))
