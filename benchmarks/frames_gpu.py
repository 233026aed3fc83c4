"""Attention of a video frame's queries over packed history, and an audio model's step, on a GPU, beside bf16.

    python benchmarks/frames_gpu.py [--out FILE] [--specs saw-int4,octopus-3]

- ``frame``: the newest frame's 1,560 queries over the 32,760 tokens of a full ``FrameCache`` of 21 frames, 16 heads of
  64 (a Wan-1.3B frame in OCTOPUS's Sec. 4.3), for the presets as they are (every token packed that they pack) beside
  flash attention and cuDNN's over bf16 K and V. ``by``: whose attention ran over what was unpacked, by its kernel's
  name.
- ``plan``: milliseconds of cuDNN's first call for a length, in which it plans, and of the second one.
- ``roll``: append a frame to 21 held, evict the oldest, with one frame as sink and one as window.
- ``step``: one query over 455 tokens, 16 heads of 64 (an audio model), 1 and 64 streams.

``us`` is the median of one call in a CUDA graph, ``eager_us`` outside one, both with a dirty L2 cache, in microseconds;
``vs_flash`` and ``vs_bf16`` are how many times as fast as bf16's flash attention and as bf16's fastest, in graphs. Each
is checked first: the largest difference of 64 queries from float32 attention over the decoded tokens, relative to the
root mean square of the output.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity, profile

import kvcodec
from kvcodec.cache.fused import FusedLayerCache
from kvcodec.cli.stamp import stamp
from kvcodec_lab.bench.timing import Timer

HEADS, DIM, FRAME, FRAMES, AUDIO = 16, 64, 1560, 21, 455


def bf16(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    def through(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return call

    calls = {"bf16 flash": through(SDPBackend.FLASH_ATTENTION)}
    try:
        through(SDPBackend.CUDNN_ATTENTION)()
    except RuntimeError:  # this cuDNN does not take the shape
        return calls
    return {**calls, "bf16 cudnn": through(SDPBackend.CUDNN_ATTENTION)}


def error(out: Tensor, q: Tensor, cache: Any) -> float:
    """Largest difference from float32 attention over what the cache decodes to, over the output's root mean square."""
    k, v = (x.float() for x in cache.decode())
    wanted = sdpa(q[:, :, :64].float(), k, v)
    return float((out[:, :, :64].float() - wanted).abs().max() / wanted.pow(2).mean().sqrt())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)


def show(row: dict[str, Any]) -> dict[str, Any]:
    print({k: round(x, 3) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    return row


def ran_by(call: Callable[[], Any]) -> str:
    """Whose attention a call runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in seen.key_averages())
    return " ".join(name for name in ("cudnn", "flash_fwd") if name in names)


def filled(name: str, spec: str, k: Tensor, v: Tensor) -> tuple[Any, Any]:
    """A cache that holds the tokens, and the cache that holds it: of frames, the first of which was evicted again."""
    cache: Any = FusedLayerCache(kvcodec.get(spec).for_layer(8, 24))
    if name != "frame":
        cache.append(k, v)
        return cache, cache
    video = kvcodec.FrameCache(cache, tokens=FRAME, frames=FRAMES)
    for first in (0, *range(0, k.shape[2], FRAME)):
        video.append(*(x[:, :, first : first + FRAME] for x in (k, v)))
    return cache, video


@torch.inference_mode()
def planning() -> dict[str, Any]:
    """Milliseconds of the first two calls of cuDNN's attention for a length, after calls for another length."""
    q, (k, v) = drawn(1, HEADS, FRAME, DIM), drawn(2, 1, HEADS, (FRAMES - 1) * FRAME, DIM).unbind(0)
    times = []
    for tokens in (k.shape[2] - FRAME, k.shape[2], k.shape[2]):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            sdpa(q, k[:, :, :tokens], v[:, :, :tokens])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return show({"part": "plan", "tokens": k.shape[2], "ms": times[1], "again_ms": times[2]})


@torch.inference_mode()
def attention(timer: Timer, name: str, specs: list[str], batch: int, tokens: int, queries: int) -> list[dict[str, Any]]:
    k, v = drawn(2, batch, HEADS, tokens, DIM).unbind(0)
    q = drawn(batch, HEADS, queries, DIM, seed=1)
    calls, about = bf16(q, k, v), dict[str, dict[str, Any]]()
    for spec in specs:
        cache, of = filled(name, spec, k, v)

        def call(of: Any = of) -> Tensor:
            return of.attend(q)  # type: ignore[no-any-return]

        about[spec] = {"error": error(call(), q, cache), "bytes": sum(cache.nbytes().values())}
        if name == "frame":
            about[spec]["by"] = ran_by(call)
        calls[spec] = call
    times = {spec: timer.cold(call)["p50"] for spec, call in calls.items()}
    least = min(us for name, us in times.items() if name.startswith("bf16"))
    shape = {"batch": batch, "heads": HEADS, "head_dim": DIM, "tokens": tokens, "queries": queries}
    rows = []
    for spec, us in times.items():
        speed = {"us": us, "vs_bf16": least / us, "vs_flash": times["bf16 flash"] / us}
        speed["eager_us"] = timer.eager(calls[spec], 20)["p50"]
        rows.append(show({"part": name, **shape, "spec": spec, **speed, **about.get(spec, {"bytes": 2 * k.nbytes})}))
    return rows


@torch.inference_mode()
def rolling(timer: Timer, spec: str, steps: int) -> dict[str, Any]:
    """Roll, compare with an oracle of the frames held, and time appends."""
    scheme = replace(kvcodec.get(spec).for_layer(8, 24), sink=FRAME, window=FRAME)
    video = kvcodec.FrameCache(FusedLayerCache(scheme), tokens=FRAME, frames=FRAMES, sinks=1)
    sizes, times, given = set(), [], []
    for i in range(steps):
        k, v = drawn(2, 1, HEADS, FRAME, DIM, seed=i).unbind(0)
        given.append((k, v))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        video.append(k, v)
        end.record()
        end.synchronize()
        if i > FRAMES + 1:
            times.append(1e3 * begin.elapsed_time(end))
            sizes.add(video.cache.store.pages.shape[0])  # type: ignore[union-attr]
    oracle = FusedLayerCache(scheme)
    oracle.append(*(torch.cat(list(x), 2) for x in zip(*given, strict=True)))
    at = (torch.tensor(video.held)[:, None] * FRAME + torch.arange(FRAME)).flatten().cuda()
    same = [torch.equal(a, b[:, :, at]) for a, b in zip(video.cache.decode(), oracle.decode(), strict=True)]
    q = drawn(1, HEADS, FRAME, DIM, seed=99)
    row = {
        "part": "roll", "spec": spec, "frames": steps, "us": statistics.median(times), "equal_oracle": all(same),
        "pages": sorted(sizes), "error": error(video.attend(q), q, video.cache),
        "attend_us": timer.cold(lambda: video.attend(q))["p50"],
    }  # fmt: skip
    return show(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", default="saw-int4,octopus-4,octopus-3,octopus-2,turboquant-3,int-8")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    specs, rows = given.specs.split(","), list[dict[str, Any]]()
    timer = Timer()
    rows.append(planning())
    rows += attention(timer, "frame", specs, 1, FRAME * FRAMES, FRAME)
    rows += attention(timer, "step", specs, 64, AUDIO, 1)
    rows += attention(timer, "step", specs, 1, AUDIO, 1)
    rows += [rolling(timer, spec, 60) for spec in ("saw-int4", "octopus-3")]
    if given.out:
        about = {**stamp(torch.device("cuda"), 0), "rows": rows}
        given.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
