"""Write the measured tables and drawings of docs/serve-results.md from benchmarks/results/nvidia-*/serve*.json.

``--check`` only compares: 1 if something would change. A GPU's block lies between ``<!-- serve nvidia-h200:start -->``
and ``<!-- serve nvidia-h200:end -->``, the drawings, of one of them, in docs/img; ``serve features`` and
``serve features-cpu`` are what ``benchmarks/serve_features.py`` compared, ``serve stock`` what
``benchmarks/serve_stock.py`` asked of servers.
"""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from kvcodec.cli.page import tables as report_tables
from kvcodec.cli.page.rows import read_rows
from kvcodec_lab.report.pages.serve import drawing
from kvcodec_lab.serve.tables import Grid, charts, tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {gpu: Path("benchmarks/results", gpu, "serve.json") for gpu in ("nvidia-h200", "nvidia-h100")}
DRAWN_GPU = "nvidia-h200"
CHECKED = {"features": Path("benchmarks/results/nvidia-h100/serve_features.json"),
           "features-cpu": Path("benchmarks/results/cpu/serve_features.json"),
           "stock": Path("benchmarks/results/nvidia-h100/serve_stock.json")}  # fmt: skip
"""Rows of the blocks that show checks instead of times."""
PAGE = Path("docs/serve-results.md")
DRAWN = {"steps-": "serve-steps.svg", "throughput-clients-i1024": "serve-throughput-1k.svg",
         "throughput-clients-i4096": "serve-throughput-4k.svg", "tpot-clients-i4096": "serve-tpot-4k.svg",
         "round-ttft-s": "serve-round-ttft.svg",
         "round-residency-": "serve-round-residency.svg"}  # fmt: skip
"""Beginnings of drawings' names, and the files that the page shows."""
BLOCK = re.compile(r"(<!-- serve (?P<name>[\w-]+):start -->\n).*?(\n<!-- serve (?P=name):end -->)", re.S)
EMPTY = "Not measured yet: `benchmarks/serve_h200.py` makes the rows."
COMPARED = {
    "offload": ["preset", "connector", "same tokens", "tokens loaded"],
    "two": [
        "preset",
        "run",
        "same tokens",
        "prompt",
        "order",
        "batch",
        "packing",
        "furthest behind",
        "order",
        "batch",
        "bytes of the library",
    ],
    "heads": [
        "preset",
        "drafts by",
        "same tokens",
        "bytes of the library",
        "drafted",
        "accepted",
        "steps",
        "order",
        "furthest behind",
        "order",
    ],
}
"""Headings of the tables of features."""
NAMES = {"none": "vLLM's own cache", "page": "fault: a page", "head": "fault: a page's head, one layer"}
"""Of rows' presets and runs that are not called what they are."""
CELL = 160
"""Characters of a reason that a table shows; the rows have all of it."""


def rows_of(root: Path, gpu: str) -> list[dict[str, Any]]:
    """Committed rows; none before the first measurement."""
    path = root / RESULTS[gpu]
    return read_rows([path]) if path.is_file() else []


def markdown(grid: Grid) -> str:
    """A table, what it is about, and why something is missing."""
    table = report_tables.markdown(grid.headings, [[f"`{line[0]}`", *line[1:]] for line in grid.lines])
    reasons = [(line[0], why) for line, why in zip(grid.lines, grid.whys, strict=True) if why]
    missing = [f"- `{label}`: {_short(why)}" for label, why in reasons]
    return "\n\n".join(
        [f"**{grid.title}.** {grid.note}", table, *(["Missing:\n\n" + "\n".join(missing)] * bool(missing))]
    )


def _short(why: str) -> str:
    text = why.replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= CELL else text[: CELL - 4].rsplit(" ", 1)[0] + " ..."


def pictures(root: Path) -> dict[str, str]:
    """Names of drawings in docs/img and their SVG, those of them that there are rows for."""
    found: dict[str, str] = {}
    for chart in charts(rows_of(root, DRAWN_GPU)):
        name = next((file for begin, file in DRAWN.items() if chart.name.startswith(begin)), None)
        if name is not None:
            found.setdefault(name, drawing(chart))
    return found


