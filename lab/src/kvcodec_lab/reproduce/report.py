"""What ``kvcodec reproduce`` shows: a table for the terminal; a folder of Markdown, JSON and figures.

Reads rows, measures nothing. Rows are those of ``claims.reproduce_rows`` and of
``rate_distortion.rate_distortion_rows``, in one list.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcodec.cli.measure.rows import Row, check_writable, plain, write_json
from kvcodec.cli.page import pictures
from kvcodec.cli.page.figures import rate_distortion, recomputed
from kvcodec.cli.page.tables import aligned
from kvcodec.cli.page.tables import markdown as markdown_table
from kvcodec.cli.stamp import versions
from kvcodec.errors import KVError
from kvcodec_lab.reproduce.claims import NOT_PRINTED, PAPERS, axes_of
from kvcodec_lab.reproduce.rate_distortion import STUDY

MARKDOWN, JSON, FIGURE = "reproduce.md", "reproduce.json", "rate-distortion"
CLOSE = 0.01


def parts(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Split into claims, tables that cannot be recomputed, and rate-distortion rows."""
    study = [r for r in rows if r["paper"] == STUDY]
    others = [r for r in rows if r["paper"] != STUDY]
    return [r for r in others if r["ours"] is not None], [r for r in others if r["ours"] is None], study


def summary(claims: Sequence[Row]) -> str:
    """One line of counts."""
    holding = sum(bool(r["holds"]) for r in claims)
    close = sum(r.get("band", 0.0) is not None and abs(r["relative_error"]) <= CLOSE for r in claims)
    corrected = sum(r.get("spec") is not None for r in claims)
    unprinted = sum(not is_printed(r) for r in claims)
    text = f"{holding} of {len(claims)} figures hold, {close} of them within 1 %"
    if unprinted:
        text += f"; {unprinted} are in no paper: their reference was computed from its text"
    return f"{text}; {corrected} are held to a corrected value instead of the printed one." if corrected else f"{text}."


def is_printed(row: Row) -> bool:
    """Whether the paper prints the table that a row belongs to."""
    return not str(row["table"]).startswith(NOT_PRINTED)


def source_of(row: Row) -> str:
    """Heading of the column that ours is compared with."""
    return "paper" if is_printed(row) else "reference"


def verdict(row: Row) -> str:
    """``holds``, ``corrected`` (holds to the value that the paper should have), or ``DIFFERS``."""
    if not row["holds"]:
        return "DIFFERS"
    return "holds" if row.get("spec") is None else "corrected"


def number(value: Any) -> str:
    """Five significant digits; a dash for none."""
    return "-" if value is None else f"{value:.5g}"


def percent(value: float) -> str:
    """Signed, two decimals."""
    return f"{100 * value:+.2f} %"


def terminal(rows: Sequence[Row]) -> str:
    """Paper, ours and difference, one block per table; then what cannot be recomputed, and the best per rate."""
    claims, missing, study = parts(rows)
    lines: list[str] = []
    for (paper, table), block in _by_table(claims).items():
        lines += ["", f"{PAPERS.get(paper, paper)}, {table}"]
        cells = [("", "", source_of(block[0]), "corrected", "ours", "difference", "")]
        for r in block:
            spec, name = number(r.get("spec")), f"{r['item']}, {r['metric']}"
            mark = " (partial)" if r.get("partial") else ""
            difference = percent(r["relative_error"])
            cells.append(
                (verdict(r) + mark, name, number(r["printed"]), spec, number(r["ours"]), difference, r["note"])
            )
        lines += [f"  {line}".rstrip() for line in aligned(cells, text=(0, 1, 6))]
    if missing:
        lines += ["", "Not recomputed"]
        lines += [f"  {r['paper']}, {r['table']}: {r['note']}" for r in missing]
    if study:
        lines += ["", "Relative MSE at true bits (rate-distortion), mean and spread"]
        lines += study_lines(study)
    if claims:
        lines += ["", summary(claims)]
    return "\n".join(lines).lstrip("\n")


