"""Greedy tokens of a vLLM engine with a feature beside one without: offload of KV blocks, two GPUs or processes.

    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_features.py --out DIR --parts offload
    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_features.py --out DIR --parts two     # two GPUs

Every engine is a process of its own over one random model of 8 layers; several of them run side by side (``--side``).
Parts, for a preset, one with groups of tokens and a recipe:

- ``offload``: a pool of blocks that holds not two of five prompts, which come three times; what was evicted is loaded
  again through a connector. Tokens must be those of an engine with room for all, and some tokens must have been loaded;
- ``two``: tensor and pipeline parallelism of 2. Sums of a model's halves differ in their last bits, so tokens may part
  at ties: first tokens must be the same, and the share of all is noted.

Rows go to DIR/checks.jsonl, logs to DIR/logs. On a CPU ``two`` takes two processes, and ``offload`` the connector with
copies made by the processor.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serve_sizes import ON_A_CPU, SEED, plugin_in

ROOT = Path(__file__).resolve().parents[1]
LAYERS, NEW, WORDS, BLOCK = 8, 24, 2048, 64
LENGTHS = {"offload": (200, 190, 180, 170, 160), "two": (5, 64, 100, 700, 1500, 33, 257, 1000)}
LIMIT = 240
"""Seconds of an engine on a GPU."""


def model_in(folder: Path) -> None:
    """Write a random model whose tokens say something."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, initializer_range=0.08, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def presets_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The plugin's options by name; a recipe of both kinds of presets is written."""
    from kvcodec.recipe import LayerChoice
    from kvcodec.registry import write_recipe

    kinds = "kivi-2:window=0", "turboquant-4"
    write_recipe(folder / "recipe.json", [LayerChoice(kinds[i % 2], kinds[i % 2]) for i in range(LAYERS)])
    return {
        "saw-int4": {"preset": "saw-int4"},
        "kivi-2": {"preset": "kivi-2", "window": 0},
        "recipe": {"preset": str(folder / "recipe.json")},
    }


