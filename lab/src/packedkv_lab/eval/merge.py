"""Merge runs of several specs on the same model and items into one."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from packedkv.cli.measure.rows import Row, write_lines
from packedkv.cli.page.rows import UNCOMPRESSED
from packedkv.errors import KVError
from packedkv_lab.eval.stats import summarize
from packedkv_lab.eval.store import RESULTS, Store, read_run


def merge(folders: Iterable[str | Path], output: str | Path) -> list[Row]:
    """Gather runs in one folder, beside what it holds already; return the rows of its ``results.json``.

    An item that several runs have finished (the uncompressed model's, above all) is taken from the first. ``KVError``
    if there is no folder, or if they are runs of different models, seeds, devices, settings or data.
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
