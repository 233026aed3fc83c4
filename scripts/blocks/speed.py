"""docs/speed.md and docs/serve.md: speed on GPUs.

speed       the speed sentence, from the rows in SPEED
kernels     speed-up of every preset with a kernel, break-even lengths, and SPEED_FIGURE, from DECODE there
generate    the same through generate, from GENERATE_FILE
vllm        vLLM's own decode attention, from VLLM_ATTENTION
engine      vLLM's throughput and the tokens that fit, from SERVE_FILE
"""

from pathlib import Path
from typing import Any

from blocks.sources import (
    SERVE_FILE,
    SERVED,
    SHAPES,
    SPEED,
    SPEED_SPEC,
    Blocks,
    MissingResultError,
    decode_rows,
    median_of,
    rows_of,
)
from kvcodec.cli.measure.generation import CUDNN_OFF
from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.figures import SPEED_TITLES
from kvcodec.cli.page.rows import read_rows
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import DASH, listed
from kvcodec_lab.bench.record import newest
from kvcodec_lab.bench.shapes import SWEEP_BATCHES
from kvcodec_lab.bench.studies import number
from kvcodec_lab.bench.summary import Table, break_even, lines, speed_points, steps_of_a_model

SPEED_FIGURE = Path("docs/img/speed.png")
GENERATE_FILE = Path("benchmarks/results/nvidia-h100/generate.json")
GENERATE = "qwen3_8b_b1_32k"
"""File of `kvcodec bench generate`, and the shape that the sentence quotes."""
VLLM_ATTENTION = SPEED / "vllm_attention.json"
SERVE_LOAD = {"input_len": 16384, "output_len": 1024, "concurrency": 256}


def speed_block(root: Path) -> str:
    """One sentence: microseconds and speed-up of the fused decode at every shape."""
    rows = [row for path in sorted((root / SPEED).glob("*.json")) for row in rows_of(path)]
    times, gains = [], []
    gpus: set[str] = set()
    for shape, label in SHAPES.items():
        time, time_row = median_of(rows, "decode_us_cold", shape)
        gain, gain_row = median_of(rows, "speedup_vs_bf16_cold", shape)
        gpus |= {str(time_row.get("gpu")), str(gain_row.get("gpu"))}
        times.append(f"{time:.0f} µs ({label})")
        gains.append(f"{gain:.1f}")
    if len(gpus) != 1:
        raise MissingResultError(
            f"{SPEED}: the rows name several GPUs: {', '.join(sorted(gpus))}; keep one folder each."
        )
    return (
        f"On one {gpus.pop()}, decode attention read straight from `{SPEED_SPEC}` pages takes {listed(times)} per "
        f"layer and step, {listed([*gains[:-1], gains[-1] + ' times'])} as fast as the faster bf16 SDPA backend there "
        f"(cold L2, CUDA graph, medians)."
    )


def kernels_block(root: Path) -> str:
    """One table: speed-ups at SHAPES and the break-even context; the figure."""
    rows = decode_rows(root)
    measured = [line for line in lines(rows) if any(line.speedups.values())]
    if not measured:
        return "Not measured yet: `benchmarks/run.py` makes the rows."
    table = Table(rows)
    out = [f"![Speed-up over 16-bit attention over effective bits](img/{SPEED_FIGURE.name})", ""]
    heads = ["preset", "bits", *(SPEED_TITLES[shape] for shape in SHAPES)]
    heads += [f"break-even, {b} sequence{'s' * (b > 1)}" for b in SWEEP_BATCHES]
    found = []
    for line in sorted(measured, key=lambda x: -(x.speedups["b32_32k"] or 0)):
        gains = (line.speedups[shape] for shape in SHAPES)
        cells = [f"`{line.spec}`", number(line.bits, ".2f"), *(DASH if x is None else f"{x:.2f}x" for x in gains)]
        found.append([*cells, *(str(break_even(table, line.spec, batch) or DASH) for batch in SWEEP_BATCHES)])
    gpus = " and ".join(sorted({str(r["gpu"]) for r in rows}))
    return "\n".join([*out, markdown(heads, found)]) + (
        f"\n\nTimes as fast as the fastest 16-bit attention of the same run ({gpus}; cold L2, CUDA graph, medians, "
        f"pages in random order). Break-even: tokens per sequence from which a preset is the faster one at every "
        f"longer measured length."
    )


def write_figures(root: Path) -> bool:
    """Draw SPEED_FIGURE if there are rows for it; whether there are."""
    points = speed_points(decode_rows(root))
    if points:
        pictures.write(figures.speed(points), root / SPEED_FIGURE)
    return bool(points)


