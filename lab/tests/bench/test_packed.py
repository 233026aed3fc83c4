"""Packed caches of distinct tokens: every preset attends to what they decode to, and the gate sees what does not."""

import pytest
import torch

from lab.tests.bench.gpu_stubs import CPU, use_reference
from packedkv.codec import ROLES
from packedkv.errors import UnsupportedError
from packedkv_lab.bench.packed import gate, packed_operator, scheme_of
from packedkv_lab.bench.shapes import PRESETS, Shape

ODD = Shape("odd", 2, 6, 2, 128, 421)


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    use_reference(monkeypatch)


MEANS = ("saw-int4:mean=pre", "turboquant-4:mean=post", "ghost-3")
"""Presets that encode keys without their mean."""


@pytest.mark.parametrize("spec", [*PRESETS, *MEANS])
def test_every_preset_attends_to_what_its_pages_decode_to(spec):
    packed = packed_operator(spec, ODD, CPU, 5)
    found = gate(packed)
    assert found.passed, str(found)
    for b, h in ((0, 0), (1, 1)):
        for decoded, truth in zip(packed.cache.decode(), packed.truth(b, h), strict=True):
            torch.testing.assert_close(decoded[b, h].float(), truth, rtol=8e-3, atol=1e-3)  # decode rounds to bf16


@pytest.mark.parametrize("spec", MEANS)
def test_keys_have_the_mean_that_is_not_encoded(spec):
    packed = packed_operator(spec, ODD, CPU, 5)
    (keys, _), sink = packed.truth(0, 1), packed.cache.scheme.sink
    given, turning = packed.mean.given[0, 1], packed.mean.turning
    back = turning.turn_back(keys[None, None, sink:], torch.arange(sink, 421)[None])[0, 0].mean(0)
    assert float((back - given).norm() / given.norm()) < 0.1
    assert packed.placed.tolist() == [sink, sink]


@pytest.mark.parametrize("spec", ["saw-int4", "innerq-base"])
def test_tokens_are_the_shapes_and_windows_are_among_them(spec):
    packed, scheme = packed_operator(spec, ODD, CPU, 5), scheme_of(spec)
    for role in ROLES:
        state = packed.cache.roles[role]
        parts = state.sink.shape[2], state.encoded, state.window.shape[2]
        assert packed.encoded[role] == state.encoded
        assert sum(parts) == len(packed.cache) == 421
        assert parts[:2] == (scheme.sink, scheme.encoded_tokens(role, 421))


def test_bits_and_bytes_are_those_held():
    packed = packed_operator("saw-int4", ODD, CPU, 5)
    held = sum(t.untyped_storage().nbytes() for t in packed.cache.tensors())
    assert packed.effective_bits == held * 8 / ODD.elements
    live = 2 * 2 * 2 * 421 * (64 + 4)  # keys and values, 2 sequences, 2 heads, codes and scales
    assert packed.bytes_read == live + packed.cache.store.table.nbytes + 2 * packed.q.nbytes


def test_a_preset_that_no_kernel_reads_is_refused_before_anything_is_encoded(monkeypatch):
    monkeypatch.setattr("packedkv_lab.bench.packed.refusal", lambda *_: "nobody reads this")
    monkeypatch.setattr("packedkv_lab.bench.packed.Packed", lambda *_: pytest.fail("made"))
    with pytest.raises(UnsupportedError, match="nobody reads this"):
        packed_operator("int-4", ODD, CPU)


@pytest.mark.parametrize("spec", ["int-8", "kivi-2", "innerq-base"])
def test_every_token_is_another_one(spec, monkeypatch):
    monkeypatch.setattr("packedkv_lab.bench.packed.CHUNK_TOKENS", 100)  # several calls, whole blocks in each
    packed = packed_operator(spec, ODD, CPU, 5)
    for role in range(2):
        rows = torch.cat([packed.truth(b, h)[role] for b in range(2) for h in range(2)])
        assert len(rows.unique(dim=0)) == len(rows) == 4 * 421
        assert 0.5 < float(rows.square().mean()) < 2  # of the Gaussian tokens that were drawn


@pytest.mark.parametrize("spec", ["saw-int4", "kivi-2"])
def test_sequences_that_share_their_pages_attend_as_one(spec):
    shape = Shape("apart", 3, 2, 2, 128, 421, shared=True)
    packed = packed_operator(spec, shape, CPU, 5)
    assert gate(packed).passed
    assert packed.cache.store.pages.shape[0] == packed.cache.store.table.shape[1]
    assert torch.equal(packed.cache.store.table, packed.cache.store.table[:1].expand(3, -1))
    one = Shape("together", 1, 6, 2, 128, 421)
    assert (shape.elements, shape.sizes()["sequences_held"]) == (one.elements, 1)
    alike = packed.cache.attend(packed.q[:1].expand(3, -1, -1, -1))
    assert torch.equal(alike[0], alike[2])
    other = packed_operator(spec, one, CPU, 5)
    pages = [sum(p.nbytes for p in (x.cache.store.pages, *x.cache.store.table[:1])) for x in (packed, other)]
    assert pages[0] == pages[1]
    dense = [sum(x.nbytes for both in p.dense.values() for x in both) for p in (packed, other)]
    rest = [p.cache.store.table.nbytes + 2 * p.q.nbytes for p in (packed, other)]
    assert packed.bytes_read - dense[0] - rest[0] == other.bytes_read - dense[1] - rest[1]


def test_gate_sees_another_sequences_pages():
    packed = packed_operator("int-8", ODD, CPU, 5)
    assert gate(packed).passed
    packed.cache.store.table = packed.cache.store.table.flip(0)
    assert not gate(packed).passed


def test_gate_sees_nan_and_tokens_past_the_end(monkeypatch):
    packed = packed_operator("int-8", ODD, CPU, 5)
    monkeypatch.setattr(packed.cache, "attend", lambda q: q * torch.nan)
    assert not gate(packed).passed
    packed = packed_operator("int-8", ODD, CPU, 5)
    for state in packed.cache.roles.values():
        state.runs = [(0, 448)]
    packed.cache.length = 448
    longer = packed.attend()
    for state in packed.cache.roles.values():
        state.runs = [(0, 421)]
    monkeypatch.setattr(packed.cache, "attend", lambda q: longer)
    assert not gate(packed).passed


def test_gate_sees_a_one_sided_error_that_only_diffuse_attention_shows(monkeypatch):
    packed = packed_operator("int-8", ODD, CPU, 5)
    true = packed.cache.attend
    monkeypatch.setattr(packed.cache, "attend", lambda q: true(q) + 4e-4)
    assert not gate(packed).passed
    monkeypatch.setattr("packedkv_lab.bench.packed.SCALES", (4.0,))
    assert gate(packed).passed
