"""OCTOPUS: octahedral quantization of rotated key triplets; OCTOPUS-QJL stores signs of the residual as well.

OCTOPUS, arXiv:2605.21226, Sec. 3, Alg. 1::

    gamma = |k|,  u = H (s * k / gamma)                      Eqs. 1-2; s in {-1, +1}^D per head, H orthonormal Hadamard
    t_i = u[3i : 3i+3], i < T = ceil(D/3)                    Sec. 3.2; the last triplet is zero-padded
    (xi, eta) = Oct(t_i / |t_i|)                             Eq. 5; both rounded in C_xi, 2^b_dir Lloyd-Max levels
    n* = argmax t_i . n over direction candidates            Sec. 3.5, Eq. 12; n = Oct^-1(xi^, eta^), unit length
    rho^ = the level of C_rho nearest to clip(t_i . n*, 0, 1)       2^b_nrm Lloyd-Max levels of |t_i|; NOT nearest |t_i|
    k^ = gamma s * H u^,  u^ = (rho^_i n*_i)_i               Eq. 13; the padded coordinates are dropped

Oct, with l = |x| + |y| + |z|, p = (x, y, z) / l, sign(0) = +1 (Eqs. 5-7)::

    p_z >= 0:  (xi, eta) = (p_x, p_y)
    p_z <  0:  (xi, eta) = (sign(p_x) (1 - |p_y|), sign(p_y) (1 - |p_x|))

OCTOPUS-QJL, Sec. 3.6 and C.15, a bit for each coordinate of the residual (ops/qjl)::

    r = u - u^,  sigma = sign(R' r),  g = |r|                R' orthonormal, its signs s' independent of s; sign(0) = +1
    k^ = gamma s * H (u^ + g sqrt(pi / (2 D)) R'^T sigma)    E <q, k^> = <q, k> over s'

The paper corrects scores, gamma (<R q, u^> + sqrt(pi / (2 D)) g <R' R q, sigma>) with R of Eq. 2. That is linear in q:
it is <q, k^> of the vector above, and any attention over decoded keys has it.

Block (one token of one head); one code of w = 2 b_dir + b_nrm bits per triplet, ``(i_xi << b_dir | i_eta) << b_nrm |
i_rho``: the row of a joint table of all 2^w decoded triplets::

    codes     uint8          [16 h]                   h whole 32-bit words of each of four parts, h = floor(a w / 32)
    tail      uint8          [ceil(T w / 8) - 16 h]   their other bits; no such field where there are none
    norm      fp16 or fp32   [1]                      gamma / sqrt(D)
    signs     uint8          [D / 8]                  QJL: sigma, coordinate 0 in the lowest bit; 1 is +1
    residual  fp16           [1]                      QJL: g

Four lanes of a warp share a token's row: each has words of its own and shifts once for its bits of the tail, where most
lanes of a plain bit stream begin inside a word. Part p has a = floor(T / 4) neighbouring codes, one more where
p < T mod 4; its bits are the codes as in ops/bitpack. Where w exceeds 10 they are of the first a codes all directions,
then all lengths; a code more follows whole. ``codes`` has the first h little-endian words of part 0, of part 1, ...;
``tail`` the bits behind them of part 0, of part 1, ..., one bit stream, as many bytes in all as a plain one.

Bits: (8 ceil(T w / 8) + 16) / D, with fp32 norms + 16 / D; QJL + 1 + 16 / D. D = 128, T = 43::

    b (b_dir, b_nrm)     1 (1,1)   2 (3,1)   3 (4,2)   4 (5,3)   plus: (3,2)   (4,3)   (5,4)
    bits, fp16 norm      1.1875      2.5       3.5       4.5        2.8125     3.875   4.875

So the paper's "b" is not the rate: the codes alone cost b + 1/3 bits per element. At equal true rate a scalar Lloyd-Max
quantizer has 7-11 % less MSE than the paper's split; ``split=plus``, (b+1, b), is the one that wins at its own rate
(D = 128, unit vectors: -6, -10, -14 % at b = 2, 3, 4). QJL's error has pi/2 - 1 = .571 of OCTOPUS' energy.

Deviations from the paper
1. The norm is stored as gamma / sqrt(D), the key's root mean square, which never leaves the fp16 range that keys have;
   gamma itself may. fp16 costs 16/D bits instead of 32/D and a relative error of 2^-11; ``norm=fp32`` is the paper's.
   A key with |k| < 2^-25 sqrt(D) decodes to zero.
2. C_xi is solved for the exact density (Eq. 7), not trained on samples, and is symmetric to the last bit.
3. D that is no power of two, which the paper leaves out: block-diagonal Hadamard (ops/hadamard). Small blocks spread
   an outlier less, so C_rho fits real keys less well. R' mixes all coordinates: blocks would bias scores (ops/qjl).
4. One run of joint codes per token instead of two byte-padded ones: 2.5 % smaller at b = 4, D = 128.
5. Values: fp16 scale and offset per group (the paper's ratios imply fp32).
6. ``local_3x3`` tries the four levels that bracket (xi, eta), not the nine around the nearest: the best of the nine,
   and of all 4^b_dir, was among the four in each of some 10^7 triplets at b_dir = 1..6.
7. R' is orthonormal, as the paper's is. It is not QJL's Gaussian matrix, for which there is no option: that one
   multiplies the error energy by pi/2 - 1/D = 1.56, so with it the residual makes scores worse.
8. The cosine and MSE columns of Table 1 leave the residual out (they equal OCTOPUS' own); ``decode`` includes it.

Pitfalls: ``local_2x2`` as printed, {j, j+1} from the NEAREST index j, misses the better neighbour half of the time (3 %
worse MSE than local_3x3, which equals the full search). The printed Table 1 was made with ``scalar``. A triplet of
zeros in a key that is not zero decodes to the smallest level of C_rho in some direction, not to zero.

Use: keys at 2.5 to 4.5 bits without calibration, at rates between whole bits per coordinate; ``split=plus`` where the
least error at its rate matters. ``octopus-qjl`` for unbiased scores from few bits: shrunk scores flatten the softmax,
so one key among very many keeps less of its mass (synthetic needle, b = 2: .958 of the mass, .914 in octopus with
scalar rounding, .960 exact).

Not for: head_dim without a large power of two in it (80: blocks of 16 spread outliers badly); least loss per byte: on
the small model turboquant-4 at 4.25 bits in all is better than octopus-3 at 4.5. The sketch's bit per coordinate buys a
factor 1.75 in error energy, one more bit of octopus a factor 3.5.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Payload, Sample, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.hadamard import Norm, UnitRotated, random_signs
from packedkv.ops.lloyd_max import block_norm_density, interval, lloyd_max, nearest_level
from packedkv.ops.qjl import estimate, sketched, sketched_layout
from packedkv.ops.scale_search import FACTORS, Scale, least_error
from packedkv.ops.sums import in_pieces, row_norm
from packedkv.registry import register
from packedkv.scheme import KVScheme

Rounding = Literal["scalar", "local_2x2", "local_3x3", "full"]
Split = Literal["paper", "plus", -2, -1, 0, 1, 2]

JOINT_BITS = 10
"""Longest code that is stored whole: a GPU decodes it by one table."""
OFFSETS: dict[str, tuple[int, ...]] = {"scalar": (0,), "local_2x2": (0, 1), "local_3x3": (0, 1)}
"""Candidates on each axis, from the nearest level; local_3x3: from the level below the value."""
CHUNK = 1 << 13
"""Triplets rounded at once: float64 temporaries of 64 KB each, which stay in cache and below torch's threading."""
PARTS = 4
TINY = 1e-300  # avoids 0/0: the zero vector maps to (0, 0)


