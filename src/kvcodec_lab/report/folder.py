"""What a results folder says: ``run.json``, ``results.json`` and ``items.jsonl``, checked before anything is shown.

Nothing here knows how the numbers were measured. A row's fields are those that ``kvcodec eval`` writes; one that is
missing is None, one of another kind is refused with the file's name.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcodec.errors import FormatError

FORMAT, VERSION = "kvcodec-eval", 1
RUN, ITEMS, RESULTS = "run.json", "items.jsonl", "results.json"
SENSITIVITY, ADVICE = "sensitivity.jsonl", "advice.json"
UNCOMPRESSED = "(uncompressed)"

Json = dict[str, Any]
TEXTS = ("spec", "task", "metric")
NUMBERS = (
    *("value", "low", "high", "items", "count", "difference", "difference_low", "difference_high"),
    *("effective_bits", "key_bits", "value_bits", "cache_bytes", "ratio_to_16bit", "seconds", "failed", "planned"),
)


@dataclass(frozen=True)
class Row:
    """One row of ``results.json``: a metric of a spec on a task, or on one cell (``group``) of its grid."""

    spec: str
    task: str
    metric: str
    group: Mapping[str, Any] | None
    numbers: Mapping[str, float | None]
    better: str
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
    folder : Path
    about : mapping
        ``run.json``.
    rows : list of Row
    answers : list of mapping
        Lines of ``items.jsonl`` that hold an answer.
    unsummarised : int
        Finished items that ``results.json`` does not count: the run went on after it was written.
    """

    folder: Path
    about: Json
    rows: list[Row]
    answers: list[Json] = field(default_factory=list)
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

    def chance(self, task: str) -> float | None:
        """What guessing would score."""
        return number(mapping(mapping(self.about.get("tasks")).get(task)).get("chance"))

    def metric_text(self, task: str, metric: str) -> str:
        """What the run says a metric is; empty if it does not."""
        about = mapping(mapping(mapping(self.about.get("tasks")).get(task)).get("metrics")).get(metric)
        return str(mapping(about).get("text", ""))

    @property
    def _whole(self) -> dict[tuple[str, str, str], Row]:
        return {(r.task, r.metric, r.spec): r for r in reversed(self.rows) if r.group is None}


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, anything else as an empty one: ``run.json`` may be older or newer than this."""
    return value if isinstance(value, Mapping) else {}


def read_folder(folder: str | Path) -> Results:
    """Read and check a results folder; nothing is written.

    Raises
    ------
    FormatError
        It is no results folder, is newer than this version, is damaged, or holds no finished item. Names the file.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FormatError(f"{path} is no folder; pass the one that `kvcodec eval --output` wrote.")
    about = _read_json(path / RUN, "pass the folder that `kvcodec eval --output` wrote")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise FormatError(f"{path / RUN} is not that of a kvcodec eval run; pass the folder that --output named.")
    if about.get("version") != VERSION:
        raise FormatError(
            f"{path / RUN} has version {about.get('version')}, this kvcodec reads version {VERSION}; update kvcodec."
        )
    again = "the run was stopped hard or still goes on; give the same `kvcodec eval` again: it keeps what is finished"
    data = _read_json(path / RESULTS, again)
    found = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise FormatError(f"{path / RESULTS} holds no rows; give the same `kvcodec eval` again, it writes them anew.")
    rows = [_row(path / RESULTS, i, raw) for i, raw in enumerate(found, 1)]
    if not any(row.group is None for row in rows):
        raise FormatError(
            f"{path / RESULTS} has no result yet: no item was finished. Give the same `kvcodec eval` again."
        )
    lines = _read_items(path / ITEMS)
    return Results(path, about, rows, [x for x in lines if isinstance(x.get("output"), str)], _beyond(rows, lines))


def _read_json(path: Path, otherwise: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path.parent} holds no {path.name} ({error.strerror or error}): {otherwise}.") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}); it was cut or altered.") from error


