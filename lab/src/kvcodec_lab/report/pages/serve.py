"""The page of ``bench serve``: tables and drawings of its rows in one self-contained file, and each drawing as SVG."""

from collections.abc import Sequence

from kvcodec.cli.page import html, svg
from kvcodec.cli.page.figures import Axis, Curve, Plot, curve_styles
from kvcodec.cli.page.html import Cell, Section
from kvcodec.cli.page.rows import runs_of
from kvcodec_lab.serve.tables import BASELINES, Chart, Grid, Row, charts, tables

METHOD = (
    "Prompts are random token ids; outputs have the length asked for (ignore_eos), greedy. A time begins when a "
    "request is sent; its body was written before. TTFT: until the first event with a token; E2E: until the last; "
    "TPOT: (E2E - TTFT) / (output tokens - 1); throughput: tokens of requests answered whole / time from the first "
    "request to the end of the last, as vLLM's own benchmark has them. Requests that failed are in no time and are "
    "counted beside it. Under pressure the rate per request flatters a small cache: it runs few requests at once while "
    "the others wait; the system's throughput does not. client_cpu in a row is the share of a core that the clients "
    "took: near 1, they were the limit."
)


def page_html(rows: Sequence[Row]) -> str:
    """Return the page as one text."""
    drawn = html.drawings([svg.draw(plot_of(chart)) for chart in charts(rows)])
    commands = {str(r["spec"]): str(r["command"]) for r in rows if r.get("command")}
    measured = html.paragraph(METHOD) + html.definitions([*runs_of(rows).items(), *commands.items()])
    sections = [
        *(Section(table.title, html.paragraph(table.note) + _table(table)) for table in tables(rows)),
        Section("Drawings", drawn) if drawn else "",
        Section("How it was measured", measured),
    ]
    return html.page("Serving under load", sections)


def _table(table: Grid) -> str:
    headings, lines = [*table.headings], [[*map(Cell, line)] for line in table.lines]
    if any(table.whys):
        headings.append("missing because")
        lines = [[*line, Cell(why, kind="why")] for line, why in zip(lines, table.whys, strict=True)]
    return html.table(headings, lines, name=table.title)


def plot_of(chart: Chart) -> Plot:
    """A chart's curves as a figure; y begins at 0."""
    styles = curve_styles([curve.label for curve in chart.curves], BASELINES)
    curves = [Curve(curve.label, curve.points, styles[curve.label]) for curve in chart.curves]
    x = Axis(chart.x, "doubling" if chart.doubling else "linear")
    y = Axis(chart.y, from_zero=True, text="{:,g}".format, tick="{:,g}".format)
    return Plot(chart.title, x, y, curves=curves, names="all")


def drawing(chart: Chart) -> str:
    """Return a chart as the text of an SVG file."""
    return svg.standalone(svg.draw(plot_of(chart)))
