"""What a task is: items to read, and how a model's output on one is scored, as pairs (sum, count) by metric."""

import hashlib
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from packedkv.cli.measure.perplexity import TokenScores
from packedkv.models.loading import SampleText

Kind = Literal["answer", "window"]
Scores = dict[str, tuple[float, float]]
Plain = str | int | float

SEPARATOR = "@"
"""``kl@1-255`` is the metric ``kl`` of a part of the item; the part becomes a group of its own in the summary."""


@dataclass(frozen=True)
class Metric:
    """A result of a task: which values are better, and a description for readers of a table.

    It is the mean of the score ``of`` (default: the one of its own name), or exp of that mean.
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
    """One thing to read: a prompt to answer, or a window of ``ids``. The id comes from the content (``item_id``).

    ``group`` splits results. An answer holding one of ``answers`` is right; it ends before the first ``stop``.
    """

    task: str
    id: str
    kind: Kind
    group: Mapping[str, Plain] = field(default_factory=dict)
    context: str = ""
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ("\n",)
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """Data that was read: its name, and the sha256 of its bytes (files concatenated)."""

    name: str
    sha256: str


Output = str | TokenScores
"""A greedy answer, cut at its stop; or the scores of a window."""


@dataclass(frozen=True)
class TaskSettings:
    """The settings that determine a task's items.

    Windows, haystacks and words are taken from ``text``. ``limits`` by task come before ``limit``, and this before each
    task's ``default_limit``. ``data`` maps tasks to files. ``lengths`` (tokens of a prompt) and ``depths`` (relative
    positions of the relevant text) are the task's own if empty. ``positions`` of the model are None if unknown.
    """

    text: SampleText
    limit: int | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    data: Mapping[str, Path] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()
    window_tokens: int = 2048
    positions: int | None = None


class Task(ABC):
    """A kind of item; one instance per name. ``metrics`` has the main one first."""

    name: str
    summary: str
    metrics: ClassVar[Mapping[str, Metric]]
    default_limit: int

    @abstractmethod
    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Return the items, ``limit(settings)`` of them at most; the same for the same arguments, in every process.

        ``KVError``: data in another form, a text too short, a length that the model cannot hold.
        """

    @abstractmethod
    def score(self, item: Item, output: Any) -> Scores:
        """Return (sum, count) by metric."""

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        """Return the settings that the items depend on, the limit aside, as plain values."""
        return {}

    def source(self, settings: TaskSettings) -> Source | None:
        """Return the source of the task's data, None if it reads no file; ``KVError`` if the file is unusable."""
        return None

    def limit(self, settings: TaskSettings) -> int:
        """Most items."""
        return settings.limits.get(self.name, settings.limit or self.default_limit)


def item_id(*content: Any) -> str:
    """Return 16 hexadecimal digits of the content's sha256; plain values only.

    >>> item_id("needle", "a context", ["one", "two"])
    '7068b324047f3399'
    """
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` with the tokenizer's defaults (its first token may be one that begins every text)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sequence is longer than the model's maximum": checked where it matters
        ids = tokenizer(text, verbose=False)["input_ids"]
    return list(ids)
