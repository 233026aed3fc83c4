"""A model, no measurement: decode attention on GPUs that were not there, from bytes, instructions and clocks.

    PYTHONPATH=src:. python benchmarks/other_gpus.py [--specs A,B]

At 32 sequences of 32,768 tokens. For each GPU the program that a cache would ask for there is compiled (NVRTC, no GPU)
and its machine code read. A step takes at least the longest of three times: the cache's bytes at the memory's published
bandwidth; the instructions on the shortest way around the loop over tiles, one a clock for each of a multiprocessor's
four schedulers; its passes of shared memory, 128 bytes a clock. And it should take no longer than what an H200 took
under 100 KB of shared memory (``RESULTS``, where most presets waited for shared memory or instructions), times how many
times less bandwidth, or clocks of all multiprocessors, the GPU has, whichever is more. Tensor cores, launches and
caches are left out.
"""

import argparse
import json
import pathlib
from typing import NamedTuple

import torch
from tests.kernels.offline import compile_kernels, opcode

from kvcodec.codec import ROLES
from kvcodec.kernels.cuda import decode, launch
from kvcodec.kernels.spec import DecodeSpec, decode_spec
from kvcodec_lab.bench.packed import scheme_of
from kvcodec_lab.bench.shapes import SHAPES

SPECS = ("saw-int4", "int-4", "turboquant-4", "ultraquant", "octopus-3", "octopus-4", "hqmq-s48_r4", "hqmq-s96_r4")
RESULTS = pathlib.Path(__file__).parent / "results/shared-memory/decode_100kb.json"
SHAPE = SHAPES["b32_32k"]
WORDS = {16: 2.0, 8: 4.0, 4: 5.3, 2: 5.9, 1: 6.2}
"""Passes of a look-up of 8 bytes by 32 lanes, by copies of the table: random rows, simulated."""


class Gpu(NamedTuple):
    """Published figures: multiprocessors, boost clock in GHz, bandwidth in TB/s."""

    name: str
    arch: int
    sms: int
    clock: float
    bandwidth: float


GPUS = (
    Gpu("H200", 90, 132, 1.98, 4.8),
    Gpu("A100 80 GB", 80, 108, 1.41, 2.04),
    Gpu("RTX 5090", 120, 170, 2.41, 1.79),
    Gpu("RTX 4090", 89, 128, 2.52, 1.01),
    Gpu("L4", 89, 58, 2.04, 0.30),
)


def passes(code: list[str], copies: int) -> float:
    """Passes of shared memory of a warp's instructions."""
    total = 0.0
    for x in code:
        if opcode(x) == "LDSM":
            total += 4 if ".4" in x or "x4" in x.lower() else 2
        elif opcode(x) == "LDS":
            total += 4 if ".128" in x else (WORDS[copies] if copies else 2.0) if ".64" in x else 1
        elif opcode(x) in ("STS", "LDGSTS"):
            total += 4
    return total


def copies_of(spec: DecodeSpec, halvings: int) -> int:
    """Copies of the keys' look-up table of rows of 8 bytes; 0: there is none."""
    if not spec.key.fewer or not spec.key.shared:
        return 0
    share = spec.halved(halvings).key.shared / spec.key.shared
    return max(n for n in WORDS if n <= max(1, round(16 * share)))


def measured(preset: str) -> float | None:
    """Return the H200's time under 100 KB in us."""
    for row in json.loads(RESULTS.read_text()):
        if (row["spec"], row["shape"], row["metric"]) == (preset, SHAPE.name, "decode_us_cold"):
            return float(row["values"]["p50"])
    return None


def row(preset: str, gpu: Gpu) -> str:
    """Return a line: the three least times in us, the longest, and the most."""
    shape = SHAPE
    scheme = scheme_of(preset)
    key, value = (scheme.codec(role).for_dtype(torch.bfloat16) for role in ROLES)
    spec = decode_spec(key, value, shape.head_dim, scheme.page_layout(shape.head_dim).page_tokens)
    there = launch.machine_of(f"sm_{gpu.arch}")._replace(sms=gpu.sms)
    heads, units = spec.heads(shape.group), shape.batch * shape.kv_heads * spec.tiles(shape.group)
    config = launch.config_for(spec, units, shape.tokens, there, heads=heads)
    kernel = compile_kernels(decode.program(spec, config, heads=heads).source, gpu.arch)["kv_decode"]
    code = min((x.shortest("HMMA", 8) for x in kernel.loops_with("HMMA", "LDGSTS")), key=len)
    tiles = units * shape.tokens / config.tile
    moved = shape.batch * shape.kv_heads * shape.tokens * spec.tile_bytes(64) / 64
    seconds = {
        "bytes": moved / (gpu.bandwidth * 1e12),
        "instructions": tiles * len(code) / (gpu.sms * 4 * gpu.clock * 1e9),
        "shared memory": tiles * passes(code, copies_of(spec, config.halvings)) / (gpu.sms * gpu.clock * 1e9),
    }
    us = {name: 1e6 * x for name, x in seconds.items()}
    limit, h200, most = max(us, key=lambda name: us[name]), GPUS[0], ""
    if (held := measured(preset)) is not None:
        slower = max(h200.bandwidth / gpu.bandwidth, h200.sms * h200.clock / (gpu.sms * gpu.clock))
        most = f"{held * slower:.0f}"
    each = " | ".join(f"{x:.0f}" for x in us.values())
    return f"| {gpu.name} | `{preset}` | {each} | {us[limit]:.0f} ({limit}) | {most} | {bf16(gpu):.0f} |"


def bf16(gpu: Gpu) -> float:
    """Return the least time of 16-bit attention, by its bytes, in us."""
    return SHAPE.bf16_bytes / gpu.bandwidth / 1e6


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", default=",".join(SPECS))
    asked = parser.parse_args()
    print("| GPU | preset | bytes | instructions | shared memory | at least | at most | bf16 at least |")
    print("|---|---|---|---|---|---|---|---|")
    for gpu in GPUS:
        for preset in asked.specs.split(","):
            print(row(preset, gpu), flush=True)


if __name__ == "__main__":
    main()
