"""Prompts of a given length: real text to hide something in, and the fitting of a prompt to a number of tokens."""

import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count as counting
from itertools import product
from typing import Any

from packedkv.errors import ModelError, SpecError
from packedkv_lab.eval.tasks.base import Item, Task, TaskSettings, item_id, token_ids

LENGTHS = (1024, 2048, 4096)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIES, SHIFTS = 5, 4
TEXT_CHARACTERS = 4_000_000
"""Longer texts are cut to this length."""


@dataclass(frozen=True)
class Place:
    """One cell of the grid and the number of the draw in it."""

    length: int
    depth: float
    draw: int


class Prompts(Task):
    """A task of generated prompts over a grid of lengths, and of depths if ``deep``; ``hidden`` in the run's text."""

    default_limit = 30
    deep = True
    hidden = True

    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        depths = depths_of(settings) if self.deep else (0.0,)
        grid = places(self.limit(settings), lengths_of(self.name, settings), depths)
        material = self.material(tokenizer, settings)
        return [self.item(tokenizer, material, settings.seed, place) for place in grid]

    def material(self, tokenizer: Any, settings: TaskSettings) -> Any:
        """Return what all prompts are made of."""
        return Haystack(tokenizer, settings.text.text)

    @abstractmethod
    def item(self, tokenizer: Any, material: Any, seed: int, place: Place) -> Item:
        """Make the prompt of one place."""

    def made(self, place: Place, prompt: str, answers: Sequence[str], content: Any, tokens: int, **more: Any) -> Item:
        """Return the item of a prompt, identified by ``content``; an answer has at most so many tokens."""
        group = {"length": place.length} | ({"depth": place.depth} if self.deep else {})
        content = item_id(self.name, prompt, content)
        return Item(self.name, content, group=group, kind="answer", context=prompt, answers=tuple(answers),
                    max_new_tokens=tokens, **more)  # fmt: skip

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        entries: dict[str, Any] = {"lengths": list(lengths_of(self.name, settings))}
        if self.hidden:
            entries |= {"text": settings.text.name, "text_sha256": settings.text.sha256}
        return entries | ({"depths": list(depths_of(settings))} if self.deep else {})


def lengths_of(task: str, settings: TaskSettings) -> tuple[int, ...]:
    """Prompt lengths of a run."""
    limit = settings.positions
    if settings.lengths and limit and max(settings.lengths) > limit:
        raise ModelError(
            f"{task}: {max(settings.lengths)} tokens of a prompt do not fit the model, which knows {limit} positions; "
            f"pass shorter --lengths."
        )
    lengths = settings.lengths or tuple(n for n in LENGTHS if not limit or n <= limit)
    if not lengths:
        raise ModelError(f"{task}: the model knows {limit} positions; pass --lengths that fit it.")
    return lengths


def depths_of(settings: TaskSettings) -> tuple[float, ...]:
    """Depths of a run, 0..1."""
    depths = settings.depths or DEPTHS
    if wrong := [d for d in depths if not 0 <= d <= 1]:
        raise SpecError(f"depth {wrong[0]} is not in 0..1; pass --depths such as 0,0.5,1.")
    return depths


def places(limit: int, lengths: Iterable[int], depths: Iterable[float]) -> list[Place]:
    """The first ``limit`` draws, all over the grid before a cell gets a second one.

    >>> places(3, [512], [0.0, 1.0])
    [Place(length=512, depth=0.0, draw=0), Place(length=512, depth=1.0, draw=0), Place(length=512, depth=0.0, draw=1)]
    """
    cells = list(product(lengths, depths))
    draws: list[Place] = []
    for draw in counting():
        for length, depth in cells:
            if len(draws) == limit:
                return draws
            draws.append(Place(length, depth, draw))
    raise AssertionError


class Haystack:
    """Text in pieces of any number of tokens; it repeats from the start where it ends."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.ids = token_ids(tokenizer, text[:TEXT_CHARACTERS])

    def piece(self, start: int, tokens: int) -> str:
        """About ``tokens`` tokens from token ``start`` on."""
        n = len(self.ids)
        start %= n
        ids = (self.ids[start:] + self.ids * (tokens // n + 1))[:tokens]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # a token may end inside a character
        return text.replace("\ufffd", "")

    def start(self, rng: random.Random) -> int:
        """Draw where a piece begins."""
        return rng.randrange(len(self.ids))


def hide(text: str, needles: Sequence[tuple[float, str]]) -> str:
    """Put each needle into ``text`` at its depth, at the next end of a sentence (or word, or the very end).

    >>> hide("One. Two. Three.", [(0.0, "A!"), (0.4, "B!"), (1.0, "C!")])
    'A! One. Two. B! Three. C!'
    """
    at = [(_sentence_end(text, depth), order, needle) for order, (depth, needle) in enumerate(needles)]
    for place, _, needle in sorted(at, reverse=True):
        text = f"{text[:place]}{needle} {text[place:]}" if place < len(text) else f"{text} {needle}"
    return text


def _sentence_end(text: str, depth: float) -> int:
    if depth <= 0:
        return 0
    wanted = round(depth * len(text))
    for mark in (". ", " "):
        at = text.find(mark, wanted)
        if 0 <= at < wanted + max(len(text) // 10, 40):
            return at + len(mark)
    return len(text)


def fitted(task: str, tokenizer: Any, length: int, build: Callable[[int, int], str], first: int) -> str:
    """Find a prompt of exactly ``length`` tokens, or the longest below that was found. ``build(m, shift)`` gives a
    prompt about one token longer for each m, from ``first`` on; a shift moves the text that fills it.
    """
    best, best_tokens = "", 0
    for shift in range(SHIFTS):  # no prompt of one filling may have that length: a token may come with a second one
        m = max(first, 0)
        for _ in range(TRIES):
            prompt = build(m, shift)
            tokens = len(token_ids(tokenizer, prompt))
            if tokens == length:
                return prompt
            if best_tokens < tokens < length:
                best, best_tokens = prompt, tokens
            m = max(m + length - tokens, 0)
    m = largest(tokenizer, length, lambda m: build(m, 0), length)
    if m < 0:
        raise ModelError(f"{task}: a prompt of {length} tokens has no room for the question; pass longer --lengths.")
    prompt = build(m, 0)
    return prompt if len(token_ids(tokenizer, prompt)) > best_tokens else best


def largest(tokenizer: Any, length: int, build: Callable[[int], str], most: int) -> int:
    """Find the largest m up to ``most`` for which ``build(m)`` has at most ``length`` tokens; -1 if there is none."""
    low, high = -1, 0
    while high <= most and len(token_ids(tokenizer, build(high))) <= length:
        low, high = high, max(2 * high, 1)
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if len(token_ids(tokenizer, build(middle))) <= length:
            low = middle
        else:
            high = middle
    return low
