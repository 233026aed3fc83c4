"""``packedkv bench cache``: time caches on any device, without kernels, beside torch's SDPA over uncompressed K and V.

- ``encode_us``: ``append`` of all tokens to an empty cache, allocation included
- ``append_us``: ``append`` of one token, mean over one block of the codec, so that a group's encoding counts
- ``decode_us``, ``attend_us``: all tokens to the input's dtype; one new query per sequence over all tokens
- ``speedup_vs_sdpa``: SDPA's time (rows of spec ``sdpa``) over ``attend_us``, pair by pair

``effective_bits`` count all bytes of the cache: windows, free page slots and the table too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packedkv.cache.layer import LayerCache
from packedkv.errors import KVError
from packedkv.registry import get
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.shapes import Shape
from packedkv_lab.bench.timing import in_turn, ratios, spread

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AGREEMENT = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest difference between ``attend`` and SDPA over the decoded K and V (outputs are below 1): rounding only."""


def drawn(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw Gaussian q ``[B, HQ, 1, D]``, k and v ``[B, H, T, D]``, float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, n: int) -> Tensor:
        return torch.randn(shape.batch, heads, n, shape.head_dim, generator=generator)

    k, v = draw(shape.kv_heads, shape.tokens), draw(shape.kv_heads, shape.tokens)
    return draw(shape.query_heads, 1), k, v


@torch.no_grad()
def cache_rows(
    specs: Sequence[str], shape: Shape, recorder: Recorder, *, dtype: str = "float32", repeats: int = 5
) -> None:
    """Time caches of Gaussian K and V in ``dtype``, each metric ``repeats`` times after a warm-up."""
    for spec in specs:
        get(spec).page_layout(shape.head_dim)  # refuses a head_dim it cannot take
    device = recorder.device
    q, k, v = (x.to(device, DTYPES[dtype]) for x in drawn(shape, recorder.seed))
    common = {"dtype": dtype, "repeats": repeats}

    def us(*jobs: Callable[[], object]) -> list[list[float]]:
        return [[1e6 * seconds for seconds in times] for times in in_turn(jobs, device, repeats)]

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    bits, name = k.element_size() * 8.0, shape.name
    recorder.add("sdpa", bits, "attend_us", "us", name, spread(us(sdpa)[0]), path="torch", **common)
    for spec in specs:
        cache = _filled(spec, k, v)
        bits = sum(cache.nbytes().values()) * 8 / cache.elements()
        _check(spec, cache, q, AGREEMENT[dtype])
        path = "reference" if type(cache) is LayerCache else "kernel"
        times = {
            "encode_us": us(lambda spec=spec: _filled(spec, k, v))[0],  # type: ignore[misc]
            "decode_us": us(cache.decode)[0],
        }
        times["attend_us"], dense = us(lambda cache=cache: cache.attend(q), sdpa)  # type: ignore[misc]
        times["speedup_vs_sdpa"] = ratios(dense, times["attend_us"])
        block = block_tokens(cache)
        appended = us(lambda cache=cache: append_block(cache, k, v))[0]  # type: ignore[misc]
        times["append_us"] = [t / block for t in appended]
        for metric, values in times.items():
            unit = "us" if metric.endswith("_us") else "x"
            recorder.add(spec, bits, metric, unit, name, spread(values), path=path, **common)


def block_tokens(cache: LayerCache) -> int:
    """Appends after which every codec of the cache has encoded once."""
    return max(state.codec.block_tokens for state in cache.roles.values())


def append_block(cache: LayerCache, k: Tensor, v: Tensor) -> None:
    """Append one block, token by token."""
    for _ in range(block_tokens(cache)):
        cache.append(k[:, :, :1], v[:, :, :1])


def _filled(spec: str, k: Tensor, v: Tensor) -> LayerCache:
    cache = LayerCache(get(spec))
    cache.append(k, v)
    return cache


def _check(spec: str, cache: LayerCache, q: Tensor, tolerance: float) -> None:
    k, v = (x.float() for x in cache.decode())
    exact = scaled_dot_product_attention(q.float(), k, v, enable_gqa=True)
    difference = float((cache.attend(q).float() - exact).abs().max())
    if not difference <= tolerance:
        raise KVError(
            f"bench: attention of {spec} differs from SDPA over its decoded K and V by {difference:.2g} "
            f"(rounding explains {tolerance:.0e}); times of a wrong result mean nothing. Run the test suite."
        )
