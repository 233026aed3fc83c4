"""Write the generated blocks of README.md and of docs/ from result files and sources; ``--check`` only compares.

Blocks lie between ``<!-- NAME:start -->`` and ``<!-- NAME:end -->`` in the page that BLOCKS names:

    numbers     the README's three numbers: memory, decode, served, from SERVE_FILE, DECODE, ALL_RESULTS and RESULTS
    choose      the README's five rows, from the runs JUDGE[0] and TODAY of BOARD, ALL_RESULTS, ADDED and DECODE
    best        the best measured at each of BUDGETS, from ALL_RESULTS, ADDED and VARIANTS
    judged      the same on the real model, from the run TODAY
    board       three sentences of the runs BOARD_RUNS on tasks
    tasks       three of the run TODAY, and retrieved, one of them: who finds a UUID
    quality     every preset of ALL_RESULTS and ADDED; QUALITY_FIGURE shows them
    results     table of benchmarks/results/cpu/smollm2-135m.json
    columns     what its columns mean
    speed       the speed sentence, from the rows in benchmarks/results/nvidia-h200/
    kernels     speed-up of every preset with a kernel, break-even lengths, and SPEED_FIGURE, from DECODE there
    generate    the same through generate, from GENERATE_FILE
    vllm        vLLM's own decode attention, from VLLM_ATTENTION
    cpu         decode attention on a CPU beside PyTorch's, from CPU_ATTENTION; CPU_FIGURE shows it
    cpu-generate  whole models on a CPU beside DynamicCache, from CPU_GENERATED
    key-summary, key-breaks, key-channels, key-mends, key-means
                which presets fail on keys with biases, and what mends it, from KEY_ERRORS and the runs JUDGE
    ghost       the own method beside the best of the others, from the run TODAY, ALL_RESULTS, ADDED and FITTED
    ghost-steps what each of its steps gains, from STEPS
    ghost-fresh the same beside others on texts that it was not designed on, from the runs below FRESH
    ghost-rate  its error at its bits beside Shannon's bound and other methods, from REPRODUCED
    ghost-speed its decode attention beside that of saw-int4, with and without the ghost term, from DECODE
    med3        perplexity by slots of outliers, from MED3
    age-tiers   KL of the newest tokens in other codecs, from AGE_TIERS
    speech, speech-summary
                Whisper with packed caches, from SPEECH
    video, video-summary
                rollouts of the video model trained here, from VIDEO
    findings    OCTOPUS's findings on video and audio, on models of ours, from the files of `own_models.OWN`
    frames      attention of a frame and of an audio step on a GPU, from FRAMES
    engine      vLLM's throughput and the tokens that fit, from SERVE_FILE
    library     the modules of src/kvcodec, each with the first sentence of its docstring
    laboratory  the same of src/kvcodec_lab
"""

import argparse
import ast
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from kvcodec.description import kernels_for
from kvcodec.errors import FormatError, KVError
from kvcodec.registry import get, presets
from kvcodec_lab.bench.record import newest
from kvcodec_lab.bench.shapes import SWEEP_BATCHES
from kvcodec_lab.bench.studies import number
from kvcodec_lab.bench.summary import Table, break_even, lines, speed_points, steps_of_a_model
from kvcodec_lab.eval.generation import CUDNN_OFF
from kvcodec_lab.eval.merge import unpack
from kvcodec_lab.eval.rows import Row
from kvcodec_lab.eval.stats import against, summarize
from kvcodec_lab.eval.store import Run
from kvcodec_lab.report import figures, pictures
from kvcodec_lab.report.figures import SPEED_TITLES
from kvcodec_lab.report.pages import key_errors, leaderboard
from kvcodec_lab.report.pages.leaderboard import found_values, retrieval_sentences, sentences
from kvcodec_lab.report.ranks import EXACT
from kvcodec_lab.report.rows import UNCOMPRESSED, Results, mapping, read_rows
from kvcodec_lab.report.tables import cell, columns_of, markdown, with_reference
from kvcodec_lab.report.words import DASH, listed
from kvcodec_lab.reproduce import own_models
from kvcodec_lab.serve.tables import Found

read_runs = cache(leaderboard.read_runs)  # many blocks tell of the published runs: they are read once

