"""``packedkv compile``: fill the cache folder with the CUDA programs of caches or servers."""

import argparse
import os
from typing import Any

from packedkv.cli.arguments import Result, add_head_dim, positive, specs

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("specs", metavar="SPECS", type=specs, help="e.g. saw-int4,octopus-3")
    add_head_dim(p)
    p.add_argument("--arch", metavar="SM", default="sm_90", help="compute capabilities: sm_80,sm_90 (%(default)s)")
    p.add_argument("--group", type=positive, metavar="N", help="query heads of a KV head (default: any number)")
    p.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the model (%(default)s)")
    p.add_argument("--page-tokens", type=positive, metavar="N", help="tokens of a page (the caches' default)")
    p.add_argument("--softcap", action="store_true", help="scores have a soft cap")
    p.add_argument("--means", action="store_true", help="also for keys without their mean: models with key biases")
    p.add_argument(
        "--served", type=positive, default=0, metavar="N",
        help="for vLLM in place of caches: most tokens of a request in a decode step, 1 and its drafts",
    )  # fmt: skip
    p.add_argument("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes (%(default)s)")
    p.add_argument("--list", action="store_true", help="say what would be compiled, and compile nothing")


def run(args: argparse.Namespace) -> Result:
    import torch

    from packedkv.description import kernels_for
    from packedkv.errors import UnsupportedError
    from packedkv.kernels.cuda.build import cache_folder, compiled
    from packedkv.kernels.cuda.launch import machine_of
    from packedkv.kernels.cuda.programs import Steps, compile_programs, of_scheme
    from packedkv.progress import Progress
    from packedkv.registry import get

    progress, rows, dtype = Progress(), [], getattr(torch, args.dtype)
    # one head and eight: both numbers of heads of a program, however many query tokens a request has
    steps = Steps((args.group,) if args.group else (1, 8), (None, dtype), args.softcap)
    options: dict[str, Any] = {
        "dtype": dtype, "page_tokens": args.page_tokens, "means": args.means, "served": args.served,
    }  # fmt: skip
    todo = []
    for arch in dict.fromkeys(name.strip() for name in args.arch.split(",") if name.strip()):
        machine = machine_of(arch)  # all presets, before the first is compiled
        for spec in args.specs:
            try:
                todo.append((spec, arch, of_scheme(get(spec), args.head_dim, machine, steps, **options)))
            except UnsupportedError as error:
                has = "none" not in kernels_for(get(spec), args.head_dim)["decode"]
                listed = f"; `packedkv list --head-dim {args.head_dim}` says which presets have kernels"
                raise UnsupportedError(f"{spec}: {error}{'' if has else listed}.") from error
    for spec, arch, needed in todo:
        row: dict[str, Any] = {"spec": spec, "head_dim": args.head_dim, "arch": arch, "programs": len(needed)}
        if args.list:
            missing = [one.label for one in needed if compiled(one.program, arch) is None]
            rows.append(row | {"compiled": 0, "bytes": 0, "seconds": 0.0, "missing": missing})
            continue
        made = []
        for done, one in enumerate(compile_programs(needed, arch, args.workers), 1):
            made.append(one)
            note = f"{one.nbytes / 1024:.0f} KB, " + (f"{one.seconds:.1f} s" if one.seconds else "had been compiled")
            progress.say(f"{spec} {arch} {done}/{len(needed)}  {one.label}: {note}")
        fresh = [one for one in made if one.seconds]
        seconds = round(sum(one.seconds for one in fresh), 1)
        rows.append(row | {"compiled": len(fresh), "bytes": sum(one.nbytes for one in made), "seconds": seconds})
    head = f"{'spec':<24} {'arch':<7} {'programs':>8} {'compiled':>8} {'seconds':>8} {'MB':>6}"
    lines = [
        f"{row['spec']:<24} {row['arch']:<7} {row['programs']:>8} {row['compiled']:>8} {row['seconds']:>8.1f} "
        f"{row['bytes'] / 1e6:>6.1f}"
        for row in rows
    ]
    for row in rows:
        lines += [f"missing: {label}" for label in row.get("missing", ())]
    return Result({"folder": str(cache_folder()), "rows": rows}, "\n".join([head, *lines, f"kept in {cache_folder()}"]))
