"""Write the generated pages of the documentation: one per registered method, and the public names.

A method's page is its module's docstring, its options, its presets' bits and bytes: a codec that is one new file has a
page without another line. The pages are not committed.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvcodec
from kvcodec.registry import method_of

ROOT = Path(__file__).resolve().parents[1]
HEAD_DIMS = (64, 128, 256)


def write_pages(out: Path) -> list[Path]:
    """Write ``codecs/<method>.md`` for every method and ``api.md`` under ``out``; return the paths."""
    (out / "codecs").mkdir(parents=True, exist_ok=True)
    pages = {out / "codecs" / f"{name}.md": method_page(name) for name in kvcodec.names()}
    pages[out / "api.md"] = api_page()
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return list(pages)


def method_page(name: str) -> str:
    """Page of one method."""
    presets = [p for p in kvcodec.presets() if method_of(p).name == name]
    described = kvcodec.describe(presets[0])
    module = inspect.getmodule(method_of(presets[0]).recipe)
    path = f"src/{module.__name__.replace('.', '/')}.py" if module else ""
    options = [(f"`{o['name']}`", f"`{o['type']}`", f"`{o['default']}`", o["doc"] or "–") for o in described["options"]]
    return "\n\n".join(
        [
            f"# {name}",
            described["summary"],
            f"From: {described['source']}. Code: `{path}`.",
            "## Presets",
            _table(["preset", *(f"bits K, V at D = {d}" for d in HEAD_DIMS), "sink", "window"], map(_bits, presets)),
            "## Options",
            _table(["option", "values", "default", "meaning"], options) if options else "None.",
            f"## Bytes\n\nOne page of `{presets[0]}` at D = 128 holds {described['page_tokens']} tokens of one head in "
            f"{described['page_bytes']} bytes:",
            _table(["offset", "plane", "dtype", "block", "tokens of a block"], map(_plane, described["layout"])),
            "## The method",
            f"```text\n{inspect.getdoc(module)}\n```",
        ]
    ) + "\n"  # fmt: skip


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
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(c).replace('|', chr(92) + '|') for c in line)} |" for line in lines)


def main() -> int:
    """Write the pages and say where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder (default: docs)")
    parser.add_argument("--codec-file", type=Path, action="append", default=[], help="a codec outside the package")
    options = parser.parse_args()
    for path in options.codec_file:
        kvcodec.load_file(path)
    pages = write_pages(options.out)
    print(f"{len(pages)} pages under {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
