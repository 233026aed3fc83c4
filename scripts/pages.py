"""A hook of mkdocs: the pages that the site builds from docstrings. One page per method, their index, and the API.

A method's page is the docstring of its module with its options, the bits of its presets, its bytes drawn, and its rows
of ``docs/tables/results.csv``. A codec in one new file has a page without another line.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import packedkv
import tables
from layout_drawing import drawing
from packedkv.registry import method_of

HEAD_DIMS = (64, 128, 256)


def on_files(files: Any, config: Any) -> Any:
    """Add the built pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Text of every built page and drawing, by its path in the site."""
    found = {"api.md": api_page(), "codecs/index.md": index_page()}
    for name in packedkv.names():
        found[f"codecs/{name}.md"] = method_page(name)
        found[f"codecs/{name}.svg"] = drawing(presets_of(name)[0])
    return found


def presets_of(name: str) -> list[str]:
    """Presets of one method."""
    return [preset for preset in packedkv.presets() if method_of(preset).name == name]


def method_page(name: str) -> str:
    """Page of one method."""
    presets = presets_of(name)
    described = packedkv.describe(presets[0])
    module = inspect.getmodule(method_of(presets[0]).recipe)
    options = [[f"`{o['name']}`", f"`{o['type']}`", f"`{o['default']}`", o["doc"]] for o in described["options"]]
    parts = [
        f"# {name}",
        described["summary"],
        f"From: {described['source']}.",
        f"```text\n{inspect.getdoc(module)}\n```",
        "## Presets",
        markdown(["preset", *(f"bits K, V at D = {d}" for d in HEAD_DIMS), "sink", "window"], map(bits, presets)),
        "## Options",
        markdown(["option", "values", "default", "meaning"], options) if options else "None.",
        "## Bytes",
        f"![bytes of {presets[0]}]({name}.svg)",
    ]
    measured = tables.read_all()
    for what, title in (("quality", "Measured"), ("options", "Options measured")):
        if rows := [row for row in measured[what] if row["spec"].partition(":")[0] in presets]:
            parts += [f"## {title}", f"{rows[0]['model']}; [protocol](../results.md#protocol).", tables.table(rows)]
    return "\n\n".join(parts) + "\n"


def index_page() -> str:
    """List the recommended presets, then every method with its presets."""
    recommended = list(dict.fromkeys(row["spec"] for row in tables.read_all()["choose"]))
    head = ["preset", "K bits", "V bits", "sink + window", "kernels"]
    parts = ["# Methods", "Bits are those at head_dim 128, scales and padding included. [How to choose](../choose.md)."]
    parts += ["## Recommended", markdown(head, map(row_of, recommended))]
    parts += ["## By paper", "Methods as published, and baselines, for comparison."]
    for name in packedkv.names():
        presets = presets_of(name)
        described = packedkv.describe(presets[0])
        text = f"{described['summary']} From: {described['source']}."
        parts += [f"### [{name}]({name}.md)", text, markdown(head, map(row_of, presets))]
    return "\n\n".join(parts) + "\n"


def row_of(preset: str) -> list[Any]:
    """Line of a preset in the index."""
    d = packedkv.describe(preset)
    kernels = " and ".join(k for k, there in d["kernels"].items() if there != "none") or "–"
    return [f"`{preset}`", f"{d['key_bits']:.2f}", f"{d['value_bits']:.2f}", f"{d['sink']} + {d['window']}", kernels]


def bits(preset: str) -> list[Any]:
    """Line of a preset in the table of head dimensions."""
    scheme, found = packedkv.get(preset), []
    for dim in HEAD_DIMS:
        try:
            found.append(f"{scheme.key_bits(dim):.2f}, {scheme.value_bits(dim):.2f}")
        except packedkv.ShapeError:
            found.append("refused")
    return [f"`{preset}`", *found, scheme.sink, scheme.window]


def api_page() -> str:
    """List every public name with its signature and docstring."""
    parts = ["# API", "The names that `import packedkv` gives."]
    for name in packedkv.__all__:
        thing = getattr(packedkv, name)
        parts.append(f"## {name}")
        if inspect.isclass(thing) or inspect.isfunction(thing):
            error = inspect.isclass(thing) and issubclass(thing, Exception)
            parts += [] if error else [f"```python\n{name}{inspect.signature(thing)}\n```"]
            parts.append(f"```text\n{inspect.getdoc(thing)}\n```")
        else:
            parts.append(f"```python\n{name} = {thing}\n```")  # a type alias
    return "\n\n".join(parts) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown of a table."""
    lines = [[str(c).replace("|", "\\|") for c in row] for row in [head, *rows]]
    lines.insert(1, ["---"] * len(head))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
