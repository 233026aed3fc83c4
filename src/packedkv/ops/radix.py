"""Base-9 digits as bits: 17 digits per 54 bits, 3.1765 bits a digit where log2 9 = 3.1699.

A row of digits is cut into words of 17, the last one shorter and as narrow as it may be; a word is
sum d_i 9^i and the words follow each other in one bit stream. 17 is the longest word that wastes so little and whose
arithmetic int64 holds.
"""

import torch
from torch import Tensor

from packedkv.ops.bitpack import pack, unpack

WORD_DIGITS = 17


def _word_bits(digits: int) -> list[int]:
    """Bits of the words that hold a row of base-9 digits, ``WORD_DIGITS`` to a word."""
    counts = [min(WORD_DIGITS, digits - start) for start in range(0, digits, WORD_DIGITS)]
    return [(9**count - 1).bit_length() for count in counts]


def packed_digit_bytes(digits: int) -> int:
    """Bytes of a row of base-9 digits.

    >>> packed_digit_bytes(128), packed_digit_bytes(32)
    (51, 13)
    """
    return -(-sum(_word_bits(digits)) // 8)


def pack_digits(digits: Tensor) -> Tensor:
    """Base-9 digits ``[..., n]`` as one bit stream; the first digit of a word is its lowest."""
    words = []
    for part, bits in zip(digits.split(WORD_DIGITS, -1), _word_bits(digits.shape[-1]), strict=True):
        power = 9 ** torch.arange(part.shape[-1], device=digits.device)
        word = (part * power).sum(-1, keepdim=True)
        words.append(word >> torch.arange(bits, device=digits.device) & 1)
    return pack(torch.cat(words, -1).to(torch.uint8), 1)


def unpack_digits(packed: Tensor, count: int) -> Tensor:
    """Inverse of ``pack_digits``: int64 ``[..., count]``."""
    widths = _word_bits(count)
    stream = unpack(packed, 1, sum(widths)).long().split(widths, -1)
    digits = []
    for number, bits in enumerate(stream):
        word = (bits << torch.arange(bits.shape[-1], device=packed.device)).sum(-1, keepdim=True)
        have = min(WORD_DIGITS, count - number * WORD_DIGITS)
        digits.append(word // 9 ** torch.arange(have, device=packed.device) % 9)
    return torch.cat(digits, -1)
