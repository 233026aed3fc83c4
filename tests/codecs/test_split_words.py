"""Codes in four parts: every bit where the definition has it, there and back, as many bytes as a bit stream."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packedkv.codecs.octopus import pack_split, split_bytes, unpack_split


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
