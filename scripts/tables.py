"""Render the tables of README.md and docs/ from docs/tables/*.csv; ``--check`` names the stale pages.

A row of a CSV file is one measured value: the table it belongs to, the model, the spec, the case (operating point), the
metric, the value with its unit and its 95 % interval, and the run. ``runs.csv`` has the device, versions, commit and
date of each run. A page has the name of a table in a comment, and the table below it::

    <!-- table decode -->
    (rendered rows)
    <!-- end -->

A line of the table is a pair of spec and case, a column is a metric; both stand in the order of the file. Where a table
has several models, a column names its model. Values are printed as they stand in the file, with separators and units.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "docs/tables"
COLUMNS = ("what", "model", "spec", "case", "metric", "value", "unit", "low", "high", "run")
MARKED = re.compile(r"(<!-- table (?P<what>[\w-]+) -->\n).*?(<!-- end -->)", re.S)
BESIDE = ("x", "%", "pp")
"""Units that stand beside each value; other units stand in the heading."""

Row = dict[str, str]


class TableError(Exception):
    """Raised when a page names a table that no file has, or a row is malformed."""


def read(path: Path) -> list[Row]:
    """Rows of one CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, 2):
        if tuple(row) != COLUMNS or None in row.values():
            raise TableError(f"{path.name}, line {number}: the columns must be {', '.join(COLUMNS)}.")
        if not row["what"] or not row["metric"] or not row["value"]:
            raise TableError(f"{path.name}, line {number}: what, metric and value must not be empty.")
    return rows


def read_runs(folder: Path = TABLES) -> dict[str, Row]:
    """Device, versions, commit and date of each run."""
    with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def read_all(folder: Path = TABLES) -> dict[str, list[Row]]:
    """Rows of every file of a folder, by table."""
    tables: dict[str, list[Row]] = {}
    runs = read_runs(folder)
    for path in sorted(set(folder.glob("*.csv")) - {folder / "runs.csv"}):
        for row in read(path):
            if row["run"] not in runs:
                raise TableError(f"{path.name}: runs.csv has no run {row['run']!r}.")
            tables.setdefault(row["what"], []).append(row)
    return tables


def number(text: str) -> str:
    """Insert separators of thousands into a plain number; leave other text as it is."""
    match = re.fullmatch(r"([-+]?)(\d{4,})(\.\d+)?", text)
    return f"{match[1]}{int(match[2]):,}{match[3] or ''}" if match else text


def cell(row: Row) -> str:
    """Value of a row with its interval and, for some units, its unit."""
    text = number(row["value"])
    if row["unit"] in BESIDE and re.search(r"\d", text):
        text += row["unit"] if row["unit"] == "x" else f" {row['unit']}"
    return f"{text} [{number(row['low'])}, {number(row['high'])}]" if row["low"] else text


def heading(row: Row, several: bool) -> str:
    """Heading of the column of a row."""
    unit = f" ({row['unit']})" if row["unit"] and row["unit"] not in BESIDE else ""
    model = f"{row['model']}: " if several else ""
    return f"{model}{row['metric']}{unit}"


def table(rows: Sequence[Row]) -> str:
    """Markdown of one table."""
    several = len({row["model"] for row in rows}) > 1
    columns = list(dict.fromkeys(heading(row, several) for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["spec"], row["case"]), {})
        if line.setdefault(heading(row, several), cell(row)) != cell(row):
            raise TableError(f"{row['what']}: two values of {row['metric']} for {row['spec']}, {row['case']}.")
    # a label that all lines lack is no column
    labels = [at for at in (0, 1) if any(key[at] for key in lines)]
    head = [("preset", "case")[at] for at in labels]
    body = [[_label(key, at) for at in labels] + [line.get(c, "–") for c in columns] for key, line in lines.items()]
    rule = ["---"] * len(head) + ["---:"] * len(columns)
    return "\n".join(map(_line, [[*head, *columns], rule, *body]))


def _label(key: tuple[str, str], at: int) -> str:
    # prose in the place of a spec has blanks or capitals; specs have neither
    return key[at] if at or not re.fullmatch(r"[a-z0-9_()][^\sA-Z]*", key[at]) else f"`{key[at]}`"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def rendered(text: str, tables: dict[str, list[Row]]) -> str:
    """A page with every table rendered anew."""

    def replace(match: re.Match[str]) -> str:
        if match["what"] not in tables:
            raise TableError(f"no file of {TABLES.name}/ has the table {match['what']!r}.")
        return f"{match[1]}{table(tables[match['what']])}\n{match[3]}"

    return MARKED.sub(replace, text)


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Pages whose tables differ from the files, and their text as it should be."""
    tables = read_all(root / "docs/tables")
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    changed = {page: rendered(text, tables) for page, text in texts.items()}
    return {page: text for page, text in changed.items() if text != texts[page]}


def main() -> int:
    """Write the stale pages, or name them with ``--check`` and return 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="name stale pages and change nothing")
    check = parser.parse_args().check
    changed = stale()
    for page, text in changed.items():
        print(f"{'stale' if check else 'written'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
