"""The shell of every page, and its elements: one file that fetches and runs nothing, its text escaped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as _escape
from typing import Any

from packedkv.cli.page import svg
from packedkv.cli.page.figures import Plot, style_of
from packedkv.cli.page.rows import UNCOMPRESSED

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
        name = f' id="{self.id}"' if self.id else ""
        return f"<section{name}><h2>{escape(self.heading)}</h2>{self.body}</section>"


def page(
    title: str,
    sections: Iterable[Section | str],
    *,
    top: str = "",
    footer: str = "",
) -> str:
    """Return a page; ``top`` and sections of type str are HTML, sections with an id are listed under ``top``."""
    parts = list(sections)
    linked = [part for part in parts if isinstance(part, Section) and part.id]
    links = "".join(f'<a href="#{part.id}">{escape(part.heading)}</a>' for part in linked)
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{svg.style_sheet('page.css')}{svg.style_sheet()}</style></head><body>",
        f"<header><h1>{escape(title)}</h1></header>",
        "<main>",
        top,
        f"<nav aria-label='sections'>{links}</nav>" if links else "",
        *map(str, parts),
        "</main>",
        f"<footer>{escape(footer)}</footer>" if footer else "",
        "</body></html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


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
    """A column: heading, and what it means."""

    text: str
    meaning: str = ""


@dataclass(frozen=True)
class Cell:
    """Text, smaller text after it, a class, and the spec whose marker precedes it."""

    text: str
    small: str = ""
    kind: str = ""
    spec: str = ""


def table(heads: Sequence[Head | str], lines: Sequence[Sequence[Cell | str]], *, name: str = "") -> str:
    """A table, named for screen readers; the first cell of a line is the line's heading."""
    head = "".join(_head(h if isinstance(h, Head) else Head(h)) for h in heads)
    rows = "\n".join(_line([c if isinstance(c, Cell) else Cell(c) for c in line]) for line in lines)
    region = f' role="region" tabindex="0" aria-label="{escape(name)}"' if name else ""
    return (
        f'<div class="scroll"{region}><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody class=rows>\n{rows}\n</tbody></table></div>"
    )


def _head(head: Head) -> str:
    told = f' title="{escape(head.meaning)}"' if head.meaning else ""
    return f'<th scope="col"{told}>{escape(head.text)}</th>'


def _line(cells: Sequence[Cell]) -> str:
    first, *others = cells
    parts = [f'<tr><th scope="row">{_content(first)}</th>']
    parts += [f"<td{f' class={cell.kind}' if cell.kind else ''}>{_content(cell)}</td>" for cell in others]
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


def drawings(plots: Sequence[Plot]) -> str:
    """Plots side by side, each with its note; empty without any."""
    drawn = "".join(f"<div>{svg.draw(plot)}{paragraph(plot.note, 'soft') if plot.note else ''}</div>" for plot in plots)
    return f'<figure class="drawings light">{drawn}</figure>' if drawn else ""
