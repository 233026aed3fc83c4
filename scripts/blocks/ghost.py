"""Blocks of docs/ghost.md, on the project's own method.

ghost       beside the best of the others, from the run TODAY, ALL_RESULTS, ADDED and FITTED
ghost-steps what each of its steps gains, from STEPS; STEPS_FIGURE shows it
ghost-fresh the same beside others on texts that it was not designed on, from the runs below FRESH
ghost-rate  its error at its bits beside Shannon's bound and other methods, from REPRODUCED
ghost-speed its decode attention beside that of saw-int4, with and without the ghost term, from DECODE
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blocks.sources import (
    DECODE,
    MORE_BITS,
    OWN,
    SHAPES,
    SPEED,
    TODAY,
    Blocks,
    Judged,
    MissingResultError,
    judged,
    quality_rows,
    rows_of,
)
from kvcodec.cli.measure.rows import Row
from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.figures import SPEED_TITLES
from kvcodec.cli.page.rows import UNCOMPRESSED, mapping, read_rows
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import DASH, listed
from kvcodec.errors import KVError
from kvcodec.registry import presets
from kvcodec_lab.bench.record import newest
from kvcodec_lab.bench.summary import Table
from kvcodec_lab.eval.merge import unpack
from kvcodec_lab.eval.stats import against, summarize
from kvcodec_lab.eval.store import Run

FITTED = Path("benchmarks/results/cpu/ghost_smollm2-135m.json")
FITTED_LARGE = Path("benchmarks/results/nvidia-h100/ghost_qwen2.5-coder-1.5b.json")
"""`ghost` on the small model and on the real one with constants of `kvcodec fit`."""
ALIKE = Path("benchmarks/results/cpu/ghost_alike_smollm2-135m.json")
"""Other methods with the dense first tokens of `ghost`, without the keys' mean, and with SEARCHED."""
SEARCHED = "scale=search"
"""Option of the specs of ALIKE whose scales are searched."""
REPRODUCED = Path("docs/reproduce/reproduce.json")
STEPS = "benchmarks/results/*/ghost_steps_*.json"
STEPS_FIGURE = Path("docs/img/ghost-steps.png")
"""Of `benchmarks/ghost_steps.py`, a file for each model."""
SPEED_WITH_TERM = Path("benchmarks/results/nvidia-h100")
"""Folder of its decode attention with the ghost term; all presets' are in SPEED."""
FRESH, PLAIN, STRESSED, NEEDLE = Path("benchmarks/results/fresh"), "plain", "stressed", "needle-4k"
"""Published runs MODEL/TEXT/plain and /stressed of texts of `benchmarks/fresh_texts.py`, and MODEL/NEEDLE/plain."""
FITTED_RUN = "fitted"
WITHOUT_GRADIENTS = "fitted-without-gradients"
"""MODEL/TEXT/fitted: constants of `kvcodec fit` on another text, on windows of the plain run; and of the same fit of a
KLT in which tokens count alike, which MODEL/wikitext-begin has without a plain run."""
BESIDE = ("ghost-3", "ghost-4")
"""What the others are compared with there."""


