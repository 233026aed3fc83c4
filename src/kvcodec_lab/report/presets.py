"""Result rows to a picture and one self-contained HTML page.

Reads rows (plain JSON values), writes files; knows nothing of how the rows were measured. Every text is escaped: model
output is shown, never run.
"""

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcodec.errors import KVError
from kvcodec_lab.report.plot import quality_figure, style_of

Row = Mapping[str, Any]
UNCOMPRESSED = "(uncompressed)"
PNG_NAME, HTML_NAME = "quality.png", "report.html"


class Column(NamedTuple):
    """One column of the result table: key of the row, heading, how a value is written, what it means."""

    key: str
    heading: str
    text: Callable[[Any], str]
    meaning: str


def bytes_text(n: float) -> str:
    """Bytes with a decimal unit.

    >>> bytes_text(999), bytes_text(12_345_678)
    ('999 B', '12.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"


def small_text(x: float) -> str:
    """Four decimals, or an exponent when they would say nothing.

    >>> small_text(0.0312), small_text(2.5e-6), small_text(0)
    ('0.0312', '2.5e-06', '0')
    """
    return "0" if x == 0 else f"{x:.1e}" if abs(x) < 1e-3 else f"{x:.4f}"


COLUMNS = (
    Column("spec", "spec", str, "the preset; `kvcodec describe SPEC` says everything about it"),
    Column(
        "key_bits",
        "K bits",
        lambda v: f"{v:.2f}",
        "bits per stored key element, scales and padding included, from the byte layout at the model's head_dim; "
        "tokens held dense are not counted",
    ),
    Column("value_bits", "V bits", lambda v: f"{v:.2f}", "the same for values"),
    Column(
        "effective_bits",
        "bits in all",
        lambda v: f"{v:.2f}",
        "every byte the cache held in the run (codes, scales, sinks, windows, dense layers, reserve) x 8 / elements",
    ),
    Column("cache_bytes", "cache", bytes_text, "bytes measured from the tensors held"),
    Column("ratio_to_16bit", "ratio", lambda v: f"{v:.2f}x", "bytes of the same tokens in 16 bit / `cache`"),
    Column(
        "perplexity", "perplexity", lambda v: f"{v:.2f}", "exp of the mean loss over all scored tokens; lower is better"
    ),
    Column(
        "kl",
        "KL",
        small_text,
        "mean over tokens of KL(uncompressed || compressed) between next-token distributions, in nats; 0 is the same",
    ),
    Column(
        "top1_agreement",
        "top-1",
        lambda v: f"{100 * v:.1f} %",
        "how often the most likely next token is the uncompressed model's",
    ),
    Column(
        "attention_error",
        "attn. error",
        small_text,
        "relative error of the attention output, ||o^ - o|| / ||o||, mean over layers",
    ),
    Column("tokens_per_s", "tokens/s", lambda v: f"{v:.1f}", "speed of greedy generation on the machine of the run"),
)
DETAILS_FIRST = ("model", "text", "windows", "prefill", "protocol", "device", "versions", "seconds")

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #59636e; --line: #d5dae0; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14171b; --fg: #e4e8ec; --soft: #9aa4ae; --line: #343b43; --card: #1d2228; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--bg); color: var(--fg);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.lead { border-left: 4px solid #d55e00; background: var(--card); padding: .7rem 1rem; margin: 1rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tr.partial td { font-style: italic; } .dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%;
  margin-right: .45em; } figure { margin: 0; background: #fff; border: 1px solid var(--line); padding: .5rem; }
figure img { width: 100%; height: auto; display: block; } .pairs { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); }
.pair { background: var(--card); border: 1px solid var(--line); padding: .7rem .9rem; overflow-wrap: anywhere; }
.pair p { margin: .3rem 0 0; white-space: pre-wrap; } .same { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; } footer { color: var(--soft); margin-top: 2rem; font-size: .85rem; }
"""


def write_report(rows: Sequence[Row], out_dir: Path, meta: Mapping[str, Any]) -> list[Path]:
    """Write ``quality.png`` and ``report.html`` into ``out_dir``.

    Parameters
    ----------
    rows : sequence of mapping
        One per spec, plain values: ``spec``, and any of the keys of ``COLUMNS``, ``continuation`` (text), ``windows``
        (int), ``kl_se``, ``prefill``, ``partial`` (true when the run was interrupted before this row was complete), and
        ``uncompressed`` (the same keys for the model without a packed cache). A missing or None value is shown as a
        dash.
    out_dir : Path
        Made when it does not exist.
    meta : mapping
        About the run. ``title``, ``recommendation`` and ``prompt`` have places of their own; everything else
        (``model``, ``text``, ``protocol``, ``versions``, ...) is listed under *How it was measured*. A true ``partial``
        says so on top.

    Returns
    -------
    list of Path
        The files written, the picture first.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; names the extra.
    KVError
        If ``out_dir`` cannot be written.
    """
    out_dir = Path(out_dir)
    png, page = out_dir / PNG_NAME, out_dir / HTML_NAME
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        quality_figure(rows, png, _figure_title(meta))
        page.write_text(_page(with_reference(rows), meta, png.read_bytes()), encoding="utf-8")
    except OSError as error:
        raise KVError(
            f"the report folder {str(out_dir)!r} cannot be written ({error.strerror or error}); pass another folder."
        ) from error
    return [png, page]


