"""``evaluate``: tasks x specs on one model, into a folder with which a later call can continue.

Order of work, so that an interrupt or a spent budget leaves comparable numbers: blocks of items, some of each task; in
a block every spec, the uncompressed model first.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from packedkv.cli.measure.caches import Prefill, packed_cache
from packedkv.cli.measure.perplexity import Reference, uncompressed
from packedkv.cli.measure.quantized_cache import QuantizedCacheMaker, QuantizedCacheSpec, check_unlike, scheme_of
from packedkv.cli.measure.rows import Row, write_lines
from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv.errors import KVError, ModelError, SpecError
from packedkv.files.params import FittedParams, match_params
from packedkv.models.loading import LoadedModel
from packedkv.models.windows import positions_of
from packedkv.progress import Progress
from packedkv.scheme import KVScheme
from packedkv_lab.eval.about import about_run
from packedkv_lab.eval.batches import Done, read_answers, read_window
from packedkv_lab.eval.scoring import Reader
from packedkv_lab.eval.stats import summarize
from packedkv_lab.eval.store import RESULTS, Store, read_run
from packedkv_lab.eval.tasks import get_task
from packedkv_lab.eval.tasks.base import Item, Task, TaskSettings

BLOCK_CALLS = 16
"""Items of a block, in full calls: enough to batch sequences of equal length."""
OUTPUT_CHARACTERS = 200
Entry = tuple[Task, Item]


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    The seed of ``task`` is also that of the codecs' random constants. ``batch``: most sequences of a call (None: 4 on a
    CPU, else 16). ``share``: an empty folder that several processes name, each with an output folder of its own;
    ``merge`` joins their runs. ``changes`` were made to the model before, and are part of ``run.json``.
    """

    task: TaskSettings
    prefill: Prefill = "decoded"
    batch: int | None = None
    budget: float | None = None
    share: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The result of a run: the rows of ``results.json``, how it ended, and its folder."""

    rows: list[Row]
    status: str
    folder: Path


class _SpentError(Exception):
    """The budget is spent."""


def evaluate(
    model: LoadedModel,
    specs: Sequence[str | KVScheme | QuantizedCacheSpec],
    tasks: Sequence[str],
    output: str | Path,
    settings: RunSettings,
    *,
    params: Sequence[str | Path | FittedParams] = (),
    progress: Progress | None = None,
) -> Evaluation:
    """Measure schemes and the uncompressed model on tasks, or continue such a run in the folder ``output``.

    Finished items are not repeated; specs, tasks and items (a larger limit) may be added. ``params`` are files of
    ``packedkv fit``. ``status`` of the result: ``complete``, ``budget``, or ``interrupted`` (Ctrl-C). ``KVError``
    before any work for what does not exist or fit, later for a full disk; ``KeyboardInterrupt`` if nothing is finished.
    """
    progress = progress or Progress(False)
    if model.tokenizer is None:
        raise ModelError(f"{model.name} comes without a tokenizer, and tasks are texts; add its tokenizer files.")
    if settings.task.positions is None:
        settings = replace(settings, task=replace(settings.task, positions=positions_of(model.model.config)))
    schemes = checked_specs(specs)
    matched = iter(match_params(params, [s for s in schemes if isinstance(s, KVScheme)]))
    given = [next(matched) if isinstance(s, KVScheme) else None for s in schemes]
    task_list = [get_task(name) for name in dict.fromkeys(tasks)]
    if not task_list:
        raise SpecError("no task to run; pass at least one, e.g. perplexity.")
    common: dict[str, Any] = {"prefill": settings.prefill, "seed": settings.task.seed}
    for scheme, constants in zip(schemes, given, strict=True):
        if isinstance(scheme, QuantizedCacheSpec):
            QuantizedCacheMaker(model.model, scheme).new_cache()
            continue
        if settings.share is not None:  # most of the specs are read by other processes
            continue
        with packed_cache(model.model, scheme, params=constants, **common):
            pass  # raises now for an unsupported scheme
    readers = [Reader(model.model, None, **common)]
    readers += [Reader(model.model, s, params=p, **common) for s, p in zip(schemes, given, strict=True)]
    items: dict[str, list[Item]] = {}
    for task in task_list:
        with progress.busy(f"{task.name}: making items"):
            items[task.name] = task.items(model.tokenizer, settings.task)
    with progress.busy("hashing the weights"):
        about = about_run(model, task_list, items, schemes, given, settings.task, settings.prefill, settings.changes)
    with Store(output, about) as store:
        return _Evaluator(model, task_list, items, readers, settings, store, progress).run()


def checked_specs(specs: Sequence[str | KVScheme | QuantizedCacheSpec]) -> list[KVScheme | QuantizedCacheSpec]:
    """Schemes of the specs, and caches of other libraries."""
    schemes = [scheme_of(spec) for spec in specs]
    check_unlike(schemes, "evaluate")
    for scheme in schemes:
        if isinstance(scheme, QuantizedCacheSpec):
            scheme.check()
    return schemes


class _Evaluator:
    def __init__(
        self,
        model: LoadedModel,
        tasks: Sequence[Task],
        items: Mapping[str, Sequence[Item]],
        readers: Sequence[Reader],
        settings: RunSettings,
        store: Store,
        progress: Progress,
    ) -> None:
        self.model, self.readers, self.settings, self.store, self.progress = model, readers, settings, store, progress
        self.batch = settings.batch or (4 if model.model.device.type == "cpu" else 16)
        self.units = list(_units(tasks, items, self.batch * BLOCK_CALLS))
        wanted = [(r.name, t.name, i.id) for r in readers for entries in self.units for t, i in entries]
        self.total = len(wanted)
        self.finished = sum(store.has(*key) for key in wanted)
        self.begun, self.begun_with = time.monotonic(), self.finished
        self.call_at, self.longest = self.begun, 0.0
        self.note = ""

    def run(self) -> Evaluation:
        """Run; always write ``results.json`` at the end."""
        if self.finished:
            self.progress.say(f"going on: {self.finished} of {self.total} items are finished in {self.store.folder}.")
        status = "complete"
        try:
            if self.settings.share is None:
                for entries in self.units:
                    self._unit(entries, self.readers)
            else:
                self._share(self.settings.share)
        except _SpentError:
            spent = time.monotonic() - self.begun
            self.progress.say(f"{spent:.0f} s of {self.settings.budget:.0f} s are spent: no further call.")
            status = "budget"
        except KeyboardInterrupt:
            if not self.store.lines:
                raise
            self.progress.say("interrupted: what was finished is kept; the same command goes on with it.")
            status = "interrupted"
        except KVError:
            with contextlib.suppress(KVError):  # show the first error
                self._results("interrupted")
            raise
        return Evaluation(self._results(status), status, self.store.folder)

    def _results(self, status: str) -> list[Row]:
        rows = summarize(self.store.run(), status)
        write_lines(self.store.folder / RESULTS, rows)
        return rows

    def _share(self, folder: Path) -> None:
        """Read what other processes have not taken: with a spec all windows, then block after block of the rest."""
        windows = [entries for entries in self.units if entries[0][1].kind == "window"]
        rest = [[entries] for entries in self.units if entries[0][1].kind != "window"]
        names: set[str] = set()
        for number, units in enumerate([windows, *rest]):
            # its own specs first: what their first cache found out is known here
            for at, reader in sorted(enumerate(self.readers), key=lambda one: one[1].name not in names):
                if taken(folder / f"{number}-{at}"):
                    names.add(reader.name)
                    for entries in units:
                        self._unit(entries, [reader])

    def _unit(self, entries: Sequence[Entry], readers: Sequence[Reader]) -> None:
        """Read one block with every spec of ``readers`` that has not finished it."""
        reference: Reference | None = None
        for reader in readers:
            pending = [(t, i) for t, i in entries if not self.store.has(reader.name, t.name, i.id)]
            if not pending:
                continue
            item = pending[0][1]
            self.note = f"{reader.name}: {', '.join(dict.fromkeys(t.name for t, _ in pending))}"
            self._show()
            if item.kind == "window":
                reference = self._window(reader, pending, reference)
                continue
            tasks = {t.name: t for t, _ in pending}
            with reader.reading():
                for done in read_answers(
                    reader, self.model.tokenizer, [i for _, i in pending], self.batch, self._begin
                ):
                    self._add(reader, tasks[done.item.task], done)
            self._notes(reader)

    def _window(self, reader: Reader, pending: Sequence[Entry], reference: Reference | None) -> Reference:
        """Read a window once for all the tasks that score it; return the uncompressed model's logits of it."""
        begun = time.monotonic()
        item = pending[0][1]
        if reference is None:
            self._begin()
            reference = uncompressed(self.model.model, torch.tensor(item.ids))
        with reader.reading():
            done = read_window(reader, item, reference, self._begin)
        seconds = time.monotonic() - begun if reader.name == UNCOMPRESSED else done.seconds
        for task, mine in pending:
            self._add(reader, task, replace(done, item=mine, seconds=seconds / len(pending)))
        self._notes(reader)
        return reference

    def _add(self, reader: Reader, task: Task, done: Done) -> None:
        line: Row = {
            "spec": reader.name,
            "task": task.name,
            "item": done.item.id,
            "group": dict(done.item.group),
            "scores": {},
            "prefill": self.settings.prefill,
            "seconds": round(done.seconds, 6),
            "bytes": done.content.nbytes if done.content else 0,
            "elements": done.content.elements if done.content else 0,
        }
        if done.output is None:
            line["error"] = done.error
            if self.store.note(reader.name, f"{task.name}: an item without a result: {done.error}"):
                self.progress.say(f"{reader.name}, {task.name}: an item without a result: {done.error}")
        else:
            line["scores"] = {name: list(score) for name, score in task.score(done.item, done.output).items()}
            if isinstance(done.output, str):
                line["output"] = done.output.strip()[:OUTPUT_CHARACTERS]
        self.store.add(line)
        self.finished += 1
        self._show()

    def _notes(self, reader: Reader) -> None:
        for text in reader.notes:
            if self.store.note(reader.name, text):
                self.progress.say(f"{reader.name}: {text}")

    def _begin(self) -> None:
        """Stop before a call that would exceed the budget if it took as long as the longest recent one."""
        now = time.monotonic()
        self.longest = max(now - self.call_at, self.longest * 0.9)
        self.call_at = now
        budget = self.settings.budget
        if budget is not None and self.finished > self.begun_with and now - self.begun + self.longest > budget:
            raise _SpentError

    def _show(self) -> None:
        made = self.finished - self.begun_with
        left = (time.monotonic() - self.begun) / made * (self.total - self.finished) if made else 0.0
        ahead = f", about {left / 60:.0f} min left" if left >= 60 else f", about {left:.0f} s left" if made else ""
        self.progress.bar(
            "evaluating", self.finished, self.total, f"{self.finished} of {self.total}{ahead}: {self.note}"
        )


