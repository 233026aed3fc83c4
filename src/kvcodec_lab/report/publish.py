"""From a folder's rows to what people look at: JSON to commit, pages, figures."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvcodec.errors import KVError, SpecError
from kvcodec_lab.bench.record import Row, newest, read_rows

PARTS = ("decode", "encode", "prefill", "generate", "first")


def page(out: Path | None, say: Callable[[str], None], add: Path | None = None) -> list[Row]:
    """Write JSON, page and figure of a folder's rows and of those that another folder adds; returns the rows."""
    if out is None:
        raise SpecError("bench page: name the folder of the rows with --out DIR.")
    folders = [folder for folder in (out, add) if folder is not None]
    rows = [row for part in PARTS for row in _gather(part, folders, say)]
    served = _gather("serve", folders, say)
    if not rows and not served:
        raise KVError(f"bench page: {out} holds no rows ({', '.join(f'{p}.jsonl' for p in (*PARTS, 'serve'))}).")
    if rows:
        from kvcodec_lab.report.bench_page import page_html

        _write(out / "bench.html", page_html(rows), say)
        _figure(rows, out / "speed.png", say)
    if served:
        from kvcodec_lab.report import serve_page
        from kvcodec_lab.serve import tables as serve_tables

        _write(out / "serve.html", serve_page.page_html(served), say)
        for chart in serve_tables.charts(served):
            _write(out / f"serve-{chart.name}.svg", serve_page.drawing(chart) + "\n", say)
    return rows + served


def _gather(part: str, folders: Sequence[Path], say: Callable[[str], None]) -> list[Row]:
    """Return the current rows of a part in some folders; the first folder's JSON is written again from them."""
    files = [folder / f"{part}{end}" for folder in folders for end in (".json", ".jsonl")]
    rows = newest([row for path in files if path.is_file() for row in read_rows([path])])
    if rows and any(path.is_file() for path in files[1:]):
        # a row to a line: thousands of rows are committed
        _write(folders[0] / f"{part}.json", "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", say)
    return rows


def _write(path: Path, text: str, say: Callable[[str], None]) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVError(f"cannot write {path}: {error.strerror or error}; pass another folder.") from error
    say(f"written: {path}")


def _figure(rows: Iterable[Row], path: Path, say: Callable[[str], None]) -> None:
    from kvcodec.errors import UnsupportedError
    from kvcodec_lab.bench.summary import speed_points
    from kvcodec_lab.report.plot import speed_figure

    points = speed_points(list(rows))
    if not points:
        return
    try:
        speed_figure(points, path)
    except UnsupportedError as error:  # no matplotlib on the machine of the GPU: the page has its own drawing
        say(str(error))
        return
    say(f"written: {path}")
