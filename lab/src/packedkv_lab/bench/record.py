"""Rows of a bench, one line of JSON each, written as measured, with provenance; ratios are always within one ``run``.

Where nothing was timed, ``values`` is null and ``status`` says why: ``no kernel: ...``, ``failed its gate: ...``.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from packedkv.cli.measure.rows import append_line, resumed_lines
from packedkv.cli.page.rows import checked
from packedkv.errors import KVError, UnsupportedError
from packedkv_lab.bench import timing

Row = dict[str, Any]


def require_gpu(what: str, device: str) -> torch.device:
    """Return the device; ``UnsupportedError`` if it is not an available CUDA device."""
    if device.split(":")[0] != "cuda":
        raise UnsupportedError(
            f"bench {what} times kernels on a GPU; pass --device cuda. On a CPU: packedkv bench cache, or bench codec."
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench {what}: torch finds no CUDA device here; packedkv bench codec needs none.")
    return torch.device(device)


class GateError(KVError):
    """A result that is checked before timing is wrong."""


class DeviceLostError(KVError):
    """A kernel broke the CUDA context: only a new process can continue."""


def device_lost(device: torch.device) -> bool:
    """Whether an error before left the device unusable."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def status_of(error: Exception) -> str:
    """Return what a row says of an error in place of values."""
    if isinstance(error, GateError):
        return f"failed its gate: {error}"
    if isinstance(error, UnsupportedError):
        return f"no kernel: {error}"
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    word = "not available" if isinstance(error, ImportError) else "failed"
    return f"{word}: {_named(error)}"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


class Recorder:
    """Rows in a file, appended one by one, and what all benches of a run share.

    Rows that the ``.jsonl`` file ``path`` holds count as done; without a path, rows are only returned. ``common`` is
    added to every row, and ``say`` gets a line of text per row. Nothing is started ``deadline`` seconds after the
    recorder was made. ``libraries``: whether other libraries are timed as well.
    """

    def __init__(
        self,
        path: Path | None,
        common: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        deadline: float | None = None,
        libraries: bool = True,
    ) -> None:
        self.path, self.common, self.say = path, common, say
        self.device, self.seed, self.libraries = torch.device(device), seed, libraries
        self.end = math.inf if deadline is None else time.monotonic() + deadline
        self.rows: list[Row] = []
        if path is not None and path.is_file():
            self.rows = [checked(path, at, row, ("spec",)) for at, row in enumerate(resumed_lines(path), 1)]
        self.begun = len(self.rows)

    @cached_property
    def timer(self) -> "timing.Timer":
        """The timer of a GPU; made on first use, because its buffer is large."""
        return timing.Timer(self.device)

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.end

    def late(self, before: str) -> bool:
        """Whether the deadline has passed; says before what."""
        if late := self.out_of_time:
            self.say(f"out of time before {before}; run again to go on")
        return late

    def add(
        self,
        spec: str,
        bits: float | None,
        metric: str,
        unit: str,
        shape: str,
        values: Mapping[str, float] | None,
        **more: Any,
    ) -> Row:
        """Write one row and return it; ``values`` None needs a ``status``."""
        row = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit,
               "values": None if values is None else dict(values), "shape": shape, **self.common, **more}  # fmt: skip
        if values is None and "status" not in more:
            raise ValueError(f"row {spec} {metric} {shape} has neither values nor a status")
        self.rows.append(row)
        if self.path is not None:
            append_line(self.path, row)
        shown = row.get("status") if values is None else f"{values['p50']:.4g} {unit}"
        self.say(f"{shape:<18} {spec:<22} {metric:<28} {shown}")
        return row

    @contextmanager
    def case(
        self,
        spec: str,
        shape: str,
        metric: str,
        unit: str = "us",
        *,
        bits: float | None = None,
        name: str = "",
        more: Mapping[str, Any] | None = None,
    ) -> Iterator["Case"]:
        """Yield a case; an error of the block becomes a row of ``metric`` with a status, and the other cases go on."""
        case = Case(self, spec, shape, bits, dict(more or {}))
        try:
            yield case
        except Exception as error:
            lost = device_lost(self.device)
            status = f"device lost: {_named(error)}" if lost else status_of(error)
            self.add(spec, case.bits, metric, unit, shape, None, status=status, **case.more)
            if lost:
                raise DeviceLostError(f"bench: {name or spec} at {shape} broke the CUDA context.") from error

    def has(self, spec: str, metric: str, shape: str, form: str | None = None) -> bool:
        """Whether such a row was measured, in this run or an earlier one, or broke the device; others are retried."""
        return any(
            (r["spec"], r["shape"]) == (spec, shape)
            and (form is None or r.get("form") == form)
            and (r["metric"] == metric if r["values"] is not None else r["status"].startswith("device lost"))
            for r in self.rows
        )

    @property
    def new(self) -> list[Row]:
        """Rows of this run."""
        return self.rows[self.begun :]


@dataclass
class Case:
    """A spec at a shape, and what all of its rows say."""

    recorder: Recorder
    spec: str
    shape: str
    bits: float | None
    more: dict[str, Any]

    def add(self, metric: str, unit: str, values: Mapping[str, float], **more: Any) -> None:
        """Write one row."""
        self.recorder.add(self.spec, self.bits, metric, unit, self.shape, values, **(self.more | more))


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of a row: spec, metric, shape, the shared memory that the GPU was told to have; of rivals backend and form.

    Ratios name backend and form of the fastest rival of their run; these are not part of the key.
    """
    more = () if str(row.get("metric")).startswith("speedup_") else ("backend", "form")
    return tuple(row.get(k) for k in ("spec", "metric", "shape", "shared_memory_kb", *more))


def newest(rows: Sequence[Row]) -> list[Row]:
    """One row per ``key_of``: that of the latest run, a measured one before a status."""
    by_key: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = key_of(row)
        old = by_key.get(key)
        rank = (row.get("values") is not None, row.get("run") or "")
        if old is None or rank >= (old.get("values") is not None, old.get("run") or ""):
            by_key[key] = row
    return list(by_key.values())
