"""``kvcodec bench page``: write JSON, pages and figures from a folder's rows."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.rows import Json, read_rows
from kvcodec.errors import KVError, SpecError, UnsupportedError
from kvcodec_lab.bench import PARTS
from kvcodec_lab.bench.record import newest
from kvcodec_lab.bench.summary import speed_points
from kvcodec_lab.report.pages import bench, serve
from kvcodec_lab.serve.tables import charts

NEEDED = ("spec", "metric", "shape")


def page(out: Path | None, say: Callable[[str], None], add: Path | None = None) -> list[Json]:
    """Write JSON, page and figure of a folder's rows and of those that another folder adds; returns the rows."""
    if out is None:
        raise SpecError("bench page: name the folder of the rows with --out DIR.")
    folders = [folder for folder in (out, add) if folder is not None]
    rows = [row for part in PARTS for row in _gather(part, folders, say)]
    served = _gather("serve", folders, say)
    if not rows and not served:
        raise KVError(f"bench page: {out} holds no rows ({', '.join(f'{p}.jsonl' for p in (*PARTS, 'serve'))}).")
    if rows:
        _write(out / "bench.html", bench.page_html(rows), say)
        _figure(rows, out / "speed.png", say)
    if served:
        _write(out / "serve.html", serve.page_html(served), say)
        for chart in charts(served):
            _write(out / f"serve-{chart.name}.svg", serve.drawing(chart), say)
    return rows + served


def _gather(part: str, folders: Sequence[Path], say: Callable[[str], None]) -> list[Json]:
    """Return the current rows of a part in some folders; the first folder's JSON is written again from them."""
    files = [folder / f"{part}{end}" for folder in folders for end in (".json", ".jsonl")]
    rows = newest(read_rows([path for path in files if path.is_file()], NEEDED))
    if rows and any(path.is_file() for path in files[1:]):
        # one row per line, for readable diffs of committed files
        _write(folders[0] / f"{part}.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", say)
    return rows


def _write(path: Path, text: str, say: Callable[[str], None]) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVError(f"cannot write {path}: {error.strerror or error}; pass another folder.") from error
    say(f"written: {path}")


def _figure(rows: Sequence[Json], path: Path, say: Callable[[str], None]) -> None:
    points = speed_points(rows)
    if not points:
        return
    try:
        pictures.write(figures.speed(points), path)
    except UnsupportedError as error:  # without matplotlib, e.g. on a GPU machine: the page has its own drawing
        say(str(error))
        return
    say(f"written: {path}")
