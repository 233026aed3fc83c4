"""Write the generated pages of the documentation: one per registered method, their list, and the public names.

A method's page is its module's docstring in sections, its options, its presets' bits, its bytes drawn, and its rows of
the committed results: a codec that is one new file has a page without another line. The pages are committed, and a test
compares them with what this writes.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import architecture_drawing
import kvcodec
from kvcodec.cli.page.rows import read_rows
from kvcodec.cli.page.tables import cell, columns_of, markdown
from kvcodec.registry import method_of
from layout_drawing import drawing

ROOT = Path(__file__).resolve().parents[1]
HEAD_DIMS = (64, 128, 256)


HEADINGS = {
    "Use:": "What it is for",
    "Not for:": "When not to use it",
    "Bits": "Bits",
    "Block": "Block",
    "Deviations": "Deviations from the paper",
    "Pitfalls": "Pitfalls",
}
"""First words of a docstring's paragraph, and the section that it begins."""
RESULTS = (
    ROOT / "benchmarks/results/nvidia-h200/quality_smollm2-135m.json",
    ROOT / "benchmarks/results/nvidia-h200/quality_smollm2-135m_variants.json",
)
"""Every preset, and options of some."""


def pages(out: Path) -> dict[Path, str]:
    """Text of every generated page and drawing under ``out``.

    They are ``codecs/<method>.md`` and its drawing for every method, ``codecs/index.md``, ``api.md`` and
    ``img/architecture.svg``.
    """
    made = {out / "img/architecture.svg": architecture_drawing.drawing()}
    for name in kvcodec.names():
        made[out / "codecs" / f"{name}.md"] = method_page(name)
        made[out / "codecs" / f"{name}.svg"] = drawing(_presets_of(name)[0])
    made[out / "codecs" / "index.md"] = index_page()
    made[out / "api.md"] = api_page()
    return made


def write_pages(out: Path) -> list[Path]:
    """Write them; return their paths."""
    made = pages(out)
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(made)


