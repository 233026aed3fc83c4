"""One visit to a GPU: tests, then every bench, in parts that can be resumed; made for calls of ten minutes at most.

    PYTHONPATH=src python benchmarks/visit_h200.py --out DIR --parts decode --presets saw-int4,int-4 --deadline 540

Each part runs in a process of its own and appends its rows to ``DIR/<part>.jsonl`` as they are measured; the same call
again goes on where the last one stopped (what had no kernel, or failed its gate, is tried again). A kernel that breaks
the CUDA context costs its own row: the part is started again without it. Afterwards, anywhere, ``kvcodec bench page
--out DIR`` writes ``<part>.json``, the page and the figure.

Parts, in this order whatever the order given:

- ``tests``: ``pytest -m gpu`` on the kernel tests (correctness first); the benches go on after a failure, since every
  preset has a gate of its own before it is timed;
- ``cases``: random cases of the CUDA kernels (``tests/cuda/gpu_cases.py``), to ``DIR/cases.json``;
- ``decode``, ``encode``, ``prefill``, ``generate``: ``kvcodec bench <part>``.

Needs torch, triton and what the kernels need; neither the network nor matplotlib.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("tests", "cases", "decode", "encode", "prefill", "generate")
DEVICE_LOST = 3
TESTS = ["tests/kernels", "tests/cuda"]


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


def bench(part: str, args: argparse.Namespace, left: float) -> int:
    """Run one bench, again while kernels break the device."""
    command = [sys.executable, "-m", "kvcodec", "bench", part, "--device", "cuda", "--out", str(args.out)]
    command += ["--rows-only"]
    command += ["--commit", args.commit] if args.commit else []
    command += ["--specs", args.presets] if args.presets else []
    command += ["--shapes", args.shapes] if args.shapes and part == "decode" else []
    command += ["--engine", args.engine] if args.engine else []
    command += ["--no-libraries"] if args.no_libraries else []
    end = time.monotonic() + left
    while (left := end - time.monotonic()) > 15:
        # the bench stops by itself; it is only killed when something hangs
        status = run([*command, "--deadline", str(int(left - 10))], left + 20, args.out / "visit.log")
        if status != DEVICE_LOST:
            return status
        print(f"{part}: the device was lost; going on without that case", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="tests,decode,encode,prefill,generate", help="(%(default)s)")
    parser.add_argument("--presets", help="specs, comma-separated; default: each bench's own list")
    parser.add_argument("--shapes", help="of decode: names or groups, e.g. spine,saw,sweep1; default: all groups")
    parser.add_argument("--no-libraries", action="store_true", help="of rivals, torch's SDPA alone")
    parser.add_argument("--engine", choices=("cuda",), help="kernels to use, not those that a cache chooses")
    parser.add_argument("--cases", type=int, default=1000, help="of the part cases (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and logs")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all parts together (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), {}
    for part in (p for p in PARTS if p in parts):
        left = args.deadline - (time.monotonic() - begun)
        if left < 20:
            results[part] = "not begun: out of time"
            continue
        if part == "tests":
            there = [t for t in TESTS if (ROOT / t).exists()]
            command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-m", "gpu", "-p", "no:cacheprovider"]
            status = run([*command, *there], left, args.out / "visit.log")
        elif part == "cases":
            command = [sys.executable, "-m", "tests.cuda.gpu_cases", "--cases", str(args.cases)]
            command += ["--presets", args.presets] if args.presets else []
            command += ["--deadline", str(int(left - 20)), "--out", str(args.out / "cases.json")]
            status = run(command, left, args.out / "visit.log")
        else:
            status = bench(part, args, left)
        results[part] = f"exit {status} after {time.monotonic() - begun:.0f} s"
        print(f"== {part}: {results[part]}", flush=True)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
