"""Measure in parts that can be resumed: a plan is a list of jobs, a job is a command; made for calls of ten minutes.

    python benchmarks/run.py                                             # the plans and their jobs
    python benchmarks/run.py --plan kernels --out DIR --dry-run          # the commands, and what they lack here
    python benchmarks/run.py --plan kernels --out DIR --steps decode,encode --deadline 540
    python benchmarks/run.py --plan kernels --out DIR --steps decode --specs saw-int4 --options "--shapes spine"
    python benchmarks/run.py --plan release --out DIR --other PATH       # PATH: the checkout to compare with

Each job appends its rows to a file below DIR as they are measured, so the same call again goes on where the last one
stopped (what had no kernel, or failed its gate, is tried again). A job that needs what is not here (a GPU, vLLM,
``--other``) is left out and named. A kernel that breaks the CUDA context costs its own row: the bench is started again
without it. What jobs print is in ``DIR/run.log``. Exit status 1: a job failed, or one that ``--steps`` names could not
begin.

Afterwards, anywhere, ``packedkv bench page --out DIR`` writes ``<part>.json``, the page and the figure, and ``packedkv
bench page --out OTHER --add DIR`` joins folders. Rows that a page of docs/ quotes go into ``docs/tables``.

Plans, the most important jobs first:

- ``kernels``: tests, random cases, then every bench of the GPU;
- ``studies``: the sweeps for the break-even context, the papers' own studies, a whole model's steps;
- ``rivals``: other libraries in the same run as the presets, and generate behind torch.compile;
- ``release``: tests, and times beside those of another checkout (of commit 312ab8e, or a later one);
- ``soak``: five minutes of random load on vLLM, and a fault that must be found;
- ``cpu``: what is measured without a GPU.

Needs torch and what the kernels need; neither the network nor matplotlib.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).resolve().parents[1] / part) for part in ("src", "lab/src")),
]

from checkout import ROOT, environment  # noqa: E402

from packedkv.registry import split_specs  # noqa: E402
from packedkv_lab.bench.shapes import KMEANS, PRESETS  # noqa: E402

DEVICE_LOST = 3
"""Exit status of ``packedkv bench``: the same command again goes on without the case that broke the device."""
LEAST_SECONDS = 20
"""Without so many left no job begins."""


class Job(NamedTuple):
    """One command, and what it is for.

    Parameters
    ----------
    name : str
    command : str
        Its words, with ``{out}``, ``{root}``, ``{other}`` (folders), ``{left}`` (seconds) and ``{cases}`` filled in.
        The words ``{specs}``, ``{presets}`` and ``{commit}`` become an option with its value, or nothing.
    results : str
        What it writes below the output folder; it goes on with what is there. Empty: nothing is kept but the log.
    minutes : float
        It is stopped after so many, as by a deadline.
    needs : tuple of str
        ``gpu``, ``other`` (``--other`` is given), or modules.
    specs : tuple of str
        Empty: the command's own.
    workers : int
        Processes that share the specs: they compile at the same time and are timed one by one (``--turns``).
    elsewhere : bool
        Whether it runs on the packages of the other checkout.
    """

    name: str
    command: str
    results: str
    minutes: float
    needs: tuple[str, ...] = ("gpu",)
    specs: tuple[str, ...] = ()
    workers: int = 1
    elsewhere: bool = False

    @property
    def bench(self) -> bool:
        """Whether it is started again when a kernel has broken the device."""
        return " -m packedkv bench " in self.command


def bench(
    name: str, part: str, options: str = "", specs: tuple[str, ...] = (), minutes: float = 60, workers: int = 1
) -> Job:
    """A part of ``packedkv bench`` on the GPU."""
    command = (
        f"{PYTHON} -m packedkv bench {part} --device cuda --out {{out}} --rows-only {options} {{specs}} {{commit}}"
    )
    return Job(name, f"{command} --deadline {{left}}", f"{part}.jsonl", minutes, ("gpu",), specs, workers)


def script(name: str, file: str, options: str, results: str, minutes: float, *needs: str) -> Job:
    """A script of this folder."""
    return Job(name, f"{PYTHON} {{root}}/benchmarks/{file} {options}", results, minutes, needs or ("gpu",))


def tests(folders: str) -> Job:
    """Tests that need a GPU; the benches go on after a failure, since each preset has a gate before it is timed."""
    return Job("tests", f"{PYTHON} -m pytest -q --maxfail=20 -m gpu -p no:cacheprovider {folders}", "", 60)


def cases(count: str, minutes: float = 60) -> Job:
    """Random cases of the kernels against the reference."""
    command = f"{PYTHON} -m tests.kernels.gpu_cases --cases {count} {{presets}} --deadline {{left}}"
    return Job("cases", f"{command} --out {{out}}/cases.json", "cases.json", minutes)


def soak(name: str, options: str, minutes: float) -> Job:
    """Random load on the served engine."""
    return script(name, "soak.py", f"{options} --out {{out}}/{name}.json", f"{name}.json", minutes, "vllm")


PYTHON = "{python}"
MAIN = (
    "saw-int4", "int-4", "ultraquant", "innerq-base", "innerq-small", "innerq-hybrid", "kivi-2", "ultra-tq",
    "turboquant-4", "octopus-2", "octopus-3", "octopus-4", "hqmq-s24_r3", "hqmq-s96_r4",
)  # fmt: skip
"""Presets of each method that are measured first where a job takes long."""
OTHERS = tuple(spec for spec in PRESETS if spec not in MAIN)
ALONE = "--no-libraries"
GENERATE = "--shapes qwen3_8b_b1_32k,qwen3_8b_b8_32k"
STUDIES = {
    "saw": ("saw-int4", "int-4", "saw-int4:rotate=kv", KMEANS),
    "per-head": MAIN,
    "innerq": ("kivi-2", "turboquant-4", "turboquant-3", "innerq-base", "innerq-hybrid", "innerq-small"),
    "hqmq": ("hqmq-s24_r3", "hqmq-s96_r4", "hqmq-s192_r6"),
    "octopus": tuple(f"{name}-{bits}" for name in ("octopus", "turboquant") for bits in (4, 3, 2)),
}
ALSO = " ".join(f"--also {','.join(specs)}@{name}" for name, specs in STUDIES.items())
BESIDE = "--other {other} --out {out} --deadline {left} {specs}"
RELEASE = ("saw-int4", "int-4", "kivi-2", "innerq-base", "octopus-3", "turboquant-4", "hqmq-s96_r4")
PLANS: dict[str, tuple[Job, ...]] = {
    "kernels": (
        tests("tests/kernels"), cases("{cases}"), bench("decode", "decode"), bench("encode", "encode"),
        bench("prefill", "prefill"), bench("generate", "generate"), bench("first", "first"),
    ),
    "studies": (
        bench("sweeps", "decode", f"{ALONE} --shapes sweep32,sweep8,sweep1", MAIN, 4.5),
        bench("decode", "decode", f"{ALONE} {ALSO}", minutes=2.5),
        bench("generate", "generate", f"{ALONE} --ways graph,generate {GENERATE}", MAIN, 4.5),
        bench("encode", "encode", f"{ALONE} --shapes llm64k,video,audio,b32_8k,append", PRESETS, 2),
        bench("prefill", "prefill", "--shapes hqmq", STUDIES["hqmq"], 1.5),
        bench("other sweeps", "decode", f"{ALONE} --shapes sweep1,sweep32,sweep8", OTHERS, 3.5),
    ),
    "rivals": (
        bench("spine", "decode", "--shapes spine", MAIN, 5),
        bench("quantizers", "encode", "--shapes llm64k", ("int-4", "saw-int4"), 0.75),
        bench("quantized caches", "generate", "--ways generate --shapes qwen3_8b_b1_32k", ("saw-int4",), 1),
        bench("compiled", "generate", f"{ALONE} --ways compiled --shapes qwen3_8b_b1_32k", MAIN, 7, workers=4),
    ),
    "release": (
        tests("tests/kernels tests/conformance tests/integrations tests/ops"),
        cases("{cases}", 5),
        script("beside", "beside.py", BESIDE, "beside.jsonl", 10, "gpu", "other")._replace(specs=RELEASE),
        bench("encode", "encode", f"{ALONE} --shapes llm64k,b32_8k,append_b8", RELEASE, 3),
        Job("encode of the other", f"{PYTHON} -m packedkv bench encode --device cuda --out {{out}}/other --rows-only "
            f"{ALONE} --shapes llm64k,b32_8k,append_b8 {{specs}} --deadline {{left}}", "other/encode.jsonl", 3,
            ("gpu", "other"), RELEASE, elsewhere=True),
    ),
    "soak": (
        Job("model", f"{PYTHON} -c 'from pathlib import Path; from tests.serve.engines import save_model; "
            "save_model(Path(\"{out}/llama\"), \"llama-gqa\", num_hidden_layers=6)'", "llama/config.json", 2,
            ("transformers",)),
        soak("soak", "--model {out}/llama --seconds 300", 30),
        soak("soak-planted", "--model {out}/llama --seconds 50 --plant pages", 10),
    ),
    "cpu": (
        Job("codec", f"{PYTHON} -m packedkv bench codec --json {{out}}/codec_speed.json {{specs}}", "codec_speed.json",
            60, ("torch",)),
        Job("attention", f"{PYTHON} -m packedkv bench decode --device cpu --json {{out}}/attention.json {{specs}}",
            "attention.json", 60, ("torch",)),
    ),
}  # fmt: skip


def missing(job: Job, args: argparse.Namespace) -> list[str]:
    """What a job needs and is not here."""

    def here(need: str) -> bool:
        if need == "other":
            return args.other is not None
        if need == "gpu":
            import torch

            return torch.cuda.is_available()
        return importlib.util.find_spec(need) is not None

    return [need for need in job.needs if not here(need)]


def commands(job: Job, args: argparse.Namespace, left: float) -> list[list[str]]:
    """Words of each process of a job; several share its specs."""
    specs = args.specs or job.specs
    other = None if args.other is None else args.other.resolve()
    given = {"python": sys.executable, "out": args.out, "root": ROOT, "other": other, "cases": args.cases}
    given |= {"left": max(1, int(left - 10))}
    found = []
    for worker in range(job.workers):
        mine = ",".join(specs[worker :: job.workers])
        options = {
            "{specs}": ("--specs", mine), "{presets}": ("--presets", mine), "{commit}": ("--commit", args.commit),
            "{variants}": ("--variants", ",".join(args.specs)),
        }  # fmt: skip
        words: list[str] = []
        for word in shlex.split(job.command):
            if word in options:
                words += [*options[word]] if options[word][1] else []
            else:
                words.append(word.format_map(given))
        words += shlex.split(args.options)
        if job.workers > 1:
            words += ["--turns", str(args.out / "turns"), *(["--no-dense"] if worker else [])]
        found.append(words)
    return found


def run(command: list[str], seconds: float, log: Path, checkout: Path = ROOT) -> int:
    """Run a command, its output to the console and a log; its exit status, or 124 when it ran out of time."""
    print("+", shlex.join(command), flush=True)
    late = threading.Event()
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(command, cwd=checkout, env=environment(checkout), **how) as process,
    ):

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started as well

        watch = threading.Timer(seconds, lambda: (late.set(), end()))
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
            status = process.wait()
        except BaseException:
            end()
            raise
        finally:
            watch.cancel()
    return 124 if late.is_set() else status


def begin(job: Job, args: argparse.Namespace, left: float) -> int:
    """Run a job; its exit status, of several processes the largest."""
    log, checkout = args.out / "run.log", args.other.resolve() if job.elsewhere else ROOT
    if job.results:
        (args.out / job.results).parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + left

    def work(worker: int) -> int:
        while (rest := end - time.monotonic()) > LEAST_SECONDS - 5:
            # a command with a deadline stops by itself; it is only killed when something hangs
            grace = 20 if "{left}" in job.command else 0
            status = run(commands(job, args, rest)[worker], rest + grace, log, checkout)
            if not (job.bench and status == DEVICE_LOST):
                return status
            print(f"{job.name}: the device was lost; going on without that case", flush=True)
        return 0

    statuses = [0] * job.workers
    if job.workers == 1:
        return work(0)
    threads = [
        threading.Thread(target=lambda i=i: statuses.__setitem__(i, work(i)))  # type: ignore[misc]
        for i in range(job.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(statuses)


def listed() -> str:
    """Every plan and its jobs."""
    lines = []
    for name, jobs in PLANS.items():
        lines.append(f"{name}:")
        for job in jobs:
            needs = f", needs {' and '.join(job.needs)}" if job.needs else ""
            specs = f"; {len(job.specs)} specs" if job.specs else ""
            lines.append(f"  {job.name}: {job.minutes:g} min at most{needs}{specs} -> {job.results or 'run.log'}")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=tuple(PLANS), help="default: list the plans")
    parser.add_argument("--steps", help="of the plan, names, comma-separated; default: all")
    parser.add_argument("--out", type=Path, help="folder for rows and logs")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for all jobs together (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument(
        "--specs", type=lambda text: tuple(split_specs(text)), default=(), help="in place of a job's own"
    )
    parser.add_argument("--options", default="", help="added to every command, e.g. '--shapes spine --no-libraries'")
    parser.add_argument("--cases", type=int, default=1000, help="of the job cases (%(default)s)")
    parser.add_argument("--commit", default="", help="stamped on the rows; default: what git says here")
    args = parser.parse_args()
    if args.plan is None:
        return args
    known = [job.name for job in PLANS[args.plan]]
    if unknown := set(args.steps.split(",") if args.steps else []) - set(known):
        parser.error(f"no step {', '.join(sorted(unknown))}; the plan {args.plan} has {', '.join(known)}")
    if args.out is None:
        parser.error("pass --out, the folder for rows and logs")
    args.out = args.out.resolve()
    return args


def main() -> int:
    args = parsed()
    if args.plan is None:
        print(listed())
        return 0
    named = args.steps.split(",") if args.steps else [job.name for job in PLANS[args.plan]]
    jobs = [job for job in PLANS[args.plan] if job.name in named]
    if args.dry_run:
        for job in jobs:
            lacking = missing(job, args)
            print(f"# {job.name}" + (f" (not here: {', '.join(lacking)})" if lacking else ""))
            if "other" not in lacking:
                print("\n".join(map(shlex.join, commands(job, args, min(args.deadline, 60 * job.minutes)))))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begun, results, failed = time.monotonic(), {}, False
    for job in jobs:
        left = min(args.deadline - (time.monotonic() - begun), 60 * job.minutes)
        if lacking := missing(job, args):
            results[job.name] = f"not begun: needs {', '.join(lacking)}"
            failed |= bool(args.steps)
        elif left < LEAST_SECONDS:
            results[job.name] = "not begun: out of time"
        else:
            status = begin(job, args, left)
            failed |= status != 0
            results[job.name] = f"exit {status} after {time.monotonic() - begun:.0f} s"
        print(f"== {job.name}: {results[job.name]}", flush=True)
    (args.out / "turns").unlink(missing_ok=True)
    print(json.dumps(results, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
