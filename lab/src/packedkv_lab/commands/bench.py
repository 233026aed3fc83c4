"""``packedkv bench``: times of encode, decode and attention on this machine, and sessions against a server.

Rows of GPU benches and of ``serve`` go to ``OUT/<part>.jsonl`` as they are measured. At the end ``OUT/<part>.json``
and one page ``OUT/bench.html`` over everything in the folder are written from them.

At module level only light modules are imported, so that ``packedkv --help`` does not load torch.
"""

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from packedkv.cli.arguments import add_device, add_head_dim, add_seed, positive, seconds, specs, tokens
from packedkv.cli.result import Result, collected
from packedkv.errors import KVError, SpecError
from packedkv_lab.bench import PARTS

if TYPE_CHECKING:
    import torch

    from packedkv_lab.bench.record import Recorder, Row

DEVICE_LOST, FAILED = 3, 1
"""Exit statuses: a kernel broke the CUDA context, and the same command continues; a server failed requests."""
DECODE_SHAPES = "spine,corners,octopus,saw,per-head,sweep"
WHAT = (
    "cache: append, decode and attend beside SDPA (default); codec: encode and decode of K and V, in tokens/s and "
    "beside int-4, hqq and quanto; decode, encode, prefill, generate, first: GPU kernels beside 16-bit attention, with "
    "--device cuda (first: time to the first token); decode --device cpu: CPU kernels beside PyTorch, llama.cpp and "
    "transformers' quantized caches; serve: sessions against the server at URL; page: the page of a run's folder"
)
GPU_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--shapes", {"metavar": "A,B"}, "names or groups: spine,saw,sweep1 (decode), llm64k,append (encode), all,hqmq "
     "(prefill), qwen3_8b_b1_32k (generate); default: all"),
    ("--also", {"metavar": "A,B@X,Y", "action": "append", "default": []}, "of decode: also these specs at these "
     "shapes; may be repeated; without --shapes nothing else"),
    ("--ways", {"metavar": "A,B"}, "of generate: generate, graph, compiled (all)"),
    ("--turns", {"metavar": "FILE"}, "of generate: a lock file for processes that compile at once and are timed one "
     "by one"),
    ("--no-dense", {"action": "store_true"}, "of generate: do not time the uncompressed model"),
    ("--out", {"metavar": "DIR"}, "folder for rows and page; a run continues from the rows there"),
    ("--deadline", {"type": float, "metavar": "SECONDS"}, "begin nothing later than this"),
    ("--commit", {"metavar": "ID"}, "stamped on the rows (what git says)"),
    ("--add", {"metavar": "DIR"}, "of page: first add the rows of this folder, e.g. of another machine"),
    ("--engine", {"metavar": "cuda"}, "of decode and encode: the kernels to time; there is one engine, cuda"),
    ("--rows-only", {"action": "store_true"}, "write rows and no page"),
)  # fmt: skip
SESSIONS: dict[str, tuple[Callable[[str], float], float, str]] = {
    "sessions": (positive, 32, "concurrent sessions"),
    "rounds": (positive, 6, "rounds of a session"),
    "shared": (tokens, 1024, "tokens that all sessions share"),
    "context": (tokens, 16384, "tokens of a session's own context"),
    "turn": (tokens, 2048, "tokens of a tool's output"),
    "answer": (positive, 256, "tokens of an answer"),
    "pause": (seconds, 0.0, "seconds between an answer and the next round"),
}
SERVER: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--label", {"metavar": "NAME", "default": "server"}, "name of the server in the rows (%(default)s)"),
    ("--model", {"metavar": "NAME"}, "model to ask for (the first that the server lists)"),
    ("--vocabulary", {"type": positive, "default": 30_000, "metavar": "N"}, "prompts' ids are below it (%(default)s)"),
    ("--timeout", {"type": seconds, "default": 1800.0, "metavar": "SECONDS"}, "of one request (%(default)s)"),
    ("--header", {"metavar": "'NAME: VALUE'", "action": "append", "default": []}, "sent with every request"),
)
MOVED = ("--start", "--load", "--concurrency", "--rate", "--input-len", "--output-len", "--requests", "--warmups",
         "--together", "--start-timeout", "--gpu")  # fmt: skip
"""Options of a load generator that vLLM brings."""


