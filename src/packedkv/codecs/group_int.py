"""Integers of b bits with one fp16 scale per group, along channels or along tokens: int, and a part of other methods.

``int`` is the baseline that papers call RTN or naive INT: one grid per token and head (``group=0``) or per group of
neighbouring channels, keys and values alike, no rotation, no window. KIVI's keys and the values of several methods are
groups as well.

Asymmetric (KIVI, arXiv:2402.02750; InnerQ, Eq. 10-12), a float offset Z, L = 2^b - 1::

    Z = fp16(min x)        S = fp16((max x - Z) / L)
    code = clip(rne((x - Z) / S), 0, L)        x^ = S code + Z

Symmetric (InnerQ, Eq. 13, read as b-bit signed integers), L = 2^(b-1) - 1 levels on either side of 0::

    S = fp16(max |x| / L)
    code = clip(rne(x / S), -L, L)             x^ = S code

Codes are computed with S and Z as stored, so x^ is the nearest representable point. ``scale=search`` tries ranges
max x - min x (max |x|) times a few factors about their middle (``ops/scale_search``).

Block along channels (one token of one head; the last group is shorter when G does not divide D)::

    codes   uint8  [D b / 8]        channel 0 in the lowest bits, or interleaved
    scale   fp16   [ceil(D / G)]    [1] with group=0
    zero    fp16   [ceil(D / G)]    asymmetric only

Codes of 2 and 3 bits in groups of 32 channels are interleaved if 128 divides D (layout version 2): as many bytes, in an
order that lets attention kernels load one channel of two tokens into a register. GPUs load 8 x 8 matrices of 16-bit
units from shared memory and transpose them; equal bits of eight neighbouring units are channels 4 apart of one group,
so one mask extracts them in all lanes, and they share a scale. Channel 32 q + 4 g + p of a run of 128 is code 4 q + p
of g = 0..7; the 16 codes of a g fill b little-endian 16-bit units, unit i of g is word 8 i + g::

    b = 2   8 codes to a unit, the first in the lowest bits
    b = 3   5 codes to a unit, and bit 15 of unit i is bit i of code 15

The plain stream of 4 bits is this order already. Version 1 was the plain stream in all cases, and is in all others.

Block along tokens (G tokens of one head; D groups of G tokens of one channel)::

    codes   uint8  [G, D b / 8]     row g = token g
    scale   fp16   [D]
    zero    fp16   [D]              asymmetric only

Symmetric codes are stored as code + 2^(b-1): two's complement with its top bit flipped; 0 does not occur.

Bits: b + 32 ceil(D/G) / D along channels, b + 32/G along tokens; half the second term when symmetric. ``outliers=3`` is
HQMQ's "naive int + Med3" (arXiv:2605.27646, Sec. 4.5): chunks of four longer than 3 medians stay in fp16 (``outliers``)
and the integers see zeros in their place; two slots a token cost 1.25 bits at D = 128.

Deviations
1. The papers write (max - min) / L; here the minimum is the stored Z, so that the top code reaches the maximum even
   where fp16 cannot hold the minimum.
2. Symmetric has the 2^b - 1 levels that fit in b bits. Eq. 13 to the letter, S = max|x| / (2^b - 1) with signed codes,
   needs b + 1 bits.
3. S >= 2^-24; a constant group has S = 2^-24 and code 0, x^ = Z (S = 0 in the papers).

Pitfalls: one outlier channel sets the step of its whole group. Keys of models with a key bias (Qwen2.5) have such
channels, and INT4 keys break there, with ``outliers=3`` too (HQMQ, Table 2): saw-int4 costs the same bytes and spreads
them. Two bits symmetric have three levels and
lose most of a Gaussian (relative MSE 0.43 in groups of 32 against 0.15 asymmetric). Where S < 2^-14 is subnormal in
fp16, an absolute error of at most (2^b - 1) 2^-25 comes on top of S/2.

Use: a baseline, and models whose keys have no outlier channels (probe: ``cache.report()["keys"]``). int-4 has fused
kernels, without options.

Not for: keys with a few large channels. At D = 64 ``outliers=3`` costs 2.25 bits more; there ``group=32``, + 0.5, does
as well on the small model measured.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload, one_of
from packedkv.codecs.outliers import Outliers, with_outliers
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.groups import fp16_scale, group_count, split_channels, spread_channels
from packedkv.ops.scale_search import Scale, around_middle, quantized
from packedkv.registry import register
from packedkv.scheme import KVScheme

Along = Literal["channels", "tokens"]
BITS = (2, 3, 4, 8)
RUN = 128
"""Channels that are interleaved together."""


@dataclass(frozen=True)
class GroupInt(Codec):
    """Group-wise integers.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code.
    group : int
        Elements that share a scale; 0 (along channels only): all channels of the token.
    along : {"channels", "tokens"}
        The axis of a group.
    symmetric : bool
        No offset: 2^bits - 1 levels around zero.
    """

    bits: int = one_of(*BITS, default=4)
    group: int = 32
    along: Along = "channels"
    symmetric: bool = False
    scale: Scale = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 if self.along == "tokens" else 0
        if self.group < least:
            raise SpecError(
                f"GroupInt: group={self.group} along {self.along} is not allowed; use a positive number, e.g. 32"
                + (", or 0 for all channels of a token." if least == 0 else ".")
            )

    @property
    def block_tokens(self) -> int:
        return self.group if self.along == "tokens" else 1

    @property
    def steps(self) -> int:
        """L, the largest code (symmetric: on either side of 0)."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("int", head_dim)
        fields = grid_fields(head_dim, self.bits, self.group, self.along, zero=not self.symmetric)
        version = 2 if self.interleaves(head_dim) else 1
        return Layout(head_dim, self.block_tokens, fields, nominal_bits=float(self.bits), version=version)

    def encode(self, x: Tensor, params: Params) -> Payload:
        rows = x if self.along == "channels" else x.unflatten(2, (-1, self.group)).mT  # [B, H, M, D, G]
        codes, *scales = quantized(rows, self._quantize, self._value, self.scale, self._row_group)
        if self.along == "tokens":
            codes, scales = codes.mT, [scale.squeeze(-1) for scale in scales]
        packed = interleave(codes, self.bits) if self.interleaves(x.shape[-1]) else pack(codes, self.bits)
        return {"codes": packed, **dict(zip(("scale", "zero"), scales, strict=False))}

    def _quantize(self, rows: Tensor, factor: float) -> tuple[Tensor, ...]:
        """Codes, scales and offsets of ranges that are ``factor`` times those of the groups, about the same middle."""
        groups = split_channels(rows, self._row_group)
        low, high = groups.amin(-1), groups.amax(-1)  # [B, H, N, D / G], or [B, H, M, D, 1]
        if self.symmetric:
            scale = fp16_scale(torch.maximum(high, -low) * factor, self.steps)
            codes = (rows / self._spread(scale, rows)).round_().clamp_(-self.steps, self.steps)
            return codes.add_(2 ** (self.bits - 1)).to(torch.uint8), scale
        low, high = around_middle(low, high, factor)
        zero = low.clamp(-FP16_MAX, FP16_MAX).half()
        scale = fp16_scale(high - zero.float(), self.steps, zero.float())
        codes = (rows - self._spread(zero, rows)).div_(self._spread(scale, rows)).round_().clamp_(0, self.steps)
        return codes.to(torch.uint8), scale, zero

    def _value(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        if zero is None:
            return codes.float().sub_(2 ** (self.bits - 1)).mul_(self._spread(scale, codes))
        return codes.float().mul_(self._spread(scale, codes)).add_(self._spread(zero, codes))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        packed = payload["codes"]
        dim = packed.shape[-1] * 8 // self.bits
        codes = deinterleave(packed, self.bits) if self.interleaves(dim) else unpack(packed, self.bits, dim)
        scales = [payload[name] for name in ("scale", "zero") if name in payload]
        if self.along == "channels":
            return self._value(codes, *scales)
        return self._value(codes.mT, *(scale.unsqueeze(-1) for scale in scales)).mT.flatten(2, 3)

    def interleaves(self, head_dim: int) -> bool:
        """Whether codes are interleaved; 4 bits are the same bytes either way."""
        return (self.along, self.group) == ("channels", 32) and self.bits in (2, 3) and head_dim % RUN == 0

    @property
    def _row_group(self) -> int:
        """Neighbours in a row that share a scale; 0 for all, which along tokens are a group."""
        return self.group if self.along == "channels" else 0

    def _spread(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """Give every element of the rows its group's number in float32, ready to broadcast."""
        wide = numbers.float()
        return spread_channels(wide, self._row_group, rows.shape[-1]) if self._row_group else wide


def grid_fields(head_dim: int, bits: int, group: int, along: Along, *, zero: bool) -> tuple[Field, ...]:
    """Fields of a block of integers: codes, scales and, with ``zero``, offsets of its groups."""
    row, tokens = packed_bytes(head_dim, bits), along == "tokens"
    scales = head_dim if tokens else group_count(head_dim, group)
    codes = Field("codes", "uint8", (group, row) if tokens else (row,))
    names = ("scale", "zero") if zero else ("scale",)
    return codes, *(Field(name, "float16", (scales,), "scales") for name in names)


def interleave(codes: Tensor, bits: int) -> Tensor:
    """Pack integers ``[..., n]`` of 2, 3 or 4 bits in interleaved order, n a multiple of 128: uint8.

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
    """Undo ``interleave``: uint8 ``[..., n * bits / 8]`` -> uint8 ``[..., n]``."""
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


@register("int", source="round-to-nearest baseline", presets=("int-2", "int-3", "int-4", "int-8"), mark="baseline")
def int_naive(
    bits: Literal[2, 3, 4, 8] = 4,
    symmetric: bool = False,
    group: int = 0,
    outliers: Outliers = "off",
    slots: int = 2,
    scale: Scale = "own",
) -> KVScheme:
    """Plain integers, one scale per token and head: the baseline.

    Parameters
    ----------
    outliers : {"off", 3, 4, 5}
        Chunks of four longer than this many medians are stored in fp16, up to ``slots`` a token; needs a sample.
    slots : int
        Room for such chunks per token, 64 bits each.
    """
    if scale == "search" and outliers != "off":
        raise SpecError(
            f"int: scale=search with outliers={outliers} is not allowed: it would count errors of the zeros that stand "
            f"for outliers; use one of the two."
        )
    codec = with_outliers(GroupInt(bits, group, "channels", symmetric, scale=scale), outliers, slots)
    return KVScheme(key=codec, value=codec)
