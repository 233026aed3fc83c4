"""What a codec costs on this device: times of encode, append, decode and attend, beside torch's SDPA.

One row per spec and metric, the same keys as every result file::

    {"spec", "effective_bits", "metric", "unit", "values": {"p20", "p50", "p80"}, "repeats", "shape", "dtype", "path",
     "device", "versions", "commit", "seed"}

==================  ====  ========================================================================================
metric              unit  what is timed
==================  ====  ========================================================================================
``encode_us``       us    a prefill: ``append`` of all tokens to an empty cache, allocation included
``append_us``       us    ``append`` of one token, mean over one block of the codec, so that a group's encoding counts
``decode_us``       us    ``decode`` of all tokens to the input's dtype
``attend_us``       us    ``attend`` of one new query per sequence over all tokens
``speedup_vs_sdpa`` x     SDPA's time over ``attend_us``, pair by pair: above 1 the cache is faster
==================  ====  ========================================================================================

The first row has the spec ``sdpa``: ``scaled_dot_product_attention`` over the uncompressed K and V in the dtype given,
which is what ``attend`` replaces. ``effective_bits`` are all bytes that the cache holds (windows, free page slots and
table included) x 8 / elements. ``path`` says who ran: ``reference`` is PyTorch, chunk by chunk; it saves memory, not
time.
"""

import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvcodec
from kvcodec.cache.host import LayerCache
from kvcodec.errors import KVError, ShapeError, SpecError, UnsupportedError
from kvcodec.registry import get

Row = dict[str, Any]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference between ``attend`` and SDPA over the decoded K and V (outputs are below 1): rounding only."""


def bench_rows(
    specs: Sequence[str],
    *,
    batch: int,
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    tokens: int,
    device: str = "cpu",
    dtype: str = "float32",
    repeats: int = 5,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Time each spec on Gaussian K and V; rows come as they are measured, so an interrupt keeps the earlier ones.

    Parameters
    ----------
    specs : sequence of str
    batch, kv_heads, query_heads, head_dim, tokens : int
        Shape of the cache; one new query token per sequence.
    device : str
        Any torch device.
    dtype : {"float32", "float16", "bfloat16"}
        Of K, V and q, and of the SDPA baseline.
    repeats : int
        Timings per metric, behind one that is not counted.
    seed : int
        Of the K, V and q drawn.
    progress : callable, optional
        Gets one line of text before each spec.

    Returns
    -------
    iterator of dict
        Rows as in the module's text.

    Raises
    ------
    SpecError, ShapeError, UnsupportedError
        At once, before anything is timed: unknown spec or dtype, shapes that no codec takes, a missing device.
    KVError
        While iterating: a cache whose attention is not SDPA over its decoded K and V is not timed.
    """
    for name, value in (
        ("batch", batch), ("kv_heads", kv_heads), ("query_heads", query_heads), ("tokens", tokens), ("repeats", repeats)
    ):  # fmt: skip
        if value < 1:
            raise ShapeError(f"bench: {name}={value}; expected a number >= 1.")
    if query_heads % kv_heads:
        raise ShapeError(f"bench: query_heads={query_heads} is not a multiple of kv_heads={kv_heads}; use a multiple.")
    if dtype not in DTYPES:
        raise SpecError(f"bench: dtype={dtype!r} is not allowed; use {', '.join(DTYPES)}.")
    for spec in specs:
        get(spec).page_layout(head_dim)  # refuses a head_dim it cannot take
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"bench: device {device!r} cannot be used here ({reason}); try device='cpu'.") from error
    shape = (batch, kv_heads, query_heads, head_dim, tokens)
    return _rows(specs, shape, torch.device(device), dtype, repeats, seed, progress or (lambda _: None))


