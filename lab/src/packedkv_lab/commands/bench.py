"""``packedkv bench``: times of encode, decode and attention on this machine, and sessions against a server.

Each bench is a command of its own, ``packedkv bench BENCH``; without a name it is ``cache``. With ``--out``, rows go to
``OUT/<bench>.jsonl`` as they are measured; at the end ``OUT/<bench>.json`` and one page ``OUT/bench.html`` over
everything in the folder are written from them.
"""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from packedkv.cli.arguments import add_codec_file, positive, seconds, specs, tokens
from packedkv.cli.result import Result
from packedkv.errors import SpecError, UnsupportedError

DEVICE_LOST, FAILED = 3, 1
"""Exit statuses: a kernel broke the CUDA context, and the same command continues; a server failed requests."""


class Option(NamedTuple):
    """An option of some benches."""

    name: str
    default: Any
    help: str
    form: dict[str, Any]


def _number(name: str, default: int, text: str, kind: Callable[[str], float] = positive) -> Option:
    return Option(f"--{name}", default, f"{text} ({default})", {"type": kind, "metavar": "N"})


def _text(name: str, metavar: str, text: str, default: str | None = None, **form: Any) -> Option:
    return Option(f"--{name}", default, text, {"metavar": metavar, **form})


def _flag(name: str, text: str) -> Option:
    return Option(f"--{name}", False, text, {"action": "store_true"})


SPECS = _text("specs", "A,B", "presets (a list of the bench's own)", type=specs)
DEVICE = (
    Option("--device", "cpu", "torch device (cpu)", {}),
    Option("--seed", 0, "of everything drawn at random (0)", {"type": int, "metavar": "N"}),
    _flag("no-libraries", "compare with torch alone, with no other library"),
)
SIZES = (
    _number("batch", 1, "sequences"),
    _number("kv-heads", 8, "KV heads"),
    _number("query-heads", 32, "query heads"),
    Option("--head-dim", 128, "channels of a head (128)", {"type": positive, "metavar": "D"}),
    _number("tokens", 4096, "tokens of a sequence"),
    _number("repeats", 5, "repetitions of each measurement"),
    Option("--dtype", "float32", "of keys and values (float32)", {"choices": ("float32", "float16", "bfloat16")}),
)
OUT = (
    _text("out", "DIR", "folder for rows and page; a run continues from the rows there"),
    _text("commit", "ID", "stamped on the rows (what git says)"),
    _flag("rows-only", "write rows and no page"),
)
GPU = (
    Option("--deadline", None, "begin nothing later than this", {"type": float, "metavar": "SECONDS"}),
    # as the programs would be where shared memory is short, to bound their times: docs/kernels.md
    Option("--shared-memory", None, argparse.SUPPRESS, {"type": int, "metavar": "KB"}),
)
ENGINE = _text("engine", "cuda", "the kernels to time; there is one engine, cuda")
SESSIONS = (
    _number("sessions", 32, "concurrent sessions"),
    _number("rounds", 6, "rounds of a session"),
    _number("shared", 1024, "tokens that all sessions share", tokens),
    _number("context", 16384, "tokens of a session's own context", tokens),
    _number("turn", 2048, "tokens of a tool's output", tokens),
    _number("answer", 256, "tokens of an answer"),
    _number("pause", 0, "seconds between an answer and the next round", seconds),
)
SERVER = (
    _text("label", "NAME", "name of the server in the rows (server)", "server"),
    _text("model", "NAME", "model to ask for (the first that the server lists)"),
    _number("vocabulary", 30_000, "prompts' ids are below it"),
    Option("--timeout", 1800.0, "of one request (1800)", {"type": seconds, "metavar": "SECONDS"}),
    Option("--header", [], "sent with every request", {"metavar": "'NAME: VALUE'", "action": "append"}),
    Option("--seed", 0, "of the prompts (0)", {"type": int, "metavar": "N"}),
)
DECODE_SHAPES = "spine,corners,octopus,saw,per-head,sweep"
SHAPES = {
    "decode": f"with --device cuda: names or groups of shapes ({DECODE_SHAPES})",
    "encode": "names of shapes, e.g. llm64k,append_b8; append for all batches of one token (all)",
    "prefill": "all, hqmq, or e.g. prefill_b1_t2048_q16 (all)",
    "generate": "e.g. qwen3_8b_b1_32k (1 and 8 sequences)",
}
ALSO = Option("--also", [], "with --device cuda: also these specs at these shapes; may be repeated; without --shapes "
              "nothing else", {"metavar": "A,B@X,Y", "action": "append"})  # fmt: skip
MOVED = ("--start", "--load", "--concurrency", "--rate", "--input-len", "--output-len", "--requests", "--warmups",
         "--together", "--start-timeout", "--gpu")  # fmt: skip
