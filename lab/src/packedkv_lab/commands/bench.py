"""``packedkv bench``: times of encode, decode and attention on this machine, and sessions against a server.

With ``--out``, rows go to ``OUT/<bench>.jsonl`` as they are measured; JSON and page are written from them at the end.
"""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from packedkv.cli import arguments
from packedkv.cli.arguments import Result, add_codec_file, positive, seconds
from packedkv.errors import SpecError, UnsupportedError

DEVICE_LOST, FAILED = 3, 1
"""Exit statuses: a kernel broke the CUDA context, and the same command continues; a server failed requests."""
DECODE_SHAPES = "spine,corners,octopus,saw,per-head,sweep"
MOVED = ("--start", "--load", "--concurrency", "--rate", "--input-len", "--output-len", "--requests", "--warmups",
         "--together", "--start-timeout", "--gpu")  # fmt: skip
"""Options of a load generator that vLLM brings."""


def _option(default: Any, text: str, **form: Any) -> Any:
    """Return a field of ``Job`` that is an option; ``form`` is for ``add_argument``."""
    return field(default=default, metadata={"help": text, **form})


def _number(default: int, text: str, kind: Any = positive) -> Any:
    return _option(default, f"{text} ({default})", type=kind, metavar="N")


def _text(metavar: str, text: str, default: str | None = None, **form: Any) -> Any:
    return _option(default, text, metavar=metavar, **form)


def _flag(text: str) -> Any:
    return _option(False, text, action="store_true")


@dataclass(frozen=True)
class Job:
    """A bench, and its options with their help; a bench reads those that ``BENCHES`` lists."""

    what: str
    url: str = ""
    specs: Sequence[str] | None = _text("A,B", "presets (a list of the bench's own)", type=arguments.specs)
    device: str = _option("cpu", "torch device (cpu)")
    seed: int = _option(0, "of everything drawn at random (0)", type=int, metavar="N")
    no_libraries: bool = _flag("compare with torch alone, with no other library")
    batch: int = _number(1, "sequences")
    kv_heads: int = _number(8, "KV heads")
    query_heads: int = _number(32, "query heads")
    head_dim: int = _option(128, "channels of a head (128)", type=positive, metavar="D")
    tokens: int = _number(4096, "tokens of a sequence")
    repeats: int = _number(5, "repetitions of each measurement")
    dtype: str = _option("float32", "of keys and values (float32)", choices=("float32", "float16", "bfloat16"))
    out: str | None = _text("DIR", "folder for rows and page; a run continues from the rows there")
    commit: str | None = _text("ID", "stamped on the rows (what git says)")
    rows_only: bool = _flag("write rows and no page")
    add: str | None = _text("DIR", "first add the rows of this folder, e.g. of another machine")
    deadline: float | None = _option(None, "begin nothing later than this", type=float, metavar="SECONDS")
    # as the programs would be where shared memory is short, to bound their times: docs/kernels.md
    shared_memory: int | None = _option(None, argparse.SUPPRESS, type=int, metavar="KB")
    engine: str = _text("cuda", "the kernels to time; there is one engine, cuda", "cuda")
    shapes: str | None = _text("A,B", "names of shapes, and of groups of them")
    also: Sequence[str] | None = _option(None, "with --device cuda: also these specs at these shapes; may be repeated; "
                                     "without --shapes nothing else", metavar="A,B@X,Y", action="append")  # fmt: skip
    ways: str | None = _text("A,B", "generate, graph, compiled (all)")
    turns: str | None = _text("FILE", "a lock file for processes that compile at once and are timed one by one")
    no_dense: bool = _flag("do not time the uncompressed model")
    sessions: int = _number(32, "concurrent sessions")
    rounds: int = _number(6, "rounds of a session")
    shared: int = _number(1024, "tokens that all sessions share", arguments.tokens)
    context: int = _number(16384, "tokens of a session's own context", arguments.tokens)
    turn: int = _number(2048, "tokens of a tool's output", arguments.tokens)
    answer: int = _number(256, "tokens of an answer", arguments.tokens)
    pause: float = _number(0, "seconds between an answer and the next round", seconds)
    label: str = _text("NAME", "name of the server in the rows (server)", "server")
    model: str | None = _text("NAME", "model to ask for (the first that the server lists)")
    vocabulary: int = _number(30_000, "prompts' ids are below it")
    timeout: float = _option(1800.0, "of one request (1800)", type=seconds, metavar="SECONDS")
    header: Sequence[str] | None = _option(None, "sent with every request", metavar="'NAME: VALUE'", action="append")

    @property
    def on_gpu(self) -> bool:
        """Whether it times the kernels of a GPU."""
        return self.what in ("encode", "prefill", "generate", "first") or (
            self.what == "decode" and self.device != "cpu"
        )