def _rows(
    specs: Sequence[str],
    shape: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: str,
    repeats: int,
    seed: int,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    batch, kv_heads, query_heads, head_dim, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, n: int) -> Tensor:
        x = torch.randn(batch, heads, n, head_dim, generator=generator)
        return x.to(device, DTYPES[dtype])

    k, v = draw(kv_heads, tokens), draw(kv_heads, tokens)
    q = draw(query_heads, 1)
    common = {
        "repeats": repeats,
        "shape": f"b{batch}_hq{query_heads}_h{kv_heads}_d{head_dim}_t{tokens}",
        "dtype": dtype,
        "device": device_name(device),
        "versions": versions(),
        "commit": commit(),
        "seed": seed,
    }

    def row(spec: str, bits: float, metric: str, unit: str, values: Sequence[float], path: str) -> Row:
        head = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": spread(values)}
        return {**head, "path": path, **common}

    progress(f"sdpa ({dtype})")
    plain = _times(lambda: _sdpa(q, k, v), device, repeats)
    yield row("sdpa", k.element_size() * 8.0, "attend_us", "us", plain, "torch")
    for i, spec in enumerate(specs):
        progress(f"{spec} ({i + 1} of {len(specs)})")
        cache = _filled(spec, k, v)
        bits = sum(cache.nbytes().values()) * 8 / cache.elements()
        _check(spec, cache, q, AGREEMENT[dtype])
        path = "reference" if type(cache) is LayerCache else "kernel"
        jobs = _Jobs(spec, cache, q, k, v)
        yield row(spec, bits, "encode_us", "us", _times(jobs.encode, device, repeats), path)
        yield row(spec, bits, "decode_us", "us", _times(jobs.decode, device, repeats), path)
        # in turn, so that a machine busy with something else slows both
        pairs = [(_times(jobs.attend, device, 1)[0], _times(jobs.sdpa, device, 1)[0]) for _ in range(repeats)]
        yield row(spec, bits, "attend_us", "us", [a for a, _ in pairs], path)
        yield row(spec, bits, "speedup_vs_sdpa", "x", [b / a for a, b in pairs], path)
        appended = [t / jobs.block_tokens for t in _times(jobs.append_block, device, repeats)]
        yield row(spec, bits, "append_us", "us", appended, path)


@dataclass(frozen=True)
class _Jobs:
    """What is timed: a filled cache, the tensors it was filled with, and a query."""

    spec: str
    cache: LayerCache
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def block_tokens(self) -> int:
        """Appends after which every codec of the cache has encoded once."""
        return max(state.codec.block_tokens for state in self.cache.roles.values())

    def encode(self) -> None:
        _filled(self.spec, self.k, self.v)

    def decode(self) -> None:
        self.cache.decode()

    def attend(self) -> None:
        self.cache.attend(self.q)

    def sdpa(self) -> None:
        _sdpa(self.q, self.k, self.v)

    def append_block(self) -> None:
        for _ in range(self.block_tokens):
            self.cache.append(self.k[:, :, :1], self.v[:, :, :1])


@torch.no_grad()
def _filled(spec: str, k: Tensor, v: Tensor) -> LayerCache:
    cache = LayerCache(get(spec))
    cache.append(k, v)
    return cache


@torch.no_grad()
def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@torch.no_grad()
def _check(spec: str, cache: LayerCache, q: Tensor, tolerance: float) -> None:
    """Refuse to time what is wrong."""
    k, v = (x.float() for x in cache.decode())
    difference = float((cache.attend(q).float() - _sdpa(q.float(), k, v)).abs().max())
    if not difference <= tolerance:
        raise KVError(
            f"bench: attention of {spec} differs from SDPA over its decoded K and V by {difference:.2g} "
            f"(rounding explains {tolerance:.0e}); times of a wrong result mean nothing. Run the test suite."
        )


@torch.no_grad()
def _times(job: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Microseconds of ``repeats`` calls, behind one that is not counted."""
    out = []
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        job()
        _wait(device)
        out.append((time.perf_counter() - start) * 1e6)
    return out[1:]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, float]:
    """20th, 50th and 80th percentile, interpolated.

    >>> spread([1.0, 2.0, 3.0, 4.0, 11.0])
    {'p20': 1.8, 'p50': 3.0, 'p80': 5.4}
    """
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(list(values), dtype=torch.float64).quantile(points)
    return {name: round(float(x), 4) for name, x in zip(("p20", "p50", "p80"), found, strict=True)}


def device_name(device: torch.device) -> str:
    """Return what a reader needs to place a time: the GPU's name, or the CPU's kind and the threads used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    return str(device)


def versions() -> dict[str, str]:
    """Versions that a time depends on."""
    found = {"kvcodec": kvcodec.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """Commit of the checkout that this file is tracked in, with ``-dirty`` if it was edited; None outside one."""
    here = Path(__file__)
    for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--abbrev=12"]):
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    return done.stdout.strip()
