"""``packedkv advise``: arguments, files and the text it prints."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from packedkv.cli.arguments import Result, add_device, add_model, add_probe, add_seed, at_least, positive, specs, tokens
from packedkv.cli.page.tables import aligned

OUTPUT = "packedkv-advice"
INTERRUPTED = 130
NOT_MET = 1
"""Exit status: no candidate is within ``--max-kl``; the best one is advised."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def memory(text: str) -> int:
    """Read bytes: ``8GiB``, ``8G`` and ``8192 MiB`` are binary, ``8GB`` is decimal.

    >>> memory("8GiB") == memory("8g") == 8 * 2**30, memory("1.5GB")
    (True, 1500000000)
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)(b?)", text.strip().lower())
    if not match or (match[3] and not match[4]) or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 8GiB, 500MB or a number of bytes")
    decimal = match[2] and match[4] and not match[3]
    unit = 1000 ** ("kmgt".index(match[2]) + 1) if decimal else _UNITS[match[2]]
    nbytes = int(float(match[1]) * unit)
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least one byte")
    return nbytes


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_model(p)
    p.add_argument("--context", type=tokens, required=True, metavar="N", help="tokens of each sequence, e.g. 32k")
    p.add_argument("--memory", type=memory, metavar="SIZE", help="of the cache at that context: the least KL within it")
    p.add_argument(
        "--max-kl", type=float, metavar="X", help="most KL per token; without --memory: the fewest bytes within it"
    )
    p.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences (%(default)s)")
    p.add_argument("--text", metavar="FILE", help="UTF-8 text like yours (default: the packaged head of WikiText-2)")
    p.add_argument("--specs", type=specs, metavar="A,B", help="candidates (default: the presets with GPU kernels)")
    p.add_argument(
        "--windows", type=positive, default=2, metavar="N", help="windows of text to measure on (%(default)s)"
    )
    p.add_argument(
        "--window-tokens", type=at_least(2), default=512, metavar="N", help="tokens of a window (%(default)s)"
    )
    p.add_argument(
        "--uniform", type=positive, default=6, metavar="N", help="presets measured beside the mixture (%(default)s)"
    )
    p.add_argument(
        "--output", default=OUTPUT, metavar="DIR", help="recipe, figures and rows; a run goes on there (%(default)s)"
    )
    add_seed(p)
    add_probe(p)
    add_device(p)


def run(args: argparse.Namespace) -> Result:
    from packedkv.cli.advise.run import advise
    from packedkv.cli.advise.steps import Request
    from packedkv.cli.measure.rows import check_writable, plain, write_json
    from packedkv.models.loading import load, load_text
    from packedkv.progress import Progress
    from packedkv.registry import get

    for spec in args.specs or ():
        get(spec)
    request = Request(**{f.name: getattr(args, f.name) for f in fields(Request)} | {"specs": tuple(args.specs or ())})
    text = load_text(args.text)
    out = check_writable(args.output)
    progress = Progress()
    model = load(args.model, progress=progress, device=args.device, dtype=args.dtype)
    try:
        result = advise(model, text.text, request, output=out, text_name=text.name, progress=progress)
    except KeyboardInterrupt:
        message = f"interrupted: what was measured is kept in {out}; the same command goes on there."
        return Result({"partial": True, "model": args.model, "output": str(out)}, message, INTERRUPTED)
    write_json(out / "advice.json", result)
    written = [out / "advice.json", *figures(result, out)]
    told = show(plain(result)) + "\n" + "\n".join(f"written: {path}" for path in written)
    return Result(result, told, 0 if result["met"] else NOT_MET)


def figures(result: Mapping[str, Any], out: Path) -> list[Path]:
    """Plot sensitivity and K_max / K_median; return the files."""
    from packedkv.cli.page import figures, svg

    lost = figures.sensitivity(result["sensitivity"], f"{result['model']}: one layer compressed")
    outliers = figures.outliers({result["model"]: result["keys"]})
    drawn = {"sensitivity.svg": svg.draw(lost), "keys.svg": svg.draw(outliers)}
    for name, text in drawn.items():
        (out / name).write_text(svg.standalone(text), encoding="utf-8")
    return [out / name for name in drawn]


def show(result: Mapping[str, Any]) -> str:
    """Return the result as readable text."""
    from packedkv.cli.advise.expected import size

    best, batch = result["advised"], result["batch"]
    asked = [f"memory {size(result['memory'])}"] if result["memory"] else []
    asked += [f"KL at most {result['max_kl']:g}"] if result["max_kl"] else []
    lines = [
        f"{result['model']}, {batch} x {result['context']:,} tokens; in 16 bit: {size(result['dense_bytes'])}; "
        f"asked: {', '.join(asked)}",
        "",
        *_table(result["finalists"], best, size),
        "",
        f"KL, perplexity and top-1 agreement: {result['windows']} window{'s' * (result['windows'] > 1)} of "
        f"{result['window_tokens']} tokens of "
        f"{result['text'] or 'the text'}, read through the cache; uncompressed perplexity "
        f"{result['uncompressed_perplexity']:.2f}. The search saw another window.",
        "",
        f"advised: {best['spec']}: {size(best['bytes'])} at that context, {best['ratio_to_16bit']:.2f}x smaller than "
        f"16 bit ({best['bits']:.2f} bits), KL {best['kl']:.4f}",
        f"  exact after a prefill of {result['context']:,} tokens; up to {size(best['grown_bytes'])} if pages grow "
        f"while generating",
    ]
    if best["kl_as_served"] != best["kl"]:
        served = "no numbers" if best["kl_as_served"] is None else f"{best['kl_as_served']:.4f}"
        lines.append(f"  the KL above is without sinks and windows; with them, on these windows: {served}")
    if not result["met"]:
        lines.append(f"  NOT MET: no candidate measured a KL of at most {result['max_kl']:g}")
    lines += _layers(result["layers"])
    timed = result["speed"]
    lines += [
        "",
        f"speed here: {timed['tokens_per_s']:.1f} tokens/s, uncompressed {timed['uncompressed_tokens_per_s']:.1f} "
        f"(one sequence on {timed['device']}, {timed['prompt_tokens']} tokens before, through the line below)",
    ]
    if result["left_out"]:
        lines += ["", "left out", *(f"  {why}" for why in result["left_out"].values())]
    lines += ["", "use it", f"  {result['use']['python']}", f"  {result['use']['command']}", "", "not measured"]
    return "\n".join([*lines, *(f"  {line}" for line in result["not_measured"]), ""])


def _table(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any], size: Any) -> list[str]:
    heads = ("  spec", "bytes", "bits", "KL", "+-", "perplexity", "top-1")
    cells = [heads]
    for row in rows:
        name = f"* {row['spec']}" if row == best else f"  {row['spec']}"
        perplexity = "inf" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        measured = (f"{row['kl']:.5f}", f"{row['kl_se']:.5f}", perplexity) if row["kl"] is not None else ("-",) * 3
        numbers = f"{row['bits']:.2f}", *measured
        cells.append((name, size(row["bytes"]), *numbers, f"{row['top1_agreement']:.1%}"))
    return aligned(cells)


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a mixture; consecutive equal layers share one."""
    if not rows:
        return []
    lines = ["", "layers        keys / values"]
    for (key, value), group in groupby(rows, key=lambda row: (row["key"], row["value"])):
        at = [row["layer"] for row in group]
        which = str(at[0]) if len(at) == 1 else f"{at[0]}-{at[-1]}"
        lines.append(f"  {which:<10}  {key} / {value}")
    return lines
