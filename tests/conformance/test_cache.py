"""LayerCache: whatever the split into calls and whatever is removed, it answers as a list of decoded tokens would."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packedkv
from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.errors import UnsupportedError
from packedkv.files.caches import load_layers, save_layers
from packedkv.integrations.transformers.argument import passing
from packedkv.kernels.choose import Kernels
from packedkv.store.site import LayerSite
from tests.fuzz.oracle import AGED, DENSE, SINK, LayerTokens

from .conftest import CALIBRATED, beside_presets, in_turn
from .support import (
    DTYPES,
    HEAD_DIMS,
    assert_alike,
    block_of,
    cache_of,
    dim_of,
    edge_lengths,
    given_params,
    kv,
    mixtures,
    quick,
    same_bits,
    supported_dims,
)


def filled(scheme, k, v, *cuts: int, **options) -> packedkv.LayerCache:
    """A cache that saw ``k, v`` in pieces that end at ``cuts``."""
    cache = cache_of(scheme, heads=k.shape[1], dim=k.shape[3], **options)
    at = 0
    for cut in (*cuts, k.shape[2]):
        cache.append(k[:, :, at:cut], v[:, :, at:cut])
        at = cut
    return cache


@pytest.fixture(scope="module")
def scheme(spec):
    return packedkv.get(spec)


@pytest.fixture(scope="module")
def total(scheme):
    """Enough tokens for every edge."""
    return scheme.sink + scheme.window + 2 * block_of(scheme) + 3


@beside_presets(*CALIBRATED)
def test_token_by_token_is_one_prefill(scheme, total):
    k, v = kv(total, batch=1, heads=1, dim=dim_of(scheme))
    assert_alike(filled(scheme, k, v, *range(1, total)), filled(scheme, k, v))


def test_any_split_at_an_edge_is_one_prefill(scheme, total):
    k, v = kv(total, batch=1, heads=1, dim=dim_of(scheme))
    whole = filled(scheme, k, v)
    edges = [n for n in edge_lengths(scheme) if n <= total]
    for edge in edges:
        assert_alike(filled(scheme, k, v, edge), whole)
        assert_alike(filled(scheme, k, v, edge, min(edge + 1, total)), whole)


def test_one_prefill_is_compress(scheme, total):
    for n in sorted({*edge_lengths(scheme), total, 1000}):
        k, v = kv(n, batch=1, heads=1, dim=dim_of(scheme))
        cache = filled(scheme, k, v)
        packed = packedkv.compress(scheme, k, v, params=given_params(scheme, heads=1, dim=dim_of(scheme)))
        for role, a, b in zip(("key", "value"), cache.decode(), packed.decode(), strict=True):
            assert same_bits(a.contiguous(), b.to(a.dtype)), f"{role} N={n}"
            assert cache.roles[role].encoded == scheme.encoded_tokens(role, n)


def test_tokens_keep_their_dtype_and_memory_of_their_own(scheme, total):
    for dtype in DTYPES:
        k, v = kv(total, batch=1, heads=1, dim=dim_of(scheme), dtype=dtype)
        cache = filled(scheme, k, v, 2)
        before = [x.clone() for x in cache.decode()]
        assert {x.dtype for x in before} == {dtype}
        k.fill_(7)
        v.fill_(7)
        for a, b in zip(before, cache.decode(), strict=True):
            assert torch.equal(a, b), "the cache keeps a view of the caller's tensor"


@in_turn("dim", HEAD_DIMS)
def test_every_head_dim_equals_the_oracle(scheme, total, dim):
    if dim not in supported_dims(scheme.key) or dim not in supported_dims(scheme.value):
        pytest.skip(f"{scheme} refuses head_dim {dim}; its message is tested in test_layout")
    k, v = kv(total, batch=1, heads=1, dim=dim, dtype=torch.bfloat16)
    cache = filled(scheme, k, v, total // 2)
    model = LayerTokens(cache.site)
    model.append(k, v)
    for a, b in zip(cache.decode(), model.decode(), strict=True):
        assert same_bits(a.contiguous(), b)


@pytest.mark.parametrize("spec", ["rope-pairs-3", "innerq-base", "hqmq-s24_r4:outliers=3,slots=5", "saw-int4:kmeans=5"])
def test_constants_of_a_prefill_are_each_sequences_own(spec, tmp_path):
    """A sequence is what it is alone: beside another one, after a selection, and loaded from a file."""
    scheme = packedkv.get(spec)
    k, v = kv(scheme.sink + scheme.window + 80, dim=64)
    k[0] *= torch.logspace(0, 1, 64).half()
    both, alone = packedkv.LayerCache(scheme), packedkv.LayerCache(scheme)
    for part in (slice(0, -5), slice(-5, None)):
        both.append(k[:, :, part], v[:, :, part])
        alone.append(k[1:, :, part], v[1:, :, part])
    assert any(len(x) == 2 for x in both.roles["key"].params.values())
    save_layers(tmp_path / "c", [both], {})
    loaded = load_layers(tmp_path / "c")[0][0]
    for cache in (both, loaded):
        assert all(torch.equal(a[1:], b) for a, b in zip(cache.decode(), alone.decode(), strict=True))
        cache.select(torch.tensor([1]))
        assert_alike(cache, alone)


def test_page_size_and_reserve_change_nothing(scheme, total):
    k, v = kv(total, batch=2, heads=1, dim=dim_of(scheme))
    whole = filled(scheme, k, v)
    page = scheme.page_layout(dim_of(scheme)).page_tokens
    assert_alike(filled(scheme, k, v, page_tokens=2 * page), whole)
    assert_alike(filled(scheme, k, v, 1, capacity=4 * total), whole)


def test_reading_a_range_is_a_slice_of_everything(scheme, total):
    cache = filled(scheme, *kv(total, batch=1, heads=1, dim=dim_of(scheme)), 3)
    k, v = cache.decode()
    for first in (0, 1, scheme.sink, total // 2, total - 1, total):
        for last in (first, first + 1, total - 1, total):
            if first <= last <= total:
                a, b = cache.decode(first, last)
                assert same_bits(a.contiguous(), k[:, :, first:last].contiguous()), (first, last)
                assert same_bits(b.contiguous(), v[:, :, first:last].contiguous()), (first, last)


# -- removing and rearranging, against the oracle ------------------------------------------------------------------


@st.composite
def programs(draw, scheme):
    """A list of operations; sizes as fractions, so that they fit whatever the cache holds by then."""
    lengths = sorted({*edge_lengths(scheme), 2, 3, 5})
    share = st.integers(0, 100)
    steps = [("append", draw(st.sampled_from(lengths)), draw(st.integers(0, 99)))]
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["append", "append", "crop", "evict", "select", "repeat"]))
        size = draw(st.sampled_from(lengths)) if kind == "append" else draw(share)
        steps.append((kind, size, draw(share)))
    return steps


def step(kind: str, size: int, extra: int, cache: packedkv.LayerCache, model: LayerTokens, dtype: torch.dtype) -> None:
    """Do one operation on both."""
    n = len(model)
    if kind == "append":
        x = kv(size, batch=cache.batch or 2, heads=1, dim=dim_of(model.scheme), seed=extra, dtype=dtype)
        cache.append(*x)
        model.append(*x)
    elif kind == "crop":
        keep = n - size * n // 300  # at most a third goes, as a rejected draft would
        cache.crop(keep)
        model.crop(keep)
    elif kind == "evict":
        keep = extra * n // 400
        count = size * (n - keep) // 200
        cache.evict(count, keep)
        model.evict(count, keep)
    elif cache.batch:
        index = [torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([0, 1, 1])][size % 4]
        index = index % cache.batch
        if kind == "repeat":
            times = 1 if cache.batch > 2 else 2
            index = torch.arange(cache.batch).repeat_interleave(times)
            cache.repeat(times)
        else:
            cache.select(index)
        model.select(index)


@quick
@given(data=st.data())
def test_random_operations_equal_the_same_on_decoded_tokens(scheme, data):
    """A token's decoded value never changes once it is encoded, and no operation touches its neighbours."""
    # the preset as it is, or its codecs behind a short sink and window, whose edges small programs reach more often
    scheme = data.draw(st.sampled_from([scheme, replace(scheme, sink=3, window=5)]))
    dtype, cache = data.draw(st.sampled_from(DTYPES)), cache_of(scheme, heads=1, dim=dim_of(scheme))
    model = LayerTokens(cache.site)
    for kind, size, extra in data.draw(programs(scheme)):
        step(kind, size, extra, cache, model, dtype)
        assert (len(cache), cache.start) == (len(model), model.start), (kind, size, extra)
        if len(model):
            for name, a, b in zip(("keys", "values"), cache.decode(), model.decode(), strict=True):
                assert torch.equal(a, b), f"{name} after {kind}({size}, {extra})"
        for role, state in cache.roles.items():
            held = (state.sink.shape[2], state.encoded, state.window.shape[2])
            where = model.roles[role].where if len(model) else []
            assert held == tuple(where.count(kind) for kind in (SINK, AGED, DENSE)), role
        assert sum(cache.nbytes().values()) == sum(t.untyped_storage().nbytes() for t in cache.tensors())


