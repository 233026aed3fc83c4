"""Rows of a bench, written as measured: one line of JSON each, so that a stopped run loses at most one row.

A row has the keys of every result file (``spec``, ``effective_bits``, ``metric``, ``unit``, ``values`` with p20, p50,
p80, ``shape``, ``gpu``, ``versions``, ``commit``, ``seed``), ``run`` (when the process that measured it began; ratios
are always within one run) and, where nothing was timed, ``values`` null and ``status`` saying why: ``no kernel: ...``,
``failed its gate: ...``, ``not installed``.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from packedkv.cli.page.rows import read_rows
from packedkv.errors import KVError, UnsupportedError

Row = dict[str, Any]
Values = Mapping[str, float]


def usable_device(bench: str, device: str) -> torch.device:
    """Return the device.

    Raises
    ------
    UnsupportedError
        If torch does not know it, or cannot use it.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UnsupportedError(
            f"{bench}: device {device!r} cannot be used here ({reason}); try device='cpu'."
        ) from error


def require_gpu(what: str, device: str) -> torch.device:
    """Return the device.

    Raises
    ------
    UnsupportedError
        If it is not an available CUDA device.
    """
    if device.split(":")[0] != "cuda":
        raise UnsupportedError(
            f"bench {what} times kernels on a GPU; pass --device cuda. On a CPU: packedkv bench cache, or bench codec."
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench {what}: torch finds no CUDA device here; packedkv bench codec needs none.")
    return torch.device(device)


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """20th, 50th and 80th percentile, interpolated linearly.

    >>> spread([1.0, 2.0, 3.0, 4.0, 11.0])
    {'p20': 1.8, 'p50': 3.0, 'p80': 5.4}
    """
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(list(values), dtype=torch.float64).quantile(points)
    return {name: round(float(x), digits) for name, x in zip(("p20", "p50", "p80"), found, strict=True)}


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


class Recorder:
    """Rows in a file, appended one by one.

    Parameters
    ----------
    path : Path, optional
        A ``.jsonl`` file, made if it does not exist; rows that it holds count as done. None: rows are only returned.
    common : mapping
        Added to every row.
    say : callable
        Gets a line of text per row.
    """

    def __init__(self, path: Path | None, common: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self.path, self.common, self.say = path, common, say
        self.rows: list[Row] = read_rows([path]) if path is not None and path.is_file() else []
        self.begun = len(self.rows)

    def add(
        self,
        spec: str,
        bits: float | None,
        metric: str,
        unit: str,
        shape: str,
        values: Values | None,
        **more: Any,
    ) -> Row:
        """Write one row and return it; ``values`` None needs a ``status``."""
        row = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit,
               "values": None if values is None else dict(values), "shape": shape, **more, **self.common}  # fmt: skip
        if values is None and "status" not in more:
            raise ValueError(f"row {spec} {metric} {shape} has neither values nor a status")
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        shown = row.get("status") if values is None else f"{values['p50']:.4g} {unit}"
        self.say(f"{shape:<18} {spec:<22} {metric:<28} {shown}")
        return row

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


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Key of a row: spec, metric, shape, the shared memory that the GPU was told to have; of rivals backend and form.

    Ratios name backend and form of the fastest rival of their run; these are not part of the key.
    """
    more = () if str(row.get("metric")).startswith("speedup_") else ("backend", "form")
    return tuple(row.get(k) for k in ("spec", "metric", "shape", "shared_memory_kb", *more))


def newest(rows: Sequence[Row]) -> list[Row]:
    """One row per ``key_of``: that of the latest run, a measured one before a status."""
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = key_of(row)
        old = kept.get(key)
        rank = (row.get("values") is not None, row.get("run") or "")
        if old is None or rank >= (old.get("values") is not None, old.get("run") or ""):
            kept[key] = row
    return list(kept.values())


class Deadline:
    """Seconds that a run may take, from its making.

    Parameters
    ----------
    seconds : float, optional
        None: no end.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.end is not None and time.monotonic() > self.end
