"""``packedkv bench prefill``: time a block of new tokens over packed history.

- ``prefill_us``: n new queries over T packed tokens and, causally, over their own n fresh ones; dirty L2, eager
- ``prefill_apart_us``: the same by decoding all K and V to bf16 in torch (``dequant_us`` alone), then flash attention;
  ``least_apart_us`` is a bound on it: bytes read and written at 4.3 TB/s, then flash
- ``prefill_speedup``: ``prefill_apart_us`` over ``prefill_us``

Rows of spec ``dense`` are flash attention over bf16 K and V of T + n tokens.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from packedkv.attention import attend_parts, rounded_queries
from packedkv.errors import SpecError
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.tokens import ChunkTokens, Rules
from packedkv_lab.bench.decode import ROOFLINE_BYTES_PER_US
from packedkv_lab.bench.packed import SCALES, Gate, Packed, packed_operator, worst
from packedkv_lab.bench.record import GateError, Recorder
from packedkv_lab.bench.shapes import Shape
from packedkv_lab.bench.timing import ratio

QUERIES = (16, 128, 512, 2048)
HISTORIES = ((1, 2048), (1, 32768), (8, 8192))
HQMQ = tuple((1, tokens) for tokens in (2048, 4096, 8192, 16384, 32768)), (1, 2048)
"""Histories and new tokens of HQMQ's Tables 5 and 7."""
CHECKED_ROWS = 64


def prefill_shape(batch: int, tokens: int, queries: int) -> Shape:
    """Mistral's and Llama-3.1-8B's heads.

    >>> prefill_shape(1, 2048, 16).name
    'prefill_b1_t2048_q16'
    """
    return Shape(f"prefill_b{batch}_t{tokens}_q{queries}", batch, 32, 8, 128, tokens, queries=queries)


def prefill_shapes(names: str) -> list[Shape]:
    """Shapes by name, comma-separated: ``prefill_b1_t2048_q16``; ``all`` is the default, ``hqmq`` HQMQ's tables.

    >>> [shape.name for shape in prefill_shapes("prefill_b1_t2048_q16")], len(prefill_shapes("all,hqmq"))
    (['prefill_b1_t2048_q16'], 20)
    """
    shapes: dict[str, Shape] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        histories, queries = {"all": (HISTORIES, QUERIES), "hqmq": HQMQ}.get(name, ((), ()))
        made = [prefill_shape(batch, tokens, n) for batch, tokens in histories for n in queries]
        if match := _NAME.fullmatch(name):
            made = [prefill_shape(*map(int, match.groups()))]
        if not made:
            raise SpecError(f"bench prefill: no shape {name!r}; use some of all, hqmq, prefill_b1_t4096_q512, ...")
        shapes |= {shape.name: shape for shape in made}
    return list(shapes.values())


_NAME = re.compile(r"prefill_b(\d+)_t(\d+)_q(\d+)")


def prefill_rows(specs: Sequence[str], shapes: Sequence[Shape], recorder: Recorder) -> None:
    """Time presets and flash attention at shapes of ``prefill_shapes``; what is recorded already is left out."""
    for shape in shapes:
        n = shape.queries
        wanted = [spec for spec in specs if not recorder.has(spec, "prefill_us", shape.name)]
        if not wanted:
            continue
        if recorder.late(shape.name):
            return
        draw = partial(_draw, torch.Generator(recorder.device).manual_seed(recorder.seed), shape.batch)
        k, v = draw(8, shape.tokens + n), draw(8, shape.tokens + n)
        flash = recorder.timer.eager(partial(dense_attention, draw(32, n), k, v), 12)
        recorder.add("dense", 16.0, "prefill_us", "us", shape.name, flash, sizes=shape.sizes())
        del k, v
        for spec in wanted:
            if recorder.late(f"{spec} at {shape.name}"):
                return
            _preset_rows(spec, shape, recorder, flash["p50"])


