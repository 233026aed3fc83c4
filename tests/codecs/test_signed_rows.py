"""Bytes of HQMQ's chunks: by definition, back again, and as many as two plain streams have."""

import itertools

import pytest
import torch

from packedkv.codecs.hqmq import pack_rows

WIDTHS = list(itertools.product((10, 11, 12, 13), (3, 4, 6)))


def numbers(w, r, n, rows=40):
    generator = torch.Generator().manual_seed(100 * w + r)
    return (torch.randint(1 << bits, (2, rows, n), generator=generator) for bits in (w, r))


def bits_of(packed):
    """Bit k of the stream of bytes, as Python integers."""
    return [byte >> k & 1 for byte in packed.tolist() for k in range(8)]


def number(bits, first, count):
    return sum(bit << k for k, bit in enumerate(bits[first : first + count]))


@pytest.mark.parametrize(("w", "r"), WIDTHS)
def test_bytes_by_definition(w, r):
    n, m = 24, 3
    codes, radius = numbers(w, r, n, rows=5)
    packed = pack_rows(codes, radius, w, r)
    for at in itertools.product(range(2), range(5)):
        held = {name: bits_of(x[at]) for name, x in packed.items()}
        for c, (code, length) in enumerate(zip(codes[at].tolist(), radius[at].tolist(), strict=True)):
            row, sign = code // 2, code % 2
            if w + r >= 16:
                unit = number(held["codes"], 16 * c, 16)
                assert unit >> 15 == sign
                assert (unit & 0x7FFF) >> 16 - w == row
                rest = number(held["radius"], (w + r - 16) * c, w + r - 16) if w + r > 16 else 0
                assert rest << 16 - w | unit & (1 << 16 - w) - 1 == length
                continue
            low = 8 if w == 10 else w - 1
            planes = [number(held["bits"], 8 * m * k + 8 * (c % m) + c // m, 1) for k in range((w == 10) + (r == 4))]
            high = planes.pop(0) if w == 10 else 0
            assert number(held["codes"], low * c, low) | high << 8 == row
            nibble = number(held["radius"], 4 * c, 4)
            assert (nibble, *planes) == ((length, sign) if r == 4 else (length | sign << 3,))
