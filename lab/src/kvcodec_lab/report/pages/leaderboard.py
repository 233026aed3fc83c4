"""The leaderboard: published runs of some models, plain and stressed, to a page of tables and to three sentences.

A published run is a folder with ``run.json``, ``results.json`` and ``items.jsonl.gz``
(``kvcodec_lab.eval.merge.pack``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from kvcodec.cli.page.figures import BITS, BOUND, METRICS, Axis, Curve, Plot, Point
from kvcodec.cli.page.rows import RUN, UNCOMPRESSED, Results, Row, mapping, number, read_folder
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import (
    DASH,
    about_task,
    bits_text,
    change_text,
    headline,
    interval_text,
    listed,
    metric_name,
    value_text,
)
from kvcodec.errors import FormatError
from kvcodec_lab.report.ranks import EXACT, WITHIN, Agreement, Interval, agreement

BUDGET = 4.5
"""Bits of the first sentence."""
NAIVE = "int-4"
FEW = 3
"""Presets that two runs must have in common to be compared."""

Runs = Mapping[str, Results]


def read_runs(folder: str | Path) -> dict[str, Results]:
    """Published runs below a folder by name.

    The model that caches the most numbers per token stands first, and a model's plain runs before its stressed ones.

    Raises
    ------
    FormatError
        If one is damaged.
    """
    found = {p.parent.name: read_folder(p.parent) for p in sorted(Path(folder).glob(f"*/{RUN}"))}
    return dict(sorted(found.items(), key=lambda item: (_place(item[1]), bool(stress_text(item[1])), item[0])))


def _place(results: Results) -> tuple[float, str]:
    """Numbers of K that the model caches per token, the most first; then its name."""
    model = mapping(results.about.get("model"))
    sizes = [number(model.get(name)) or 0 for name in ("layers", "kv_heads", "head_dim")]
    return -math.prod(sizes), model_name(results)


def model_name(results: Results) -> str:
    """What the run calls its model."""
    return str(mapping(results.about.get("model")).get("name", ""))


def stress_text(results: Results) -> str:
    """``64:1`` for a run on a model with outlier channels; empty for a plain one."""
    stress = mapping(mapping(results.about.get("settings")).get("stress"))
    return f"{stress.get('factor', 0):g}:{stress.get('pairs')}" if stress else ""


def kind(results: Results) -> str:
    """How a column is called: stressed or not, and ``mean`` of specs that do not say it, where that is not ``none``."""
    text = stress_text(results)
    mean = mapping(results.about.get("settings")).get("mean", "none")  # runs of before there was the option lack it
    return (f"stressed {text}" if text else "plain") + (f", mean={mean}" if mean != "none" else "")


# -- the page ----------------------------------------------------------------------------------------------------------


def tables(runs: Runs) -> str:
    """Markdown: for each model how it was run, and a table for each task; empty without runs."""
    models: dict[str, dict[str, Results]] = {}
    for name, results in runs.items():
        models.setdefault(model_name(results), {})[name] = results
    parts = []
    for model, mine in models.items():
        parts += [f"## {model}", *(f"- {_how(name, results)}" for name, results in mine.items())]
        for task in dict.fromkeys(task for results in mine.values() for task in results.tasks):
            parts += [_task(task, list(mine.values()))]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1)


def _how(name: str, results: Results) -> str:
    about = results.about
    model, versions = mapping(about.get("model")), mapping(about.get("versions"))
    shown = ", ".join(f"{key} {value}" for key, value in versions.items())
    prefill, remark = mapping(about.get("settings")).get("prefill"), about.get("remark")
    return (
        f"{kind(results)} (`{name}`): {_shape(model)}{model.get('dtype')} on {about.get('device_name')}, prefill "
        f"{prefill}, seed {about.get('seed')}, {shown}, weights `{str(model.get('sha256'))[:12]}`"
        + (f". {remark}" if remark else "")
    )


def _shape(model: Mapping[str, Any]) -> str:
    """What decides the bits of a preset and the size of a cache."""
    layers, heads, dim = (number(model.get(name)) for name in ("layers", "kv_heads", "head_dim"))
    return "" if None in (layers, heads, dim) else f"{layers} layers, {heads} KV heads, head_dim {dim}, "


def _task(task: str, runs: Sequence[Results]) -> str:
    """One task: every spec's true bits and main metric in each run, and what else the first run measured."""
    first = next(results for results in runs if task in results.tasks)
    main, *others = first.metrics(task)
    rows = [{r.spec: r for r in results.rows if (r.task, r.metric, r.group) == (task, main, None)} for results in runs]
    heads = ["preset", "bits"]
    for results in runs:
        heads += [f"{kind(results)}: {metric_name(main)}", "difference"]
    heads += [metric_name(metric) for metric in others]
    lines = []
    for spec in sorted({spec for of in rows for spec in of}, key=lambda spec: _order(spec, rows)):
        bits = next((of[spec]["effective_bits"] for of in rows if spec in of), None)
        cells = [f"`{spec}`", bits_text(bits)]
        for of in rows:
            cells += [_value(of.get(spec)), _change(of.get(spec))]
        cells += [_value(first.row(task, metric, spec)) for metric in others]
        lines.append(cells)
    about = about_task(task)
    counted = _items(task, runs)
    told = " ".join(filter(None, [about.is_, about.is_not, counted]))
    return f"### {headline(task, main)}\n\n{told}\n\n{markdown(heads, lines)}"


