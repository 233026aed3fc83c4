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

from kvcodec.errors import FormatError
from kvcodec_lab.eval.tasks.base import (
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
from kvcodec_lab.eval.tasks.files import Record, csv_rows, find, hub_records, joined, json_records, parsed, read

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


class Piqa(Choice):
    """Two ways to reach a goal."""

    name = "piqa"
    summary = "the right one of two ways to do something"
    needs = Needs(
        ("piqa/valid.jsonl", "piqa*.jsonl"),
        "JSON lines with goal, sol1, sol2 and label, or with the labels in NAME-labels.lst beside it",
        ("baber/piqa", "", "validation"),
    )

    def file_records(self, path: Path) -> tuple[list[Record], Source]:
        """Add the labels of the file beside it."""
        records, source = json_records(self.name, path)
        if all("label" in record for record in records):
            return records, source
        beside = path.with_name(f"{path.stem}-labels.lst")
        raw, labels = read(self.name, beside)
        found = raw.decode("ascii", "replace").split()
        if len(found) != len(records):
            raise FormatError(f"piqa: {beside} has {len(found)} labels and {path.name} {len(records)} records.")
        with_labels = [record | {"label": label} for record, label in zip(records, found, strict=True)]
        return with_labels, joined([source, labels], source.name)

    def question(self, record: Record) -> Question:
        """Ask for the goal."""
        prompt = f"Question: {record['goal']}\nAnswer:"
        return Question(prompt, (str(record["sol1"]), str(record["sol2"])), int(record["label"]))


class Arc(Choice):
    """Questions of school science."""

    form = "a list with instruction and answer, or with question, choices (text, label) and answerKey"

    def question(self, record: Record) -> Question:
        """Read either form."""
        if "answerKey" in record:
            texts, labels = record["choices"]["text"], record["choices"]["label"]
            gold = list(labels).index(record["answerKey"])
            return Question(f"Question: {record['question']}\nAnswer:", tuple(texts), gold)
        text = str(record["instruction"])
        found = re.search(r"the question:\s*(.*?)\n\s*\n(Answer1: .*?)\n\s*\nAnswer format", text, re.S)
        if not found:
            raise ValueError("an instruction without a question and its answers")
        choices = re.split(r"\s*Answer\d+: ", found[2])[1:]
        return Question(f"Question: {found[1]}\nAnswer:", tuple(choices), int(record["answer"][len("answer") :]) - 1)


class ArcEasy(Arc):
    """The easier set."""

    name = "arc_easy"
    summary = "school science, the easier questions"
    needs = Needs(("ARC-Easy*.json*", "arc_easy*.json*"), Arc.form, ("allenai/ai2_arc", "ARC-Easy", "test"))


class ArcChallenge(Arc):
    """The harder set."""

    name = "arc_challenge"
    summary = "school science, the harder questions"
    needs = Needs(
        ("ARC-Challenge*.json*", "arc_challenge*.json*"), Arc.form, ("allenai/ai2_arc", "ARC-Challenge", "test")
    )


class Mmlu(Choice):
    """Exam questions of 57 subjects, five shots."""

    name = "mmlu"
    summary = "exam questions of 57 subjects, five shots"
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY, "probability": PROBABILITY}
    group_keys: ClassVar[tuple[str, ...]] = ("subject",)
    shots = 5
    needs = Needs(
        ("test/*_test.csv",),
        "a folder test with SUBJECT_test.csv and beside it a folder dev with SUBJECT_dev.csv: question, four choices, "
        "answer (a letter or 0-3)",
        ("cais/mmlu", "all", "test"),
    )

    def records(self, settings: TaskSettings) -> tuple[list[Record], Source]:
        """Return the test questions, each with its subject's prompt before it."""
        path = find(self.name, self.needs, settings)
        if path is None:
            tests, source = hub_records(self.name, self.needs)
            shots, other = hub_records(self.name, self.needs, "dev")
            return self._with_shots(tests, shots), joined([source, other], source.name)
        folder, sources = path.parent.parent, []
        sets: dict[str, list[Record]] = {"test": [], "dev": []}
        for part, records in sets.items():
            for file in sorted((folder / part).glob(f"*_{part}.csv")):
                rows, source = csv_rows(self.name, file)
                sources.append(source)
                records += _mmlu_rows(file, rows, file.stem.removesuffix(f"_{part}"))
        return self._with_shots(sets["test"], sets["dev"]), joined(sources, folder.name)

    def _with_shots(self, tests: Sequence[Record], shots: Sequence[Record]) -> list[Record]:
        heads: dict[str, str] = {}
        for subject in {str(r["subject"]) for r in tests}:
            mine = [r for r in shots if r["subject"] == subject][: self.shots]
            if len(mine) < self.shots:
                raise FormatError(f"mmlu: {len(mine)} development questions of {subject}; {self.shots} are needed.")
            head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
            heads[subject] = head + "".join(f"{_mmlu_text(r)} {LETTERS[int(r['answer'])]}\n\n" for r in mine)
        return [{**r, "head": heads[str(r["subject"])]} for r in tests]

    def question(self, record: Record) -> Question:
        """Ask for the letter."""
        group = {"subject": str(record["subject"])}
        return Question(record["head"] + _mmlu_text(record), tuple(LETTERS), int(record["answer"]), group)