def ghost_block(root: Path) -> str:
    """Each preset of Ghost, and the preset of any other method with the least loss at about its bits."""
    values, uncompressed = judged(root, TODAY)
    small = quality_rows(root)

    def fitted(path: Path) -> list[tuple[str, float, float, float, str]]:
        rows = rows_of(root / path) if (root / path).is_file() else []
        own = ["own samples" in r["params"]["text"] for r in rows]
        notes = [", fitted on its own samples" if drawn else ", fitted" for drawn in own]
        told = zip(rows, notes, strict=True)
        return [(r["spec"], r["effective_bits"], r["kl"], r["perplexity"], note) for r, note in told]

    large = [(spec, *of, "") for spec, of in values.items()] + fitted(FITTED_LARGE)
    told = [(r["spec"], r["effective_bits"], r["kl"], r["perplexity"], "") for r in small] + fitted(FITTED)
    out = []
    for title, rows, base in (
        ("Qwen2.5-Coder-1.5B-Instruct", large, uncompressed),
        (small[0]["model"], told, small[0]["uncompressed"]["perplexity"]),
    ):
        numbers, lines = ["bits", "KL", "perplexity"], []
        own = sorted((r for r in rows if r[0].startswith(OWN)), key=lambda r: (r[1], -r[2]))
        for spec, held, kl, perplexity, note in own:
            near = [r for r in rows if not r[0].startswith(OWN) and r[0] in presets() and r[1] <= held + MORE_BITS]
            best = min(near, key=lambda r: r[2], default=None)
            cells = [f"`{spec}`{note}", f"{held:.2f}", f"{kl:.4f}", f"{perplexity:.2f}"]
            cells += (
                [DASH] * 4 if best is None else [f"`{best[0]}`", f"{best[1]:.2f}", f"{best[2]:.4f}", f"{best[3]:.2f}"]
            )
            lines.append(cells)
        heads = [f"{title}, perplexity {base:.2f}", *numbers, "of the others", *numbers]
        out += [markdown(heads, lines, text=(0, 4)), ""]
    return "\n".join(out) + (
        f"\nThree windows of 2,048 tokens of WikiText-2; bits of every byte held, with the four dense first tokens. Of "
        f"the others: the preset of least KL with at most {MORE_BITS:g} bits more. Fitted: constants of `kvcodec fit` "
        f"on another text, or on what the model draws itself; the other rows take them from the prompt. "
        f"{least_sentence(values)}{alike_table(root, [r for r in told if r[0] in BESIDE])}"
    )


def alike_table(root: Path, own: Sequence[tuple[str, float, float, float, str]] = ()) -> str:
    """Other methods with the first tokens, means and searched scale of ours, and ours; nothing where none was measured.

    Parameters
    ----------
    root : Path
    own : sequence
        Rows of ours on the same model: spec, bits, KL, perplexity, a note.
    """
    if not (root / ALIKE).is_file():
        return ""
    found: dict[str, dict[bool, dict[str, Any]]] = {}
    for row in sorted(rows_of(root / ALIKE), key=lambda row: row["effective_bits"]):
        name, _, options = row["spec"].partition(":")
        kept = [option for option in options.split(",") if option != SEARCHED]
        found.setdefault(f"{name}:{','.join(kept)}", {})[len(kept) < len(options.split(","))] = row
    lines = []
    for spec, rows in found.items():
        kls = [f"{rows[searched]['kl']:.4f}" if searched in rows else DASH for searched in (False, True)]
        some = next(iter(rows.values()))
        lines.append([f"`{spec}`", f"{some['effective_bits']:.2f}", *kls])
    lines += [[f"`{spec}`{note}", f"{bits:.2f}", DASH, f"{kl:.4f}"] for spec, bits, kl, _, note in own]
    heads = [f"on {some['model']}", "bits", "KL", f"KL with `{SEARCHED}`"]
    return (
        "\n\nOthers with what `ghost` has and a published method may have as well: four dense first tokens, some with "
        "keys without their mean (`mean=pre`), and of several scales the one of least squared error "
        f"(`{SEARCHED}`), in the same bytes. Then `ghost`, which does all of it:\n\n{markdown(heads, lines)}"
    )


def least_sentence(values: Mapping[str, "Judged"]) -> str:
    """Which presets of other methods lose less than `ghost-4` on the real model, and which is next to it."""
    own = values["ghost-4"]
    others = sorted((of.kl, spec, of.bits) for spec, of in values.items() if spec in presets() and OWN not in spec)
    less = [f"`{spec}` ({bits:.2f} bits, {kl:.4f})" for kl, spec, bits in others if kl <= own.kl]
    more = [(kl, spec, bits) for kl, spec, bits in others if kl > own.kl]
    (kl, spec, bits), int8 = more[0], values["int-8"]
    return (
        f"On Qwen2.5-Coder-1.5B-Instruct `ghost-4` loses less than every preset of other methods"
        f"{f' but {listed(less)}' if less else ''}: `{spec}`, the next, has a KL of {kl:.4f} at {bits:.2f} bits, "
        f"`int-8` {int8.kl:.4f} at {int8.bits:.2f}."
    )


