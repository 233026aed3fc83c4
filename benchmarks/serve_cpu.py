"""Decode steps of vLLM on a CPU: 16 bit, a preset by the kernels and by the reference, in turns.

    .venv-serve/bin/python benchmarks/serve_cpu.py [--out FILE] [--preset saw-int4] [--shape smollm2] [--tokens 8192]

Each way is a process with the engine inside, on one thread (``--threads``); they take turns of a few steps, so that
another load of the machine falls on all. The model has random weights. The keys and values of the prompts are random
numbers that go into the blocks by the engine's own call; no prompt is computed, which would take most of an hour. A
step is timed from the scheduler to the sampled tokens; CPU seconds beside it, which do not count waiting. Results:
``benchmarks/results/cpu/serve-SHAPE.json``; docs/serve.md quotes them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "kvcodec",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
WAYS = ("16 bit", "kernels", "reference")
STEPS = {"16 bit": 4, "kernels": 4, "reference": 1}
"""Steps of a turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--preset", default="saw-int4")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--as", dest="way", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        serve(given)
    else:
        compare(given)


# -- one engine --------------------------------------------------------------------------------------------------------


def serve(given: argparse.Namespace) -> None:
    """Fill the blocks, then run as many steps as each line of standard input says."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if given.way == "reference":
        from kvcodec.kernels.cpu import library

        library.chosen = lambda: Path("left-out.so")
    torch.set_num_threads(given.threads)
    forward = GPUModelRunner._model_forward
    generator = torch.Generator().manual_seed(0)

    def filling(self: Any, input_ids: Any = None, *args: Any, **more: Any) -> Any:
        context = get_forward_context()
        if context.attn_metadata is None or input_ids.shape[0] <= given.requests:
            return forward(self, input_ids, *args, **more)
        for name, layer in context.no_compile_layers.items():
            shape = (input_ids.shape[0], layer.num_kv_heads, layer.head_size)
            k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, context.slot_mapping[name])
        return torch.zeros(input_ids.shape[0], SHAPES[given.shape]["hidden_size"], dtype=torch.bfloat16)

    GPUModelRunner._model_forward = filling
    longest = given.tokens + 512
    llm = LLM(
        model=given.model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True,
        max_model_len=longest, max_num_seqs=given.requests, max_num_batched_tokens=given.tokens + 64,
        enable_prefix_caching=False, kv_cache_memory_bytes=needed(given),
        additional_config={} if given.way == "16 bit" else {"kvcodec": {"preset": given.preset}},
    )  # fmt: skip
    engine = llm.llm_engine
    asked = SamplingParams(temperature=0, max_tokens=longest - given.tokens, ignore_eos=True, detokenize=False)
    for i in range(given.requests):
        ids = torch.randint(3, 1000, (given.tokens,), generator=generator).tolist()
        engine.add_request(str(i), {"prompt_token_ids": ids}, asked)
    for _ in range(given.requests + 2):  # a prompt a step, then two of the other kind
        engine.step()
    cache = engine.vllm_config.cache_config
    config = engine.vllm_config.compilation_config.static_forward_context
    layer = next(iter(config.values()))
    packed = getattr(layer.impl, "packed", None)
    by = "vLLM" if packed is None else packed.unserved or packed.engine(layer.kv_cache.shape[2]).name
    tell({"by": by, "tokens": cache.num_gpu_blocks * cache.block_size, "block": cache.block_size})
    for line in sys.stdin:
        walls, spent = [], []
        for _ in range(int(line)):
            wall, cpu = time.perf_counter(), time.process_time()
            done = engine.step()
            walls.append(time.perf_counter() - wall)
            spent.append(time.process_time() - cpu)
            assert len(done) == given.requests, "a request was not part of the step"
        tell({"wall": walls, "cpu": spent})


def needed(given: argparse.Namespace) -> int:
    """Memory of the cache: what 16 bit needs for these requests and a tenth more, the same for all ways."""
    shape = SHAPES[given.shape]
    token = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2 * 2
    return int(given.requests * (given.tokens + 512) * token * 1.1)


def tell(what: dict[str, Any]) -> None:
    print("TOLD " + json.dumps(what), flush=True)


# -- all of them, in turns ---------------------------------------------------------------------------------------------


class Way:
    """A process that serves one way."""

    def __init__(self, way: str, argv: list[str], threads: int) -> None:
        self.name, self.wall, self.cpu = way, [], []
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv, "--as", way], text=True,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "TOLD " in line:
                found: dict[str, Any] = json.loads(line.split("TOLD ", 1)[1])
                return found
        raise SystemExit(f"serve_cpu: the engine of {self.name!r} ended; run it with --as {self.name!r} to see why.")

    def turn(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEPS[self.name]}\n")
        self.process.stdin.flush()
        found = self.told()
        self.wall.append(statistics.median(found["wall"]))
        self.cpu.append(statistics.median(found["cpu"]))


def compare(given: argparse.Namespace) -> None:
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[given.shape]
        config = LlamaConfig(
            **shape, max_position_embeddings=2 * given.tokens, architectures=["LlamaForCausalLM"], dtype="bfloat16"
        )
        config.save_pretrained(folder)
        argv = ["--model", folder]
        for name in ("preset", "shape", "tokens", "requests", "threads"):
            argv += [f"--{name}", str(getattr(given, name))]
        ways, about = [], {}
        for name in given.ways.split(","):  # one after another: loading takes memory
            ways.append(Way(name, argv, given.threads))
            about[name] = ways[-1].told()
            print(f"{name}: {about[name]}", file=sys.stderr, flush=True)
        load = [os.getloadavg()[0]]
        for _ in range(given.rounds):
            for way in ways:
                way.turn()
        load.append(os.getloadavg()[0])
        for way in ways:
            assert way.process.stdin is not None
            way.process.stdin.close()
            way.process.wait()
    first = ways[0]
    rows = []
    print(f"{'':10} {'tokens/s':>9} {'x':>6} {'CPU s a step':>13} {'x':>6} {'tokens that fit':>16} {'x':>6}  by")
    for way in ways:
        faster = statistics.median(a / b for a, b in zip(first.wall, way.wall, strict=True))
        less = statistics.median(a / b for a, b in zip(first.cpu, way.cpu, strict=True))
        speed, cpu = given.requests / statistics.median(way.wall), statistics.median(way.cpu)
        fit = about[way.name]["tokens"]
        more = fit / about[first.name]["tokens"]
        rows.append({
            "spec": "bf16" if way.name == "16 bit" else given.preset, "way": way.name, **about[way.name],
            "tokens_per_s": speed, "step_seconds": way.wall,
            "step_cpu_seconds": way.cpu, "speed_to_first": faster, "cpu_speed_to_first": less,
        })  # fmt: skip
        print(
            f"{way.name:10} {speed:9.2f} {faster:6.2f} {cpu:13.4f} {less:6.2f} {fit:16,d} {more:6.2f}  "
            f"{about[way.name]['by']}"
        )
    if given.out:
        import torch

        from kvcodec.cli.stamp import stamp

        options = {name: x for name, x in vars(given).items() if name not in ("out", "way", "model", "ways")}
        found = {**stamp(torch.device("cpu"), 0), "options": options, "load_average": load, "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
