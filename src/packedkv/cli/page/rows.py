"""Result files, read and checked before anything is shown; nothing here knows how the numbers were measured.

Every file holds rows: objects with some of the fields of ``FIELDS``, and others of its command. A file is a list of
rows, an object with ``rows``, or lines of one row each (``.jsonl``). A missing field is None; one of a wrong type is an
error that names the file. The folder of ``packedkv eval`` also has ``run.json``, about the whole run, and
``items.jsonl``.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packedkv.errors import FormatError, check_former_name

Json = dict[str, Any]

TEXT, NUMBER, OBJECT = "a text", "a number", "an object"
FIELDS = {
    **dict.fromkeys(("spec", "task", "metric", "unit", "shape", "status", "form", "backend", "cache", "load"), TEXT),
    **dict.fromkeys(("model", "text", "prefill", "better", "gpu", "device", "commit", "run", "continuation"), TEXT),
    **dict.fromkeys(("effective_bits", "key_bits", "value_bits", "cache_bytes", "ratio_to_16bit", "seed"), NUMBER),
    **dict.fromkeys(("value", "low", "high", "items", "count", "planned", "failed", "seconds"), NUMBER),
    **dict.fromkeys(("difference", "difference_low", "difference_high"), NUMBER),
    **dict.fromkeys(("perplexity", "kl", "kl_se", "top1_agreement", "attention_error", "tokens_per_s"), NUMBER),
    **dict.fromkeys(("values", "group", "versions", "sizes", "uncompressed", "server"), OBJECT),
}
"""Types of the fields of a row, the same in every file; any may be null or missing.

``spec`` of ``model`` (or of a kernel at ``shape``) has for ``metric`` in ``unit`` a ``value`` with the interval ``low``
to ``high``, or ``values`` by name (``p20``, ``p50``, ``p80``); null with a ``status`` where nothing was measured. Rows
of ``packedkv compare`` have a field per metric instead. ``gpu``, ``versions``, ``commit``, ``seed`` and ``run`` (its
start) are the provenance of a row.
"""
IS = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    OBJECT: lambda value: isinstance(value, dict),
}

FORMAT, VERSION = "packedkv-eval", 1
RUN, ITEMS, RESULTS = "run.json", "items.jsonl", "results.json"
SENSITIVITY, ADVICE = "sensitivity.jsonl", "advice.json"
TIMES = ("decode.json", "decode.jsonl")
UNCOMPRESSED = "(uncompressed)"
NUMBERS = tuple(name for name, kind in FIELDS.items() if kind == NUMBER)


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, anything else as an empty one: ``run.json`` may be older or newer than this."""
    return value if isinstance(value, Mapping) else {}


# -- files of rows -----------------------------------------------------------------------------------------------------


def read_rows(paths: Iterable[str | Path], needed: Sequence[str] = ("spec",)) -> list[Json]:
    """Rows of result files, in order.

    Parameters
    ----------
    paths : iterable of path
        ``.json``: a list of rows, an object with ``rows``, or one row; ``.jsonl``: a row to a line.
    needed : sequence of str
        Fields that every row must have.
    """
    rows: list[Json] = []
    for path in map(Path, paths):
        if path.suffix == ".jsonl":
            found: Any = _read_lines(path, _read_bytes(path, "pass a file of results"))
        else:
            found = _read_json(path, "pass a file of results")
            found = found.get("rows", [found]) if isinstance(found, dict) else found
        if not isinstance(found, list):
            raise FormatError(f"{path} holds no rows: a list, or an object with rows; pass a file of results.")
        rows += [checked(path, at, row, needed) for at, row in enumerate(found, 1)]
    return rows


def checked(path: Path, at: int, row: Any, needed: Sequence[str] = (), again: str = "measure it again") -> Json:
    """Return a row whose fields are what ``FIELDS`` says."""
    if not isinstance(row, dict):
        raise FormatError(f"{path}, row {at} is damaged: {_short(row)} is no object; {again}.")
    missing = [name for name in needed if row.get(name) is None]
    if missing:
        raise FormatError(f"{path}, row {at} is damaged: it has no {' and no '.join(missing)}; {again}.")
    for name, value in row.items():
        kind = FIELDS.get(name)
        if kind is not None and value is not None and not IS[kind](value):
            raise FormatError(f"{path}, row {at} is damaged: {name} is {_short(value)}, not {kind}; {again}.")
    return row


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read_bytes(path: Path, otherwise: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path.parent} holds no {path.name} ({error.strerror or error}): {otherwise}.") from error