ROOT = Path(__file__).resolve().parents[1]
README = Path("README.md")
RESULTS = Path("benchmarks/results/cpu/smollm2-135m.json")
ALL_RESULTS = Path("benchmarks/results/nvidia-h200/quality_smollm2-135m.json")
ADDED = Path("benchmarks/results/cpu/quality_smollm2-135m.json")
"""The same of presets that came later, measured on a CPU."""
FITTED = Path("benchmarks/results/cpu/ghost_smollm2-135m.json")
FITTED_LARGE = Path("benchmarks/results/nvidia-h100/ghost_qwen2.5-coder-1.5b.json")
"""`ghost` on the small model and on the real one with constants of `kvcodec fit`."""
OWN, MORE_BITS = "ghost", 0.5
REPRODUCED = Path("docs/reproduce/reproduce.json")
SPEECH = Path("benchmarks/results/cpu/speech_whisper-base.json")
SPEECH_BITS, SPEECH_POINTS = 4.5, 0.5
SPEECH_FIGURE, VIDEO_FIGURE = (Path(f"docs/img/{name}-bits.png") for name in ("speech", "video"))
VIDEO, FRAMES = (Path(f"benchmarks/results/nvidia-h100/{name}.json") for name in ("video_digits", "frames"))
STEPS = "benchmarks/results/*/ghost_steps_*.json"
STEPS_FIGURE = Path("docs/img/ghost-steps.png")
"""Of `benchmarks/ghost_steps.py`, a file for each model."""
FRESH, PLAIN, STRESSED, NEEDLE = Path("benchmarks/results/fresh"), "plain", "stressed", "needle-4k"
"""Published runs MODEL/TEXT/plain and /stressed of texts of `benchmarks/fresh_texts.py`, and MODEL/NEEDLE/plain."""
BESIDE = ("ghost-3", "ghost-4")
"""What the others are compared with there."""
"""The library's own method; others may hold so many bits more than it beside them."""
VARIANTS = Path("benchmarks/results/nvidia-h200/quality_smollm2-135m_variants.json")
QUALITY_FIGURE = Path("docs/img/all-presets.png")
BUDGETS = (2.3, 3.3, 4.3, 5.0)
SPEED = Path("benchmarks/results/nvidia-h200")
SHAPES = {
    "llm64k": "1 sequence of 64k tokens",
    "b32_8k": "32 of 8k",
    "b32_32k": "32 of 32k",
    "video": "a video model's 32k",
}
SPEED_SPEC = "saw-int4"
DECODE = "decode*.json"
"""Files of `kvcodec bench decode`; of rows with the same name those of the latest run count."""
SPEED_FIGURE = Path("docs/img/speed.png")
GENERATE_FILE = Path("benchmarks/results/nvidia-h100/generate.json")
GENERATE = "qwen3_8b_b1_32k"
"""File of `kvcodec bench generate`, and the shape that the sentence quotes."""
BOARD = Path("benchmarks/results/eval")
BOARD_RUNS = ("smollm2-135m", "smollm2-135m-stressed")
"""The plain and the stressed run that the sentences quote."""

REFUSED = 10.0
"""Times the uncompressed perplexity from which a preset is called refused: the key-bias check refuses all such."""

KEY_ERRORS = tuple(
    Path(f"benchmarks/results/cpu/key_errors_{name}.json") for name in ("qwen2.5-coder-1.5b", "smollm2-135m-stressed")
)
JUDGE = ("qwen2.5-coder-1.5b", "smollm2-135m-stressed", "smollm2-135m")
"""Errors of scores on the model with key biases and on the stressed small one; their runs of BOARD, and the plain."""
TODAY = "qwen2.5-coder-1.5b-auto"
"""The run of the real model with today's default, which encodes keys without their bias; JUDGE[0] is with it."""
MED3 = Path("benchmarks/results/cpu/med3_qwen2.5-coder-1.5b.json")
AGE_TIERS = Path("benchmarks/results/cpu/age_tiers_smollm2-135m.json")

VLLM_ATTENTION = SPEED / "vllm_attention.json"

CPU_ATTENTION = Path("benchmarks/results/cpu/attention.json")
CPU_GENERATED = Path("benchmarks/results/cpu")
"""Where ``generate-*.json`` of benchmarks/generate_cpu.py lie: whole models at lengths of context."""
CPU_MODELS = {"llama-1b": "Llama-3.2-1B's shape", "smollm2": "SmolLM2-135M's shape"}
CPU_FIGURE = Path("docs/img/cpu.png")
CPU_SHOWN = ("saw-int4", "kivi-4", "octopus-3", "hqmq-s96_r4")
CPU_RIVALS = {
    ("sdpa", "float32"): "PyTorch's SDPA, float32",
    ("sdpa", "bfloat16"): "PyTorch's SDPA, bfloat16",
    ("two-matmuls", "float32"): "two float32 products",
    ("two-matmuls-kt", "float32"): "the same, keys held transposed",
    ("flex", "float32"): "FlexAttention, compiled, float32",
    ("llama.cpp-f16", "float32"): "llama.cpp, f16 cache",
    ("llama.cpp-q8_0", "float32"): "llama.cpp, q8_0 cache",
    ("llama.cpp-q4_0", "float32"): "llama.cpp, q4_0 cache",
    ("quantized-cache-quanto", "float32"): "QuantizedCache of transformers, quanto",
    ("quantized-cache-hqq", "float32"): "QuantizedCache of transformers, hqq",
}
LLAMA = CPU_RIVALS["llama.cpp-q4_0", "float32"]
CPU_DRAWN = (
    "PyTorch's SDPA, float32", "PyTorch's SDPA, bfloat16", "two float32 products", LLAMA,
    "QuantizedCache of transformers, quanto",
)  # fmt: skip
"""Rivals in the figure."""

SERVE_FILE = "serve.json"
SERVE_LOAD = {"input_len": 16384, "output_len": 1024, "concurrency": 256}
SERVED = ("saw-int4", "fp8", "bf16")
"""Of `benchmarks/serve_h200.py`: the load that is quoted, and whose; the last is what the others are compared with."""
STEP, SESSIONS, ONE_CLIENT = "n32_i8192", "s32x6_p1024_c8192_t2048_a128_together", "c1_i1024_o1024"
"""Shapes of the README's served numbers: a decode step, sessions, and what does not get better."""


