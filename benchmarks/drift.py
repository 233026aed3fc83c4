"""Error of decode attention over long caches of distinct tokens, beside that of bf16 SDPA, on one GPU.

    PYTHONPATH=src python benchmarks/drift.py --out DIR [--specs A,B] [--tokens 8192,65536] [--batches 1,32]

Every preset with kernels, 8k to 128k tokens, 1 to 32 sequences of 32 query heads over 8 KV heads of 128: Gaussian keys
and values, all tokens distinct, appended in chunks to a ``FusedLayerCache``. Attention, and bf16 SDPA over the same
decoded keys and values, is compared with float64 over them, at a few sequences and heads. Queries are scaled to three
kinds of attention: ``diffuse`` (scores of 0.1, the output is a mean of nearly all tokens and small, so that whatever is
one-sided shows), ``plain`` and ``sharp`` (a few tokens count).

A row passes if the error is at most ``LIMIT`` times that of bf16 SDPA, and ``SLACK``. ``bias`` is the mean error over
the mean absolute error: near 1 or -1 where the error is one-sided. Rows go to ``DIR/drift.<worker>.jsonl`` as they are
measured and to ``DIR/drift.json``; the same call again goes on. Exit status 1: a row failed.
"""

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvcodec
from kvcodec.attention import rounded_queries
from kvcodec.cache.device import DeviceCache
from kvcodec.cache.fused import FusedLayerCache, fused_refusal
from kvcodec.cli.page.rows import read_rows
from kvcodec.cli.stamp import stamp
from kvcodec.errors import KVError, UnsupportedError
from kvcodec.registry import split_specs
from kvcodec_lab.bench.record import Deadline, Recorder, device_lost

LAYER, LAYERS = 16, 32
"""A middle layer: presets that hold the outer layers dense pack this one."""
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOKENS = (8192, 32768, 65536, 131072)
BATCHES = (1, 8, 32)
SCALES = {"diffuse": 0.1, "plain": 1.0, "sharp": 4.0}
LIMIT, SLACK = 1.5, 2e-4
CHUNK_ELEMENTS, CHUNK_TOKENS = 1 << 27, 16384
"""Most elements and tokens that are drawn, and tokens that are decoded, at a time."""
DEVICE_LOST = 3


class Heads(NamedTuple):
    """Heads of a cache; the tests use fewer."""

    query: int = QUERY_HEADS
    kv: int = KV_HEADS
    dim: int = HEAD_DIM


class Found(NamedTuple):
    """Relative errors over all heads looked at, and how one-sided ours is."""

    error: float
    bf16_error: float
    bias: float

    @property
    def ratio(self) -> float:
        return self.error / self.bf16_error

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= LIMIT * self.bf16_error + SLACK


