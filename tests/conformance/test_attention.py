"""Attention over sink, pages and window == dense attention over the decoded tokens."""

from typing import Any

import pytest
import torch

import packedkv
from packedkv.attention import check_queries, rounded_queries
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache, attend
from packedkv.codec import Site

from .conftest import CALIBRATED, beside_presets, in_turn
from .support import block_of, cache_of, dim_of, gaussian, kv

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def dense_attention(q, k, v, bias=None, scale=None, sinks=None):
    """Softmax attention in float64, written the plain way; fully masked rows give zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights[..., : k.shape[2]] @ v).float()


@pytest.fixture(scope="module")
def filled(spec):
    """``filled(tokens)``: a float32 cache of two sequences and two KV heads."""
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)

    def make(tokens: int) -> packedkv.LayerCache:
        cache = cache_of(scheme, dim=dim)
        cache.append(*kv(tokens, dim=dim, dtype=torch.float32, seed=tokens))
        return cache

    return make


@in_turn("tokens", [1, 63, 1000])
def test_one_query_over_any_length(filled, tokens):
    cache = filled(tokens)
    k, v = cache.decode()
    for query_heads in (2, 8):
        q = gaussian(2, query_heads, 1, k.shape[-1], seed=3).float()
        torch.testing.assert_close(cache.attend(q), dense_attention(q, k, v), **CLOSE)


@in_turn("dtype", [torch.bfloat16, torch.float16])
def test_decoded_tokens_are_not_rounded_to_16_bit(spec, dtype):
    """Rows of equal values and queries of size 100: a rounded key would move a score by whole numbers."""
    scheme = packedkv.get(spec)
    dim, tokens = dim_of(scheme), scheme.sink + scheme.window + 2 * block_of(scheme) + 150
    cache = cache_of(scheme, dim=dim)
    k, v = gaussian(2, 2, 2, tokens, 1, seed=1).float().expand(-1, -1, -1, -1, dim).to(dtype)
    cache.append(k.contiguous(), v.contiguous())
    q = (100 * gaussian(2, 6, 1, dim, seed=2)).to(dtype).float()
    # ultraquant rounds queries in the basis of the codes
    key = cache.roles["key"]
    rounded = rounded_queries(q, key.codec, key.params, key.site.num_heads)
    want = dense_attention(rounded, *cache.decode(dtype=torch.float32))
    for out in (attend(q, cache), cache.attend(q)):
        torch.testing.assert_close(out, want, rtol=0, atol=5e-4)


def test_outputs_saturate_in_fp16(spec):
    """Numbers near 65504 may be decoded to larger ones; in fp16 they and their weighted mean stay finite."""
    scheme = packedkv.get(spec)
    dim, tokens = dim_of(scheme), scheme.sink + scheme.window + 2 * block_of(scheme) + 150
    ones = torch.ones(2, 2, 2, tokens, dim)
    for signs in (ones, -ones, gaussian(2, 2, 2, tokens, dim, seed=1).float().sign()):
        cache = cache_of(scheme, dim=dim)
        cache.append(*(65504 * signs).half())
        q = 1e-4 * gaussian(2, 4, 1, dim, seed=2)
        for out in (*cache.decode(), attend(q, cache), cache.attend(q)):
            assert out.dtype == torch.float16
            assert bool(out.isfinite().all())


@beside_presets(*CALIBRATED)
def test_masks_scale_and_learned_sinks(spec, filled):
    scheme = packedkv.get(spec)
    tokens = scheme.sink + scheme.window + block_of(scheme) + 9
    cache = filled(tokens)
    k, v = cache.decode()
    q = gaussian(2, 4, 3, k.shape[-1], seed=5).float()
    seen = gaussian(2, 1, 3, tokens, seed=6).float() > -0.5
    seen[0, :, 1] = False  # a padded row sees nothing
    seen[1, :, :, : tokens // 2] = False  # a left-padded sequence
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    out = cache.attend(q, mask=seen, chunk=16)
    assert bool(out.isfinite().all())
    assert not out[0, :, 1].any()
    torch.testing.assert_close(out, dense_attention(q, k, v, bias), **CLOSE)

    additive = gaussian(1, 4, 3, tokens, seed=8).float()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    out = cache.attend(q, mask=additive, scale=0.2, sinks=sinks, chunk=16)
    torch.testing.assert_close(out, dense_attention(q, k, v, additive, 0.2, sinks), **CLOSE)


def test_output_has_the_queries_dtype_and_empty_caches_say_so(spec, filled):
    cache = filled(5)
    q = gaussian(2, 2, 1, cache.decode()[0].shape[-1])
    assert cache.attend(q).dtype == torch.float16
    with pytest.raises(packedkv.ShapeError, match="query heads must be a multiple"):
        cache.attend(q[:, :1].expand(-1, 3, -1, -1))
    with pytest.raises(packedkv.ShapeError, match="append keys and values first"):
        packedkv.LayerCache(packedkv.get(spec)).attend(q)


@pytest.mark.parametrize(("shape", "kv_heads"), [((2, 4, 1, 64), 0), ((2, 0, 1, 64), 0), ((2, 3, 1, 64), 2)])
def test_queries_that_fit_no_heads_are_refused(shape, kv_heads):
    with pytest.raises(packedkv.ShapeError, match=r"multiple of the KV heads, which are one or more|0 KV heads"):
        check_queries(torch.zeros(shape), 2, Site(0, "key", kv_heads, 64))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *((LayerCache, spec) for spec in ("saw-int4", "turboquant-2", "polarquant-3", "octopus-qjl-2", "ghost-3")),
        (FusedLayerCache, "octopus-qjl-2"),
    ],
)
def test_a_cache_does_not_see_it(kind: Any, spec: str) -> None:
    k, v, q = torch.randn(3, 1, 2, 1100 if spec == "ghost-3" else 70, 64, generator=torch.Generator().manual_seed(0))
    scheme, found = packedkv.get(spec).for_layer(1, 3), []
    for enabled in (False, True):
        cache = kind(scheme)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cache.append(k, v)
            found.append((*cache.decode(), cache.attend(q), cache.attend(q[:, :, :1]), cache.store.pages))
    for plain, cast in zip(*found, strict=True):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


def test_bare_tensors_do_not_see_it() -> None:
    k, v = torch.randn(2, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    plain = packedkv.fake_quant("turboquant-3", k, v)
    with torch.autocast("cpu", torch.bfloat16):
        for mine, theirs in zip(packedkv.fake_quant("turboquant-3", k, v), plain, strict=True):
            assert torch.equal(mine, theirs)
