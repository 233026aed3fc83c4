"""What ``packedkv reproduce`` shows: a table for the terminal, and a folder with the same text and JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packedkv.cli.measure.rows import Row, check_writable, plain, write_json
from packedkv.cli.page.rows import write_whole
from packedkv.cli.page.tables import aligned
from packedkv.cli.stamp import versions
from packedkv_lab.reproduce.claims import PAPERS
from packedkv_lab.reproduce.rate_distortion import STUDY

MARKDOWN, JSON = "reproduce.md", "reproduce.json"


def parts(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Split into claims, tables that cannot be recomputed, and rate-distortion rows."""
    study = [r for r in rows if r["paper"] == STUDY]
    others = [r for r in rows if r["paper"] != STUDY]
    return [r for r in others if r["ours"] is not None], [r for r in others if r["ours"] is None], study


def verdict(row: Row) -> str:
    """``holds``, ``corrected`` (holds to the value that the paper should have), or ``DIFFERS``."""
    if not row["holds"]:
        return "DIFFERS"
    return "holds" if row.get("spec") is None else "corrected"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}"


def terminal(rows: Sequence[Row]) -> str:
    """Printed number, ours and difference, a block per table; what cannot be recomputed; errors at true bits."""
    claims, missing, study = parts(rows)
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in claims:
        tables.setdefault((row["paper"], row["table"]), []).append(row)
    lines: list[str] = []
    for (paper, table), block in tables.items():
        lines += ["", f"{PAPERS.get(paper, paper)}, {table}"]
        cells = [("", "", "reference", "corrected", "ours", "difference", "")]
        for r in block:
            mark = verdict(r) + (" (partial)" if r.get("partial") else "")
            numbers = _number(r["printed"]), _number(r.get("spec")), _number(r["ours"])
            cells.append(
                (mark, f"{r['item']}, {r['metric']}", *numbers, f"{100 * r['relative_error']:+.2f} %", r["note"])
            )
        lines += [f"  {line}".rstrip() for line in aligned(cells, text=(0, 1, 6))]
    if missing:
        lines += ["", "Not recomputed", *(f"  {r['paper']}, {r['table']}: {r['note']}" for r in missing)]
    if study:
        lines += ["", "Relative MSE at true bits (rate-distortion), mean and spread", *_study(study)]
    if claims:
        holding = sum(bool(r["holds"]) for r in claims)
        corrected = sum(r.get("spec") is not None for r in claims)
        lines += ["", f"{holding} of {len(claims)} figures hold, {corrected} of them to a corrected value."]
    return "\n".join(lines).lstrip("\n")


def _study(study: Sequence[Row]) -> list[str]:
    """A line per spec, a column per source; bits are those of the first source, each row has its own."""
    sources = list(dict.fromkeys(r["source"] for r in study))
    table: dict[str, dict[str, Row]] = {}
    for r in study:
        table.setdefault(r["spec"], {})[r["source"]] = r
    cells = [["spec", f"bits, D={study[0]['head_dim']}", *sources]]
    for spec, by_source in table.items():
        bits = next((r["bits"] for r in by_source.values() if r["bits"] is not None), None)
        cells.append([spec, "-" if bits is None else f"{bits:.3f}", *(_error(by_source.get(s)) for s in sources)])
    return aligned(cells)


def _error(row: Row | None) -> str:
    if row is None or row["relative_mse"] is None:
        return "-"
    return f"{row['relative_mse']:.3g} ± {row['spread']:.1g}"


def write_folder(rows: Sequence[Row], out: str | Path, about: Mapping[str, Any]) -> list[Path]:
    """Write ``reproduce.md`` and ``reproduce.json`` to a folder, made when it does not exist."""
    folder = check_writable(out)
    about = {**about, "versions": ", ".join(f"{name} {version}" for name, version in versions().items())}
    claims, missing, study = parts(rows)
    data = {"about": about, "claims": claims, "not_recomputed": missing, "rate_distortion": study}
    write_json(folder / JSON, plain(data))
    head = ["# The papers' numbers, recomputed", "", *(f"{key}: {value}  " for key, value in about.items()), ""]
    write_whole(folder / MARKDOWN, "\n".join([*head, "```", terminal(rows), "```", ""]))
    return [folder / MARKDOWN, folder / JSON]
