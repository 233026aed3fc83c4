"""Codes of a row in four parts: whole 32-bit words of each part, and a tail of the bits that fill no word.

Four lanes of a warp share a token's row. In a plain bit stream most lanes begin inside a word and must shift every
word that they load. Here each lane has words of its own, and one shift for its bits of the tail.

A row of n codes of w bits; a = floor(n / 4)::

    part p     a codes, one more where p < n mod 4; parts hold neighbouring codes, part 0 the first ones
    its bits   the codes as in ops/bitpack, code 0 in the lowest bits. With ``low`` > 0 a code is two fields, its lowest
               ``low`` bits and the ones above: of the first a codes all upper fields, then all lower ones; a code more
               follows whole
    codes      16 h bytes, h = floor(a w / 32): the first h little-endian words of part 0, of part 1, ...
    tail       ceil(n w / 8) - 16 h bytes: the bits behind them of part 0, of part 1, ..., one bit stream; spare bits at
               its end are zero

Together as many bytes as the plain bit stream. A field without bytes is left out.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

PARTS = 4


class Runs(NamedTuple):
    """Where neighbouring bits of codes lie in a row, its fields side by side; int64 ``[runs]`` each.

    Parameters
    ----------
    code : Tensor
        Index of the code.
    shift : Tensor
        Its bit where the run begins.
    mask : Tensor
        ``2**length - 1``.
    byte, bit : Tensor
        Where the run begins in the row.
    """

    code: Tensor
    shift: Tensor
    mask: Tensor
    byte: Tensor
    bit: Tensor


def split_bytes(n: int, bits: int) -> dict[str, int]:
    """Bytes of a row, by field.

    >>> split_bytes(43, 10), split_bytes(43, 3), split_bytes(64, 8)
    ({'codes': 48, 'tail': 6}, {'tail': 17}, {'codes': 64})
    """
    head = 16 * (n // PARTS * bits // 32)
    sizes = {"codes": head, "tail": -(-n * bits // 8) - head}
    return {name: size for name, size in sizes.items() if size}


def _fields(n: int, bits: int, low: int) -> list[list[tuple[int, int, int]]]:
    """Of each part's bits, from the first one on: (code, its first bit, how many bits)."""
    least, more = divmod(n, PARTS)
    parts, first = [], 0
    for part in range(PARTS):
        codes = range(first, first + least)
        fields = [(code, low, bits - low) for code in codes] + [(code, 0, low) for code in codes if low]
        first += least
        if part < more:
            fields.append((first, 0, bits))
            first += 1
        parts.append(fields)
    return parts


@lru_cache(maxsize=64)
def runs(n: int, bits: int, low: int, device: str) -> Runs:
    """Where the bits of ``n`` codes lie; as ``pack_split``."""
    words = 8 * split_bytes(n, bits).get("codes", 0) // PARTS  # bits of a part that are whole words
    found = []
    tail = PARTS * words
    for part, fields in enumerate(_fields(n, bits, low)):
        at = 0
        for code, shift, length in fields:
            inside = max(0, min(length, words - at))
            if inside:
                found.append((code, shift, inside, part * words + at))
            if inside < length:
                found.append((code, shift + inside, length - inside, tail))
                tail += length - inside
            at += length
    code, shift, length, position = torch.tensor(found, device=device).T
    return Runs(code, shift, (1 << length) - 1, position // 8, position % 8)


def pack_split(codes: Tensor, bits: int, low: int = 0) -> dict[str, Tensor]:
    """Pack the last axis.

    Parameters
    ----------
    codes : Tensor of any integer dtype, shape ``[..., n]``
        Values in ``[0, 2**bits)``.
    bits : int
        1..16.
    low : int
        Bits of a code's lower field, less than ``bits``; 0: codes are whole.

    Returns
    -------
    dict
        ``codes`` and ``tail``, uint8, of ``split_bytes`` bytes on the last axis.

    Examples
    --------
    >>> packed = pack_split(torch.arange(18), 8)  # parts of 5, 5, 4 and 4 codes, one word each
    >>> packed["codes"].tolist(), packed["tail"].tolist()
    ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17], [4, 9])
    """
    n = codes.shape[-1]
    found = runs(n, bits, low, str(codes.device))
    wide = (codes.to(torch.int32)[..., found.code] >> found.shift.int() & found.mask.int()) << found.bit.int()
    sizes = split_bytes(n, bits)
    row = torch.zeros(*codes.shape[:-1], sum(sizes.values()) + 2, dtype=torch.int32, device=codes.device)
    for i in range(3):  # runs do not overlap, so sums are unions
        row.index_add_(-1, found.byte + i, wide >> 8 * i & 0xFF)
    pieces = row.to(torch.uint8)[..., :-2].split(list(sizes.values()), -1)
    return {name: piece.contiguous() for name, piece in zip(sizes, pieces, strict=True)}


def unpack_split(packed: Mapping[str, Tensor], bits: int, n: int, low: int = 0) -> Tensor:
    """Inverse of ``pack_split``.

    Parameters
    ----------
    packed : mapping
        ``codes`` and ``tail``, where they have bytes; other fields are ignored.
    bits, n, low : int

    Returns
    -------
    Tensor int32 ``[..., n]``
    """
    row = torch.cat([packed[name] for name in split_bytes(n, bits)], -1)
    row = torch.nn.functional.pad(row, (0, 2)).to(torch.int32)
    where = runs(n, bits, low, str(row.device))
    wide = row[..., where.byte] | row[..., where.byte + 1] << 8 | row[..., where.byte + 2] << 16
    found = (wide >> where.bit.int() & where.mask.int()) << where.shift.int()
    codes = torch.zeros(*row.shape[:-1], n, dtype=torch.int32, device=row.device)
    return codes.index_add_(-1, where.code, found)