def _order(spec: str, rows: Sequence[Mapping[str, Row]]) -> tuple[bool, float, float, str]:
    """The uncompressed model, then the best value of the first run that has one, then the fewest bits."""
    row = next((of[spec] for of in rows if spec in of), None)
    value = row["value"] if row else None
    if row is None or value is None:
        return spec != UNCOMPRESSED, float("inf"), 0.0, spec
    return spec != UNCOMPRESSED, value if row.better == "lower" else -value, row["effective_bits"] or 0.0, spec


def _value(row: Row | None) -> str:
    if row is None:
        return DASH
    text = f"{value_text(row.metric, row['value'])} {interval_text(row.metric, row['low'], row['high'])}".strip()
    items, planned = row["items"], row["planned"]
    return text if items is None or planned is None or items >= planned else f"{text} ({items:g} of {planned:g} items)"


def _change(row: Row | None) -> str:
    if row is None:
        return DASH
    return change_text(row.metric, row["difference"], row["difference_low"], row["difference_high"])


def _items(task: str, runs: Sequence[Results]) -> str:
    counts = sorted({int(r["planned"] or 0) for results in runs for r in results.rows if r.task == task})
    chance = next((c for results in runs if (c := results.chance(task)) is not None), None)
    guess = "" if chance is None else f" Guessing gives {100 * chance:.0f} %."
    return f"{' or '.join(map(str, counts))} items.{guess}"


def points(results: Results) -> list[Point]:
    """KL over true bits of every preset that has both and is not exact."""
    found = []
    for row in results.rows:
        whole = (row.task, row.metric, row.group) == ("kl", "kl", None) and row.spec not in EXACT
        value, bits = row["value"], row["effective_bits"]
        if whole and value is not None and bits is not None and value > 0:
            found.append(Point(row.spec, bits, value, row["low"], row["high"]))
    return found


def plots(runs: Runs) -> list[Plot]:
    """KL over true bits, a panel for each run that has it.

    A run of other presets on the same windows of the same model, with the same stress, is drawn in the same panel.
    """
    held: dict[tuple[object, ...], tuple[str, list[Point]]] = {}
    for name, results in runs.items():
        found, about = points(results), mapping(mapping(results.about.get("tasks")).get("kl"))
        windows = tuple(about.get(key) for key in ("text_sha256", "window_tokens", "items"))
        key = (model_name(results), stress_text(results), *windows)
        title, before = held.get(key, ("", []))
        if before and found and not {p.spec for p in before} & {p.spec for p in found}:
            held[key] = f"{title}; {listed([p.spec for p in found])}: {kind(results)}", before + found
        else:
            held[(*key, name) if before else key] = named(results), found
    y = Axis(METRICS["kl"], "log")
    return [Plot(title, BITS, y, found, names="all", size=(8.0, 6.4)) for title, found in held.values() if found]