"""Options of a load generator that vLLM brings."""


def _shapes(bench: str) -> Option:
    return _text("shapes", "A,B", SHAPES[bench])


BENCHES: dict[str, tuple[str, tuple[Option, ...]]] = {
    "cache": ("append, decode and attend beside SDPA; without a name it is this one", (SPECS, *DEVICE, *SIZES)),
    "codec": ("encode and decode of K and V, beside int-4, hqq and quanto", (SPECS, *DEVICE, *SIZES)),
    "decode": (
        "decode attention: on a GPU beside 16-bit attention, on a CPU beside PyTorch, llama.cpp and QuantizedCache",
        (SPECS, *DEVICE, *SIZES, *OUT, *GPU, ENGINE, _shapes("decode"), ALSO),
    ),
    "encode": ("encoding into pages on a GPU", (SPECS, *DEVICE, *OUT, *GPU, ENGINE, _shapes("encode"))),
    "prefill": ("new tokens over packed history on a GPU", (SPECS, *DEVICE, *OUT, *GPU, _shapes("prefill"))),
    "generate": (
        "decode steps of a whole model on a GPU",
        (
            SPECS, *DEVICE, *OUT, *GPU, _shapes("generate"),
            _text("ways", "A,B", "generate, graph, compiled (all)"),
            _text("turns", "FILE", "a lock file for processes that compile at once and are timed one by one"),
            _flag("no-dense", "do not time the uncompressed model"),
        ),
    ),
    "first": ("time to the first token on a GPU", (SPECS, *DEVICE, *OUT, *GPU)),
    "serve": ("sessions of several rounds against a running server", (*SESSIONS, *SERVER, *OUT)),
    "page": (
        "the page of a run's folder",
        (
            _text("out", "DIR", "folder of the rows", required=True),
            _text("add", "DIR", "first add the rows of this folder, e.g. of another machine"),
        ),
    ),
}  # fmt: skip
"""Help and options of each bench."""


