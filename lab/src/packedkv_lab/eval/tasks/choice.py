"""Multiple choice: the likeliest continuation is the model's answer. Prompts are those of the Language Model Evaluation
Harness, without a chat template:

=============  =====  ==========================================================================================
task           shots  prompt
=============  =====  ==========================================================================================
hellaswag      0      the context as it is; each ending behind a space
piqa           0      ``Question: GOAL\\nAnswer:``
arc_easy       0      ``Question: QUESTION\\nAnswer:``; also ``arc_challenge``
mmlu           5      the subject's five development questions, then the question; the choices are letters
truthfulqa     6      the data set's own six questions and answers, then the question (MC1: one true answer)
=============  =====  ==========================================================================================

Records come in the form of the hub's data sets, or in that of the files named in ``needs``.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from packedkv_lab.eval.tasks.base import (
    ChoiceOutput,
    Item,
    Metric,
    Needs,
    Plain,
    Scores,
    Source,
    Task,
    TaskSettings,
    drawn,
    item_id,
)
from packedkv_lab.eval.tasks.files import Record, find, hub_records, json_records, parsed

ACCURACY = Metric("higher", "share of items whose likeliest choice is the right one; a tie counts by its share")
ACCURACY_NORM = Metric("higher", "the same with log-likelihoods divided by the choices' lengths in characters")
PROBABILITY = Metric("higher", "probability of the right choice among the choices, from their log-likelihoods")
LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """A prompt, its choices and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    gold: int
    group: Mapping[str, Plain] = field(default_factory=dict)


class Choice(Task):
    """A task whose records each become one question."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy_norm": ACCURACY_NORM,
        "accuracy": ACCURACY,
        "probability": PROBABILITY,
    }
    default_limit = 200
    needs: Needs

    @abstractmethod
    def question(self, record: Record) -> Question:
        """Make a record's question."""

    def records(self, settings: TaskSettings) -> tuple[list[Record], Source]:
        """Return all records, from the file or the hub."""
        path = find(self.name, self.needs, settings)
        return hub_records(self.name, self.needs) if path is None else self.file_records(path)

    def file_records(self, path: Path) -> tuple[list[Record], Source]:
        """Return the records of a file."""
        return json_records(self.name, path)

    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Draw from all questions."""
        records, source = self.records(settings)
        questions = parsed(self.name, records, lambda r: _checked(self.question(r)), source, self.needs.form)
        return drawn((self._item(q) for q in questions), self.limit(settings), settings.seed)

    def _item(self, q: Question) -> Item:
        continuations = tuple(f" {choice}" for choice in q.choices)
        content = item_id(self.name, q.prompt, continuations, q.gold)
        return Item(self.name, content, "choices", q.group, q.prompt, continuations, q.gold)

    def check(self, settings: TaskSettings) -> None:
        """Look for the file."""
        find(self.name, self.needs, settings)

    def source(self, settings: TaskSettings) -> Source | None:
        """Return the file or data set."""
        return self.records(settings)[1]

    def score(self, item: Item, output: ChoiceOutput) -> Scores:
        """Whether the likeliest choice is the right one, and how likely that is."""
        lengths = [len(c.lstrip()) for c in item.continuations]
        scores: Scores = {
            "accuracy": (_share(item.gold, output.best()), 1.0),
            "accuracy_norm": (_share(item.gold, output.best(lengths)), 1.0),
            "probability": (_probability(item.gold, output.loglikelihoods), 1.0),
        }
        return {name: score for name, score in scores.items() if name in self.metrics}

    def shown(self, item: Item, output: ChoiceOutput) -> str:
        """Index of the choice that the main metric takes."""
        lengths = [len(c.lstrip()) for c in item.continuations]
        best = output.best(lengths if next(iter(self.metrics)) == "accuracy_norm" else None)
        return ",".join(map(str, best))


def _checked(q: Question) -> Question:
    if len(q.choices) < 2 or not 0 <= q.gold < len(q.choices):
        raise ValueError(f"{len(q.choices)} choices, of which number {q.gold} is right")
    if not q.prompt.strip() or not all(choice.strip() for choice in q.choices):
        raise ValueError("an empty question or choice")
    return q


def _share(gold: int, best: Sequence[int]) -> float:
    return 1 / len(best) if gold in best else 0.0


def _probability(gold: int, loglikelihoods: Sequence[float]) -> float:
    values = [-math.inf if math.isnan(x) else x for x in loglikelihoods]
    top = max(values)
    if math.isinf(top):
        return 1 / len(values)
    return math.exp(values[gold] - top) / sum(math.exp(x - top) for x in values)


class HellaSwag(Choice):
    """Endings of a scene."""

    name = "hellaswag"
    summary = "the right one of four endings of a scene"
    needs = Needs(
        ("hellaswag_val*.jsonl", "hellaswag*.jsonl", "hellaswag*.json"),
        "JSON lines with ctx (or activity_label, ctx_a, ctx_b), endings and label",
        ("Rowan/hellaswag", "", "validation"),
    )

    def question(self, record: Record) -> Question:
        """Clean brackets out of the context and the endings."""
        if "ctx_a" in record:
            context = f"{record['activity_label']}: {record['ctx_a']} {str(record['ctx_b']).capitalize()}"
        else:
            context = record["ctx"]
        return Question(_clean(context), tuple(_clean(e) for e in record["endings"]), int(record["label"]))


def _clean(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ").strip()