def filled(
    spec: str, batch: int, tokens: int, heads: Heads, device: torch.device, seed: int, most: int | None = None
) -> DeviceCache:
    """Return a cache of distinct tokens, encoded chunk by chunk; ``most``: of a full cache's capacity, but no more."""
    generator = torch.Generator(device).manual_seed(seed)
    chunk = max(64, min(CHUNK_TOKENS, CHUNK_ELEMENTS // (batch * heads.kv * heads.dim)))
    scheme = kvcodec.get(spec).for_layer(LAYER, LAYERS)
    static = not fused_refusal(scheme, heads.dim, device, tokens)
    cache = FusedLayerCache(scheme, layer=LAYER, capacity=tokens if static else 0)
    last = min(tokens, most or tokens)
    for at in range(0, last, chunk):
        size = (batch, heads.kv, min(chunk, last - at), heads.dim)
        k, v = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in "kv")
        cache.append(k, v)
    return cache


def units(batch: int, kv_heads: int) -> list[tuple[int, int]]:
    """Sequences and KV heads to look at: first, middle and last of both, two heads of a sequence."""
    sequences = sorted({0, batch // 2, batch - 1})
    return [(b, h % kv_heads) for i, b in enumerate(sequences) for h in dict.fromkeys((i, kv_heads - 1 - i))]


def decoded(cache: DeviceCache, chosen: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of some sequences and heads, float32 ``[T, D]``; the cache keeps those sequences alone."""
    sequences = sorted({b for b, _ in chosen})
    cache.select(torch.tensor(sequences))
    cache._dtype = torch.float32  # what the codec decodes to, not that rounded to the model's dtype
    parts: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in chosen]
    for at in range(0, len(cache), CHUNK_TOKENS):
        both = cache.decode(at, min(at + CHUNK_TOKENS, len(cache)))
        for (b, h), kept in zip(chosen, parts, strict=True):
            for x, to in zip(both, kept, strict=True):
                to.append(x[sequences.index(b), h].clone())
    return [(torch.cat(k), torch.cat(v)) for k, v in parts]


@torch.no_grad()
def errors(cache: DeviceCache, heads: Heads, seed: int) -> dict[str, Found]:
    """Compare attention with float64 over what the cache decodes to; the cache is of no use afterwards."""
    chosen, group = units(cache.batch, heads.kv), heads.query // heads.kv
    device = cache.roles["key"].sink.device
    generator = torch.Generator(device).manual_seed(seed + 1)
    size = (cache.batch, heads.query, 1, heads.dim)
    q = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
    asked = {name: (q * scale).bfloat16() for name, scale in SCALES.items()}
    found = {name: cache.attend(x) for name, x in asked.items()}
    state = cache.roles["key"]
    seen = asked
    if state.params is not None:
        seen = {name: rounded_queries(x, state.codec, state.params, heads.kv) for name, x in asked.items()}
    sums = {name: [0.0] * 4 for name in SCALES}
    for (b, h), (k, v) in zip(chosen, decoded(cache, chosen), strict=True):
        rows = slice(h * group, (h + 1) * group)
        short, exact = [x.bfloat16()[None, None] for x in (k, v)], (k.double(), v.double())
        for name, x in seen.items():
            one = x[b, rows, 0]
            weights = torch.softmax(one.double() @ exact[0].T * heads.dim**-0.5, -1)
            want = weights @ exact[1]
            low = scaled_dot_product_attention(one.bfloat16()[None, None], short[0], short[1])[0, 0]
            wrong, size_of = found[name][b, rows, 0].double() - want, want.norm() ** 2
            squares = wrong.norm() ** 2 / size_of, (low.double() - want).norm() ** 2 / size_of
            for i, part in enumerate((*squares, wrong.sum(), wrong.abs().sum())):
                sums[name][i] += float(part)
    return {
        name: Found(math.sqrt(ours / len(chosen)), math.sqrt(low / len(chosen)), one_sided / max(absolute, 1e-30))
        for name, (ours, low, one_sided, absolute) in sums.items()
    }


def rows_of(
    specs: Sequence[str],
    recorder: Recorder,
    *,
    tokens: Sequence[int] = TOKENS,
    batches: Sequence[int] = BATCHES,
    device: torch.device,
    heads: Heads | None = None,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure every spec at every length and batch that the recorder does not hold; rows as they are measured."""
    heads, deadline = heads or Heads(), deadline or Deadline()
    for spec in specs:
        for batch in batches:
            for n in tokens:
                name = f"drift_b{batch}_{n}"
                if recorder.has(spec, f"drift_{[*SCALES][-1]}", name) or deadline.passed:
                    continue
                sizes = {"batch": batch, "query_heads": heads.query, "kv_heads": heads.kv, "head_dim": heads.dim,
                         "tokens": n}  # fmt: skip
                bits, begun = None, time.monotonic()
                try:
                    cache = filled(spec, batch, n, heads, device, seed)
                    bits = sum(cache.nbytes().values()) * 8 / cache.elements()
                    path = cache.kernels().get("decode")
                    found = errors(cache, heads, seed)
                except (
                    KVError,
                    RuntimeError,
                    ValueError,
                ) as error:  # a row, and on
                    lost = device_lost(device)
                    kind = "device lost" if lost else "no kernel" if isinstance(error, UnsupportedError) else "failed"
                    if isinstance(error, torch.OutOfMemoryError):
                        kind = "too large for this GPU's memory"
                    status = f"{kind}: {type(error).__name__}: {str(error)[:200]}"
                    yield recorder.add(spec, bits, "drift", "x", name, None, status=status, sizes=sizes)
                    if lost:
                        raise
                    continue
                finally:
                    cache = None
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                seconds = round(time.monotonic() - begun, 2)
                for kind, one in found.items():
                    values = dict.fromkeys(("p20", "p50", "p80"), round(one.ratio, 4))
                    more = {"error": one.error, "bf16_error": one.bf16_error, "bias": round(one.bias, 3),
                            "passed": one.passed, "path": path, "seconds": seconds, "sizes": sizes}  # fmt: skip
                    yield recorder.add(spec, bits, f"drift_{kind}", "x", name, values, **more)


def served(device: torch.device) -> list[str]:
    """Presets whose middle layers kernels serve; ``dense`` is what they are compared with."""
    found = []
    for spec in kvcodec.presets():
        if spec != "dense" and not fused_refusal(kvcodec.get(spec).for_layer(LAYER, LAYERS), HEAD_DIM, device):
            found.append(spec)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Worst ratio over presets and kinds of attention by shape, and every row that fails."""
    measured = [row for row in rows if row["values"] is not None]
    lines = []
    for row in sorted((r for r in measured if not r["passed"]), key=lambda r: -r["values"]["p50"]):
        lines.append(
            f"FAILED {row['spec']:<22} {row['shape']:<20} {row['metric']:<14} {row['error']:.4f} / "
            f"{row['bf16_error']:.4f} = {row['values']['p50']:.2f}, bias {row['bias']:+.2f}"
        )
    for shape in dict.fromkeys(row["shape"] for row in measured):
        here = max((r for r in measured if r["shape"] == shape), key=lambda r: r["values"]["p50"])
        lines.append(f"{shape:<20} worst {here['values']['p50']:.2f} ({here['spec']}, {here['metric']})")
    lines += [f"{r['spec']} {r['shape']}: {r['status']}" for r in rows if r["values"] is None]
    presets = {row["spec"] for row in measured}
    failed = sum(not row["passed"] for row in measured)
    return "\n".join([*lines, f"{len(presets)} presets, {len(measured)} rows, {failed} failed"])


def shared_out(specs: list[str], args: argparse.Namespace, given: list[str]) -> None:
    """Measure in some processes at a time: most of the time is compiling and launching."""
    end = time.monotonic() + args.deadline

    def work(i: int, share: list[str]) -> None:
        command = [sys.executable, __file__, *given, "--specs", ",".join(share), "--worker", str(i)]
        while (left := end - time.monotonic()) > 10:
            status = subprocess.run([*command, "--deadline", str(int(left))], check=False).returncode
            if status != DEVICE_LOST:  # else again: the cell that broke the device is left out
                return

    threads = [threading.Thread(target=work, args=(i, specs[i :: args.workers])) for i in range(args.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # alone on the GPU: what did not fit beside the others; one process for each file
    for i in range(args.workers):
        if any("too large" in str(row.get("status")) for row in latest(args.out, [i])):
            work(i, specs[i :: args.workers])


def latest(out: Path, workers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the workers; a status counts only where nothing was measured later."""
    paths = [path for i in workers if (path := out / f"drift.{i}.jsonl").is_file()]
    rows = read_rows(paths)
    done = {(row["spec"], row["shape"]) for row in rows if row["values"] is not None}
    kept = {(r["spec"], r["shape"], r["metric"]): r for r in rows}
    return [r for r in kept.values() if r["values"] is not None or (r["spec"], r["shape"]) not in done]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows")
    parser.add_argument("--specs", help="comma-separated; default: every preset with kernels")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS), help="(%(default)s)")
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="processes that share the GPU (%(default)s)")
    parser.add_argument("--deadline", type=float, default=540, help="seconds (%(default)s)")
    parser.add_argument("--commit", help="stamped on the rows (what git says)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker is not None:
        recorder = Recorder(args.out / f"drift.{args.worker}.jsonl", stamp(device, 0, args.commit), print)
        more = {"tokens": args.tokens, "batches": args.batches, "deadline": Deadline(args.deadline)}
        try:
            for _ in rows_of(split_specs(args.specs), recorder, device=device, **more):
                pass
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return DEVICE_LOST
        return 0
    print(f"kvcodec of {Path(kvcodec.__file__).parent}", flush=True)
    given = ["--out", str(args.out), "--tokens", ",".join(map(str, args.tokens))]
    given += ["--batches", ",".join(map(str, args.batches)), *(["--commit", args.commit] if args.commit else [])]
    shared_out(split_specs(args.specs) if args.specs else served(device), args, given)
    rows = latest(args.out, range(args.workers))
    (args.out / "drift.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(table(rows))
    return 1 if any(row["values"] is None or not row["passed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
