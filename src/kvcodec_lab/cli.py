"""The command line: ``kvcodec demo | list | describe | fit | compare | eval | advise | bench | reproduce | report``.

Results go to standard output, everything else to standard error; with ``--json -`` standard output is valid JSON and
nothing else. Exit status: 0 done, 1 advise found nothing within --max-kl or bench serve met failures, 2 a mistake that
one line explains, 130 interrupted (what was finished is written).
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import kvcodec
from kvcodec.errors import KVError, ShapeError
from kvcodec.registry import split_specs
from kvcodec_lab.arguments import (
    add_codec_file,
    add_device,
    add_head_dim,
    add_model,
    add_probe,
    add_reading,
    add_text,
    check_target,
    positive,
)

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = _parser().parse_args(argv)
    form, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        for path in args.codec_file:
            kvcodec.load_file(path)
        if args.json not in (None, "-"):
            check_target("--json", args.json, ", or - for standard output")
        status = args.run(args)
        assert isinstance(status, int)
        return status
    except KVError as error:
        print(f"kvcodec: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvcodec: interrupted before anything was finished.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        warnings.formatwarning = form


# -- commands ----------------------------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from kvcodec.progress import Progress
    from kvcodec_lab.demo import BUDGET, MODEL, NEW_TOKENS, run_demo, show
    from kvcodec_lab.eval.compare import Settings
    from kvcodec_lab.models import load_text

    rows, meta, paths = run_demo(
        args.model or MODEL,
        args.specs,
        text=load_text(args.text),
        windows=args.windows,
        budget=BUDGET if args.budget is None else args.budget,
        out=Path(args.out),
        progress=Progress(),
        settings=Settings(window_tokens=args.window_tokens, new_tokens=NEW_TOKENS, probe=args.probe),
    )
    return _finish(args, rows, lambda: show(rows, meta, paths))


def _fit(args: argparse.Namespace) -> int:
    """Fit and write; everything that can be refused is refused before the model loads."""
    from kvcodec.progress import Progress
    from kvcodec_lab.fit import about, about_text, check_fit, fit_model
    from kvcodec_lab.models import load, load_text

    check_target("--out", args.out)
    text = load_text(args.text)
    check_fit(args.spec, text.text, args.window_tokens)
    begun, progress = time.monotonic(), Progress()
    model = load(args.model, progress=progress, device=args.device, dtype=args.dtype)
    fitted = fit_model(
        model,
        args.spec,
        text.text,
        windows=args.windows,
        window_tokens=args.window_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
        text_name=text.name,
        progress=progress,
    )
    try:
        fitted = fitted.save(args.out)
    except OSError as error:
        raise KVError(str(error)) from error
    found = about(fitted) | {"file": args.out, "seconds": time.monotonic() - begun}
    return _finish(args, found, lambda: about_text(found, args.windows))


def _compare(args: argparse.Namespace) -> int:
    from kvcodec_lab.demo import about
    from kvcodec_lab.eval.command import measure
    from kvcodec_lab.eval.rows import plain, table

    rows = measure(args, args.specs)
    return _finish(args, rows, lambda: f"{table(plain(rows))}\n\n{about(rows)}")


def _eval(args: argparse.Namespace) -> int:
    from kvcodec_lab.eval import command

    rows, text = command.run(args)
    return _finish(args, rows, lambda: text)


def _advise(args: argparse.Namespace) -> int:
    from kvcodec_lab.advise import command

    found, text, status = command.run(args)
    return _finish(args, found, lambda: text) or status


def _list(args: argparse.Namespace) -> int:
    rows = [_list_row(preset, args.head_dim) for preset in kvcodec.presets()]

    def text() -> str:
        heads = ("preset", "K bits", "V bits", "block", "sink", "window", "kernels", "what it is")
        lines = [heads, *(_list_cells(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads) - 1)]
        out = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]) for line in lines]
        out.insert(1, "  ".join("-" * w for w in [*widths, len(heads[-1])]))
        bits = f"bits: all bytes of an encoded block x 8 / elements, at head_dim {args.head_dim}; windows not counted"
        return "\n".join([*out, "", bits, "Options of one of them: kvcodec describe PRESET"])

    return _finish(args, rows, text)


def _list_row(preset: str, head_dim: int) -> dict[str, Any]:
    keys = ("spec", "method", "source", "key_bits", "value_bits", "effective_bits", "nominal_bits", "block_tokens",
            "sink", "window", "kernels", "summary")  # fmt: skip
    try:
        found = kvcodec.describe(preset, head_dim)
    except ShapeError as error:  # listed all the same: the reader sees why it cannot be used at this head_dim
        found = kvcodec.describe(preset)
        found |= {"key_bits": None, "value_bits": None, "effective_bits": None, "nominal_bits": None}
        return {key: found[key] for key in keys} | {"head_dim": head_dim, "refused": str(error)}
    return {key: found[key] for key in keys} | {"head_dim": head_dim}


def _list_cells(row: dict[str, Any]) -> tuple[str, ...]:
    bits = ["-" if row[k] is None else f"{row[k]:.3f}" for k in ("key_bits", "value_bits")]
    served = row["kernels"]
    kernels = (
        served["decode"] if served["decode"] == served["encode"] else f"{served['decode']} (encode: {served['encode']})"
    )
    counts = [str(row[k]) for k in ("block_tokens", "sink", "window")]
    return row["spec"], *bits, *counts, kernels, row.get("refused", row["summary"])


def _describe(args: argparse.Namespace) -> int:
    found = kvcodec.describe(args.spec, args.head_dim)

    def text() -> str:
        lines = [f"{found['spec']}: {found['summary']}", f"source: {found['source']}", ""]
        plain_keys = [k for k, v in found.items() if not isinstance(v, dict | list)]
        for key in plain_keys:
            if key not in ("spec", "summary", "source"):
                lines.append(f"  {key:<20} {_scalar(found[key])}")
        lines.append(f"  {'kernels':<20} {', '.join(f'{k}: {by}' for k, by in found['kernels'].items())}")
        lines += ["", "options" if found["options"] else "no options"]
        for o in found["options"]:
            lines.append(
                f"  {o['name']}={_option(o['value'])}  ({o['type']}, default {_option(o['default'])})  {o['doc']}"
            )
        lines += ["", f"bytes of a page of {found['page_tokens']} tokens of one head, in this order"]
        for f in found["layout"]:
            shape = " x ".join(map(str, f["shape"]))
            per = "token" if f["block_tokens"] == 1 else f"{f['block_tokens']} tokens"
            lines.append(f"  {f['page_offset']:>6}  {f['role']}.{f['field']:<12} {f['dtype']} [{shape}] per {per}")
        return "\n".join(lines)

    return _finish(args, found, text)


def _bench(args: argparse.Namespace) -> int:
    from kvcodec.progress import Progress
    from kvcodec_lab.bench.cpu import cache_rows, codec_rows

    if args.url is not None and args.what != "serve":
        raise KVError(f"bench {args.what} takes no address; {args.url!r} would be that of bench serve.")
    if args.what == "serve":
        from kvcodec_lab.serve import command as serve

        outcome = serve.run(args, Progress())
        return _finish(args, outcome.rows, lambda: serve.text(outcome.rows)) or outcome.status
    if args.what not in ("cache", "codec"):
        from kvcodec_lab.bench import command

        found = command.run(args, Progress().say)
        return found if isinstance(found, int) else _finish(args, found, lambda: _bench_text(found))
    shape = {"kv_heads": args.kv_heads, "head_dim": args.head_dim, "tokens": args.tokens}
    common = {"device": args.device, "repeats": args.repeats, "seed": args.seed, "progress": Progress().say}
    if args.what == "codec":
        return _stream(args, codec_rows(args.specs or kvcodec.presets(), **shape, **common), _bench_text)
    heads = {"batch": args.batch, "query_heads": args.query_heads, "dtype": args.dtype}
    rows = cache_rows(args.specs or ["dense", "saw-int4"], **heads, **shape, **common)
    return _stream(args, rows, _bench_text)


def _bench_text(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'spec':<20} {'bits':>6}  {'metric':<20} {'p20':>12} {'p50':>12} {'p80':>12}  unit"]
    for r in rows:
        values = " ".join(f"{(r['values'] or {}).get(p, float('nan')):>12.4g}" for p in ("p20", "p50", "p80"))
        bits = r.get("effective_bits")
        held = "-" if bits is None else f"{bits:.2f}"
        lines.append(f"{r['spec']:<20} {held:>6}  {r['metric']:<20} {values}  {r['unit']}")
    return "\n".join(lines)


def _reproduce(args: argparse.Namespace) -> int:
    from time import monotonic

    from kvcodec.progress import Progress
    from kvcodec_lab.reproduce import rate_distortion, report, reproduce_rows

    progress, start = Progress(), monotonic()
    papers = [paper for paper in args.papers if paper != rate_distortion.STUDY]
    sources: list[Iterable[dict[str, Any]]] = []
    if papers or not args.papers:
        sources.append(reproduce_rows(papers or None, quick=args.quick, progress=progress))
    if rate_distortion.STUDY in args.papers or not args.papers:
        model = None
        if args.model is not None:
            from kvcodec_lab.models import load

            model = load(args.model, progress=progress)
        sources.append(rate_distortion.rate_distortion_rows(quick=args.quick, model=model, progress=progress))
    elif args.model is not None:
        raise KVError(f"--model is for {rate_distortion.STUDY}, which was not asked for; add it, or name no paper.")
    if args.out is not None:
        from kvcodec_lab.eval.rows import check_writable

        check_writable(args.out)
    rows, written = _collect(chain.from_iterable(sources)), []
    if args.out is not None:
        about = {"seconds": round(monotonic() - start), "quick": args.quick, "model": args.model or "none"}
        written = [f"written: {path}" for path in report.write_folder(rows, args.out, about)]
    return _finish(args, rows, lambda: "\n".join([report.terminal(rows), *written]))


def _report(args: argparse.Namespace) -> int:
    from kvcodec_lab.eval.rows import check_writable, read_rows
    from kvcodec_lab.report import command
    from kvcodec_lab.report.presets import write_report

    if command.wants_page(args.files):
        page = command.run(args)
        return _finish(args, [str(page)], lambda: f"written: {page}")
    command.refuse_options(args)
    rows = read_rows(args.files)
    out = check_writable(args.out or "kvcodec-report")
    meta: dict[str, Any] = {"title": args.title or "kvcodec report", "files": ", ".join(map(str, args.files))}
    meta |= {key: rows[0][key] for key in ("model", "text", "versions") if key in rows[0]}
    paths = write_report(rows, out, meta)
    return _finish(args, [str(path) for path in paths], lambda: "\n".join(f"written: {path}" for path in paths))


# -- output ------------------------------------------------------------------------------------------------------------


def _finish(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> int:
    """Write JSON where it was asked for, and the text for people unless standard output is the JSON's."""
    from kvcodec_lab.eval.rows import write_json

    if args.json is not None:
        write_json(args.json, data)
    if args.json != "-":
        print(text())
    interrupted = isinstance(data, list) and any(isinstance(r, dict) and r.get("partial") for r in data)
    return INTERRUPTED if interrupted else 0


