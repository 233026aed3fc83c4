"""The page: its sections in order, every word that comes from a file escaped.

One file without any other: style and script stand in it, and a policy in its head lets the browser fetch nothing and
run this script alone.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from kvcodec_lab.report import drawing, plots
from kvcodec_lab.report.answer import hardly_tried, judge, losses, sentences, whole_rows
from kvcodec_lab.report.drawing import escape
from kvcodec_lab.report.folder import UNCOMPRESSED, Json, Layers, Results, mapping
from kvcodec_lab.report.presets import STYLE, bytes_text
from kvcodec_lab.report.sizes import CONTEXTS, sizes
from kvcodec_lab.report.tables import heat_maps, overview_table, swatch, task_table
from kvcodec_lab.report.words import about_task, headline, listed, metric_name

CONTEXT = 32_768
MOST_ITEMS = 4
"""Items whose answers are shown, of each task."""
INTERVALS = (
    "Intervals are 95 %, by the bootstrap over items, seeded. They say how far another draw of items of the same kind "
    "would move a number; they do not cover another text, another model or another seed of the codec. A difference is "
    "against the uncompressed model on the same items, resampled together, so it is known better than its two values. "
    "Of twenty intervals one may err by chance."
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
    sections: list[tuple[str, str, str]] = [("bits", "Quality over true bits", _bits(results))]
    if held:
        sections.append(("memory", "Quality over memory at your context", _memory(results, held, contexts, at, scaled)))
    if bench:
        drawn, note = plots.speed(bench, results.specs)
        if drawn:
            sections.append(("speed", "Speed over true bits", f"<p>{escape(note)}</p>{drawn}"))
    sections.append(("all", "All presets", overview_table(results, held, at)))
    sections.append(("tasks", "Task by task", "".join(_task(results, task) for task in results.tasks)))
    if layers is not None:
        sections.append(("layers", "Layer by layer", _layers(layers, model)))
    sections.append(("how", "How it was measured", _how(results)))
    shown = title or f"Which KV cache for {model}?"
    script = _file("page.js")
    data = {"contexts": contexts, "bytes": held, "frame": _FRAME}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"img-src data:; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(shown)}</title><style>{STYLE}{_file('page.css')}</style></head><body>",
        f"<header><h1>{escape(shown)}</h1>{_subtitle(results)}</header>",
        "<main>",
        _warnings(results),
        _answer(results),
        "<nav aria-label='sections'>"
        + "".join(f'<a href="#{i}">{escape(name)}</a>' for i, name, _ in sections)
        + "</nav>",
        *(f'<section id="{i}"><h2>{escape(name)}</h2>{text}</section>' for i, name, text in sections),
        "</main>",
        "<footer>Written by kvcodec report. The numbers are those of the folder's results.json.</footer>",
        f'<script type="application/json" id="sizes">{_data(data)}</script>' if held else "",
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


_FRAME = {
    "width": drawing.WIDTH, "height": drawing.HEIGHT, "left": drawing.LEFT, "right": drawing.RIGHT,
    "top": drawing.TOP, "bottom": drawing.BOTTOM, "letter": drawing.LETTER,
}  # fmt: skip


def _file(name: str) -> str:
    return resources.files("kvcodec_lab.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _data(value: Any) -> str:
    """JSON that may stand in a script element: no tag can end it."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# -- top ---------------------------------------------------------------------------------------------------------------


def _subtitle(results: Results) -> str:
    model = mapping(results.about.get("model"))
    told = [f"{len(results.specs)} presets", f"{len(results.tasks)} tasks"]
    if model.get("sha256"):
        told.append(f"weights sha256 {str(model['sha256'])[:12]}…")
    version = mapping(results.about.get("versions")).get("kvcodec")
    return f'<p class="soft">{escape(", ".join([*told, *([f"kvcodec {version}"] if version else [])]))}</p>'


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
        told.append(f"The model was changed before it was measured: {_plain(changes)}.")
    exact = {row.prefill for row in results.rows} & {"exact"}
    if exact:
        told.append(f"Prefill was exact: {PREFILLS['exact']}.")
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in told)