# -- one model for another ---------------------------------------------------------------------------------------------


def named(results: Results) -> str:
    """Model and kind of a run."""
    return f"{model_name(results)}, {kind(results)}"


def pairs(runs: Runs) -> list[tuple[Results, Results]]:
    """What predicts and what is predicted: a smaller model and a larger one, or a plain run and a stressed one."""
    both = combinations(runs.values(), 2)
    return [(a, b) if model_name(a) == model_name(b) else (b, a) for a, b in both]


def prediction(runs: Runs) -> str:
    """Markdown: how well the order of presets on one run predicts that on another; empty without two runs."""
    found = [(a, b, of) for a, b in pairs(runs) if (of := agreement(a, b)) is not None]
    if not found:
        return ""
    heads = ["run", "predicts", "presets", "windows", "Spearman", "Kendall", "hold on both"]
    heads += ["only on the first", "only on the second", "on neither", "Spearman of those that hold"]
    lines, told = [], []
    for a, b, of in found:
        windows = f"{_windows(a)} and {_windows(b)}"
        cells = [named(a), named(b), str(len(of.specs)), windows, _ranked(of.spearman), _ranked(of.kendall)]
        cells += [str(len(specs)) for specs in (of.both, of.first_only, of.second_only, of.neither)]
        lines.append([*cells, DASH if of.held is None else f"{of.held:.2f}"])
        told.append(f"- {_predicted(named(a), named(b), of)}")
    return f"{markdown(heads, lines)}\n\n" + "\n".join(told)


def _predicted(first: str, second: str, of: Agreement) -> str:
    """Which presets a run is right about, and which not."""
    kinds = {"Hold on both": of.both, "only on the first": of.first_only, "only on the second": of.second_only}
    told = [f"{name}: {_names(specs)}" for name, specs in kinds.items()]
    return f"{first} for {second}. {'; '.join(told)}."


def _names(specs: Sequence[str]) -> str:
    return listed([f"`{spec}`" for spec in specs], len(specs)) if specs else "none"


def _ranked(found: Interval) -> str:
    value, low, high = found
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _windows(results: Results) -> str:
    row = results.row("kl", "kl", UNCOMPRESSED)
    return DASH if row is None or row["items"] is None else f"{row['items']:g}"


def pair_plots(runs: Runs) -> list[Plot]:
    """KL on one run over KL on another, a panel for each of ``pairs`` with at least ``FEW`` presets in common."""
    plots = []
    for a, b in pairs(runs):
        across = {p.spec: p.y for p in points(a)}
        found = [Point(p.spec, across[p.spec], p.y, p.low, p.high) for p in points(b) if p.spec in across]
        if len(found) < FEW:
            continue
        ends = [v for p in found for v in (p.x, p.y)]
        equal = Curve("equal", [(min(ends), min(ends)), (max(ends), max(ends))], BOUND)
        x, y = (Axis(f"KL on what stands {side} 'over' (nats per token)", "log") for side in ("behind", "before"))
        plots.append(Plot(f"{named(b)} over {named(a)}", x, y, found, [equal], names="all", size=(8.0, 6.4)))
    return plots


# -- the sentences -----------------------------------------------------------------------------------------------------


def sentences(plain: Results, stressed: Results) -> list[str]:
    """Three sentences: who loses least at a budget of bits, who still finds, who holds with outlier channels.

    Raises
    ------
    FormatError
        If a run lacks what they quote: perplexity, kl and needle of the plain one, perplexity of the stressed one.
    """
    return [_least(plain), _found(plain), _held(stressed)]


def retrieval_sentences(results: Results) -> list[str]:
    """Three sentences of one run: who loses least at a budget of bits, who still finds a number, and who a UUID.

    Raises
    ------
    FormatError
        If the run lacks what they quote: perplexity, kl, needle and kv_retrieval.
    """
    return [_least(results), _found(results), found_values(results)]