def _read_json(path: Path, otherwise: str) -> Any:
    data = _read_bytes(path, otherwise)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}); it was cut or altered.") from error


def _read_lines(path: Path, data: bytes) -> list[Any]:
    """JSON of each line; a truncated last line, left by a killed process, is ignored."""
    found = []
    for at, raw in enumerate(data.splitlines(keepends=True), 1):
        try:
            found.append(json.loads(raw))
        except ValueError as error:
            if not raw.endswith(b"\n"):
                break
            raise FormatError(f"{path}, line {at} is damaged ({error}); remove that line.") from error
    return found


def runs_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Runs of the rows by their start: machine, commit, seed and versions."""
    runs: dict[str, str] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in mapping(row.get("versions")).items())
        runs[str(row.get("run"))] = f"{row.get('gpu')}; commit {row.get('commit')}; seed {row.get('seed')}; {versions}"
    return runs


def read_times(folder: Path) -> list[Json]:
    """Rows of ``packedkv bench decode`` in a folder."""
    found = [folder / name for name in TIMES if (folder / name).is_file()]
    if not found:
        raise FormatError(f"{folder} holds neither {' nor '.join(TIMES)}; pass the --out of `packedkv bench decode`.")
    rows = [row for row in read_rows(found, needed=()) if {"spec", "metric", "shape", "effective_bits"} <= row.keys()]
    if not rows:
        raise FormatError(f"{folder} holds no rows of `packedkv bench decode`.")
    return rows


# -- the folder of an eval run -----------------------------------------------------------------------------------------


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
        """Return a number of ``NUMBERS``; None where the row has none."""
        return self.numbers[key]


@dataclass(frozen=True)
class Results:
    """A folder, read.

    Parameters
    ----------
    about : mapping
        ``run.json``.
    answers : list of mapping
        Lines of ``items.jsonl`` that hold an answer.
    windows : list of mapping
        Those of windows of a text, which have scores and no answer.
    unsummarised : int
        Finished items that ``results.json`` does not count, because the run continued after it was written.
    """

    folder: Path
    about: Json
    rows: list[Row]
    answers: list[Json] = field(default_factory=list)
    windows: list[Json] = field(default_factory=list)
    unsummarised: int = 0

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

    def window_scores(self, task: str, metric: str) -> dict[str, dict[str, tuple[float, float]]]:
        """Spec -> window -> (sum, count) of a metric, of the windows that have one."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for line in self.windows:
            score = mapping(line.get("scores")).get(metric)
            if line["task"] == task and isinstance(score, list) and len(score) == 2:
                found.setdefault(line["spec"], {})[line["item"]] = float(score[0]), float(score[1])
        return found

    @cached_property
    def _whole(self) -> dict[tuple[str, str, str], Row]:
        return {(r.task, r.metric, r.spec): r for r in reversed(self.rows) if r.group is None}


def read_folder(folder: str | Path) -> Results:
    """Read and check a results folder; nothing is written."""
    path = Path(folder)
    if not path.is_dir():
        raise FormatError(f"{path} is no folder; pass the one that `packedkv eval --output` wrote.")
    about = _read_json(path / RUN, "pass the folder that `packedkv eval --output` wrote")
    mark = about.get("format") if isinstance(about, dict) else None
    check_former_name(path / RUN, (mark,), FORMAT, f'set its "format" to "{FORMAT}"')
    if mark != FORMAT:
        raise FormatError(f"{path / RUN} is not that of a packedkv eval run; pass the folder that --output named.")
    if about.get("version") != VERSION:
        raise FormatError(
            f"{path / RUN} has version {about.get('version')}, this packedkv reads version {VERSION}; update packedkv."
        )
    again = "the run was stopped hard or still goes on; give the same `packedkv eval` again: it keeps what is finished"
    data = _read_json(path / RESULTS, again)
    found = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise FormatError(f"{path / RESULTS} holds no rows; give the same `packedkv eval` again, it writes them anew.")
    needed, run = ("spec", "task", "metric"), "run `packedkv eval` again"
    rows = [_row(checked(path / RESULTS, at, raw, needed, run)) for at, raw in enumerate(found, 1)]
    if not any(row.group is None for row in rows):
        raise FormatError(
            f"{path / RESULTS} has no result yet: no item was finished. Give the same `packedkv eval` again."
        )
    lines = _read_items(path / ITEMS)
    answers = [x for x in lines if isinstance(x.get("output"), str)]
    windows = [x for x in lines if not isinstance(x.get("output"), str) and not x.get("error")]
    return Results(path, about, rows, answers, windows, _beyond(rows, lines))


