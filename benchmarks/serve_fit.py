"""A vLLM engine that fits constants at its first start, one that finds them, and one with a file of ``kvcodec fit``.

    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_fit.py --model FOLDER --out DIR [--preset ghost-3]

The first engine has ``"params": "fit"`` and an empty folder of constants; beside it the command ``kvcodec fit`` writes
a file of the same model. Then two engines start side by side: one with ``"params": "fit"`` again, which must find what
the first has kept, and one with the command's file. Greedy tokens of ``PROMPTS`` random prompts must be the same in the
first and the second, and with the command's file if it is the same file. Rows (seconds until an engine was up, of which
it fitted for so long) go to DIR/checks.jsonl, logs to DIR/logs.
"""

import argparse
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

from serve_sizes import SEED, plugin_in

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, NEW = (300, 700, 20, 1000), 32


def child(job: dict[str, Any]) -> None:
    """Start an engine; write its tokens, and how long it took."""
    begun = time.monotonic()
    import torch
    from vllm import LLM, SamplingParams

    imported = time.monotonic()
    options: dict[str, Any] = {
        "max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28, "seed": 0,
        "additional_config": {"kvcodec": job["given"]},
    }  # fmt: skip
    if job["on_gpu"]:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options |= {"attention_backend": "CUSTOM", "gpu_memory_utilization": 0.1, "compilation_config": graphs}
    else:
        options |= {"enforce_eager": True, "dtype": "float32", "block_size": 64}
    llm = LLM(model=job["model"], **options)
    up = time.monotonic()
    generator = torch.Generator().manual_seed(SEED)
    words = llm.llm_engine.model_config.get_vocab_size()
    asked = [{"prompt_token_ids": torch.randint(3, words, (n,), generator=generator).tolist()} for n in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    outs = [llm.generate([one], greedy, use_tqdm=False)[0] for one in asked]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    Path(job["to"]).write_text(json.dumps({
        "tokens": [list(out.outputs[0].token_ids) for out in outs], "import_s": imported - begun,
        "start_s": up - imported, "pages": next(x.impl.digest for x in layers if hasattr(x, "impl")),
    }))  # fmt: skip
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=lambda x: Path(x).resolve(), help="folder with weights and tokenizer")
    parser.add_argument("--out", type=lambda x: Path(x).resolve(), help="folder for rows and logs")
    parser.add_argument("--preset", default="ghost-3")
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
    common = stamp(torch.device("cuda" if on_gpu else "cpu"), 0, args.commit or None)
    recorder = Recorder(args.out / "checks.jsonl", common, lambda line: None)
    file, kept = args.out / "fitted.safetensors", args.out / "cache" / "kvcodec" / "params"
    begun, ran = time.monotonic(), []

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f} s] {line}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        path = [plugin_in(Path(scratch)), ROOT / "src", ROOT, os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, path))), "VLLM_PLUGINS": "kvcodec",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "XDG_CACHE_HOME": str(args.out / "cache"),
        }  # fmt: skip
        if not on_gpu:
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

        def start(name: str, command: list[str]) -> subprocess.Popen[bytes]:
            with (args.out / "logs" / f"{name}.log").open("wb") as log:
                ran.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            return ran[-1]

        def engine(name: str, params: str) -> subprocess.Popen[bytes]:
            job = {"model": str(args.model), "given": {"preset": args.preset, "params": params}, "on_gpu": on_gpu,
                   "to": str(args.out / f"{name}.json")}  # fmt: skip
            return start(name, [sys.executable, __file__, "--child", json.dumps(job)])

        def ended(name: str, process: subprocess.Popen[bytes]) -> None:
            if process.wait() != 0:
                raise RuntimeError((args.out / "logs" / f"{name}.log").read_text(errors="replace")[-2000:])
            say(f"{name}: ended")

        try:
            device = (
                ["--device", "cuda", "--dtype", "bfloat16"] if on_gpu else ["--device", "cpu", "--dtype", "float32"]
            )
            first = engine("first", "fit")
            command = start("command", [sys.executable, "-m", "kvcodec", "fit", str(args.model), args.preset, "-o",
                                        str(file), *device])  # fmt: skip
            ended("first", first)
            again = engine("again", "fit")
            ended("command", command)
            own = engine("file", str(file))
            ended("again", again)
            ended("file", own)
        finally:
            for process in ran:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    names = ("first", "again", "file")
    found = {name: json.loads((args.out / f"{name}.json").read_text()) for name in names}
    logs = {name: (args.out / "logs" / f"{name}.log").read_text(errors="replace") for name in names}
    fitted = float(re.findall(r"kvcodec: fitted in (\S+) s", logs["first"])[0])
    files_equal = file.read_bytes() == next(kept.glob("*.safetensors")).read_bytes()
    checks = {
        "again_found_the_file": "were fitted before" in logs["again"] and "fitted in" not in logs["again"],
        "again_has_the_same_tokens": found["again"]["tokens"] == found["first"]["tokens"],
        "again_has_the_same_pages": found["again"]["pages"] == found["first"]["pages"],
        "files_equal": files_equal,
        "file_has_the_same_tokens": found["file"]["tokens"] == found["first"]["tokens"],
    }
    for name in names:
        more = {"import_s": round(found[name]["import_s"], 2), "fitted_s": fitted if name == "first" else 0.0}
        recorder.add(args.preset, None, "start_s", "s", name, flat(found[name]["start_s"]), n=1, **more, **checks)
    say(f"fitted in {fitted} s; up after { {n: round(x['start_s'], 1) for n, x in found.items()} } s; {checks}")
    needed = {
        k: ok for k, ok in checks.items() if k != "files_equal"
    }  # two fits on a GPU may differ in their last bits
    if not files_equal:
        needed.pop("file_has_the_same_tokens")
    return int(not all(needed.values()))


if __name__ == "__main__":
    sys.exit(main())
