"""`kvcodec eval` of every preset, plain and stressed, on one machine: several processes share its GPU.

    PYTHONPATH=src python benchmarks/evaluate.py --data FOLDER --text FILE --out DIR --deadline 540

``--workers`` processes of ``kvcodec eval --share``, each with a folder of its own below ``--work``, take specs that
nobody has taken: first for all windows, then for short prompts, then for longer ones. At the deadline they are
interrupted (what is finished is kept), merged and written to ``DIR/plain`` and ``DIR/stressed`` as they are published:
``run.json``, ``results.json`` (rows of whole tasks), ``items.jsonl.gz``. The same call goes on with what DIR holds, on
another machine too. ``DIR/status.json`` and the last line say whether anything is left.

A machine without a network and with transfers of a limited size gets model and data in parts::

    python benchmarks/evaluate.py --export LOADS --data FOLDER --text FILE    # where the network is: LOADS/load-1, ...
    python benchmarks/evaluate.py --carried LOADS/load-1 --out DIR            # there, each load in a call of its own
    python benchmarks/evaluate.py --carried LOADS/load-2 --out DIR --deadline 400   # all are there: it begins

Parts are checked by their sha256 and kept below ``--work``; a call that lacks some says which and ends. ``--form gguf``
carries a named model's file itself (98 MB; the same weights that everyone measures; reading it needs the package gguf),
``float16`` or ``bfloat16`` a folder of safetensors (270 MB, weights rounded, so another model hash).

What to expect of SmolLM2-135M and 41 presets with the tasks below: 110 prompts' calls and about 150 decode steps for
each spec (sequences of one length share a call; 91 lengths among the questions), 22,000 in all for both runs. A call is
bound by launches: 30 layers x 200 (int) to 1200 (hqmq) operations. Measured with 14 processes to each of three H200:
3.3 s of a process for an item of `needle`, 4.8 of `kv_retrieval`, 3.4 of a window, 0.1 of a question; 14 processes with
calls of 64 sequences ran out of 140 GB.

Afterwards ``scripts/update_leaderboard.py --add NAME=DIR/plain`` publishes a run.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import kvcodec  # noqa: E402
from kvcodec.registry import split_specs  # noqa: E402
from kvcodec_lab.commands.eval import task_list  # noqa: E402
from kvcodec_lab.eval.merge import PACKED, merge, missing, pack, unpack  # noqa: E402
from kvcodec_lab.eval.store import ITEMS, RUN, Run, read_run  # noqa: E402

MODEL = "smollm2-135m"
TASKS = "perplexity:limit=10,kl:limit=10,needle,kv_retrieval,hellaswag:limit=200,piqa:limit=200,arc_easy:limit=200"
MANIFEST, STATUS = "manifest.json", "status.json"
ALL = "all"
"""Folder of a run's merged results below the work folder, beside those of its workers."""
TAKEN = "taken"
"""Folder beside it, in which workers mark what they take."""
END_SECONDS = 40
"""Kept for the workers' last lines and the merge."""
GRACE_SECONDS = 15


class Job(NamedTuple):
    """One worker: its run, and its folder below the run's work folder."""

    run: str
    folder: Path


