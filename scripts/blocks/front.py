"""README.md: three numbers and five rows.

numbers   memory, decode, served, from SERVE_FILE, DECODE, ALL_RESULTS and RESULTS
choose    WISHES, from the runs JUDGE[0] and TODAY of BOARD, ALL_RESULTS, ADDED and DECODE
"""

from pathlib import Path
from typing import NamedTuple

from blocks.sources import (
    BOARD,
    JUDGE,
    OWN,
    RESULTS,
    SERVE_FILE,
    SERVED,
    SHAPES,
    SPEED,
    SPEED_SPEC,
    TODAY,
    Blocks,
    MissingResultError,
    decode_rows,
    judge_of,
    judged,
    median_of,
    quality_rows,
    row_of,
    rows_of,
)
from kvcodec.cli.page.figures import SPEED_TITLES
from kvcodec.cli.page.tables import markdown, with_reference
from kvcodec.cli.page.words import DASH
from kvcodec.description import kernels_for
from kvcodec.registry import get, presets
from kvcodec_lab.bench.summary import Table
from kvcodec_lab.serve.tables import Found

STEP, SESSIONS, ONE_CLIENT = "n32_i8192", "s32x6_p1024_c8192_t2048_a128_together", "c1_i1024_o1024"
"""Shapes of the README's served numbers: a decode step, sessions, and what does not get better."""


def numbers_block(root: Path) -> str:
    """Memory, decode and serving, each in one sentence with its conditions; then where there is nothing to gain."""
    path = root / SPEED / SERVE_FILE
    if not path.is_file():
        raise MissingResultError(f"{SPEED / SERVE_FILE} does not exist; see docs/results.md.")
    found = Found(rows_of(path))
    ours, base = SERVED[0], SERVED[-1]

    def pair(metric: str, shape: str) -> tuple[float, float]:
        values = [found.value(label, metric, shape) for label in (ours, base)]
        if None in values:
            raise MissingResultError(f"{SPEED / SERVE_FILE}: no row is {ours} and {base}, {metric}, {shape}.")
        return values[0], values[1]

    fits, held = pair("kv_cache_tokens", "start")
    step, dense = pair("step_ms", STEP)
    rate, rate16 = pair("output_tokens_per_s", SESSIONS)
    one, one16 = pair("output_tokens_per_s", ONE_CLIENT)
    row = found.row(ours, "step_ms", STEP) or {}
    sizes, load = row["sizes"], (found.row(ours, "output_tokens_per_s", SESSIONS) or {})["sizes"]
    gains = [median_of(decode_rows(root), "speedup_vs_bf16_cold", shape)[0] for shape in SHAPES]
    price = row_of(quality_rows(root), SPEED_SPEC)
    model, vllm = price["model"], row["versions"]["vllm"]
    return (
        f"Preset `{ours}` beside bf16, on one {row['gpu']}:\n\n"
        f"- **Memory**: {fits:,.0f} tokens fit instead of {held:,.0f}, {fits / held:.2f} times as many (vLLM {vllm}, a "
        f"model of Qwen3-8B's shape). Its price: a perplexity of {price['perplexity']:.2f} instead of "
        f"{price['uncompressed']['perplexity']:.2f} ({model}, WikiText-2).\n"
        f"- **Decode**: attention that reads the packed pages is {min(gains):.1f} to {max(gains):.1f} times as fast "
        f"as the fastest 16-bit attention (one layer and step, four shapes of 32k to 1M tokens, cold L2).\n"
        f"- **Served**: a decode step of {sizes['sequences']} sequences of {sizes['tokens']:,} tokens takes "
        f"{step:.1f} ms instead of {dense:.1f}, and {load['sessions']} sessions of {load['rounds']} rounds get "
        f"{rate / rate16:.1f} times the output tokens per second (random weights; in 16 bit the sessions evict each "
        f"other's prefixes).\n\n"
        f"Where nothing is gained: one client with a short prompt ({one / one16:.2f} times the tokens per second). "
        f"{cpu_sentence(root)}"
    )


