"""Interleaved codes: 2, 3 or 4 bits of runs of 128 channels, in 16-bit units that a tensor core's loads can transpose.

A kernel that multiplies with values needs one channel of two tokens in a register, and the eight channels of a product
in one group of 32, so that they share a scale. GPUs load 8 x 8 matrices of 16-bit units from shared memory and
transpose them on the way: a register then holds the same unit of two tokens, and eight lanes hold eight neighbouring
units. So equal bits of eight neighbouring units are channels 4 apart of one group: one mask, the same in all lanes,
extracts them.

Channel ``c = 32 q + 4 g + p`` of a run (q = 0..3 the group of 32, g = 0..7, p = 0..3) is code ``k = 4 q + p`` of g. The
16 codes of a g fill ``bits`` units::

    2 bits   unit i = 0, 1      codes 8 i .. 8 i + 7, code 8 i + s at bit 2 s
    3 bits   unit i = 0, 1, 2   codes 5 i .. 5 i + 4, code 5 i + s at bit 3 s; bit 15 is bit i of code 15
    4 bits   unit i = 0 .. 3    codes 4 i .. 4 i + 3, code 4 i + s at bit 4 s

A run takes ``16 * bits`` bytes: unit i of g is the little-endian 16-bit word ``8 i + g``. Runs follow each other. With
4 bits these are the bytes of ``ops/bitpack``; with 2 and 3 bits there are as many, in another order.
"""

import torch
from torch import Tensor

RUN = 128
"""Channels that are interleaved together."""


def interleave(codes: Tensor, bits: int) -> Tensor:
    """Pack the last axis; ``bitpack.pack`` in another order of bits.

    Parameters
    ----------
    codes : Tensor of any integer dtype, shape ``[..., n]``
        Values in ``[0, 2**bits)``; n is a multiple of 128.
    bits : {2, 3, 4}

    Returns
    -------
    Tensor uint8 ``[..., n * bits / 8]``

    Examples
    --------
    >>> codes = torch.zeros(128, dtype=torch.uint8)
    >>> codes[[4, 37]] = 3  # q = 0, g = 1, p = 0 and q = 1, g = 1, p = 1
    >>> interleave(codes, 2).view(torch.int16)[:2].tolist()
    [0, 3075]
    """
    lanes = codes.to(torch.int16).unflatten(-1, (-1, 4, 8, 4))  # [..., run, q, g, p]
    quads = lanes[..., 0].clone()
    for p in range(1, 4):
        quads.add_(lanes[..., p], alpha=1 << bits * p)
    a, b, c, d = quads.unbind(-2)  # code p at bit `bits * p` of the quad of q
    if bits == 2:
        units = [a | b << 8, c | d << 8]
    elif bits == 3:
        units = [a | b << 12, b >> 3 | c << 9, c >> 6 | d << 6]
        units = [unit & 0x7FFF | d >> (9 + i) << 15 for i, unit in enumerate(units)]
    else:
        units = [a, b, c, d]
    return torch.stack(units, -2).view(torch.uint8).flatten(-3)


def deinterleave(packed: Tensor, bits: int) -> Tensor:
    """Inverse of ``interleave``.

    Parameters
    ----------
    packed : Tensor uint8 ``[..., n * bits / 8]``
    bits : {2, 3, 4}

    Returns
    -------
    Tensor uint8 ``[..., n]``
    """
    pairs = packed.unflatten(-1, (-1, bits, 8, 2)).to(torch.int16)  # bytes: a view would need an even address
    units = (pairs[..., 0] | pairs[..., 1] << 8).unbind(-2)
    if bits == 2:
        quads = torch.stack([half for unit in units for half in (unit, unit >> 8)], -2)
    elif bits == 3:
        u, v, w = units
        last = u >> 15 & 1 | v >> 14 & 2 | w >> 13 & 4
        quads = torch.stack([u, u >> 12 & 0o7 | v << 3, v >> 9 & 0o77 | w << 6, w >> 6 & 0o777 | last << 9], -2)
    else:
        quads = torch.stack(units, -2)
    mask = (1 << bits) - 1
    return torch.stack([(quads >> bits * p & mask).to(torch.uint8) for p in range(4)], -1).flatten(-4)
