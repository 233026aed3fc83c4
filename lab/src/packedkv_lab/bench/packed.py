"""Packed caches of any size for the GPU benches, and the check that kernels read them correctly.

All tokens are distinct: the output of attention shrinks with the square root of the number of different tokens, but a
biased error does not. The reference for a sequence is what the codec decodes from pages and table as written.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.attention import rounded_queries
from packedkv.cache.fused import FusedLayerCache
from packedkv.codec import ROLES, Params, Role, Sample, Site
from packedkv.errors import UnsupportedError
from packedkv.kernels.choose import refusal
from packedkv.ops.rope import Rotary
from packedkv.registry import get
from packedkv.scheme import KVScheme
from packedkv.store.pages import PageStore
from packedkv.store.site import LayerSite, MeanRemoval
from packedkv_lab.bench.shapes import Shape

CHUNK_TOKENS, CHUNK_ELEMENTS = 16384, 1 << 27
"""Most tokens of a sequence, and elements of all, that are drawn and encoded at a time; tokens decoded at a time."""
FIT_TOKENS = 4096
"""Of the sample that codecs are fitted on that need one."""
LIMIT, SLACK = 1.5, 2e-4
"""Most relative error of attention: so many times that of bf16 SDPA, and what fp16 queries and scores round where bf16
attention happens to be nearly exact."""
SCALES = (0.1, 1.0, 4.0)
"""Of the queries in the gate: nearly all tokens count, as drawn, a few count."""
LAYER, LAYERS = 16, 32
"""A middle layer: presets that hold the outer layers dense pack this one."""
ROPE_BASE, MEAN_SIZE = 1e6, 3.0
"""Base of RoPE, as in Qwen2.5; standard deviation of a mean's channels, of keys whose own is 1."""


def scheme_of(spec: str) -> KVScheme:
    """Scheme of a middle layer, ``mean`` decided."""
    return decided(get(spec).for_layer(LAYER, LAYERS))


def decided(scheme: KVScheme) -> KVScheme:
    """Decide ``mean=auto`` of a layer: codecs that are made for keys without their mean (``ghost``) hold them so."""
    if scheme.mean != "auto":
        return scheme
    return replace(scheme, mean="pre" if scheme.key.without_mean else "none")


def mean_of(scheme: KVScheme, heads: int, head_dim: int, device: torch.device) -> MeanRemoval | None:
    """Return what a layer of a ``decided`` scheme subtracts from its keys; None: nothing."""
    if scheme.mean not in ("pre", "post"):
        return None
    given = MEAN_SIZE * torch.randn(1, heads, head_dim, generator=torch.Generator().manual_seed(1))
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    rotary = Rotary(frequencies.to(device)) if scheme.mean == "pre" else None
    return MeanRemoval("pre" if rotary else "post", rotary, given.to(device), "weights")


