"""Merge runs of several specs on the same model and items into one; and list what a run still lacks."""

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packedkv.cli.measure.rows import Row, write_lines
from packedkv.errors import KVError
from packedkv_lab.eval.scoring import UNCOMPRESSED
from packedkv_lab.eval.stats import summarize
from packedkv_lab.eval.store import ITEMS, RESULTS, RUN, Run, Store, read_run

PACKED = f"{ITEMS}.gz"
"""The published form of ``items.jsonl``."""


def merge(folders: Iterable[str | Path], output: str | Path) -> list[Row]:
    """Gather runs in one folder, beside what it holds already; return the rows of its ``results.json``.

    An item that several runs have finished (the uncompressed model's, above all) is taken from the first.

    Parameters
    ----------
    folders : iterable of path
        Written by ``packedkv eval --output``; they are not changed.

    Raises
    ------
    KVError
        If there is no folder, or they are runs of different models, seeds, devices, settings or data; the output is
        then not changed.
    FormatError
        If one is no run, or is damaged.
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
    return write_results(read_run(output))


def write_results(run: Run) -> list[Row]:
    """Write a run's ``results.json`` from its items; return the rows."""
    rows = summarize(run, "budget" if any(missing(run).values()) else "complete")
    write_lines(run.folder / RESULTS, rows)
    return rows


def missing(run: Run) -> dict[str, Counter[str]]:
    """How many items of each task every spec lacks, the uncompressed model first; tasks that are finished are left out.

    >>> about = {"specs": ["int-4"], "tasks": {"kl": {"items": 3}}}
    >>> missing(Run(Path(), about, [{"spec": "int-4", "task": "kl", "item": "a"}]))
    {'(uncompressed)': Counter({'kl': 3}), 'int-4': Counter({'kl': 2})}
    """
    done = Counter((line["spec"], line["task"]) for line in run.lines)
    planned: Mapping[str, Any] = run.about["tasks"]
    return {
        spec: +Counter({task: about["items"] - done[spec, task] for task, about in planned.items()})
        for spec in (UNCOMPRESSED, *run.about["specs"])
    }


def unfinished(run: Run) -> dict[str, dict[str, int]]:
    """As ``missing`` without the tasks that a spec has not begun, which a published run may lack.

    The uncompressed model must have all items, every other spec those of one task at least.
    """
    planned: Mapping[str, Any] = run.about["tasks"]
    left: dict[str, dict[str, int]] = {}
    for spec, lacks in missing(run).items():
        begun = {task: n for task, n in lacks.items() if n < planned[task]["items"]}
        if found := dict(lacks) if spec == UNCOMPRESSED or len(lacks) == len(planned) else begun:
            left[spec] = found
    return left


def pack(folder: str | Path, output: str | Path) -> None:
    """Write a run as it is published: ``run.json``, the rows of whole tasks, and the items compressed.

    The same run gives the same bytes. Rows of grids and positions are left out: ``unpack`` makes them again.
    """
    run, target = read_run(folder), Path(output)
    target.mkdir(parents=True, exist_ok=True)
    (target / RUN).write_bytes((run.folder / RUN).read_bytes())
    rows = summarize(run, "budget" if unfinished(run) else "complete")
    write_lines(target / RESULTS, [row for row in rows if row["group"] is None])
    (target / PACKED).write_bytes(gzip.compress((run.folder / ITEMS).read_bytes(), mtime=0))


def unpack(folder: str | Path, output: str | Path) -> Run:
    """Make a run's folder again from what ``pack`` wrote, without ``results.json``; what is there is replaced."""
    source, target = Path(folder), Path(output)
    try:
        about, items = (source / RUN).read_bytes(), gzip.decompress((source / PACKED).read_bytes())
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KVError(f"{source} holds no published run ({reason}); it needs {RUN} and {PACKED}.") from error
    target.mkdir(parents=True, exist_ok=True)
    (target / RUN).write_bytes(about)
    (target / ITEMS).write_bytes(items)
    return read_run(target)
