"""Bytes: what is packed is exactly what the layout says, and what is printed is exactly what is packed."""

import gc
import math
import mmap
import re
from pathlib import Path

import pytest
import torch

import packedkv
from packedkv.codec import Site
from packedkv.layout import PLANE_ALIGN, PageLayout
from packedkv.registry import get
from packedkv.store.pages import HUGE, PageStore, zeroed_pool

from .conftest import in_turn
from .support import (
    HEAD_DIMS,
    block_of,
    cache_of,
    dim_of,
    fit,
    gaussian,
    kv,
    payload_equal,
    raw,
    refusal,
    sides,
    supported_dims,
)


@in_turn("dim", HEAD_DIMS)
def test_payload_is_exactly_the_layout(spec, dim):
    for role, codec in sides(packedkv.get(spec)):
        if text := refusal(codec, dim):
            assert any(str(d) in text for d in supported_dims(codec)), f"{text}: name a head_dim it takes"
            continue
        layout = codec.layout(dim)
        g = codec.block_tokens
        assert (layout.head_dim, layout.block_tokens) == (dim, g)
        params = fit(codec, Site(0, role, 2, dim))
        x = codec.to_code(gaussian(2, 2, 3 * g, dim).float(), params)
        payload = codec.encode(x, params)
        assert list(payload) == [f.name for f in layout.fields]
        for field in layout.fields:
            tensor = payload[field.name]
            assert tensor.dtype == field.torch_dtype, field.name
            assert tensor.shape == (2, 2, 3, *field.shape), field.name
            assert tensor.nbytes == 2 * 2 * 3 * field.nbytes, field.name
        decoded = codec.decode(payload, params)
        assert (decoded.dtype, decoded.shape) == (torch.float32, x.shape)


def test_head_dims_of_real_models_are_taken_or_refused_with_the_way_out(spec):
    for _, codec in sides(packedkv.get(spec)):
        assert supported_dims(codec), "a codec takes at least one head_dim of real models"
        for dim in (1, 7, 33, 60, 100, 576):
            if text := refusal(codec, dim):
                assert str(dim) in text
                assert any(word in text for word in ("use", "multiple", "allowed", "expected")), text


