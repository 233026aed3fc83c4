"""docs/architecture.md: the modules of a package, each with the first sentence of its docstring.

library     of src/kvcodec
laboratory  of src/kvcodec_lab
"""

import ast
from functools import partial
from pathlib import Path

from blocks.sources import Blocks, MissingResultError
from kvcodec.cli.page.tables import markdown


def rooms_block(root: Path, package: str) -> str:
    """Modules of a package, first level, each with the first sentence of its docstring."""
    folder = root / "src" / package
    if not folder.is_dir():
        raise MissingResultError(f"{folder.relative_to(root)} does not exist.")
    lines = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix != ".py" or not source.is_file() or path.name in ("__init__.py", "__pycache__"):
            continue
        doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        text = " ".join(doc.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|").rstrip(".")
        lines.append([f"`{path.name}{'/' * path.is_dir()}`", text])
    return markdown(["module", "holds"], lines, text=(0, 1))


BLOCKS: Blocks = {
    "library": (Path("docs/architecture.md"), partial(rooms_block, package="kvcodec")),
    "laboratory": (Path("docs/architecture.md"), partial(rooms_block, package="kvcodec_lab")),
}