def _row(path: Path, at: int, raw: Any) -> Row:
    if not isinstance(raw, dict) or any(not isinstance(raw.get(k), str) for k in TEXTS):
        raise FormatError(f"{path}, row {at} is damaged: {', '.join(TEXTS)} must be texts. Run `kvcodec eval` again.")
    group = raw.get("group")
    if group is not None and not isinstance(group, dict):
        raise FormatError(
            f"{path}, row {at} is damaged: group is neither null nor an object. Run `kvcodec eval` again."
        )
    for key in NUMBERS:
        value = raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise FormatError(f"{path}, row {at} is damaged: {key} is {value!r}, no number. Run `kvcodec eval` again.")
    numbers = {key: number(raw.get(key)) for key in NUMBERS}
    better = "lower" if raw.get("better") == "lower" else "higher"
    state = str(raw.get("prefill", "")), str(raw.get("status", ""))
    return Row(raw["spec"], raw["task"], raw["metric"], group or None, numbers, better, *state)


def _read_items(path: Path) -> list[Json]:
    """Lines of finished items, each item once, compressed or not; a last line that was left torn is passed over."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.is_file() and not path.is_file() else path.read_bytes()
    except EOFError as error:
        raise FormatError(f"{packed} is damaged ({error}); it was cut.") from error
    except OSError as error:
        raise FormatError(f"{path.parent} holds no {path.name} ({error.strerror or error}): it was removed.") from error
    found: dict[tuple[str, str, str], Json] = {}
    for at, raw in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(raw)
            found.setdefault((line["spec"], line["task"], line["item"]), line)
        except (ValueError, KeyError, TypeError) as error:
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


# -- what may stand beside it ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Per-layer figures of ``kvcodec advise``: ``sensitivity`` (layer, role, spec, kl) and ``keys`` (layer, ratio)."""

    sensitivity: list[Json]
    keys: list[Json]
    model: str = ""


def read_layers(place: str | Path) -> Layers:
    """Read ``advice.json`` or ``sensitivity.jsonl``, or the folder that holds one of them.

    Raises
    ------
    FormatError
        If there is neither, or it is damaged.
    """
    path = Path(place)
    if path.is_dir():
        found = [path / name for name in (ADVICE, SENSITIVITY) if (path / name).is_file()]
        if not found:
            raise FormatError(f"{path} holds neither {ADVICE} nor {SENSITIVITY}; pass the folder of `kvcodec advise`.")
        path = found[0]
    if path.suffix == ".jsonl":
        lines = _lines(path)
        model = next((str(x["model"]) for x in lines if "model" in x), "")
        return Layers([x for x in lines if "layer" in x and _is_layer(path, x, "kl")], [], model)
    data = _read_json(path, "pass what `kvcodec advise` wrote")
    if not isinstance(data, dict) or not isinstance(data.get("sensitivity"), list):
        raise FormatError(f"{path} holds no sensitivity rows; pass what `kvcodec advise` wrote.")
    rows = [x for x in data["sensitivity"] if _is_layer(path, x, "kl")]
    held = data.get("keys")
    keys = [x for x in (held if isinstance(held, list) else []) if _is_layer(path, x, "worst_head_ratio")]
    return Layers(rows, keys, str(data.get("model", "")))


def _lines(path: Path) -> list[Json]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} cannot be read ({error}); pass what `kvcodec advise` wrote.") from error
    lines: list[Json] = []
    for at, raw in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise FormatError(f"{path}, line {at} is damaged ({error}); remove that line.") from error
        if not isinstance(line, dict):
            raise FormatError(f"{path}, line {at} is damaged (no object); remove that line.")
        lines.append(line)
    return lines


def _is_layer(path: Path, row: Any, value: str) -> bool:
    """Whether a row has its figure: one that was not finite is null, and not drawn.

    Raises
    ------
    FormatError
        If it is no row of a layer at all.
    """
    if not isinstance(row, dict) or not isinstance(row.get("layer"), int):
        raise FormatError(f"{path} holds a row without a layer; pass what `kvcodec advise` wrote.")
    return number(row.get(value)) is not None