def _answer(results: Results) -> str:
    task = judge(results)
    first = "".join(f"<p>{escape(text)}</p>" for text in sentences(results)[:1])
    others = "".join(f"<li>{escape(text)}</li>" for text in sentences(results)[1:])
    lost = "".join(f"<li><b>{escape(name)}:</b> {escape(text)}</li>" for name, text in losses(results))
    metric = results.metrics(task)[0]
    items = max((row["items"] or 0 for row in whole_rows(results, task)), default=0)
    ends = "in brackets 95 % intervals" if items > 1 else "one item gives no interval: more items are needed"
    by = f"Judged by {headline(task, metric)}, {items:.0f} item{'s' * (items != 1)}; {ends}."
    return (
        f'<div class="lead">{first}{f"<ul>{others}</ul>" if others else ""}<p class="soft">{escape(by)}</p>'
        f"{f'<p>On tasks with a right answer:</p><ul>{lost}</ul>' if lost else ''}</div>"
    )


# -- sections ----------------------------------------------------------------------------------------------------------


def _bits(results: Results) -> str:
    return (
        f"<p>{escape(BITS)} The line joins presets that no cheaper one beats; bars are 95 % intervals, the band is the "
        f"uncompressed model's.</p>{plots.legend(results.specs)}{plots.over_bits(results)}"
    )


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
        f"<p>{escape(told)}</p>"
        f'<p class="asked" id="asked" hidden><label for="context">Tokens of a sequence</label><input id="context" '
        f'type="number" inputmode="numeric" min="{contexts[0]}" max="{contexts[-1]}" value="{contexts[at]}"></p>'
        f'<p>At <span class="atcontext">{contexts[at]:,}</span> tokens the 16-bit cache takes '
        f'<span class="denseat">{dense}</span>.</p>'
        f"{plots.over_bytes(results, held, at)}"
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
    meanings = _definitions((metric_name(m), t) for m in metrics if (t := results.metric_text(task, m)))
    grids = heat_maps(results, task)
    if grids:
        words_of = f"{metric_name(metrics[0])}; greener is better, redder worse; few items stand behind each cell"
        grids = f'<p class="soft">{escape(words_of)}:</p>{grids}'
    return (
        f'<h3 id="task-{escape(task)}">{escape(about.title)}</h3>{words}{task_table(results, task)}{grids}'
        f"{_answers(results, task)}<details><summary>What the columns mean</summary>{meanings}</details>"
    )


def _short(results: Results, task: str) -> str:
    """Say which presets were hardly tried."""
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
    rows = []
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
            place = ", ".join(f"{k} {_plain(v)}" for k, v in mapping(line.get("group")).items())
            spec = "16 bit" if line is base else str(line["spec"])
            rows.append(
                f'<tr><td>{escape(place if line is base else "")}</td><th scope="row">{swatch(str(line["spec"]))}'
                f"{escape(spec)}</th><td>{escape(line['output']) or '<i>nothing</i>'}</td></tr>"
            )
    if not rows:
        return ""
    return (
        f"<details><summary>Answers that differ from 16 bit ({shown} items)</summary>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="answers"><table class="answers"><thead><tr>'
        f'<th scope="col">item</th><th scope="col">preset</th><th scope="col">answer</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _layers(found: Layers, model: str) -> str:
    other = f" <b>Measured on {escape(found.model)}.</b>" if found.model and found.model != model else ""
    told = (
        "From kvcodec advise: what it costs to compress the keys, or the values, of one layer alone. It shows where "
        "bits are needed; costs of layers do not quite add up."
    )
    return f"<p>{escape(told)}{other}</p>{plots.layers(found)}"


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
        f"<li><b>{escape(spec)}</b>: {escape(text)}</li>"
        for spec, texts in mapping(about.get("notes")).items()
        for text in (texts if isinstance(texts, list) else [texts])
    )
    remarks = f"<h3>Remarks of the run</h3><ul>{notes}</ul>" if notes else ""
    return f"<p>{escape(INTERVALS)}</p>{_definitions(told)}{remarks}"


def _definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    items = "".join(
        f"<dt>{escape(k)}</dt><dd>{escape(_plain(v))}</dd>" for k, v in pairs if v is not None and v not in ("", {}, [])
    )
    return f"<dl>{items}</dl>" if items else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{str(k).replace('_', ' ')} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