@in_turn("dim", HEAD_DIMS)
def test_listed_bits_are_measured_bytes(spec, dim):
    scheme = packedkv.get(spec)
    if any(dim not in supported_dims(codec) for _, codec in sides(scheme)):
        pytest.skip(f"{spec} refuses head_dim {dim}; its message is tested above")
    tokens = math.lcm(scheme.key.block_tokens, scheme.value.block_tokens)
    k, v = kv(tokens, dim=dim)
    packed = packedkv.compress(scheme.without_windows(), k, v)
    described = packedkv.describe(spec, dim)
    for role in ("key", "value"):
        held = sum(size for part, size in packed.nbytes.items() if part.startswith(f"{role}."))
        assert held * 8 / k.numel() == described[f"{role}_bits"], role
    assert packed.effective_bits == pytest.approx(described["effective_bits"], rel=1e-14)
    assert described["nominal_bits"] <= described["effective_bits"]


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_nbytes_is_the_formula_and_the_tensors(spec, extra):
    """Of a cache and of compressed tensors."""
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    tokens = scheme.sink + scheme.window + 2 * block_of(scheme) + extra
    cache, (k, v) = cache_of(scheme, dim=dim), kv(tokens, dim=dim)
    packed = packedkv.compress(scheme, k, v)
    cache.append(k, v)
    parts, expected = cache.nbytes(), 0
    assert sum(parts.values()) == sum(t.untyped_storage().nbytes() for t in cache.tensors())
    for role, codec in sides(scheme):
        encoded = scheme.encoded_tokens(role, tokens)
        planes = {f"{role}.{f.part}" for f in codec.layout(dim).fields}
        held = sum(parts[p] for p in planes)
        assert held == 4 * encoded // codec.block_tokens * codec.layout(dim).block_bytes
        expected += held + 4 * (tokens - encoded) * dim * 2
        sink = min(scheme.sink, tokens)
        assert parts.get(f"{role}.sink", 0) == 4 * sink * dim * 2
        assert parts.get(f"{role}.window", 0) == 4 * (tokens - sink - encoded) * dim * 2
    assert sum(packed.nbytes.values()) == sum(t.nbytes for t in packed.tensors()) == expected
    assert packed.effective_bits == expected * 8 / (2 * k.numel())
    page = scheme.page_layout(dim)
    pages = -(-max(scheme.encoded_tokens("key", tokens), scheme.encoded_tokens("value", tokens)) // page.page_tokens)
    held = sum(size for part, size in parts.items() if part.split(".")[-1] not in ("sink", "window", "table"))
    assert held == 2 * 2 * pages * page.page_bytes, "pages for the encoded tokens and not one more"


def test_page_planes_are_aligned_in_order_and_apart(spec):
    scheme = packedkv.get(spec)
    for dim in set(supported_dims(scheme.key)) & set(supported_dims(scheme.value)):
        page = scheme.page_layout(dim)
        assert page.page_tokens % 64 == 0 or page.page_tokens >= 64
        names = [(p.role, p.field.name) for p in page.planes]
        assert names == [("key", f.name) for f in page.key.fields] + [("value", f.name) for f in page.value.fields]
        end = 0
        for plane in page.planes:
            assert plane.offset % PLANE_ALIGN == 0
            assert 0 <= plane.offset - end < PLANE_ALIGN, "no gap beyond the padding, no overlap"
            end = plane.offset + plane.nbytes
        assert 0 <= page.page_bytes - end < PLANE_ALIGN


def test_pages_give_back_the_payload_bit_for_bit(spec):
    scheme = packedkv.get(spec)
    dim = dim_of(scheme)
    page = scheme.page_layout(dim)
    store = PageStore(page, 2, 2, torch.device("cpu"))
    for role, codec in sides(scheme):
        g = codec.block_tokens
        params = fit(codec, Site(0, role, 2, dim))
        tokens = page.page_tokens + 2 * g
        payload = codec.encode(codec.to_code(gaussian(2, 2, tokens, dim, seed=3).float(), params), params)
        store.ensure(tokens)
        store.write(role, 0, payload)
        assert payload_equal(store.read(role, 0, tokens), payload)
        assert payload_equal(store.read(role, g, 2 * g), {n: t[:, :, 1:2] for n, t in payload.items()})
        # and the bytes lie where docs/format.md says: plane after plane, blocks in order
        for plane in page.planes:
            if plane.role == role:
                first = store.pages[store.table[1, 0].long(), 0, plane.offset : plane.offset + plane.nbytes]
                assert torch.equal(first, raw(payload[plane.field.name][1, 0, : plane.blocks]).flatten())


CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 1, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE - 5])
def test_every_size_is_zeros_that_can_be_written(size):
    pool = zeroed_pool((size, 1), CPU)
    assert (pool.shape, pool.dtype, pool.is_contiguous()) == ((size, 1), torch.uint8, True)
    assert not pool.any()
    assert pool.fill_(7).long().sum() == 7 * size


def in_huge_pages():
    """Begin and end of memory for which huge pages are asked."""
    at = r"(\w+)-(\w+) .*\n(?:[A-Z].*\n)*?VmFlags:(.*)"
    maps = re.findall(at, Path("/proc/self/smaps").read_text())
    return [(int(begin, 16), int(end, 16)) for begin, end, flags in maps if "hg" in flags.split()]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux")
def test_whole_huge_pages_are_asked_for_and_given_back():
    pool = zeroed_pool((3 * HUGE - 5,), CPU)
    at = pool.data_ptr()
    if not in_huge_pages():
        pytest.skip("this system has no huge pages")
    assert any(begin <= at and at + 2 * HUGE <= end for begin, end in in_huge_pages())
    del pool
    gc.collect()
    assert not any(begin <= at < end for begin, end in in_huge_pages())


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch):
    if hasattr(mmap, "MADV_HUGEPAGE"):
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # as a kernel that was built without them answers: EINVAL
        assert not zeroed_pool((2 * HUGE,), CPU).any()
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not zeroed_pool((2 * HUGE,), CPU).any()


def test_a_store_keeps_its_bytes_when_it_grows():
    scheme = get("saw-int4")
    layout = PageLayout(scheme.key.layout(128), scheme.value.layout(128))
    store = PageStore(layout, 2, 8, CPU, HUGE // (16 * layout.page_bytes) * layout.page_tokens)
    first, before = store.pages.shape[0], store.capacity
    store.pages.fill_(3)
    store.ensure(4 * before)
    assert store.pages.nbytes >= 4 * HUGE - 64 * layout.page_bytes
    assert (store.pages[:first] == 3).all()
    assert not store.pages[first:].any()
    assert store.table[:, : before // layout.page_tokens].flatten().tolist() == list(range(first))