def _draw(generator: torch.Generator, batch: int, heads: int, n: int) -> Tensor:
    size = (batch, heads, n, 128)
    return torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Flash attention of the newest ``q [B, HQ, n, D]`` over bf16 ``k, v [B, H, T, D]``: query i sees T - n + i + 1."""
    if q.is_cuda:
        mask = causal_lower_right(q.shape[2], k.shape[2])
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attend_parts(q, [(k, v)], k.shape[2], scale=q.shape[3] ** -0.5)


@torch.no_grad()
def _preset_rows(spec: str, shape: Shape, recorder: Recorder, flash: float) -> None:
    n, timer = shape.queries, recorder.timer
    with recorder.case(spec, shape.name, "prefill_us", more={"sizes": shape.sizes() | {"queries": n}}) as case:
        packed = packed_operator(spec, shape, recorder.device, recorder.seed)
        draw = partial(_draw, torch.Generator(recorder.device).manual_seed(recorder.seed), shape.batch)
        q, k, v = draw(shape.query_heads, n), draw(shape.kv_heads, n), draw(shape.kv_heads, n)
        fused = prefill_operator(packed, q, k, v)
        asked = [(q * scale).bfloat16() for scale in SCALES]
        checked = worst(prefill_error(packed, x, k, v, prefill_operator(packed, x, k, v)()) for x in asked)
        if not checked.passed:
            raise GateError(str(checked))
        ours = timer.eager(fused, 12)
        apart = timer.eager(lambda: prefill_apart(packed, q, k, v), 3)
        least = (packed.bytes_read + 2 * shape.bf16_bytes) / ROOFLINE_BYTES_PER_US + flash
        case.add("dequant_us", "us", timer.eager(packed.cache.decode, 3))
        case.add("prefill_apart_us", "us", apart, least_apart_us=least)
        case.add("prefill_speedup", "x", ratio(apart["p50"], ours))
        case.add("prefill_us", "us", ours, flash_us=flash)


def prefill_apart(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Decode everything, then flash attention."""
    both = [torch.cat([old, new], 2) for old, new in zip(packed.cache.decode(), (k, v), strict=True)]
    return dense_attention(q, both[0], both[1])


def prefill_operator(packed: Packed, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return the call that attends with ``q`` to the packed history and causally to the fresh ``k, v``."""
    cache = packed.cache
    assert isinstance(cache.engine, CudaEngine)
    assert cache.store is not None
    if not cache.engine.ready:  # the cache has not run a step yet
        cache.engine.prepare(cache.roles)
    sink = packed.dense["key"][0], packed.dense["value"][0]
    # as a cache whose window holds the fresh tokens
    fresh = torch.cat([packed.dense["key"][1], k], 2), torch.cat([packed.dense["value"][1], v], 2)
    pages, table = cache.store.pages, cache.store.table
    tokens = ChunkTokens(pages, table, 0, packed.encoded["key"], sink, fresh, packed.placed)
    return partial(cache.engine.attend_chunk, q, tokens, Rules(packed.shape.head_dim**-0.5))


def prefill_error(packed: Packed, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> Gate:
    """Relative errors of some rows of one KV head against float64 over the decoded values: the kernel's and bf16's."""
    shape, n = packed.shape, q.shape[2]
    b, h = shape.batch - 1, shape.kv_heads - 1
    history = packed.truth(b, h)
    keys, values = (torch.cat([old, new[b, h].float()]) for old, new in zip(history, (k, v), strict=True))
    state = packed.cache.roles["key"]
    if state.params is not None:
        q = rounded_queries(q, state.codec, state.params, shape.kv_heads)
    rows = torch.linspace(0, n - 1, min(n, CHECKED_ROWS), device=q.device).long()
    heads = slice(h * shape.group, (h + 1) * shape.group)
    part = q[b, heads][:, rows]
    hidden = torch.arange(len(keys), device=q.device)[None] > rows[:, None] + shape.tokens
    scores = part.double() @ keys.double().T * shape.head_dim**-0.5
    exact = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values.double()
    bias = torch.zeros(hidden.shape, device=q.device, dtype=torch.bfloat16).masked_fill_(hidden, -torch.inf)
    short = [x.bfloat16() for x in (part[None], keys[None, None], values[None, None])]
    low = scaled_dot_product_attention(short[0], short[1], short[2], attn_mask=bias, enable_gqa=True)[0]
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (output[b, heads][:, rows], low)]
    return Gate(errors[0], errors[1])
