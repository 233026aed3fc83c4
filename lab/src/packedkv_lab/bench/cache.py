"""Times of caches on any device, without kernels, beside torch's SDPA: ``packedkv bench cache``.

One row per spec and metric, the same keys as every result file::

    {"spec", "effective_bits", "metric", "unit", "values": {"p20", "p50", "p80"}, "repeats", "shape", "device",
     "versions", "commit", "seed", "dtype", "path"}

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
table included) x 8 / elements. ``path`` says what attended: ``reference`` is PyTorch, chunk by chunk; it saves memory,
not time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cache.host import LayerCache
from packedkv.errors import KVError, ShapeError, SpecError
from packedkv.registry import get
from packedkv_lab.bench.record import Row, spread, usable_device
from packedkv_lab.bench.turns import Progress, in_turn, positive, ratios, stamped

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference between ``attend`` and SDPA over the decoded K and V (outputs are below 1): rounding only."""


def cache_rows(
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
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Time caches of Gaussian K and V; rows come as they are measured, so an interrupt keeps the earlier ones.

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
        Timings per metric, after a warm-up.
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
    sizes = {"batch": batch, "kv_heads": kv_heads, "query_heads": query_heads, "tokens": tokens, "repeats": repeats}
    positive("bench", sizes)
    if query_heads % kv_heads:
        raise ShapeError(f"bench: query_heads={query_heads} is not a multiple of kv_heads={kv_heads}; use a multiple.")
    if dtype not in DTYPES:
        raise SpecError(f"bench: dtype={dtype!r} is not allowed; use {', '.join(DTYPES)}.")
    for spec in specs:
        get(spec).page_layout(head_dim)  # refuses a head_dim it cannot take
    shape = (batch, kv_heads, query_heads, head_dim, tokens)
    return _cache_rows(specs, shape, usable_device("bench", device), dtype, repeats, seed, progress or (lambda _: None))


def _cache_rows(
    specs: Sequence[str],
    shape: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: str,
    repeats: int,
    seed: int,
    progress: Progress,
) -> Iterator[Row]:
    batch, kv_heads, query_heads, head_dim, tokens = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, n: int) -> Tensor:
        x = torch.randn(batch, heads, n, head_dim, generator=generator)
        return x.to(device, DTYPES[dtype])

    k, v = draw(kv_heads, tokens), draw(kv_heads, tokens)
    q = draw(query_heads, 1)
    name = f"b{batch}_hq{query_heads}_h{kv_heads}_d{head_dim}_t{tokens}"
    common = {"dtype": dtype} | stamped(name, device, repeats, seed)

    def row(spec: str, bits: float, metric: str, values: Sequence[float], path: str, unit: str = "us") -> Row:
        head = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": spread(values)}
        return {**head, "path": path, **common}

    def us(*jobs: Callable[[], object]) -> list[list[float]]:
        return [[1e6 * seconds for seconds in times] for times in in_turn(jobs, device, repeats)]

    progress(f"sdpa ({dtype})")
    yield row("sdpa", k.element_size() * 8.0, "attend_us", us(lambda: _sdpa(q, k, v))[0], "torch")
    for i, spec in enumerate(specs):
        progress(f"{spec} ({i + 1} of {len(specs)})")
        cache = _filled(spec, k, v)
        bits = sum(cache.nbytes().values()) * 8 / cache.elements()
        _check(spec, cache, q, AGREEMENT[dtype])
        path = "reference" if type(cache) is LayerCache else "kernel"
        work = CacheWork(spec, cache, q, k, v)
        yield row(spec, bits, "encode_us", us(work.encode)[0], path)
        yield row(spec, bits, "decode_us", us(work.decode)[0], path)
        ours, dense = us(work.attend, work.sdpa)
        yield row(spec, bits, "attend_us", ours, path)
        yield row(spec, bits, "speedup_vs_sdpa", ratios(dense, ours), path, unit="x")
        yield row(spec, bits, "append_us", [t / work.block_tokens for t in us(work.append_block)[0]], path)


@dataclass(frozen=True)
class CacheWork:
    """A filled cache, the tensors that it was filled with, and a query, with the calls that are timed."""

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
        """Fill another cache."""
        _filled(self.spec, self.k, self.v)

    def decode(self) -> None:
        """Decode all tokens."""
        self.cache.decode()

    def attend(self) -> None:
        """Attend with one query per sequence."""
        self.cache.attend(self.q)

    def sdpa(self) -> None:
        """Do the same over the uncompressed K and V."""
        _sdpa(self.q, self.k, self.v)

    def append_block(self) -> None:
        """Append one block, token by token."""
        for _ in range(self.block_tokens):
            self.cache.append(self.k[:, :, :1], self.v[:, :, :1])


@torch.no_grad()
def _filled(spec: str, k: Tensor, v: Tensor) -> LayerCache:
    cache = LayerCache(get(spec))
    cache.append(k, v)
    return cache


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@torch.no_grad()
def _check(spec: str, cache: LayerCache, q: Tensor, tolerance: float) -> None:
    """Verify a cache's attention before it is timed."""
    k, v = (x.float() for x in cache.decode())
    difference = float((cache.attend(q).float() - _sdpa(q.float(), k, v)).abs().max())
    if not difference <= tolerance:
        raise KVError(
            f"bench: attention of {spec} differs from SDPA over its decoded K and V by {difference:.2g} "
            f"(rounding explains {tolerance:.0e}); times of a wrong result mean nothing. Run the test suite."
        )