def _by_table(claims: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in claims:
        tables.setdefault((row["paper"], row["table"]), []).append(row)
    return tables


def study_lines(study: Sequence[Row]) -> list[str]:
    """A line per spec, a column per source; bits are those of the first source, each row has its own."""
    sources = list(dict.fromkeys(r["source"] for r in study))
    table: dict[str, dict[str, Row]] = {}
    for r in study:
        table.setdefault(r["spec"], {})[r["source"]] = r
    cells = [["spec", f"bits, D={study[0]['head_dim']}", *sources]]
    for spec, found in table.items():
        bits = next((r["bits"] for r in found.values() if r["bits"] is not None), None)
        cells.append([spec, "-" if bits is None else f"{bits:.3f}", *(_error_text(found.get(s)) for s in sources)])
    return aligned(cells)


def _error_text(row: Row | None) -> str:
    if row is None or row["relative_mse"] is None:
        return "-"
    return f"{row['relative_mse']:.3g} ± {row['spread']:.1g}"


def markdown(rows: Sequence[Row], figures: Mapping[tuple[str, str], str], about: Mapping[str, Any]) -> str:
    """The whole run as one page; ``figures`` maps (paper, table) to file names beside it."""
    claims, missing, study = parts(rows)
    lines = ["# The papers' numbers, recomputed", ""]
    lines += [f"{key}: {value}  " for key, value in about.items()]
    lines += ["", summary(claims), ""] if claims else [""]
    differing = [r for r in claims if verdict(r) != "holds"]
    if differing:
        lines += ["## What does not hold as printed", ""]
        lines += [
            f"- {r['paper']}, {r['table']}: {r['item']}, {r['metric']}: printed {number(r['printed'])}, "
            f"ours {number(r['ours'])} ({percent(r['printed_error'])}). {r['note']}"
            for r in differing
        ]
        lines.append("")
    tables = _by_table(claims)
    for paper in dict.fromkeys(r["paper"] for r in [*claims, *missing]):
        lines += [f"## {PAPERS.get(paper, paper)}", ""]
        for (of, table), block in tables.items():
            if of == paper:
                lines += _markdown_table(table, block, figures.get((paper, table)))
        reasons = [r for r in missing if r["paper"] == paper]
        if reasons:
            lines += ["### Not recomputed", "", *(f"- {r['table']}: {r['note']}" for r in reasons), ""]
    if study:
        lines += ["## Rate and distortion at true bits", ""]
        if (STUDY, "") in figures:
            lines += [f"![relative MSE over bits per element]({figures[STUDY, '']})", ""]
        lines += ["```", *study_lines(study), "```", ""]
        refused = {r["spec"]: r["note"] for r in study if r["note"]}
        lines += [f"- {spec}: {note}" for spec, note in refused.items()]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: str, block: Sequence[Row], figure: str | None) -> list[str]:
    lines = [f"### {table}", ""]
    if figure:
        lines += [f"![{table}]({figure})", ""]
    heads, found = ["what", source_of(block[0]), "corrected", "ours", "difference", "", "note"], []
    for r in block:
        cells = [f"{r['item']}, {r['metric']}", number(r["printed"]), number(r.get("spec")), number(r["ours"])]
        cells += [percent(r["relative_error"]), verdict(r), r["note"]]
        found.append([c.replace("|", "\\|") for c in cells])
    return [*lines, markdown_table(heads, found, text=(0, 5, 6)), ""]


def write_folder(rows: Sequence[Row], out: str | Path, about: Mapping[str, Any]) -> list[Path]:
    """Write ``reproduce.md``, ``reproduce.json`` and the figures.

    Parameters
    ----------
    rows : list of dict
    out : path
        Made when it does not exist.
    about : mapping
        Said on top of the page and in the JSON: seconds, quick, model.

    Returns
    -------
    list of Path

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    KVError
        If the folder cannot be written.
    """
    folder = check_writable(out)
    about = {**about, "versions": ", ".join(f"{name} {version}" for name, version in versions().items())}
    claims, missing, study = parts(rows)
    paths: list[Path] = []
    figures: dict[tuple[str, str], str] = {}
    for (paper, table), block in _by_table(claims).items():
        axes = axes_of(paper, table)
        points = [r for r in block if r["curve"]]
        if axes is not None and points:
            name = "".join(c if c.isalnum() else "-" for c in f"{paper}-{table}".lower()).strip("-") + ".png"
            while "--" in name:
                name = name.replace("--", "-")
            title = f"{PAPERS[paper]}, {table}"
            plot = recomputed(points, title, x=axes.x, y=axes.y, log_y=axes.log_y)
            pictures.write([plot], folder / name)
            paths.append(folder / name)
            figures[paper, table] = name
    if study:
        for suffix in (".png", ".svg"):
            paths.append(folder / (FIGURE + suffix))
            pictures.write(rate_distortion(study), paths[-1])
        figures[STUDY, ""] = FIGURE + ".png"
    data = {"about": about, "claims": claims, "not_recomputed": missing, "rate_distortion": study}
    write_json(folder / JSON, plain(data))
    page = folder / MARKDOWN
    try:
        page.write_text(markdown(rows, figures, about), encoding="utf-8")
    except OSError as error:
        raise KVError(f"{page} cannot be written ({error.strerror or error}); choose another folder.") from error
    return [page, folder / JSON, *paths]
