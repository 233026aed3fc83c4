"""``kvcodec bench decode | encode | prefill | generate | first | page``: arguments, files and steps.

At module level only light modules are imported, so that ``kvcodec --help`` does not load torch.

Rows go to ``OUT/<part>.jsonl`` as they are measured; at the end ``OUT/<part>.json``, one page ``OUT/bench.html`` over
everything in the folder and, with matplotlib, ``OUT/speed.png`` are written from them.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcodec_lab.serve import command as serve

if TYPE_CHECKING:
    import torch

    from kvcodec_lab.bench.record import Recorder, Row
    from kvcodec_lab.bench.shapes import Shape

DEVICE_LOST = 3
"""Exit status: a kernel broke the CUDA context; the same command continues without that case."""
DECODE_SHAPES = "spine,corners,octopus,saw,per-head,sweep"


def check_on_cpu(args: argparse.Namespace) -> None:
    """Refuse GPU-only options of a bench that runs on a CPU, which would ignore them.

    Raises
    ------
    SpecError
    """
    from kvcodec.errors import SpecError

    for option in (
        "shapes",
        "also",
        "ways",
        "turns",
        "no_dense",
        "out",
        "deadline",
        "commit",
        "add",
        "engine",
        "rows_only",
    ):
        if getattr(args, option):
            raise SpecError(
                f"bench {args.what} on {args.device}: --{option.replace('_', '-')} is of the GPU benches; sizes are "
                f"--batch, --kv-heads, --query-heads, --head-dim and --tokens, and --json writes the rows."
            )


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of the GPU benches."""
    options: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("--shapes", {"metavar": "A,B"}, "names or groups: spine,saw,sweep1 (decode), llm64k,append (encode), "
         "all,hqmq (prefill), qwen3_8b_b1_32k (generate); default: all"),
        ("--also", {"metavar": "A,B@X,Y", "action": "append", "default": []}, "of decode: also these specs at these "
         "shapes; may be repeated; without --shapes nothing else"),
        ("--ways", {"metavar": "A,B"}, "of generate: generate, graph, compiled (all)"),
        ("--turns", {"metavar": "FILE"}, "of generate: for several processes at once, which compile side by side: "
         "through this file they take turns in being timed"),
        ("--no-dense", {"action": "store_true"}, "of generate: do not time the uncompressed model"),
        ("--out", {"metavar": "DIR"}, "folder for rows, page and figure; a run goes on from the rows there"),
        ("--deadline", {"type": float, "metavar": "SECONDS"}, "begin nothing later than this"),
        ("--commit", {"metavar": "ID"}, "stamped on the rows (what git says)"),
        ("--no-libraries", {"action": "store_true"}, "compare with torch's SDPA alone, with no other library"),
        ("--add", {"metavar": "DIR"}, "of page: first add the rows of this folder, e.g. of another machine"),
        ("--engine", {"metavar": "cuda"}, "of decode and encode: the kernels to time; there is one engine, cuda"),
        ("--rows-only", {"action": "store_true"}, "write rows and no page"),
    )  # fmt: skip
    for option, form, text in options:
        p.add_argument(option, **form, help=f"GPU benches: {text}")
    # as the programs would be where shared memory is short, to bound their times: docs/kernels.md
    p.add_argument("--shared-memory", type=int, metavar="KB", help=argparse.SUPPRESS)
    serve.add_arguments(p)