def block(root: Path, gpu: str) -> str:
    """Tables and pictures of a GPU as the page has them."""
    rows = rows_of(root, gpu)
    if not rows:
        return EMPTY
    gpus = sorted({str(row.get("gpu")) for row in rows})
    versions = sorted({row["versions"]["vllm"] for row in rows if row.get("versions")})
    head = f"On {', '.join(gpus)}, vLLM {', '.join(versions)}: `{RESULTS[gpu]}`, made by `benchmarks/serve_h200.py`."
    grids = [grid for grid in tables(rows) if grid.title != "Servers"]
    shown = [f"![{name[6:-4].replace('-', ' ')}](img/{name})" for name in (pictures(root) if gpu == DRAWN_GPU else ())]
    return "\n\n".join([head, *map(markdown, grids), *shown])


def features(path: Path) -> str:
    """The tables of answers with a feature beside those without."""
    rows = read_rows([path])
    order = {
        (row["spec"], row["shape"].partition("_")[0]): row["apart"] for row in rows if row["shape"].endswith("_order")
    }

    def measured(row: dict[str, Any], what: str, *kinds: str) -> list[str]:
        known = row | {"order": order.get((row["spec"], row["shape"].partition("_")[0]))}
        return [f"{known[kind][what]:.2g}" if known.get(kind) else "–" for kind in kinds]

    found: dict[str, list[list[str]]] = {part: [] for part in COMPARED}
    for row in rows:
        part, _, run = row["shape"].partition("_")
        line = [NAMES.get(row["spec"], f"`{row['spec']}`"), NAMES.get(run, run), f"{row['values']['p50']:.1%}"]
        counts, own = row["counts"], [p["bytes_equal"] for p in row.get("pages") or ()]
        held = "–" if not own else "all" if min(own) == 1 else f"{math.floor(min(own) * 1e6) / 1e4}%"
        if part == "offload":
            line.append(f"{counts['vllm:external_prefix_cache_hits']:,.0f}")
        elif run == "order":
            continue
        elif part == "two":
            line += measured(row, "prompt", "apart", "order", "alone", "packing")
            line += [*measured(row, "behind", "apart", "order", "alone"), held]
        else:
            drafts = [counts.get(f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
            line += [held, *("–" if x is None else f"{x:,.0f}" for x in drafts)]
            line += [*measured(row, "steps", "apart", "order"), *measured(row, "behind", "apart", "order")]
        found[part].append(line)
    shown = []
    for part, lines in found.items():
        kept = [at for at in range(len(COMPARED[part])) if any(line[at] != "–" for line in lines)]
        if lines:
            headings = [COMPARED[part][at] for at in kept]
            shown.append(report_tables.markdown(headings, [[line[at] for at in kept] for line in lines]))
    return "\n\n".join(shown)


def stock(path: Path) -> str:
    """The table of servers of a stock install; a server that fits its constants has a row for each start."""
    lines = []
    for row in read_rows([path]):
        hits, asked = row["hit_tokens"][1]
        seconds = row.get("fitted_s", 0.0)
        start = ", the next start" if row["shape"] == "stock_again" else ", the first start" if seconds else ""
        fitted = f"{seconds:.0f}" if seconds else "–"
        lines.append([f"`{row['spec']}`{start}", f"{row['ready_s']:.0f}", fitted, f"{hits:,.0f} of {asked:,.0f}",
                      f"{row['values']['p50']:.3f}", f"{row['library_loss']:.3f}"])  # fmt: skip
    headings = ["preset", "s until it answers", "s of the fit", "tokens in the prefix cache", "loss", "the library's"]
    return report_tables.markdown(headings, lines)


def made(root: Path, name: str) -> str:
    """What stands in a block of the page."""
    if name not in CHECKED:
        return block(root, name)
    return stock(root / CHECKED[name]) if name == "stock" else features(root / CHECKED[name])


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    want = {PAGE: BLOCK.sub(lambda found: found[1] + made(ROOT, found["name"]) + found[3], text)}
    want |= {Path("docs/img", name): svg for name, svg in pictures(ROOT).items()}
    stale = [p for p, t in want.items() if not (ROOT / p).is_file() or (ROOT / p).read_text(encoding="utf-8") != t]
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}")
        if not check:
            (ROOT / path).write_text(want[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