# -- model and data in parts -------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    """Write model, data and text as loads of about one size."""
    with tempfile.TemporaryDirectory() as folder:
        files = model_files(args, Path(folder)) | data_files(args)
        limit = int(args.part_mb * 1e6)
        total = sum(path.stat().st_size for path in files.values())
        loads = -(-total // limit)
        room = -(-total // loads)
        entries: list[dict[str, Any]] = []
        load, left = 1, room
        for name, path in files.items():
            data, at = path.read_bytes(), 0
            entry: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "parts": []}
            while at < len(data) or not entry["parts"]:
                piece = data[at : at + left]
                part = f"{len(entries):03d}-{len(entry['parts']):02d}"
                target = args.export / f"load-{load}" / part
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(piece)
                digest = hashlib.sha256(piece).hexdigest()
                entry["parts"].append({"file": part, "load": load, "sha256": digest})
                at, left = at + len(piece), left - len(piece)
                if left == 0 and load < loads:
                    load, left = load + 1, room
            entries.append(entry)
    text = json.dumps({"model": args.weights, "files": entries}, indent=1)
    for number in range(1, loads + 1):
        (args.export / f"load-{number}" / MANIFEST).write_text(text)
    print(f"{total / 1e6:.1f} MB in {loads} load{'s' * (loads > 1)} of {room / 1e6:.1f} MB below {args.export}")
    return 0


def model_files(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Name on the other machine -> file: a named model's GGUF, or safetensors and tokenizer written to ``folder``."""
    from kvcodec.models.loading import load
    from kvcodec.models.named import NAMED, NAMES, find_file
    from kvcodec.progress import Progress

    if args.form == "gguf":
        if args.weights not in NAMED:
            raise SystemExit(f"--form gguf carries {NAMES}; use --form float16 for {args.weights}.")
        path = find_file(NAMED[args.weights], Progress())
        return {f"cache/kvcodec/{path.name}": path}
    model = load(args.weights, dtype=args.form)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return {f"models/{Path(args.weights).name}/{path.name}": path for path in sorted(folder.iterdir())}


def data_files(args: argparse.Namespace) -> dict[str, Path]:
    """The same for the tasks' files (and what is called like them with a suffix) and the text."""
    from kvcodec.models.loading import load_text
    from kvcodec_lab.eval.tasks import get_task
    from kvcodec_lab.eval.tasks.base import TaskSettings
    from kvcodec_lab.eval.tasks.files import find

    found = {}
    settings = TaskSettings(load_text(args.text), data=args.data)
    for name in task_list(split_specs(args.tasks))[0]:
        needs = get_task(name).needs
        path = find(name, needs, settings) if needs else None
        if path is not None:
            beside = sorted(path.parent.glob(f"{path.stem}-*"))
            found |= {f"data/{name}/{p.name}": p for p in (path, *beside)}
    return found | ({f"text/{args.text.name}": args.text} if args.text else {})


def collect(carried: Sequence[Path], work: Path) -> list[str]:
    """Keep the parts that have come, and join files whose parts are all there; return the loads still to come.

    Raises
    ------
    SystemExit
        If a part or a file is not what was exported.
    """
    kept = work / "parts"
    for folder in carried:
        text = (folder / MANIFEST).read_text()
        if not (kept / MANIFEST).is_file() or (kept / MANIFEST).read_text() != text:  # another export
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            (kept / MANIFEST).write_text(text)
        for entry in json.loads(text)["files"]:
            for part in entry["parts"]:
                if (source := folder / part["file"]).is_file():
                    checked(source, source.read_bytes(), part["sha256"])
                    shutil.copyfile(source, kept / part["file"])
    if not (kept / MANIFEST).is_file():
        return []
    lacking: set[int] = set()
    for entry in json.loads((kept / MANIFEST).read_text())["files"]:
        target = work / entry["name"]
        lacks = {part["load"] for part in entry["parts"] if not (kept / part["file"]).is_file()}
        lacking |= lacks
        if lacks or (target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == entry["sha256"]):
            continue
        data = b"".join((kept / part["file"]).read_bytes() for part in entry["parts"])
        checked(target, data, entry["sha256"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return [f"load-{number}" for number in sorted(lacking)]


def checked(path: Path, data: bytes, sha256: str) -> None:
    """End where bytes are not those that were exported."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{path} is not what was exported (its sha256 differs); carry it again.")


# -- who does what -----------------------------------------------------------------------------------------------------


def gathered(name: str, args: argparse.Namespace) -> Run | None:
    """What a run has finished so far: what DIR holds and what workers of a call before left behind; None at first."""
    folder = args.work / name
    if (args.out / name / PACKED).is_file() and not (folder / ALL / RUN).is_file():
        unpack(args.out / name, folder / ALL)
    workers = [part for part in sorted(folder.glob("worker-*")) if part.is_dir()]
    if begun := [part for part in workers if (part / RUN).is_file()]:
        merge(begun, folder / ALL)
    for part in (*workers, folder / TAKEN):
        shutil.rmtree(part, ignore_errors=True)
    return read_run(folder / ALL) if (folder / ALL / RUN).is_file() else None


def unread(run: Run | None, specs: Sequence[str], tasks: str) -> list[str]:
    """Specs with items left; all of them where tasks or items are asked for that the run does not have."""
    names, limits = task_list(split_specs(tasks))
    about = run.about["tasks"] if run else {}
    if run is None or any(n not in about or limits.get(n, about[n]["limit"]) > about[n]["limit"] for n in names):
        return list(specs)
    lacks = missing(run)
    return [spec for spec in specs if spec not in lacks or any(lacks[spec][task] for task in names)]


def staff(left: dict[str, list[str]], workers: int) -> list[str]:
    """The run of each worker: as many for each as it has of the specs left, one at least.

    >>> staff({"plain": ["a", "b", "c"], "stressed": ["a"], "other": []}, 4)
    ['plain', 'plain', 'plain', 'stressed']
    """
    total = sum(map(len, left.values()))
    each = {name: min(len(specs), max(1, round(workers * len(specs) / total))) for name, specs in left.items() if specs}
    return [name for name, count in each.items() for _ in range(count)]


def seed(job: Job, run: Run | None) -> None:
    """Give a worker's folder all that is finished."""
    job.folder.mkdir(parents=True)
    if run is not None:
        for name in (RUN, ITEMS):
            shutil.copyfile(run.folder / name, job.folder / name)


def command(job: Job, args: argparse.Namespace) -> list[str]:
    """The worker's `kvcodec eval`."""
    found = [sys.executable, "-m", "kvcodec", "eval", args.weights, "--specs", ",".join(args.specs)]
    found += ["--tasks", args.tasks, "--output", str(job.folder), "--share", str(job.folder.parent / TAKEN)]
    found += ["--device", args.device, "--dtype", args.dtype]
    found += ["--batch", str(args.batch), "--seed", str(args.seed), "--window-tokens", str(args.window_tokens)]
    found += ["--stress", args.stress] if job.run == "stressed" else []
    found += ["--lengths", args.lengths] if args.lengths else []
    for option, path in (("--data", args.data), ("--text", args.text)):
        found += [option, str(path)] if path else []
    return found


# -- the call ----------------------------------------------------------------------------------------------------------


def work(jobs: Sequence[Job], args: argparse.Namespace, end: float) -> list[str]:
    """Run the workers until they are done or time is up; return the logs of those that failed."""
    common = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}
    common |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    common["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # many processes share a GPU's memory
    if (args.work / "cache").is_dir():
        common["XDG_CACHE_HOME"] = str(args.work / "cache")
    models = args.work / "models"
    gpus = gpu_count() if args.device == "cuda" else 0
    # a shell's background jobs ignore interrupts, and so would the workers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running: list[tuple[Job, subprocess.Popen[bytes], Path]] = []
    for number, job in enumerate(jobs):
        log = job.folder.with_suffix(".log")
        environment = os.environ | common
        if gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command(job, args),
                cwd=models if (models / args.weights).is_dir() else None,  # the folder's name is the model's
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        running.append((job, process, log))
    begun, said = time.monotonic(), 0.0
    while any(process.poll() is None for _, process, _ in running) and time.monotonic() < end:
        if time.monotonic() - said >= args.interval:
            said = time.monotonic()
            print(f"{said - begun:4.0f} s: {progress(jobs)}", flush=True)
        time.sleep(0.2)
    late = [process for _, process, _ in running if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGINT)  # it writes what it has
    watch = threading.Timer(GRACE_SECONDS, lambda: [process.kill() for process in late])
    watch.start()
    failed = [log.read_text(errors="replace") for _, p, log in running if p.wait() and p not in late]
    watch.cancel()
    print(f"{time.monotonic() - begun:4.0f} s: {progress(jobs)}", flush=True)
    return failed


def gpu_count() -> int:
    """GPUs that torch sees; no context is made on them."""
    import torch

    return torch.cuda.device_count()


def progress(jobs: Sequence[Job]) -> str:
    """Finished items of each run's workers."""
    done = Counter[str]()
    for job in jobs:
        items = job.folder / ITEMS
        done[job.run] += items.read_bytes().count(b"\n") if items.is_file() else 0
    return ", ".join(f"{name}: {count} items" for name, count in done.items())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--work", type=Path, help="what stays on this machine between calls (the user's cache folder)")
    parser.add_argument("--weights", default=MODEL, help="model: name, folder or .gguf file (%(default)s)")
    parser.add_argument("--specs", type=split_specs, default=kvcodec.presets(), help="(every preset)")
    parser.add_argument("--tasks", default=TASKS, help="as of `kvcodec eval` (%(default)s)")
    parser.add_argument("--runs", default="plain,stressed", help="(%(default)s)")
    parser.add_argument("--stress", default="64:1", help="of the run `stressed` (%(default)s)")
    parser.add_argument("--data", type=Path, help="the tasks' files; default: what was carried")
    parser.add_argument("--text", type=Path, help="default: what was carried, or the packaged text (4 windows)")
    parser.add_argument("--workers", type=int, help="processes (10 for each GPU, one for each core at most)")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    parser.add_argument("--dtype", default="float32", help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="most sequences of a call (%(default)s)")
    parser.add_argument("--lengths", help="as of `kvcodec eval`")
    parser.add_argument("--window-tokens", type=int, default=2048, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=540, help="seconds of this call (%(default)s)")
    parser.add_argument("--interval", type=float, default=15, help="seconds between lines of progress (%(default)s)")
    parser.add_argument("--carried", type=Path, action="append", default=[], help="a load that --export wrote")
    parser.add_argument("--export", type=Path, help="write loads to this folder and do nothing else")
    parser.add_argument("--form", choices=("gguf", "float16", "bfloat16"), default="gguf", help="of --export")
    parser.add_argument("--part-mb", type=float, default=51, help="most of a load, of --export (%(default)s)")
    args = parser.parse_args()
    if args.export is None and args.out is None:
        parser.error("pass --out, or --export")
    if unknown := set(args.runs.split(",")) - {"plain", "stressed"}:
        parser.error(f"no run {', '.join(sorted(unknown))}; there are plain, stressed")
    if args.workers is None:
        args.workers = min(10 * max(gpu_count(), 1), os.cpu_count() or 1)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: expected at least 1")
    return args


def main() -> int:
    args, begun = parsed(), time.monotonic()
    if args.export is not None:
        return export(args)
    if args.work is None:
        from kvcodec.paths import cache_dir

        args.work = cache_dir() / "evaluate"
    args.work, args.out = args.work.resolve(), args.out.resolve()
    if lacking := collect(args.carried, args.work):
        print(f"kept; still to come: {', '.join(lacking)}")
        return 0
    if args.data is None and (args.work / "data").is_dir():
        args.data = args.work / "data"
    if args.text is None:
        args.text = next(iter(sorted((args.work / "text").glob("*"))), None)
    args.data, args.text = (path and path.resolve() for path in (args.data, args.text))
    if Path(args.weights).exists():
        args.weights = str(Path(args.weights).resolve())

    names = args.runs.split(",")
    runs = {name: gathered(name, args) for name in names}
    staffed = staff({name: unread(run, args.specs, args.tasks) for name, run in runs.items()}, args.workers)
    jobs = [Job(name, args.work / name / f"worker-{i:02d}") for i, name in enumerate(staffed)]
    for job in jobs:
        seed(job, runs[job.run])
    failed = work(jobs, args, begun + args.deadline - END_SECONDS) if jobs else []
    left: dict[str, int | None] = {}
    done = not failed
    for name in names:
        run = gathered(name, args)
        left[name] = None if run is None else sum(sum(lacks.values()) for lacks in missing(run).values())
        done &= not unread(run, args.specs, args.tasks)
        if run is not None:
            pack(run.folder, args.out / name)
    args.out.mkdir(parents=True, exist_ok=True)
    status = {"complete": done, "left": left, "failed": len(failed), "seconds": round(time.monotonic() - begun)}
    (args.out / STATUS).write_text(json.dumps(status, indent=1) + "\n")
    for log in failed:
        print(f"a worker failed:\n{log[-2000:]}", file=sys.stderr)
    print("complete" if done else f"left: {left}; the same call goes on")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
