"""Folders of ``packedkv eval``, ``bench decode`` and ``advise``, read and checked before a page is made of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packedkv.cli.page.rows import (
    FIELDS,
    NUMBER,
    UNCOMPRESSED,
    Json,
    checked,
    number,
    read_bytes,
    read_json,
    read_json_lines,
    read_rows,
)
from packedkv.errors import FormatError
from packedkv_lab.eval.store import ITEMS, RESULTS, read_run

SENSITIVITY, ADVICE = "sensitivity.jsonl", "advice.json"
TIMES = ("decode.json", "decode.jsonl")
NUMBERS = tuple(name for name, kind in FIELDS.items() if kind == NUMBER)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, anything else as an empty one: ``run.json`` may be older or newer than this."""
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class Row:
    """One row of ``results.json``: a metric of a spec on a task, or on one cell (``group``) of its grid."""

    spec: str
    task: str
    metric: str
    group: Mapping[str, Any] | None
    numbers: Mapping[str, float | None]
    better: Literal["lower", "higher"]
    prefill: str
    status: str

    def __getitem__(self, key: str) -> float | None:
        return self.numbers[key]


@dataclass(frozen=True)
class Results:
    """A folder, read: ``run.json``, rows, and the lines of ``items.jsonl`` that hold an answer.

    ``unsummarised`` items are finished and not counted by ``results.json``, because the run continued after it was
    written.
    """

    about: Json
    rows: list[Row]
    answers: list[Json]
    unsummarised: int

    @property
    def tasks(self) -> list[str]:
        """Tasks with a row, in the run's order."""
        return list(dict.fromkeys(row.task for row in self.rows))

    @property
    def specs(self) -> list[str]:
        """Specs with a row, in the run's order; the uncompressed model is not among them."""
        return [s for s in dict.fromkeys(row.spec for row in self.rows) if s != UNCOMPRESSED]

    def metrics(self, task: str) -> list[str]:
        """Metrics of a task, the main one first."""
        return list(dict.fromkeys(row.metric for row in self.rows if row.task == task))

    def row(self, task: str, metric: str, spec: str) -> Row | None:
        """Return the row of a whole task."""
        return self._whole.get((task, metric, spec))

    def cells(self, task: str, metric: str) -> list[Row]:
        """Rows of the task's grid."""
        return [r for r in self.rows if r.group and (r.task, r.metric) == (task, metric)]

    def metric_text(self, task: str, metric: str) -> str:
        """The run's description of a metric; empty if there is none."""
        about = mapping(mapping(mapping(self.about.get("tasks")).get(task)).get("metrics")).get(metric)
        return str(mapping(about).get("text", ""))

    @cached_property
    def _whole(self) -> dict[tuple[str, str, str], Row]:
        return {(r.task, r.metric, r.spec): r for r in reversed(self.rows) if r.group is None}


def read_folder(folder: str | Path) -> Results:
    """Read and check the folder of ``packedkv eval``; nothing is written."""
    path = Path(folder)
    run = read_run(path)
    again = "the run was stopped hard or still goes on; give the same `packedkv eval` again: it keeps what is finished"
    data = read_json(path / RESULTS, again)
    entries = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise FormatError(f"{path / RESULTS} holds no rows; give the same `packedkv eval` again, it writes them anew.")
    needed = ("spec", "task", "metric")
    rows = [
        _row(checked(path / RESULTS, at, raw, needed, "run `packedkv eval` again")) for at, raw in enumerate(entries, 1)
    ]
    if not any(row.group is None for row in rows):
        raise FormatError(
            f"{path / RESULTS} has no result yet: no item was finished. Give the same `packedkv eval` again."
        )
    if not (path / ITEMS).is_file():
        raise FormatError(f"{path} holds no {ITEMS}: it was removed.")
    answers = [line for line in run.lines if isinstance(line.get("output"), str)]
    return Results(run.about, rows, answers, _beyond(rows, run.lines))