class MissingResultError(Exception):
    """Raised when a result that a page quotes does not exist, or exists twice."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a result file: a list, an object with ``rows``, or one row."""
    return read_rows([path], needed=())


def results_block(root: Path) -> str:
    """Markdown table of the demo's rows."""
    path = root / RESULTS
    if not path.is_file():
        raise MissingResultError(f"{RESULTS} does not exist; run the demo and put its result JSON there.")
    rows = with_reference(rows_of(path))
    if not any("spec" in row for row in rows):
        raise MissingResultError(f"{RESULTS} holds no result rows.")
    return _table(columns_of(rows), rows)


def columns_block(root: Path) -> str:
    """Each column of that table and its meaning."""
    path = root / RESULTS
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{RESULTS} does not exist; run the demo and put its result JSON there.")
    return "\n".join(f"- **{c.heading}**: {c.meaning}" for c in columns_of(rows))


def median_of(rows: list[dict[str, Any]], metric: str, shape: str) -> tuple[float, dict[str, Any]]:
    """p50 of the one row with this metric and shape; of several runs' that of the latest."""
    found = [r for r in rows if (r.get("spec"), r.get("metric"), r.get("shape")) == (SPEED_SPEC, metric, shape)]
    found = [r for r in found if r.get("values") is not None]
    latest = max((r.get("run", "") for r in found), default="")
    found = [r for r in found if r.get("run", "") == latest]
    if len(found) != 1:
        raise MissingResultError(
            f"{SPEED}: {len(found)} rows have spec {SPEED_SPEC}, metric {metric}, shape {shape}; exactly one must."
        )
    return float(found[0]["values"]["p50"]), found[0]


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
        f"On one {gpus.pop()}, decode attention read straight from `{SPEED_SPEC}` pages takes {_list(times)} per "
        f"layer and step, {_list([*gains[:-1], gains[-1] + ' times'])} as fast as the faster bf16 SDPA backend there "
        f"(cold L2, CUDA graph, medians)."
    )


def decode_rows(root: Path) -> list[dict[str, Any]]:
    """Rows of the benches of decode attention; empty before the first."""
    return newest(read_rows(sorted((root / SPEED).glob(DECODE))))


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


def write_figure(root: Path) -> bool:
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


