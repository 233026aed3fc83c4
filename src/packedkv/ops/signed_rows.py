"""HQMQ's codes and radii in the order of bits that attention kernels read: n chunks of a row, n a multiple of 8.

A code of w bits is 2 row + sign, as rows 2i and 2i + 1 of the codebook are opposite; a radius has r bits. The
size is that of two plain streams, n (w + r) / 8 bytes. The fields are laid out so that one mask leaves two signed radii
in a register as fp16 numbers, and few operations turn rows into addresses.

``w + r >= 16``: a chunk has a little-endian unit of 16 bits ::

    codes    uint8  [2 n]           sign << 15 | row << 16 - w | the radius' low 16 - w bits
    radius   uint8  [n x / 8]       its high x = w + r - 16 bits, a plain stream; no such field where x = 0

``w + r < 16``, which is r = 3 or 4 ::

    codes    uint8  [n b / 8]       the row's low b bits, a plain stream: b = 8 at w = 10, else all w - 1
    radius   uint8  [n / 2]         four bits a chunk, a plain stream: the radius; at r = 3 also 8 sign
    bits     uint8  [k n / 8]       k planes of one bit a chunk: the row's bit 8 at w = 10, then the sign at r = 4;
                                    no such field where k = 0

In a plane of ``bits`` chunk ``c = m g + i`` (m = n / 8, g of 0..7) is bit g of byte i: a lane that reads m neighbouring
chunks shifts the plane by g once and has their bits in as many bytes.

Bits: w + r a chunk. w = 10, r = 3, n = 32: 32 + 16 + 4 = 52 bytes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from packedkv.ops.bitpack import pack, unpack

UNIT = 16


def row_fields(n: int, code_bits: int, radius_bits: int) -> dict[str, int]:
    """Bytes of the fields of ``n`` chunks, in order.

    >>> row_fields(32, 12, 4), row_fields(32, 13, 6), row_fields(32, 10, 3)
    ({'codes': 64}, {'codes': 64, 'radius': 12}, {'codes': 32, 'radius': 16, 'bits': 4})
    """
    spare = code_bits + radius_bits - UNIT
    if spare >= 0:
        sizes = {"codes": 2 * n, "radius": n * spare // 8}
    else:
        planes = (code_bits == 10) + (radius_bits == 4)
        sizes = {"codes": n * _low(code_bits) // 8, "radius": n // 2, "bits": planes * n // 8}
    return {name: size for name, size in sizes.items() if size}


def pack_rows(codes: Tensor, radius: Tensor, code_bits: int, radius_bits: int) -> dict[str, Tensor]:
    """Pack the last axis.

    Parameters
    ----------
    codes, radius : Tensor of any integer dtype, shape ``[..., n]``
        n a multiple of 8.
    code_bits, radius_bits : int
        w of 10, 11, 12, 13 and r of 3, 4, 6.

    Returns
    -------
    dict of Tensor uint8 ``[..., bytes]``
        As ``row_fields``.
    """
    codes, radius = codes.to(torch.int32), radius.to(torch.int32)
    row, sign = codes >> 1, codes & 1
    spare, held = code_bits + radius_bits - UNIT, UNIT - code_bits
    if spare >= 0:
        packed = {"codes": pack(sign << 15 | row << held | radius & (1 << held) - 1, UNIT)}
        return packed | ({"radius": pack(radius >> held, spare)} if spare else {})
    low, planes = _low(code_bits), []
    if low < code_bits - 1:
        planes.append(row >> low)
        row = row & (1 << low) - 1
    if radius_bits == 4:
        planes.append(sign)
    else:
        radius = radius | sign << 3
    packed = {"codes": pack(row, low), "radius": pack(radius, 4)}
    return packed | ({"bits": torch.cat([_to_plane(plane) for plane in planes], -1)} if planes else {})


def unpack_rows(packed: Mapping[str, Tensor], n: int, code_bits: int, radius_bits: int) -> tuple[Tensor, Tensor]:
    """Inverse of ``pack_rows``: codes and radii, int32 ``[..., n]``."""
    spare, held = code_bits + radius_bits - UNIT, UNIT - code_bits
    if spare >= 0:
        unit = unpack(packed["codes"], UNIT, n).to(torch.int32)
        radius = unit & (1 << held) - 1
        if spare:
            radius = radius | unpack(packed["radius"], spare, n).to(torch.int32) << held
        return (unit & 0x7FFF) >> held << 1 | unit >> 15, radius
    low = _low(code_bits)
    row, radius = (unpack(packed[name], bits, n).to(torch.int32) for name, bits in (("codes", low), ("radius", 4)))
    planes = [_from_plane(plane) for plane in packed["bits"].split(n // 8, -1)] if "bits" in packed else []
    if low < code_bits - 1:
        row = row | planes.pop(0) << low
    sign = planes.pop(0) if radius_bits == 4 else radius >> 3
    return row << 1 | sign, radius if radius_bits == 4 else radius & 7


def _low(code_bits: int) -> int:
    """Bits of a row in ``codes`` where chunks have no unit: a byte, or all of them."""
    return 8 if code_bits == 10 else code_bits - 1


def _to_plane(x: Tensor) -> Tensor:
    """Bits ``[..., n]`` to bytes ``[..., n / 8]``."""
    return pack(x.unflatten(-1, (8, -1)).mT.flatten(-2), 1)


def _from_plane(x: Tensor) -> Tensor:
    """Inverse of ``_to_plane``, int32."""
    return unpack(x, 1, 8 * x.shape[-1]).unflatten(-1, (-1, 8)).mT.flatten(-2).to(torch.int32)
