"""PolarQuant: recursive polar angles of a rotated vector. arXiv:2502.02617, Def. 1; as in arXiv:2605.21226, Sec. 4.1.

    y = H (s * x)                                  s in {-1, +1}^D per head, H orthonormal Hadamard
    level 1:   r_j = |(y_2j, y_2j+1)|,  psi_j = atan2(y_2j+1, y_2j) in [0, 2 pi)                       D/2 angles
    level l:   r_j = |(r_2j, r_2j+1)|,  psi_j = atan2(r_2j+1, r_2j) in [0, pi/2]     D/2^l angles, until one r is left
    level 1 is uniform: 2^b equal sectors, decoded to their middles
    level l has f(psi) ~ cos(psi)^(m-1) sin(psi)^(n-1) for radii of m and n coordinates: 2^b Lloyd-Max levels in psi
    gamma = the last r;  decoded from the top: r -> (r cos psi^, r sin psi^)           so |x^| = |x|

At m = n = 2^(l-1) the density is sin(2 psi)^(n-1). All D - 1 angles take b bits, only gamma is stored besides them.

Block (one token of one head)::

    codes  uint8          [ceil((D - 1) b / 8)]     level 1 first, each in order; code 0 in the lowest bits
    norm   fp16 or fp32   [1]                       gamma / sqrt(D)

Bits: (8 ceil((D-1) b / 8) + 16) / D, with fp32 norms + 16 / D; at D = 128 b + 16 / D.

E cos(x, x^) = prod over levels of E cos(psi - psi^); MSE = 2 (1 - cos), the length being kept: .2196 .0571 .0145 at
D = 128, b = 2, 3, 4, against .1160 .0340 .0093 of TurboQuant in the same bytes. Nine tenths of it are level 1's, whose
angle ranges over a whole turn and has no more bits than the narrow ones above.

Deviations from the paper
1. D that is no power of two: the tree pairs neighbours as long as there are two, and an odd one waits for the next
   level (80 = five 16s: 32 32 16, 64 16, 80). The general density above serves unequal partners, so there are still
   D - 1 angles and one gamma. The rotation is block-diagonal there (ops/hadamard).
2. All angles take b bits (the paper gives 4 to level 1 and 2 to the others), as in OCTOPUS' baseline.
3. The norm is stored as the root mean square, in fp16 by default; ``norm=fp32`` is the paper's.
   A row with |x| < 2^-25 sqrt(D) decodes to zero.
4. The encoder compares b / (a + b), which rises with atan2(b, a), with cuts so transformed: no arctangent, whose last
   bit differs between machines. On a tie the lower sector or level.

Pitfalls: not the method of arXiv:2502.00527, which has the same name. Keeping |x| does not make scores unbiased: they
are short by 1 - E cos. Rows that the rotation does not spread (large channels at D = 80) fall outside the narrow
distributions of the upper levels.

Use: comparing with papers that use it; keeping the length of every vector, up to the rounding of its norm.

Not for: least error: at equal bytes turboquant has half to two thirds of its MSE.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import pi
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Payload, Sample, Site, one_of
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.hadamard import Norm, UnitRotated, random_signs
from packedkv.ops.lloyd_max import lloyd_max, midpoints
from packedkv.ops.sums import in_pieces
from packedkv.registry import register
from packedkv.scheme import KVScheme

TINY = 1e-300
"""Keeps 0/0 out; radii of float32 coordinates are larger."""

Run = tuple[int, int, int]
"""``count`` pairs side by side whose radii span ``m`` and ``n`` coordinates."""


@lru_cache(maxsize=64)
def tree(head_dim: int) -> tuple[tuple[Run, ...], ...]:
    """Pairs of every level above the first.

    >>> tree(8), tree(24)
    ((((2, 2, 2),), ((1, 4, 4),)), (((6, 2, 2),), ((3, 4, 4),), ((1, 8, 8),), ((1, 16, 8),)))
    """
    levels, spans = [], [2] * (head_dim // 2)
    while len(spans) > 1:
        pairs = list(zip(spans[0::2], spans[1::2], strict=False))
        left = spans[2 * len(pairs) :]
        # only the last radius of a level can be a smaller one
        levels.append(tuple((pairs.count(pair), *pair) for pair in dict.fromkeys(pairs)))
        spans = [m + n for m, n in pairs] + left
    return tuple(levels)


@lru_cache(maxsize=256)
def angle_levels(m: int, n: int, bits: int) -> Tensor:
    """Lloyd-Max levels of atan2 of the radii of ``n`` over ``m`` coordinates: float64 ``[2**bits]`` in [0, pi/2]."""

    def density(psi: Tensor) -> Tensor:
        return (2**0.5 * psi.cos()) ** (m - 1) * (2**0.5 * psi.sin()) ** (n - 1)

    return lloyd_max(density, 2**bits, 0.0, pi / 2, symmetric=m == n)


@dataclass(frozen=True)
class PolarQuant(UnitRotated, Codec):
    """Recursive polar angles of the rotated vector, b bits each.

    Parameters
    ----------
    bits : {2, 3, 4, 5, 6}
        Bits of each of the D - 1 angles; the norm comes on top.
    """

    bits: int = one_of(2, 3, 4, 5, 6, default=4)
    norm: Norm = "fp16"

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("polarquant", head_dim)
        codes = Field("codes", "uint8", (packed_bytes(head_dim - 1, self.bits),))
        return Layout(head_dim, 1, (codes, self.norm_field), nominal_bits=self.bits * (head_dim - 1) / head_dim)

    def constants(self, site: Site) -> Constants:
        rows = 1 + sum(len(level) for level in tree(site.head_dim))
        return {
            "signs": Constant((site.num_heads, site.head_dim), low=-1, high=1),
            "angles": Constant((rows, 2**self.bits), torch.float64, 0, 2 * pi),
        }

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Sample the signs and tabulate the angles: the middles of level 1's sectors, then a row for each run."""
        sectors = (torch.arange(2**self.bits, dtype=torch.float64) + 0.5) * (2 * pi / 2**self.bits)
        rows = [angle_levels(m, n, self.bits) for level in tree(site.head_dim) for _, m, n in level]
        return {"signs": random_signs(site), "angles": torch.stack([sectors, *rows])[None].to(site.device)}

    def encode(self, x: Tensor, params: Params) -> Payload:
        dim = x.shape[-1]
        walls = [midpoints(row) for row in params["angles"][0]]
        cuts = [_share(wall.sin(), wall.cos() + wall.sin()) for wall in walls]
        # sectors that lie in the first quadrant; the others are its copies
        cuts[0] = cuts[0][: 2 ** (self.bits - 2) - 1].clone()
        # in float32, psi = pi/4 is a share of 1/2 sharp, and what a last bit of sin or sqrt moves falls together
        cuts = [cut.float() for cut in cuts]

        def encoded(piece: Tensor) -> tuple[Tensor, Tensor]:
            codes, gamma = self._climb(piece.double(), cuts)
            return pack(codes, self.bits), self.rounded(gamma, dim)

        return dict(zip(("codes", "norm"), in_pieces(encoded, x), strict=True))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        dim = params["signs"].shape[-1]
        codes = unpack(payload["codes"], self.bits, dim - 1).int()
        cos, sin = params["angles"][0].cos().float(), params["angles"][0].sin().float()
        radii = self.length(payload["norm"], dim)
        row, end = len(cos), dim - 1
        for level in reversed(tree(dim)):
            pairs = sum(count for count, _, _ in level)
            row, end = row - len(level), end - pairs
            radii = _split(radii, *_turn(codes[..., end : end + pairs], level, cos[row:], sin[row:]))
        return _split(radii, *_turn(codes[..., :end], ((end, 1, 1),), cos, sin))

    def _climb(self, y: Tensor, cuts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Codes ``[..., D - 1]`` and gamma ``[..., 1]``."""
        a, b = y[..., 0::2].contiguous(), y[..., 1::2].contiguous()
        # quarter turns take axes as their end, so that a tie goes to the lower sector
        above = b >= 0
        odd = torch.where(above, a < 0, a > 0)
        x, z = a.abs(), b.abs()
        inside = torch.bucketize(_share(torch.where(odd, x, z), x + z).float(), cuts[0], out_int32=True)
        codes = [inside + odd * 2 ** (self.bits - 2) + ~above * 2 ** (self.bits - 1)]
        radii, row = a.mul_(a).add_(b.mul_(b)).sqrt_(), 1
        for level in tree(y.shape[-1]):
            pairs = sum(count for count, _, _ in level)
            a, b = radii[..., 0 : 2 * pairs : 2], radii[..., 1 : 2 * pairs : 2]
            # each run of a level has cuts of its own
            for share in _share(b, a + b).split([count for count, _, _ in level], -1):
                codes.append(torch.bucketize(share.float().contiguous(), cuts[row], out_int32=True))
                row += 1
            radii = _beside((a * a).add_(b * b).sqrt_(), radii[..., 2 * pairs :])
        return torch.cat(codes, -1), radii


def _share(b: Tensor, both: Tensor) -> Tensor:
    """``b / (a + b)``, which rises with atan2(b, a) from 0 to 1; 0 where both are 0."""
    return b / both.clamp_min(TINY)


def _beside(x: Tensor, waiting: Tensor) -> Tensor:
    """``x``, then the odd radii; there are none as long as the tree is even."""
    return torch.cat([x, waiting], -1) if waiting.shape[-1] else x


def _turn(codes: Tensor, level: tuple[Run, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every code of a level; row i of the tables is run i's."""
    if len(level) > 1:
        rows = torch.repeat_interleave(torch.arange(len(level)), torch.tensor([count for count, _, _ in level]))
        codes = codes + rows.to(codes) * cos.shape[1]
    place = codes.flatten()
    return cos.flatten().index_select(0, place).view_as(codes), sin.flatten().index_select(0, place).view_as(codes)


def _split(radii: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo one level: each of the first radii gives two, the odd one behind them stays."""
    pairs = cos.shape[-1]
    turned = radii[..., :pairs]
    return _beside(torch.stack([cos.mul_(turned), sin.mul_(turned)], -1).flatten(-2), radii[..., pairs:])


@register(
    "polarquant",
    source="PolarQuant, arXiv:2502.02617; OCTOPUS, arXiv:2605.21226, Sec. 4.1",
    presets=("polarquant-4", "polarquant-3", "polarquant-2"),
)
def polarquant(bits: Literal[2, 3, 4, 5, 6] = 4, window: int = 0, norm: Norm = "fp16") -> KVScheme:
    """Recursive polar angles of rotated keys and values; lengths are kept."""
    codec = PolarQuant(bits, norm)
    return KVScheme(key=codec, value=codec, window=window)
