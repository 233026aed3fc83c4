"""A whole model on a CPU: decode steps behind a long context and a prompt, packed and uncompressed, in turns.

    .venv/bin/python benchmarks/generate_cpu.py [--out FILE] [--specs saw-int4] [--shape llama-1b] [--tokens 16384]

The model has random weights in ``--dtype``. Steps are ``generate``'s own, from token to token, on caches that were
filled with random keys and values; the prompt of ``--prompt`` tokens goes through the model into an empty cache. Each
turn takes every cache once, so that another load of the machine falls on all. ``--threads`` are torch's and the
kernels'. Results: ``benchmarks/results/cpu/generate-SHAPE.json``.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from serve_cpu import SHAPES
from transformers import AutoModelForCausalLM, LlamaConfig

import kvcodec.integrations.transformers.cache  # noqa: F401  # registers the attention function
from kvcodec.integrations.transformers.argument import passing
from kvcodec_lab.bench.generate import Filler, timed_generate
from kvcodec_lab.stamp import stamp

DENSE = "dense"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--specs", default="saw-int4", help="comma-separated")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384, help="context of the steps")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    model = model_of(given)
    specs = [DENSE, *given.specs.split(",")]
    found: dict[str, dict[str, Any]] = {spec: {"step_ms": [], "prompt_seconds": []} for spec in specs}
    filler, prompt = Filler(model, 1, given.tokens, 0), Filler(model, 1, given.prompt, 0)
    for _ in range(given.rounds):
        for spec in specs:
            model.set_attn_implementation("sdpa" if spec == DENSE else "kvcodec")
            made = timed_generate(filler, partial(cache_of, filler, spec), given.steps)
            found[spec]["step_ms"].append(made["values"]["p50"])
            if "paths" in made:
                found[spec] |= {"effective_bits": made["effective_bits"], "paths": made["paths"]}
            found[spec]["prompt_seconds"].append(prefill(prompt, cache_of(prompt, spec)))
    rows, first = [], found[DENSE]
    print(f"{'':16} {'tokens/s':>9} {'x':>6} {'prompt s':>9} {'x':>6}")
    for spec, row in found.items():
        faster = statistics.median(a / b for a, b in zip(first["step_ms"], row["step_ms"], strict=True))
        longer = statistics.median(b / a for a, b in zip(first["prompt_seconds"], row["prompt_seconds"], strict=True))
        speed, seconds = 1e3 / statistics.median(row["step_ms"]), statistics.median(row["prompt_seconds"])
        rows.append({"spec": spec, "tokens_per_s": speed, "speed_to_dense": faster, "prompt_to_dense": longer, **row})
        print(f"{spec:16} {speed:9.2f} {faster:6.2f} {seconds:9.2f} {longer:6.2f}", flush=True)
    if given.out:
        options = {name: x for name, x in vars(given).items() if name != "out"}
        about = {**stamp(torch.device("cpu"), 0), "options": options, "load_average": [load, os.getloadavg()[0]]}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def model_of(given: argparse.Namespace) -> Any:
    config = LlamaConfig(**SHAPES[given.shape], max_position_embeddings=2 * max(given.tokens, given.prompt))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def cache_of(filler: Filler, spec: str) -> Any:
    return filler.dense("DynamicCache") if spec == DENSE else filler.packed(spec, fixed=False)


@torch.no_grad()
def prefill(filler: Filler, cache: Any) -> float:
    begin = time.perf_counter()
    filler.model(filler.ids, **passing(filler.model, cache), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
