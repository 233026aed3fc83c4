"""The papers' own kernel studies, from rows of the same names on this machine: tables beside what the papers print.

Printed times are from other machines and kernels: only ratios within a column are comparable.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcodec.cli.page.words import DASH
from kvcodec_lab.bench.shapes import HQMQ_TOKENS, INNERQ_TOKENS, KMEANS, SAW
from kvcodec_lab.bench.summary import SPEEDUP, Row, Table


class Study(NamedTuple):
    """One table: title, source, note, headings and cells."""

    title: str
    source: str
    note: str
    headings: list[str]
    lines: list[list[str]]


def studies(rows: Sequence[Row]) -> list[Study]:
    """Every study that rows exist for."""
    table = Table(rows)
    made = [
        _saw_batches(table), _saw_unfused(table), _saw_append(table), _per_head(table), _innerq_totals(table),
        _innerq_overhead(table), _octopus(table), _hqmq_decode(table), _hqmq_prefill(table),
    ]  # fmt: skip
    return [study for study in made if _any([line for line in study.lines if not line[0].startswith("paper")])]


def number(x: float | None, form: str = ".1f") -> str:
    """Return the number, or a dash.

    >>> number(2.345), number(None)
    ('2.3', '–')
    """
    return DASH if x is None else format(x, form)


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
    lines += [[f"paper: {name}", *map(str, times)] for name, times in SAW_PAPER.items()]
    return Study(
        "Decode attention by batch: rotation of keys, of keys and values, k-means", "SAW-INT4, Table 7",
        "Microseconds of one layer, 16k tokens, 32 query heads and 4 KV heads, cold. k-means has no kernel here: a "
        "number is its code's plus one of a centroid that the token names, for which the kernels' readers have no "
        "place (codes, scales and zeros of one block), and encoding measures each token against every centroid; the "
        "paper finds little quality in it once keys are rotated.",
        ["", *(_sequences(s.batch) for s in SAW)], lines,
    )  # fmt: skip


def _sequences(batch: int) -> str:
    return f"{batch} sequence{'s' * (batch > 1)}"


def _why(table: Table, spec: str, shape: str) -> str:
    return "no kernel" if table.status(spec, shape).startswith("no kernel") else DASH


def _any(lines: list[list[str]]) -> bool:
    """Whether something was measured."""
    return any(cell not in (DASH, "no kernel", "") for line in lines for cell in line[1:])


SAW_PREFILL = (212.32, 154.94 + 2126.10)
"""Table 6 at 64k tokens, us: the kernel that rotates and writes; the one that writes, and the rotation apart."""


def _saw_unfused(table: Table) -> Study:
    lines = []
    for shape in ("llm64k", "b32_8k"):
        fused = table.median("saw-int4", "encode_us", shape)
        both = table.median("saw-int4:rotate=kv", "encode_us", shape)
        plain = table.median("int-4", "encode_us", shape)
        matmul = table.median("saw-int4", "encode_us_unfused", shape)
        steps = table.median("saw-int4", "encode_us_torch", shape)
        cells = [number(plain), number(fused), number(both), number(matmul), number(over(matmul, fused), ".2f")]
        lines.append([shape, *cells, number(steps), number(over(steps, fused), ".0f")])
    fused, apart = SAW_PREFILL
    lines.append(["paper, 64k tokens", "135.87", f"{fused}", "", f"{apart:.2f}", f"{apart / fused:.2f}", "", ""])
    return Study(
        "Rotate, quantize and write: fused against separate steps", "SAW-INT4, Tables 4 and 6",
        "Microseconds for K and V of all tokens. Apart: the keys' rotation as a product by cuBLAS, then the int-4 "
        "kernel. Torch: every step of the reference as torch operations. llm64k has the paper's heads (4 of "
        "head_dim 128); its kernels ran on an H100.",
        ["", "int-4", "keys rotated, fused", "keys and values, fused", "rotation apart", "over fused", "torch steps",
         "over fused"],
        lines,
    )  # fmt: skip


SAW_WRITE = {
    "INT4": (4.61, 5.18, 5.50, 5.86, 5.50),
    "fused rotation of K": (6.40, 6.05, 6.69, 6.30, 6.11),
    "rotation of K apart": (9.92, 13.41, 17.22, 14.56, 14.88),
}
"""Table 7, us: the kernel that writes one token per sequence, and the rotation beside it."""


def _saw_append(table: Table) -> Study:
    batches = (1, 4, 8, 16, 32)
    metrics = (
        ("int-4", "append_us", "int-4"), ("saw-int4", "append_us", "keys rotated, fused"),
        ("saw-int4:rotate=kv", "append_us", "keys and values, fused"),
        ("saw-int4", "append_us_unfused", "rotation apart"),
    )  # fmt: skip
    lines = [
        [f"ours: {name}", *(number(table.median(spec, metric, f"append_b{b}"), ".2f") for b in batches)]
        for spec, metric, name in metrics
    ]
    lines += [[f"paper: {name}", *(f"{x:.2f}" for x in times)] for name, times in SAW_WRITE.items()]
    return Study(
        "Rotate, quantize and write one token per sequence", "SAW-INT4, Table 7",
        "Microseconds of a decode step, in a CUDA graph, whose launch alone takes about 3; 8 KV heads, cold. The "
        "paper: 4 KV heads, the kernels alone, on an H100.",
        ["", *map(_sequences, batches)], lines,
    )  # fmt: skip


def _per_head(table: Table) -> Study:
    lines = []
    for spec in table.specs():
        packed, alone = (table.median(spec, "decode_us_cold", s) for s in ("llm64k", "llm64k_apart"))
        if alone is not None:
            lines.append([spec, number(packed), number(alone), number(over(alone, packed), ".2f")])
    return Study(
        "Heads of a group in one tile against a program per query head", "Ultra-TQ, App. A.1",
        "Microseconds, 1 sequence of 64k tokens, 28 query and 4 KV heads, cold. A program per query head is our own "
        "kernel, to which the 7 query heads of a group are 7 sequences with the same page table: every byte is fetched "
        "and unpacked 7 times, from L2 where it is still there. The paper's other step, arrays of codes and of scales "
        "(as here, within a page) instead of one record per token, was not built: a record of turboquant-4 at "
        "head_dim 128 has 66 bytes, so that no record but every eighth begins where a copy of 16 bytes may, and it "
        "would be a second byte format.",
        ["", "a group in one tile", "a program per query head", "ratio"], lines,
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
    lines += [[f"paper: {name}", *map(str, times)] for name, times in INNERQ_PAPER.items()]
    return Study(
        "Both products of a decode step by length", "InnerQ, Table 4",
        "Microseconds, one sequence, 32 query and 8 KV heads at head_dim 128, cold. Ours has the softmax and the "
        "dense sink and window in it.",
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
        ["", *map(_sequences, (1, 8, 32, 256)), "paper (Jetson, 1 sequence)"], lines,
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


HQMQ_PAPER = {4096: (0.013, 0.243, 0.033), 16384: (0.014, 1.389, 0.033), 32768: (0.014, 2.737, 0.033)}
"""Table 5, RTX 4090, s192: fp16 SDPA, decoding the cache before SDPA, and fused; ms."""
HQMQ_SPECS = ("hqmq-s24_r3", "hqmq-s96_r4", "hqmq-s192_r6")


def _hqmq_decode(table: Table) -> Study:
    lines = []
    for spec in HQMQ_SPECS:
        cells = []
        for tokens in HQMQ_TOKENS:
            fused = table.median(spec, "decode_us_cold", f"llama8b_b1_{tokens}")
            apart = table.median(spec, "prefill_apart_us", f"prefill_b1_t{tokens}_q1")
            gain = table.median(spec, SPEEDUP, f"llama8b_b1_{tokens}")
            cells += [number(fused), number(gain, ".2f"), number(over(apart, fused), ".0f")]
        lines.append([f"ours: {spec}", *cells])
    cells = []
    for dense, apart, fused in HQMQ_PAPER.values():
        cells += [f"{1000 * fused:.0f}", f"{dense / fused:.2f}", f"{apart / fused:.0f}"]
    lines.append(["paper: s192", *cells])
    headings = [""]
    for tokens in HQMQ_TOKENS:
        headings += [f"{tokens} tokens, us", "over 16 bit", "over decode, then SDPA"]
    return Study(
        "Fused decode over 16-bit attention, and over decoding before it", "HQMQ, Table 5",
        "Microseconds of a fused step, and how many times as fast it is: as the fastest 16-bit attention (the paper: "
        "fp16 SDPA on an RTX 4090), and as decoding the whole cache by the reference in torch and attending then. One "
        "sequence, 32 query and 8 KV heads, cold.",
        headings, lines,
    )  # fmt: skip


def _hqmq_prefill(table: Table) -> Study:
    lines = []
    for row in table.rows:
        if row["metric"] != "prefill_us" or row.get("values") is None or row["spec"].startswith("dense"):
            continue
        spec, shape = str(row["spec"]), str(row["shape"])
        ours, apart = float(row["values"]["p50"]), table.row(spec, "prefill_apart_us", shape)
        known = None if apart is None else apart.get("values")
        least = None if apart is None else apart.get("least_apart_us")
        cells = [number(known["p50"] if known else None), number(least), number(over(least, ours), ".2f")]
        lines.append([f"{shape}, {spec}", number(ours), *cells, number(table.bf16("prefill_us", shape))])
    return Study(
        "Prefill over packed history: fused against decode, then SDPA", "HQMQ, Table 7",
        "Microseconds for a block of new queries over packed tokens. Ours unpacks pages by a kernel and runs flash "
        "attention over them. Apart: the reference decodes all K and V in torch, then flash attention; at least: what "
        "that must take when decoding runs at the memory's speed. The paper's fused kernel took 1.568 ms for 2048 "
        "queries, decoding first 0.448 (RTX 4090).",
        ["", "ours", "apart", "apart, at least", "at least / ours", "16-bit flash alone"], lines,
    )  # fmt: skip
