"""``packedkv demo``: one real model, one real text, nine presets; a table, a picture, a page, one recommendation."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packedkv.cli.measure.compare import Settings, about, compare
from packedkv.cli.measure.rows import Row, check_writable, plain, table, write_json
from packedkv.cli.page.compare import write_report
from packedkv.models.loading import SampleText, load
from packedkv.models.windows import WINDOW_TOKENS
from packedkv.progress import Progress
from packedkv.registry import get

MODEL = "smollm2-135m"
SPECS = ("dense", "fp8", "int-4", "saw-int4", "kivi-4", "kivi-2", "octopus-4", "octopus-3", "octopus-2")
BUDGET = 300.0
"""Seconds of measuring; with installation and loading the demo stays well below six minutes on 2 cores."""
TOLERANCE = 0.05
"""Largest rise of perplexity, relative, that a recommended preset may have."""
NEW_TOKENS = 16
LONG_TOKENS = 8000
RESULTS = "results.json"
PROTOCOL = (
    f"consecutive windows of {WINDOW_TOKENS} tokens from the start of the text, no overlap; the first token of each is "
    "not scored; float32; attention reads decoded K and V (prefill=decoded); generation continues the text's first "
    "tokens greedily (prefill=exact); the speed behind a long context is without its prefill: windows of the text, "
    "each read by itself at its own positions"
)


def recommend(rows: Sequence[Mapping[str, Any]]) -> str:
    """Recommend in one sentence the preset of fewest bits among those within ``TOLERANCE``, else of least KL.

    ``dense`` is never recommended; rows without a finite perplexity are ignored.
    """
    usable = [r for r in rows if r["spec"] != "dense" and plain(r.get("perplexity")) and plain(r.get("kl")) is not None]
    if not usable:
        return "No preset can be recommended: no compressed run gave a finite perplexity."
    base = float(usable[0]["uncompressed"]["perplexity"])
    close = [r for r in usable if r["perplexity"] <= base * (1 + TOLERANCE)]
    best = min(close, key=lambda r: (r["effective_bits"], r["kl"])) if close else min(usable, key=lambda r: r["kl"])
    figures = (
        f"{best['effective_bits']:.2f} bits per element instead of 16 ({best['ratio_to_16bit']:.1f}x smaller, "
        f"measured), perplexity {best['perplexity']:.2f} against {base:.2f} ({best['perplexity'] / base - 1:+.1%}), "
        f"KL {best['kl']:.3f}"
    )
    if close:
        return (
            f"Take {best['spec']}: of the presets within {TOLERANCE:.0%} of the uncompressed perplexity it holds the "
            f"fewest bits, {figures}."
        )
    return (
        f"Take {best['spec']} with care: no preset is within {TOLERANCE:.0%} of the uncompressed perplexity on this "
        f"model, and it comes closest, {figures}."
    )


def run_demo(
    model: str = MODEL,
    specs: Sequence[str] | None = None,
    *,
    text: SampleText,
    windows: int = 3,
    budget: float | None = BUDGET,
    out: Path,
    progress: Progress,
    settings: Settings | None = None,
) -> tuple[list[Row], dict[str, Any], list[Path]]:
    """Measure, and write ``results.json``, the picture and the page into ``out``.

    No window is started that would end after ``budget`` seconds. Returns the rows, information about the run
    (``recommendation``, ``protocol``, ``left_out``, ...), and the files written.
    """
    for spec in specs or ():
        get(spec)
    check_writable(out)
    loaded = load(model, progress=progress)
    chosen = replace(
        settings or Settings(new_tokens=NEW_TOKENS, long_tokens=LONG_TOKENS),
        windows=windows,
        budget=budget,
        text_name=text.name,
        text_sha256=text.sha256,
    )
    rows = compare(loaded, specs or SPECS, text.text, chosen, progress=progress)
    prompt = loaded.tokenizer(text.text[: chosen.prompt_tokens * 16], verbose=False)["input_ids"][
        : chosen.prompt_tokens
    ]
    meta = {
        "title": f"packedkv demo: {model}",
        "model": f"{loaded.name} ({loaded.origin})",
        "text": text.name,
        "protocol": PROTOCOL,
        "windows": rows[0]["windows"],
        "status": rows[0]["status"],
        "partial": rows[0]["partial"],
        "recommendation": recommend(rows),
        "prompt": loaded.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "versions": rows[0]["versions"],
        "seconds": sum(r["seconds"] for r in rows),
    }
    if left_out := rows[0].get("left_out"):
        meta["left_out"] = left_out
    if loaded.sha256:
        meta["sha256"] = loaded.sha256
    results = out / RESULTS
    write_json(results, {"meta": meta, "rows": rows})
    return rows, meta, [results, *write_report(plain(rows), out, meta)]


def show(rows: Sequence[Row], meta: Mapping[str, Any], paths: Sequence[Path]) -> str:
    """Return the demo's output: table, continuation, files, recommendation."""
    parts = ["", table(plain(rows)), "", about(rows)]
    if said := continuations(rows, str(meta.get("prompt", ""))):
        parts += ["", *said]
    parts += ["", *(f"written: {path}" for path in paths), "", str(meta["recommendation"])]
    return "\n".join(parts)


def continuations(rows: Sequence[Row], prompt: str) -> list[str]:
    """Return the uncompressed continuation and the continuation of the best row that differs from 16 bit."""
    base = rows[0]["uncompressed"].get("continuation")
    made = [r for r in rows if r.get("continuation") is not None and r["spec"] != "dense"]
    if base is None or not made:
        return []
    close = min(
        made, key=lambda r: (r["perplexity"] > (1 + TOLERANCE) * r["uncompressed"]["perplexity"], r["effective_bits"])
    )
    lines = [f"greedy continuation of ... {' '.join(prompt.split())[-100:]!r}"]
    width = max(len("uncompressed"), len(close["spec"]))
    for name, text in (("uncompressed", base), (close["spec"], close["continuation"])):
        lead = f"  {name:<{width}}  "
        lines += textwrap.wrap(" ".join(text.split()), 110, initial_indent=lead, subsequent_indent=" " * len(lead))
    lines.append(f"  ({close['same_tokens']} of {close['new_tokens']} tokens before the first difference)")
    return lines
