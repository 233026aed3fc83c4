"""docs/speed.md: speed on CPUs.

cpu           decode attention beside PyTorch's, from CPU_ATTENTION; CPU_FIGURE shows it
cpu-generate  whole models beside DynamicCache, from CPU_GENERATED
"""

import json
from pathlib import Path

from blocks.sources import Blocks, MissingResultError, rows_of
from kvcodec.cli.page import figures, pictures
from kvcodec.cli.page.tables import markdown
from kvcodec.cli.page.words import DASH
from kvcodec_lab.bench.studies import number

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


def write_figures(root: Path) -> None:
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


BLOCKS: Blocks = {
    "cpu": (Path("docs/speed.md"), cpu_block),
    "cpu-generate": (Path("docs/speed.md"), cpu_generate_block),
}
