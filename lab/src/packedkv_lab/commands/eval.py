"""``packedkv eval``: arguments, the steps of a run, and the tables it prints."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packedkv.cli.arguments import (
    Result,
    add_model,
    add_probe,
    add_reading,
    add_text,
    depths,
    lengths,
    not_negative,
    positive,
    specs,
)
from packedkv.cli.commands.compare import NEW_TOKENS, measure, read_constants
from packedkv.cli.page.tables import aligned
from packedkv.cli.page.words import scalar_text
from packedkv.errors import SpecError

WINDOWS = 3
"""Default of ``--spec``: that of ``compare``."""
TASKS = "perplexity,kl,needle"
OUTPUT = "packedkv-eval"
SINGLE = "--spec in place of --specs"
SPECS = "presets, e.g. saw-int4,kivi-2:window=64; transformers' own quantized cache: quanto-4, hqq-4"


def add_arguments(p: argparse.ArgumentParser) -> None:
    from packedkv_lab.eval.tasks import task_names

    add_model(p)
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--specs", type=specs, metavar="A,B", help=SPECS)
    which.add_argument("--spec", metavar="SPEC", help="one preset and no tasks: everything that `compare` measures")
    p.add_argument(
        "--tasks",
        type=specs,
        metavar="T,U",
        help=f"of: {', '.join(task_names())} ({TASKS}); T:limit=N for a limit of its own",
    )
    p.add_argument(
        "--limit", type=positive, metavar="N", help="items of each task, drawn by the seed (each task's own)"
    )
    p.add_argument(
        "--output", metavar="DIR", help=f"folder of the results; a run that was begun there goes on ({OUTPUT})"
    )
    p.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="TASK=PATH",
        help="file or folder with a task's data: kv_retrieval=FILE (default: generated)",
    )
    p.add_argument("--lengths", type=lengths, metavar="N,M", help="prompt tokens of retrieval tasks, e.g. 1k,2k,8k")
    p.add_argument("--depths", type=depths, metavar="X,Y", help="where the needle stands, e.g. 0,0.5,1")
    p.add_argument("--batch", type=positive, metavar="N", help="most sequences of a call (4 on a CPU, else 16)")
    p.add_argument(
        "--share",
        metavar="DIR",
        help="an empty folder that several processes name, each with its own --output: they share the specs",
    )
    p.add_argument(
        "--against", type=specs, metavar="A,B", help="of the specs: how every other one differs from these, paired"
    )
    p.add_argument(
        "--stress", metavar="FACTOR[:PAIRS]", help="give the keys outlier channels first, with the same logits: 64:1"
    )
    add_text(p, windows=None)
    p.add_argument(
        "--new-tokens", type=not_negative, metavar="N", help=f"with --spec: generated tokens; 0 for none ({NEW_TOKENS})"
    )
    add_probe(p, None)
    add_reading(p)


def run(args: argparse.Namespace) -> Result:
    if args.spec is not None:
        return _single(args)
    for option, instead in (("windows", "--limit"), ("new_tokens", SINGLE), ("probe", SINGLE)):
        if getattr(args, option) is not None:
            raise SpecError(f"--{option.replace('_', '-')} is for --spec; use {instead}.")
    return _tasks(args)


def _single(args: argparse.Namespace) -> Result:
    from packedkv.cli.measure.compare import about
    from packedkv.cli.measure.quantized_cache import quantized_cache_of
    from packedkv.cli.measure.rows import plain

    for option in ("tasks", "limit", "output", "lengths", "depths", "batch", "share", "against", "stress"):
        if getattr(args, option) is not None:
            raise SpecError(f"--{option} is for tasks; use --specs {args.spec} in place of --spec {args.spec}.")
    if quantized_cache_of(args.spec) is not None:
        raise SpecError(f"{args.spec} is a cache of transformers; tasks read it: use --specs {args.spec} --tasks ...")
    args.windows = WINDOWS if args.windows is None else args.windows
    args.new_tokens = NEW_TOKENS if args.new_tokens is None else args.new_tokens
    rows = measure(args, [args.spec])
    row = plain(rows[0])
    width = max(map(len, row))
    lines = [f"{key:<{width}}  {scalar_text(x)}" for key, x in row.items() if not isinstance(x, dict | list)]
    return Result(rows, "\n".join([*lines, "", about(rows)]))


def _tasks(args: argparse.Namespace) -> Result:
    from packedkv.cli.measure.rows import check_writable, write_lines
    from packedkv.models.loading import load, load_text
    from packedkv.progress import Progress
    from packedkv_lab.eval.run import RunSettings, checked_specs, evaluate
    from packedkv_lab.eval.stats import against
    from packedkv_lab.eval.store import AGAINST, read_run
    from packedkv_lab.eval.stress import parse_stress, stress
    from packedkv_lab.eval.tasks import get_task
    from packedkv_lab.eval.tasks.base import TaskSettings

    spec_names = list(map(str, checked_specs(args.specs)))
    compared = list(map(str, checked_specs(args.against))) if args.against else []
    if strangers := sorted(set(compared) - set(spec_names)):
        raise SpecError(f"--against {', '.join(strangers)}: not among --specs; name it there as well.")
    names, limits = task_list(args.tasks or TASKS.split(","))
    data = data_paths(args.data)
    params = read_constants(args.params, args.specs)
    asked = None if args.stress is None else parse_stress(args.stress)
    settings = TaskSettings(
        text=load_text(args.text),
        limit=args.limit,
        limits=limits,
        seed=args.seed,
        data=data,
        lengths=args.lengths or (),
        depths=args.depths or (),
        window_tokens=args.window_tokens,
    )
    for name in names:
        get_task(name).source(settings)  # before a model is loaded
    folder, progress = check_writable(args.output or OUTPUT), Progress()
    model = load(args.model, progress=progress, device=args.device, dtype=args.dtype)
    changes: dict[str, Any] = {}
    if asked is not None:
        changes["stress"] = stress(model, *asked, seed=args.seed).settings()
    share = None if args.share is None else check_writable(args.share)
    chosen = RunSettings(settings, args.prefill, args.batch, args.budget, share, changes)
    evaluation = evaluate(model, args.specs, names, folder, chosen, params=params, progress=progress)
    texts = [tables(evaluation.rows)]
    if compared:
        rows = [row for spec in compared for row in against([read_run(evaluation.folder)], spec)]
        write_lines(evaluation.folder / AGAINST, rows)
        texts.append(differences(rows))
    texts.append(f"written: {evaluation.folder} (rows in results.json, items in items.jsonl)")
    return Result(evaluation.rows, "\n\n".join(texts))


def task_list(given: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Task names, and the limits given per task, ``needle:limit=200``; ``SpecError`` for anything else."""
    from packedkv_lab.eval.tasks import get_task

    names: list[str] = []
    limits: dict[str, int] = {}
    for item in given:
        name, colon, option = item.partition(":")
        task = get_task(name)
        if task.name in names:
            raise SpecError(f"given twice: {name}; name each task once.")
        names.append(task.name)
        if not colon:
            continue
        key, _, value = option.partition("=")
        if key != "limit" or not value.isdigit() or int(value) < 1:
            raise SpecError(f"{item!r}: a task takes one option, limit=N with N >= 1.")
        limits[task.name] = int(value)
    return names, limits