class _Moved(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(
            f"{self.option_strings[0]}: bench serve sends sessions to a running server; for a sweep of concurrency or "
            "rate use vLLM's own: vllm bench serve --base-url URL --dataset-name random"
        )


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add a command for each bench; options before its name are those of ``cache``."""
    p.set_defaults(what="cache")
    for option in BENCHES["cache"][1]:
        p.add_argument(option.name, default=option.default, help=option.help, **option.form)
    benches = p.add_subparsers(title="benches", metavar="BENCH")
    for name, (summary, options) in BENCHES.items():
        bench = benches.add_parser(name, help=summary, description=f"Time {summary}.")
        bench.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help="as before the bench's name")
        add_codec_file(bench, argparse.SUPPRESS)
        bench.set_defaults(what=name)
        if name == "serve":
            bench.add_argument("url", metavar="URL", help="e.g. http://localhost:8000")
            for moved in MOVED:
                bench.add_argument(moved, action=_Moved, nargs="?", help=argparse.SUPPRESS)
        for option in options:
            # a default here would replace what stands before the bench's name
            p.set_defaults(**{option.name[2:].replace("-", "_"): option.default})
            bench.add_argument(option.name, default=argparse.SUPPRESS, help=option.help, **option.form)


def run(args: argparse.Namespace) -> Result | int:
    """Run the bench that ``args.what`` names."""
    import torch

    from packedkv.cli.measure.rows import check_writable
    from packedkv.cli.stamp import stamp
    from packedkv.progress import Progress
    from packedkv.registry import get
    from packedkv_lab.bench.record import Deadline, DeviceLostError, Recorder, require_gpu, usable_device
    from packedkv_lab.report.bench import write_page

    say, what = Progress().say, args.what
    if what == "page":
        rows = write_page(Path(args.out), say, None if args.add is None else Path(args.add))
        return Result(rows, _table(rows))
    for spec in args.specs or ():
        get(spec)
    on_gpu = what in ("encode", "prefill", "generate", "first") or (what == "decode" and args.device != "cpu")
    if what == "serve":
        device = torch.device("cpu")
    else:
        device = require_gpu(what, args.device) if on_gpu else usable_device(f"bench {what}", args.device)
    out = None if args.out is None else check_writable(args.out)
    common = stamp(device, args.seed, args.commit)
    if not on_gpu and what != "serve":
        common["device"] = common.pop("gpu")
    limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args.shared_memory:
        from packedkv.kernels.cuda.launch import limited

        common, limit = common | {"shared_memory_kb": args.shared_memory}, limited(args.shared_memory)
    recorder = Recorder(
        None if out is None else out / f"{what}.jsonl",
        common,
        say,
        device=device,
        seed=args.seed,
        deadline=Deadline(args.deadline),
        libraries=not args.no_libraries,
    )
    partial = {}
    try:
        with limit:
            (_on_gpu if on_gpu else _here)(args, recorder)
    except KeyboardInterrupt:
        if not recorder.new:
            raise
        say("interrupted: the rows hold what was finished")
        partial = {"partial": True}
    except DeviceLostError as error:
        say(str(error))
        return DEVICE_LOST
    finally:
        if out is not None and not args.rows_only and recorder.rows:
            write_page(out, say)
    rows = [row | partial for row in recorder.new]
    return Result(rows, _table(rows), FAILED if any(row.get("errors") for row in rows) else 0)


def _here(args: argparse.Namespace, recorder: Any) -> None:
    """Run a bench that needs no GPU."""
    from packedkv.registry import presets
    from packedkv_lab.bench.shapes import Shape

    if args.what == "serve":
        from packedkv_lab.bench.sessions import Server, Sessions, session_rows

        headers = dict(line.split(": ", 1) for line in args.header if ": " in line)
        server = Server(args.url, args.model, headers, args.timeout)
        load = Sessions(**{option.name[2:]: getattr(args, option.name[2:]) for option in SESSIONS})
        session_rows(server, load, recorder, label=args.label, vocabulary=args.vocabulary)
        return
    if args.shapes or args.also:
        raise SpecError(
            "bench decode on a CPU: --shapes and --also are for --device cuda; sizes are --batch, --kv-heads, "
            "--query-heads, --head-dim and --tokens."
        )
    sizes, codec = (args.batch, args.query_heads, args.kv_heads, args.head_dim, args.tokens), args.what == "codec"
    b, hq, h, d, t = sizes
    if codec:
        from packedkv_lab.bench.codec import codec_rows

        shape = Shape(f"b1_h{h}_d{d}_t{t}", 1, h, h, d, t)
        codec_rows(args.specs or presets(), shape, recorder, repeats=args.repeats)
        return
    shape = Shape(f"b{b}_hq{hq}_h{h}_d{d}_t{t}", *sizes)
    if args.what == "cache":
        from packedkv_lab.bench.cache import cache_rows

        chosen = args.specs or ["dense", "saw-int4"]
        cache_rows(chosen, shape, recorder, dtype=args.dtype, repeats=args.repeats)
    else:
        from packedkv_lab.bench.cpu_decode import PRESETS, cpu_decode_rows

        cpu_decode_rows(args.specs or PRESETS, shape, recorder, repeats=args.repeats)


def _on_gpu(args: argparse.Namespace, recorder: Any) -> None:
    """Run a bench of the GPU's kernels."""
    from packedkv.registry import get, split_specs
    from packedkv_lab.bench.shapes import KMEANS, PRESETS, shapes_named

    if args.engine not in (None, "cuda"):
        raise UnsupportedError(f"--engine {args.engine}: there are no such kernels; use cuda, or leave it out.")
    what, chosen = args.what, args.specs or list(PRESETS)
    bench = import_module(f"packedkv_lab.bench.{what}")
    if what == "decode":
        jobs = []
        if args.shapes or not args.also:
            jobs.append((args.specs or [*PRESETS, KMEANS], shapes_named(args.shapes or DECODE_SHAPES)))
        for text in args.also:
            names, _, shapes = text.partition("@")
            for spec in split_specs(names):
                get(spec)
            jobs.append((split_specs(names), shapes_named(shapes)))
        for some, where in jobs:
            bench.decode_rows(some, where, recorder)
    elif what == "encode":
        bench.encode_rows(chosen, recorder, *(bench.encode_shapes(args.shapes) if args.shapes else ()))
    elif what == "prefill":
        bench.prefill_rows(chosen, bench.prefill_shapes(args.shapes or "all"), recorder)
    elif what == "first":
        bench.first_rows(args.specs or bench.served(), recorder)
    else:
        bench.generate_rows(
            chosen,
            recorder,
            batches=bench.batches_of(args.shapes) if args.shapes else bench.BATCHES,
            ways=args.ways.split(",") if args.ways else bench.WAYS,
            lock=bench.GpuLock(Path(args.turns) if args.turns else None),
            dense=not args.no_dense,
        )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a bench's rows for a terminal."""
    lines = [f"{'spec':<20} {'bits':>6}  {'metric':<20} {'p20':>12} {'p50':>12} {'p80':>12}  {'unit':<8}  shape"]
    for r in rows:
        values = " ".join(f"{(r['values'] or {}).get(p, float('nan')):>12.4g}" for p in ("p20", "p50", "p80"))
        bits = "-" if r.get("effective_bits") is None else f"{r['effective_bits']:.2f}"
        lines.append(f"{r['spec']:<20} {bits:>6}  {r['metric']:<20} {values}  {r['unit']:<8}  {r['shape']}")
    return "\n".join(lines)
