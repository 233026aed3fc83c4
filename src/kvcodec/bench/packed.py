"""Packed caches of any size for the GPU benches, and whether the kernels read them rightly.

The reference codec encodes a pool of ``POOL_PAGES`` pages per KV head; a large cache is made of copies of them in
random order, each in a physical page of its own, behind a block table that is a random permutation. What the kernels
move is therefore real (no byte is read twice), while the reference, which needs minutes for millions of tokens of some
codecs, encodes 4096 tokens per head. Every decoded value is known, whatever the size.

Only ``packed_operator``, ``packed_encode.encode_operator`` and ``prefill.prefill_operator`` know the kernels' callers.
"""

import importlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcodec.attention import rounded_queries
from kvcodec.bench.shapes import Shape
from kvcodec.cache import LayerCache
from kvcodec.codec import ROLES, Params, Role
from kvcodec.errors import UnsupportedError
from kvcodec.fused import FusedLayerCache, fused_refusal
from kvcodec.registry import get
from kvcodec.scheme import KVScheme

POOL_PAGES = 64
LAYER, LAYERS = 16, 32
"""A middle layer: presets that hold the outer layers dense pack this one."""


def scheme_of(spec: str) -> KVScheme:
    """Scheme of a middle layer."""
    return get(spec).for_layer(LAYER, LAYERS)


@dataclass(frozen=True)
class Pool:
    """Pages that the reference encoded, and what they decode to.

    Parameters
    ----------
    pages : Tensor uint8 ``[n, H, page_bytes]``
    decoded : tuple of Tensor
        Keys and values, float32 ``[H, n, P, D]``, model basis.
    params : dict of role to Params
        Constants of the site, leading dimension 1.
    """

    pages: Tensor
    decoded: tuple[Tensor, Tensor]
    params: dict[Role, Params]


def make_pool(spec: str, heads: int, head_dim: int, device: torch.device, seed: int, pages: int = POOL_PAGES) -> Pool:
    """Encode Gaussian keys and values with the reference, on ``device``."""
    generator = torch.Generator(device).manual_seed(seed)
    cache = LayerCache(scheme_of(spec).without_windows(), layer=LAYER)
    page_tokens = scheme_of(spec).page_layout(head_dim).page_tokens
    size = (1, heads, pages * page_tokens, head_dim)
    # float32 in, so that decode gives float32; values as a bf16 model would have them
    k, v = (torch.randn(size, generator=generator, device=device).bfloat16().float() for _ in ROLES)
    cache.append(k, v)
    assert cache.store is not None
    decoded = tuple(x[0].unflatten(1, (pages, page_tokens)) for x in cache.decode())
    params = {role: state.params for role, state in cache.roles.items() if state.params is not None}
    return Pool(cache.store.pages[cache.store.table[0].long()], (decoded[0], decoded[1]), params)


