"""Time per token and peak memory through ``generate`` on a Qwen3-8B-shaped random model, against DynamicCache.

Weights are random: speed and memory only, no quality. Two ways of stepping are timed:

- ``generate``: the call a user makes, eager; (time for 1 + n tokens - time for 1 token) / n.
- ``compiled``: the same call with generate's own torch.compile; warmed up first.
- ``graph``: one decode step of the same model captured in a CUDA graph and replayed (greedy token fed back on the
  device), which takes the host out of the picture. DynamicCache cannot be captured (its tensors grow), so the 16-bit
  side is transformers' StaticCache there.

Usage: ``python benchmarks/generate_gpu.py --out FILE [--prompt 32768] [--batch 1] [--ways generate graph compiled]``
"""

import argparse
import gc
import json
import statistics
import subprocess
import time
import traceback
from pathlib import Path

import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.qwen3 import Qwen3Config

import kvcodec
import kvcodec.integrations.transformers  # registers the attention function


def qwen3_8b(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )


def cleanup() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed_generate(model, ids, make_cache, new_tokens: int) -> dict:
    """Run generate twice (1 token, 1 + n tokens) and take the difference per token."""
    seconds, cache, out = {}, None, None
    for n in (1, 1 + new_tokens):
        del cache, out  # before the baseline is read, or a freed cache would count as a saving
        cleanup()
        before = torch.cuda.memory_allocated()
        cache = make_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
        )
        torch.cuda.synchronize()
        seconds[n] = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before
    seen = cache.report() if hasattr(cache, "report") else {"effective_bits": 16.0, "paths": {"sdpa": "all"}}
    return {
        "values": {"p50": (seconds[1 + new_tokens] - seconds[1]) / new_tokens * 1e3},
        "prefill_and_first_token_s": seconds[1],
        "peak_bytes": peak,
        "held_bytes": held,
        "effective_bits": seen["effective_bits"],
        "paths": seen["paths"],
        "compiled": seen.get("compiled"),
        "tokens": out[0, -4:].tolist(),
    }


@torch.no_grad()
def timed_graph(model, ids, make_cache, replays: int = 20) -> dict:
    """Prefill eagerly, capture one decode step, replay it; median of the replays."""
    cleanup()
    before = torch.cuda.memory_allocated()
    cache = make_cache()
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True).clone()
    position = torch.full((ids.shape[0], 1), ids.shape[1], device="cuda")

    def step() -> None:
        out = model(token, position_ids=position, past_key_values=cache, use_cache=True).logits
        token.copy_(out[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    times.sort()
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "values": {
            "p20": times[len(times) // 5],
            "p50": statistics.median(times),
            "p80": times[len(times) * 4 // 5],
        },
        "peak_bytes": peak,
        "tokens": token[0].tolist(),
    }


def jobs_for(model, args: argparse.Namespace, batch: int) -> dict:
    """(spec, way, cache) -> what to time, for one batch size."""
    config = model.config
    ids = torch.randint(10, 150000, (batch, args.prompt), device="cuda")
    max_len = args.prompt + args.new_tokens + 32

    def dynamic() -> DynamicCache:
        return DynamicCache(config=config)

    def static() -> StaticCache:
        return StaticCache(config=config, max_cache_len=max_len)

    def fused():
        return kvcodec.cache_for(model, args.spec, attention="fused", max_len=max_len, probe=False)

    def generate(make_cache):
        return lambda: timed_generate(model, ids, make_cache, args.new_tokens)

    def graph(make_cache):
        return lambda: timed_graph(model, ids, make_cache)

    jobs = {
        ("dense", "generate", "DynamicCache"): generate(dynamic),
        (args.spec, "generate", "kvcodec fused"): generate(fused),
        ("dense", "graph", "StaticCache"): graph(static),
        (args.spec, "graph", "kvcodec fused"): graph(fused),
        (args.spec, "compiled", "kvcodec fused"): generate(fused),
        ("dense", "compiled", "StaticCache"): generate(static),
    }
    return {key: job for key, job in jobs.items() if key[1] in args.ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spec", default="saw-int4")
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    parser.add_argument("--ways", nargs="+", default=["generate", "graph"], help="of generate, graph, compiled")
    args = parser.parse_args()

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(qwen3_8b(args.layers), dtype=torch.bfloat16).eval()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    common = {
        "unit": "ms",
        "gpu": torch.cuda.get_device_name(),
        "versions": {m.__name__: m.__version__ for m in (torch, triton, transformers, kvcodec)},
        "commit": args.commit or commit.stdout.strip(),
        "seed": 0,
        "model": f"Qwen3-8B-shaped, {args.layers} layers, random bf16 weights",
        "prompt_tokens": args.prompt,
        "new_tokens": args.new_tokens,
    }
    rows: list[dict] = []
    for batch in args.batch:
        for (spec, way, cache), job in jobs_for(model, args, batch).items():
            model.set_attn_implementation("kvcodec" if "kvcodec" in cache else "sdpa")
            model.generation_config.disable_compile = way != "compiled"
            start = time.perf_counter()
            try:
                job()  # warm-up: compiles kernels, fills the allocator
                result = job()
            except Exception as error:  # one way that fails must not lose the others' figures
                print(f"{way:9} {cache:14} batch {batch}: FAILED {type(error).__name__}: {error}", flush=True)
                traceback.print_exc()
                continue
            rows.append(
                {
                    "spec": spec,
                    "metric": f"ms_per_token_{way}",
                    "shape": f"qwen3_8b_b{batch}_{args.prompt // 1024}k",
                    "cache": cache,
                    **result,
                    **common,
                }
            )
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(
                f"{way:9} {cache:14} batch {batch}: {result['values']['p50']:.2f} ms/token, peak "
                f"{result['peak_bytes'] / 1e9:.2f} GB ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
