"""KVarN: asymmetric integers of Hadamard-rotated tiles whose rows and columns have equal variance. arXiv:2606.03458.

A tile is G tokens of one head, y = x H. Rows are what a scale is computed for, columns the other axis: a row of keys is
a channel, a row of values a token. Alternately every column and every row is divided by its standard deviation, in R
rounds; sd is that of a sample (n - 1), and each factor and each scale is clipped::

    t = 1 (columns), u = 1 (rows);  R times:  t = clip(t clip(sd_column(y / t u), 10^-3, 10^3), e^-0.3, e^10)
                                              u = clip(u clip(sd_row(y / t u), 10^-3, 10^3), e^-0.3, e^10)
    imbalance(t, u) = max sd_column / min sd_column + max sd_row / min sd_row        of y / t u

The t of the smallest imbalance is kept, that of the start included; of those within 2^-30 of each other, which only
rounding tells apart, the last. Then each row of z = y / t is rounded as KIVI's groups are (``group_int``)::

    Z = fp16(min z)    S = fp16((max z - Z) / (2^b - 1))
    code = clip(rne((z - Z) / S), 0, 2^b - 1)    y^ = t (S code + Z)

u need not be stored: dividing a row by it changes S and Z by the same factor, and no code. So a block is a block of
``group_int`` and t, which the authors' layout calls s_row (keys) and s_col (values)::

    keys, G tokens of one head             values, G tokens of one head
    codes    uint8  [G, D b / 8]           codes    uint8  [G, D b / 8]
    scale    fp16   [D]                    scale    fp16   [G]
    zero     fp16   [D]                    zero     fp16   [G]
    balance  fp16   [G]       t            balance  fp16   [D]       t

Bits: keys b + 32/G + 16/D, values b + 16/G + 32/D; D = G = 128: b + 0.375, so k4v2 3.375, k4v4 4.375, k3v3 3.375.
D = 64, G = 128: keys b + 0.5, values b + 0.625.

The first 128 tokens stay in 16 bit, and so does a tile that is not full: 0 to 127 of the newest tokens. Both are as
published; they are not counted in these bits.

Sources: the paper; orders, clips, rounds and sink of the released code (huawei-csl/KVarN, Apache-2.0): 8 rounds there,
16 in the paper's.

Deviations
1. Codes are computed with t, S and Z as stored, in fp16; the released code computes them with float32 numbers.
2. All sums are in float64 with a fixed order, and scales are multiplied where the released code adds logarithms, so
   that the bytes are the same on every machine.
3. Where max |z| is 2^15 or more, t is multiplied by a power of two that brings it below, or Z would leave fp16.
4. D that is no power of two: H is block-diagonal (ops/hadamard); the released code refuses such D.
5. k3v3 is not among the released presets.

Pitfalls: t >= e^-0.3 = 0.74 makes the method depend on the unit of x: a tile whose standard deviations are all below
0.74 is not balanced at all (the values of small models). A tile is encoded when it is full: below 256 tokens nothing
is compressed.

Use: keys with outlier channels and tokens of different lengths at 3 to 4 bits, without calibration.

Not for: short contexts, frequent cropping in mid-context, speed: no kernel reads it, the PyTorch reference runs.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload, one_of
from packedkv.codecs.group_int import Along, GroupInt
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import packed_bytes
from packedkv.ops.hadamard import Rotated
from packedkv.ops.sums import CHUNK, sum_by_halves
from packedkv.registry import register
from packedkv.scheme import KVScheme

FACTORS = (1e-3, 1e3)
"""Bounds of a standard deviation that a scale is multiplied by."""
SCALES = (0.7408182206817179, 22026.465794806718)
"""Bounds of a scale: e^-0.3 and e^10."""
TIE = 2.0**-30
"""Imbalances that differ by less, relatively, are equal: a tile that no round changes keeps its last scales."""
ROUNDS = 8
TILE = 128
EXPONENT = 15
"""|z| stays below two to this power."""


@dataclass(frozen=True)
class KVarN(Rotated, Codec):
    """Integers of a tile whose columns are balanced.

    Parameters
    ----------
    bits : {2, 3, 4}
    along : {"tokens", "channels"}
        The axis that a scale runs over: tokens of one channel (keys), or channels of one token (values).
    group : int
        Tokens of a tile.
    rounds : int
        Rounds of balancing; 0 leaves KIVI's integers behind a Hadamard rotation.
    """

    bits: int = one_of(2, 3, 4, default=4)
    along: Along = "tokens"
    group: int = TILE
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 2:
            raise SpecError(f"kvarn: group={self.group} is not allowed; use 2 or more, 128 as published.")
        if self.rounds < 0:
            raise SpecError(f"kvarn: rounds={self.rounds} is not allowed; use 0 or more, 8 as published.")

    @property
    def block_tokens(self) -> int:
        return self.group

    @property
    def integers(self) -> GroupInt:
        """The codec that rounds the balanced tile."""
        return GroupInt(self.bits, self.group if self.along == "tokens" else 0, self.along)

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("kvarn", head_dim)
        rows, columns = (head_dim, self.group) if self.along == "tokens" else (self.group, head_dim)
        fields = (
            Field("codes", "uint8", (self.group, packed_bytes(head_dim, self.bits))),
            Field("scale", "float16", (rows,), "scales"),
            Field("zero", "float16", (rows,), "scales"),
            Field("balance", "float16", (columns,), "scales"),
        )
        return Layout(head_dim, self.group, fields, nominal_bits=self.bits)

    def encode(self, x: Tensor, params: Params) -> Payload:
        tiles = x.unflatten(2, (-1, self.group))  # [B, H, M, G, D]
        tiles = tiles.transpose(-1, -2) if self.along == "tokens" else tiles  # [..., rows, columns]
        rows, columns = tiles.shape[-2:]
        pieces = tiles.reshape(-1, rows, columns).split(max(1, CHUNK // (rows * columns)))
        balance = torch.cat([fp16_column_scales(piece, self.rounds) for piece in pieces])
        balance = balance.view(*tiles.shape[:3], columns)
        payload = self.integers.encode(x / self._spread(balance), params)
        shapes = {field.name: field.shape for field in self.layout(x.shape[-1]).fields}
        parts = {name: part.reshape(*tiles.shape[:3], *shapes[name]) for name, part in payload.items()}
        return {**parts, "balance": balance}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        parts = {name: part for name, part in payload.items() if name != "balance"}
        if self.along == "channels":  # a block of ``integers`` is one token
            parts = {name: part.flatten(2, 3) for name, part in parts.items()}
            parts = {name: part if name == "codes" else part.unsqueeze(-1) for name, part in parts.items()}
        return self.integers.decode(parts, params) * self._spread(payload["balance"])

    def _spread(self, balance: Tensor) -> Tensor:
        """Column scales ``[B, H, M, columns]`` in float32, ready to broadcast over ``[B, H, N, D]``."""
        if self.along == "tokens":
            return balance.float().flatten(2).unsqueeze(-1)
        return balance.float().repeat_interleave(self.group, 2)


def fp16_column_scales(tiles: Tensor, rounds: int) -> Tensor:
    """t of ``tiles [T, rows, columns]``, such that ``tiles / t`` fits fp16: float16 ``[T, columns]``."""
    wide = tiles.double()
    scales = column_scales(wide, rounds)
    exponent = torch.frexp((wide / scales).abs().amax((-2, -1), keepdim=True)).exponent.long()
    # a power of two from its bits: the rounding of pow and exp2 depends on the device
    unit = (((exponent - EXPONENT).clamp_min(0) + 1023) << 52).view(torch.float64)
    return (scales * unit).clamp_max(FP16_MAX).half().squeeze(-2)


def column_scales(tiles: Tensor, rounds: int) -> Tensor:
    """t of float64 ``tiles [T, rows, columns]``, by dividing columns and rows alternately: float64 ``[T, 1, columns]``.

    All columns and rows of ``tiles / t u`` have nearly the same variance.
    """
    columns, rows = torch.ones_like(tiles[:, :1]), torch.ones_like(tiles[:, :, :1])
    column_sd, row_sd = spread(tiles, -2), spread(tiles, -1)
    best, least = columns, imbalance(column_sd, row_sd)
    for _ in range(rounds):
        columns = (columns * column_sd.clamp(*FACTORS)).clamp(*SCALES)
        row_sd = spread(tiles / columns, -1)  # not yet divided by the rows' scales
        rows = (rows * (row_sd / rows).clamp(*FACTORS)).clamp(*SCALES)
        column_sd = spread(tiles / rows, -2) / columns
        score = imbalance(column_sd, row_sd / rows)
        better = score <= least * (1 + TIE)
        best, least = torch.where(better, columns, best), torch.where(better, score, least)
    return best


def spread(x: Tensor, dim: int) -> Tensor:
    """Standard deviation of a sample along ``dim``, which stays with size 1; float64, sums in a fixed order."""
    # tensors, not numbers: CUDA divides by a constant through its reciprocal, one ulp off the CPU's bits
    count = torch.full((), x.shape[dim], dtype=x.dtype, device=x.device)
    off = x - sum_by_halves(x, dim) / count
    return (sum_by_halves(off * off, dim) / (count - 1)).sqrt()


def imbalance(column_sd: Tensor, row_sd: Tensor) -> Tensor:
    """Largest over smallest standard deviation of the columns, plus that of the rows: ``[T, 1, 1]``; 2 is balanced."""
    both = (column_sd.flatten(1), row_sd.flatten(1))
    ratios = [sd.amax(-1) / sd.amin(-1).clamp_min(1e-8) for sd in both]
    return (ratios[0] + ratios[1])[:, None, None]


Width = Literal[2, 3, 4]


@register(
    "kvarn",
    source="KVarN, arXiv:2606.03458",
    presets={f"kvarn-k{k}v{v}": {"key_bits": k, "value_bits": v} for k, v in ((4, 4), (4, 2), (3, 3))},
)
def kvarn(
    key_bits: Width = 4,
    value_bits: Width = 2,
    group: Literal[64, 128] = 128,
    rounds: int = ROUNDS,
    sink: int = TILE,
    window: int = 0,
) -> KVScheme:
    """Variance-balanced tiles: asymmetric integers, keys per channel, values per token.

    Parameters
    ----------
    key_bits, value_bits : {2, 3, 4}
        Bits of a code.
    window : int
        Newest tokens that stay in 16 bit, at least; those of an unfinished tile come on top.
    """
    key, value = KVarN(key_bits, "tokens", group, rounds), KVarN(value_bits, "channels", group, rounds)
    return KVScheme(key=key, value=value, sink=sink, window=window)