def _row(raw: Json) -> Row:
    better: Literal["lower", "higher"] = "lower" if raw.get("better") == "lower" else "higher"
    numbers = {name: number(raw.get(name)) for name in NUMBERS}
    prefill, status = str(raw.get("prefill") or ""), str(raw.get("status") or "")
    return Row(raw["spec"], raw["task"], raw["metric"], raw.get("group") or None, numbers, better, prefill, status)


def _read_items(path: Path) -> list[Json]:
    """Lines of finished items, each item once, compressed or not."""
    packed = path.with_name(f"{path.name}.gz")
    if packed.is_file() and not path.is_file():
        try:
            data = gzip.decompress(_read_bytes(packed, "it was removed"))
        except (EOFError, OSError) as error:
            raise FormatError(f"{packed} is damaged ({error}); it was cut or altered.") from error
    else:
        data = _read_bytes(path, "it was removed")
    found: dict[tuple[str, str, str], Json] = {}
    for at, line in enumerate(_read_lines(path, data), 1):
        try:
            found.setdefault((line["spec"], line["task"], line["item"]), line)
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{path}, line {at} is damaged ({error}); remove that line, and run the eval again."
            ) from error
    return list(found.values())


def _beyond(rows: list[Row], lines: list[Json]) -> int:
    """Finished items that no row counts."""
    finished = Counter((x["spec"], x["task"]) for x in lines if not x.get("error"))
    counted: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.group is None:
            key = row.spec, row.task
            counted[key] = max(counted.get(key, 0), row["items"] or 0)
    return int(sum(max(n - counted.get(key, 0), 0) for key, n in finished.items()))


# -- further files ------------------------------------------------------------------------------------------


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
        found = [path / name for name in (ADVICE, SENSITIVITY) if (path / name).is_file()]
        if not found:
            raise FormatError(f"{path} holds neither {ADVICE} nor {SENSITIVITY}; pass the folder of `packedkv advise`.")
        path = found[0]
    if path.suffix == ".jsonl":
        lines = _read_lines(path, _read_bytes(path, "pass what `packedkv advise` wrote"))
        if any(not isinstance(line, dict) for line in lines):
            raise FormatError(f"{path} is damaged: a line is no object; pass what `packedkv advise` wrote.")
        model = next((str(x["model"]) for x in lines if "model" in x), "")
        return Layers([x for x in lines if "layer" in x and _is_layer(path, x, "kl")], [], model)
    data = _read_json(path, "pass what `packedkv advise` wrote")
    if not isinstance(data, dict) or not isinstance(data.get("sensitivity"), list):
        raise FormatError(f"{path} holds no sensitivity rows; pass what `packedkv advise` wrote.")
    rows = [x for x in data["sensitivity"] if _is_layer(path, x, "kl")]
    held = data.get("keys")
    keys = [x for x in (held if isinstance(held, list) else []) if _is_layer(path, x, "worst_head_ratio")]
    return Layers(rows, keys, str(data.get("model", "")))


def _is_layer(path: Path, row: Any, value: str) -> bool:
    """Whether a row has a value: non-finite ones are null, and not drawn."""
    if not isinstance(row, dict) or not isinstance(row.get("layer"), int):
        raise FormatError(f"{path} holds a row without a layer; pass what `packedkv advise` wrote.")
    return number(row.get(value)) is not None
