"""The shell of every page, and its elements: sections, tables, figures, definitions.

A page is one self-contained file with its styles, script and data; a content security policy lets the browser fetch
nothing and run only this script. All text is escaped: content of files and models is shown, never executed.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as _escape
from importlib import resources
from typing import Any

from kvcodec.cli.page import svg
from kvcodec.cli.page.figures import style_of
from kvcodec.cli.page.rows import UNCOMPRESSED

HINT = "Touch a dot, or point at it, for its numbers."
BITS_ARE_BYTES = "Bits are bytes: every figure of size is measured from the tensors held."


def escape(x: object) -> str:
    """Text for HTML and for an attribute."""
    return _escape(str(x))


@dataclass(frozen=True)
class Section:
    """A part of a page: heading, HTML, and an id if it is linked to."""

    heading: str
    body: str
    id: str = ""

    def __str__(self) -> str:
        """Return it as HTML."""
        name = f' id="{self.id}"' if self.id else ""
        return f"<section{name}><h2>{escape(self.heading)}</h2>{self.body}</section>"


def page(
    title: str,
    sections: Iterable[Section | str],
    *,
    subtitle: str = "",
    top: str = "",
    footer: str = "",
    script: str = "",
    data: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return a page as one text.

    Parameters
    ----------
    title, subtitle : str
        Plain text.
    sections : iterable of Section or str
        A str is HTML; an empty one is left out. Sections with an id are listed under ``top``.
    top : str
        HTML under the title: warnings, the answer.
    footer : str
        Plain text.
    script : str
        Name of a file beside this one; empty: the page runs nothing.
    data : mapping
        By id, what the script reads.
    """
    code = _file(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    parts = list(sections)
    linked = [part for part in parts if isinstance(part, Section) and part.id]
    links = "".join(f'<a href="#{part.id}">{escape(part.heading)}</a>' for part in linked)
    held = (
        f'<script type="application/json" id="{name}">{_data(value)}</script>' for name, value in (data or {}).items()
    )
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; {allowed}base-uri 'none'; form-action 'none'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{_file('page.css')}{svg.style_sheet()}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>{paragraph(subtitle, 'soft') if subtitle else ''}</header>",
        "<main>",
        top,
        f"<nav aria-label='sections'>{links}</nav>" if links else "",
        *map(str, parts),
        "</main>",
        f"<footer>{escape(footer)}</footer>" if footer else "",
        *held,
        f"<script>{code}</script>" if script else "",
        "</body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _file(name: str) -> str:
    return resources.files("kvcodec_lab.report").joinpath(name).read_text(encoding="utf-8")


def _data(value: Any) -> str:
    """JSON that is safe in a script element: no tag can end it."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def listing(texts: Iterable[str]) -> str:
    """A list of plain texts; empty without any."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def definitions(pairs: Iterable[tuple[object, Any]]) -> str:
    """Names and what they are; empty values are left out."""
    items = "\n".join(
        f"<dt>{escape(k)}</dt><dd>{escape(plain(v))}</dd>" for k, v in pairs if v is not None and v not in ("", {}, [])
    )
    return f"<dl>\n{items}\n</dl>" if items else ""


def plain(value: Any) -> str:
    """A value of a result file in words.

    >>> plain({"window_tokens": 512, "lengths": [1, 2], "factor": 0.5})
    'window tokens 512; lengths 1, 2; factor 0.5'
    """
    if isinstance(value, Mapping):
        return "; ".join(f"{str(k).replace('_', ' ')} {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(v) for v in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A column: heading, what it means, and its key where the script has to find it."""

    text: str
    meaning: str = ""
    key: str = ""


@dataclass(frozen=True)
class Cell:
    """Text, its sort key, smaller text after it, a class, and the spec whose marker precedes it."""

    text: str
    value: float | None = None
    small: str = ""
    kind: str = ""
    spec: str = ""


def table(
    heads: Sequence[Head | str], lines: Sequence[Sequence[Cell | str]], *, name: str = "", sort: bool = False
) -> str:
    """A table; the first cell of a line is the line's heading.

    Parameters
    ----------
    heads : sequence of Head or str
    lines : sequence of sequence of Cell or str
    name : str
        For screen readers.
    sort : bool
        Columns sort by their headings, by mouse and keyboard; the row of the uncompressed model stays on top. Every
        cell has its unrounded number (``data-v``), by which the script sorts.
    """
    head = "".join(_head(h if isinstance(h, Head) else Head(h), sort) for h in heads)
    body = [([c if isinstance(c, Cell) else Cell(c) for c in line]) for line in lines]
    region = f' role="region" tabindex="0" aria-label="{escape(name)}"' if name else ""
    fixed = [line for line in body if sort and line[0].spec == UNCOMPRESSED]
    above = f"<tbody>{''.join(_line(line, sort) for line in fixed)}</tbody>" if fixed else ""
    rows = "\n".join(_line(line, sort) for line in body if line not in fixed)
    begin = "<table>"
    if sort:
        begin = f'<table class="sort"><caption class="hidden">{escape(name)}; a heading sorts by its column</caption>'
    return (
        f'<div class="scroll"{region}>{begin}<thead><tr>{head}</tr></thead>{above}\n'
        f"<tbody class=rows>\n{rows}\n</tbody></table></div>"
    )


def _head(head: Head, sort: bool) -> str:
    told = f' title="{escape(head.meaning)}"' if head.meaning else ""
    key = f" data-key={head.key}" if head.key else ""
    text = escape(head.text)
    if sort:
        text = f'<button type="button">{text}<span class="arrow" aria-hidden="true"></span></button>'
    return f'<th scope="col"{told}{key}>{text}</th>'


def _line(cells: Sequence[Cell], sort: bool = False) -> str:
    first, *others = cells
    begin, row = "<tr>", '<th scope="row">'
    if sort:
        begin, row = f'<tr data-spec="{escape(first.spec)}">', f'<th scope="row" data-v="{escape(first.text)}">'
    parts = [begin, row, _content(first), "</th>"]
    for cell in others:
        value = f' data-v="{"" if cell.value is None else repr(cell.value)}"' if sort else ""
        parts.append(f"<td{value}{f' class={cell.kind}' if cell.kind else ''}>{_content(cell)}</td>")
    return "".join([*parts, "</tr>"])


def _content(cell: Cell) -> str:
    small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
    if not cell.spec:
        return f"{escape(cell.text)}{small}"
    # a narrow column may break a spec between its options
    return f"{swatch(cell.spec)}{escape(cell.text).replace(':', ':<wbr>').replace(',', ',<wbr>')}{small}"


# -- figures -----------------------------------------------------------------------------------------------------------


def swatch(spec: str) -> str:
    """The marker of a spec's method."""
    drawn = svg.marker(style_of("dense" if spec == UNCOMPRESSED else spec))
    return f'<svg class="swatch" viewBox="-7 -7 14 14" aria-hidden="true">{drawn}</svg>'


def legend(specs: Sequence[str]) -> str:
    """Marks of the specs' methods, those that look alike together."""
    kinds: dict[str, list[str]] = {}
    for spec in specs:
        kinds.setdefault(swatch(spec), []).append(spec)
    items = "".join(f"<li>{drawn}{escape(', '.join(names))}</li>" for drawn, names in kinds.items())
    return f'<ul class="legend" aria-label="marks">{items}</ul>'


def touched(drawn: str, title: str, note: str = "") -> str:
    """A drawing with its title, a line for the point that is pointed at, and what is not in it."""
    below = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<figure class="plot"><h3>{escape(title)}</h3>{drawn}<figcaption><p class="near" data-hint="{HINT}" '
        f'aria-hidden="true">{HINT}</p>{below}</figcaption></figure>'
    )


def drawings(drawn: Sequence[str]) -> str:
    """Fully labelled drawings, side by side; empty without any."""
    return f'<figure class="drawings light">{"".join(drawn)}</figure>' if drawn else ""
