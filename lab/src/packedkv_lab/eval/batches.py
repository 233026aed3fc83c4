"""Read items with a ``Reader``, in batches of equal token counts; finished items are yielded as they come.

An item that cannot be read gets an error and no scores. A call that does not fit the GPU's memory is halved.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from packedkv.cli.measure.perplexity import Reference
from packedkv.errors import KVError
from packedkv_lab.eval.scoring import Content, Reader, cut_at
from packedkv_lab.eval.tasks.base import Item, Output, token_ids

CALL_TOKENS, SEQUENCE_TOKENS = 1 << 14, 1 << 10
"""Bound on the tokens of a batch: the first number, or the second times the most sequences of a call."""

Prompt = tuple[Item, list[int]]
"""An item and its tokens."""
T = TypeVar("T")
R = TypeVar("R")
Begin = Callable[[], None]
"""Called before every call of the model; raises to stop the run there."""


@dataclass(frozen=True)
class Done:
    """A finished item: its output and the content of its largest cache, or the error."""

    item: Item
    output: Output | None
    content: Content | None
    seconds: float
    error: str = ""


def read_answers(reader: Reader, tokenizer: Any, items: Sequence[Item], batch: int, begin: Begin) -> Iterator[Done]:
    """Continue every item's prompt greedily up to its stop, in calls of at most ``batch`` sequences."""
    ends = end_tokens(reader.model, tokenizer)
    prompts: list[Prompt] = []
    for item in items:
        ids = token_ids(tokenizer, item.context)
        tokens, limit = len(ids) + item.max_new_tokens, reader.positions
        if limit and tokens > limit:
            error = f"{tokens} tokens do not fit the model, which knows {limit} positions."
            yield Done(item, None, None, 0.0, error)
        else:
            prompts.append((item, ids))

    def text_of(tokens: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = tokenizer.decode(list(tokens[:end]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def answer(part: Sequence[Prompt]) -> list[tuple[str, Content]]:
        first = part[0][0]

        def finished(tokens: list[int]) -> bool:
            text = text_of(tokens)
            return tokens[-1] in ends or cut_at(text, first.stop) != text

        together = torch.tensor([ids for _, ids in part], device=reader.model.device)
        made, content = reader.answers(together, first.max_new_tokens, finished)
        return [(cut_at(text_of(tokens), first.stop), content) for tokens in made]

    for group in _equal(prompts, batch):
        for (item, _), result, seconds in _attempt(group, answer, begin):
            yield _done(item, result, seconds)


def read_window(reader: Reader, item: Item, reference: Reference, begin: Begin) -> Done:
    """Score a window against the uncompressed model's ``reference``."""
    ids = torch.tensor(item.ids, device=reader.model.device)
    ((_, result, seconds),) = _attempt([item], lambda _: [reader.window(ids, reference)], begin)
    return _done(item, result, seconds)


def _done(item: Item, result: tuple[Output, Content] | str, seconds: float) -> Done:
    if isinstance(result, str):
        return Done(item, None, None, seconds, result)
    return Done(item, *result, seconds)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: those of the model's generation settings, and the tokenizer's end of text."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    every = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    return {int(token) for token in every if token is not None}


def _equal(prompts: Sequence[Prompt], batch: int) -> Iterator[list[Prompt]]:
    """Groups of prompts as long as each other that end alike, of at most ``batch`` and a call's tokens; in order."""
    alike: dict[tuple[Any, ...], list[Prompt]] = {}
    for item, ids in prompts:
        alike.setdefault((len(ids), item.max_new_tokens, item.stop), []).append((item, ids))
    for (tokens, *_), group in alike.items():
        most = max(CALL_TOKENS, batch * SEQUENCE_TOKENS)
        size = max(1, min(batch, most // max(tokens, 1)))
        for a in range(0, len(group), size):
            yield group[a : a + size]


def _attempt(
    rows: Sequence[T], call: Callable[[Sequence[T]], list[R]], begin: Begin
) -> Iterator[tuple[T, R | str, float]]:
    """Each row's result or error, and its share of the seconds; a batch that fails is split and tried again."""
    begin()
    at = time.monotonic()
    try:
        results = call(rows)
    except (KVError, ValueError, torch.OutOfMemoryError) as error:
        if len(rows) > 1:
            half = len(rows) // 2 if isinstance(error, torch.OutOfMemoryError) else 1
            torch.cuda.empty_cache()
            for a in range(0, len(rows), half):
                yield from _attempt(rows[a : a + half], call, begin)
            return
        if isinstance(error, torch.OutOfMemoryError):
            raise KVError(
                f"the device has too little memory for one item ({str(error).splitlines()[0]}); take shorter --lengths "
                f"or --window-tokens, or another --dtype. What was finished is kept."
            ) from error
        yield rows[0], str(error) or type(error).__name__, time.monotonic() - at
        return
    seconds = (time.monotonic() - at) / len(rows)
    yield from ((row, result, seconds) for row, result in zip(rows, results, strict=True))