def taken(mark: Path) -> bool:
    """Make the file, and with it the claim that it stands for; False if another process was first."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _units(tasks: Sequence[Task], items: Mapping[str, Sequence[Item]], size: int) -> Iterator[list[Entry]]:
    """Blocks of items, some of each task of a kind, of one prompt length where a task has lengths.

    A window is a block of its own, with every task that reads it.
    """
    windows: dict[tuple[int, ...], list[Entry]] = {}
    blocks: list[list[list[Entry]]] = []
    for task in tasks:
        entries = [(task, item) for item in items[task.name]]
        for entry in entries:
            if entry[1].kind == "window":
                windows.setdefault(entry[1].ids, []).append(entry)
        others = [entry for entry in entries if entry[1].kind != "window"]
        alike: dict[Any, list[Entry]] = {}
        for entry in others:
            alike.setdefault(entry[1].group.get("length"), []).append(entry)
        blocks.append([mine[a : a + size] for mine in alike.values() for a in range(0, len(mine), size)])
    empty: list[Entry] = []
    columns: list[list[list[Entry]]] = [list(windows.values()), *blocks]
    for row in zip_longest(*columns, fillvalue=empty):
        for kind in ("window", "answer"):
            if unit := [entry for block in row for entry in block if entry[1].kind == kind]:
                yield unit


def merge(folders: Iterable[str | Path], output: str | Path) -> list[Row]:
    """Gather runs in one folder, beside what it holds already; return the rows of its ``results.json``.

    An item that several runs have finished is taken from the first. ``KVError`` if there is no folder, or if they are
    runs of different models, seeds, devices, settings or data.
    """
    runs = [read_run(folder) for folder in folders]
    if not runs:
        raise KVError("no run to merge; pass at least one folder that `packedkv eval --output` wrote.")
    for run in runs:
        with Store(output, {key: value for key, value in run.about.items() if key != "notes"}) as store:
            for spec, texts in run.about.get("notes", {}).items():
                for text in texts:
                    store.note(spec, text)
            for line in run.lines:
                store.add(line)
    merged = read_run(output)
    done = Counter((line["spec"], line["task"]) for line in merged.lines)
    specs, planned = (UNCOMPRESSED, *merged.about["specs"]), merged.about["tasks"].items()
    whole = all(done[spec, task] >= about["items"] for spec in specs for task, about in planned)
    rows = summarize(merged, "complete" if whole else "budget")
    write_lines(merged.folder / RESULTS, rows)
    return rows
