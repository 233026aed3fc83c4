"""Pack integers of 1..16 bits into bytes; one bit order for disk, CPU and GPU.

Little-endian bit stream: value i takes bits ``[i*b, (i+1)*b)`` of the row, bit k of the row is bit ``k % 8`` of byte
``k // 8``. So at b = 4 the low nibble of byte i is value 2i and the high nibble value 2i + 1; at b = 16 a row is a
little-endian uint16 array. A row of n values takes ``ceil(n*b/8)`` bytes; spare bits at its end are zero.
"""

import torch
from torch import Tensor


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of a row of ``n`` values of ``bits`` bits.

    >>> packed_bytes(128, 3), packed_bytes(43, 5)
    (48, 27)
    """
    return -(-n * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers ``[..., n]`` of ``[0, 2**bits)``, 1 to 16 bits: uint8 ``[..., ceil(n * bits / 8)]``.

    >>> pack(torch.tensor([1, 2]), 4).tolist()
    [33]
    """
    n = codes.shape[-1]
    if bits == 8:
        return codes.to(torch.uint8)
    if bits in (1, 2, 4) and n * bits % 8 == 0:
        per = 8 // bits
        lanes = codes.to(torch.uint8).unflatten(-1, (n // per, per))
        out = lanes[..., 0].clone()
        for i in range(1, per):
            out |= lanes[..., i] << (i * bits)
        return out
    # groups of 8 values fill exactly `bits` bytes
    groups = -(-n // 8)
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, groups * 8 - n))
    lanes = padded.unflatten(-1, (groups, 8))
    out = torch.zeros(*lanes.shape[:-1], bits, dtype=torch.int32, device=codes.device)
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        wide = lanes[..., i] << shift
        for j in range(-(-(bits + shift) // 8)):
            out[..., first + j] |= (wide >> (8 * j)) & 0xFF
    return out.to(torch.uint8).flatten(-2)[..., : packed_bytes(n, bits)]


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Unpack the ``n`` integers of each row: int32 ``[..., n]``, of 1, 2, 4 and 8 bits mostly uint8."""
    if bits == 8:
        return packed
    if bits in (1, 2, 4) and n * bits % 8 == 0:
        per = 8 // bits
        mask = (1 << bits) - 1
        return torch.stack([(packed >> (i * bits)) & mask for i in range(per)], -1).flatten(-2)
    groups = -(-n // 8)
    padded = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[-1]))
    lanes = padded.to(torch.int32).unflatten(-1, (groups, bits))
    out = []
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        wide = lanes[..., first]
        for j in range(1, -(-(bits + shift) // 8)):
            wide = wide | (lanes[..., first + j] << (8 * j))
        out.append((wide >> shift) & ((1 << bits) - 1))
    return torch.stack(out, -1).flatten(-2)[..., :n]