def _least(results: Results) -> str:
    fitting = [r for r in _rows(results, "kl", "kl") if (r["effective_bits"] or 99.0) <= BUDGET]
    if not fitting:
        raise FormatError(f"{results.folder}: no preset holds {BUDGET:g} bits or fewer on kl.")
    best = min(fitting, key=lambda r: _number(results, r))
    perplexity, base = (_row(results, "perplexity", "perplexity", spec) for spec in (best.spec, UNCOMPRESSED))
    return (
        f"Of the presets that hold at most {BUDGET:g} bits, `{best.spec}` ({bits_text(best['effective_bits'])}) loses "
        f"least on {model_name(results)}: a KL of {_value(best)}, and a perplexity of {_value(perplexity)} beside "
        f"{value_text('perplexity', base['value'])} without compression ({best['items']:g} windows)."
    )


def _found(results: Results) -> str:
    return _recalled(results, "needle", "A number hidden in up to {} tokens of text")


def found_values(results: Results) -> str:
    """Sentence: who gives back one random UUID among as many as fit.

    Raises
    ------
    FormatError
        If the run has no kv_retrieval.
    """
    return _recalled(results, "kv_retrieval", "One random UUID of as many as fit {} tokens")


def _recalled(results: Results, task: str, what: str) -> str:
    rows = _rows(results, task, "recall")
    base = _row(results, task, "recall", UNCOMPRESSED)
    # None: one item, or none in common: not shown to be as good
    kept = [r for r in rows if r["difference_high"] is not None and r["difference_high"] >= 0]
    text = (
        f"{what.format(_longest(results, task))}, which the uncompressed model gives back in {_value(base)} of the "
        f"prompts, is found no less often (the paired interval of the difference reaches 0) with {len(kept)} of "
        f"{len(rows)} presets"
    )
    return f"{text}{_fewest(kept)}."


def _held(results: Results) -> str:
    rows = _rows(results, "perplexity", "perplexity")
    base = _number(results, _row(results, "perplexity", "perplexity", UNCOMPRESSED))
    kept = [r for r in rows if _number(results, r) <= WITHIN * base]
    naive = _row(results, "perplexity", "perplexity", NAIVE)
    return (
        f"With outlier channels in the keys (stress {stress_text(results)}: the same model, larger keys), {len(kept)} "
        f"of {len(rows)} presets stay within {100 * (WITHIN - 1):.0f} % of the uncompressed perplexity of "
        f"{value_text('perplexity', base)}{_fewest(kept)}, and `{NAIVE}` goes to "
        f"{value_text('perplexity', naive['value'])}."
    )


def _fewest(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    row = min(rows, key=lambda r: (r["effective_bits"] or 99.0, r.spec))
    return f", `{row.spec}` with the fewest bits ({bits_text(row['effective_bits'])})"


def _longest(results: Results, task: str) -> str:
    lengths = mapping(mapping(results.about.get("tasks")).get(task)).get("lengths")
    if not isinstance(lengths, Iterable) or not (known := [int(n) for n in lengths]):
        raise FormatError(f"{results.folder}: {RUN} does not say the lengths of {task}.")
    return f"{max(known):,}"


def _rows(results: Results, task: str, metric: str) -> list[Row]:
    """Whole rows of the presets, the exact one left out.

    Raises
    ------
    FormatError
        If there is none.
    """
    found = [r for r in results.rows if (r.task, r.metric, r.group) == (task, metric, None)]
    found = [r for r in found if r.spec not in EXACT]
    if not found:
        raise FormatError(f"{results.folder} holds no {metric} of {task}.")
    return found


def _row(results: Results, task: str, metric: str, spec: str) -> Row:
    row = results.row(task, metric, spec)
    if row is None:
        raise FormatError(f"{results.folder} holds no {metric} of {task} for {spec}.")
    return row


def _number(results: Results, row: Row) -> float:
    """Value of a row; infinite where it overflowed."""
    return float("inf") if row["value"] is None else row["value"]