def steps_of(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of STEPS by model."""
    return {rows[0]["model"]: rows for rows in map(rows_of, sorted(root.glob(STEPS)))}


def write_figures(root: Path) -> bool:
    """Draw STEPS_FIGURE if there are rows for it; whether there are."""
    models = steps_of(root)
    if models:
        some = next(iter(models.values()))
        own = next(row["spec"] for row in some if row["spec"].startswith(OWN))
        title = f"What each step gains: {own} on {some[0]['text']}"
        pictures.write([figures.ablation(models, title)], root / STEPS_FIGURE)
    return bool(models)


def ghost_steps_block(root: Path) -> str:
    """A figure, and a row for each step, with the KL of each model."""
    models = {name: {row["step"]: row for row in rows} for name, rows in steps_of(root).items()}
    if not models:
        return "Not measured yet: `benchmarks/ghost_steps.py` makes the rows."
    steps = dict.fromkeys(step for rows in models.values() for step in rows)
    lines = []
    for step in steps:
        cells = [step]
        for rows in models.values():
            row = rows.get(step)
            cells += [DASH] * 2 if row is None else [f"{row['effective_bits']:.2f}", f"{row['kl']:.4f}"]
        lines.append(cells)
    some = next(iter(next(iter(models.values())).values()))
    heads = ["step", *(head for model in models for head in (f"{model}: bits", "KL"))]
    return (
        f"![KL after each step of ghost]({STEPS_FIGURE.relative_to('docs')})\n\n"
        f"{markdown(heads, lines)}\n\n{some['windows']} windows of {some['window_tokens']:,} tokens of {some['text']}, "
        f"constants of the prompt itself where a row does not say fitted; bits of every byte held."
    )


def ghost_rate_block(root: Path) -> str:
    """Relative MSE of each preset of Ghost, and of the best other preset with hardly more bits, by source."""
    try:
        rows = json.loads((root / REPRODUCED).read_text(encoding="utf-8"))["rate_distortion"]
    except (OSError, ValueError, KeyError) as error:
        raise MissingResultError(f"{REPRODUCED}: {error}; `kvcodec reproduce --model M --out` writes it.") from error
    rows = [row for row in rows if row["relative_mse"]]
    sources = [s for s in dict.fromkeys(row["source"] for row in rows) if "keys of" in s or "values of" in s]
    sources.insert(0, "Gaussian keys")
    heads = ["preset", "4^-bits", *(part for source in sources for part in (source, "of the others"))]
    lines = []
    for row in sorted((r for r in rows if r["method"] == OWN and r["source"] == sources[0]), key=lambda r: r["bits"]):
        cells = [f"`{row['spec']}`", f"{4.0 ** -row['bits']:.4f}"]
        for source in sources:
            here = [r for r in rows if r["source"] == source]
            own = next(r for r in here if r["spec"] == row["spec"])
            near = [r for r in here if r["method"] != OWN and r["bits"] <= own["bits"] + MORE_BITS]
            best = min(near, key=lambda r: r["relative_mse"], default=None)
            cells += [f"{own['relative_mse']:.4f}"]
            cells += [DASH if best is None else f"{best['relative_mse']:.4f} (`{best['spec']}`, {best['bits']:.2f})"]
        lines.append(cells)
    return (
        f"{markdown(heads, lines)}\n\nMean square of the error over that of the vectors, first tokens encoded as "
        f"well; constants fitted on the vectors themselves. Of the others: the preset of least error with at most "
        f"{MORE_BITS:g} bits more, with its bits. [All presets, and the figure](reproduce/reproduce.md)."
    )


def ghost_speed_block(root: Path) -> str:
    """Decode attention of Ghost compared with saw-int4's, with and without the mean term, on each GPU."""
    found = (newest(read_rows(sorted((root / folder).glob(DECODE)))) for folder in (SPEED_WITH_TERM, SPEED))
    tables = [told for rows in found if (told := speed_table(rows))]
    return "\n\n".join(tables) or "Not measured yet: `kvcodec bench decode --device cuda` makes the rows."


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Of one GPU; empty without rows."""
    table = Table(rows)
    names = ("saw-int4", "saw-int4:mean=pre", *(spec for spec in presets() if spec.startswith(OWN)))
    lines = []
    for spec in names:
        cells = [f"`{spec}`"]
        for shape in SHAPES:
            time, gain = (table.median(spec, f"{what}_cold", shape) for what in ("decode_us", "speedup_vs_bf16"))
            here = [r for r in rows if (r["spec"], r["shape"]) == (spec, shape)]
            without = " without the term" if spec.startswith(OWN) and not any("mean" in r for r in here) else ""
            cells.append(DASH if time is None or gain is None else f"{time:.0f} µs, {gain:.2f}x{without}")
        if set(cells[1:]) != {DASH}:
            lines.append(cells)
    if not lines:
        return ""
    gpus = " and ".join(sorted({str(r["gpu"]) for r in rows}))
    return (
        f"{markdown(['preset', *(SPEED_TITLES[shape] for shape in SHAPES)], lines)}\n\nMedians of a step's attention "
        f"of a layer with a cold L2 on one {gpus}, and times as fast as the fastest 16-bit attention of the same run."
    )


def published(folder: Path) -> Run:
    """A published run with its items, those that every spec has finished.

    Raises
    ------
    MissingResultError
        If there is none, or it is damaged.
    """
    try:
        with tempfile.TemporaryDirectory() as made:
            run = unpack(folder, made)
    except KVError as error:
        raise MissingResultError(str(error)) from error
    done: dict[tuple[str, str], set[str]] = {}
    for line in run.lines:
        if not line.get("error"):
            done.setdefault((line["task"], line["item"]), set()).add(line["spec"])
    whole = {key for key, specs in done.items() if specs >= {UNCOMPRESSED, *run.about["specs"]}}
    return replace(run, lines=[line for line in run.lines if (line["task"], line["item"]) in whole])


def ghost_fresh_block(root: Path) -> str:
    """For each model a table of every preset, and Ghost under stress and on a needle test."""
    models = sorted(path for path in (root / FRESH).glob("*") if path.is_dir())
    parts = []
    for folder in models:
        texts = sorted(path.parent.name for path in folder.glob(f"*/{PLAIN}") if path.parent.name != NEEDLE)
        runs = [published(folder / text / PLAIN) for text in texts]
        parts.append(_fresh_table(texts, runs))
        fitted, without = ([folder / text / name for text in texts] for name in (FITTED_RUN, WITHOUT_GRADIENTS))
        if all(path.is_dir() for path in fitted):
            others = [published(path) for path in without if path.is_dir()]
            parts.append(_fitted_table(texts, runs, [published(path) for path in fitted], others))
        if both := [(path.with_name(FITTED_RUN), path) for path in sorted(folder.glob(f"*/{WITHOUT_GRADIENTS}"))]:
            parts.append(_gradients_table([(published(own), published(path)) for own, path in both]))
        if stressed := [published(path) for text in texts if (path := folder / text / STRESSED).is_dir()]:
            parts.append(_stressed_sentence(runs, stressed))
        if (folder / NEEDLE).is_dir():
            parts.append(_needle_sentence(published(folder / NEEDLE / PLAIN)))
    return "\n\n".join(parts) or "Not measured yet: `benchmarks/evaluate.py` on texts of `benchmarks/fresh_texts.py`."


def _kl_rows(runs: Sequence[Run]) -> dict[str, Row]:
    """Row of each spec's KL over the items of all runs."""
    found = (row for row in against(runs, UNCOMPRESSED) if row["metric"] == "kl")
    return {row["other"]: row for row in found}


def _fresh_table(texts: Sequence[str], runs: Sequence[Run]) -> str:
    about, whole = runs[0].about, _kl_rows(runs)
    beside = {own: {r["other"]: r for r in against(runs, own) if r["metric"] == "kl"} for own in BESIDE}
    each = [_kl_rows([run]) for run in runs]
    held = {row["spec"]: row["effective_bits"] for run in runs for row in summarize(run) if row["effective_bits"]}
    lines = []
    for spec, row in sorted(whole.items(), key=lambda item: item[1]["other_value"]):
        cells = [f"`{spec}`", f"{held[spec]:.2f}", *(f"{one[spec]['other_value']:.4f}" for one in each)]
        cells.append(f"{row['other_value']:.4f}")
        for own in BESIDE:
            of = beside[own].get(spec)
            cells.append(DASH if of is None else f"{-of['difference']:+.4f} [{-of['high']:+.4f}, {-of['low']:+.4f}]")
        lines.append(cells)
    heads = [about["model"]["name"], "bits", *(f"KL, {text}" for text in texts), "KL, all"]
    windows, size = next(iter(whole.values()))["items"], about["tasks"]["kl"]["window_tokens"]
    heads += [f"less `{own}`" for own in BESIDE]
    return (
        f"{markdown(heads, lines)}\n\n{windows} windows of {size:,} tokens; the last columns are a preset's KL less "
        f"that of ours on the same windows, with the interval of 95 % over windows."
    )


def _together(runs: Mapping[str, Run]) -> Run:
    """Runs on the same text as one; the specs of each are followed by what it is called, and nothing for ``""``."""
    specs, lines = [], []
    for name, run in runs.items():
        end = f", {name}" if name else ""
        specs += [f"{spec}{end}" for spec in run.about["specs"]]
        kept = (line for line in run.lines if line["spec"] != UNCOMPRESSED)
        lines += [line | {"spec": f"{line['spec']}{end}"} for line in kept]
    first = next(iter(runs.values()))
    return replace(first, about=first.about | {"specs": specs}, lines=lines)


def _fitted_table(texts: Sequence[str], plain: Sequence[Run], fitted: Sequence[Run], without: Sequence[Run]) -> str:
    """KL with constants of a file, and paired with those of the prompt and with a fit without gradients.

    Parameters
    ----------
    texts : sequence of str
    plain, fitted : sequence of Run
        For each text.
    without : sequence of Run
        The fit without gradients; for each text, or empty.
    """
    names = {"fitted": fitted, "without gradients": without}
    merged = []
    for number, run in enumerate(plain):
        more = {name: runs[number] for name, runs in names.items() if runs[number : number + 1]}
        merged.append(_together({"": run, **more}))

    def beside(runs: Sequence[Run], spec: str, other: str) -> Row | None:
        found = (r for r in against(runs, f"{spec}, fitted") if r["metric"] == "kl" and r["other"] == other)
        return next(found, None)

    lines = []
    windows = 0
    for spec in fitted[0].about["specs"]:
        name = spec.split(":")[0]
        each, whole = [beside([one], spec, name) for one in merged], beside(merged, spec, name)
        assert whole is not None
        windows = whole["items"]
        cells = [f"`{spec}`", *(f"{row['value']:.4f}" if row else DASH for row in each), f"{whole['value']:.4f}"]
        for row in (whole, beside(merged, spec, f"{spec}, without gradients")):
            cells += [DASH] if row is None else [f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"]
        lines.append(cells if without else cells[:-1])
    novel = next(iter(fitted[0].about["params"].values()))["text"]
    heads = [f"{fitted[0].about['model']['name']}, fitted", *(f"KL, {text}" for text in texts), "KL, all"]
    heads += ["less from the prompt", *(["less a fit without gradients"] if without else [])]
    return (
        f"{markdown(heads, lines)}\n\nConstants of `kvcodec fit` on another novel (`{novel}`), on {windows} of these "
        f"windows; the last columns are the KL less that of other constants on the same windows."
    )


def _gradients_table(pairs: Sequence[tuple[Run, Run]]) -> str:
    """KL and perplexity of a fit with gradients beside those of one without, on all windows of both."""
    runs = [_together({"with": own, "without": other}) for own, other in pairs]
    lines, windows = [], 0
    for spec in pairs[0][1].about["specs"]:
        rows = {r["metric"]: r for r in against(runs, f"{spec}, with") if r["other"] == f"{spec}, without"}
        cells = [f"`{spec}`"]
        for metric, digits in (("kl", 4), ("perplexity", 2)):
            if (row := rows.get(metric)) is None:
                cells += [DASH] * 3
                continue
            change, low, high = (f"{100 * row[key] / row['other_value']:+.1f}" for key in ("difference", "low", "high"))
            cells += [f"{row[key]:.{digits}f}" for key in ("value", "other_value")] + [f"{change} % [{low}, {high}]"]
            windows = row["items"]
        lines.append(cells)
    heads = [f"{pairs[0][0].about['model']['name']}, fitted"]
    heads += [head for name in ("KL", "perplexity") for head in (f"{name} with gradients", "without", "change")]
    return (
        f"{markdown(heads, lines)}\n\nOn all {windows} windows that have both, those of the beginning of WikiText-2 "
        f"included; intervals of the paired differences."
    )


def _stressed_sentence(plain: Sequence[Run], stressed: Sequence[Run]) -> str:
    """KL of Ghost under stress, and of the same windows without it."""
    items = {line["item"] for run in stressed for line in run.lines}
    alike = [replace(run, lines=[line for line in run.lines if line["item"] in items]) for run in plain]
    usual, loud = _kl_rows(alike), _kl_rows(stressed)
    own = [(spec, row["other_value"]) for spec, row in loud.items() if spec.startswith(OWN)]
    told = [f"{kl:.4f}, {kl / usual[spec]['other_value']:.2f} times as much" for spec, kl in own]
    named = [
        f"`{spec}` {'is ' if i == 0 else ''}{text}" for i, ((spec, _), text) in enumerate(zip(own, told, strict=True))
    ]
    text = mapping(stressed[0].about["settings"]["stress"])
    return (
        f"With outlier channels ([stress](stress.md) {text['factor']:g}:{text['pairs']}) on the same windows the KL of "
        f"{'; '.join(named)}."
    )


def _needle_sentence(run: Run) -> str:
    rows = [row for row in summarize(run) if row["metric"] == "recall" and row["group"] is None]
    found = {row["spec"]: f"{row['value'] * row['items']:.0f}" for row in rows}
    told = [f"`{spec}` {'finds ' if i == 1 else ''}{n}" for i, (spec, n) in enumerate(found.items()) if i]
    length = run.about["tasks"]["needle"]["lengths"][0]
    return (
        f"Of {rows[0]['items']} numbers hidden in {length:,} tokens of a novel, one each, "
        f"{listed(told)}, the uncompressed model {found[UNCOMPRESSED]}."
    )


BLOCKS: Blocks = {
    "ghost": (Path("docs/ghost.md"), ghost_block),
    "ghost-steps": (Path("docs/ghost.md"), ghost_steps_block),
    "ghost-fresh": (Path("docs/ghost.md"), ghost_fresh_block),
    "ghost-rate": (Path("docs/ghost.md"), ghost_rate_block),
    "ghost-speed": (Path("docs/ghost.md"), ghost_speed_block),
}