def runs_of(part: str, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Options of the engines that are compared, the one without the feature first."""
    if part == "two":
        return {
            "one": {},
            "tp2": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
            "pp2": {"pipeline_parallel_size": 2},
        }
    small = {"num_gpu_blocks_override": 6, "max_model_len": 256}
    found: dict[str, dict[str, Any]] = {"room": {"max_model_len": 256}}
    for name in ("OffloadingConnector", "SimpleCPUOffloadConnector")[: 2 if on_gpu else 1]:
        extra = {"cpu_bytes_to_use": 1 << 26, **({} if on_gpu else ON_A_CPU)}
        given = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        found[name] = {**small, "kv_transfer_config": given}
    return found


def child(job: dict[str, Any]) -> None:
    """Run one engine and write its tokens and counters."""
    import torch
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 512,
        "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 27, "seed": 0, "skip_tokenizer_init": True,
        "disable_log_stats": False, "enable_prefix_caching": True, "additional_config": {"kvcodec": job["given"]},
        **job["options"],
    }  # fmt: skip
    if job["on_gpu"]:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options |= {"attention_backend": "CUSTOM", "gpu_memory_utilization": 0.2, "compilation_config": graphs}
    else:
        options |= {"enforce_eager": True}
    llm = LLM(model=job["model"], **options)
    generator = torch.Generator().manual_seed(1)
    asked = [
        {"prompt_token_ids": torch.randint(3, WORDS, (n,), generator=generator).tolist()} for n in LENGTHS[job["part"]]
    ]
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    turns = []
    for _ in range(3 if job["part"] == "offload" else 1):
        # one by one where the pool has no room for two
        batches = [[x] for x in asked] if job["part"] == "offload" else [asked]
        outs = [out for batch in batches for out in llm.generate(batch, greedy, use_tqdm=False)]
        turns.append([list(out.outputs[0].token_ids) for out in outs])
    counts = {m.name: m.value for m in llm.get_metrics() if "prefix_cache" in m.name and hasattr(m, "value")}
    Path(job["to"]).write_text(json.dumps({"turns": turns, "counts": counts}))


def run(job: dict[str, Any], env: dict[str, str], log: Path) -> str:
    """Run a child; why it failed, or ``""``."""
    begun = time.monotonic()
    with log.open("w") as out:
        command = [sys.executable, __file__, "--child", json.dumps(job)]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            status = process.wait(LIMIT if job["on_gpu"] else 3 * LIMIT)
            why = "" if status == 0 else f"ended with {status}"
        except subprocess.TimeoutExpired:
            why = "stopped: it took too long"
        with contextlib.suppress(ProcessLookupError):  # the engine's own processes as well
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f"{log.stem}: {why or 'ended'} after {time.monotonic() - begun:.0f} s", flush=True)
    return why


def shares(found: list[list[list[int]]], want: list[list[list[int]]]) -> tuple[float, float]:
    """Shares of first tokens and of all that are the same."""
    pairs = [(a, b) for x, y in zip(found, want, strict=True) for a, b in zip(x, y, strict=True)]
    first = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    return first, sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True)) / sum(len(a) for a, _ in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda x: Path(x).resolve(), help="folder for rows and logs")
    parser.add_argument("--parts", type=lambda x: x.split(","), default=["offload"])
    parser.add_argument("--presets", type=lambda x: x.split(","), help="default: all")
    parser.add_argument("--side", type=int, default=3, help="engines side by side (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    import torch

    from kvcodec_lab.bench.record import Recorder
    from kvcodec_lab.serve.metrics import flat
    from kvcodec_lab.stamp import stamp

    on_gpu = torch.cuda.is_available()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    common = stamp(torch.device("cuda" if on_gpu else "cpu"), SEED, args.commit or None)
    recorder = Recorder(args.out / "checks.jsonl", common, lambda text: print(text, flush=True))
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model_in(scratch / "model")
        presets = presets_in(scratch)
        path = [plugin_in(scratch), ROOT / "src", ROOT, os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, path))), "VLLM_PLUGINS": "kvcodec",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NCCL_NVLS_ENABLE": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "OMP_NUM_THREADS": "4" if on_gpu else "1",
        }  # fmt: skip
        if not on_gpu:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if "two" in args.parts else "nobind"
        jobs = {}
        for part in args.parts:
            for name, given in presets.items():
                if args.presets and name not in args.presets:
                    continue
                for run_name, options in runs_of(part, on_gpu).items():
                    label = f"{part}-{name}-{run_name}"
                    jobs[label] = {
                        "part": part, "given": given, "options": options, "model": str(scratch / "model"),
                        "on_gpu": on_gpu, "to": str(scratch / f"{label}.json"), "preset": name, "run": run_name,
                    }  # fmt: skip

        def environment(job: dict[str, Any]) -> dict[str, str]:
            two = "parallel" in " ".join(job["options"])
            more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if two else "0"}
            return {**env, **more, **({} if two or on_gpu else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})}

        with concurrent.futures.ThreadPoolExecutor(args.side) as pool:
            logs = [args.out / "logs" / f"{label}.log" for label in jobs]
            why = dict(zip(jobs, pool.map(run, jobs.values(), map(environment, jobs.values()), logs), strict=True))
        for label, job in jobs.items():
            base = f"{job['part']}-{job['preset']}-{'room' if job['part'] == 'offload' else 'one'}"
            if label == base:
                continue
            row = (job["preset"], None, "same_tokens", "share", f"{job['part']}_{job['run']}")
            if failed := why[label] or why[base]:
                bad = True
                said = (args.out / "logs" / f"{label}.log").read_text(errors="replace")[-1500:]
                recorder.add(*row, None, status=f"failed: {failed}", said=said)
                continue
            found, want = (json.loads(Path(jobs[x]["to"]).read_text()) for x in (label, base))
            first, same = shares(found["turns"], want["turns"])
            loaded = found["counts"].get("vllm:external_prefix_cache_hits", 0)
            bad |= first < 1 or (job["part"] == "offload" and (same < 1 or not loaded))
            recorder.add(*row, flat(same), first=first, counts=found["counts"])
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