@quick
@given(data=st.data())
def test_appends_of_any_values_in_any_pieces_equal_the_oracle(scheme, data):
    dim, dtype = dim_of(scheme), data.draw(st.sampled_from(DTYPES))
    cache = cache_of(scheme, heads=1, dim=dim)
    model = LayerTokens(cache.site)
    for n in data.draw(st.lists(st.sampled_from(edge_lengths(scheme)), min_size=1, max_size=3)):
        x = [data.draw(mixtures(1, 1, n, dim)).to(dtype).clamp(-65280, 65280) for _ in range(2)]
        cache.append(*x)
        model.append(*x)
    if len(model):
        for name, a, b in zip(("keys", "values"), cache.decode(), model.decode(), strict=True):
            assert torch.equal(a, b), name


@in_turn("cut", ["crop", "evict", "evict-keep"])
def test_going_on_after_a_cut_inside_a_block(scheme, cut):
    """The living half of a block is not written over by the next one, and is not encoded again."""
    scheme, dim, g = replace(scheme, sink=3, window=5), dim_of(scheme), block_of(scheme)
    for inside in {1, g // 2, g - 1}:
        cache = cache_of(scheme, heads=1, dim=dim)
        model = LayerTokens(cache.site)
        step("append", 3 + 2 * g + 5, 0, cache, model, torch.float16)
        before = cache.decode()[0]
        arguments = {"crop": (3 + g + inside,), "evict": (3 + inside, 0), "evict-keep": (g, 3 + inside)}[cut]
        for target in (cache, model):
            getattr(target, cut.partition("-")[0])(*arguments)
        for i in range(3):
            step("append", g + 1, i + 1, cache, model, torch.float16)
            for a, b in zip(cache.decode(), model.decode(), strict=True):
                assert torch.equal(a, b), (inside, i)
        lived = before[:, :, 3 + inside :] if cut == "evict" else before[:, :, : 3 + inside]
        assert torch.equal(cache.decode()[0][:, :, : min(g, lived.shape[2])], lived[:, :, :g])


@in_turn("first", [0, 4, 100], ids="keep{}".format)
def test_a_stream_of_fixed_length_stays_bounded(scheme, first):
    """Append a chunk, evict a chunk, for ever: the bytes held do not creep, first tokens kept or not."""
    dim, chunk = dim_of(scheme), 8
    rounds = max(40, 5 * block_of(scheme) // chunk)  # bytes swing with the blocks: each half sees two of them
    cache = cache_of(scheme, heads=1, dim=dim)
    held = scheme.sink + scheme.window + block_of(scheme) + 64 + first
    cache.append(*kv(held, batch=1, heads=1, dim=dim))
    sizes = []
    for i in range(rounds):
        cache.append(*kv(chunk, batch=1, heads=1, dim=dim, seed=i))
        cache.evict(chunk, keep=first)
        sizes.append(sum(cache.nbytes().values()))
    assert len(cache) == held
    assert max(sizes[rounds // 2 :]) <= max(sizes[: rounds // 2]), sizes


LENGTHS = ((1, 1), (3, 70))
"""Sequences and tokens."""


@pytest.mark.parametrize("kind", [LayerCache, FusedLayerCache])
@pytest.mark.parametrize("spec", packedkv.presets())
def test_a_cache_is_never_larger_than_none(spec: str, kind: Any) -> None:
    """A sequence has at most one page that is not full, and a step reserves 1/32 of the pages."""
    for batch, tokens in LENGTHS:
        site = LayerSite(packedkv.get(spec).for_layer(1, 3))
        try:
            cache = kind(site, kernels=Kernels(None)) if kind is FusedLayerCache else kind(site)
            k, v = torch.randn(2, batch, 2, tokens, 64, generator=torch.Generator().manual_seed(0))
            cache.append(k, v)
        except UnsupportedError:
            pytest.skip("no CPU kernels")
        for _ in range(2):
            held, plain = sum(cache.nbytes().values()), 2 * (k.numel() + v.numel()) // tokens * len(cache)
            page = 2 * cache.store.heads * cache.store.layout.page_bytes  # with that of recent tokens
            assert held <= plain * 33 // 32 + batch * (page + 4 * cache.store.table.shape[1] + 64)
            cache.append(k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize("attention", ["sdpa", "packedkv"])
@pytest.mark.parametrize("spec", ["ghost-4", "ghost-2", "saw-int4:mean=pre"])
def test_no_page_is_held_while_a_padded_batch_waits_for_its_constants(tiny: Any, spec: str, attention: str) -> None:
    """The shortest sequence decides when constants are fitted; until then no token leaves the dense window."""
    model, lengths = tiny("llama-gqa"), (5, 40, 600)
    ids, mask = torch.zeros(3, 600, dtype=torch.long), torch.zeros(3, 600, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, 128, (length,))
        mask[row, -length:] = 1
    model.set_attn_implementation(attention)
    cache = packedkv.cache_for(model, spec, probe=False)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), **passing(model, cache))
    assert cache.report()["ratio_to_16bit"] >= 0.99
