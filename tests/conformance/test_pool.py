"""Memory of pages: zeros of any size, in huge pages where the system has them."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from packedkv.layout import PageLayout
from packedkv.registry import get
from packedkv.store.pages import HUGE, PageStore, zeroed_pool

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
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeroed_pool((2 * HUGE,), CPU).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux")
def test_refused_advice_is_no_error(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # as a kernel that was built without them answers: EINVAL
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