class Packed:
    """A filled cache, a query and the truth about both.

    Parameters
    ----------
    spec : str
    shape : Shape
    pool : Pool
    seed : int
    engine : str
        ``triton``: those kernels where they exist, instead of the ones that the cache chooses.

    Raises
    ------
    UnsupportedError
        If no kernel reads this scheme; the text says why.
    """

    def __init__(self, spec: str, shape: Shape, pool: Pool, seed: int, engine: str = "") -> None:
        self.spec, self.shape, self.pool = spec, shape, pool
        scheme, device = scheme_of(spec), pool.pages.device
        batch, heads, dim, tokens = shape.batch, shape.kv_heads, shape.head_dim, shape.tokens
        generator = torch.Generator(device).manual_seed(seed + 1)

        def draw(held: int, count: int, n: int) -> Tensor:
            drawn = torch.randn(held, count, n, dim, generator=generator, device=device, dtype=torch.bfloat16)
            return drawn if held == batch else drawn.expand(batch, -1, -1, -1).contiguous()

        self.q = draw(batch, shape.query_heads, 1)
        cache = self.cache = _allocated(scheme, pool, draw(batch, heads, 0), tokens)
        if engine == "triton":
            use_triton(cache, dim)
        assert cache.store is not None
        # a fused cache may let both roles leave the window together
        unit = int(getattr(cache, "unit", 1))
        steps = {role: math.lcm(scheme.codec(role).block_tokens, unit) for role in ROLES}
        self.encoded = {r: n * max(0, (tokens - scheme.sink - scheme.window) // n) for r, n in steps.items()}
        columns = -(-max(self.encoded.values()) // cache.store.layout.page_tokens)
        held = shape.held
        content = torch.randint(len(pool.pages), (held, columns), generator=generator, device=device)
        order = torch.randperm(held * columns, generator=generator, device=device).view(held, columns)
        cache.store.pages = torch.empty(held * columns, *pool.pages.shape[1:], dtype=torch.uint8, device=device)
        for ids, source in zip(order, content, strict=True):  # one sequence at a time: no second copy of the pool
            cache.store.pages[ids] = pool.pages[source]
        self.content = content.expand(batch, -1)
        cache.store.table = order.int().expand(batch, -1).contiguous()
        self.dense: dict[Role, tuple[Tensor, Tensor]] = {}
        for role, state in cache.roles.items():
            sink = min(scheme.sink, tokens)
            self.dense[role] = draw(held, heads, sink), draw(held, heads, tokens - sink - self.encoded[role])
            state.sink, state.window = self.dense[role]
            state.runs = [(0, self.encoded[role])] if self.encoded[role] else []
        cache.length = tokens
        cache._push()

    def attend(self) -> Tensor:
        """One decode step: ``[B, HQ, 1, D]``."""
        return self.cache.attend(self.q)

    @property
    def path(self) -> str:
        """Which kernels serve the cache: ``triton`` or ``cuda``."""
        return str(getattr(getattr(self.cache, "engine", None), "name", "triton"))

    @property
    def effective_bits(self) -> float:
        """Every byte held (windows, free slots, table) x 8 / elements."""
        return sum(self.cache.nbytes().values()) * 8 / self.shape.elements

    @property
    def bytes_read(self) -> int:
        """Bytes a decode step cannot do without: live blocks, dense tokens, page table, query and output."""
        store, each = self.cache.store, self.shape.held * self.shape.kv_heads
        assert store is not None
        total = store.table.nbytes + 2 * self.q.nbytes
        for plane in store.layout.planes:
            tokens = store.layout.page_tokens // plane.blocks
            total += -(-self.encoded["key" if plane.role == "key" else "value"] // tokens) * plane.field.nbytes * each
        return total + sum(x.nbytes for both in self.dense.values() for x in both)

    def truth(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """Decoded keys and values of one head, float32 ``[T, D]``, from the pool and never from the packed cache."""
        out = []
        for role, decoded in zip(ROLES, self.pool.decoded, strict=True):
            packed = decoded[head][self.content[sequence]].flatten(0, 1)[: self.encoded[role]]
            sink, window = (x[sequence, head].float() for x in self.dense[role])
            out.append(torch.cat([sink, packed, window]))
        return out[0], out[1]


def _allocated(scheme: KVScheme, pool: Pool, nothing: Tensor, tokens: int) -> FusedLayerCache:
    """Return an empty cache of fixed capacity, as a captured decode step needs it; else one that grows."""
    try:
        cache = FusedLayerCache(scheme, layer=LAYER, params=pool.params, capacity=tokens)
        cache.append(nothing, nothing)  # allocates, or refuses
    except UnsupportedError:
        cache = FusedLayerCache(scheme, layer=LAYER, params=pool.params)
        cache.append(nothing, nothing)
    return cache


def use_triton(cache: FusedLayerCache, head_dim: int) -> None:
    """Serve a cache by the Triton kernels, whatever it chose.

    Raises
    ------
    UnsupportedError
        If there are none for its codecs.
    """
    engines = importlib.import_module("kvcodec.engine")
    scheme = KVScheme(cache.roles["key"].codec, cache.roles["value"].codec)
    if not (stem := engines.triton_stem(scheme)):
        raise UnsupportedError(f"no Triton kernels read {scheme}; leave --engine out")
    cache.engine = engines.TritonEngine(stem, *(engines.order_of(c, head_dim) for c in (scheme.key, scheme.value)))


class Gate(NamedTuple):
    """What the check before timing found: relative errors, largest first of the heads looked at."""

    error: float
    bf16_error: float

    @property
    def passed(self) -> bool:
        """At most twice the error of bf16 SDPA over the same decoded values; NaN fails."""
        return self.error <= 2 * self.bf16_error

    def __str__(self) -> str:
        """Both errors."""
        return f"attention error {self.error:.2e}, bf16 SDPA over the decoded K and V {self.bf16_error:.2e}"


@torch.no_grad()
def gate(packed: Packed) -> Gate:
    """Compare a step with float64 attention over the decoded keys and values, at the size that is timed.

    Up to three heads; the one with the worst ratio is returned.
    """
    shape = packed.shape
    found, group = packed.attend(), shape.group
    state = packed.cache.roles["key"]
    q = packed.q if state.params is None else rounded_queries(packed.q, state.codec, state.params, shape.kv_heads)
    worst = Gate(0.0, float("inf"))
    for b, h in sorted({(0, 0), (shape.batch // 2, shape.kv_heads // 2), (shape.batch - 1, shape.kv_heads - 1)}):
        k, v = packed.truth(b, h)
        rows = slice(h * group, (h + 1) * group)
        exact = _attention(q[b, rows, 0].double(), k.double(), v.double())
        short = [x.bfloat16()[None, None] for x in (q[b, rows, 0], k, v)]
        low = scaled_dot_product_attention(short[0], short[1], short[2])[0, 0]
        size = exact.norm()
        errors = [float((x.double() - exact).norm() / size) for x in (found[b, rows, 0], low)]
        here = Gate(errors[0], errors[1])
        # a NaN is no smaller than anything, so it is kept
        if not here.error / here.bf16_error <= worst.error / worst.bf16_error:
            worst = here
    return worst


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


class Pools:
    """Pools by preset and head shape, encoded once each.

    Parameters
    ----------
    device : torch.device
    seed : int
    pages : int
    """

    def __init__(self, device: torch.device, seed: int = 0, pages: int = POOL_PAGES) -> None:
        self.device, self.seed, self.pages = device, seed, pages
        self._made: dict[tuple[str, int, int], Pool] = {}

    def get(self, spec: str, heads: int, head_dim: int) -> Pool:
        """Return the pool, made at the first call."""
        key = spec, heads, head_dim
        if key not in self._made:
            self._made[key] = make_pool(spec, heads, head_dim, self.device, self.seed, self.pages)
        return self._made[key]


@torch.no_grad()
def packed_operator(spec: str, shape: Shape, pools: Pools, engine: str = "") -> Packed:
    """Return a filled cache whose ``attend`` is what the benches time; ``engine`` as in ``Packed``.

    Raises
    ------
    UnsupportedError
        If no kernel reads this scheme at this head_dim on this device.
    """
    # before the pool, which takes seconds for some codecs
    if reason := fused_refusal(scheme_of(spec), shape.head_dim, pools.device):
        raise UnsupportedError(reason)
    return Packed(spec, shape, pools.get(spec, shape.kv_heads, shape.head_dim), pools.seed, engine)
