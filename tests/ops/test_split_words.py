"""Codes in four parts: every bit where the definition has it, there and back, as many bytes as a bit stream."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codecs.octopus import pack_split, split_bytes, unpack_split
from packedkv.ops.bitpack import pack, packed_bytes


def random_codes(bits: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def by_definition(codes: list[int], bits: int, low: int) -> tuple[list[int], list[int]]:
    """Bytes of the fields ``codes`` and ``tail``, bit by bit."""
    least, more = divmod(len(codes), 4)
    words = least * bits // 32
    head, tail, first = [], [], 0
    for part in range(4):
        mine = codes[first : first + least + (part < more)]
        first += len(mine)
        fields = [(code >> low, bits - low) for code in mine[:least]]
        fields += [(code & (1 << low) - 1, low) for code in mine[:least]]
        fields += [(code, bits) for code in mine[least:]]
        stream = [value >> i & 1 for value, length in fields for i in range(length)]
        head += stream[: 32 * words]
        tail += stream[32 * words :]
    tail += [0] * (-(len(head) + len(tail)) % 8)
    head_bytes, tail_bytes = (
        [sum(bit << i for i, bit in enumerate(run[at : at + 8])) for at in range(0, len(run), 8)]
        for run in (head, tail)
    )
    return head_bytes, tail_bytes


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(n=st.integers(1, 90), bits=st.integers(1, 16), data=st.data(), seed=st.integers(0, 999))
def test_bytes_are_those_of_the_definition_and_decode(n, bits, data, seed):
    low = data.draw(st.integers(0, bits - 1))
    codes = random_codes(bits, 2, n, seed=seed)
    packed = pack_split(codes, bits, low)
    assert {name: field.shape[-1] for name, field in packed.items()} == split_bytes(n, bits)
    for row in range(2):
        head, tail = by_definition(codes[row].tolist(), bits, low)
        assert packed["codes"][row].tolist() == head if head else "codes" not in packed
        assert packed["tail"][row].tolist() == tail if tail else "tail" not in packed
    assert torch.equal(unpack_split(packed, bits, n, low), codes.int())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(n=st.integers(1, 300), bits=st.integers(1, 16))
def test_no_bytes_more_than_a_bit_stream(n, bits):
    sizes = split_bytes(n, bits)
    assert sum(sizes.values()) == packed_bytes(n, bits)
    assert sizes.get("codes", 0) % 16 == 0
    assert all(sizes.values())


@pytest.mark.parametrize(("n", "bits"), [(64, 8), (16, 16), (32, 4)])
def test_parts_of_whole_words_are_the_plain_bit_stream(n, bits):
    codes = random_codes(bits, 5, n)
    packed = pack_split(codes, bits)
    assert list(packed) == ["codes"]
    assert torch.equal(packed["codes"], pack(codes, bits))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integers_and_any_shape(dtype):
    codes = random_codes(7, 3, 2, 43).to(dtype)
    packed = pack_split(codes.transpose(0, 1), 7)
    assert {name: (field.dtype, tuple(field.shape)) for name, field in packed.items()} == {
        "codes": (torch.uint8, (2, 3, 32)),
        "tail": (torch.uint8, (2, 3, 6)),
    }
    assert torch.equal(unpack_split(packed, 7, 43), codes.transpose(0, 1).int())
    flat = pack_split(codes[0, 0], 7)
    assert all(torch.equal(flat[name], packed[name][0, 0]) for name in packed)


def test_any_bytes_are_some_codes():
    """Of a dead slot too: every code is one of ``2**bits``."""
    packed = {name: torch.full((3, size), 255, dtype=torch.uint8) for name, size in split_bytes(43, 13).items()}
    assert torch.equal(unpack_split(packed, 13, 43, 3), torch.full((3, 43), 8191, dtype=torch.int32))