def _list(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def quality_rows(root: Path) -> list[dict[str, Any]]:
    """Every preset on the small model: the rows of ALL_RESULTS, and of ADDED what those lack."""
    rows: dict[str, dict[str, Any]] = {}
    for path in (ALL_RESULTS, ADDED):
        if (root / path).is_file():
            for row in rows_of(root / path):
                if "spec" in row:
                    rows.setdefault(row["spec"], row)
    if not rows:
        raise MissingResultError(f"{ALL_RESULTS} does not exist; compare every preset and put the JSON there.")
    return list(rows.values())


def best_block(root: Path) -> str:
    """The best at each budget on the small model, and what was measured there."""
    rows = quality_rows(root)
    presets = len(rows)
    rows += [row for row in rows_of(root / VARIANTS) if "spec" in row] if (root / VARIANTS).is_file() else []
    held = [(r["spec"], r["effective_bits"], r["kl"], r["perplexity"]) for r in rows]
    tokens = f"{rows[0]['windows']} windows of {rows[0]['window_tokens']} tokens"
    return _best(held) + (
        f"\n\n{presets} presets and {len(rows) - presets} options of them on {rows[0]['model']}, {tokens}; bits of "
        f"every byte held, windows and dense layers included, which weigh less in longer contexts; uncompressed "
        f"perplexity {rows[0]['uncompressed']['perplexity']:.2f}."
    )


def judged_block(root: Path) -> str:
    """The best at each budget on the real model with key biases."""
    values, base = judged(root, TODAY)
    named = [spec for spec in values if spec in presets()]
    off = sum(not values[spec].perplexity <= 1.1 * base for spec in named)
    options = f" and {len(values) - len(named)} options of them" if len(values) > len(named) else ""
    found = judge_of(root, TODAY)
    items = next(r["items"] for r in found.rows if (r.task, r.group) == ("kl", None))
    return _best([(spec, *of) for spec, of in values.items() if of.perplexity < REFUSED * base]) + (
        f"\n\n{len(named)} presets{options} on {found.about['model']['name']}, "
        f"{items:g} windows of 2048 tokens; uncompressed perplexity {base:.2f}, and {off} of the "
        f"presets are more than 10 % above it."
    )


def ghost_block(root: Path) -> str:
    """Each preset of the own method, and the one of least loss that other methods have at about its bits."""
    values, uncompressed = judged(root, TODAY)
    small = quality_rows(root)

    def fitted(path: Path) -> list[tuple[str, float, float, float, str]]:
        rows = rows_of(root / path) if (root / path).is_file() else []
        return [(r["spec"], r["effective_bits"], r["kl"], r["perplexity"], ", fitted") for r in rows]

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
        f"on another text; the other rows take them from the prompt itself. {least_sentence(values)}"
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


def write_steps_figure(root: Path) -> bool:
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
    """Relative MSE of each preset of the own method, and of the best of others with hardly more bits, by source."""
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
    """Decode attention of the own method beside the fastest preset's, with and without the ghost term."""
    rows = decode_rows(root)
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
        return "Not measured yet: `kvcodec bench decode --device cuda` makes the rows."
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
    """For each model a table of every preset, and what stress and a needle do to the own method."""
    models = sorted(path for path in (root / FRESH).glob("*") if path.is_dir())
    parts = []
    for folder in models:
        texts = sorted(path.parent.name for path in folder.glob(f"*/{PLAIN}") if path.parent.name != NEEDLE)
        runs = [published(folder / text / PLAIN) for text in texts]
        parts.append(_fresh_table(texts, runs))
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


def _stressed_sentence(plain: Sequence[Run], stressed: Sequence[Run]) -> str:
    """KL of the own method under stress, beside the same windows without it."""
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


def judge_of(root: Path, run: str = JUDGE[0]) -> Results:
    """A run of the real model."""
    try:
        found = read_runs(root / BOARD).get(run)
    except FormatError as error:
        raise MissingResultError(str(error)) from error
    if found is None:
        raise MissingResultError(f"{BOARD}: no run {run}, which README and docs quote.")
    return found


class Judged(NamedTuple):
    """What a preset holds and loses on the real model."""

    bits: float
    kl: float
    perplexity: float


def judged(root: Path, run: str) -> tuple[dict[str, Judged], float]:
    """Every compressed spec of a run of the real model, and the uncompressed perplexity."""
    whole = [r for r in judge_of(root, run).rows if r.group is None]
    perplexity = {r.spec: r["value"] for r in whole if r.metric == "perplexity"}
    rows = [r for r in whole if r.metric == "kl" and r.spec not in EXACT]
    found = {r.spec: Judged(r["effective_bits"], r["value"], perplexity[r.spec]) for r in rows}
    return found, perplexity[UNCOMPRESSED]


def _best(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """A table of what has the least KL at each of BUDGETS; rows are specs with bits, KL and perplexity."""
    lines = []
    for budget in BUDGETS:
        fitting = sorted((row for row in rows if row[1] <= budget), key=lambda row: row[2])
        if not fitting:
            lines.append([f"{budget:g} bits", "none works", *[DASH] * 4])
            continue
        (spec, bits, kl, perplexity), *others = fitting
        after = f"`{others[0][0]}` ({others[0][2]:.4f})" if others else DASH
        lines.append([f"{budget:g} bits", f"`{spec}`", f"{bits:.2f}", f"{kl:.4f}", f"{perplexity:,.2f}", after])
    return markdown(["at most", "best", "bits in all", "KL", "perplexity", "next best"], lines, text=(1, 5))


def board_block(root: Path) -> str:
    """Three sentences of what the published runs on tasks say."""
    try:
        runs = read_runs(root / BOARD)
        if not runs:
            return "Not measured on tasks yet: `benchmarks/evaluate.py` makes the rows."
        if lacking := [name for name in BOARD_RUNS if name not in runs]:
            raise MissingResultError(f"{BOARD}: no run {' and '.join(lacking)}, which the docs quote.")
        return "\n".join(f"- {sentence}" for sentence in sentences(*(runs[name] for name in BOARD_RUNS)))
    except FormatError as error:
        raise MissingResultError(str(error)) from error


def tasks_block(root: Path) -> str:
    """Three sentences of the real model: who loses least, who finds a number, who a UUID."""
    return "\n".join(f"- {sentence}" for sentence in retrieval_sentences(judge_of(root, TODAY)))


def retrieved_block(root: Path) -> str:
    """Who finds a UUID on the real model."""
    return found_values(judge_of(root, TODAY))


def key_block(root: Path, part: str) -> str:
    """One part of the page on key biases: ``summary``, ``breaks``, ``channels``, ``mends`` or ``means``."""
    try:
        data, stressed = (key_errors.read(root / path) for path in KEY_ERRORS)
        runs = read_runs(root / BOARD)
    except FormatError as error:
        raise MissingResultError(str(error)) from error
    judged, small, plain = (runs.get(name) for name in JUDGE)
    if part == "summary":
        return key_errors.summary(data, judged, plain)
    if part == "breaks":
        return key_errors.breaking(data, stressed, judged, small)
    if part == "means":
        return key_errors.without_mean(judged)
    return key_errors.channels(data) if part == "channels" else key_errors.mending(data)


def med3_block(root: Path) -> str:
    """Bits, perplexity and KL by slots, and with the keys of layer 0 dense."""
    path = root / MED3
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{MED3} does not exist; docs/key-biases.md says what made it.")
    columns = [c for c in columns_of(rows) if c.key in ("spec", "key_bits", "effective_bits", "perplexity", "kl")]
    lines = []
    for row in rows:
        rise = row["perplexity"] / row["uncompressed"]["perplexity"] - 1
        told = f"{100 * rise:+.1f} %".replace("-", "−") if rise < 1 else f"x {1 + rise:,.1f}"
        name, *cells = [cell(row, c) for c in columns]
        lines.append([f"`{name}`", str(row["window_tokens"]), *cells, told])
    heads = ["spec", "tokens", *(c.heading for c in columns[1:]), "beside uncompressed"]
    return markdown(heads, lines)


def age_tiers_block(root: Path) -> str:
    """A row for each spec, in the order of bits: bits behind each length, and KL of the tokens up to it."""
    if not (root / AGE_TIERS).is_file():
        raise MissingResultError(f"{AGE_TIERS} does not exist; benchmarks/age_tiers.py makes it.")
    held = json.loads((root / AGE_TIERS).read_text())
    at = sorted({row["tokens"] for row in held["rows"]})
    by: dict[str, dict[int, dict[str, Any]]] = {}
    for row in held["rows"]:
        by.setdefault(row["spec"], {})[row["tokens"]] = row
    lines = []
    for spec, rows in sorted(by.items(), key=lambda item: item[1][at[-1]]["effective_bits"]):
        cells, scored, total = [f"`{spec}`"], 0, 0.0
        for n in at:  # the first token of the window is not scored
            summed = rows[n]["kl"] * (n - 1)
            cells += [f"{rows[n]['effective_bits']:.2f}", f"{(summed - total) / (n - 1 - scored):.4f}"]
            scored, total = n - 1, summed
        lines.append(cells)
    spans = zip((1, *at), at, strict=False)
    heads = ["spec", *(h for a, b in spans for h in (f"bits at {b:,}", f"KL of tokens {a:,} to {b:,}"))]
    worst = max(row["kl_se"] / row["kl"] for row in held["rows"])
    windows = "one window" if held["windows"] == 1 else f"{held['windows']} windows"
    return (
        f"{markdown(heads, lines)}\n\n{held['model']}, {windows} of {at[-1]:,} tokens of {held['text']}, fed in calls "
        f"of {held['call_tokens']} tokens, each of which attends what is stored; bits of every byte held behind so "
        f"many tokens. Standard errors of a mean KL are at most {worst:.0%} of it, over the same tokens in all rows."
    )


def speech_rows(root: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of SPEECH, the smallest cache last; and the 16-bit one."""
    rows = sorted(media_rows(root, SPEECH), key=lambda row: -row["effective_bits"])
    return rows, _one(rows, "dense")


def speech_block(root: Path) -> str:
    """Bits, word errors, KL and bytes of each preset."""
    rows, _ = speech_rows(root)
    heads = [
        "preset",
        "bits held",
        "word errors %",
        "beside 16 bit %",
        "KL a token",
        "largest",
        "MB a stream",
        "GB of 64",
    ]
    lines = []
    for row in rows:
        size = sum(row["bytes"].values())
        errors = [f"{100 * row[key]:.2f}" for key in ("wer_reference", "wer_16bit")]
        moved = [f"{row['kl']:.4f}", f"{row['kl_largest']:.2f}"]
        held = [f"{size / 1e6:.2f}", f"{64 * size / 1e9:.2f}"]
        lines.append([f"`{row['spec']}`", f"{row['effective_bits']:.2f}", *errors, *moved, *held])
    return markdown(heads, lines)


def speech_summary_block(root: Path) -> str:
    """Which presets are within half a point of 16 bit at up to 4.5 bits, and what a stream holds."""
    rows, plain = speech_rows(root)
    small = [row for row in rows if row["effective_bits"] <= SPEECH_BITS]
    near = [row for row in small if row["wer_reference"] - plain["wer_reference"] <= SPEECH_POINTS / 100]
    cross, whole = plain["bytes"]["cross"], sum(plain["bytes"].values())
    names = listed([f"`{row['spec']}`" for row in near])
    return (
        f"{plain['streams']} clips, {plain['words']['reference']} words of reference text, {plain['tokens']:,} tokens. "
        f"Of the presets at up to {SPEECH_BITS} bits held, {len(near)} of {len(small)} make at most {SPEECH_POINTS} "
        f"points more word errors than 16 bit ({100 * plain['wer_reference']:.2f} %): {names}. The cross-attention "
        f"holds {100 * cross / whole:.0f} % of a stream's {whole / 1e6:.1f} MB."
    )


def media_rows(root: Path, file: Path) -> list[dict[str, Any]]:
    """Rows of a file that docs/video-audio.md shows."""
    path = root / file
    rows = rows_of(path) if path.is_file() else []
    if not rows:
        raise MissingResultError(f"{file} does not exist; docs/video-audio.md says what makes it.")
    return rows


def video_block(root: Path) -> str:
    """Bits and the least, mean and largest over the prompts of each metric."""
    rows = media_rows(root, VIDEO)
    heads = [
        "preset",
        "bits of codes",
        "bits held",
        "PSNR dB",
        "SSIM",
        "feature distance",
        "frames alike",
        "as the world %",
    ]
    lines = []
    for row in rows:
        bits = [f"{(row['key_bits'] + row['value_bits']) / 2:.2f}", f"{row['effective_bits']:.2f}"]
        forms = (("psnr", "{:.1f}", 1), ("ssim", "{:.2f}", 1), ("feature", "{:.3f}", 1), ("alike", "{:.0f}", 1))
        cells = [
            " / ".join(form.format(unit * x) for x in row[name])
            for name, form, unit in (*forms, ("truth", "{:.1f}", 100))
        ]
        lines.append([f"`{row['spec']}`", *bits, *cells])
    return markdown(heads, lines)


def video_summary_block(root: Path) -> str:
    """OCTOPUS's findings on video, on this model: 4 bits, 2 bits, the sketch."""
    rows = media_rows(root, VIDEO)

    def psnr(spec: str) -> float:
        return float(_one(rows, spec)["psnr"][1])

    four = ("saw-int4", "kivi-4:group=32", "octopus-4", "turboquant-4", "hqmq-s96_r4", "int-4")
    of_four = [psnr(spec) for spec in four]
    return (
        f"Mean PSNR beside the 16-bit rollout: the presets of 4 bits lie between {min(of_four):.1f} and "
        f"{max(of_four):.1f} dB, `int-8` at {psnr('int-8'):.1f}; at 3 bits `octopus-3` {psnr('octopus-3'):.1f}, "
        f"`turboquant-3` {psnr('turboquant-3'):.1f}; at 2 bits `octopus-2` {psnr('octopus-2'):.1f}, `turboquant-2` "
        f"{psnr('turboquant-2'):.1f}. TurboQuant's sketch at the same bits: `turboquant-qjl-3` "
        f"{psnr('turboquant-qjl-3'):.1f}."
    )


def write_media_figures(root: Path) -> None:
    """Draw SPEECH_FIGURE and VIDEO_FIGURE: what moved, over the bits held."""
    x = figures.Axis("bits held per element of K and V (all bytes x 8 / elements; uncompressed: 16)")
    heard, plain = speech_rows(root)
    drawn = [figures.Point(row["spec"], row["effective_bits"], row["kl"]) for row in heard if row["spec"] != "dense"]
    y = figures.Axis("KL a token along the 16-bit text, nats", "log")
    note = f"{plain['streams']} clips, both caches; lower and further left is better"
    pictures.write([figures.Plot("Whisper base", x, y, drawn, names="all", note=note)], root / SPEECH_FIGURE)
    seen = [row for row in media_rows(root, VIDEO) if row["spec"] != "dense"]
    drawn = [figures.Point(row["spec"], row["effective_bits"], row["psnr"][1]) for row in seen]
    y = figures.Axis("mean PSNR beside the 16-bit rollout, dB")
    note = "300 frames, 32 prompts, whose spread is larger than that of methods; higher and further left is better"
    plot = figures.Plot("Video model of 14 M", x, y, drawn, better="higher", names="all", note=note)
    pictures.write([plot], root / VIDEO_FIGURE)


def findings_block(root: Path) -> str:
    """Each finding as a ratio of errors: the paper's and ours, and whether ours lies within its bound."""
    claims = {
        own.name: {c.item: c for c in own_models.own_claims(own, own_models.errors_of(own, rows_of(file)))}
        for own in own_models.OWN
        if (file := root / own_models.RESULTS / own.file).is_file()
    }
    if not claims:
        raise MissingResultError(f"none of the files of `own_models.OWN` is under {own_models.RESULTS}.")
    heads = ["errors of", *(part for name in claims for part in ("paper's", name, "holds"))]
    lines = []
    for item in dict.fromkeys(item for of in claims.values() for item in of):
        cells = []
        for of in claims.values():
            if (claim := of.get(item)) is None:
                cells += ["", "", ""]
                continue
            printed = "" if "not printed" in claim.note else claim.printed
            cells += [printed, f"{claim.ours:.3g}", "yes" if claim.row("octopus", "")["holds"] else "no"]
        lines.append([item, *cells])
    return markdown(heads, lines)


def frames_block(root: Path) -> str:
    """Microseconds, and times as fast as bf16, of a frame's attention and of an audio step."""
    rows = media_rows(root, FRAMES)
    parts = {
        "frame": [row for row in rows if row["part"] == "frame"],
        "64 streams": [row for row in rows if row["part"] == "step" and row["batch"] == 64],
        "1 stream": [row for row in rows if row["part"] == "step" and row["batch"] == 1],
    }
    heads = ["", *(f"{name} {what}" for name in parts for what in ("us", "x flash", "x cuDNN"))]
    lines = []
    for first in parts["frame"]:
        cells = []
        for part in parts.values():
            row = _one(part, first["spec"])
            cudnn = _one(part, "bf16 cudnn")["us"] / row["us"]
            cells += [f"{row['us']:,.0f}", f"{row['vs_flash']:.2f}", f"{cudnn:.2f}"]
        lines.append([f"`{first['spec']}`", *cells])
    return markdown(heads, lines)


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


def cpu_curves(root: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Medians of CPU_ATTENTION by what attends and tokens: ``us``, ``sdpa`` and ``products`` (times as fast as)."""
    if not (root / CPU_ATTENTION).is_file():
        raise MissingResultError(f"{CPU_ATTENTION} does not exist; kvcodec bench decode --device cpu makes its rows.")
    found: dict[str, dict[int, dict[str, float]]] = {}
    keys = {"attend_us": "us", "speedup_vs_sdpa": "sdpa", "speedup_vs_two_matmuls": "products"}
    for row in rows_of(root / CPU_ATTENTION):
        if row["metric"] in keys:
            name = CPU_RIVALS.get((row["spec"], row["dtype"]), row["spec"])
            tokens = int(row["shape"].rsplit("_t", 1)[1])
            numbers = found.setdefault(name, {}).setdefault(tokens, {"bits": row["effective_bits"]})
            numbers[keys[row["metric"]]] = row["values"]["p50"]
    return found


def cpu_block(root: Path) -> str:
    """Milliseconds of decode attention at each length, and how many times as fast as PyTorch's; the figure."""
    curves = cpu_curves(root)
    rows = rows_of(root / CPU_ATTENTION)
    lengths = sorted({tokens for of in curves.values() for tokens in of})
    longest = lengths[-1]
    out = [f"![Time of decode attention on a CPU over the tokens held](img/{CPU_FIGURE.name})", ""]
    heads = ["", "bits", *(f"{n // 1024}k tokens, ms" for n in lengths)]
    heads += [f"over SDPA, {n // 1024}k" for n in lengths[1:]] + [
        f"over two products, {n // 1024}k" for n in lengths[1:]
    ]
    lines = []
    rivals = set(CPU_RIVALS.values())
    for name, of in sorted(curves.items(), key=lambda x: (x[0] not in rivals, x[1][longest]["us"])):
        cells = [name if name in rivals else f"`{name}`", number(of[longest]["bits"], ".2f")]
        cells += [f"{of[n]['us'] / 1e3:.1f}" for n in lengths]
        lines.append([*cells, *(f"{of[n][key]:.1f}x" for key in ("sdpa", "products") for n in lengths[1:])])
    out.append(markdown(heads, lines))
    ours = [r for r in rows if (r["spec"], r["dtype"]) not in CPU_RIVALS]
    machines = " and ".join(sorted({f"{r['device']}, {r['path']}" for r in ours}))
    more = ""
    if LLAMA in curves:
        versions = {n: v for r in rows for n, v in r["versions"].items() if n not in ours[0]["versions"]}
        named = ", ".join(
            f"{n} {v}" for n, v in sorted((versions | {"transformers": rows[0]["versions"]["transformers"]}).items())
        )
        faster = [f"{curves['saw-int4'][n]['sdpa'] / curves[LLAMA][n]['sdpa']:.1f}" for n in lengths[1:]]
        at = " and ".join(f"{n // 1024}k" for n in lengths[1:])
        theirs = next(r["commit"] for r in rows if CPU_RIVALS.get((r["spec"], r["dtype"])) == LLAMA)
        earlier = (
            f" llama.cpp and transformers' cache ran earlier (commit {theirs[:7]}): their last four columns are "
            f"relative to PyTorch's attention of that run, and so is this comparison."
            if theirs != ours[0]["commit"]
            else ""
        )
        more = (
            f"\n\n`saw-int4` is {' and '.join(faster)} times as fast as llama.cpp's attention on a q4_0 cache at {at} "
            f"tokens. Of llama.cpp the operator `ggml_flash_attn_ext` alone is timed, on as many threads, over a cache "
            f"that lies as llama.cpp's; of transformers' cache its `update`, and SDPA on what it returns "
            f"({named}).{earlier}"
        )
    return "\n".join(out) + (
        f"\n\nOne sequence, 32 query and 8 KV heads of 128 ({machines}; PyTorch {rows[0]['versions']['torch']}). "
        f"Medians of {rows[0]['repeats']} turns in which all take part. SDPA: PyTorch's attention on float32; two "
        f"products: the faster of both arrangements, one product for all queries of a KV head.{more}"
    )


def cpu_generate_block(root: Path) -> str:
    """Tokens per second of whole models with packed caches beside DynamicCache, of CPU_GENERATED."""
    runs = [json.loads(path.read_text()) for path in sorted((root / CPU_GENERATED).glob("generate-*.json"))]
    if not runs:
        raise MissingResultError(f"{CPU_GENERATED} holds no generate-*.json; benchmarks/generate_cpu.py makes them.")
    runs.sort(key=lambda run: (run["options"]["shape"], run["options"]["dtype"], run["options"]["tokens"]))
    lines = []
    for run in runs:
        options = run["options"]
        for row in run["rows"]:
            name = "DynamicCache" if row["spec"] == "dense" else f"`{row['spec']}`"
            prompt = f"{row['prompt_to_dense']:.2f}x" if row["prompt_seconds"] else DASH
            cells = [f"{CPU_MODELS[options['shape']]}, {options['dtype']}", f"{options['tokens']:,}", name]
            lines.append([*cells, f"{row['tokens_per_s']:.1f}", f"{row['speed_to_dense']:.2f}x", prompt])
    heads = ["model, its type", "tokens held", "cache", "tokens/s", "times as fast", "a prompt of 4k takes"]
    return markdown(heads, lines, text=(0, 2)) + (
        f"\n\nRandom weights, {runs[0]['gpu']}, PyTorch {runs[0]['versions']['torch']}; medians of turns in which all "
        f"caches take part."
    )


def write_cpu_figure(root: Path) -> None:
    """Draw CPU_FIGURE."""
    curves = cpu_curves(root)
    rivals = [name for name in CPU_DRAWN if name in curves]
    shown = [*rivals, *(spec for spec in CPU_SHOWN if spec in curves)]
    styles = figures.curve_styles(shown, rivals)
    drawn = [
        figures.Curve(name, [(float(n), of["us"] / 1e3) for n, of in sorted(curves[name].items())], styles[name])
        for name in shown
        if name in curves
    ]
    x = figures.Axis("tokens held", "doubling", tick=lambda n: f"{n / 1024:g}k")
    y = figures.Axis("milliseconds of decode attention", "log")
    plot = figures.Plot("One sequence, 8 KV heads of 128, two CPU threads", x, y, curves=drawn, names="legend")
    pictures.write([plot], root / CPU_FIGURE)


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
    price = _one(quality_rows(root), SPEED_SPEC)
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


def _one(rows: list[dict[str, Any]], spec: str) -> dict[str, Any]:
    found = [row for row in rows if row.get("spec") == spec]
    if len(found) != 1:
        raise MissingResultError(f"{ALL_RESULTS}: {len(found)} rows have spec {spec}; one is needed.")
    return found[0]


class Wish(NamedTuple):
    """A row of the README's table: what is wanted, and which of the presets that hold it is taken."""

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


def quality_block(root: Path) -> str:
    """Every preset: bits, bytes and quality, fewest bits first."""
    rows = quality_rows(root)
    rows.sort(key=lambda r: (r["effective_bits"], r["kl"]))
    columns = [c for c in columns_of(rows) if c.key != "tokens_per_s"]
    return _table(columns, rows)


def _table(columns: Sequence[Any], rows: Sequence[Any]) -> str:
    lines = [[f"`{cell(r, c)}`" if c.key == "spec" else cell(r, c) for c in columns] for r in rows]
    return markdown([c.heading for c in columns], lines)


def rooms_block(root: Path, package: str) -> str:
    """Modules of a package, first level, each with the first sentence of its docstring."""
    folder = root / "src" / package
    if not folder.is_dir():
        raise MissingResultError(f"{folder.relative_to(root)} does not exist.")
    lines = []
    for path in sorted(folder.iterdir(), key=lambda p: (p.is_dir(), p.name)):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix != ".py" or not source.is_file() or path.name in ("__init__.py", "__pycache__"):
            continue
        doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        text = " ".join(doc.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|").rstrip(".")
        lines.append([f"`{path.name}{'/' * path.is_dir()}`", text])
    return markdown(["module", "holds"], lines, text=(0, 1))


BLOCKS: dict[str, tuple[Path, Callable[[Path], str]]] = {
    "numbers": (README, numbers_block),
    "choose": (README, choose_block),
    "best": (Path("docs/choose.md"), best_block),
    "judged": (Path("docs/choose.md"), judged_block),
    "board": (Path("docs/choose.md"), board_block),
    "tasks": (Path("docs/choose.md"), tasks_block),
    "retrieved": (Path("docs/advise.md"), retrieved_block),
    "quality": (Path("docs/results.md"), quality_block),
    "results": (Path("docs/results.md"), results_block),
    "columns": (Path("docs/results.md"), columns_block),
    "speed": (Path("docs/speed.md"), speed_block),
    "kernels": (Path("docs/speed.md"), kernels_block),
    "generate": (Path("docs/speed.md"), generate_block),
    "vllm": (Path("docs/speed.md"), vllm_block),
    "cpu": (Path("docs/speed.md"), cpu_block),
    "cpu-generate": (Path("docs/speed.md"), cpu_generate_block),
    **{
        f"key-{part}": (Path("docs/key-biases.md"), partial(key_block, part=part))
        for part in ("summary", "breaks", "channels", "mends", "means")
    },
    "ghost": (Path("docs/ghost.md"), ghost_block),
    "ghost-steps": (Path("docs/ghost.md"), ghost_steps_block),
    "ghost-fresh": (Path("docs/ghost.md"), ghost_fresh_block),
    "ghost-rate": (Path("docs/ghost.md"), ghost_rate_block),
    "ghost-speed": (Path("docs/ghost.md"), ghost_speed_block),
    "med3": (Path("docs/key-biases.md"), med3_block),
    "age-tiers": (Path("docs/concepts.md"), age_tiers_block),
    "speech": (Path("docs/video-audio.md"), speech_block),
    "speech-summary": (Path("docs/video-audio.md"), speech_summary_block),
    "video": (Path("docs/video-audio.md"), video_block),
    "video-summary": (Path("docs/video-audio.md"), video_summary_block),
    "findings": (Path("docs/video-audio.md"), findings_block),
    "frames": (Path("docs/video-audio.md"), frames_block),
    "engine": (Path("docs/serve.md"), engine_block),
    "library": (Path("docs/architecture.md"), partial(rooms_block, package="kvcodec")),
    "laboratory": (Path("docs/architecture.md"), partial(rooms_block, package="kvcodec_lab")),
}
"""Name -> the page that has the block, and what writes it."""


def block_in(text: str, name: str) -> str:
    """What stands between a block's markers."""
    match = re.search(rf"<!-- {name}:start -->\n(.*?)\n?<!-- {name}:end -->", text, re.S)
    if match is None:
        raise MissingResultError(f"{BLOCKS[name][0]} has no markers for the block {name!r}.")
    return match[1]


def main() -> int:
    """Update or compare every block; 1 when a result is missing or, with ``--check``, a block differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    failed = False
    for name, (page, make) in BLOCKS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        try:
            old, new = block_in(text, name), make(ROOT)
        except MissingResultError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        if old != new:
            print(f"{page}, {name}: {'differs' if check else 'updated'}")
            failed |= check
            if not check:
                begin = text.index(f"<!-- {name}:start -->\n") + len(f"<!-- {name}:start -->\n")
                end = text.index(f"\n<!-- {name}:end -->", begin - 1)
                (ROOT / page).write_text(text[:begin] + new + text[end:], encoding="utf-8")
    if not check:
        write_figure(ROOT)
        write_cpu_figure(ROOT)
        write_media_figures(ROOT)
        write_steps_figure(ROOT)
        rows = quality_rows(ROOT)
        pictures.write([figures.quality(rows, f"{rows[0]['model']} on {rows[0]['text']}")], ROOT / QUALITY_FIGURE)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
