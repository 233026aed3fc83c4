"""The papers' own kernel studies, from rows of the same names on this machine: tables beside what the papers print.

Printed times are of other machines and other kernels: what compares is the ratio within a column.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcodec.bench.shapes import HQMQ_TOKENS, INNERQ_TOKENS, KMEANS, SAW
from kvcodec.bench.summary import SPEEDUP, Row, Table


class Study(NamedTuple):
    """One table: what it shows, whose it is, what to know, headings and cells."""

    title: str
    source: str
    note: str
    headings: list[str]
    lines: list[list[str]]


def studies(rows: Sequence[Row]) -> list[Study]:
    """Every study that rows exist for."""
    table = Table(rows)
    made = [
        _saw_batches(table), _saw_unfused(table), _per_head(table), _innerq_totals(table), _innerq_overhead(table),
        _octopus(table), _hqmq_decode(table), _hqmq_prefill(table),
    ]  # fmt: skip
    return [study for study in made if any(any(cell != "–" for cell in line[1:]) for line in study.lines)]


def number(x: float | None, form: str = ".1f") -> str:
    """Return the number, or a dash.

    >>> number(2.345), number(None)
    ('2.3', '–')
    """
    return "–" if x is None else format(x, form)


def over(a: float | None, b: float | None) -> float | None:
    """a / b where both are known."""
    return a / b if a is not None and b else None


SAW_PAPER = {
    "INT4": (130.56, 138.34, 135.46, 191.94, 326.84),
    "fused rotation of K": (150.88, 136.25, 152.19, 171.07, 322.88),
    "k-means, 256 centroids": (180.67, 202.89, 208.10, 600.16, 834.24),
}
"""Table 7, attention of one layer, us, batches 1, 4, 8, 16, 32 at 16k tokens (Qwen3-32B on two H100s)."""


def _saw_batches(table: Table) -> Study:
    lines = []
    for spec in ("int-4", "saw-int4", "saw-int4:rotate=kv", KMEANS):
        cells = [table.median(spec, "decode_us_cold", s.name) for s in SAW]
        words = [number(x) if x is not None else _why(table, spec, s.name) for x, s in zip(cells, SAW, strict=True)]
        lines.append([f"ours: {spec}", *words])
    lines.append(["16 bit, this machine", *(number(table.bf16("decode_us_cold", s.name)) for s in SAW)])
    lines += [[f"paper: {name}", *map(str, times)] for name, times in SAW_PAPER.items()] if _any(lines) else []
    return Study(
        "Decode attention by batch: rotation of keys, of keys and values, k-means", "SAW-INT4, Table 7",
        "Microseconds of one layer, 16k tokens, 32 query heads and 4 KV heads, cold.",
        ["", *(f"{s.batch} sequences" for s in SAW)], lines,
    )  # fmt: skip


def _why(table: Table, spec: str, shape: str) -> str:
    return "no kernel" if table.status(spec, shape).startswith("no kernel") else "–"


def _any(lines: list[list[str]]) -> bool:
    return any(cell not in ("–", "no kernel") for line in lines for cell in line[1:])


def _saw_unfused(table: Table) -> Study:
    lines = []
    for shape in ("llm64k", "b32_8k"):
        fused = table.median("saw-int4", "encode_us", shape)
        matmul = table.median("saw-int4", "encode_us_unfused", shape)
        steps = table.median("saw-int4", "encode_us_torch", shape)
        cells = [number(fused), number(matmul), number(over(matmul, fused), ".2f"), number(steps)]
        lines.append([shape, *cells, number(over(steps, fused), ".0f")])
    return Study(
        "Rotate, quantize and write: fused against separate steps", "SAW-INT4, Tables 4 and 6",
        "Microseconds for K and V of all tokens. Apart: the keys' rotation as a product by cuBLAS, then the int-4 "
        "kernel. Torch: every step of the reference as torch operations.",
        ["", "fused", "rotation apart", "ratio", "torch steps", "ratio"], lines,
    )  # fmt: skip


def _per_head(table: Table) -> Study:
    lines = []
    for spec in table.specs():
        packed, alone = (table.median(spec, "decode_us_cold", s) for s in ("llm64k", "llm64k_mha"))
        if alone is not None:
            lines.append([spec, number(packed), number(alone), number(over(alone, packed), ".2f")])
    return Study(
        "Heads of a group in one tile against a program per query head", "Ultra-TQ",
        "Microseconds, 1 sequence of 64k tokens, cold. A program per query head is our own kernel over a cache whose "
        "KV head is repeated for its 7 query heads: it reads the bytes 7 times, as such kernels do, but from distinct "
        "memory. Structure of arrays against array of structures is not measured: there is one byte format.",
        ["", "28 query / 4 KV heads", "28 / 28", "ratio"], lines,
    )  # fmt: skip


INNERQ_PAPER = {
    "FP16": (153, 295, 582, 1174, 2320, 4638, 9516),
    "KIVI": (79, 146, 278, 543, 1074, 2142, 4331),
    "TurboQuant": (75, 140, 267, 516, 1017, 2027, 4046),
    "InnerQ base": (64, 118, 220, 420, 822, 1633, 3276),
    "InnerQ hybrid": (63, 112, 210, 406, 801, 1591, 3180),
    "InnerQ small": (62, 110, 208, 403, 795, 1575, 3136),
}
"""Table 4, total of both products, us, on a Jetson Xavier NX."""
INNERQ_SPECS = ("kivi-2", "turboquant-4", "turboquant-3", "innerq-base", "innerq-hybrid", "innerq-small")


def _innerq_totals(table: Table) -> Study:
    shapes = [f"llama8b_b1_{tokens}" for tokens in INNERQ_TOKENS]
    lines = [["16 bit, this machine", *(number(table.bf16("decode_us_cold", s)) for s in shapes)]]
    for spec in INNERQ_SPECS:
        lines.append([f"ours: {spec}", *(number(table.median(spec, "decode_us_cold", s)) for s in shapes)])
    lines += [[f"paper: {name}", *map(str, times)] for name, times in INNERQ_PAPER.items()] if _any(lines) else []
    return Study(
        "Both products of a decode step by length", "InnerQ, Table 4",
        "Microseconds, one sequence, 32 query and 8 KV heads at head_dim 128, cold. Ours has the softmax and the "
        " dense sink and window in it.",
        ["", *map(str, INNERQ_TOKENS)], lines,
    )  # fmt: skip


INNERQ_OVERHEAD = {
    "kivi-2": 22.1,
    "turboquant-4": 31.9,
    "innerq-base": 18.3,
    "innerq-hybrid": 18.7,
    "innerq-small": 18.2,
}
"""Table 5, totals, us."""


def _innerq_overhead(table: Table) -> Study:
    lines = []
    for spec in table.specs("append_us"):
        found = [table.median(spec, "append_us", f"append_b{b}") for b in (1, 8, 32, 256)]
        lines.append([spec, *map(number, found), number(INNERQ_OVERHEAD.get(spec))])
    return Study(
        "Quantization's overhead per decode step", "InnerQ, Table 5",
        "Microseconds of encoding and writing K and V of one new token per sequence, cold, 8 KV heads; codecs with "
        "blocks of 32 tokens: a block's time / 32.",
        ["", "1 sequence", "8", "32", "256", "paper (Jetson, 1 sequence)"], lines,
    )  # fmt: skip


OCTOPUS_PAPER = {
    ("video", "octopus-4"): (3.8, 10.4),
    ("video", "octopus-3"): (3.6, 8.9),
    ("video", "octopus-2"): (3.6, 8.6),
    ("video", "turboquant-4"): (2.0, 8.5),
    ("video", "turboquant-3"): (2.1, 7.9),
    ("video", "turboquant-2"): (2.0, 6.0),
    ("audio", "octopus-4"): (0.1, 5.9),
    ("audio", "octopus-3"): (0.1, 5.9),
    ("audio", "octopus-2"): (0.1, 6.0),
    ("audio", "turboquant-4"): (0.19, 5.6),
    ("audio", "turboquant-3"): (0.24, 5.6),
    ("audio", "turboquant-2"): (0.19, 5.8),
    ("llm64k", "octopus-4"): (5.2, 11.3),
    ("llm64k", "octopus-3"): (4.6, 9.4),
    ("llm64k", "octopus-2"): (4.5, 8.9),
    ("llm64k", "turboquant-4"): (1.5, 6.4),
    ("llm64k", "turboquant-3"): (1.6, 5.7),
    ("llm64k", "turboquant-2"): (1.5, 4.9),
}
"""Table 7 (H200): encode in ms, decode over bf16 SDPA."""


def _octopus(table: Table) -> Study:
    lines = []
    for (shape, spec), (encode, ratio) in OCTOPUS_PAPER.items():
        gain = table.median(spec, SPEEDUP, shape)
        ours = table.median(spec, "encode_us", shape)
        if gain is None and ours is None:
            continue
        ratios = [number(over(1.0, gain), ".2f"), str(ratio)]
        times = [number(over(ours, 1000.0), ".3f"), str(encode), number(over(encode * 1000, ours), ".0f")]
        lines.append([f"{shape}, {spec}", *ratios, *times])
    return Study(
        "Encode and decode", "OCTOPUS, Table 7",
        "Decode over 16-bit attention of the same run, cold (below 1: faster than 16 bit); the paper's SDPA took 0.06 "
        "ms at llm64k. Encode in milliseconds, K and V. The paper's TQ rows have group-wise values, our turboquant "
        "presets Lloyd-Max for both.",
        ["", "decode / 16 bit, ours", "paper", "encode, ours", "paper", "times as fast"], lines,
    )  # fmt: skip


HQMQ_PAPER = {4096: (0.013, 0.033), 16384: (0.014, 0.033), 32768: (0.014, 0.033)}
"""Table 5, RTX 4090: fp16 SDPA and fused, ms, s192."""


def _hqmq_decode(table: Table) -> Study:
    lines = []
    for spec in ("hqmq-s24_r3", "hqmq-s96_r4", "hqmq-s192_r6"):
        gains = [table.median(spec, SPEEDUP, f"llama8b_b1_{t}") for t in HQMQ_TOKENS]
        lines.append([f"ours: {spec}", *(number(x, ".2f") for x in gains)])
    if _any(lines):
        lines.append(["paper: s192", *(number(a / b, ".2f") for a, b in HQMQ_PAPER.values())])
    return Study(
        "Fused decode over 16-bit attention by length", "HQMQ, Table 5",
        "Times as fast as the fastest 16-bit attention (the paper: fp16 SDPA on an RTX 4090), one sequence, 32 query "
        "and 8 KV heads.",
        ["", *map(str, HQMQ_TOKENS)], lines,
    )  # fmt: skip


def _hqmq_prefill(table: Table) -> Study:
    lines = []
    for row in table.rows:
        if row["metric"] != "prefill_us" or row.get("values") is None or row["spec"].startswith("dense"):
            continue
        spec, shape = str(row["spec"]), str(row["shape"])
        ours, apart = float(row["values"]["p50"]), table.median(spec, "prefill_apart_us", shape)
        dense = table.bf16("prefill_us", shape)
        lines.append([f"{shape}, {spec}", number(ours), number(apart), number(over(apart, ours), ".2f"), number(dense)])
    return Study(
        "Prefill over packed history: fused against decode-then-SDPA", "HQMQ, Table 7",
        "Microseconds for a block of new queries over packed tokens; apart: decode all K and V, then flash attention. "
        "The paper's fused kernel took 1.568 ms against 0.448 apart (RTX 4090).",
        ["", "ours", "apart", "apart / ours", "16-bit flash alone"], lines,
    )  # fmt: skip
