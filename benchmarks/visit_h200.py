"""One visit to a GPU: tests, then every bench, in parts that can be resumed; made for calls of ten minutes at most.

    PYTHONPATH=src python benchmarks/visit_h200.py --out DIR --parts decode --presets saw-int4,int-4 --deadline 540
    PYTHONPATH=src python benchmarks/visit_h200.py --out DIR --plan studies --deadline 540 [--steps compile,sweeps]

Each part runs in a process of its own and appends its rows to ``DIR/<part>.jsonl`` as they are measured; the same call
again goes on where the last one stopped (what had no kernel, or failed its gate, is tried again). A kernel that breaks
the CUDA context costs its own row: the part is started again without it. Afterwards, anywhere, ``kvcodec bench page
--out DIR`` writes ``<part>.json``, the page and the figure, and ``kvcodec bench page --out
benchmarks/results/nvidia-h200 --add DIR`` adds the rows to those that are committed.

Parts, in this order whatever the order given:

- ``compile``: the CUDA kernels of the benches, several at a time (``compile_kernels.py``);
- ``tests``: ``pytest -m gpu`` on the kernel tests (correctness first); the benches go on after a failure, since every
  preset has a gate of its own before it is timed;
- ``cases``: random cases of the CUDA kernels (``tests/kernels/gpu_cases.py``), to ``DIR/cases.json``;
- ``decode``, ``encode``, ``prefill``, ``generate``, ``first``: ``kvcodec bench <part>``.

A plan is a list of steps, the most important first, each with the seconds that it may take at most: ``studies`` (the
sweeps for the break-even context, the papers' own studies, generate) and ``rivals`` (other libraries in the same run
as the presets of the table, and generate behind torch.compile). ``--list`` shows them.

Needs torch and what the kernels need; neither the network nor matplotlib.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvcodec.registry import split_specs  # noqa: E402
from kvcodec_lab.bench.shapes import KMEANS, PRESETS  # noqa: E402
from kvcodec_lab.bench.targets import DECODE  # noqa: E402

PARTS = ("compile", "tests", "cases", "decode", "encode", "prefill", "generate", "first")
DEVICE_LOST = 3
TESTS = ["tests/kernels"]


class Step(NamedTuple):
    """One step of a plan.

    Parameters
    ----------
    name, part : str
    options : str
        Of ``kvcodec bench``, or of ``compile_kernels.py``.
    specs : tuple of str
        Empty: the part's own.
    seconds : int
        It is stopped, as by a deadline, after so many.
    workers : int
        Processes that share the specs: they compile at the same time and are timed one by one.
    """

    name: str
    part: str
    options: str
    specs: tuple[str, ...]
    seconds: int
    workers: int = 1


ASKED = tuple(DECODE)
OTHERS = tuple(spec for spec in PRESETS if spec not in DECODE)
ALONE = "--no-libraries"
GENERATE = "--shapes qwen3_8b_b1_32k,qwen3_8b_b8_32k"
STUDIES = {
    "saw": ("saw-int4", "int-4", "saw-int4:rotate=kv", KMEANS),
    "per-head": ASKED,
    "innerq": ("kivi-2", "turboquant-4", "turboquant-3", "innerq-base", "innerq-hybrid", "innerq-small"),
    "hqmq": ("hqmq-s24_r3", "hqmq-s96_r4", "hqmq-s192_r6"),
    "octopus": tuple(f"{name}-{bits}" for name in ("octopus", "turboquant") for bits in (4, 3, 2)),
}
PLANS = {
    "studies": (
        Step("compile", "compile", "--shapes sweep,octopus,per-head", PRESETS, 90),
        Step("sweeps", "decode", f"{ALONE} --shapes sweep32,sweep8,sweep1", ASKED, 260),
        Step("decode", "decode", " ".join([ALONE, *(f"--also {','.join(s)}@{name}" for name, s in STUDIES.items())]),
             (), 150),
        Step("generate", "generate", f"{ALONE} --ways graph,generate {GENERATE}", ASKED, 260),
        Step("encode", "encode", f"{ALONE} --shapes llm64k,video,audio,b32_8k,append", PRESETS, 120),
        Step("prefill", "prefill", "--shapes hqmq", STUDIES["hqmq"], 90),
        Step("other sweeps", "decode", f"{ALONE} --shapes sweep1,sweep32,sweep8", OTHERS, 200),
    ),
    "rivals": (
        Step("compile", "compile", "--rivals --shapes spine", ASKED, 120),
        Step("spine", "decode", "--shapes spine", ASKED, 300),
        Step("quantizers", "encode", "--shapes llm64k", ("int-4", "saw-int4"), 40),
        Step("quantized caches", "generate", "--ways generate --shapes qwen3_8b_b1_32k", ("saw-int4",), 60),
        Step("compiled", "generate", f"{ALONE} --ways compiled --shapes qwen3_8b_b1_32k", ASKED, 400, workers=4),
    ),
}  # fmt: skip


def run(command: list[str], seconds: float, log: Path) -> int:
    """Run a command, its output to the console and a log; its exit status, or 124 when it ran out of time."""
    print("+", " ".join(command), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    late = threading.Event()
    how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with log.open("a", encoding="utf-8") as file, subprocess.Popen(command, **how) as process:
        watch = threading.Timer(seconds, lambda: (late.set(), process.kill()))
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
        status = process.wait()
        watch.cancel()
    return 124 if late.is_set() else status


def bench(part: str, options: list[str], args: argparse.Namespace, left: float) -> int:
    """Run one bench, again while kernels break the device."""
    command = [sys.executable, "-m", "kvcodec", "bench", part, "--device", "cuda", "--out", str(args.out)]
    command += ["--rows-only", *options]
    command += ["--commit", args.commit] if args.commit else []
    command += ["--engine", args.engine] if args.engine else []
    end = time.monotonic() + left
    while (left := end - time.monotonic()) > 15:
        # the bench stops by itself; it is only killed when something hangs
        status = run([*command, "--deadline", str(int(left - 10))], left + 20, args.out / "visit.log")
        if status != DEVICE_LOST:
            return status
        print(f"{part}: the device was lost; going on without that case", flush=True)
    return 0


def steps_of(args: argparse.Namespace) -> list[Step]:
    """Return the steps of the plan, or a step for each part."""
    if args.plan:
        named = args.steps.split(",") if args.steps else [step.name for step in PLANS[args.plan]]
        return [step for step in PLANS[args.plan] if step.name in named]
    parts = args.parts.split(",")
    specs = tuple(split_specs(args.presets or ""))
    found = []
    for part in (p for p in PARTS if p in parts):
        options = ["--no-libraries"] if args.no_libraries and part not in ("compile", "prefill", "first") else []
        options += ["--shapes", args.shapes] if args.shapes and part in ("compile", "decode") else []
        found.append(Step(part, part, " ".join(options), specs, 10**6))
    return found


def begin(step: Step, args: argparse.Namespace, left: float) -> int:
    """Run a step; its exit status."""
    log, options = args.out / "visit.log", step.options.split()
    specs = ["--specs", ",".join(step.specs)] if step.specs else []
    if step.part == "compile":
        return run([sys.executable, str(ROOT / "benchmarks/compile_kernels.py"), *options, *specs], left, log)
    if step.part == "tests":
        there = [t for t in TESTS if (ROOT / t).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-m", "gpu", "-p", "no:cacheprovider"]
        return run([*command, *there], left, log)
    if step.part == "cases":
        command = [sys.executable, "-m", "tests.kernels.gpu_cases", "--cases", str(args.cases)]
        command += ["--presets", ",".join(step.specs)] if step.specs else []
        return run([*command, "--deadline", str(int(left - 20)), "--out", str(args.out / "cases.json")], left, log)
    if step.workers == 1:
        return bench(step.part, [*options, *specs], args, left)
    statuses = [0] * step.workers

    def work(i: int) -> None:
        mine = ["--specs", ",".join(step.specs[i :: step.workers]), "--turns", str(args.out / "turns")]
        statuses[i] = bench(step.part, [*options, *mine, *(["--no-dense"] if i else [])], args, left)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(step.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="tests,decode,encode,prefill,generate", help="(%(default)s)")
    parser.add_argument("--plan", choices=tuple(PLANS), help="its steps instead of parts")
    parser.add_argument("--steps", help="of the plan, names; default: all")
    parser.add_argument("--list", action="store_true", help="show the steps and do nothing")
    parser.add_argument("--presets", help="of parts: specs, comma-separated; default: each bench's own list")
    parser.add_argument("--shapes", help="of decode and compile: names or groups, e.g. spine,saw,sweep1; default: all")
    parser.add_argument("--no-libraries", action="store_true", help="of parts: of rivals, torch's SDPA alone")
    parser.add_argument("--engine", choices=("cuda",), help="the kernels to time; there is one engine, cuda")
    parser.add_argument("--cases", type=int, default=1000, help="of the part cases (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all parts together (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    known = [step.name for step in PLANS.get(args.plan or "", ())]
    if args.steps and (unknown := set(args.steps.split(",")) - set(known)):
        parser.error(f"no step {', '.join(sorted(unknown))}; the plan {args.plan} has {', '.join(known)}")
    steps = steps_of(args)
    if args.list:
        for step in steps:
            print(f"{step.name}: {step.part} {step.options}; {len(step.specs)} specs, {step.seconds} s at most")
        return 0
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), {}
    for step in steps:
        left = min(args.deadline - (time.monotonic() - begun), step.seconds)
        if left < 20:
            results[step.name] = "not begun: out of time"
            continue
        status = begin(step, args, left)
        results[step.name] = f"exit {status} after {time.monotonic() - begun:.0f} s"
        print(f"== {step.name}: {results[step.name]}", flush=True)
    (args.out / "turns").unlink(missing_ok=True)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