def _row(raw: Json) -> Row:
    better: Literal["lower", "higher"] = "lower" if raw.get("better") == "lower" else "higher"
    numbers = {name: number(raw.get(name)) for name in NUMBERS}
    prefill, status = str(raw.get("prefill") or ""), str(raw.get("status") or "")
    return Row(raw["spec"], raw["task"], raw["metric"], raw.get("group") or None, numbers, better, prefill, status)


def _beyond(rows: list[Row], lines: list[Json]) -> int:
    """Finished items that no row counts."""
    finished = Counter((x["spec"], x["task"]) for x in lines if not x.get("error"))
    counted: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.group is None:
            key = row.spec, row.task
            counted[key] = max(counted.get(key, 0), row["items"] or 0)
    return int(sum(max(n - counted.get(key, 0), 0) for key, n in finished.items()))


# -- other folders -----------------------------------------------------------------------------------------------------


def runs_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Runs of the rows by their start: machine, commit, seed and versions."""
    runs: dict[str, str] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in mapping(row.get("versions")).items())
        runs[str(row.get("run"))] = f"{row.get('gpu')}; commit {row.get('commit')}; seed {row.get('seed')}; {versions}"
    return runs


def read_times(folder: Path) -> list[Json]:
    """Rows of ``packedkv bench decode`` in a folder."""
    files = [folder / name for name in TIMES if (folder / name).is_file()]
    if not files:
        raise FormatError(f"{folder} holds neither {' nor '.join(TIMES)}; pass the --out of `packedkv bench decode`.")
    rows = [row for row in read_rows(files, needed=()) if {"spec", "metric", "shape", "effective_bits"} <= row.keys()]
    if not rows:
        raise FormatError(f"{folder} holds no rows of `packedkv bench decode`.")
    return rows


@dataclass(frozen=True)
class Layers:
    """Per-layer figures of ``packedkv advise``: ``sensitivity`` (layer, role, spec, kl) and ``keys`` (layer, ratio)."""

    sensitivity: list[Json]
    keys: list[Json]
    model: str = ""


def read_layers(place: str | Path) -> Layers:
    """Read ``advice.json`` or ``sensitivity.jsonl``, or the folder that holds one of them."""
    path = Path(place)
    if path.is_dir():
        files = [path / name for name in (ADVICE, SENSITIVITY) if (path / name).is_file()]
        if not files:
            raise FormatError(f"{path} holds neither {ADVICE} nor {SENSITIVITY}; pass the folder of `packedkv advise`.")
        path = files[0]
    if path.suffix == ".jsonl":
        lines = read_json_lines(path, read_bytes(path, "pass what `packedkv advise` wrote"))
        if any(not isinstance(line, dict) for line in lines):
            raise FormatError(f"{path} is damaged: a line is no object; pass what `packedkv advise` wrote.")
        model = next((str(x["model"]) for x in lines if "model" in x), "")
        return Layers([x for x in lines if "layer" in x and _is_layer(path, x, "kl")], [], model)
    data = read_json(path, "pass what `packedkv advise` wrote")
    if not isinstance(data, dict) or not isinstance(data.get("sensitivity"), list):
        raise FormatError(f"{path} holds no sensitivity rows; pass what `packedkv advise` wrote.")
    rows = [x for x in data["sensitivity"] if _is_layer(path, x, "kl")]
    entries = data.get("keys")
    keys = [x for x in (entries if isinstance(entries, list) else []) if _is_layer(path, x, "worst_head_ratio")]
    return Layers(rows, keys, str(data.get("model", "")))


def _is_layer(path: Path, row: Any, value: str) -> bool:
    """Whether a row has a value: non-finite ones are null, and not drawn."""
    if not isinstance(row, dict) or not isinstance(row.get("layer"), int):
        raise FormatError(f"{path} holds a row without a layer; pass what `packedkv advise` wrote.")
    return number(row.get(value)) is not None
