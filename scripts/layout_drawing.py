"""Draw a method's bytes as SVG: one block of keys, one of values, and how their planes lie in a page."""

from html import escape

import packedkv
from packedkv.layout import Layout
from packedkv.scheme import KVScheme

WIDTH, LEFT, BAR, GAP = 760, 10, 34, 62
LEAST = 34
"""Pixels that the smallest field gets, so that a two-byte scale can be seen; the rest is to scale."""
COLOURS = {
    "codes": "#7fb3d5",
    "scales": "#f5b041",
    "norms": "#f7dc6f",
    "outliers": "#ec7063",
    "flags": "#bb8fce",
    "dense": "#aab7b8",
}


def drawing(spec: str, head_dim: int = 128) -> str:
    """SVG of the bytes of ``spec`` at ``head_dim``."""
    scheme = packedkv.get(spec)
    rows = [
        (_title("keys", scheme.key.layout(head_dim)), _fields(scheme.key.layout(head_dim))),
        (_title("values", scheme.value.layout(head_dim)), _fields(scheme.value.layout(head_dim))),
        _page(scheme, head_dim),
    ]
    height = GAP * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{escape(spec)}: bytes at head_dim {head_dim}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, (title, boxes) in enumerate(rows):
        parts += _row(14 + i * GAP, title, boxes)
    parts += _legend(height - 18, [part for _, boxes in rows for part, _, _ in boxes])
    return "\n".join([*parts, "</svg>"]) + "\n"


Box = tuple[str, str, int]
"""Part, label, bytes."""


def _title(role: str, layout: Layout) -> str:
    tokens = "one token" if layout.block_tokens == 1 else f"{layout.block_tokens} tokens"
    return f"{role}, {tokens} of one head: {layout.block_bytes} bytes, {layout.effective_bits:g} bits per element"


def _fields(layout: Layout) -> list[Box]:
    boxes = []
    for field in layout.fields:
        shape = "x".join(map(str, field.shape))
        boxes.append((field.part, f"{field.name} {field.dtype}[{shape}]", field.nbytes))
    return boxes


def _page(scheme: KVScheme, head_dim: int) -> tuple[str, list[Box]]:
    page = scheme.page_layout(head_dim)
    boxes = [(p.field.part, f"{p.role[0].upper()}.{p.field.name} x{p.blocks}", p.nbytes) for p in page.planes]
    return f"a page, {page.page_tokens} tokens of one head, one plane per field: {page.page_bytes} bytes", boxes


def _row(y: int, title: str, boxes: list[Box]) -> list[str]:
    room = WIDTH - 2 * LEFT - LEAST * len(boxes)
    total = sum(size for _, _, size in boxes)
    parts = [f'<text x="{LEFT}" y="{y}">{escape(title)}</text>']
    x = float(LEFT)
    for part, label, size in boxes:
        width = LEAST + room * size / total
        colour = COLOURS.get(part, "#d5d8dc")
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 6}" width="{width:.1f}" height="{BAR}" fill="{colour}" stroke="#444"/>'
        )
        parts.append(f"<g><title>{escape(label)}: {size} bytes</title>")
        if width > 6.9 * len(label):
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 20}">{escape(label)}</text>')
        elif width > 6.9 * len(short := label.split()[0]):
            parts.append(f'<text x="{x + 4:.1f}" y="{y + 20}" font-size="10">{escape(short)}</text>')
        parts.append(f'<text x="{x + 4:.1f}" y="{y + 34}" font-size="10">{size} B</text></g>')
        x += width
    return parts


def _legend(y: int, parts: list[str]) -> list[str]:
    out = []
    for i, part in enumerate(dict.fromkeys(parts)):
        x = LEFT + i * 90
        out.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS.get(part, "#d5d8dc")}" stroke="#444"/>'
        )
        out.append(f'<text x="{x + 17}" y="{y + 10}">{escape(part)}</text>')
    out.append(f'<text x="{WIDTH - LEFT}" y="{y + 10}" text-anchor="end" font-size="10">small fields widened</text>')
    return out