def generate_block(root: Path) -> str:
    """Sentences and a table: milliseconds per token of a whole model's step, beside transformers' caches."""
    path = root / GENERATE_FILE
    rows = newest(rows_of(path)) if path.is_file() else []
    rows = [row for row in rows if row.get("shape") == GENERATE and row.get("values")]

    def one(way: str, cache: str) -> dict[str, Any]:
        metric = f"ms_per_token_{way}"
        found = [r for r in rows if (r["metric"], r.get("cache")) == (metric, cache)]
        found = [r for r in found if r["spec"] in ("dense", SPEED_SPEC)]
        if not found:
            raise MissingResultError(f"{GENERATE_FILE}: no row is {GENERATE}, {metric}, {cache}.")
        return min(found, key=lambda r: float(r["values"]["p50"]))  # of DynamicCache's forms the faster one

    def said(row: dict[str, Any], of: str = "p50") -> str:
        return f"{row['values'][of]:.1f} ms"

    ours, static = (one("compiled", cache) for cache in ("kvcodec fused", "StaticCache"))
    eager, dynamic = (one("generate", cache) for cache in ("kvcodec fused", "DynamicCache"))
    text = (
        f"Through `generate` on one {ours['gpu']}, a Qwen3-8B-shaped random model at 32k context, one sequence, "
        f"compiled as `generate` does by itself with a cache of fixed capacity: `{SPEED_SPEC}` {said(ours)} per token "
        f"and a cache of {ours['held_bytes'] / 1e9:.1f} GB, StaticCache {said(static)} and "
        f"{static['held_bytes'] / 1e9:.1f} GB. "
        f"Without compilation the host is the limit: `{SPEED_SPEC}` {said(eager)}, DynamicCache "
    )
    if dynamic.get("form") == CUDNN_OFF:
        chosen = [r for r in rows if r.get("cache") == "DynamicCache" and r.get("form") != CUDNN_OFF]
        text += f"{said(dynamic)} with cuDNN's attention switched off"
        text += f" ({said(chosen[0])} as torch chooses: cuDNN plans anew for every length)." if chosen else "."
    else:
        text += (
            f"{said(dynamic)} as torch chooses its attention. That is cuDNN's there, which plans anew for every "
            f"length: a fifth of the steps took {said(dynamic, 'p20')} or less, so do not read it as DynamicCache's "
            f"own speed."
        )
    lines = steps_of_a_model(read_rows([path]))
    named = [[f"`{line[0]}`" if "," not in line[0] else line[0], *line[1:]] for line in lines.lines]
    return (
        f"{text}\n\nMilliseconds per token there, caches filled with 32k tokens before (so the peak memory, without "
        f"the weights, is that of a decode step):\n\n{markdown(lines.headings, named)}"
    )


def vllm_block(root: Path) -> str:
    """Table: microseconds of vLLM's own decode attention, beside the preset of the sentence."""
    if not (root / VLLM_ATTENTION).is_file():
        raise MissingResultError(f"{VLLM_ATTENTION} does not exist; it was measured once, apart from the bench.")
    rows = rows_of(root / VLLM_ATTENTION)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    ours = [median_of(decode_rows(root), "decode_us_cold", shape)[0] for shape in shapes]
    times = {f"`{SPEED_SPEC}`, this library": ours}
    for row in rows:
        times.setdefault(str(row["form"]), []).append(row["values"]["p50"])
    lines = [[name, *(f"{x:,.0f}" for x in values)] for name, values in times.items()]
    return markdown(["microseconds, cold", *(SPEED_TITLES[s] for s in shapes)], lines)


def engine_block(root: Path) -> str:
    """One sentence: output tokens per second of the whole system, and tokens that fit, each of the latest run."""
    path = root / SPEED / SERVE_FILE
    rows = rows_of(path) if path.is_file() else []
    rows = sorted((row for row in rows if row["values"]), key=lambda row: row["run"])
    rates = [row for row in rows if SERVE_LOAD.items() <= row.get("sizes", {}).items()]
    rate = {row["spec"]: row for row in rates if row["metric"] == "output_tokens_per_s"}
    fits = {row["spec"]: row for row in rows if row["metric"] == "kv_cache_tokens"}
    if any(name not in rate or name not in fits for name in SERVED):
        raise MissingResultError(f"{SPEED / SERVE_FILE} lacks rows of {', '.join(SERVED)}; see docs/results.md.")
    base, one = SERVED[-1], rate[SERVED[0]]
    of = {name: (rate[name]["values"]["p50"], fits[name]["values"]["p50"]) for name in SERVED}
    said = [
        f"`{name}` {speed:,.0f} output tokens/s ({speed / of[base][0]:.2f}x) from a cache of {tokens:,.0f} tokens "
        f"({tokens / of[base][1]:.2f}x)"
        for name, (speed, tokens) in of.items()
        if name != base
    ]
    return (
        f"On one {one['gpu']} (vLLM {one['versions']['vllm']}, a model of Qwen3-8B's shape with random weights, "
        f"{one['sizes']['requests']} prompts of {SERVE_LOAD['input_len']:,} tokens, {SERVE_LOAD['output_len']:,} out) "
        f"16 bit gives {of[base][0]:,.0f} output tokens/s from a cache of {of[base][1]:,.0f} tokens; {'; '.join(said)}."
    )


BLOCKS: Blocks = {
    "speed": (Path("docs/speed.md"), speed_block),
    "kernels": (Path("docs/speed.md"), kernels_block),
    "generate": (Path("docs/speed.md"), generate_block),
    "vllm": (Path("docs/speed.md"), vllm_block),
    "engine": (Path("docs/serve.md"), engine_block),
}
