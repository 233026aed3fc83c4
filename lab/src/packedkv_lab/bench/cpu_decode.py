"""``packedkv bench decode --device cpu``: attention of the CPU kernels beside PyTorch's without compression.

- ``attend_us``: attention of one new query per sequence over all tokens
- ``speedup_vs_sdpa``, ``speedup_vs_two_matmuls``: time of float32 SDPA, and of the faster arrangement of two float32
  matrix products, over it, round by round
- ``read_share``: bytes that it must read / its time / bytes that a sum over memory reads per second

Specs ``sdpa``, ``two-matmuls`` and ``two-matmuls-kt`` (keys transposed) are not compressed. ``path`` is the instruction
set of the kernels, ``torch``, or another library. A run of tokens is encoded once and its bytes repeated.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cache.layer import LayerCache, attend
from packedkv.errors import KVError, UnsupportedError
from packedkv.kernels.cpu import library
from packedkv.registry import get
from packedkv.store.site import LayerSite
from packedkv_lab.bench.cache import AGREEMENT, drawn
from packedkv_lab.bench.packed import decided, mean_of
from packedkv_lab.bench.record import Recorder, status_of
from packedkv_lab.bench.rivals import cpu_rivals
from packedkv_lab.bench.shapes import Shape
from packedkv_lab.bench.timing import in_turn, ratios, spread

PRESETS = (
    "saw-int4", "int-4", "turboquant-4", "ultraquant", "octopus-4", "octopus-3", "octopus-2", "hqmq-s24_r3",
    "hqmq-s96_r4", "kivi-4", "kivi-2", "innerq-base", "fp8", "int-8", "saw-int4:mean=pre", "ghost-4", "ghost-3",
)  # fmt: skip
ENCODED = 2048
"""Tokens that are encoded."""
READ_BYTES = 256 << 20
BASES = {"sdpa": 32.0, "sdpa bfloat16": 16.0, "two-matmuls": 32.0, "two-matmuls-kt": 32.0}
"""Bits of the jobs without compression."""


def cpu_decode_rows(specs: Sequence[str], shape: Shape, recorder: Recorder, *, repeats: int = 9) -> None:
    """Time presets and rivals at one shape, in ``repeats`` rounds after a warm-up; rows come after all rounds."""
    if reason := library.refusal(torch.device("cpu")):
        raise UnsupportedError(f"bench decode: {reason}.")
    q, k, v = drawn(shape, recorder.seed)
    jobs, bits = _torch_jobs(q, k, v), dict(BASES)
    for spec in specs:
        recorder.say(f"{spec}: encoding")
        cache = _filled(spec, k, v, shape.tokens)
        _check(spec, k[:, :, :ENCODED], v[:, :, :ENCODED], q)
        bits[spec] = sum(cache.nbytes().values()) * 8 / cache.elements()
        jobs[spec] = lambda cache=cache: cache.attend(q)  # type: ignore[misc]
    paths = dict.fromkeys(jobs, library.variant()) | dict.fromkeys(BASES, "torch")
    versions: dict[str, dict[str, str]] = {}
    for rival in cpu_rivals() if recorder.libraries else ():
        if rival.missing:
            recorder.say(f"{rival.spec}: {rival.package} is not installed, left out")
            continue
        recorder.say(f"{rival.spec}: preparing")
        try:
            jobs[rival.spec], bits[rival.spec] = rival.checked(q, k, v)
        except KVError:
            raise
        except Exception as error:  # e.g. no compiler for torch.compile; the others are timed
            recorder.say(f"{rival.spec}: {status_of(error)}, left out")
            continue
        paths[rival.spec], versions[rival.spec] = rival.package, rival.version()
    memory = torch.zeros(READ_BYTES // 4)
    recorder.say(f"timing {len(jobs)} ways of attention over {shape.tokens} tokens, {repeats} times")
    measured = in_turn([*jobs.values(), memory.sum], torch.device("cpu"), repeats)
    times = dict(zip((*jobs, "memory"), measured, strict=True))
    best = [min(pair) for pair in zip(times["two-matmuls"], times["two-matmuls-kt"], strict=True)]
    for job in jobs:
        spec, _, dtype = job.partition(" ")
        with_versions = recorder.common.get("versions", {}) | versions.get(job, {})
        common = {"dtype": dtype or "float32", "path": paths[job], "repeats": repeats}
        common |= {"threads": torch.get_num_threads(), "versions": with_versions}
        rate = shape.elements * bits[job] / 8 / READ_BYTES
        for metric, unit, values in (
            ("attend_us", "us", [1e6 * t for t in times[job]]),
            ("speedup_vs_sdpa", "x", ratios(times["sdpa"], times[job])),
            ("speedup_vs_two_matmuls", "x", ratios(best, times[job])),
            ("read_share", "x", ratios(times["memory"], times[job], rate)),
        ):
            recorder.add(spec, bits[job], metric, unit, shape.name, spread(values), **common)


def _torch_jobs(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    q16, k16, v16 = (x.bfloat16() for x in (q, k, v))
    transposed = k.mT.contiguous()
    rows = q.view(*k.shape[:2], -1, k.shape[3])
    scale = k.shape[3] ** -0.5
    return {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa bfloat16": lambda: scaled_dot_product_attention(q16, k16, v16, enable_gqa=True),
        "two-matmuls": lambda: (rows @ k.mT * scale).softmax(-1) @ v,
        "two-matmuls-kt": lambda: (rows @ transposed * scale).softmax(-1) @ v,
    }


@torch.no_grad()
def _filled(spec: str, k: Tensor, v: Tensor, tokens: int) -> LayerCache:
    """A cache of ``tokens`` tokens, of which those behind the first ones repeat their bytes."""
    site, removed = _site(spec, k[:, :, :ENCODED])
    cache = LayerCache(site, capacity=tokens)
    cache.append(k[:, :, :ENCODED] + removed, v[:, :, :ENCODED])
    store = cache.store
    assert store is not None
    missing = (tokens - len(cache)) // ENCODED * ENCODED
    for role, state in cache.roles.items():
        x = (k if role == "key" else v)[:, :, :ENCODED]
        payload = state.encode(x.half())
        for _ in range(0, missing, ENCODED):
            first = state.next_slot
            store.ensure(first + ENCODED)
            store.write(role, first, payload)
            state.extend(ENCODED)
    cache.length += missing
    if cache.places_tokens:
        cache.positions.extend(missing)
    if rest := tokens - len(cache):
        cache.append(k[:, :, :rest], v[:, :, :rest])
    return cache


def _site(spec: str, k: Tensor) -> tuple[LayerSite, Tensor]:
    """A layer of a scheme, and what is added to its first keys ``k``: their mean, where they have one."""
    scheme = decided(get(spec).for_layer(8, 24))
    _, heads, tokens, dim = k.shape
    if (mean := mean_of(scheme, heads, dim, k.device)) is None:
        return LayerSite(scheme), torch.zeros(1)
    return LayerSite(scheme, mean=mean), mean.at(mean.given, torch.arange(tokens)[None])


@torch.no_grad()
def _check(spec: str, k: Tensor, v: Tensor, q: Tensor) -> None:
    site, removed = _site(spec, k)
    cache = LayerCache(site)
    cache.append(k + removed, v)
    if reason := cache.unfused():
        raise UnsupportedError(f"bench decode: {reason}; packedkv bench cache times {spec} without a kernel.")
    difference = float((cache.attend(q) - attend(q, cache)).abs().max())
    if not difference <= AGREEMENT["float32"]:
        raise KVError(f"bench decode: attention of {spec} differs from the reference's by {difference:.2g}.")