DEVICE = ("specs", "device", "seed", "no_libraries")
SIZES = ("batch", "kv_heads", "query_heads", "head_dim", "tokens", "repeats", "dtype")
OUT = ("out", "commit", "rows_only")
GPU = (*OUT, "deadline", "shared_memory")
SESSIONS = ("sessions", "rounds", "shared", "context", "turn", "answer", "pause")
BENCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cache": ("append, decode and attend beside SDPA; without a name it is this one", (*DEVICE, *SIZES)),
    "codec": ("encode and decode of K and V, beside int-4, hqq and quanto", (*DEVICE, *SIZES)),
    "decode": (
        "decode attention: on a GPU beside 16-bit attention, on a CPU beside PyTorch, llama.cpp and QuantizedCache",
        (*DEVICE, *SIZES, *GPU, "engine", "shapes", "also"),
    ),
    "encode": ("encoding into pages on a GPU", (*DEVICE, *GPU, "engine", "shapes")),
    "prefill": ("new tokens over packed history on a GPU", (*DEVICE, *GPU, "shapes")),
    "generate": ("decode steps of a whole model on a GPU", (*DEVICE, *GPU, "shapes", "ways", "turns", "no_dense")),
    "first": ("time to the first token on a GPU", (*DEVICE, *GPU)),
    "serve": (
        "sessions of several rounds against a running server",
        (*SESSIONS, "label", "model", "vocabulary", "timeout", "header", "seed", *OUT),
    ),
    "page": ("the page of a run's folder", ("out", "add")),
}
"""Help and options of each bench."""
TOLD = {
    "decode": {"shapes": f"with --device cuda: names or groups of shapes ({DECODE_SHAPES})"},
    "encode": {"shapes": "names of shapes, e.g. llm64k,append_b8; append for all batches of one token (all)"},
    "prefill": {"shapes": "all, hqmq, or e.g. prefill_b1_t2048_q16 (all)"},
    "generate": {"shapes": "e.g. qwen3_8b_b1_32k (1 and 8 sequences)"},
    "serve": {"seed": "of the prompts (0)"},
    "page": {"out": "folder of the rows"},
}
"""Help of an option that differs from the others' by bench."""


