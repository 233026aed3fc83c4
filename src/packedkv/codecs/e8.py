"""E8: points of the lattice E8 at a fixed 16 bits for 8 channels, behind a Hadamard rotation; after NexusQuant.

    y = x H                                 H orthonormal Sylvester
    s = fp16(0.96 sqrt(mean y^2))           one per token and head
    p = the point of C nearest to y / s     8 neighbouring channels at a time
    y^ = s p

C is 2^16 points of E8 moved by 1/4 in each coordinate, those of QuIP#'s E8P (arXiv:2402.04396, Sec. 4.2)::

    E8 = D8 and D8 + 1/2;  D8: whole numbers of even sum
    C  = {h + 1/4, h - 1/4 : h in D8 + 1/2, |h| one of 256 patterns}        every point lies in E8 + 1/4

A pattern is 8 of 1/2, 3/2 and 5/2: all 227 of |h|^2 <= 10, and the first 29 of |h|^2 = 12. They are sorted by |h|^2
and, where that is equal, as words of 8 letters. Seven signs of h are free, the eighth makes its sum even.

The nearest point of all of E8 + 1/4 is found as Conway and Sloane do (IEEE Trans. Inform. Theory 28, 1982): in each of
its two cosets every coordinate is rounded and, if the sum is odd, the one that is farthest from its rounding is rounded
the other way; the nearer of both points is taken. If it is not in C (a third of normal vectors), all patterns are
compared, with the best signs of each. So p is the nearest point of C, always.

Block (one token of one head)::

    codes   uint8  [D/4]    byte 2 g: pattern of channels 8 g .. 8 g + 7
                            byte 2 g + 1: bit i < 7: channel 8 g + i of h is negative; bit 7: h - 1/4
    scale   fp16   [1]      s; 0 where all channels are 0

Bits: 2 + 16/D; D = 128: 34 bytes, 2.125. Relative MSE of normal values 0.0900; turboquant-2 0.1160 in the same bytes.

Deviations from NexusQuant 0.6.3 (nexusquant-kv on PyPI, Apache-2.0: ``E8Lattice.quantize_perhead``, levels = 4)
1. Its points are D8 in -2..2 and all of (Z + 1/2)^8 in -3/2..3/2, without the parity of the second coset. These are
   260,849 points for 8 channels, 18 bits and not 16: 2.375 bits at D = 128 with the scale, where 2.125 is printed. Its
   cache holds the rounded numbers in 16 bit, its pages a byte or four bits for a channel. A fixed rate of 2 bits needs
   fewer points: C. Which 29 patterns of |h|^2 = 12 are taken is a choice; any are as good.
2. Its s is max |y| / 2, so that normal values use the inner points most: relative MSE 0.137 at D = 128, more than
   turboquant-2's. The factor 0.96 is the best for normal values, to two digits.
3. Its cache turns keys back to before RoPE, rounds them and turns them again; here keys are rounded after RoPE, as in
   every other codec.
4. Its presets may drop tokens; here all are stored.

Pitfalls: a channel of the rotated row reaches 2.75 s: what lies farther out is cut. Rows that a Hadamard rotation does
not spread (a multiple of one of its rows) lose most of their length.

Use: the reference of lattice codes at 2 bits without calibration, beside turboquant-2 and hqmq.

Not for: speed: no kernel reads it, the PyTorch reference runs. Keys with biases or outlier channels, as for every
rotation with one scale per token.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.hadamard import Rotated
from packedkv.ops.sums import in_pieces, row_norm, sum_by_halves
from packedkv.registry import register
from packedkv.scheme import KVScheme

RUN = 8
"""Channels of a point."""
STEP = 0.96
"""s over the root mean square of a row."""
SHIFT = 0.25
PATTERNS = 256
SEARCHED = 1 << 11
"""Vectors that are searched at once: float64 temporaries of 576 KB each."""


@cache
def patterns() -> Tensor:
    """|h| of the codebook, float64 ``[256, 8]``."""
    words = product((0.5, 1.5, 2.5), repeat=RUN)
    ordered = sorted(words, key=lambda word: (sum(a * a for a in word), word))
    return torch.tensor(ordered[:PATTERNS], dtype=torch.float64)


@cache
def numbers() -> Tensor:
    """Pattern of every |h| whose coordinates are at most 5/2, by ``keys``; -1 where there is none: int64 ``[3^8]``."""
    table = torch.full((3**RUN,), -1)
    table[keys(patterns())] = torch.arange(PATTERNS)
    return table


@cache
def candidates() -> tuple[Tensor, Tensor]:
    """Candidates of a search: the patterns of |h|^2 <= 10 with the largest letters first, ``[7, 8]``; all of 12."""
    table = patterns()
    inner = (table * table).sum(-1) <= 10
    return table[inner].sort(-1, descending=True).values.unique(dim=0), table[~inner]


def keys(sizes: Tensor) -> Tensor:
    """|h| of 1/2, 3/2, 5/2 as a number to the base 3, the first coordinate lowest: int64."""
    places = torch.tensor([3**i for i in range(RUN)], device=sizes.device)
    return ((sizes - 0.5).long() * places).sum(-1)


@dataclass(frozen=True)
class E8(Rotated, Codec):
    """2^16 points of E8 for 8 channels, one scale per token.

    >>> E8().layout(128).effective_bits
    2.125
    """

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("e8", head_dim, RUN)
        fields = (Field("codes", "uint8", (head_dim // 4,)), Field("scale", "float16", (1,), "scales"))
        return Layout(head_dim, 1, fields, nominal_bits=2.0)

    def encode(self, x: Tensor, params: Params) -> Payload:
        def points_of(piece: Tensor) -> tuple[Tensor, Tensor]:
            wide = piece.double()
            scale = (row_norm(wide) * (STEP / x.shape[-1] ** 0.5)).clamp_max(FP16_MAX).half()
            divisor = scale.double()
            return nearest_codes(torch.where(divisor > 0, wide / divisor, 0.0)), scale

        codes, scale = in_pieces(points_of, x)
        return {"codes": codes, "scale": scale}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return points(payload["codes"]) * payload["scale"].float()


def points(codes: Tensor) -> Tensor:
    """Map codes to lattice points: uint8 ``[..., D/4]`` -> float32 ``[..., D]``."""
    pattern, bits = (half.contiguous() for half in codes.unflatten(-1, (-1, 2)).unbind(-1))  # [..., D/8]
    sizes = patterns().float().to(codes.device)[pattern.int()]
    negative = bits.unsqueeze(-1) >> torch.arange(RUN, dtype=torch.uint8, device=codes.device) & 1
    shift = negative[..., 7:].float().mul_(-2 * SHIFT).add_(SHIFT)
    # the sum of h is even: flipping one sign changes it by an odd number
    negative[..., 7] = (sizes.sum(-1).to(torch.uint8) + negative[..., :7].sum(-1, dtype=torch.uint8)) & 1
    return negative.float().mul_(-2).add_(1).mul_(sizes).add_(shift).flatten(-2)


def nearest_codes(z: Tensor) -> Tensor:
    """Codes of the nearest points: float64 ``[..., D]`` -> uint8 ``[..., D/4]``; of equally near ones h + 1/4."""
    vectors = z.reshape(-1, RUN)
    above, below = (nearest_half(vectors - shift) for shift in (SHIFT, -SHIFT))
    gaps = [squares(vectors - shift - h) for h, shift in ((above, SHIFT), (below, -SHIFT))]
    down = gaps[1] < gaps[0]
    h = torch.where(down, below, above)
    sizes = h.abs()
    pattern = torch.where((sizes < 3).all(-1), numbers().to(z.device)[keys(sizes.clamp_max(2.5))], -1)
    negative, down = h < 0, down.squeeze(-1)
    outside = (pattern < 0).nonzero().squeeze(-1)
    for some in outside.split(SEARCHED):
        pattern[some], negative[some], down[some] = search(vectors[some])
    negative[:, 7] = down
    bits = (negative.long() << torch.arange(RUN, device=z.device)).sum(-1)
    return torch.stack([pattern, bits], -1).to(torch.uint8).reshape(*z.shape[:-1], z.shape[-1] // 4)


def nearest_half(w: Tensor) -> Tensor:
    """Nearest point of D8 + 1/2 to ``w [n, 8]``: round, and round one coordinate the other way if the sum is odd."""
    h = w.floor() + 0.5
    off = w - h
    worst = torch.nn.functional.one_hot(off.abs().argmax(-1), RUN).bool()
    odd = (h.sum(-1, keepdim=True) % 2 != 0) & worst
    return torch.where(odd, h + torch.where(off < 0, -1.0, 1.0), h)


def squares(x: Tensor) -> Tensor:
    """Squared length of the last axis, ``[..., 1]``."""
    return sum_by_halves(x * x)


def search(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest point of C to ``[n, 8]`` among all patterns: pattern ``[n]``, negative h ``[n, 8]``, h - 1/4 ``[n]``.

    With signs s, |w - s a|^2 = |w|^2 + |a|^2 - 2 sum s w a. It is least if s w >= 0 everywhere; if that leaves the sum
    of s a odd, the sign of the coordinate with the least |w| a is flipped, which adds 4 |w| a. Of all orders of a
    word's letters the best has the largest where |w| is: the sum is greatest, and the least |w| meets a = 1/2.
    """
    words, others = candidates()
    tables = torch.cat([words, others]).to(vectors.device)
    weights, parity = squares(tables).squeeze(-1), tables.sum(-1).long()
    sides = []
    for shift in (SHIFT, -SHIFT):
        w = vectors - shift
        size, negative = w.abs(), w < 0
        ranked, order = size.sort(dim=-1, descending=True, stable=True)
        gain = torch.zeros(len(w), len(tables), dtype=w.dtype, device=w.device)
        least = torch.full_like(gain, torch.inf)
        for place in range(RUN):  # candidates last: each step is one pass over [n, 36]
            met = torch.cat(
                [ranked[:, place, None].expand(-1, len(words)), size[:, place, None].expand(-1, len(others))], -1
            )
            part = met * tables[:, place]
            gain, least = gain.add_(part), torch.minimum(least, part)
        odd = (parity + negative.sum(-1, keepdim=True)) % 2 != 0  # [n, 36]
        cost = weights - 2 * gain + torch.where(odd, 4 * least, 0.0) + squares(w)
        best = cost.argmin(-1, keepdim=True)
        places = torch.where(best < len(words), order, torch.arange(RUN, device=w.device))
        sizes = torch.empty_like(size).scatter_(-1, places, tables[best.squeeze(-1)])
        flip = torch.nn.functional.one_hot((size * sizes).argmin(-1), RUN).bool() & odd.gather(-1, best)
        sides.append((cost.gather(-1, best), numbers().to(w.device)[keys(sizes)], negative ^ flip))
    (high, up, signs_up), (low, under, signs_under) = sides
    down = low < high
    narrow = down.squeeze(-1)
    return torch.where(narrow, under, up), torch.where(down, signs_under, signs_up), narrow


@register("e8", source="NexusQuant 0.6.3; QuIP#, arXiv:2402.04396, Sec. 4.2", presets=("e8-2",))
def e8(bits: Literal[2] = 2, window: int = 0) -> KVScheme:
    """Lattice points of 8 rotated channels in 16 bits, keys and values alike.

    Parameters
    ----------
    bits : {2}
        Bits of a channel; the scale comes on top.
    """
    return KVScheme(key=E8(), value=E8(), window=window)
