"""Questions over documents of which one or two hold the answer, padded with others to a length (after RULER).

``squad`` asks of one paragraph, whose depth is that of the grid; ``hotpot`` of two, at places that the seed draws.
Answers are compared as SQuAD does: lower case, without punctuation and articles.
"""

import random
import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvcodec.errors import ModelError
from kvcodec_lab.eval.tasks.base import (
    AnswerOutput,
    AnswerTask,
    Item,
    Metric,
    Needs,
    Plain,
    Scores,
    Source,
    TaskSettings,
    item_id,
)
from kvcodec_lab.eval.tasks.files import Record, find, hub_records, json_records, parsed
from kvcodec_lab.eval.tasks.haystack import Place, depths_of, largest, lengths_of, places

ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
MOST_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """A question, its answers, the documents that hold them, and what these are about (never used as padding)."""

    id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    topics: frozenset[str]


class DocumentQa(AnswerTask):
    """Questions over documents."""

    metrics: ClassVar[Mapping[str, Metric]] = {
        "f1": Metric("higher", "overlap of words with the best of the true answers (SQuAD's F1)"),
        "exact": Metric("higher", "share of answers that are a true one"),
        "recall": Metric("higher", "share of answers that hold a true one"),
    }
    default_limit = 60
    needs: Needs

    @abstractmethod
    def pool(self, records: Sequence[Record], source: Source) -> tuple[list[Question], list[tuple[str, str]]]:
        """Return all questions, and all documents with their topics."""

    def records(self, settings: TaskSettings) -> tuple[list[Record], Source]:
        """Return what the file or the hub holds."""
        path = find(self.name, self.needs, settings)
        return hub_records(self.name, self.needs) if path is None else json_records(self.name, path)

    def check(self, settings: TaskSettings) -> None:
        """Look for the file."""
        find(self.name, self.needs, settings)

    def source(self, settings: TaskSettings) -> Source | None:
        """Return the file or data set."""
        return self.records(settings)[1]

    def cells(self, settings: TaskSettings) -> list[Place]:
        """Return the places of the grid, one for each item."""
        return places(self.limit(settings), lengths_of(self.name, settings), depths_of(settings))

    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Give each place of the grid a question of its own, in an order that the seed draws."""
        questions, documents = self.pool(*self.records(settings))
        unique = {q.id: q for q in questions}
        order = sorted(unique, key=lambda i: random.Random(f"{self.name} {settings.seed} {i}").random())
        left = iter(order)
        items: list[Item] = []
        for place in self.cells(settings):
            # a question whose own documents are too long is passed over, by its id alone: the same in every run
            item = next(
                filter(None, (self._item(tokenizer, unique[i], documents, place, settings) for i in left)), None
            )
            if item is None:
                break
            items.append(item)
        if not items:
            longest = max(place.length for place in self.cells(settings))
            raise ModelError(f"{self.name}: no question fits {longest} tokens; pass longer --lengths.")
        return items

    def group(self, place: Place) -> dict[str, Plain]:
        """Return what results are split by."""
        return {key: getattr(place, key) for key in self.group_keys}

    def order(self, question: Question, others: Sequence[str], depth: float, rng: random.Random) -> list[str]:
        """Return all documents as the prompt shows them."""
        shown = list(others)
        shown.insert(round(depth * len(others)), question.documents[0])
        return shown

    def _item(
        self,
        tokenizer: Any,
        question: Question,
        documents: Sequence[tuple[str, str]],
        place: Place,
        settings: TaskSettings,
    ) -> Item | None:
        name = f"{self.name} {settings.seed} {question.id} {place.length} {place.depth}"
        rng = random.Random(name)
        others = [text for topic, text in documents if topic not in question.topics]
        rng.shuffle(others)

        def build(count: int) -> str:
            shown = self.order(question, others[:count], place.depth, random.Random(name))
            listed = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(shown, 1))
            return (
                f"{ORDER}\n\nThe following are given documents.\n\n{listed}\n\n{ORDER}\n\n"
                f"Question: {question.text}\nAnswer:"
            )

        count = largest(tokenizer, place.length, build, len(others))
        if count < 0:
            return None
        return Item(
            self.name,
            item_id(self.name, build(count), question.answers),
            "answer",
            self.group(place),
            context=build(count),
            answers=question.answers,
            max_new_tokens=MOST_TOKENS,
        )

    def score(self, item: Item, output: AnswerOutput) -> Scores:
        """Compare with every true answer."""
        said = normalized(output.text)
        true = [normalized(answer) for answer in item.answers]
        return {
            "f1": (max(f1(said, t) for t in true), 1.0),
            "exact": (float(said in true), 1.0),
            "recall": (float(any(f" {t} " in f" {said} " for t in true)), 1.0),
        }

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        """The grid."""
        about: dict[str, Any] = {"lengths": list(lengths_of(self.name, settings))}
        return about | ({"depths": list(depths_of(settings))} if "depth" in self.group_keys else {})


class Squad(DocumentQa):
    """One paragraph of SQuAD 2.0 among others; questions that have an answer."""

    name = "squad"
    summary = "a question on one paragraph among others, by length and depth"
    group_keys: ClassVar[tuple[str, ...]] = ("length", "depth")
    needs = Needs(
        ("dev-v2.0*.json", "squad*.json*", "xquad.en.json"),
        "SQuAD's JSON (data, paragraphs, qas), or records with title, context, question and answers",
        ("rajpurkar/squad_v2", "", "validation"),
    )

    def pool(self, records: Sequence[Record], source: Source) -> tuple[list[Question], list[tuple[str, str]]]:
        """Return one question per answerable one; a document's topic is its article."""
        flat = _flat(records) if records and "data" in records[0] else records
        questions = parsed(self.name, flat, _squad_question, source, self.needs.form)
        return questions, list({r["context"]: (str(r["title"]), str(r["context"]).strip()) for r in flat}.values())