def _stream(
    args: argparse.Namespace, source: Iterable[dict[str, Any]], text: Callable[[list[dict[str, Any]]], str]
) -> int:
    """Collect rows, then write them."""
    rows = _collect(source)
    return _finish(args, rows, lambda: text(rows))


def _collect(source: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as they come; an interrupt keeps those that came."""
    rows: list[dict[str, Any]] = []
    try:
        rows.extend(source)
    except KeyboardInterrupt:
        if not rows:
            raise
        print("kvcodec: interrupted: the rows hold what was finished.", file=sys.stderr)
        rows = [row | {"partial": True} for row in rows]
    return rows


def _scalar(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _option(value: Any) -> str:
    """As a spec takes it: true, false, none."""
    return str(value).lower() if value is None or isinstance(value, bool) else _scalar(value)


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line, without the place in the source that the default form points at."""
    return f"kvcodec: warning: {message}\n"


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    from kvcodec_lab.advise import command as advise_command
    from kvcodec_lab.bench import command
    from kvcodec_lab.eval import command as eval_command
    from kvcodec_lab.report import command as report_command
    from kvcodec_lab.report import publish

    parser = argparse.ArgumentParser(prog="kvcodec", description="KV caches 3-5x smaller, at their true bits.")
    parser.add_argument("--version", action="version", version=f"kvcodec {kvcodec.__version__}")
    add_codec_file(parser, [])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    p = _command(commands, "demo", _demo, "a real model, a real text, nine presets: table, picture, page")
    p.add_argument("--model", help="path, hub id or smollm2-135m (default)")
    p.add_argument("--specs", type=split_specs, metavar="A,B", help="presets, instead of the nine")
    add_text(p)
    add_probe(p)
    p.add_argument("--out", default="kvcodec-report", metavar="FOLDER", help="where the report goes (%(default)s)")

    p = _command(commands, "list", _list, "all presets with their bits")
    add_head_dim(p)

    p = _command(commands, "describe", _describe, "everything about one preset: options, layout, bits")
    p.add_argument("spec", metavar="SPEC")
    add_head_dim(p)

    p = _command(commands, "fit", _fit, "constants of a preset, fitted to your model on your text")
    add_model(p)
    p.add_argument("spec", metavar="SPEC", help="a preset with constants to fit, e.g. innerq-base")
    p.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text; not the one that you measure on")
    p.add_argument("-o", "--out", required=True, metavar="PARAMS", help="the file to write, for --params")
    p.add_argument("--windows", type=positive, default=4, metavar="N", help="windows of text (%(default)s)")
    p.add_argument("--window-tokens", type=positive, default=2048, metavar="N", help="(%(default)s)")
    p.add_argument("--max-tokens", type=positive, default=8192, metavar="N", help="kept per layer (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="as for compare, where the codec draws from it")
    add_device(p)

    p = _command(commands, "compare", _compare, "presets on your model and text")
    add_model(p)
    p.add_argument(
        "--specs", type=split_specs, required=True, metavar="A,B", help="presets, e.g. saw-int4,kivi-2:window=64"
    )
    add_text(p)
    p.add_argument("--new-tokens", type=int, default=32, metavar="N", help="generated tokens; 0 for none (%(default)s)")
    add_probe(p)
    add_reading(p)

    p = _command(commands, "eval", _eval, "presets on tasks, with intervals; resumable")
    eval_command.add_arguments(p)

    p = _command(commands, "advise", _advise, "which preset or mixture for your model, context and memory")
    advise_command.add_arguments(p)

    p = _command(commands, "bench", _bench, "times of encode, decode and attention on this machine")
    p.add_argument(
        "what",
        nargs="?",
        choices=("cache", "codec", *publish.PARTS, "serve", "page"),
        default="cache",
        help="cache: append, decode and attend beside SDPA (default); codec: encode and decode of K and V, tokens/s, "
        "beside int-4, exhaustive searches, hqq and quanto (--batch, --query-heads and --dtype do not apply); decode, "
        "encode, prefill, generate, first: the GPU's kernels beside 16-bit attention, with --device cuda (first: time "
        "to the first token of a new cache, and of later turns); serve: load on a running OpenAI-compatible "
        "server at URL, or on servers that --start names; page: the page of a run's folder",
    )
    p.add_argument("url", nargs="?", metavar="URL", help="of serve: e.g. http://localhost:8000")
    p.add_argument("--specs", type=split_specs, metavar="A,B", help="default: dense,saw-int4; codec: all; GPU: a list")
    for name, default in (("batch", 1), ("kv-heads", 8), ("query-heads", 32), ("tokens", 4096), ("repeats", 5)):
        p.add_argument(f"--{name}", type=positive, default=default, help="(%(default)s)")
    add_head_dim(p)
    p.add_argument("--seed", type=int, default=0)
    add_device(p)
    command.add_arguments(p)

    p = _command(commands, "reproduce", _reproduce, "recompute what the papers print")
    p.add_argument("papers", nargs="*", metavar="PAPER", help="papers, or rate-distortion; default: all of them")
    p.add_argument("--quick", action="store_true", help="smaller samples")
    p.add_argument(
        "--model", metavar="MODEL", help="rate-distortion also on this model's keys and values: smollm2-135m"
    )
    p.add_argument("--out", metavar="FOLDER", help="write reproduce.md, reproduce.json and figures there")

    p = _command(commands, "report", _report, "the page of an eval folder, or picture and page of result files")
    p.add_argument("files", nargs="+", metavar="DIR|FILE.json", help="what eval --output wrote, or files of rows")
    p.add_argument("--out", metavar="FOLDER", help="of files: where picture and page go (kvcodec-report)")
    p.add_argument("--title")
    report_command.add_arguments(p)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    p = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    assert isinstance(p, argparse.ArgumentParser)
    p.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    add_codec_file(p, argparse.SUPPRESS)  # allowed before the command and after it
    p.set_defaults(run=run)
    return p


if __name__ == "__main__":
    sys.exit(main())
