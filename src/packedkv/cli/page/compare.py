"""The page of ``packedkv compare`` and ``demo``: their rows as a picture and one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packedkv.cli.page import figures, html, svg
from packedkv.cli.page.html import Cell, Head, Section, escape
from packedkv.cli.page.rows import UNCOMPRESSED, write_whole
from packedkv.cli.page.tables import Row, cell, columns_of, with_reference
from packedkv.cli.page.words import agreement

SVG_NAME, HTML_NAME = "quality.svg", "report.html"
DETAILS_FIRST = ("model", "text", "windows", "prefill", "protocol", "device", "versions", "seconds")
ELSEWHERE = ("title", "recommendation", "prompt", "partial")


def write_report(rows: Sequence[Row], out_dir: Path, meta: Mapping[str, Any]) -> list[Path]:
    """Write ``quality.svg`` and ``report.html`` into ``out_dir``; return the files, no picture without a point.

    Rows are those of ``packedkv compare``. ``title``, ``recommendation`` and ``prompt`` of ``meta`` have places of
    their own; everything else is listed under *How it was measured*.
    """
    out_dir = Path(out_dir)
    picture, page = out_dir / SVG_NAME, out_dir / HTML_NAME
    about = [str(meta[k]) for k in ("model", "text") if meta.get(k)]
    plot = figures.quality(rows, " on ".join(about) or str(meta.get("title", "quality over effective bits")))
    plots = [plot] if plot.points else []
    if plots:
        write_whole(picture, svg.standalone(svg.draw(plot)))
    write_whole(page, page_html(with_reference(rows), meta, plots))
    return [picture, page] if plots else [page]


def page_html(rows: Sequence[Row], meta: Mapping[str, Any], plots: Sequence[figures.Plot]) -> str:
    """Return the page as one text."""
    top = ""
    if meta.get("partial") or any(r.get("partial") for r in rows):
        told = "The run was interrupted: rows in italics cover only the windows finished by then."
        top += html.paragraph(told, "lead")
    if meta.get("recommendation"):
        top += html.paragraph(str(meta["recommendation"]), "lead")
    columns = columns_of(rows)
    sections = [
        Section("Results", _table(rows)),
        Section("Quality over effective bits", html.drawings(plots)) if plots else "",
        _continuations(rows, meta),
        Section("How it was measured", _details(rows, meta)),
        Section("What the columns mean", html.definitions((c.heading, c.meaning) for c in columns)),
    ]
    footer = f"Written by packedkv. {html.BITS_ARE_BYTES}"
    return html.page(str(meta.get("title") or "packedkv report"), sections, top=top, footer=footer)


def _table(rows: Sequence[Row]) -> str:
    columns = columns_of(rows)
    lines = []
    for row in rows:
        partial = "partial" if row.get("partial") else ""
        first, *others = (cell(row, c) for c in columns)
        name = Cell(f"{first} (partial)" if partial else first, spec=str(row.get("spec")))
        lines.append([name, *(Cell(text, kind=partial) for text in others)])
    return html.table([Head(c.heading, c.meaning) for c in columns], lines, name="Results")


def _continuations(rows: Sequence[Row], meta: Mapping[str, Any]) -> Section | str:
    written = [r for r in rows if r.get("continuation")]
    if not written:
        return ""
    first = next((r for name in (UNCOMPRESSED, "dense") for r in written if r.get("spec") == name), None)
    reference = str(first["continuation"]) if first else None
    parts = []
    if meta.get("prompt"):
        parts.append(f'<p>Prompt: <span class="same">{escape(meta["prompt"])}</span></p>')
    if first is not None:
        parts.append(
            f"<p>Greedy decoding; what agrees with <b>{escape(first['spec'])}</b> is grey, "
            f"from the first difference on it is not.</p>"
        )
    parts.append('<div class="pairs">')
    for row in written:
        text = str(row["continuation"])
        same = 0 if row is first else agreement(text, reference or "")
        shown = f'<span class="same">{escape(text[:same])}</span>{escape(text[same:])}'
        parts.append(f'<div class="pair"><b>{escape(row["spec"])}</b><p>{shown}</p></div>')
    return Section("One continuation, side by side", "\n".join([*parts, "</div>"]))


def _details(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    shown: dict[str, Any] = {k: v for k, v in meta.items() if k not in ELSEWHERE}
    for key in ("windows", "prefill"):  # said by the rows; the same for all of them or listed
        if key not in shown and (values := dict.fromkeys(str(r[key]) for r in rows if r.get(key) is not None)):
            shown[key] = ", ".join(values)
    order = [k for k in DETAILS_FIRST if k in shown] + [k for k in shown if k not in DETAILS_FIRST]
    return html.definitions((k.replace("_", " "), shown[k]) for k in order)