def _flat(records: Sequence[Record]) -> list[Record]:
    found = []
    for number, article in enumerate(records[0]["data"]):
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                texts = [answer["text"] for answer in qa["answers"]]
                common = {"title": article.get("title", str(number)), "context": paragraph["context"]}
                found.append({**common, "id": qa["id"], "question": qa["question"], "answers": {"text": texts}})
    return found


def _squad_question(record: Record) -> Question | None:
    texts = tuple(dict.fromkeys(str(t).strip() for t in record["answers"]["text"]))
    if not any(map(normalized, texts)):
        return None
    documents, topics = (str(record["context"]).strip(),), frozenset([str(record["title"])])
    return Question(str(record["id"]), str(record["question"]).strip(), texts, documents, topics)


class Hotpot(DocumentQa):
    """Two paragraphs of HotpotQA, both needed, among its distractors and those of other questions."""

    name = "hotpot"
    summary = "a question that needs two paragraphs among others, by length"
    group_keys: ClassVar[tuple[str, ...]] = ("length",)
    needs = Needs(
        ("hotpot*.json*",),
        "records with question, answer, supporting_facts and context",
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
    )

    def cells(self, settings: TaskSettings) -> list[Place]:
        """Return a place per length and draw."""
        return places(self.limit(settings), lengths_of(self.name, settings), [0.0])

    def pool(self, records: Sequence[Record], source: Source) -> tuple[list[Question], list[tuple[str, str]]]:
        """Return the questions, and every paragraph under its title."""
        questions = parsed(self.name, records, _hotpot_question, source, self.needs.form)
        paragraphs = {title: text for record in records for title, text in _paragraphs(record).items()}
        return questions, list(paragraphs.items())

    def order(self, question: Question, others: Sequence[str], depth: float, rng: random.Random) -> list[str]:
        """Shuffle."""
        shown = [*question.documents, *others]
        rng.shuffle(shown)
        return shown


def _paragraphs(record: Record) -> dict[str, str]:
    context = record["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return {str(title): f"{title}\n{''.join(sentences).strip()}" for title, sentences in pairs}


def _hotpot_question(record: Record) -> Question | None:
    facts, paragraphs = record["supporting_facts"], _paragraphs(record)
    titles = facts["title"] if isinstance(facts, dict) else [title for title, _ in facts]
    needed = [title for title in dict.fromkeys(titles) if title in paragraphs]
    answer = str(record["answer"]).strip()
    if not needed or not normalized(answer):
        return None
    documents = tuple(paragraphs[title] for title in needed)
    id_ = str(record.get("_id") or record.get("id"))
    return Question(id_, str(record["question"]).strip(), (answer,), documents, frozenset(needed))


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces.

    >>> normalized(" The  Queen's gaoler. ")
    'queens gaoler'
    """
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(said: str, true: str) -> float:
    """Harmonic mean of the words' precision and recall.

    >>> f1("in the year 1945", "1945")
    0.4
    """
    a, b = said.split(), true.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
