"""A vLLM engine with a feature beside one without: offload of KV blocks, two GPUs, heads and models that draft.

    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_features.py --out DIR --parts offload
    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_features.py --out DIR --parts two     # two GPUs

Every engine is a process of its own over one random model of 8 layers; several of them run side by side (``--side``).
Parts, for a preset, one with groups of tokens and a recipe:

- ``offload``: a pool of blocks that holds not two of five prompts, which come three times; what was evicted is loaded
  again through a connector. Tokens must be those of an engine with room for all, and some tokens must have been loaded;
- ``two``: tensor and pipeline parallelism of 2, also with 16-bit pages (``dense``);
- ``heads``: a draft model, EAGLE and EAGLE 3, all of random weights, so that nearly every draft is rejected.

In each process of an engine and each of its layers (``two``, ``heads``) new prompts' pages are compared with what the
library encodes from the same keys and values, with constants by its heads' numbers, and attention with the reference
over these bytes (``serve_check.py``): no sum of another order is in that. ``bytes_equal`` is the least share of a
layer, ``error`` the largest relative error; they must be ``BYTES`` and ``ERROR``.

Answers are compared too. The last two parts sum in another order than one engine without them, and rounding moves
codes, so their tokens may part. How far that takes log-probabilities is measured by a third engine, of the same model
with the channels of its MLPs in another order: the same function, other sums (``order``). A row has mean differences
of log-probabilities, of the prompts' tokens (``prompt``) and of the generated ones up to where tokens part
(``steps``), and how much less likely than the best the other's token was there, at most (``behind``); the same of the
model in another order, and of the preset and 16 bit (``packing``). The feature may do ``TIMES`` what the order does,
or ``MORE`` than as many times as it does with vLLM's own cache, where none of our pages is read (``none``). With
16-bit pages (``dense``) no code moves.

What these rules find is shown by two engines with a fault each: within a prompt of 700 tokens one of its blocks is
overwritten with its next one, in every layer (``page``), which both rules must find, or one KV head of it in one layer
(``head``), which moves log-probabilities less than rounding does: only the comparison of bytes must find that.

Rows go to DIR/checks.jsonl, answers to DIR/answers, logs to DIR/logs. On a CPU ``two`` takes two processes, and
``offload`` the connector with copies made by the processor.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
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
LENGTHS = {"offload": (200, 190, 180, 170, 160)}
OTHERS = (5, 64, 100, 700, 1500, 33, 257, 1000)
"""Tokens of the prompts of other parts."""
MODELS = {"order": "order"}
"""Models of runs that have another one."""
NEAR = 8
"""Likeliest tokens of a step whose log-probabilities are kept."""
COUNTED = re.compile("prefix_cache|spec_decode_num_(draft|accepted)_tokens")
TIMES, MORE, LEAST = 2.0, 1.5, 1e-4
"""Log-probabilities may be apart by so many times what another order of sums does, or by so many times the times that
they are with vLLM's own cache (each measured once, on 24 tokens of 8 prompts), and by that much in any case."""
BYTES, ERROR = 1 - 1e-5, 5e-3
"""Share of a layer's bytes that must be the library's, and how far its attention may be from the reference."""
CHECKED = (90, 300, 700)
"""Tokens of the prompts whose pages are compared."""
FAULTS = ("page", "head")
"""Runs with a fault."""
SPOILT = 3
"""Layer of a fault in one layer."""
LIMIT = 240
"""Seconds of an engine on a GPU."""


def models_in(folder: Path) -> None:
    """Write a random model whose tokens say something, and what drafts for it: a smaller one and two heads."""
    import torch
    from tests.serve.heads import save_eagle
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, layers in (("model", LAYERS), ("draft", 2), ("order", LAYERS)):
        torch.manual_seed(SEED + layers)
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, initializer_range=0.05, max_position_embeddings=4096,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        for layer in model.model.layers if name == "order" else ():
            order, mlp = torch.randperm(config.intermediate_size), layer.mlp
            for x in (mlp.gate_proj, mlp.up_proj):
                x.weight.data = x.weight.data[order].contiguous()
            mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, order].contiguous()
        model.save_pretrained(folder / name)
    for kind in ("eagle", "eagle3"):
        save_eagle(folder / kind, config, kind)


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