class _Moved(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(
            f"{self.option_strings[0]}: bench serve sends sessions to a running server; for a sweep of concurrency or "
            "rate use vLLM's own: vllm bench serve --base-url URL --dataset-name random"
        )


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    p.add_argument("what", nargs="?", choices=("cache", "codec", *PARTS, "page"), default="cache", help=WHAT)
    p.add_argument("url", nargs="?", metavar="URL", help="of serve: e.g. http://localhost:8000")
    p.add_argument("--specs", type=specs, metavar="A,B", help="default: dense,saw-int4; codec: all; GPU: a list")
    for name, default, of in (
        ("batch", 1, "sequences"),
        ("kv-heads", 8, "KV heads"),
        ("query-heads", 32, "query heads"),
        ("tokens", 4096, "tokens held"),
        ("repeats", 5, "repetitions of each measurement"),
    ):
        p.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{of} (%(default)s)")
    add_head_dim(p)
    add_seed(p)
    add_device(p)
    for option, form, text in GPU_OPTIONS:
        p.add_argument(option, **form, help=f"GPU benches: {text}")
    p.add_argument("--no-libraries", action="store_true", help="compare with torch alone, with no other library")
    # as the programs would be where shared memory is short, to bound their times: docs/kernels.md
    p.add_argument("--shared-memory", type=int, metavar="KB", help=argparse.SUPPRESS)
    group = p.add_argument_group("bench serve")
    for name, (kind, number, of) in SESSIONS.items():
        group.add_argument(f"--{name}", type=kind, default=number, metavar="N", help=f"{of} (%(default)s)")
    for option, form, text in SERVER:
        group.add_argument(option, **form, help=text)
    for option in MOVED:
        group.add_argument(option, action=_Moved, nargs="?", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> Result | int:
    """Run the bench that ``args.what`` names."""
    from packedkv.progress import Progress
    from packedkv.registry import get
    from packedkv_lab.report.bench import write_page

    say = Progress().say
    if args.url is not None and args.what != "serve":
        raise KVError(f"bench {args.what} takes no address; {args.url!r} would be that of bench serve.")
    if args.what == "page":
        if args.out is None:
            raise SpecError("bench page: name the folder of the rows with --out DIR.")
        rows = write_page(Path(args.out), say, None if args.add is None else Path(args.add))
        return Result(rows, _text(rows))
    if args.what != "codec":  # which refuses more
        for spec in args.specs or ():
            get(spec)
    if args.what in ("cache", "codec") or (args.what, args.device) == ("decode", "cpu"):
        return _run_here(args, say)
    return _run_recorded(args, say)


def _run_here(args: argparse.Namespace, say: Callable[[str], None]) -> Result:
    """Run a bench that needs no GPU; options of GPU benches are refused."""
    for option, _, _ in GPU_OPTIONS:
        if getattr(args, option[2:].replace("-", "_")):
            raise SpecError(
                f"bench {args.what} on {args.device}: {option} is of the GPU benches; sizes are --batch, --kv-heads, "
                f"--query-heads, --head-dim and --tokens, and --json writes the rows."
            )
    from packedkv.registry import presets

    shape = {"kv_heads": args.kv_heads, "head_dim": args.head_dim, "tokens": args.tokens}
    heads = {"batch": args.batch, "query_heads": args.query_heads}
    common = {"repeats": args.repeats, "seed": args.seed, "progress": say}
    if args.what == "codec":
        from packedkv_lab.bench.codec import codec_rows

        rows = codec_rows(args.specs or presets(), device=args.device, **shape, **common)
    elif args.what == "cache":
        from packedkv_lab.bench.cache import cache_rows

        chosen = args.specs or ["dense", "saw-int4"]
        rows = cache_rows(chosen, device=args.device, dtype=args.dtype, **heads, **shape, **common)
    else:
        from packedkv_lab.bench.cpu_decode import PRESETS, decode_rows

        rows = decode_rows(args.specs or PRESETS, libraries=not args.no_libraries, **heads, **shape, **common)
    found = collected(rows)
    return Result(found, _text(found))


def _run_recorded(args: argparse.Namespace, say: Callable[[str], None]) -> Result | int:
    """Run a bench whose rows go to a folder as they are measured."""
    import torch

    from packedkv.cli.measure.rows import check_writable
    from packedkv.cli.stamp import stamp
    from packedkv_lab.bench.record import DeviceLostError, Recorder, require_gpu
    from packedkv_lab.report.bench import write_page

    served = args.what == "serve"
    device = torch.device("cpu") if served else require_gpu(args.what, args.device)
    out = None if args.out is None else check_writable(args.out)
    common = stamp(device, args.seed, args.commit)
    limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args.shared_memory:
        from packedkv.kernels.cuda.launch import limited

        common, limit = common | {"shared_memory_kb": args.shared_memory}, limited(args.shared_memory)
    recorder = Recorder(None if out is None else out / f"{args.what}.jsonl", common, say)
    status = 0
    try:
        with limit:
            for row in _serve(args, recorder) if served else _gpu_rows(args, recorder, device):
                status = FAILED if row.get("errors") else status
    except KeyboardInterrupt:
        say("interrupted: the rows hold what was finished")
    except DeviceLostError as error:
        say(str(error))
        status = DEVICE_LOST
    if out is not None and not args.rows_only:
        write_page(out, say)
    return DEVICE_LOST if status == DEVICE_LOST else Result(recorder.new, _text(recorder.new), status)


def _serve(args: argparse.Namespace, recorder: "Recorder") -> "Iterator[Row]":
    from packedkv_lab.bench.sessions import Server, Sessions, session_rows

    if args.url is None:
        raise SpecError("bench serve: name a running server's URL, e.g. http://localhost:8000.")
    headers = dict(line.split(": ", 1) for line in args.header if ": " in line)
    server = Server(args.url, args.model, headers, args.timeout)
    load = Sessions(**{name: getattr(args, name) for name in SESSIONS})
    return session_rows(server, load, recorder, label=args.label, seed=args.seed, vocabulary=args.vocabulary)


def _gpu_rows(args: argparse.Namespace, recorder: "Recorder", device: "torch.device") -> "Iterator[Row]":
    """Rows of the GPU bench that ``args.what`` names."""
    from packedkv.errors import UnsupportedError
    from packedkv.registry import get, split_specs
    from packedkv_lab.bench.record import Deadline
    from packedkv_lab.bench.shapes import KMEANS, PRESETS, shapes_named
    from packedkv_lab.bench.timing import Timer

    chosen: Sequence[str] = args.specs or (*PRESETS, *([KMEANS] if args.what == "decode" else []))
    common: dict[str, Any] = {"device": device, "seed": args.seed, "deadline": Deadline(args.deadline)}
    libraries: dict[str, Any] = {"libraries": not args.no_libraries}
    if args.engine not in (None, "cuda"):
        raise UnsupportedError(f"--engine {args.engine}: there are no such kernels; use cuda, or leave it out.")
    if args.what == "decode":
        from packedkv_lab.bench.decode import decode_rows

        jobs = [(chosen, shapes_named(args.shapes or DECODE_SHAPES))] if args.shapes or not args.also else []
        for text in args.also:
            names, _, shapes = text.partition("@")
            found = split_specs(names)
            for spec in found:
                get(spec)
            jobs.append((found, shapes_named(shapes)))
        shared = common | libraries | {"timer": Timer(device)}
        return itertools.chain.from_iterable(decode_rows(*job, recorder, **shared) for job in jobs)
    if args.what == "encode":
        from packedkv_lab.bench.encode import encode_rows, encode_shapes

        sizes: dict[str, Any] = {}
        if args.shapes:
            sizes["shapes"], sizes["batches"] = encode_shapes(args.shapes)
        return encode_rows(chosen, recorder, timer=Timer(device), **common, **libraries, **sizes)
    if args.what == "prefill":
        from packedkv_lab.bench.prefill import prefill_rows, prefill_shapes

        asked = prefill_shapes(args.shapes or "all")
        return prefill_rows(chosen, recorder, timer=Timer(device), shapes=asked, **common)
    if args.what == "first":
        from packedkv_lab.bench.first import first_rows, served

        return first_rows(args.specs or served(), recorder, **common)
    from packedkv_lab.bench.generate import BATCHES, WAYS, batches_of, generate_rows
    from packedkv_lab.bench.gpu_lock import GpuLock

    options: dict[str, Any] = {
        "batches": batches_of(args.shapes) if args.shapes else BATCHES,
        "ways": args.ways.split(",") if args.ways else WAYS,
        "lock": GpuLock(Path(args.turns) if args.turns else None),
        "dense": not args.no_dense,
    }
    return generate_rows(chosen, recorder, **common, **libraries, **options)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a bench's rows for a terminal."""
    lines = [f"{'spec':<20} {'bits':>6}  {'metric':<20} {'p20':>12} {'p50':>12} {'p80':>12}  {'unit':<8}  shape"]
    for r in rows:
        values = " ".join(f"{(r['values'] or {}).get(p, float('nan')):>12.4g}" for p in ("p20", "p50", "p80"))
        bits = "-" if r.get("effective_bits") is None else f"{r['effective_bits']:.2f}"
        lines.append(f"{r['spec']:<20} {bits:>6}  {r['metric']:<20} {values}  {r['unit']:<8}  {r['shape']}")
    return "\n".join(lines)
