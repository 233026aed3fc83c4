"""Read items with a ``Reader``, in batches of equal token counts; finished items are yielded as they come.

An item that cannot be read (NaN in the keys, a prompt too short to fit constants on, more tokens than the model's
positions) gets an error and no scores, and the run continues. A call that does not fit the GPU's memory is halved.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from packedkv.cli.measure.perplexity import Reference
from packedkv.errors import KVError, ModelError
from packedkv_lab.eval.scoring import Held, Reader, cut_at, pair_ids
from packedkv_lab.eval.tasks.base import AnswerOutput, ChoiceOutput, Item, Output, token_ids

CALL_TOKENS, SEQUENCE_TOKENS = 1 << 14, 1 << 10
"""Bound on the tokens of a batch: the first number, or the second times the most sequences of a call."""

T = TypeVar("T")
R = TypeVar("R")
Begin = Callable[[], None]
"""Called before every call of the model; raises to stop the run there."""


@dataclass(frozen=True)
class Done:
    """A finished item: its output and the content of its largest cache, or the error."""

    item: Item
    output: Output | None
    held: Held | None
    seconds: float
    error: str = ""


@dataclass
class _Row:
    """One sequence to read, and what it is for: (item, choice, tokens that are scored)."""

    inputs: tuple[int, ...]
    scored: int
    wanted: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class _Open:
    """An item that is being read."""

    values: list[float]
    missing: int
    held: Held | None = None
    seconds: float = 0.0
    error: str = ""


def read_choices(reader: Reader, tokenizer: Any, items: Sequence[Item], batch: int, begin: Begin) -> Iterator[Done]:
    """Score every continuation of every item; sequences that differ only in their last token are read once.

    Parameters
    ----------
    reader : Reader
        Inside ``reading()``.
    batch : int
        Most sequences of a call.
    """
    rows: dict[tuple[tuple[int, ...], int], _Row] = {}
    opened = []
    for i, item in enumerate(items):
        opened.append(_Open([0.0] * len(item.continuations), len(item.continuations)))
        for c, continuation in enumerate(item.continuations):
            try:
                context, scored = pair_ids(tokenizer, item.context, continuation)
                inputs, k = tuple((context + scored)[:-1]), len(scored)
                _check_length(reader, len(inputs))
            except ModelError as error:
                opened[i].error = str(error)
                break
            rows.setdefault((inputs, k), _Row(inputs, k)).wanted.append((i, c, tuple(scored)))
    for i, item in enumerate(items):
        if opened[i].error:
            yield Done(item, None, None, 0.0, opened[i].error)
    # with an exact prefill, scored tokens are a separate call, of one length for all of its sequences
    exact = reader.prefill == "exact"
    readable = [r for r in rows.values() if not all(opened[i].error for i, _, _ in r.wanted)]
    for group in _equal(readable, lambda r: (len(r.inputs), r.scored if exact else 0), batch, lambda r: len(r.inputs)):
        for row, result, seconds in _attempt(group, lambda part: _score(reader, part), begin):
            for at, (i, c, _) in enumerate(row.wanted):
                state = opened[i]
                state.missing -= 1
                state.seconds += seconds / len(row.wanted)
                if isinstance(result, str):
                    state.error = state.error or result
                else:
                    values, held = result
                    state.values[c] = values[at]
                    state.held = max(state.held or held, held, key=lambda h: h.elements)
                if not state.missing and state.error:
                    yield Done(items[i], None, None, state.seconds, state.error)
                elif not state.missing:
                    yield Done(items[i], ChoiceOutput(tuple(state.values)), state.held, state.seconds)


def _score(reader: Reader, rows: Sequence[_Row]) -> list[tuple[list[float], Held]]:
    """Log-likelihoods of the scored tokens of each row."""
    most = max(row.scored for row in rows)
    logits, held = reader.continuations(_tensor(reader, [row.inputs for row in rows]), most)
    found = []
    for row, scores in zip(rows, logits, strict=True):
        log_p = torch.log_softmax(scores[most - row.scored :].float(), -1)
        targets = torch.tensor([target for _, _, target in row.wanted], device=log_p.device)
        found.append((log_p.gather(1, targets.T).double().sum(0).tolist(), held))
    return found


def read_answers(reader: Reader, tokenizer: Any, items: Sequence[Item], batch: int, begin: Begin) -> Iterator[Done]:
    """Continue every item's prompt greedily up to its stop; arguments as ``read_choices``."""
    ends = end_tokens(reader.model, tokenizer)
    prompts: list[tuple[Item, tuple[int, ...]]] = []
    for item in items:
        ids = tuple(token_ids(tokenizer, item.context))
        try:
            _check_length(reader, len(ids) + item.max_new_tokens)
        except ModelError as error:
            yield Done(item, None, None, 0.0, str(error))
            continue
        prompts.append((item, ids))

    def text_of(tokens: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = tokenizer.decode(list(tokens[:end]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def answer(part: Sequence[tuple[Item, tuple[int, ...]]]) -> list[tuple[str, Held]]:
        first = part[0][0]

        def finished(tokens: list[int]) -> bool:
            text = text_of(tokens)
            return tokens[-1] in ends or cut_at(text, first.stop) != text

        made, held = reader.answers(_tensor(reader, [ids for _, ids in part]), first.max_new_tokens, finished)
        return [(cut_at(text_of(tokens), first.stop), held) for tokens in made]

    def alike(one: tuple[Item, tuple[int, ...]]) -> tuple[Any, ...]:
        return len(one[1]), one[0].max_new_tokens, one[0].stop

    for group in _equal(prompts, alike, batch, lambda one: len(one[1])):
        for (item, _), result, seconds in _attempt(group, answer, begin):
            if isinstance(result, str):
                yield Done(item, None, None, seconds, result)
            else:
                yield Done(item, AnswerOutput(result[0]), result[1], seconds)


def read_window(reader: Reader, item: Item, reference: Reference, begin: Begin) -> Done:
    """Score a window against the uncompressed model's ``reference``."""
    ids = torch.tensor(item.ids, device=reader.model.device)
    ((_, result, seconds),) = _attempt([item], lambda _: [reader.window(ids, reference)], begin)
    if isinstance(result, str):
        return Done(item, None, None, seconds, result)
    return Done(item, result[0], result[1], seconds)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: those of the model's generation settings, and the tokenizer's end of text."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    every = [*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id]
    return {int(token) for token in every if token is not None}


def _check_length(reader: Reader, tokens: int) -> None:
    limit = reader.positions
    if limit and tokens > limit:
        raise ModelError(f"{tokens} tokens do not fit the model, which knows {limit} positions.")


def _tensor(reader: Reader, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in rows], device=reader.model.device)


def _equal(
    rows: Sequence[T], key: Callable[[T], tuple[Any, ...]], batch: int, tokens: Callable[[T], int]
) -> Iterator[list[T]]:
    """Groups of equal key, of at most ``batch`` rows and a call's tokens; in the order of their first rows."""
    alike: dict[tuple[Any, ...], list[T]] = {}
    for row in rows:
        alike.setdefault(key(row), []).append(row)
    for group in alike.values():
        most = max(CALL_TOKENS, batch * SEQUENCE_TOKENS)
        size = max(1, min(batch, most // max(tokens(group[0]), 1)))
        for a in range(0, len(group), size):
            yield group[a : a + size]


def _attempt(
    rows: Sequence[T], call: Callable[[Sequence[T]], list[R]], begin: Begin
) -> Iterator[tuple[T, R | str, float]]:
    """Each row's result or error, and its share of the seconds; a batch that fails is split and tried again.

    Raises
    ------
    KVError
        If one row alone does not fit the memory.
    """
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