def stale(out: Path) -> list[Path]:
    """Pages that are missing or say something else, and pages of methods that are gone."""
    made = pages(out)
    changed = [p for p, text in made.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
    return changed + sorted(set((out / "codecs").glob("*")) - set(made))


def sections(doc: str) -> dict[str, str]:
    """Cut a module's docstring at the paragraphs that begin a section; what stands before them is ``""``."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for paragraph in re.split(r"\n\s*\n", doc):
        begun = next((title for words, title in HEADINGS.items() if paragraph.startswith(words)), None)
        if begun == "Block":  # the drawing's words; the bytes are drawn from the layout as well
            current = "Block"
        elif begun is not None:
            current = begun
        found.setdefault(current, []).append(paragraph)
    return {title: "\n\n".join(parts) for title, parts in found.items()}


def method_page(name: str) -> str:
    """Page of one method."""
    presets = _presets_of(name)
    first = presets[0]
    described = kvcodec.describe(first)
    module = inspect.getmodule(method_of(first).recipe)
    path = f"src/{module.__name__.replace('.', '/')}.py" if module else ""
    text = sections(inspect.getdoc(module) or "")
    options = [
        (f"`{o['name']}`", f"`{_spelled(o['type'])}`", f"`{_spelled(o['default'])}`", o["doc"] or "–")
        for o in described["options"]
    ]
    parts = [f"# {name}", described["summary"], f"From: {described['source']}. Code: `{path}`."]
    for title, words in (("What it is for", "Use:"), ("When not to use it", "Not for:")):
        if title in text:
            parts += [f"## {title}", _prose(text[title].removeprefix(words))]
    parts += ["## The method", f"```text\n{text['']}\n```"]
    parts += ["## Bits", *([f"```text\n{text['Bits']}\n```"] if "Bits" in text else []), _worked(first)]
    parts.append(
        _table(["preset", *(f"bits K, V at D = {d}" for d in HEAD_DIMS), "sink", "window"], map(_bits, presets))
    )
    parts += ["## Bytes", f"![bytes of {first}]({name}.svg)"]
    parts += [f"```text\n{text['Block']}\n```"] if "Block" in text else []
    parts += [
        f"One page of `{first}` at D = 128 holds {described['page_tokens']} tokens of one head in "
        f"{described['page_bytes']} bytes:",
        _table(["offset", "plane", "dtype", "block", "tokens of a block"], map(_plane, described["layout"])),
        "## Options",
        _table(["option", "values", "default", "meaning"], options) if options else "None.",
    ]
    for title in ("Deviations from the paper", "Pitfalls"):
        if title in text:
            parts += [f"## {title}", f"```text\n{text[title]}\n```"]
    return "\n\n".join(parts + _measured(name)) + "\n"


def _fitted(rows: Sequence[dict[str, Any]]) -> str:
    """Where the constants of the rows come from, if data had a say."""
    places: dict[str, list[str]] = {}
    for row in rows:
        if row.get("fitted"):
            params = row.get("params")
            place = f"{params['tokens']} tokens of another text" if params else "each window itself"
            places.setdefault(place, []).append(f"`{row['spec']}`")
    return "".join(f" Constants of {', '.join(specs)} were fitted on {place}." for place, specs in places.items())


def index_page() -> str:
    """Table of every method and its presets: one sentence for a method, one row for a preset."""
    rows = []
    for name in kvcodec.names():
        for i, preset in enumerate(_presets_of(name)):
            d = kvcodec.describe(preset)
            kernels = " and ".join(k for k, there in d["kernels"].items() if there != "none") or "–"
            method = f"[{name}]({name}.md): {d['summary'].rstrip('.')}. *{d['source']}*" if i == 0 else ""
            bits = f"{d['key_bits']:.2f}", f"{d['value_bits']:.2f}"
            rows.append((method, f"`{preset}`", *bits, f"{d['sink']} + {d['window']}", kernels))
    table = _table(["method", "preset", "K bits", "V bits", "sink + window", "fused kernels"], rows)
    return (
        "# Methods\n\nOne page each: what it is for, its bits and bytes, options, deviations, pitfalls. Bits are those "
        "at head_dim 128, scales and padding included; tokens held dense (sink, window, outer layers) are not counted. "
        f"[Which to take](../choose.md).\n\n{table}\n"
    )


def _presets_of(name: str) -> list[str]:
    return [p for p in kvcodec.presets() if method_of(p).name == name]


def _spelled(value: Any) -> str:
    """As a spec takes it."""
    if value == "bool":
        return "true|false"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _prose(text: str) -> str:
    """Return a docstring's paragraph as Markdown that begins like a sentence."""
    text = " ".join(text.split()).replace("``", "`")
    return text if re.match(r"[\w-]*[\d_]", text) else text[:1].upper() + text[1:]


def _method(spec: str) -> str:
    """Method of a result's spec; "" for one that is no longer registered."""
    try:
        return method_of(spec).name
    except kvcodec.SpecError:
        return ""


def _worked(preset: str) -> str:
    """A line of arithmetic for each role, from fields to bits, at a head_dim of 128."""
    scheme = kvcodec.get(preset)
    lines = []
    for role in ("key", "value"):
        layout = scheme.codec(role).layout(128)
        sum_ = " + ".join(f"{f.nbytes} ({f.name})" for f in layout.fields)
        elements = f"({layout.block_tokens} x 128)" if layout.block_tokens > 1 else "128"
        lines.append(
            f"- `{preset}`, {role}s at D = 128: {sum_} = {layout.block_bytes} bytes; "
            f"{layout.block_bytes} x 8 / {elements} = **{layout.effective_bits:g} bits**"
        )
    return "\n".join(lines)


def _measured(name: str) -> list[str]:
    """Rows of the committed results, if any; those of options behind those of presets."""
    rows = [row for row in read_rows(RESULTS) if _method(row["spec"]) == name]
    if not rows:
        return []
    columns = [c for c in columns_of(rows) if c.key != "tokens_per_s"]
    table = _table([c.heading for c in columns], [[cell(row, c) for c in columns] for row in rows])
    base = rows[0]["uncompressed"]["perplexity"]
    text = (
        f"{rows[0]['model']}, {rows[0]['windows']} windows of {rows[0]['window_tokens']} tokens of WikiText-2; the "
        f"uncompressed model has a perplexity of {base:.2f}. Protocol and meaning of the columns: "
        f"[results](../results.md).{_fitted(rows)}"
    )
    return ["## Measured", text, table]


def _bits(preset: str) -> Sequence[Any]:
    scheme = kvcodec.get(preset)
    bits = []
    for dim in HEAD_DIMS:
        try:
            bits.append(f"{scheme.key_bits(dim):.2f}, {scheme.value_bits(dim):.2f}")
        except kvcodec.ShapeError:
            bits.append("refused")
    return [f"`{preset}`", *bits, scheme.sink, scheme.window]


def _plane(plane: dict[str, Any]) -> Sequence[Any]:
    shape = "x".join(str(n) for n in plane["shape"])
    return [plane["page_offset"], f"{plane['role']} {plane['field']}", plane["dtype"], shape, plane["block_tokens"]]


def api_page() -> str:
    """Every public name with its signature and docstring."""
    parts = ["# API", "The names that `import kvcodec` gives."]
    for name in kvcodec.__all__:
        thing = getattr(kvcodec, name)
        parts.append(f"## {name}")
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            parts.append(f"```python\n{name} = {thing}\n```")  # a type alias
            continue
        if not (inspect.isclass(thing) and issubclass(thing, Exception)):
            parts.append(f"```python\n{name}{inspect.signature(thing)}\n```")
        parts.append(f"```text\n{inspect.getdoc(thing)}\n```")
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [[str(c).replace("|", "\\|") for c in row] for row in rows]
    return markdown(head, lines, text=range(len(head)))


def main() -> int:
    """Write the pages and say where; with ``--check`` 1 if one is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder (default: docs)")
    parser.add_argument("--codec-file", type=Path, action="append", default=[], help="a codec outside the package")
    options = parser.parse_args()
    for path in options.codec_file:
        kvcodec.load_file(path)
    if options.check:
        for path in (old := stale(options.out)):
            print(f"stale: {path}; run `make docs`", file=sys.stderr)
        return int(bool(old))
    print(f"{len(write_pages(options.out))} pages under {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
