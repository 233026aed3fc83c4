"""Times of caches and codecs on any device, without kernels: ``kvcodec bench cache`` and ``kvcodec bench codec``.

One row per spec and metric, the same keys as every result file::

    {"spec", "effective_bits", "metric", "unit", "values": {"p20", "p50", "p80"}, "repeats", "shape", "device",
     "versions", "commit", "seed"}

``bench cache``, beside torch's SDPA; rows have ``dtype`` and ``path`` as well:

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

``bench codec``, keys and values together:

========================  ========  ================================================================================
metric                    unit      what is timed
========================  ========  ================================================================================
``encode_tokens_per_s``   tokens/s  K and V of all heads into the code basis and to bytes, constants given
``decode_tokens_per_s``   tokens/s  the same bytes to float32 K and V in the model basis
``encode_vs_int4``        x         its time over ``int-4``'s, pair by pair: 40 is forty times slower
``decode_vs_int4``        x         the same for decoding
``exhaustive_vs_encode``  x         a search through every codeword (``exhaustive.py``, for the first tokens, scaled up)
                                    over the codec's encoding of all keys, pair by pair; for codecs with a codebook.
                                    ``codewords`` says how many.
========================  ========  ================================================================================

Rows of other libraries (``quantizer_rivals.py``) do the job of the preset that ``job`` names; ``encode_vs_preset`` and
``decode_vs_preset`` are their times over that preset's. Input is Gaussian, rounded to fp16 as a cache holds it, and
float32: times do not depend on the data, except HQMQ's ties.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcodec.cache.host import LayerCache
from kvcodec.codec import ROLES, Codec, Params, Payload, Role, Site
from kvcodec.errors import KVError, ShapeError, SpecError, UnsupportedError
from kvcodec.registry import get
from kvcodec_lab.bench.exhaustive import exhaustive
from kvcodec_lab.bench.quantizer_rivals import QuantizerRival, quantizer_rivals
from kvcodec_lab.bench.record import Row, spread
from kvcodec_lab.bench.timing import synchronize
from kvcodec_lab.stamp import commit, device_name, versions

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference between ``attend`` and SDPA over the decoded K and V (outputs are below 1): rounding only."""
BASE = "int-4"
EXHAUSTIVE_TOKENS = 128
"""Tokens on which an exhaustive search is timed; its time, which is proportional to them, is scaled up."""

Progress = Callable[[str], None]


def positive(bench: str, sizes: Mapping[str, int]) -> None:
    """Raise ``ShapeError`` unless every size is at least 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ShapeError(f"{bench}: {name}={value}; expected a number >= 1.")


def stamped(shape: str, device: torch.device, repeats: int, seed: int) -> Row:
    """Fields of every row of a run."""
    about = {"device": device_name(device), "versions": versions(), "commit": commit()}
    return {"repeats": repeats, "shape": shape, **about, "seed": seed}


@torch.no_grad()
def in_turn(jobs: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    """Seconds of each job, ``repeats`` each after a warm-up.

    Jobs alternate, so that other load on the machine slows all of them.
    """
    rounds = []
    for _ in range(repeats + 1):
        times = []
        for job in jobs:
            synchronize(device)
            start = time.perf_counter()
            job()
            synchronize(device)
            times.append(time.perf_counter() - start)
        rounds.append(times)
    return [list(times) for times in zip(*rounds[1:], strict=True)]


def ratios(over: Sequence[float], under: Sequence[float], scale: float = 1.0) -> list[float]:
    """Ratios pair by pair."""
    return [scale * a / b for a, b in zip(over, under, strict=True)]


# -- bench cache -------------------------------------------------------------------------------------------------------


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
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"bench: device {device!r} cannot be used here ({reason}); try device='cpu'.") from error
    shape = (batch, kv_heads, query_heads, head_dim, tokens)
    return _cache_rows(specs, shape, torch.device(device), dtype, repeats, seed, progress or (lambda _: None))


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


# -- bench codec -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleWork:
    """Keys or values of one layer with their codec and constants."""

    codec: Codec
    params: Params
    x: Tensor

    def encode(self) -> Payload:
        """Model basis to bytes."""
        return self.codec.encode(self.codec.to_code(self.x, self.params), self.params)

    def decode(self, payload: Payload) -> Tensor:
        """Bytes to the model basis."""
        return self.codec.from_code(self.codec.decode(payload, self.params), self.params)


class CodecWork:
    """Keys and values of one layer under one spec; ``encode`` and ``decode`` are what is timed."""

    def __init__(self, spec: str, kv: Sequence[Tensor], seed: int) -> None:
        def of(role: Role, whole: Tensor) -> RoleWork:
            codec = get(spec).codec(role).for_dtype(torch.float16)
            x = whole[:, :, : whole.shape[2] // codec.block_tokens * codec.block_tokens]
            site = Site(0, role, x.shape[1], x.shape[3], seed, x.device)
            return RoleWork(codec, codec.fit(site, x.half() if codec.needs_sample else None), x)

        self.key, self.value = (of(role, whole) for role, whole in zip(ROLES, kv, strict=True))
        self.packed = (self.key.encode(), self.value.encode())
        self.tokens = self.key.x.shape[2]

    def encode(self) -> object:
        """Encode keys and values."""
        return self.key.encode(), self.value.encode()

    def decode(self) -> object:
        """Decode keys and values."""
        return self.key.decode(self.packed[0]), self.value.decode(self.packed[1])


class ExhaustiveWork:
    """An exhaustive search for the first tokens of the keys."""

    def __init__(self, key: RoleWork) -> None:
        found = exhaustive(key.codec)
        self.codewords = found[0] if found else 0
        self.params, x = key.params, key.x[:, :, :EXHAUSTIVE_TOKENS]
        self.tokens = x.shape[2]
        self.x = key.codec.to_code(x, key.params).double()
        self.search = found[1] if found else None

    def run(self) -> object:
        """Try every codeword."""
        assert self.search is not None
        return self.search(self.x, self.params)


class QuantizerWork:
    """The same keys and values in another library."""

    def __init__(self, rival: QuantizerRival, kv: Sequence[Tensor]) -> None:
        self.rival, self.rows = rival, [x.flatten(0, 2) for x in kv]
        self.held = [rival.encode(x) for x in self.rows]
        self.bits = sum(map(rival.nbytes, self.held)) * 8 / sum(x.numel() for x in self.rows)
        pairs = zip(self.decode(), self.rows, strict=True)
        errors = [float((y.float() - x).square().sum() / x.square().sum()) for y, x in pairs]
        self.relative_mse = sum(errors) / len(errors)

    def encode(self) -> object:
        """Encode keys and values."""
        return [self.rival.encode(x) for x in self.rows]

    def decode(self) -> list[Tensor]:
        """Decode keys and values."""
        return [self.rival.decode(x) for x in self.held]


def codec_rows(
    specs: Sequence[str],
    *,
    kv_heads: int = 8,
    head_dim: int = 128,
    tokens: int = 4096,
    device: str = "cpu",
    repeats: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Time encode and decode of each spec beside ``int-4``, then the rivals that are installed.

    Parameters
    ----------
    specs : sequence of str
    kv_heads, head_dim, tokens : int
        Shape of K and V, one sequence; whole blocks of every codec are taken of ``tokens``.
    device : str
    repeats : int
        Timed pairs per metric, after a warm-up.
    seed : int
    progress : callable, optional
        Gets a line before each spec.

    Returns
    -------
    iterator of dict
        Rows as in the module's text, as they are measured.

    Raises
    ------
    SpecError, ShapeError, UnsupportedError
        At once: unknown spec, a shape that no codec takes, codecs that need a model's queries.
    """
    positive("bench codec", {"kv_heads": kv_heads, "tokens": tokens, "repeats": repeats})
    for spec in (BASE, *specs):
        scheme = get(spec)
        for role in ROLES:
            codec = scheme.codec(role)
            codec.layout(head_dim)  # refuses a head_dim it cannot take
            if codec.block_tokens > tokens:
                raise ShapeError(f"bench codec: {spec} encodes {codec.block_tokens} tokens at once; got {tokens}.")
            if codec.needs_queries:
                raise UnsupportedError(f"bench codec: {spec} needs a model's queries to be fitted; leave it out.")
    shape = (kv_heads, head_dim, tokens)
    return _codec_rows(specs, shape, torch.device(device), repeats, seed, progress or (lambda _: None))


