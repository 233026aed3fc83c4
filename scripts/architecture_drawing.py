"""Draw the way of a token through the library as SVG: readable 400 pixels wide, in light and dark."""

from html import escape

WIDTH, HEIGHT = 400, 566
LEFT, RIGHT = 34, 366
"""Between them lie the boxes; the margins are for what goes past several of them."""
STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --line: #57606a; --box: #f3f4f6; --dense: #d8dee4; --codes: #9ecae1;
      --scales: #fdd29a; --code: #e3d5f3; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #1e2129; --ink: #e6e8eb; --line: #a5adb8; --box: #2b303b; --dense: #434b59; --codes: #24597c;
        --scales: #7a5216; --code: #543a78; }
}
text { fill: var(--ink); font-size: 13px; text-anchor: middle; }
text.small { font-size: 11px; }
text.left { text-anchor: start; }
rect, path { stroke: var(--line); }
path { fill: none; stroke-width: 1.5; marker-end: url(#tip); }
"""


def drawing() -> str:
    """SVG of the way of a token: model, cache, encode, page, read, attention."""
    middle = (LEFT + RIGHT) // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" role="img">',
        "<title>The way of a token: model, cache of a layer, codec, page, kernel or reference, attention</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" style="fill: var(--line)"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" style="fill: var(--paper); stroke: none"/>',
        # the model
        *_box(LEFT, 10, 240, 40, "model: K, V of new tokens", "[batch, KV heads, tokens, head_dim]"),
        *_box(292, 10, RIGHT - 292, 40, "Q", "new tokens"),
        # the cache of a layer
        *_box(LEFT, 92, RIGHT - LEFT, 84, "", ""),
        _text(middle, 107, "cache of a layer, in token order", "small"),
        *_box(44, 114, 66, 52, "sink", "16 bit", "dense"),
        *_box(116, 114, 144, 52, "pages", "packed bytes", "codes"),
        *_box(266, 114, 90, 52, "window", "16 bit", "dense"),
        '<path d="M274 50 V70 H311 V112"/>',
        _text(268, 82, "append", "small"),
        # the codec
        *_box(LEFT, 212, RIGHT - LEFT, 46, "codec: to_code, encode", "rotate or scale, round; each block once", "code"),
        '<path d="M311 166 V210"/>',
        _text(306, 190, "leaves the window", "small", "end"),
        # a page
        _text(64, 282, "page: 64 tokens of a head, a plane per field", "small left"),
        *_box(LEFT, 298, 112, 34, "K codes", "", "codes"),
        *_box(LEFT + 112, 298, 54, 34, "scales", "", "scales"),
        *_box(middle, 298, 112, 34, "V codes", "", "codes"),
        *_box(middle + 112, 298, 54, 34, "scales", "", "scales"),
        '<path d="M50 258 V296"/>',
        # its readers
        *_box(LEFT, 368, 160, 58, "kernel: reader", "codes to registers,", "box", "no decoded copy"),
        *_box(206, 368, 160, 58, "reference: decode", "then from_code; PyTorch,", "box", "a chunk at a time"),
        '<path d="M114 332 V366"/>',
        '<path d="M286 332 V366"/>',
        # attention
        *_box(LEFT, 462, RIGHT - LEFT, 46, "attention", "one softmax over sink, pages and window"),
        '<path d="M114 426 V460"/>',
        '<path d="M286 426 V460"/>',
        _text(120, 447, "code basis", "small left"),
        _text(280, 447, "model basis", "small", "end"),
        '<path d="M44 140 H16 V485 H32"/>',
        '<path d="M366 30 H384 V485 H368"/>',
        _side(12, 330, "sink and window", -90),
        _side(390, 330, "Q (kernels: query_to_code, once)", 90),
        '<path d="M200 508 V534"/>',
        _text(middle, 550, "output (kernels: from_code, once)"),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(
    x: int, y: int, width: int, height: int, title: str, below: str, fill: str = "box", more: str = ""
) -> list[str]:
    """Return a rectangle with a title and up to two small lines."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" style="fill: var(--{fill})"/>']
    lines = [(title, ""), (below, "small"), (more, "small")]
    shown = [line for line in lines if line[0]]
    first = y + height / 2 + 5 - 8 * (len(shown) - 1)
    parts += [_text(x + width // 2, round(first + 16 * i), text, kind) for i, (text, kind) in enumerate(shown)]
    return parts


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "") -> str:
    style = f' style="text-anchor: {anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}" class="{kind}"{style}>{escape(text)}</text>'


def _side(x: int, y: int, text: str, angle: int) -> str:
    return f'<text class="small" transform="translate({x} {y}) rotate({angle})">{escape(text)}</text>'