def data_paths(given: Sequence[str]) -> dict[str, Path]:
    """Read ``TASK=PATH``; ``SpecError`` for another form, two paths of one task, or a path that does not exist."""
    from packedkv_lab.eval.tasks import get_task

    paths: dict[str, Path] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not equals or get_task(name).name in paths:
            raise SpecError(f"--data {item!r}: write TASK=PATH once for each task, e.g. kv_retrieval=FILE.")
        paths[name] = Path(path).expanduser()
        if not paths[name].exists():
            raise SpecError(f"--data {item!r} does not exist; pass a file or folder with the task's data.")
    return paths


# -- what is printed ---------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table per task: each spec's metrics with intervals, the main one's difference from the uncompressed model."""
    whole = [row for row in rows if row["group"] is None]
    parts = [_table(task, [r for r in whole if r["task"] == task]) for task in dict.fromkeys(r["task"] for r in whole)]
    parts.append("[95 % interval over items; the difference's is paired with the uncompressed model on the same items]")
    return "\n\n".join(parts)


def differences(rows: Sequence[Mapping[str, Any]]) -> str:
    """How specs differ from one: a table for each task, metric and spec."""
    parts = []
    for key in dict.fromkeys((row["task"], row["metric"], row["spec"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["metric"], row["spec"]) == key]
        task, metric, spec = key
        lines = [["other", spec, "other's", f"{spec} - other's", "items"]]
        for row in mine:
            cells = [f"{row['value']:.4g}", f"{row['other_value']:.4g}"]
            cells += [_interval(row, "difference", "low", "high", sign="+"), str(row["items"])]
            lines.append([row["other"], *cells])
        parts.append("\n".join([f"{task}: {metric} of {spec}", *aligned(lines, ruled=True)]))
    return "\n\n".join(parts)


def _table(task: str, rows: Sequence[Mapping[str, Any]]) -> str:
    main, *others = dict.fromkeys(row["metric"] for row in rows)
    lines = [["spec", "bits", main, "difference", *others]]
    failed = 0
    for spec in dict.fromkeys(row["spec"] for row in rows):
        mine = {row["metric"]: row for row in rows if row["spec"] == spec}
        any_row = next(iter(mine.values()))
        failed += any_row["failed"]
        bits = any_row["effective_bits"]
        cells = [_interval(mine.get(m, {}), "value", "low", "high") for m in (main, *others)]
        difference = _interval(mine.get(main, {}), "difference", "difference_low", "difference_high", sign="+")
        lines.append([spec, "-" if bits is None else f"{bits:.2f}", cells[0], difference, *cells[1:]])
    items = sorted({row["items"] for row in rows})
    counted = str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"
    head = f"{task}: {counted} of {rows[0]['planned']} items, prefill={rows[0]['prefill']}"
    if failed:
        head += f", {failed} without a result (run.json says why)"
    return "\n".join([head, *aligned(lines, ruled=True)])


def _interval(row: Mapping[str, Any], value: str, low: str, high: str, sign: str = "") -> str:
    if row.get(value) is None:
        return "-"
    text = f"{row[value]:{sign}.4g}"
    if row.get(low) is None or row.get(high) is None:
        return text
    return f"{text} [{row[low]:{sign}.3g}, {row[high]:{sign}.3g}]"