def run(args: argparse.Namespace, say: Callable[[str], None]) -> "list[Row] | int":
    """Run one part; its rows, or the exit status ``DEVICE_LOST``.

    Raises
    ------
    KVError
        Before anything is timed: no GPU, an unknown preset or shape, a folder that cannot be written.
    """
    from kvcodec.cli.stamp import stamp
    from kvcodec.registry import get
    from kvcodec_lab.bench.record import DeviceLostError, Recorder, require_gpu
    from kvcodec_lab.report.publish import page

    out = None if args.out is None else Path(args.out)
    if args.what == "page":
        return page(out, say, None if args.add is None else Path(args.add))
    for spec in args.specs or ():
        get(spec)
    device = require_gpu(args.what, args.device)
    if out is not None:
        from kvcodec.cli.measure.rows import check_writable

        check_writable(out)
    path = None if out is None else out / f"{args.what}.jsonl"
    common = stamp(device, args.seed, args.commit)
    limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args.shared_memory:
        from kvcodec.kernels.cuda.launch import limited

        common, limit = common | {"shared_memory_kb": args.shared_memory}, limited(args.shared_memory)
    recorder = Recorder(path, common, say)
    lost = False
    try:
        with limit:
            for _ in rows_of(args, recorder, device):
                pass
    except KeyboardInterrupt:
        say("interrupted: the rows hold what was finished")
    except DeviceLostError as error:
        say(str(error))
        lost = True
    if out is not None and not args.rows_only:
        page(out, say)
    return DEVICE_LOST if lost else recorder.new


def rows_of(args: argparse.Namespace, recorder: "Recorder", device: "torch.device") -> "Iterator[Row]":
    """Rows of the part that ``args.what`` names."""
    from kvcodec.errors import UnsupportedError
    from kvcodec_lab.bench.record import Deadline
    from kvcodec_lab.bench.shapes import KMEANS, PRESETS, shapes_named
    from kvcodec_lab.bench.timing import Timer

    specs: Sequence[str] = args.specs or (*PRESETS, *([KMEANS] if args.what == "decode" else []))
    common: dict[str, Any] = {"device": device, "seed": args.seed, "deadline": Deadline(args.deadline)}
    libraries: dict[str, Any] = {"libraries": not args.no_libraries}
    if args.engine not in (None, "cuda"):
        raise UnsupportedError(f"--engine {args.engine}: there are no such kernels; use cuda, or leave it out.")
    with_libraries = common | libraries
    if args.what == "decode":
        from kvcodec_lab.bench.decode import decode_rows

        jobs = [(specs, shapes_named(args.shapes or DECODE_SHAPES))] if args.shapes or not args.also else []
        jobs += [_also(text) for text in args.also]
        shared = with_libraries | {"timer": Timer(device)}
        return itertools.chain.from_iterable(decode_rows(*job, recorder, **shared) for job in jobs)
    if args.what == "encode":
        from kvcodec_lab.bench.encode import encode_rows, encode_shapes

        if args.shapes:
            with_libraries["shapes"], with_libraries["batches"] = encode_shapes(args.shapes)
        return encode_rows(specs, recorder, timer=Timer(device), **with_libraries)
    if args.what == "prefill":
        from kvcodec_lab.bench.prefill import prefill_rows, prefill_shapes

        found = prefill_shapes(args.shapes or "all")
        return prefill_rows(specs, recorder, timer=Timer(device), shapes=found, **common)
    if args.what == "first":
        from kvcodec_lab.bench.first import first_rows, served

        return first_rows(args.specs or served(), recorder, **common)
    from kvcodec_lab.bench.generate import BATCHES, WAYS, batches_of, generate_rows
    from kvcodec_lab.bench.gpu_lock import GpuLock

    chosen: dict[str, Any] = {
        "batches": batches_of(args.shapes) if args.shapes else BATCHES,
        "ways": args.ways.split(",") if args.ways else WAYS,
        "lock": GpuLock(Path(args.turns) if args.turns else None),
        "dense": not args.no_dense,
    }
    return generate_rows(specs, recorder, **common, **libraries, **chosen)


def _also(text: str) -> "tuple[list[str], list[Shape]]":
    """Specs and shapes of ``A,B@X,Y``."""
    from kvcodec.registry import get, split_specs
    from kvcodec_lab.bench.shapes import shapes_named

    specs, _, shapes = text.partition("@")
    found = split_specs(specs)
    for spec in found:
        get(spec)
    return found, shapes_named(shapes)
