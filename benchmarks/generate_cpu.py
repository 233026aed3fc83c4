"""A whole model on a CPU: decode steps behind a long context and a prompt, packed and uncompressed, in turns.

    .venv/bin/python benchmarks/generate_cpu.py [--out FILE] [--specs saw-int4] [--shape llama-1b] [--tokens 16384]

The model has random weights in ``--dtype``. Steps are ``generate``'s own, from token to token, on caches that were
filled with random keys and values once and go on from turn to turn; the prompt of ``--prompt`` tokens goes through the
model into an empty cache. Each turn takes every cache once, so that another load of the machine falls on all.
``--threads`` are torch's and the kernels'. Results: ``benchmarks/results/cpu/generate-SHAPE.json``. On two idle cores
the defaults take some two minutes.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from serve_cpu import SHAPES
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessorList

import kvcodec.integrations.transformers.cache  # noqa: F401  # registers the attention function
from kvcodec.cli.stamp import stamp
from kvcodec.integrations.transformers.argument import passing
from kvcodec_lab.bench.generate import Filler, Stamps

DENSE = "dense"
NOISE = 1 << 20
"""Random numbers of which weights are copies: drawing all of them takes half a minute."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--specs", default="saw-int4", help="comma-separated")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384, help="context of the steps")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of steps")
    parser.add_argument("--prompts", type=int, default=2, help="turns of prompts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    model = model_of(given)
    specs = [DENSE, *given.specs.split(",")]
    found: dict[str, dict[str, Any]] = {spec: {"step_ms": [], "prompt_seconds": []} for spec in specs}
    steps(model, given, found)
    prompt = Filler(model, 1, given.prompt, 0)
    for _ in range(given.prompts):
        for spec in specs:
            found[spec]["prompt_seconds"].append(prefill(prompt, cache_of(prompt, spec)))
    rows, first = [], found[DENSE]
    print(f"{'':16} {'tokens/s':>9} {'x':>6} {'prompt s':>9} {'x':>6}")
    for spec, row in found.items():
        faster = statistics.median(a / b for a, b in zip(first["step_ms"], row["step_ms"], strict=True))
        speed = 1e3 / statistics.median(row["step_ms"])
        about = {"spec": spec, "tokens_per_s": speed, "speed_to_dense": faster}
        line = f"{spec:16} {speed:9.2f} {faster:6.2f}"
        if row["prompt_seconds"]:
            pairs = zip(first["prompt_seconds"], row["prompt_seconds"], strict=True)
            about["prompt_to_dense"] = statistics.median(b / a for a, b in pairs)
            line += f" {statistics.median(row['prompt_seconds']):9.2f} {about['prompt_to_dense']:6.2f}"
        rows.append({**about, **row})
        print(line, flush=True)
    if given.out:
        options = {name: x for name, x in vars(given).items() if name != "out"}
        about = {**stamp(torch.device("cpu"), 0), "options": options, "load_average": [load, os.getloadavg()[0]]}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def model_of(given: argparse.Namespace) -> Any:
    config = LlamaConfig(**SHAPES[given.shape], max_position_embeddings=2 * max(given.tokens, given.prompt))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype)).eval()
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # frequencies are no weights
    model.tie_weights()
    noise = 0.02 * torch.randn(NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in model.parameters():
            for part in weight.view(-1).split(NOISE):
                part.copy_(noise[: len(part)] if weight.ndim > 1 else torch.ones(len(part)))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def cache_of(filler: Filler, spec: str) -> Any:
    """Return an empty cache of the model, whose attention is set to that of the cache."""
    filler.model.set_attn_implementation("sdpa" if spec == DENSE else "kvcodec")
    return filler.dense("DynamicCache") if spec == DENSE else filler.packed(spec, fixed=False)


@torch.no_grad()
def steps(model: Any, given: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Fill a cache of each spec and time turns of steps: their medians, and what reads the cache."""
    filler = Filler(model, 1, given.tokens, 0)
    caches = {spec: filler.filled(cache_of(filler, spec)) for spec in found}
    ids = dict.fromkeys(found, filler.ids)
    for turn in range(given.rounds + 1):  # the first one warms up
        for spec, cache in caches.items():
            model.set_attn_implementation("sdpa" if spec == DENSE else "kvcodec")
            times = Stamps(model.device)
            ids[spec] = model.generate(
                ids[spec], **passing(model, cache), max_new_tokens=given.steps + 1, do_sample=False,
                attention_mask=torch.ones_like(ids[spec]), logits_processor=LogitsProcessorList([times]),
            )  # fmt: skip
            if turn:
                found[spec]["step_ms"].append(statistics.median(times.milliseconds()))
    for spec, cache in caches.items():
        if spec != DENSE:
            about = cache.report()
            found[spec] |= {"effective_bits": about["effective_bits"], "paths": about["paths"]}


@torch.no_grad()
def prefill(filler: Filler, cache: Any) -> float:
    begin = time.perf_counter()
    filler.model(filler.ids, **passing(filler.model, cache), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