def runs_of(part: str, on_gpu: bool, scratch: Path) -> dict[str, dict[str, Any]]:
    """Options of the engines that are compared, the one without the feature first."""
    if part == "two":
        pipeline = {"pp2": {"pipeline_parallel_size": 2}} if on_gpu else {}  # vLLM's CPU build has none
        return {
            "one": {},
            "order": {},
            "page": {},
            "head": {},
            "tp2": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
            **pipeline,
        }
    if part == "heads":
        kinds = {"draft_model": "draft", "eagle": "eagle", "eagle3": "eagle3"}
        drafts = {"num_speculative_tokens": 3}
        return {
            "one": {},
            "order": {},
            "page": {},
            "head": {},
            **{
                method: {"speculative_config": {"method": method, "model": str(scratch / name), **drafts}}
                for method, name in kinds.items()
            },
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
        "disable_log_stats": False, "enable_prefix_caching": True, **job["options"],
    }  # fmt: skip
    if job["given"]:
        options |= {
            "additional_config": {"kvcodec": job["given"]},
            "worker_extension_cls": f"{Path(__file__).stem}.Probe",
        }
    if job["on_gpu"]:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options |= {"gpu_memory_utilization": 0.06, "compilation_config": graphs}
        options |= {"attention_backend": "CUSTOM"} if job["given"] else {}
    else:
        options |= {"enforce_eager": True}
    llm = LLM(model=job["model"], **options)
    blocks = plant(llm, job["run"]) if job["run"] in FAULTS else []
    generator = torch.Generator().manual_seed(1)
    asked = [
        {"prompt_token_ids": torch.randint(3, WORDS, (n,), generator=generator).tolist()}
        for n in LENGTHS.get(job["part"], OTHERS)
    ]
    known = {} if job["part"] == "offload" else {"logprobs": NEAR, "prompt_logprobs": 1}
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, **known)

    def said(batches: list[list[Any]]) -> list[dict[str, Any]]:
        outs = [out for batch in batches for out in llm.generate(batch, greedy, use_tqdm=False)]
        return [answer(out) for out in outs]

    if job["part"] == "offload":  # one by one, as the pool has no room for two
        turns = {str(turn): said([[x] for x in asked]) for turn in range(3)}
    else:
        turns = {"together": said([asked])}
    counts = {m.name: m.value for m in llm.get_metrics() if COUNTED.search(m.name) and hasattr(m, "value")}
    pages = []
    if job["given"] and job["part"] != "offload":
        blocks.clear()
        llm.collective_rpc("features_record")
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        new = [torch.randint(3, WORDS, (n,), generator=generator).tolist() for n in CHECKED]
        llm.generate([{"prompt_token_ids": ids} for ids in new], one, use_tqdm=False)
        pages = llm.collective_rpc("features_compare")
    Path(job["to"]).write_text(json.dumps({"turns": turns, "counts": counts, "pages": pages}))


def plant(llm: Any, kind: str) -> list[int]:
    """Let a block of a request hold what its next block does, in every layer, or one KV head of one layer.

    The request is the first one whose prompt has four whole blocks in the cache; its later tokens read it. Returns the
    numbers of the blocks, which another request's take the place of once they are cleared.
    """
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    impls = [layer.impl for layer in layers.values() if getattr(layer, "impl", None) is not None]
    blocks: list[int] = []

    def spoilt(forward: Any, heads: slice) -> Any:
        def call(layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, *more: Any, **named: Any) -> Any:
            found = forward(layer, q, k, v, cache, metadata, *more, **named)
            if metadata is not None and not blocks:
                rows = [row for row, _, _, length in metadata.chunks if length >= 4 * BLOCK]
                blocks.extend(metadata.table[rows[0], 2:4].tolist() if rows else ())
            if blocks:
                cache[blocks[0], heads] = cache[blocks[1], heads]
            return found

        return call

    for impl in impls if kind == "page" else impls[SPOILT : SPOILT + 1]:
        impl.forward = spoilt(impl.forward, slice(None) if kind == "page" else slice(0, 1))
    return blocks


