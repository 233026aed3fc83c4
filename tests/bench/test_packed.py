"""Packed caches made of a pool: every preset attends to what the pool decodes to, and the gate sees what does not."""

import pytest
import torch

from kvcodec.bench.packed import Gate, Pools, gate, packed_operator, scheme_of
from kvcodec.bench.shapes import PRESETS, Shape
from kvcodec.codec import ROLES
from kvcodec.errors import UnsupportedError
from tests.bench.gpu_stubs import CPU, use_reference

ODD = Shape("odd", 2, 6, 2, 128, 421)


@pytest.fixture(scope="module")
def pools():
    return Pools(CPU, seed=5, pages=3)


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    use_reference(monkeypatch)


@pytest.mark.parametrize("spec", PRESETS)
def test_every_preset_attends_to_what_its_pool_decodes_to(spec, pools):
    packed = packed_operator(spec, ODD, pools)
    found = gate(packed)
    assert found.passed, str(found)
    for b, h in ((0, 0), (1, 1)):
        for decoded, truth in zip(packed.cache.decode(), packed.truth(b, h), strict=True):
            torch.testing.assert_close(decoded[b, h].float(), truth, rtol=8e-3, atol=1e-3)  # decode rounds to bf16


@pytest.mark.parametrize("spec", ["saw-int4", "innerq-base"])
def test_tokens_are_the_shapes_and_windows_are_among_them(spec, pools):
    packed, scheme = packed_operator(spec, ODD, pools), scheme_of(spec)
    for role in ROLES:
        state = packed.cache.roles[role]
        parts = state.dense("sink").shape[2], state.encoded, state.dense("window").shape[2]
        assert packed.encoded[role] == state.encoded
        assert sum(parts) == len(packed.cache) == 421
        assert parts[:2] == (scheme.sink, scheme.encoded_tokens(role, 421))


def test_pages_are_apart_in_memory_and_in_no_order(pools):
    packed = packed_operator("int-4", ODD, pools)
    ids = packed.cache.store.table.flatten().tolist()
    assert sorted(ids) == list(range(2 * 7))
    assert ids != sorted(ids)
    assert packed.cache.store.pages.shape[0] == 14
    assert packed.content.max() < 3


def test_bits_and_bytes_are_those_held(pools):
    packed = packed_operator("saw-int4", ODD, pools)
    held = sum(t.untyped_storage().nbytes() for t in packed.cache.tensors())
    assert packed.effective_bits == held * 8 / ODD.elements
    live = 2 * 2 * 2 * 421 * (64 + 4)  # keys and values, 2 sequences, 2 heads, codes and scales
    assert packed.bytes_read == live + packed.cache.store.table.nbytes + 2 * packed.q.nbytes


def test_a_preset_that_no_kernel_reads_is_refused_before_its_pool_is_made(monkeypatch):
    monkeypatch.setattr("kvcodec.bench.packed.fused_refusal", lambda *_: "nobody reads this")
    monkeypatch.setattr("kvcodec.bench.packed.make_pool", lambda *_: pytest.fail("made"))
    with pytest.raises(UnsupportedError, match="nobody reads this"):
        packed_operator("int-4", ODD, Pools(CPU))


def test_pool_is_encoded_once_per_head_shape(pools):
    assert pools.get("int-4", 2, 128) is pools.get("int-4", 2, 128)
    assert pools.get("int-4", 1, 128).pages.shape[1] == 1


@pytest.mark.parametrize("spec", ["saw-int4", "kivi-2"])
def test_sequences_that_share_their_pages_attend_as_one(spec, pools):
    shape = Shape("apart", 3, 2, 2, 128, 421, shared=True)
    packed = packed_operator(spec, shape, pools)
    assert gate(packed).passed
    assert packed.cache.store.pages.shape[0] == packed.cache.store.table.shape[1]
    assert torch.equal(packed.cache.store.table, packed.cache.store.table[:1].expand(3, -1))
    one = Shape("together", 1, 6, 2, 128, 421)
    assert (shape.elements, shape.sizes()["sequences_held"]) == (one.elements, 1)
    alike = packed.cache.attend(packed.q[:1].expand(3, -1, -1, -1))
    assert torch.equal(alike[0], alike[2])
    other = packed_operator(spec, one, pools)
    pages = [sum(p.nbytes for p in (x.cache.store.pages, *x.cache.store.table[:1])) for x in (packed, other)]
    assert pages[0] == pages[1]
    dense = [sum(x.nbytes for both in p.dense.values() for x in both) for p in (packed, other)]
    rest = [p.cache.store.table.nbytes + 2 * p.q.nbytes for p in (packed, other)]
    assert packed.bytes_read - dense[0] - rest[0] == other.bytes_read - dense[1] - rest[1]


def test_gate_sees_another_sequences_pages(pools):
    packed = packed_operator("int-8", ODD, pools)
    assert gate(packed).passed
    packed.cache.store.table = packed.cache.store.table.flip(0)
    assert not gate(packed).passed


def test_gate_sees_another_heads_bytes(pools):
    packed = packed_operator("int-8", ODD, pools)
    packed.cache.store.pages = packed.cache.store.pages.flip(1)
    assert not gate(packed).passed


def test_gate_sees_nan_and_tokens_past_the_end(pools, monkeypatch):
    packed = packed_operator("int-8", ODD, pools)
    monkeypatch.setattr(packed.cache, "attend", lambda q: q * torch.nan)
    assert not gate(packed).passed
    packed = packed_operator("int-8", ODD, pools)
    for state in packed.cache.roles.values():
        state.runs = [(0, 448)]
    packed.cache.length = 448
    longer = packed.attend()
    for state in packed.cache.roles.values():
        state.runs = [(0, 421)]
    monkeypatch.setattr(packed.cache, "attend", lambda q: longer)
    assert not gate(packed).passed


def test_gate_takes_twice_the_error_of_bf16_and_no_more():
    assert Gate(2e-3, 1e-3).passed
    assert not Gate(2.1e-3, 1e-3).passed
    assert str(Gate(2e-3, 1e-3)) == "attention error 2.00e-03, bf16 SDPA over the decoded K and V 1.00e-03"