class Packed:
    """A filled cache, a query, and the decoded reference."""

    path = "cuda"
    """Which kernels serve the cache, as rows name them."""

    def __init__(self, spec: str, shape: Shape, device: torch.device, seed: int) -> None:
        self.spec, self.shape = spec, shape
        scheme = scheme_of(spec)
        batch, heads, dim, tokens, kv_batch = shape.batch, shape.kv_heads, shape.head_dim, shape.tokens, shape.kv_batch
        generator = torch.Generator(device).manual_seed(seed + 1)

        def draw(sequences: int, count: int, n: int) -> Tensor:
            return torch.randn(sequences, count, n, dim, generator=generator, device=device, dtype=torch.bfloat16)

        self.q = draw(batch, shape.query_heads, 1)
        params = _fitted(scheme, draw(1, heads, FIT_TOKENS), seed)
        mean = self.mean = mean_of(scheme, heads, dim, device)
        cache = self.cache = _allocated(
            LayerSite(scheme, LAYER, fitted=params, mean=mean), draw(batch, heads, 0), tokens
        )
        assert cache.store is not None
        # a fused cache may let both roles leave the window together
        unit = int(getattr(cache, "unit", 1))
        steps = {role: math.lcm(scheme.codec(role).block_tokens, unit) for role in ROLES}
        self.encoded = {r: n * max(0, (tokens - scheme.sink - scheme.window) // n) for r, n in steps.items()}
        self.written = PageStore(cache.store.layout, kv_batch, heads, device)
        if most := max(self.encoded.values()):
            all_codes = LayerSite(scheme.without_windows(), LAYER, fitted=params, mean=mean)
            filler = _allocated(all_codes, draw(kv_batch, heads, 0), most)
            block = math.lcm(*steps.values())
            chunk = max(1, min(CHUNK_TOKENS, CHUNK_ELEMENTS // (kv_batch * heads * dim)) // block) * block
            for at in range(0, most, chunk):
                n = min(chunk, most - at)
                filler.append(draw(kv_batch, heads, n) + self.removed(at, n), draw(kv_batch, heads, n))
            assert filler.store is not None
            columns = -(-most // filler.store.layout.page_tokens)
            order = torch.randperm(kv_batch * columns, generator=generator, device=device).view(kv_batch, columns)
            pages = torch.empty(kv_batch * columns, *filler.store.pages.shape[1:], dtype=torch.uint8, device=device)
            pages[order.flatten()] = filler.store.pages[filler.store.table[:, :columns].flatten().long()]
            self.written.pages, self.written.table = pages, order.int()
            del filler
        cache.store.pages = self.written.pages
        cache.store.table = self.written.table.expand(batch, -1).contiguous()
        self.placed = None if mean is None else torch.full((batch,), scheme.sink, dtype=torch.int32, device=device)
        self.dense: dict[Role, tuple[Tensor, Tensor]] = {}
        for role, state in cache.roles.items():
            sink = min(scheme.sink, tokens)
            self.dense[role] = draw(kv_batch, heads, sink), draw(kv_batch, heads, tokens - sink - self.encoded[role])
            state.sink, state.window = (x.expand(batch, -1, -1, -1).contiguous() for x in self.dense[role])
            state.runs = [(0, self.encoded[role])] if self.encoded[role] else []
        cache.length = tokens
        if mean is not None:
            cache.positions.runs = [(tokens, torch.zeros(1, dtype=torch.long, device=device))]
        cache.refresh()

    def removed(self, first: int, count: int) -> Tensor:
        """What is subtracted from keys at positions from ``first`` on: bf16, broadcasts to ``[B, H, count, D]``."""
        if self.mean is None:
            return self.q.new_zeros(1)
        at = torch.arange(first, first + count, device=self.q.device)[None]
        return self.mean.at(self.mean.given, at).to(self.q.dtype)

    def attend(self) -> Tensor:
        """One decode step: ``[B, HQ, 1, D]``."""
        return self.cache.attend(self.q)

    @property
    def effective_bits(self) -> float:
        """Every byte held (windows, free slots, table) x 8 / elements."""
        return sum(self.cache.nbytes().values()) * 8 / self.shape.elements

    @property
    def bytes_read(self) -> int:
        """Bytes that a decode step must move: live blocks, dense tokens, page table, query and output."""
        store, each = self.cache.store, self.shape.kv_batch * self.shape.kv_heads
        assert store is not None
        total = store.table.nbytes + 2 * self.q.nbytes
        for plane in store.layout.planes:
            tokens = store.layout.page_tokens // plane.blocks
            total += -(-self.encoded["key" if plane.role == "key" else "value"] // tokens) * plane.field.nbytes * each
        return total + sum(x.nbytes for both in self.dense.values() for x in both)

    def truth(self, sequence: int, head: int) -> tuple[Tensor, Tensor]:
        """Decoded keys and values of one head, float32 ``[T, D]``, from the pages as they were written."""
        if self.shape.shared:
            sequence = 0
        one = PageStore(self.written.layout, 1, self.written.heads, self.q.device)
        one.pages, one.table = self.written.pages, self.written.table[sequence : sequence + 1]
        out = []
        for role, state in self.cache.roles.items():
            assert state.params is not None
            sink, window = (x[sequence, head].float() for x in self.dense[role])
            parts, step = [sink], CHUNK_TOKENS - CHUNK_TOKENS % state.codec.block_tokens
            for at in range(0, self.encoded[role], step):
                end = min(at + step, self.encoded[role])
                rows = state.codec.from_code(state.codec.decode(one.read(role, at, end), state.params), state.params)[
                    0, head
                ]
                if role == "key" and self.mean is not None:
                    places = torch.arange(at, end, device=rows.device)[None] + len(sink)
                    rows = rows + self.mean.at(self.mean.given, places)[0, head]
                parts.append(rows)
            out.append(torch.cat([*parts, window]))
        return out[0], out[1]


def _fitted(scheme: KVScheme, sample: Tensor, seed: int) -> dict[Role, Params]:
    """Constants of a site, leading dimension 1: fitted on the sample where the codec needs one."""
    params: dict[Role, Params] = {}
    _, heads, _, dim = sample.shape
    for role in ROLES:
        codec = scheme.codec(role).for_dtype(sample.dtype)
        site = Site(LAYER, role, heads, dim, seed, sample.device)
        params[role] = codec.fit(site, Sample(sample.float()))
    return params


def _allocated(site: LayerSite, nothing: Tensor, tokens: int) -> FusedLayerCache:
    """Return an empty cache of fixed capacity, as a captured decode step needs it; else one that grows."""
    try:
        cache = FusedLayerCache(site, capacity=tokens)
        cache.append(nothing, nothing)  # allocates, or refuses
    except UnsupportedError:
        cache = FusedLayerCache(site)
        cache.append(nothing, nothing)
    return cache


class Gate(NamedTuple):
    """Result of the check before timing: relative errors of the worst head and queries checked."""

    error: float
    bf16_error: float

    @property
    def share(self) -> float:
        """The error as a share of what is allowed."""
        return self.error / (LIMIT * self.bf16_error + SLACK)

    @property
    def passed(self) -> bool:
        """At most ``LIMIT`` times the error of bf16 SDPA over the same decoded values, and ``SLACK``; NaN fails."""
        return self.share <= 1

    def __str__(self) -> str:
        return f"attention error {self.error:.2e}, bf16 SDPA over the decoded K and V {self.bf16_error:.2e}"


def worst(gates: Iterable[Gate]) -> Gate:
    """Return the gate with the largest share; NaN counts as the largest."""
    return max(gates, key=lambda gate: math.inf if math.isnan(gate.share) else gate.share)


@torch.no_grad()
def gate(packed: Packed) -> Gate:
    """Compare a step with float64 attention over the decoded keys and values, at the size that is timed.

    Up to three heads, each with queries of every scale of ``SCALES``; the worst is returned.
    """
    shape, state = packed.shape, packed.cache.roles["key"]
    asked = [(packed.q * scale).bfloat16() for scale in SCALES]
    answers = [packed.cache.attend(q) for q in asked]
    if state.params is not None:
        asked = [rounded_queries(q, state.codec, state.params, shape.kv_heads) for q in asked]
    gates = []
    for b, h in sorted({(0, 0), (shape.batch // 2, shape.kv_heads // 2), (shape.batch - 1, shape.kv_heads - 1)}):
        k, v = packed.truth(b, h)
        rows = slice(h * shape.group, (h + 1) * shape.group)
        for q, answer in zip(asked, answers, strict=True):
            scores = q[b, rows, 0].double() @ k.double().T * shape.head_dim**-0.5
            exact = torch.softmax(scores, -1) @ v.double()
            short = [x.bfloat16()[None, None] for x in (q[b, rows, 0], k, v)]
            low = scaled_dot_product_attention(short[0], short[1], short[2])[0, 0]
            errors = [float((x.double() - exact).norm() / exact.norm()) for x in (answer[b, rows, 0], low)]
            gates.append(Gate(errors[0], errors[1]))
    return worst(gates)


@torch.no_grad()
def packed_operator(spec: str, shape: Shape, device: torch.device, seed: int = 0) -> Packed:
    """Return a filled cache whose ``attend`` is what the benches time; ``UnsupportedError`` without a kernel here."""
    if reason := refusal(scheme_of(spec), shape.head_dim, device):
        raise UnsupportedError(reason)
    return Packed(spec, shape, device, seed)
