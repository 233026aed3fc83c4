"""What a task is: items to read, and how a model's output on one is scored.

An item is one question, prompt or window. Its id is a hash of its content, so that a continued run, with more items
or another version of the data, recognises finished items. Scores are pairs (sum, count): a metric's value over
many items is sum of sums over sum of counts, whatever the batches and the order were.
"""

import hashlib
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from packedkv.cli.measure.perplexity import TokenScores
from packedkv.models.loading import SampleText

Kind = Literal["choices", "answer", "window"]
Scores = dict[str, tuple[float, float]]
Plain = str | int | float

SEPARATOR = "@"
"""``kl@1-255`` is the metric ``kl`` of a part of the item; the part becomes a group of its own in the summary."""


@dataclass(frozen=True)
class Metric:
    """A result of a task.

    Parameters
    ----------
    better : {"higher", "lower"}
    text : str
        Description, for readers of a table.
    of : str
        The score that it is the mean of; empty: the one of its own name.
    exp : bool
        The value is exp of that mean.
    """

    better: Literal["higher", "lower"]
    text: str
    of: str = ""
    exp: bool = False

    def value(self, total: float, count: float) -> float:
        """Return the metric of a sum and a count; NaN for a count of 0."""
        if not count:
            return math.nan
        mean = total / count
        if not self.exp:
            return mean
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True)
class Item:
    """One thing to read.

    Parameters
    ----------
    task, id : str
        The id is unique in the task and comes from the content (``item_id``).
    kind : {"choices", "answer", "window"}
        Which fields are filled: ``context``, ``continuations`` and ``gold`` (index of the right one); ``context``,
        ``answers`` (any of them is right), ``max_new_tokens`` and ``stop``; ``ids``.
    group : mapping
        Plain values that results are split by: depth, length, subject.
    context : str
        The prompt. With choices, each continuation is read behind it.
    ids : tuple of int
        Token ids of a window.
    stop : tuple of str
        An answer ends before the first of them.
    """

    task: str
    id: str
    kind: Kind
    group: Mapping[str, Plain] = field(default_factory=dict)
    context: str = ""
    continuations: tuple[str, ...] = ()
    gold: int = -1
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ("\n",)
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChoiceOutput:
    """Log-likelihood of each continuation given the context: summed over its tokens, nats; NaN counts as -inf."""

    loglikelihoods: tuple[float, ...]

    def best(self, lengths: Sequence[int] | None = None) -> list[int]:
        """Return the likeliest choices, more than one if they tie; with ``lengths``, likeliest per unit of length."""
        values = [-math.inf if math.isnan(x) else x for x in self.loglikelihoods]
        if lengths is not None:
            values = [x / max(n, 1) for x, n in zip(values, lengths, strict=True)]
        return [i for i, x in enumerate(values) if x == max(values)]


@dataclass(frozen=True)
class AnswerOutput:
    """A greedy answer, cut at its stop."""

    text: str


@dataclass(frozen=True)
class Source:
    """Data that was read: its name, and the sha256 of its bytes (files concatenated)."""

    name: str
    sha256: str


Output = ChoiceOutput | AnswerOutput | TokenScores


@dataclass(frozen=True)
class Needs:
    """The data that a task reads from a file.

    Parameters
    ----------
    patterns : tuple of str
        File names to look for below ``--data``, best first; ``*`` as in a shell.
    form : str
        What the file holds, for an error message.
    hub : tuple of str
        Data set, configuration (may be empty) and split on the Hugging Face hub.
    """

    patterns: tuple[str, ...]
    form: str
    hub: tuple[str, str, str]


@dataclass(frozen=True)
class TaskSettings:
    """The settings that determine a task's items.

    Parameters
    ----------
    text : SampleText
        Windows are cut from it, haystacks and words are taken from it.
    limit : int or None
        Items of a task; None: each task's own ``default_limit``.
    limits : mapping
        Task -> limit, before ``limit``.
    seed : int
        Which items are drawn, and what generated ones hold.
    data : Path or None
        File or folder that data is looked for in; None: the hub.
    data_of : mapping
        Task -> file or folder, before ``data``.
    lengths : tuple of int
        Tokens of a prompt, where a task has a grid; empty: the task's own.
    depths : tuple of float
        0..1: relative position of the relevant text in the prompt; empty: the task's own.
    window_tokens : int
    positions : int or None
        Number of positions of the model; None: unknown.
    """

    text: SampleText
    limit: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    data: Path | None = None
    data_of: Mapping[str, Path] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    window_tokens: int = 2048
    positions: int | None = None


class Task(ABC):
    """A kind of item; one instance per name.

    Attributes
    ----------
    name, summary : str
    metrics : mapping
        Metric by name, the main one first.
    default_limit : int
    needs : Needs or None
        None: the task needs no file.
    """

    name: str
    summary: str
    metrics: ClassVar[Mapping[str, Metric]]
    default_limit: int
    needs: Needs | None = None
    group_keys: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Return the items, ``limit(settings)`` of them at most; the same for the same arguments, in every process.

        Raises
        ------
        KVError
            Data that is missing or in another form, a text too short, a length that the model cannot hold.
        """

    @abstractmethod
    def score(self, item: Item, output: Any) -> Scores:
        """Return (sum, count) by metric."""

    @abstractmethod
    def shown(self, item: Item, output: Any) -> str:
        """Return the output in short, for the results: equal where two models said the same."""

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        """Return the settings that the items depend on, the limit aside, as plain values."""
        return {}

    def check(self, settings: TaskSettings) -> None:
        """Validate, before a model is loaded, that the data exists.

        Raises
        ------
        KVError
        """
        self.source(settings)

    def source(self, settings: TaskSettings) -> Source | None:
        """Return the source of the task's data; None: it needs none.

        Raises
        ------
        KVError
            If it is missing, or in another form.
        """
        return None

    def limit(self, settings: TaskSettings) -> int:
        """Most items."""
        return settings.limits.get(self.name, settings.limit or self.default_limit)


class AnswerTask(Task):
    """A task whose items are answered by a text."""

    def shown(self, item: Item, output: AnswerOutput) -> str:
        """The answer."""
        return output.text.strip()


def item_id(*content: Any) -> str:
    """Return 16 hexadecimal digits of the content's sha256; plain values only.

    >>> item_id("hellaswag", "a context", ["one", "two"])
    'b8f0bc1ed1506846'
    """
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def drawn(items: Iterable[Item], limit: int, seed: int) -> list[Item]:
    """Draw ``limit`` items, each once: those whose id and seed hash lowest.

    A larger limit draws the same items and more, and the order of the file does not matter.
    """
    unique = {item.id: item for item in items}
    order = sorted(unique, key=lambda id_: hashlib.sha256(f"{seed}/{id_}".encode()).digest())
    return [unique[id_] for id_ in order[:limit]]


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` with the tokenizer's defaults (its first token may be one that begins every text)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sequence is longer than the model's maximum": checked where it matters
        ids = tokenizer(text, verbose=False)["input_ids"]
    return list(ids)