class _Moved(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(
            f"{self.option_strings[0]}: bench serve sends sessions to a running server; for a sweep of concurrency or "
            "rate use vLLM's own: vllm bench serve --base-url URL --dataset-name random"
        )


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add a command for each bench; options before its name are those of ``cache``."""
    options = {f.name: f for f in fields(Job)}

    def add(parser: argparse.ArgumentParser, name: str, **changed: Any) -> None:
        parser.add_argument(f"--{name.replace('_', '-')}", **{**options[name].metadata, **changed})

    # a default of a bench's own parser would replace what stands before the bench's name
    p.set_defaults(what="cache", **{name: f.default for name, f in options.items() if name != "what"})
    for name in BENCHES["cache"][1]:
        add(p, name, default=options[name].default)
    benches = p.add_subparsers(title="benches", metavar="BENCH")
    for what, (summary, names) in BENCHES.items():
        bench = benches.add_parser(what, help=summary, description=f"Measure {summary}.")
        bench.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help="as before the bench's name")
        add_codec_file(bench, argparse.SUPPRESS)
        bench.set_defaults(what=what)
        if what == "serve":
            bench.add_argument("url", metavar="URL", help="e.g. http://localhost:8000")
            for moved in MOVED:
                bench.add_argument(moved, action=_Moved, nargs="?", help=argparse.SUPPRESS)
        for name in names:
            told = {"help": TOLD[what][name]} if name in TOLD.get(what, {}) else {}
            required = {"required": True} if (what, name) == ("page", "out") else {}
            add(bench, name, default=argparse.SUPPRESS, **told, **required)


def run(args: argparse.Namespace) -> Result | int:
    job = Job(**{f.name: getattr(args, f.name) for f in fields(Job)})
    return _page(job) if job.what == "page" else Run(job).measure()


def _page(job: Job) -> Result:
    from packedkv.progress import Progress
    from packedkv_lab.report.bench import write_page

    rows = write_page(Path(job.out or ""), Progress().say, None if job.add is None else Path(job.add))
    return Result(rows, _table(rows))


class Run:
    """A job that is run: its device, its folder and its recorder. Specs, device and folder are checked first."""

    def __init__(self, job: Job) -> None:
        import torch

        from packedkv.cli.measure.rows import check_writable
        from packedkv.cli.stamp import stamp
        from packedkv.models.loading import usable_device
        from packedkv.progress import Progress
        from packedkv.registry import get
        from packedkv_lab.bench.record import Recorder, require_gpu

        self.job, self.say = job, Progress().say
        for spec in job.specs or ():
            get(spec)
        device = torch.device("cpu")
        if job.what != "serve":
            device = require_gpu(job.what, job.device) if job.on_gpu else usable_device(job.device)
        self.out = None if job.out is None else check_writable(job.out)
        common = stamp(device, job.seed, job.commit)
        if not job.on_gpu and job.what != "serve":
            common["device"] = common.pop("gpu")
        if job.shared_memory:
            common["shared_memory_kb"] = job.shared_memory
        self.recorder = Recorder(
            None if self.out is None else self.out / f"{job.what}.jsonl",
            common,
            self.say,
            device=device,
            seed=job.seed,
            deadline=job.deadline,
            libraries=not job.no_libraries,
        )

    def measure(self) -> Result | int:
        """Measure, write what was asked for, and return the rows of this run."""
        from packedkv.kernels.cuda.launch import limited
        from packedkv_lab.bench.record import DeviceLostError
        from packedkv_lab.report.bench import write_page

        job, recorder, partial = self.job, self.recorder, {}
        bench = self._on_server if job.what == "serve" else self._on_gpu if job.on_gpu else self._on_cpu
        try:
            with limited(job.shared_memory) if job.shared_memory else contextlib.nullcontext():
                bench()
        except KeyboardInterrupt:
            if not recorder.new:
                raise
            self.say("interrupted: the rows hold what was finished")
            partial = {"partial": True}
        except DeviceLostError as error:
            self.say(str(error))
            return DEVICE_LOST
        finally:
            if self.out is not None and not job.rows_only and recorder.rows:
                write_page(self.out, self.say)
        rows = [row | partial for row in recorder.new]
        return Result(rows, _table(rows), FAILED if any(row.get("errors") for row in rows) else 0)

    def _on_server(self) -> None:
        from packedkv_lab.bench.sessions import Server, Sessions, session_rows

        job = self.job
        for line in job.header or ():
            if ": " not in line:
                raise SpecError(f"--header {line!r}: expected 'NAME: VALUE', e.g. 'Authorization: Bearer KEY'.")
        headers = dict(line.split(": ", 1) for line in job.header or ())
        load = Sessions(**{name: getattr(job, name) for name in SESSIONS})
        server = Server(job.url, job.model, headers, job.timeout)
        session_rows(server, load, self.recorder, label=job.label, vocabulary=job.vocabulary)

    def _on_cpu(self) -> None:
        from packedkv.registry import presets
        from packedkv_lab.bench import cache, codec, cpu_decode
        from packedkv_lab.bench.shapes import Shape

        job = self.job
        if job.shapes or job.also:
            raise SpecError(
                "bench decode on a CPU: --shapes and --also are for --device cuda; sizes are --batch, --kv-heads, "
                "--query-heads, --head-dim and --tokens."
            )
        b, hq, h, d, t = job.batch, job.query_heads, job.kv_heads, job.head_dim, job.tokens
        if job.what == "codec":
            shape = Shape(f"b1_h{h}_d{d}_t{t}", 1, h, h, d, t)
            codec.codec_rows(job.specs or presets(), shape, self.recorder, repeats=job.repeats)
            return
        shape = Shape(f"b{b}_hq{hq}_h{h}_d{d}_t{t}", b, hq, h, d, t)
        if job.what == "cache":
            chosen = job.specs or ["dense", "saw-int4"]
            cache.cache_rows(chosen, shape, self.recorder, dtype=job.dtype, repeats=job.repeats)
        else:
            cpu_decode.cpu_decode_rows(job.specs or cpu_decode.PRESETS, shape, self.recorder, repeats=job.repeats)

    def _on_gpu(self) -> None:
        from packedkv.registry import get, split_specs
        from packedkv_lab.bench import decode, encode, first, generate, prefill
        from packedkv_lab.bench.shapes import KMEANS, PRESETS, shapes_named

        job, recorder, chosen = self.job, self.recorder, self.job.specs or PRESETS
        if job.engine != "cuda":
            raise UnsupportedError(f"--engine {job.engine}: there are no such kernels; use cuda, or leave it out.")
        if job.what == "decode":
            also = [(split_specs(names), at) for names, _, at in (text.partition("@") for text in job.also or ())]
            for spec in chain.from_iterable(some for some, _ in also):
                get(spec)
            whole = [(job.specs or [*PRESETS, KMEANS], job.shapes or DECODE_SHAPES)]
            cases = (whole if job.shapes or not job.also else []) + also
            for some, shapes in [(some, shapes_named(at)) for some, at in cases]:
                decode.decode_rows(some, shapes, recorder)
        elif job.what == "encode":
            encode.encode_rows(chosen, recorder, *(encode.encode_shapes(job.shapes) if job.shapes else ()))
        elif job.what == "prefill":
            prefill.prefill_rows(chosen, prefill.prefill_shapes(job.shapes or "all"), recorder)
        elif job.what == "first":
            first.first_rows(job.specs or first.served(), recorder)
        else:
            generate.generate_rows(
                chosen,
                recorder,
                batches=generate.batches_of(job.shapes) if job.shapes else generate.BATCHES,
                ways=job.ways.split(",") if job.ways else generate.WAYS,
                lock=generate.GpuLock(Path(job.turns) if job.turns else None),
                dense=not job.no_dense,
            )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'spec':<20} {'bits':>6}  {'metric':<20} {'p20':>12} {'p50':>12} {'p80':>12}  {'unit':<8}  shape"]
    for r in rows:
        values = " ".join(f"{(r['values'] or {}).get(p, float('nan')):>12.4g}" for p in ("p20", "p50", "p80"))
        bits = "-" if r.get("effective_bits") is None else f"{r['effective_bits']:.2f}"
        lines.append(f"{r['spec']:<20} {bits:>6}  {r['metric']:<20} {values}  {r['unit']:<8}  {r['shape']}")
    return "\n".join(lines)