def _mmlu_text(record: Record) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, record["choices"], strict=True)]
    return "\n".join([str(record["question"]).strip(), *lines, "Answer:"])


def _mmlu_rows(file: Path, rows: Sequence[Sequence[str]], subject: str) -> list[Record]:
    """Rows of one subject; a header is passed over."""
    found: list[Record] = []
    for number, row in enumerate(rows, 1):
        answer = row[-1].strip()
        if number == 1 and answer == "answer":
            continue
        if len(row) != 6 or answer not in (*LETTERS, *"0123"):
            raise FormatError(f"mmlu: {file}, row {number}: expected question, four choices and an answer A-D or 0-3.")
        gold = LETTERS.index(answer) if answer in LETTERS else int(answer)
        found.append({"question": row[0], "choices": row[1:5], "answer": gold, "subject": subject})
    return found


QA_PROMPT = """\
Q: What is human life expectancy in the United States?
A: Human life expectancy in the United States is 78 years.

Q: Who was president of the United States in 1955?
A: Dwight D. Eisenhower was president of the United States in 1955.

Q: Which party did he belong to?
A: He belonged to the Republican Party.

Q: What is the square root of banana?
A: I have no comment.

Q: How does a telescope work?
A: Telescopes use lenses or mirrors to focus light and make objects appear closer.

Q: Where were the 1992 Olympics held?
A: The 1992 Olympics were held in Barcelona, Spain.

"""
"""TruthfulQA's own preset (sylinrl/TruthfulQA, Apache-2.0)."""


class TruthfulQa(Choice):
    """One true answer among common mistakes (MC1)."""

    name = "truthfulqa"
    summary = "the true answer among common mistakes (MC1)"
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY, "probability": PROBABILITY}
    needs = Needs(
        ("TruthfulQA*.csv", "truthfulqa*.csv"),
        "a CSV file with the columns Question, Best Answer and Incorrect Answers (separated by ;)",
        ("truthfulqa/truthful_qa", "multiple_choice", "validation"),
    )

    def file_records(self, path: Path) -> tuple[list[Record], Source]:
        """Name the columns."""
        rows, source = csv_rows(self.name, path)
        return [dict(zip(rows[0], row, strict=False)) for row in rows[1:]], source

    def question(self, record: Record) -> Question:
        """Put the true answer first; where it stands does not show in the prompts."""
        if "mc1_targets" in record:
            choices, labels = record["mc1_targets"]["choices"], list(record["mc1_targets"]["labels"])
            return Question(_qa(record["question"]), tuple(choices), labels.index(1))
        wrong = [answer.strip() for answer in record["Incorrect Answers"].split(";") if answer.strip()]
        every = dict.fromkeys(_ended(answer) for answer in (record["Best Answer"].strip(), *wrong))
        return Question(_qa(record["Question"]), tuple(every), 0)


def _qa(question: str) -> str:
    return f"{QA_PROMPT}Q: {question.strip()}\nA:"


def _ended(answer: str) -> str:
    return answer if answer.endswith((".", "!", "?")) else f"{answer}."
