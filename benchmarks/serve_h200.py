"""vLLM with each KV cache on one model of random weights: capacity, decode steps, throughput, sessions.

    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_h200.py --out DIR --parts smoke --deadline 240
    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_h200.py --out DIR --deadline 540 [--variants A,B] [--gpus 0,1]
    PYTHONPATH=src:$PYTHONPATH python benchmarks/serve_h200.py --out DIR --parts timeline --variants saw-int4

A variant is one of vLLM's KV-cache dtypes (``serve_sizes.RIVALS``) or a preset of kvcodec, which the plugin serves
without being installed; ``kvcodec:fp8`` is the preset. Each part of each variant is a process with the engine inside.
Processes of one GPU import side by side and then take turns, so nothing else runs on a GPU while one is timed; several
GPUs work through one list. Parts, always in this order:

- ``smoke``: a small model, several engines at once on a GPU, each variant eager and with CUDA graphs; DIR/smoke.json
  says how many tokens agree, whether a layer's blocks have the library's bytes and how far its attention is from the
  reference (``serve_check.py``), and what failed;
- ``first``: the first token of a lone prompt of 512, 1,024 and 4,096 tokens, and what it takes: kernels, and functions
  of the host;
- ``steps``: tokens that the cache holds; seconds of 32 cold prompts of 8,192 tokens; time per decode step of 1, 8, 32
  sequences, their prompts found in the prefix cache;
- ``drafts``: tokens a second of 32 sequences with 3 drafts each by n-grams, and how many drafts were accepted;
- ``throughput``: 128 prompts of 16,384 tokens at once, 1,024 tokens of output each (``bench serve``'s sweep);
- ``clients``: of the sweep 1, 16 and 256 clients with 1,024 tokens in, 1,024 out;
- ``sweep``: 1 to 256 clients with 1,024 tokens in, 16 to 256 with 4,096; 1,024 out (more of the same);
- ``sessions``: 32 sessions of six rounds, KV memory limited to what saw-int4 needs (``bench serve``'s sessions);
- ``offload``: 12 sessions of six rounds, more than KV memory holds of any; the rest goes to as much memory of the host
  for all, which holds what saw-int4 needs;
- ``timeline``: kernels of one decode step and of one prompt by time, DIR/timeline-VARIANT.json.

Rows go to DIR/serve.jsonl as they are measured (those of smoke, first, drafts and timeline: DIR/checks.jsonl), logs to
DIR/logs. The same command again goes on with what has no rows. Afterwards, anywhere:
``kvcodec bench page --out benchmarks/results/nvidia-h200 --add DIR`` and
``scripts/update_serve.py``. ``--scale tiny`` runs all of it on vLLM for the CPU.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serve_sizes import (
    LOADED,
    PARTS,
    SAID,
    SCALES,
    SECONDS,
    SLOW,
    VARIANTS,
    Job,
    config_of,
    folder_of,
    goal,
    kind_of,
    plugin_in,
    rows_file,
)

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("serve_engines.py")
SHOWN = ("kv_cache_tokens", "first_ms", "drafted_tokens_per_s",
         "prefill_s", "step_ms", "output_tokens_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms",
         "preemptions", "prefix_residency", "prefix_hit_share", "requests_done", "output_tokens_per_s_cut")  # fmt: skip
CHECKED = ("requests", "bytes", "bytes_equal", "blocks_given_away", "prompt_error", "step_error")
LEAST = 15
"""Seconds without which no turn begins."""


class Lane(threading.Thread):
    """Takes jobs for one GPU: some are imported ahead, one has its turn.

    Parameters
    ----------
    visit : Visit
    gpu : str
        Its index; empty on a CPU.
    """

    def __init__(self, visit: "Visit", gpu: str) -> None:
        super().__init__(daemon=True)
        self.visit, self.gpu = visit, gpu
        self.waiting: collections.deque[tuple[Job, subprocess.Popen[bytes]]] = collections.deque()

    def fetch(self, least: int) -> bool:
        """Begin to import one job more, if there are so many."""
        job = self.visit.next(least)
        if job is not None:
            self.waiting.append((job, self.visit.spawn(job, self.gpu)))
        return job is not None

    def run(self) -> None:
        try:
            while self.waiting or self.fetch(1):
                self._turn(*self.waiting.popleft())
                self.fetch(self.visit.lanes)  # the last jobs go to the GPU that is free first
        finally:
            for _, process in self.waiting:
                stop(process)

    def _turn(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        begin, left = time.monotonic(), self.visit.left
        limit = min(SECONDS[job.part], left)
        log, heard = self.visit.out / "logs" / f"{job.name}.log", begin
        why = ""
        if left < LEAST:
            stop(process)
            self.visit.late.append(job.name)
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # if it ended while it imported, its log says why
            process.stdin.write(f"{limit}\n".encode())
            process.stdin.flush()
        while process.poll() is None and not why:
            time.sleep(0.05)
            now = time.monotonic()
            if now - begin > limit:
                why = f"failed: stopped after {now - begin:.0f} s" + " (the deadline)" * (limit < SECONDS[job.part])
            elif now - heard > 5 * max(4, self.visit.lanes):
                heard = now
                self.visit.say(f"{job.name}: {now - begin:.0f} s; {(tail(log, 300).splitlines() or [''])[-1][:150]}")
        stop(process)
        if not why and process.returncode not in (0, 1):
            why = f"failed: the process ended with {process.returncode}"
        self.visit.done(job, why, tail(log, 4 * SAID), time.monotonic() - begin)


def tail(path: Path, characters: int) -> str:
    return path.read_text(errors="replace")[-characters:] if path.is_file() else ""


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


class Visit:
    """Jobs, the time left, and rows that come.

    Parameters
    ----------
    args : argparse.Namespace
    plugin : Path
        Folder with the plugin's entry point.
    """

    def __init__(self, args: argparse.Namespace, plugin: Path) -> None:
        from kvcodec_lab.bench.record import Recorder

        self.args, self.out, self.plugin, self.begun = args, args.out, plugin, time.monotonic()
        self.scale, self.lock = SCALES[args.scale], threading.Lock()
        files = dict.fromkeys(rows_file(args.out, part) for part in PARTS)
        self.rows = {path: Recorder(path, {"run": args.run}, lambda text: None) for path in files}
        self.shown = {path: len(recorder.rows) for path, recorder in self.rows.items()}
        self.jobs = collections.deque(job for job in jobs_of(args) if not self.known(job))
        self.failed: list[str] = []
        self.late: list[str] = []
        self.lanes = 1

    def known(self, job: Job) -> bool:
        """Whether a job was done before."""
        if job.part == "smoke":
            return (self.out / "smoke" / f"{job.name}.json").is_file()
        metric, _, shape = goal(job, self.scale)
        return self.rows[rows_file(self.out, job.part)].has(job.variant, metric, shape)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.args.deadline - (time.monotonic() - self.begun)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:4.0f} s] {text}", flush=True)

    def next(self, least: int) -> Job | None:
        """Take the next job, if so many are left and there is time."""
        with self.lock:
            return self.jobs.popleft() if len(self.jobs) >= least and self.left > 2 * LEAST else None

    def spawn(self, job: Job, gpu: str) -> subprocess.Popen[bytes]:
        """Start a job's process; it imports and waits for its turn."""
        path = [str(self.plugin), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, path)), "VLLM_PLUGINS": "kvcodec", "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if gpu:
            env |= {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        else:
            env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [sys.executable, str(PROGRAM), "--out", str(self.out), "--scale", self.args.scale,
                   "--commit", self.args.commit, "--run", self.args.run, "--job", json.dumps(job)]  # fmt: skip
        with (self.out / "logs" / f"{job.name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def done(self, job: Job, why: str, said: str, seconds: float) -> None:
        """Note how a job ended."""
        from kvcodec.cli.page.rows import read_rows

        path = rows_file(self.out, job.part)
        with self.lock:
            if why:
                metric, unit, shape = goal(job, self.scale)
                more = kind_of(job, self.scale) | {"status": why, "said": said[-SAID:]}
                self.rows[path].add(job.variant, None, metric, unit, shape, None, **more)
            rows = read_rows([path]) if path.is_file() else []
            new, self.shown[path] = rows[self.shown[path] :], len(rows)
            self.say(f"{job.name}: {why or 'ended'} after {seconds:.0f} s; {len(self.jobs)} left")
            for row in new:
                values = row["values"]
                self.failed += [f"{row['spec']} {row['metric']}"] * (values is None)
                if values is None or (row["metric"] in SHOWN and not re.search(r"_r\d+$", row["shape"])):
                    shown = row.get("status") or " ".join(f"{k} {x:,.5g}" for k, x in values.items())
                    print(f"    {row['metric']} {row['shape']}: {shown[:300]}", flush=True)
            if job.part == "timeline":
                print("\n".join(line for line in said.splitlines() if line.startswith("==")), flush=True)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Jobs in the order of their importance."""
    found = []
    for part in PARTS:
        if part in args.parts:
            few = {"throughput": LOADED, "sessions": LOADED, "sweep": LOADED + SLOW, "timeline": VARIANTS[:2],
                   "clients": LOADED[:2], "offload": LOADED[:2]}  # fmt: skip
            variants = args.variants or few.get(part, VARIANTS)
            found += [Job(part, variant) for variant in variants]
            found += [Job(part, variant, True) for variant in variants if part == "smoke"]
    return found


def compare(out: Path) -> list[dict[str, Any]]:
    """Of every variant of the smoke part: shares of tokens that are the same, eager and with graphs, then again."""
    found = {
        (x["variant"], x["eager"]): x
        for x in (json.loads(p.read_text()) for p in sorted((out / "smoke").glob("*.json")))
    }

    def same(a: Any, b: Any, first: bool = False) -> float | None:
        if a is None or b is None:
            return None
        pairs = [
            (x, y) for s, t in zip(a, b, strict=True) for x, y in list(zip(s, t, strict=True))[: 1 if first else None]
        ]
        return round(sum(x == y for x, y in pairs) / len(pairs), 4)

    rows = []
    plain = found.get(("bf16", False), {}).get("tokens")
    for variant in dict.fromkeys(v for v, _ in found):
        graphs, eager = found.get((variant, False), {}), found.get((variant, True), {})
        own = graphs or eager
        rows.append({
            "variant": variant, "ran": ["graphs"] * bool(graphs) + ["eager"] * bool(eager),
            "eager_and_graphs": same(graphs.get("tokens"), eager.get("tokens")),
            "cold_and_cached": same(own["tokens"], own["again"]), "first_as_bf16": same(own["tokens"], plain, True),
            "cached_tokens": own["cached_tokens"][:4], "kv_cache_tokens": own["server"]["kv_cache_tokens"],
            "path": own["server"]["path"], "seconds": round(own["seconds"], 1),
            "library": {n: (eager or own)[n] for n in CHECKED if n in (eager or own)},
        })  # fmt: skip
    return rows


def gpus_of(args: argparse.Namespace) -> list[str]:
    """Indices of the GPUs to use; one empty name on a CPU."""
    if args.gpus:
        return list(args.gpus.split(","))
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    tool = shutil.which("nvidia-smi")
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout if tool else ""
    return [str(i) for i, line in enumerate(x for x in listed.splitlines() if x.startswith("GPU"))] or [""]


def visit(args: argparse.Namespace) -> int:
    """Run the jobs; 1 if something failed."""
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    for sizes in (SCALES[args.scale].model, SCALES[args.scale].smoke):
        folder = folder_of(args.out, sizes)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config_of(sizes), indent=1))
    with tempfile.TemporaryDirectory() as scratch:
        here = Visit(args, plugin_in(Path(scratch)))
        gpus = gpus_of(args)
        names = ", ".join(job.name for job in here.jobs)
        here.say(f"{len(here.jobs)} jobs on {len(gpus)} x {'GPU' if gpus[0] else 'CPU'}: {names}")
        side, ahead = (args.side, 0) if "smoke" in args.parts else (1, args.ahead)
        lanes = [Lane(here, gpu) for _ in range(side) for gpu in gpus]
        here.lanes = len(lanes)
        for _ in range(ahead + 1):
            for lane in lanes:
                lane.fetch(1)
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    if (args.out / "smoke").is_dir() and "smoke" in args.parts:
        found = compare(args.out)
        (args.out / "smoke.json").write_text(json.dumps(found, indent=1) + "\n")
        for row in found:
            print(json.dumps(row))
    late = ", ".join([*here.late, *(job.name for job in here.jobs)])
    here.say(f"{len(here.failed)} failed: {'; '.join(here.failed) or 'none'}; not begun: {late or 'none'}")
    return int(bool(here.failed or late))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda x: Path(x).resolve(), required=True, help="folder for rows and logs")
    parser.add_argument("--parts", type=lambda x: x.split(","), default=["steps", "throughput", "sessions"])
    parser.add_argument(
        "--variants", type=lambda x: x.split(","), help=f"default: {', '.join(VARIANTS)}; of loads: {', '.join(LOADED)}"
    )
    parser.add_argument("--gpus", help="indices, e.g. 0,1; default: all")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything (%(default)s)")
    parser.add_argument("--ahead", type=int, default=3, help="processes per GPU that import ahead (%(default)s)")
    parser.add_argument("--side", type=int, default=8, help="of smoke: engines side by side on a GPU (%(default)s)")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    args = parser.parse_args()
    args.run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "smoke" in args.parts and len(args.parts) > 1:
        parser.error("smoke runs engines side by side: give it a call of its own")
    return visit(args)


if __name__ == "__main__":
    sys.exit(main())