def cpu_sentence(root: Path) -> str:
    """What the demo's presets generate on a CPU beside no compression, behind a short context and a long one."""
    base, *rows = with_reference(rows_of(root / RESULTS))
    paths = {row.get("generation_attention", "decoded") for row in rows}
    how = {"decoded": "PyTorch decodes the cache", "fused": "kernels read the packed pages"}.get(
        "+".join(paths), "kernels read the packed pages where they can"
    )
    parts = []
    for key, tokens in (("tokens_per_s", base.get("prompt_tokens")), ("long_tokens_per_s", base.get("long_tokens"))):
        if speeds := [row[key] / base[key] for row in rows if row.get(key) and base.get(key)]:
            parts.append(f"{min(speeds):.2f} to {max(speeds):.2f} behind {tokens:,} tokens")
    if not parts:
        raise MissingResultError(f"{RESULTS}: no row says tokens_per_s; run the demo and put its result JSON there.")
    return (
        f"On two CPU cores, where {how}, generation has this share of the speed without compression: "
        f"{' and '.join(parts)} ({rows[0]['model']}, {len(rows)} presets)."
    )


class Wish(NamedTuple):
    """A row of the README's table: a requirement, and how one of the presets that meet it is chosen."""

    text: str
    bits: float
    """At most so many on the judge, every byte counted; the least KL there of these is taken."""
    spec: str | None = None
    """Taken whatever its KL."""
    run: str = TODAY
    """JUDGE[0]: keys as they are, with their biases."""


WISHES = (
    Wish("the least loss at 4 bits", 4.1),
    Wish("the longest context, at a loss that shows", 3.1),
    Wish("the fastest; vLLM serves it on any model", 4.6, spec="saw-int4"),
    Wish("served by vLLM, little loss whatever the keys", 4.5, run=JUDGE[0]),
    Wish("the same, nearly no loss", 8.6, run=JUDGE[0]),
)


def choose_block(root: Path) -> str:
    """Five rows: a wish, the preset that measured best for it on the real model, and its numbers on both."""
    runs = {wish.run: judged(root, wish.run) for wish in WISHES}
    small, table = {row["spec"]: row for row in quality_rows(root)}, Table(decode_rows(root))
    base = runs[TODAY][1]
    small_base = next(iter(small.values()))["uncompressed"]["perplexity"]
    lines = []
    for wish in WISHES:
        fitting = {spec: of for spec, of in runs[wish.run][0].items() if of.bits <= wish.bits}
        if wish.spec is None:  # presets alone, by kernels: an option is a choice of its own
            fitting = {s: of for s, of in fitting.items() if s in presets() and kernels_for(get(s))["decode"] != "none"}
        fitting = {spec: of for spec, of in fitting.items() if wish.spec in (None, spec)}
        if not fitting:
            raise MissingResultError(
                f"{BOARD / wish.run}: nothing holds {wish.bits:g} bits or fewer for {wish.text!r}."
            )
        spec, best = min(fitting.items(), key=lambda item: item[1].kl)
        own, gain = small.get(spec), table.median(spec, "speedup_vs_bf16_cold", "b32_32k")
        cells = [wish.text, f"`{spec}`", f"{best.bits:.2f}", f"{best.kl:.4f}", f"{best.perplexity:.2f}"]
        cells += [f"{own['kl']:.4f}", f"{own['perplexity']:.2f}"] if own else [DASH, DASH]
        lines.append([*cells, DASH if gain is None else f"{gain:.1f}x"])
    heads = ["you want", "preset", "bits", "KL", f"perplexity ({base:.2f})", "small model: KL"]
    heads += [f"perplexity ({small_base:.2f})", "decode attention"]
    items = next(r["items"] for r in judge_of(root, TODAY).rows if (r.task, r.group) == ("kl", None))
    timed = [r for r in decode_rows(root) if r["spec"].startswith(OWN) and r["shape"] == "b32_32k"]
    without = "" if any("mean" in r for r in timed) else ", those of ghost without its term of the keys' mean"
    return markdown(heads, lines, text=(0, 1)) + (
        f"\n\nBits of every byte held, KL and perplexity on Qwen2.5-Coder-1.5B-Instruct (head_dim 128, key biases; "
        f"{items:g} windows of 2,048 tokens of WikiText-2, bfloat16; the last two rows, of keys as they are "
        f"(mean=none), and those of ghost are of other runs and another processor) and on "
        f"{next(iter(small.values()))['model']} (head_dim 64); decode attention of {SPEED_TITLES['b32_32k']} beside 16 "
        f"bit, a dash where it is not measured{without}."
    )


BLOCKS: Blocks = {
    "numbers": (Path("README.md"), numbers_block),
    "choose": (Path("README.md"), choose_block),
}