# -- the octahedral map: every step is one elementwise IEEE operation, so a vector gives the same bits in a batch ------


def _signed(magnitude: Tensor, like: Tensor) -> Tensor:
    """``magnitude`` with the sign of ``like``, zero (either one) counting as positive."""
    return torch.where(like >= 0, magnitude, -magnitude)


def _fold(a: Tensor, b: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange the inner square and the outer triangles where ``lower``; its own inverse."""
    return (
        torch.where(lower, _signed(1 - b.abs(), a), a),
        torch.where(lower, _signed(1 - a.abs(), b), b),
    )


def to_square(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Octahedral coordinates (xi, eta) of float64 vectors of any length, Eq. 5; the zero vector gives (0, 0).

    >>> x, y, z = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64).unbind(-1)
    >>> torch.stack(to_square(x, y, z), -1).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    length = (x.abs() + y.abs() + z.abs()).clamp_min(TINY)
    return _fold(x / length, y / length, z < 0)


def from_square(xi: Tensor, eta: Tensor) -> Tensor:
    """Unit vectors ``[..., 3]`` of square coordinates, Eq. 6; the inverse of ``to_square``."""
    z = 1 - xi.abs() - eta.abs()
    x, y = _fold(xi, eta, z < 0)
    v = torch.stack([x, y, z], -1)
    return v / (x * x + y * y + z * z).sqrt()[..., None]


def coordinate_density(xi: Tensor) -> Tensor:
    """Density of one octahedral coordinate of a uniform direction on [-1, 1], Eq. 7; integrates to 1."""
    a = xi.abs()
    inner = (1 - a) / (1 - 2 * a + 3 * a * a)
    outer = a / (2 - 4 * a + 3 * a * a)
    return (inner + outer) / (math.pi * (a * a + (1 - a) * (1 - a)).sqrt())


@lru_cache(maxsize=64)
def direction_centroids(bits: int) -> Tensor:
    """C_xi: float64 ``[2**bits]``, the same for every head_dim (Eq. 7)."""
    return lloyd_max(coordinate_density, 2**bits, -1.0, 1.0, symmetric=True)


@lru_cache(maxsize=64)
def norm_centroids(head_dim: int, bits: int) -> Tensor:
    """C_rho: float64 ``[2**bits]`` (Eq. 4)."""
    return lloyd_max(block_norm_density(head_dim, 3), 2**bits, 0.0, 1.0)


# -- codes of a row in four parts --------------------------------------------------------------------------------------


def split_bytes(n: int, bits: int) -> dict[str, int]:
    """Bytes of a row of ``n`` codes, by field.

    >>> split_bytes(43, 10), split_bytes(43, 3), split_bytes(64, 8)
    ({'codes': 48, 'tail': 6}, {'tail': 17}, {'codes': 64})
    """
    head = 16 * (n // PARTS * bits // 32)
    sizes = {"codes": head, "tail": -(-n * bits // 8) - head}
    return {name: size for name, size in sizes.items() if size}


def _part_fields(n: int, bits: int, low: int) -> list[list[tuple[int, int, int]]]:
    """Bits of each part, from the first one on: (code, its first bit, how many bits)."""
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
def runs(n: int, bits: int, low: int, device: str) -> tuple[Tensor, ...]:
    """Positions of runs of neighbouring bits of ``n`` codes in a row, ``codes`` and ``tail`` side by side.

    The lowest ``low`` bits of a code are apart; 0: codes are whole. Returns int64 ``[runs]`` each: the code, its bit
    where the run begins, ``2**length - 1``, and the byte of the row and its bit where the run begins.
    """
    words = 8 * split_bytes(n, bits).get("codes", 0) // PARTS  # bits of a part that are whole words
    spans = []
    tail = PARTS * words
    for part, fields in enumerate(_part_fields(n, bits, low)):
        at = 0
        for code, shift, length in fields:
            inside = max(0, min(length, words - at))
            if inside:
                spans.append((code, shift, inside, part * words + at))
            if inside < length:
                spans.append((code, shift + inside, length - inside, tail))
                tail += length - inside
            at += length
    code, shift, length, position = torch.tensor(spans, device=device).T
    return code, shift, (1 << length) - 1, position // 8, position % 8


def pack_split(codes: Tensor, bits: int, low: int = 0) -> dict[str, Tensor]:
    """Pack codes ``[..., n]`` of 1 to 16 bits into ``codes`` and ``tail``, uint8; ``low`` as in ``runs``.

    >>> packed = pack_split(torch.arange(18), 8)  # parts of 5, 5, 4 and 4 codes, one word each
    >>> packed["codes"].tolist(), packed["tail"].tolist()
    ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17], [4, 9])
    """
    n = codes.shape[-1]
    code, shift, mask, byte, bit = runs(n, bits, low, str(codes.device))
    wide = (codes.to(torch.int32)[..., code] >> shift.int() & mask.int()) << bit.int()
    sizes = split_bytes(n, bits)
    row = torch.zeros(*codes.shape[:-1], sum(sizes.values()) + 2, dtype=torch.int32, device=codes.device)
    for i in range(3):  # runs do not overlap, so sums are unions
        row.index_add_(-1, byte + i, wide >> 8 * i & 0xFF)
    pieces = row.to(torch.uint8)[..., :-2].split(list(sizes.values()), -1)
    return {name: piece.contiguous() for name, piece in zip(sizes, pieces, strict=True)}


def unpack_split(packed: Mapping[str, Tensor], bits: int, n: int, low: int = 0) -> Tensor:
    """Undo ``pack_split``: int32 ``[..., n]``; other fields are ignored."""
    row = torch.cat([packed[name] for name in split_bytes(n, bits)], -1)
    row = torch.nn.functional.pad(row, (0, 2)).to(torch.int32)
    code, shift, mask, byte, bit = runs(n, bits, low, str(row.device))
    wide = row[..., byte] | row[..., byte + 1] << 8 | row[..., byte + 2] << 16
    pieces = (wide >> bit.int() & mask.int()) << shift.int()
    codes = torch.zeros(*row.shape[:-1], n, dtype=torch.int32, device=row.device)
    return codes.index_add_(-1, code, pieces)


# -- the codec ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Octopus(UnitRotated, Codec):
    """Octahedral triplet codec of the rotated, normalised vector.

    Parameters
    ----------
    direction_bits, norm_bits : int
        b_dir of each octahedral coordinate and b_nrm of the triplet norm; at least 1, 2 b_dir + b_nrm at most 16.
    rounding : {"scalar", "local_2x2", "local_3x3", "full"}
        Encoder's direction search, the bytes mean the same; local_3x3 equals full, local_2x2 is the weak set as
        printed, scalar rounds xi, eta and rho on their own, as the paper's scores.
    """

    direction_bits: int = 5
    norm_bits: int = 3
    rounding: Rounding = "local_3x3"
    norm: Norm = "fp16"
    scale: Scale = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.direction_bits, self.norm_bits) < 1 or self.code_bits > 16:
            raise SpecError(
                f"octopus: direction_bits={self.direction_bits}, norm_bits={self.norm_bits} is not allowed; "
                f"use at least 1 each, and 2 * direction_bits + norm_bits <= 16."
            )

    @property
    def code_bits(self) -> int:
        """Bits w of one triplet's code."""
        return 2 * self.direction_bits + self.norm_bits

    @property
    def low_bits(self) -> int:
        """Bits of a code that are stored apart from the others: the length's, where one table is too long."""
        return self.norm_bits if self.code_bits > JOINT_BITS else 0

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("octopus", head_dim)
        sizes = split_bytes(-(-head_dim // 3), self.code_bits).items()
        fields = (*(Field(name, "uint8", (size,)) for name, size in sizes), self.norm_field)
        return Layout(head_dim, 1, fields, nominal_bits=self.code_bits / 3, version=2)  # 1: one bit stream

    def constants(self, site: Site) -> Constants:
        sides = 2**self.direction_bits
        shapes = {"xi": (sides,), "rho": (2**self.norm_bits,), "directions": (sides**2, 3)}
        shapes["signs"] = (site.num_heads, site.head_dim)
        return {name: Constant(shape, low=-1, high=1) for name, shape in shapes.items()}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Sample the signs and tabulate the codebooks; row ``i_xi << b_dir | i_eta`` of ``directions``."""
        xi, rho = direction_centroids(self.direction_bits), norm_centroids(site.head_dim, self.norm_bits)
        directions = from_square(xi.repeat_interleave(len(xi)), xi.repeat(len(xi)))
        tables = {"xi": xi, "rho": rho, "directions": directions}
        tables = {name: table[None].float().to(site.device) for name, table in tables.items()}
        return {"signs": random_signs(site), **tables}

    def encode(self, x: Tensor, params: Params) -> Payload:
        dim, triplets = x.shape[-1], -(-x.shape[-1] // 3)
        xi, rho, directions = (params[name][0].double() for name in ("xi", "rho", "directions"))
        start = interval(xi[1:-1]) if self.rounding == "local_3x3" else nearest_level(xi)
        nearest_rho = nearest_level(rho)

        def value(codes: Tensor, norm: Tensor) -> Tensor:
            return self._triplets(params, codes) * self.length(norm, dim)

        def encoded(piece: Tensor) -> tuple[Tensor, Tensor]:
            gamma = row_norm(piece.double())
            u, _ = self.unit(piece)  # Eq. 1
            t = torch.nn.functional.pad(u, (0, triplets * 3 - dim)).reshape(-1, 3).T.contiguous()
            direction, length = (part.view(*u.shape[:-1], triplets) for part in self._round(t, start, directions))

            def quantize(factor: float) -> tuple[Tensor, Tensor]:  # directions do not depend on the norm
                codes = direction << self.norm_bits | nearest_rho(length / factor)
                return codes.to(torch.int32), self.rounded(gamma * factor, dim)

            if self.scale == "own":
                return quantize(FACTORS[0])
            codes, norm = least_error(piece, quantize, value)
            return codes, norm

        codes, norm = in_pieces(encoded, x, 3 * CHUNK)
        return {**pack_split(codes, self.code_bits, self.low_bits), "norm": norm}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return self.look_up(payload, params) * self.length(payload["norm"], params["signs"].shape[-1])

    def look_up(self, payload: Payload, params: Params) -> Tensor:
        """Triplets of the codes side by side: u^ in float32."""
        triplets = -(-params["signs"].shape[-1] // 3)
        return self._triplets(params, unpack_split(payload, self.code_bits, triplets, self.low_bits))

    def _triplets(self, params: Params, codes: Tensor) -> Tensor:
        joint = params["directions"][0][:, None] * params["rho"][0][:, None]  # [4^b_dir, 2^b_nrm, 3]
        return joint.flatten(0, 1)[codes.long()].flatten(-2)[..., : params["signs"].shape[-1]]

    def _round(self, t: Tensor, start: Callable[[Tensor], Tensor], directions: Tensor) -> tuple[Tensor, Tensor]:
        """Direction and length of triplets ``t [3, n]``, lines 7-21 of Alg. 1; ``start`` maps xi to the first level."""
        x, y, z = t
        xi, eta = to_square(x, y, z)
        seed = start(xi) << self.direction_bits | start(eta)
        if self.rounding == "scalar":
            return seed, (x * x + y * y + z * z).sqrt()
        candidates = self._candidates(x.device)
        if self.rounding == "full":
            seed = torch.zeros_like(seed)
        best, chosen = torch.full_like(x, -torch.inf), torch.zeros_like(seed)
        for number, (n_x, n_y, n_z) in enumerate(directions[candidates].mT.contiguous()):
            score = n_x.index_select(0, seed).mul_(x)  # Eq. 12: s = t . n
            score.add_(n_y.index_select(0, seed).mul_(y)).add_(n_z.index_select(0, seed).mul_(z))
            chosen.masked_fill_(score > best, number)  # candidates ascend, so a tie keeps the lowest
            torch.maximum(best, score, out=best)
        direction = candidates.flatten().index_select(0, chosen * candidates.shape[1] + seed)
        return direction, best.clamp_(0, 1)

    def _candidates(self, device: torch.device) -> Tensor:
        """Rows of the direction table to try, ascending: ``[candidates, seeds]``, one seed only for the full search."""
        levels = 2**self.direction_bits
        grid = torch.arange(levels, device=device)
        if self.rounding == "full":
            return torch.arange(levels * levels, device=device)[:, None]
        near = torch.stack([(grid + offset).clamp(0, levels - 1) for offset in OFFSETS[self.rounding]])
        return (near[:, None, :, None] * levels + near[None, :, None, :]).flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class OctopusQJL(Octopus):
    """OCTOPUS and the signs of a sketch of its residual; the residual's length is fp16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "own":
            raise SpecError(f"octopus-qjl: scale={self.scale!r} is not allowed; only octopus searches scales.")

    def layout(self, head_dim: int) -> Layout:
        return sketched_layout("octopus-qjl", super().layout(head_dim))

    def constants(self, site: Site) -> Constants:
        return {**super().constants(site), "sketch": Constant((site.num_heads, site.head_dim), low=-1, high=1)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Add ``sketch [1, H, D]``, s', sampled apart from s, to OCTOPUS' constants."""
        return {**super().fit(site), "sketch": random_signs(site, stream=1)}

    def encode(self, x: Tensor, params: Params) -> Payload:
        payload = super().encode(x, params)
        return sketched(payload, lambda u, part: self.unit(u)[0] - self.look_up(part, params), x, params["sketch"])

    def decode(self, payload: Payload, params: Params) -> Tensor:
        r = estimate(payload["signs"], payload["residual"], params["sketch"])
        return (self.look_up(payload, params) + r) * self.length(payload["norm"], params["signs"].shape[-1])


def split_bits(bits: int, split: Split) -> tuple[int, int]:
    """(b_dir, b_nrm) of the paper's b.

    >>> split_bits(4, "paper"), split_bits(4, "plus"), split_bits(1, "paper"), split_bits(4, -2)
    ((5, 3), (5, 4), (1, 1), (2, 6))
    """
    if bits not in (1, 2, 3, 4):
        raise SpecError(f"octopus: bits={bits} is not allowed; use 1, 2, 3 or 4.")
    if split not in get_args(Split):
        raise SpecError(f"octopus: split={split!r} is not allowed; use paper, plus, or d of -2..2 for (b+d, b-d).")
    offset = split if isinstance(split, int) else min(1, bits - 1)  # (1, 1) fits the printed b = 1 rows
    return (bits + 1, bits) if split == "plus" else (bits + offset, bits - offset)


@register(
    "octopus", source="OCTOPUS, arXiv:2605.21226, Sec. 3-4, Alg. 1", presets=("octopus-4", "octopus-3", "octopus-2")
)
def octopus(
    bits: Literal[1, 2, 3, 4] = 4,
    rounding: Rounding = "local_3x3",
    split: Split = "paper",
    window: int = 32,
    group: int = 32,
    dense_keys: int = 1,
    norm: Norm = "fp16",
    scale: Scale = "own",
) -> KVScheme:
    """Octahedral keys, group-wise values, outer layers' keys dense: the language-model recipe of Sec. 4.2.

    Parameters
    ----------
    bits : {1, 2, 3, 4}
        The paper's b of keys and values; keys cost b + 1/3 bits and a norm, values b bits and group constants.
        At 1 the keys have (b_dir, b_nrm) = (1, 1) and the values 2 bits.
    split : {"paper", "plus", -2, -1, 0, 1, 2}
        (b_dir, b_nrm): paper (b+1, b-1); plus (b+1, b), better at its rate; a number d (b+d, b-d), as in Table 4.
    dense_keys : int
        How many of the first and of the last layers keep keys dense.
    """
    key = Octopus(*split_bits(bits, split), rounding, norm, scale=scale)
    value = GroupInt(max(2, bits), group, "channels", scale=scale)
    return KVScheme(key=key, value=value, window=window, dense_key_layers=dense_keys)


@register(
    "octopus-qjl",
    source="OCTOPUS, arXiv:2605.21226, Sec. 3-4; QJL, arXiv:2406.03482",
    presets=("octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2"),
)
def octopus_qjl(
    bits: Literal[1, 2, 3, 4] = 4,
    rounding: Rounding = "local_3x3",
    split: Split = "paper",
    window: int = 32,
    group: int = 32,
    dense_keys: int = 1,
    norm: Norm = "fp16",
) -> KVScheme:
    """Octahedral keys with unbiased scores, by 1-bit QJL residuals; the rest as in octopus.

    Parameters
    ----------
    bits : {1, 2, 3, 4}
        The paper's b of keys and values; keys cost b + 1/3 bits, one more for the residual's sign, and two norms.
    split : {"paper", "plus", -2, -1, 0, 1, 2}
        (b_dir, b_nrm): paper (b+1, b-1), plus (b+1, b), a number d (b+d, b-d).
    dense_keys : int
        How many of the first and of the last layers keep keys dense.
    """
    key, value = OctopusQJL(*split_bits(bits, split), rounding, norm), GroupInt(max(2, bits), group, "channels")
    return KVScheme(key=key, value=value, window=window, dense_key_layers=dense_keys)
