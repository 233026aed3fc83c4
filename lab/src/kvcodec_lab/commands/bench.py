"""``kvcodec bench``: times of encode, decode and attention on this machine, and of servers."""

import argparse
from typing import Any

from kvcodec.cli.arguments import add_device, add_head_dim, add_seed, positive, specs
from kvcodec.cli.result import Result, collected
from kvcodec.errors import KVError


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from kvcodec_lab.bench import PARTS, command

    p.add_argument(
        "what",
        nargs="?",
        choices=("cache", "codec", *PARTS, "serve", "page"),
        default="cache",
        help="cache: append, decode and attend beside SDPA (default); codec: encode and decode of K and V, tokens/s, "
        "beside int-4, exhaustive searches, hqq and quanto (--batch, --query-heads and --dtype do not apply); decode, "
        "encode, prefill, generate, first: the GPU's kernels beside 16-bit attention, with --device cuda (first: time "
        "to the first token of a new cache, and of later turns); decode --device cpu: the CPU's kernels beside "
        "PyTorch's attention, and llama.cpp's and transformers' quantized caches where they are installed "
        "(--no-libraries: without them); serve: load on a running OpenAI-compatible server at "
        "URL, or on servers that --start names; page: the page of a run's folder",
    )
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
    command.add_arguments(p)


def run(args: argparse.Namespace) -> Result | int:
    """Run the bench that ``args.what`` names."""
    import kvcodec
    from kvcodec.progress import Progress
    from kvcodec_lab.bench import command
    from kvcodec_lab.bench.cache import cache_rows
    from kvcodec_lab.bench.codec import codec_rows

    if args.url is not None and args.what != "serve":
        raise KVError(f"bench {args.what} takes no address; {args.url!r} would be that of bench serve.")
    if args.what == "serve":
        from kvcodec_lab.serve import command as serve

        outcome = serve.run(args, Progress())
        return Result(outcome.rows, serve.text(outcome.rows), outcome.status)
    if args.what in ("cache", "codec") or (args.what, args.device) == ("decode", "cpu"):
        command.check_on_cpu(args)
    if args.what == "decode" and args.device == "cpu":
        for spec in args.specs or ():
            kvcodec.get(spec)
        from kvcodec_lab.bench.cpu_decode import PRESETS, decode_rows

        sizes = {name: getattr(args, name) for name in ("batch", "kv_heads", "query_heads", "head_dim", "tokens")}
        more = {"repeats": args.repeats, "seed": args.seed, "progress": Progress().say}
        rows = collected(decode_rows(args.specs or PRESETS, libraries=not args.no_libraries, **sizes, **more))
        return Result(rows, text(rows))
    if args.what not in ("cache", "codec"):
        found = command.run(args, Progress().say)
        return found if isinstance(found, int) else Result(found, text(found))
    shape = {"kv_heads": args.kv_heads, "head_dim": args.head_dim, "tokens": args.tokens}
    common = {"device": args.device, "repeats": args.repeats, "seed": args.seed, "progress": Progress().say}
    if args.what == "codec":
        rows = collected(codec_rows(args.specs or kvcodec.presets(), **shape, **common))
    else:
        heads = {"batch": args.batch, "query_heads": args.query_heads, "dtype": args.dtype}
        rows = collected(cache_rows(args.specs or ["dense", "saw-int4"], **heads, **shape, **common))
    return Result(rows, text(rows))


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table of a bench's rows for a terminal."""
    lines = [f"{'spec':<20} {'bits':>6}  {'metric':<20} {'p20':>12} {'p50':>12} {'p80':>12}  unit"]
    for r in rows:
        values = " ".join(f"{(r['values'] or {}).get(p, float('nan')):>12.4g}" for p in ("p20", "p50", "p80"))
        bits = r.get("effective_bits")
        held = "-" if bits is None else f"{bits:.2f}"
        lines.append(f"{r['spec']:<20} {held:>6}  {r['metric']:<20} {values}  {r['unit']}")
    return "\n".join(lines)
