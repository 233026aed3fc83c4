"""Decode attention of two checkouts in one visit to a GPU: the same caches, in processes that take turns.

    PYTHONPATH=src python benchmarks/beside.py --other PATH --out DIR [--specs A,B] [--shapes spine,corners]

``PATH`` is another checkout, whose own ``benchmarks/beside.py`` times it. Caches of distinct Gaussian tokens are filled
by ``append`` and ``attend`` is timed as users get it, in a CUDA graph, cold and warm (``packedkv_lab.bench.timing``),
beside the fastest bf16 attention of the same process (cuDNN, flash and, where it can be imported, FlashAttention-3).
Rounds go this, other, other, this, ...; the table has the medians of all rounds: microseconds, this / other (below 1:
this one is faster), bf16 / this, and the share of the GPU's memory bandwidth that reading all bytes of the cache once
comes to. Kernels of both are compiled before, several at a time.

Rows go to ``DIR/beside.jsonl``. Without ``--other`` this checkout alone is timed.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkout import ROOT, environment

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.errors import KVError
from packedkv.kernels.choose import refusal
from packedkv.registry import split_specs
from packedkv.store.site import LayerSite
from packedkv_lab.bench.rivals import MOST_ERROR, Dense, library_rivals, torch_rivals
from packedkv_lab.bench.shapes import Shape

BANDWIDTH = {"H200": 4.8e6, "H100": 3.35e6}
"""Bytes a microsecond, as the data sheets say."""
STATES = ("cold", "warm")
COMPILED_TOKENS = 64
DEVICE = "cuda"
LAYER, LAYERS = 16, 32
"""A middle layer: presets that hold the outer layers dense pack this one."""
CHUNK_ELEMENTS, CHUNK_TOKENS = 1 << 27, 16384
"""Most elements and tokens that are sampled at a time."""


class Heads(NamedTuple):
    """Heads of a cache."""

    query: int
    kv: int
    dim: int


def filled(
    spec: str, batch: int, tokens: int, heads: Heads, device: torch.device, seed: int, most: int | None = None
) -> FusedLayerCache:
    """Return a cache of distinct tokens, encoded chunk by chunk; ``most``: of a full cache's capacity, but no more."""
    generator = torch.Generator(device).manual_seed(seed)
    chunk = max(64, min(CHUNK_TOKENS, CHUNK_ELEMENTS // (batch * heads.kv * heads.dim)))
    scheme = packedkv.get(spec).for_layer(LAYER, LAYERS)
    static = not refusal(scheme, heads.dim, device, static=True)
    cache = FusedLayerCache(LayerSite(scheme, LAYER), capacity=tokens if static else 0)
    last = min(tokens, most or tokens)
    for at in range(0, last, chunk):
        size = (batch, heads.kv, min(chunk, last - at), heads.dim)
        k, v = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in "kv")
        cache.append(k, v)
    return cache


def rival(shape: Shape, timer: Any) -> dict[str, Any]:
    """Fastest bf16 attention by state, and who it was."""
    dense = Dense(shape, torch.device(DEVICE))
    libraries = (r for r in library_rivals(dense) if r.bits == 16 and r.backend.startswith("flash-attention-3"))
    found: dict[str, Any] = {}
    for one in (*torch_rivals(dense), *libraries):
        try:
            call = one.make()
            if not dense.error_of(call()) <= MOST_ERROR[16.0]:
                continue
            times = timed(call, shape, timer)
        except Exception as error:  # what is not installed, or does not take the shape
            print(f"{shape.name}: {one.backend}, {one.form}: {type(error).__name__}", file=sys.stderr)
            continue
        for state in STATES:
            if times[state] < found.get(state, (1e30, ""))[0]:
                found[state] = times[state], f"{one.backend}, {one.form}"
    return found


def timed(call: Any, shape: Shape, timer: Any) -> dict[str, float]:
    """Medians in microseconds."""
    one = shape.batch == 1
    return {"cold": timer.cold(call, 60 if one else 24)["p50"], "warm": timer.warm(call, 20 if one else 6)["p50"]}


@torch.no_grad()
def worker(specs: Sequence[str], shapes: Sequence[Shape], end: float, compiling: bool) -> Iterator[dict[str, Any]]:
    """Time every spec at every shape; or only call everything once."""
    device = torch.device(DEVICE)
    timer = None if compiling else importlib.import_module("packedkv_lab.bench.timing").Timer(device)
    for shape in shapes:
        bf16 = {} if compiling or time.time() > end else rival(shape, timer)
        heads = Heads(shape.query_heads, shape.kv_heads, shape.head_dim)
        for spec in specs:
            if time.time() > end:
                print(f"out of time before {spec} at {shape.name}", file=sys.stderr)
                return
            row: dict[str, Any] = {"spec": spec, "shape": shape.name, "gpu": torch.cuda.get_device_name()}
            try:
                most = COMPILED_TOKENS if compiling else None
                cache = filled(spec, shape.batch, shape.tokens, heads, device, 0, most)
                size = (shape.batch, shape.query_heads, 1, shape.head_dim)
                q = torch.randn(size, device=device, dtype=torch.bfloat16)
                if compiling:
                    cache.attend(q)
                    continue
                row |= {f"{state}_us": us for state, us in timed(lambda: cache.attend(q), shape, timer).items()}  # noqa: B023
                row |= {"bytes": sum(cache.nbytes().values()), "path": cache.kernels().get("decode")}
                row |= {f"bf16_{state}_us": us for state, (us, _) in bf16.items()}
                row |= {f"bf16_{state}": who for state, (_, who) in bf16.items()}
            except (KVError, RuntimeError) as error:
                row["status"] = f"{type(error).__name__}: {str(error)[:200]}"
            cache = None  # before the next one is filled
            if not compiling:
                yield row
        torch.cuda.empty_cache()


def start(checkout: Path, more: list[str]) -> subprocess.Popen[str]:
    """Start the script of a checkout with the library of the same checkout."""
    command = [sys.executable, str(checkout / "benchmarks/beside.py"), *more]
    return subprocess.Popen(command, env=environment(checkout), stdout=subprocess.PIPE, text=True)


def described(shapes: Sequence[Shape]) -> str:
    """Shapes as another checkout reads them, which may not know their names."""
    return json.dumps([[s.name, s.batch, s.query_heads, s.kv_heads, s.head_dim, s.tokens] for s in shapes])


def compile_all(checkouts: dict[str, Path], specs: list[str], shapes: Sequence[Shape], end: float) -> None:
    """Call everything once on a nearly empty cache, in several processes."""
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    for path in checkouts.values():
        begun, shares = time.time(), [specs[i::workers] for i in range(workers)]
        common = ["--shapes-json", described(shapes), "--end", str(end), "--compile", "--specs"]
        processes = [start(path, [*common, ",".join(share)]) for share in shares if share]
        for process in processes:
            process.communicate()
        print(f"{path}: compiled in {time.time() - begun:.0f} s", flush=True)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line per spec and shape."""
    lines = [
        f"{'shape':<18} {'spec':<22} {'path':<7} {'other':>8} {'this':>8} {'cold':>6} {'warm':>6} {'bf16 x':>7} "
        f"{'warm x':>7} {'share':>6} {'warm':>6}"
    ]

    def median(label: str, spec: str, shape: str, key: str) -> float:
        found = [r[key] for r in rows if (r["label"], r["spec"], r["shape"]) == (label, spec, shape) and key in r]
        return statistics.median(found) if found else float("nan")

    slower = []
    for shape, spec in dict.fromkeys((r["shape"], r["spec"]) for r in rows):
        status = next((r for r in rows if (r["shape"], r["spec"]) == (shape, spec) and "status" in r), None)
        if status:
            lines.append(f"{shape:<18} {spec:<22} {status['label']}: {status['status']}")
            continue
        this, other = ({k: median(label, spec, shape, f"{k}_us") for k in STATES} for label in ("this", "other"))
        mine = next((r for r in rows if (r["shape"], r["spec"], r["label"]) == (shape, spec, "this")), None)
        if mine is None:
            continue
        bandwidth = next((b for name, b in BANDWIDTH.items() if name in mine["gpu"]), float("nan"))
        bf16 = {k: median("this", spec, shape, f"bf16_{k}_us") / this[k] for k in STATES}
        share = {k: mine["bytes"] / bandwidth / this[k] for k in STATES}
        ratio = {k: this[k] / other[k] for k in STATES}
        lines.append(
            f"{shape:<18} {spec:<22} {mine['path'] or '':<7} {other['cold']:8.1f} {this['cold']:8.1f} "
            f"{ratio['cold']:6.3f} {ratio['warm']:6.3f} {bf16['cold']:7.2f} {bf16['warm']:7.2f} "
            f"{share['cold']:6.0%} {share['warm']:6.0%}"
        )
        if ratio["cold"] > 1.03:
            slower.append(f"{spec} at {shape}: {ratio['cold']:.3f}")
    return "\n".join([*lines, *(f"SLOWER by more than 3 %: {one}" for one in slower)])


def rounds(count: int, labels: Sequence[str]) -> list[str]:
    """Order of the processes: there and back, so that a drift of the clocks hits both.

    >>> rounds(2, ["this", "other"])
    ['this', 'other', 'other', 'this']
    """
    return [label for i in range(count) for label in (labels if i % 2 == 0 else labels[::-1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--out", type=Path, help="folder for rows")
    parser.add_argument("--specs", help="comma-separated; default: what the benches time")
    parser.add_argument("--shapes", default="spine,corners", help="names or groups (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each checkout (%(default)s)")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything (%(default)s)")
    parser.add_argument("--compiled", action="store_true", help="the kernels are compiled already")
    parser.add_argument("--shapes-json", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shapes_json:
        shapes = [Shape(*sizes) for sizes in json.loads(args.shapes_json)]
        for row in worker(split_specs(args.specs), shapes, args.end, args.compile):
            print(json.dumps(row), flush=True)
        return 0
    from packedkv_lab.bench.shapes import PRESETS, shapes_named  # this checkout's, which knows the corners

    specs = split_specs(args.specs) if args.specs else list(PRESETS)
    shapes, end = shapes_named(args.shapes), time.time() + args.deadline
    checkouts = {"this": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    if not args.compiled:
        compile_all(checkouts, specs, shapes, end)
    rows: list[dict[str, Any]] = []
    for i, label in enumerate(rounds(args.rounds, list(checkouts))):
        # each process gets an equal part of what is left, so that no round is missing
        left = (end - time.time()) / (args.rounds * len(checkouts) - i)
        more = ["--shapes-json", described(shapes), "--end", str(time.time() + left), "--specs", ",".join(specs)]
        begun, process = time.time(), start(checkouts[label], more)
        assert process.stdout is not None
        for line in process.stdout:
            row = {"label": label, "round": i, **json.loads(line)}
            rows.append(row)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                with (args.out / "beside.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        print(f"{label}: exit {process.wait()}, {time.time() - begun:.0f} s", flush=True)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