def with_reference(rows: Sequence[Row]) -> list[Row]:
    """Put the uncompressed model's own figures on top, when the rows carry them."""
    base = next((r["uncompressed"] for r in rows if r.get("uncompressed")), None)
    if base is None:
        return list(rows)
    return [{"kl": 0.0, "top1_agreement": 1.0, "attention_error": 0.0, **base, "spec": UNCOMPRESSED}, *rows]


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """Columns that at least one row has a value for."""
    return [c for c in COLUMNS if any(r.get(c.key) is not None for r in rows)]


def cell(row: Row, column: Column) -> str:
    """Text of one cell; a dash where the row has no value."""
    value = row.get(column.key)
    if value is None:
        return "–"
    return column.text(value) if column.key == "spec" or isinstance(value, (int, float)) else str(value)


def _figure_title(meta: Mapping[str, Any]) -> str:
    about = [str(meta[k]) for k in ("model", "text") if meta.get(k)]
    return " on ".join(about) or str(meta.get("title", "quality over effective bits"))


def _page(rows: Sequence[Row], meta: Mapping[str, Any], png: bytes) -> str:
    title = html.escape(str(meta.get("title") or "kvcodec report"))
    image = base64.b64encode(png).decode("ascii")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
    ]
    if meta.get("partial") or any(r.get("partial") for r in rows):
        parts.append(
            '<p class="lead">The run was interrupted: rows in italics cover only the windows finished by then.</p>'
        )
    if meta.get("recommendation"):
        parts.append(f'<p class="lead">{html.escape(str(meta["recommendation"]))}</p>')
    parts += [
        "<h2>Results</h2>",
        _table(rows),
        f'<h2>Quality over effective bits</h2><figure><img alt="{html.escape(_alt(rows))}" '
        f'src="data:image/png;base64,{image}"></figure>',
        _continuations(rows, meta),
        "<h2>How it was measured</h2>",
        _details(rows, meta),
        "<h2>What the columns mean</h2>",
        _definitions((c.heading, c.meaning) for c in columns_of(rows)),
        "<footer>Written by kvcodec. Bits are bytes: every figure of size is measured from the tensors held.</footer>",
        "</body></html>",
    ]
    return "\n".join(p for p in parts if p) + "\n"


def _alt(rows: Sequence[Row]) -> str:
    return (
        f"Quality over effective bits for {', '.join(str(r.get('spec')) for r in rows)}; the numbers are in the table."
    )


def _table(rows: Sequence[Row]) -> str:
    columns = columns_of(rows)
    head = "".join(f'<th title="{html.escape(c.meaning)}">{html.escape(c.heading)}</th>' for c in columns)
    lines = []
    for row in rows:
        mark = f'<span class="dot" style="background:{_color(str(row.get("spec")))}"></span>'
        cells = [html.escape(cell(row, c)) for c in columns]
        if row.get("partial"):
            cells[0] += " (partial)"
        body = "".join(f"<td>{mark if i == 0 else ''}{text}</td>" for i, text in enumerate(cells))
        lines.append(f"<tr{' class=partial' if row.get('partial') else ''}>{body}</tr>")
    body = "\n".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _color(spec: str) -> str:
    return style_of("dense" if spec == UNCOMPRESSED else spec).color


def _continuations(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    written = [r for r in rows if r.get("continuation")]
    if not written:
        return ""
    first = next((r for name in (UNCOMPRESSED, "dense") for r in written if r.get("spec") == name), None)
    reference = str(first["continuation"]) if first else None
    parts = ["<h2>One continuation, side by side</h2>"]
    if meta.get("prompt"):
        parts.append(f'<p>Prompt: <span class="same">{html.escape(str(meta["prompt"]))}</span></p>')
    if first is not None:
        parts.append(
            f"<p>Greedy decoding; what agrees with <b>{html.escape(str(first['spec']))}</b> is grey, "
            f"from the first difference on it is not.</p>"
        )
    parts.append('<div class="pairs">')
    for row in written:
        text = str(row["continuation"])
        same = 0 if row is first else _agreement(text, reference or "")
        shown = f'<span class="same">{html.escape(text[:same])}</span>{html.escape(text[same:])}'
        parts.append(f'<div class="pair"><b>{html.escape(str(row["spec"]))}</b><p>{shown}</p></div>')
    return "\n".join([*parts, "</div>"])


def _agreement(a: str, b: str) -> int:
    """Length of the common beginning of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _details(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    shown: dict[str, Any] = {k: v for k, v in meta.items() if k not in ("title", "recommendation", "prompt", "partial")}
    for key in ("windows", "prefill"):  # said by the rows; the same for all of them or listed
        if key not in shown and (values := dict.fromkeys(str(r[key]) for r in rows if r.get(key) is not None)):
            shown[key] = ", ".join(values)
    order = [k for k in DETAILS_FIRST if k in shown] + [k for k in shown if k not in DETAILS_FIRST]
    return _definitions((k.replace("_", " "), _plain(shown[k])) for k in order)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(v) for v in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _definitions(pairs: Any) -> str:
    items = "\n".join(f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in pairs)
    return f"<dl>\n{items}\n</dl>"
