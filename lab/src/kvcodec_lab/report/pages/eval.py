"""The page of ``kvcodec eval``: its answer, drawings and tables, all numbers from the folder's results.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcodec.cli.page import html, svg
from kvcodec.cli.page.html import Cell, Section, escape, paragraph, plain
from kvcodec.cli.page.rows import UNCOMPRESSED, Json, Layers, Results, mapping
from kvcodec.cli.page.words import about_task, bytes_text, headline, listed, metric_name
from kvcodec_lab.report.answer import hardly_tried, judge, losses, sentences, whole_rows
from kvcodec_lab.report.pages import eval_figures as drawn
from kvcodec_lab.report.pages.eval_tables import heat_maps, name_cell, overview_table, task_table
from kvcodec_lab.report.sizes import CONTEXT, CONTEXTS, sizes

MOST_ITEMS = 4
"""Items whose answers are shown, of each task."""
INTERVALS = (
    "Intervals are 95 %: Wilson's where each item is right or wrong, else by the bootstrap over items, seeded. They "
    "say how far another draw of items of the same kind would move a number; they do not cover another text, another "
    "model or another seed of the codec. A difference is against the uncompressed model on the same items, resampled "
    "together, so it is known better than its two values. Of twenty intervals one may err by chance."
)
BITS = (
    "Bits are bytes: every byte that the cache held (codes, scales, sinks, windows, dense layers) x 8 / elements, "
    "measured in these items. A preset with a window of dense tokens looks dearer on short items than it is "
    "on long ones."
)
PREFILLS = {
    "decoded": "attention read decoded keys and values of every token, the prompt's own included",
    "exact": "attention read the prompt's exact keys and values while it was stored; only what came after was "
    "read from the compressed cache. Scores may look better than those of the compressed cache",
}


def page_html(
    results: Results,
    *,
    context: int = CONTEXT,
    bench: Sequence[Json] = (),
    layers: Layers | None = None,
    title: str = "",
) -> str:
    """Return the page as one text.

    Parameters
    ----------
    results : Results
    context : int
        Tokens of a sequence that bytes are shown for at first; ``CONTEXTS[0]`` to ``CONTEXTS[-1]``.
    bench : sequence of mapping
        Rows of ``kvcodec bench decode``; empty: no section on speed.
    layers : Layers, optional
        Figures by layer; None: no section on them.
    title : str
        Default: names the model.
    """
    contexts = sorted({*CONTEXTS, context})
    held, scaled = sizes(results, contexts)
    at = contexts.index(context)
    model = str(mapping(results.about.get("model")).get("name", "a model"))
    sections = [Section("Quality over true bits", _bits(results), "bits")]
    if held:
        memory = _memory(results, held, contexts, at, scaled)
        sections.append(Section("Quality over memory at your context", memory, "memory"))
    if bench and (found := drawn.speed(bench, results.specs)):
        sections.append(Section("Speed over true bits", found, "speed"))
    sections.append(Section("All presets", overview_table(results, held, at), "all"))
    sections.append(Section("Task by task", "".join(_task(results, task) for task in results.tasks), "tasks"))
    if layers is not None:
        sections.append(Section("Layer by layer", _layers(layers, model), "layers"))
    sections.append(Section("How it was measured", _how(results), "how"))
    frame = svg.NARROW._asdict() | {"letter": svg.LETTER}
    return html.page(
        title or f"Which KV cache for {model}?",
        sections,
        subtitle=_subtitle(results),
        top=_warnings(results) + _answer(results),
        footer="Written by kvcodec report. The numbers are those of the folder's results.json.",
        script="page.js",
        data={"sizes": {"contexts": contexts, "bytes": held, "frame": frame}} if held else None,
    )


# -- top ---------------------------------------------------------------------------------------------------------------


def _subtitle(results: Results) -> str:
    model = mapping(results.about.get("model"))
    told = [f"{len(results.specs)} presets", f"{len(results.tasks)} tasks"]
    if model.get("sha256"):
        told.append(f"weights sha256 {str(model['sha256'])[:12]}…")
    version = mapping(results.about.get("versions")).get("kvcodec")
    return ", ".join([*told, *([f"kvcodec {version}"] if version else [])])


def _warnings(results: Results) -> str:
    told = []
    states = {row.status for row in results.rows}
    short = sum(
        1
        for row in results.rows
        if row.group is None and row["planned"] and (row["items"] or 0) < (row["planned"] or 0)
    )
    if states & {"interrupted", "budget"} or short:
        why = (
            "was interrupted" if "interrupted" in states else "spent its time" if "budget" in states else "is not done"
        )
        told.append(
            f"The run {why}: some numbers cover fewer items than were drawn (the column items says how many). The same "
            f"kvcodec eval goes on with it."
        )
    if results.unsummarised:
        told.append(
            f"{results.unsummarised} further items are finished and not in these numbers: the run went on after "
            f"results.json was written."
        )
    failed = {row.spec for row in results.rows if row["failed"]}
    if failed:
        told.append(f"Some items gave no result with {listed(sorted(failed))}; they are left out. Remarks say why.")
    changes = {k: v for k, v in mapping(results.about.get("settings")).items() if k != "prefill" and v is not None}
    if changes:
        told.append(f"The model was changed before it was measured: {plain(changes)}.")
    exact = {row.prefill for row in results.rows} & {"exact"}
    if exact:
        told.append(f"Prefill was exact: {PREFILLS['exact']}.")
    return "".join(paragraph(text, "warn") for text in told)


def _answer(results: Results) -> str:
    task = judge(results)
    first, *others = sentences(results)
    lost = "".join(f"<li><b>{escape(name)}:</b> {escape(text)}</li>" for name, text in losses(results))
    metric = results.metrics(task)[0]
    items = max((row["items"] or 0 for row in whole_rows(results, task)), default=0)
    ends = "in brackets 95 % intervals" if items > 1 else "one item gives no interval: more items are needed"
    by = f"Judged by {headline(task, metric)}, {items:.0f} item{'s' * (items != 1)}; {ends}."
    return (
        f'<div class="lead">{paragraph(first)}{html.listing(others)}{paragraph(by, "soft")}'
        f"{f'<p>On tasks with a right answer:</p><ul>{lost}</ul>' if lost else ''}</div>"
    )


# -- sections ----------------------------------------------------------------------------------------------------------


def _bits(results: Results) -> str:
    told = (
        f"{BITS} The line joins presets that no cheaper one beats; bars are 95 % intervals, the band is the "
        f"uncompressed model's."
    )
    return f"{paragraph(told)}{html.legend(results.specs)}{drawn.over_bits(results)}"


def _memory(
    results: Results, held: Mapping[str, Sequence[float]], contexts: Sequence[int], at: int, scaled: list[str]
) -> str:
    told = (
        "Bytes of one sequence's cache, computed from byte layouts, sinks, windows and dense layers in 16 bit; pages, "
        "block tables and constants add less than a percent. Quality is that of the run's items, which may be shorter "
        "than your context."
    )
    if scaled:
        told += f" Scaled from measured bits, because this program does not know them: {listed(scaled)}."
    dense = bytes_text(held[UNCOMPRESSED][at])
    return (
        f"{paragraph(told)}"
        f'<p class="asked" id="asked" hidden><label for="context">Tokens of a sequence</label><input id="context" '
        f'type="number" inputmode="numeric" min="{contexts[0]}" max="{contexts[-1]}" value="{contexts[at]}"></p>'
        f'<p>At <span class="atcontext">{contexts[at]:,}</span> tokens the 16-bit cache takes '
        f'<span class="denseat">{dense}</span>.</p>'
        f"{drawn.over_bytes(results, held, at)}"
    )


def _task(results: Results, task: str) -> str:
    about = about_task(task)
    metrics = results.metrics(task)
    chance = results.chance(task)
    guess = f" Guessing scores {100 * chance:.0f} %." if chance is not None else ""
    words = f"<p>{escape(about.is_)}{guess}</p>" if about.is_ else ""
    if about.is_not:
        words += f"<p><b>What it does not say:</b> {escape(about.is_not)}</p>"
    words += _short(results, task)
    meanings = html.definitions((metric_name(m), t) for m in metrics if (t := results.metric_text(task, m)))
    grids = heat_maps(results, task)
    if grids:
        words_of = f"{metric_name(metrics[0])}; greener is better, redder worse; few items stand behind each cell"
        grids = f'<p class="soft">{escape(words_of)}:</p>{grids}'
    return (
        f'<h3 id="task-{escape(task)}">{escape(about.title)}</h3>{words}{task_table(results, task)}{grids}'
        f"{_answers(results, task)}<details><summary>What the columns mean</summary>{meanings}</details>"
    )


def _short(results: Results, task: str) -> str:
    """Name the presets that were hardly tested."""
    found = [f"{r.spec} ({r['effective_bits']:.1f} bits here)" for r in hardly_tried(whole_rows(results, task))]
    if not found:
        return ""
    told = (
        f"Items are so short that windows of dense tokens and unfilled pages make up the cache of {listed(found)}: "
        f"scores here say little or nothing about what is encoded."
    )
    return f'<p class="warn">{escape(told)}</p>'


def _answers(results: Results, task: str) -> str:
    """Answers of some items on which presets differ from 16 bit."""
    by_item: dict[str, dict[str, Json]] = {}
    for line in results.answers:
        if line["task"] == task:
            by_item.setdefault(line["item"], {})[line["spec"]] = line
    lines: list[list[Cell]] = []
    shown = 0
    for held in by_item.values():
        base = held.get(UNCOMPRESSED)
        if base is None or shown == MOST_ITEMS:
            continue
        others = [x for spec, x in held.items() if spec != UNCOMPRESSED and x["output"] != base["output"]]
        if not others:
            continue
        shown += 1
        for line in (base, *others):
            place = ", ".join(f"{k} {plain(v)}" for k, v in mapping(line.get("group")).items())
            output = Cell(line["output"], kind="said") if line["output"] else Cell("nothing", kind="partial")
            lines.append([Cell(place if line is base else ""), name_cell(str(line["spec"])), output])
    if not lines:
        return ""
    table = html.table(["item", "preset", "answer"], lines, name="answers")
    return f"<details><summary>Answers that differ from 16 bit ({shown} items)</summary>{table}</details>"


def _layers(found: Layers, model: str) -> str:
    other = f" <b>Measured on {escape(found.model)}.</b>" if found.model and found.model != model else ""
    told = (
        "From kvcodec advise: what it costs to compress the keys, or the values, of one layer alone. It shows where "
        "bits are needed; costs of layers do not quite add up."
    )
    return f"<p>{escape(told)}{other}</p>{drawn.layers(found)}"


def _how(results: Results) -> str:
    about = results.about
    model = dict(mapping(about.get("model")))
    seconds = sum(r["seconds"] or 0 for r in {(r.spec, r.task): r for r in results.rows}.values())
    prefills = list(dict.fromkeys(row.prefill for row in results.rows))
    told: list[tuple[str, Any]] = [
        ("model", model.pop("name", "")),
        ("weights", {k: v for k, v in model.items() if v is not None}),
        ("versions", about.get("versions")),
        ("device", " ".join(dict.fromkeys(str(about[k]) for k in ("device", "device_name") if about.get(k)))),
        ("seed", about.get("seed")),
        ("prefill", "; ".join(f"{p}: {PREFILLS[p]}" if p in PREFILLS else p for p in prefills)),
        ("settings", about.get("settings")),
        ("time", f"{seconds:,.0f} s, of all items together"),
    ]
    if about.get("later_versions"):
        told.append(("went on with", about["later_versions"]))
    fitted = {k: v for k, v in mapping(about.get("params")).items() if v}
    if fitted:
        told.append(("fitted constants", fitted))
    for task, settings in mapping(about.get("tasks")).items():
        kept = {k: v for k, v in mapping(settings).items() if k not in ("metrics", "chance") and v is not None}
        told.append((about_task(task).title, kept))
    notes = "".join(
        f"<li><b>{escape(spec)}</b>: {escape(text.removeprefix(spec + ' '))}</li>"
        for spec, texts in mapping(about.get("notes")).items()
        for text in (texts if isinstance(texts, list) else [texts])
    )
    remarks = f"<h3>Remarks of the run</h3><ul>{notes}</ul>" if notes else ""
    return f"<p>{escape(INTERVALS)}</p>{html.definitions(told)}{remarks}"
