"""Soak vLLM with packed pages: random load on a small pool, then every answer against its prompt alone.

    python benchmarks/soak.py --model DIR --preset saw-int4 --seconds 300 --out FILE

Prompts share prefixes, some requests are cancelled, and the pool holds fewer tokens than the running requests, so that
requests are preempted. Afterwards each prompt runs alone. An answer that differs from that run is read again in one
piece: rounding makes a token at most ``--tie`` nats less likely than the best; more is a wrong page. The soak fails on
a wrong page, on blocks that are held while the engine is idle, on memory that grows by more than ``LEAK_MB``, and if
the load had no preemption, no prefix hit or no cancellation. ``--plant pages`` exchanges pages, which must be found.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_PLUGINS", "packedkv")

import torch
from vllm import LLM, SamplingParams

from packedkv.cli.stamp import stamp

Tokens = tuple[int, ...]
SEQUENCES, LEAK_MB = 8, 128


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def prompts_of(rng: random.Random, count: int, most: int, vocabulary: int) -> list[Tokens]:
    """Draw prompts: three quarters share one of three beginnings, the others share nothing."""
    text = lambda n: tuple(rng.randrange(3, vocabulary) for _ in range(n))  # noqa: E731
    begins = [text(most // 2) for _ in range(3)]
    shared = [rng.choice(begins) + text(rng.randint(1, most // 2)) for _ in range(count * 3 // 4)]
    return shared + [text(rng.randint(most // 2, most)) for _ in range(count - len(shared))]


def exchange_pages(llm: LLM, rng: random.Random) -> None:
    """Exchange two blocks of every layer: the planted fault."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    caches = {c.data_ptr(): c for c in (getattr(layer, "kv_cache", None) for layer in layers) if torch.is_tensor(c)}
    for cache in caches.values():
        pair = rng.sample(range(1, cache.shape[0]), 2)
        cache[pair] = cache[pair[::-1]]


def load(llm: LLM, prompts: list[Tokens], args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Send requests for ``args.seconds`` and step the engine until it is idle."""
    engine, end = llm.llm_engine, time.monotonic() + args.seconds
    running: dict[str, list[Any]] = {}  # id: prompt, tokens, number of tokens after which the client leaves
    answers: list[tuple[Tokens, Tokens]] = []
    sent = cancelled = 0
    memory: list[float] = []
    while running or time.monotonic() < end:
        while len(running) < 3 * SEQUENCES and time.monotonic() < end and rng.random() < 0.7:
            prompt, new = rng.choice(prompts), rng.randint(1, args.answer)
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            engine.add_request(str(sent), {"prompt_token_ids": list(prompt)}, params)
            running[str(sent)] = [prompt, (), rng.randint(0, new) if rng.random() < 0.25 else new + 1]
            sent += 1
        if args.plant == "pages" and rng.random() < 0.02:
            exchange_pages(llm, rng)
        for out in engine.step():
            if (request := running.get(out.request_id)) is not None:
                request[1] = tuple(out.outputs[0].token_ids)
                if out.finished:
                    answers.append((request[0], request[1]))
                    del running[out.request_id]
        gone = [name for name, (_, tokens, most) in running.items() if len(tokens) >= most]
        if gone:
            engine.abort_request(gone)
        for name in gone:
            prompt, tokens, _ = running.pop(name)
            cancelled += 1
            answers += [(prompt, tokens)] if tokens else []
        memory.append(resident_mb())
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "requests": sent, "cancelled": cancelled, "answers": answers,
        "preemptions": int(counts.get("vllm:num_preemptions", 0)),
        "prefix_hit_tokens": int(counts.get("vllm:prefix_cache_hits", 0)),
        "growth_mb": memory[-1] - memory[2 * len(memory) // 3],
        "held_blocks": not llm.reset_prefix_cache(),
    }  # fmt: skip


def behind(llm: LLM, prompt: Tokens, tokens: Tokens) -> float:
    """How much less likely than the best token an answer's tokens are at most, read in one piece."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": [*prompt, *tokens]}], params, use_tqdm=False)
    steps = out.prompt_logprobs[len(prompt) :]
    return max(max(x.logprob for x in s.values()) - s[t].logprob for s, t in zip(steps, tokens, strict=True))


def check(llm: LLM, answers: list[tuple[Tokens, Tokens]], tie: float) -> dict[str, Any]:
    """Compare each answer with the run of its prompt alone."""
    equal, ties, wrong = 0, [], []
    for prompt in dict.fromkeys(prompt for prompt, _ in answers):
        given = [tokens for p, tokens in answers if p == prompt]
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=max(map(len, given)), ignore_eos=True, detokenize=False)
        (alone,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        for tokens in given:
            if tokens == tuple(alone.outputs[0].token_ids[: len(tokens)]):
                equal += 1
            else:
                gap = behind(llm, prompt, tokens)
                (wrong if gap > tie else ties).append(gap)
    return {"equal": equal, "ties": len(ties), "largest_tie": max(ties, default=0.0), "wrong": sorted(wrong)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with config and weights")
    parser.add_argument("--preset", default="saw-int4")
    for name, default, what in (("--seconds", 300, "of load"), ("--prompts", 48, "distinct prompts"),
                                ("--prompt", 256, "tokens of a prompt"), ("--answer", 48, "tokens of an answer"),
                                ("--blocks", 64, "blocks of the pool"), ("--seed", 0, "of prompts")):  # fmt: skip
        parser.add_argument(name, type=int, default=default, help=f"{what} (%(default)s)")
    parser.add_argument("--tie", type=float, default=0.1, help="nats that rounding may make (%(default)s)")
    parser.add_argument("--plant", choices=("pages",), help="a fault that must be found")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    # float32: in bfloat16 nearly every answer has a tie
    llm = LLM(model=args.model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, disable_log_stats=False,
              max_model_len=args.prompt + args.answer + 64, max_num_seqs=SEQUENCES, block_size=16,
              num_gpu_blocks_override=args.blocks, kv_cache_memory_bytes=1 << 26, seed=args.seed,
              additional_config={"packedkv": {"preset": args.preset, "window": 0}})  # fmt: skip
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    found = load(llm, prompts_of(rng, args.prompts, args.prompt, vocabulary), args, rng)
    answers = found.pop("answers")
    found |= check(llm, answers, args.tie) | {"preset": args.preset, **stamp(torch.device("cpu"), args.seed)}
    absent = [key for key in ("preemptions", "prefix_hit_tokens", "cancelled") if not found[key]]
    failures = [f"no {key} happened" for key in absent] + [f"{len(found['wrong'])} wrong answers"] * bool(
        found["wrong"]
    )
    failures += ["blocks are held while the engine is idle"] * found["held_blocks"]
    failures += [f"memory grew by {found['growth_mb']:.0f} MB"] * (found["growth_mb"] > LEAK_MB)
    text = json.dumps(found | {"failures": failures}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