class Probe:
    """What is called inside the workers (``worker_extension_cls``)."""

    def features_record(self) -> None:
        from serve_check import Recorder, served_layers

        own = min(LAYERS, len(served_layers(self)))  # the layers of what drafts come behind them
        self.recorders = [Recorder(self, i).__enter__() for i in range(own)]

    def features_compare(self) -> dict[str, float]:
        """The worst of this process's layers."""
        from serve_check import compare

        found = []
        for recorder in self.recorders:
            recorder.__exit__()
            found.append(compare(recorder))
        return {
            "layers": len(found), **{n: min(f[n] for f in found) for n in ("requests", "bytes", "bytes_equal")},
            "error": max(f[name] for f in found for name in ("prompt_error", "step_error")),
        }  # fmt: skip


def answer(out: Any) -> dict[str, Any]:
    """Tokens of an answer; log-probabilities of the likeliest ones of each step, and of the prompt's tokens."""
    found = out.outputs[0]
    own = zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=False)
    return {
        "tokens": list(found.token_ids),
        "steps": [[[token, x.logprob] for token, x in step.items()] for step in found.logprobs or ()],
        "prompt": [step[token].logprob for token, step in own if step is not None],
    }


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


def same(found: list[dict[str, Any]], want: list[dict[str, Any]]) -> float:
    """Share of tokens that are the same."""
    pairs = [pair for a, b in zip(found, want, strict=True) for pair in zip(a["tokens"], b["tokens"], strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


def apart(found: list[dict[str, Any]], want: list[dict[str, Any]]) -> dict[str, float]:
    """How far log-probabilities are apart; see the module's text."""
    prompt, steps, behind = [], [], [0.0]
    for a, b in zip(found, want, strict=True):
        prompt += [abs(x - y) for x, y in zip(a["prompt"], b["prompt"], strict=True)]
        for x, y, one, two in zip(a["tokens"], b["tokens"], a["steps"], b["steps"], strict=True):
            p, q = dict(one), dict(two)
            if x != y:
                behind += [max(p.values()) - p.get(y, min(p.values())), max(q.values()) - q.get(x, min(q.values()))]
                break
            steps.append(abs(p[x] - q[y]))
    return {"prompt": sum(prompt) / len(prompt), "steps": sum(steps) / max(1, len(steps)), "behind": max(behind)}


def judged(found: dict[str, float], order: dict[str, float], plain: float = 0.0) -> bool:
    """Whether what is apart is rounding; ``plain``: how many times what the order does it is with vLLM's own cache."""
    return all(found[key] <= max(TIMES, MORE * plain) * order[key] + LEAST for key in ("prompt", "steps"))


def own_pages(pages: list[dict[str, float]]) -> bool:
    """Whether all processes hold the library's bytes and attend over them."""
    return bool(pages) and all(
        p["requests"] == len(CHECKED) and p["bytes_equal"] >= BYTES and p["error"] <= ERROR for p in pages
    )


def plain_of(read: dict[str, Any], part: str, run: str) -> float:
    """How many times what the order does a feature does with vLLM's own cache; 0 where that was not run."""
    one, order, feature = (
        read.get(f"{part}-none-{x}", {}).get("turns", {}).get("together") for x in ("one", "order", run)
    )
    if not (one and order and feature):
        return 0.0
    return apart(feature, one)["prompt"] / max(apart(order, one)["prompt"], 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda x: Path(x).resolve(), help="folder for rows and logs")
    parser.add_argument("--parts", type=lambda x: x.split(","), default=["offload"])
    parser.add_argument("--presets", type=lambda x: x.split(","), help="default: all")
    parser.add_argument("--runs", type=lambda x: x.split(","), help="such as one,tp2; default: all of a part")
    parser.add_argument("--side", type=int, default=3, help="engines side by side (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    import torch

    from kvcodec.cli.stamp import stamp
    from kvcodec_lab.bench.record import Recorder
    from kvcodec_lab.serve.metrics import flat

    on_gpu = torch.cuda.is_available()
    for name in ("logs", "answers"):
        (args.out / name).mkdir(parents=True, exist_ok=True)
    common = stamp(torch.device("cuda" if on_gpu else "cpu"), SEED, args.commit or None)
    recorder = Recorder(args.out / "checks.jsonl", common, lambda text: print(text, flush=True))
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models_in(scratch)
        presets = presets_in(scratch)
        path = [plugin_in(scratch), ROOT / "src", ROOT, ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, path))), "VLLM_PLUGINS": "kvcodec",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NCCL_NVLS_ENABLE": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "OMP_NUM_THREADS": "4" if on_gpu else "1",
        }  # fmt: skip
        if not on_gpu:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if "two" in args.parts else "nobind"
        jobs = {}
        for part in args.parts:
            more = {} if part == "offload" else {"dense": {"preset": "dense"}, "none": {}}
            for name, given in (presets | more).items():
                if args.presets and name not in args.presets:
                    continue
                for run_name, options in runs_of(part, on_gpu, scratch).items():
                    if (args.runs and run_name not in args.runs) or (name == "none" and run_name in FAULTS):
                        continue
                    label = f"{part}-{name}-{run_name}"
                    model, to = scratch / MODELS.get(run_name, "model"), args.out / "answers" / f"{label}.json"
                    jobs[label] = {
                        "part": part, "given": given, "options": options, "model": str(model), "on_gpu": on_gpu,
                        "to": str(to), "preset": name, "run": run_name,
                    }  # fmt: skip

        def environment(job: dict[str, Any]) -> dict[str, str]:
            two = "parallel" in " ".join(job["options"])
            more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if two else "0"}
            return {**env, **more, **({} if two or on_gpu else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})}

        with concurrent.futures.ThreadPoolExecutor(args.side) as pool:
            logs = [args.out / "logs" / f"{label}.log" for label in jobs]
            why = dict(zip(jobs, pool.map(run, jobs.values(), map(environment, jobs.values()), logs), strict=True))
        read = {x: json.loads(Path(jobs[x]["to"]).read_text()) for x in jobs if not why[x]}
        for label, job in jobs.items():
            part, preset = job["part"], job["preset"]
            base = f"{part}-{preset}-{'room' if part == 'offload' else 'one'}"
            if label == base:
                continue
            row = (preset, None, "same_tokens", "share", f"{part}_{job['run']}")
            if failed := why[label] or why[base]:
                bad = True
                said = (args.out / "logs" / f"{label}.log").read_text(errors="replace")[-1500:]
                recorder.add(*row, None, status=f"failed: {failed}", said=said)
                continue
            found, want = (read[x]["turns"] for x in (label, base))
            share = sum(same(found[turn], want[turn]) for turn in found) / len(found)
            more = {"counts": read[label]["counts"]}
            if part == "offload":
                bad |= share < 1 or not more["counts"].get("vllm:external_prefix_cache_hits")
            else:
                one, other, wide = (read.get(f"{part}-{x}", {}).get("turns", {}).get("together") for x in (
                    f"{preset}-one", f"{preset}-order", "dense-one"))  # fmt: skip
                more["apart"] = apart(found["together"], one)
                more |= {"order": apart(other, one)} if other else {}
                more |= {"packing": apart(one, wide)} if wide else {}
                if preset != "none" and job["run"] != "order":
                    more["pages"], more["plain"] = read[label]["pages"], plain_of(read, part, job["run"])
                    more["same_pages"] = own_pages(more["pages"])
                    more["rounding"] = other is not None and judged(more["apart"], more["order"], more["plain"])
                    if job["run"] in FAULTS:
                        bad |= more["same_pages"] or (more["rounding"] and job["run"] == "page")
                    else:
                        bad |= not (more["same_pages"] and more["rounding"])
            recorder.add(*row, flat(share), **more)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