@torch.no_grad()
def _codec_rows(
    specs: Sequence[str],
    shape: tuple[int, int, int],
    device: torch.device,
    repeats: int,
    seed: int,
    progress: Progress,
) -> Iterator[Row]:
    heads, dim, tokens = shape
    generator = torch.Generator().manual_seed(seed)
    kv = [torch.randn(1, heads, tokens, dim, generator=generator).half().float().to(device) for _ in ROLES]
    common = stamped(f"b1_h{heads}_d{dim}_t{tokens}", device, repeats, seed)

    def row(spec: str, bits: float, metric: str, values: Sequence[float], **more: Any) -> Row:
        unit = "tokens/s" if metric.endswith("_per_s") else "x"
        head = {"spec": spec, "effective_bits": bits, "metric": metric, "unit": unit, "values": spread(values)}
        return {**head, **more, **common}

    def beside(
        name: str, bits: float, work: CodecWork | QuantizerWork, base: CodecWork, than: str, done: int, **more: Any
    ) -> list[Row]:
        """Rows of encode and decode, in tokens per second of ``done`` tokens and beside ``base``."""
        encode = in_turn([work.encode, base.encode], device, repeats)
        decode = in_turn([work.decode, base.decode], device, repeats)
        both = {"encode": encode, "decode": decode}
        rates = [row(name, bits, f"{job}_tokens_per_s", [done / a for a in t[0]], **more) for job, t in both.items()]
        compared = [
            row(name, bits, f"{job}_vs_{than}", ratios(t[0], t[1], tokens / done), **more) for job, t in both.items()
        ]
        return rates + compared

    base = CodecWork(BASE, kv, seed)
    for i, spec in enumerate(specs):
        progress(f"{spec} ({i + 1} of {len(specs)})")
        work, bits = CodecWork(spec, kv, seed), get(spec).effective_bits(dim)
        yield from beside(spec, bits, work, base, "int4", work.tokens)
        every = ExhaustiveWork(work.key)
        if every.search is not None:
            searched, encoded = in_turn([every.run, work.key.encode], device, repeats)
            values = ratios(searched, encoded, work.tokens / every.tokens)
            yield row(spec, bits, "exhaustive_vs_encode", values, codewords=every.codewords)
    for rival in quantizer_rivals(dim):
        if rival.missing:
            progress(f"{rival.name}: {rival.module} is not installed, left out")
            continue
        progress(rival.name)
        theirs, ours = QuantizerWork(rival, kv), CodecWork(rival.job, kv, seed)
        more = {"job": rival.job, "relative_mse": theirs.relative_mse}
        yield from beside(rival.name, theirs.bits, theirs, ours, "preset", tokens, **more)
