"""Interleaved codes: every bit where the definition has it, there and back, and the plain bit stream at 4 bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codecs.group_int import RUN, deinterleave, interleave
from packedkv.ops.bitpack import packed_bytes


def random_codes(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def place(channel: int, bit: int, bits: int) -> tuple[int, int]:
    """Word of a run and bit of the word that hold a bit of a channel's code, by the definition."""
    q, g, p = channel // 32, channel % 32 // 4, channel % 4
    k, per = 4 * q + p, 16 // bits
    unit, at = (k // per, bits * (k % per) + bit) if k < per * bits else (bit, 15)
    return 8 * unit + g, at


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_bit_lies_where_the_definition_has_it(bits):
    places = [place(c, bit, bits) for c in range(RUN) for bit in range(bits)]
    assert sorted(places) == [(w, b) for w in range(8 * bits) for b in range(16)], "each bit of the run has one owner"
    for run in (0, 1):
        codes = torch.zeros(RUN * bits, 2 * RUN, dtype=torch.uint8)  # row: one bit of one channel
        for row in range(RUN * bits):
            codes[row, RUN * run + row // bits] = 1 << row % bits
        packed = interleave(codes, bits)
        assert packed.shape == (RUN * bits, 2 * 16 * bits)
        for row, (word, at) in enumerate(places):
            byte = 16 * bits * run + 2 * word + at // 8
            assert packed[row].nonzero().flatten().tolist() == [byte]
            assert packed[row, byte] == 1 << at % 8


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    runs=st.integers(1, 3),
    lead=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 999),
)
def test_deinterleave_inverts_interleave(bits, runs, lead, dtype, seed):
    codes = random_codes(bits, *lead, runs * RUN, seed=seed)
    packed = interleave(codes.to(dtype), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, packed_bytes(runs * RUN, bits))
    back = deinterleave(packed, bits)
    assert back.dtype == torch.uint8
    assert torch.equal(back, codes)
    for run in range(runs):  # runs know nothing of each other
        part = slice(16 * bits * run, 16 * bits * (run + 1))
        assert torch.equal(packed[..., part], interleave(codes[..., RUN * run : RUN * (run + 1)], bits))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_at_an_odd_address_and_apart(bits):
    codes = random_codes(bits, 2, 3, RUN)
    held = torch.zeros(2, 3, 16 * bits + 3, dtype=torch.uint8)
    part = held[..., 1 : 16 * bits + 1]
    part.copy_(interleave(codes, bits))
    assert torch.equal(deinterleave(part, bits), codes)
    rows = codes.transpose(0, 1)  # neither are codes contiguous
    assert torch.equal(interleave(rows, bits), interleave(rows.contiguous(), bits))
