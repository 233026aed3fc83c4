"""HQMQ: chunks of four as quaternions, directions on products of Hurwitz units. arXiv:2605.27646, Sec. 3, App. B.

    x = 4 neighbouring channels = r u,  r = |x|                      D is zero-padded to a multiple of 4; n = ceil(D/4)
    C = {p q_s : p of the 24 Hurwitz units, s < S}                   Eq. 1; q_s random, per layer, head and role
    code = argmax_c <x, c>                                           lowest on ties; a zero chunk has code 0
    r_q = clip(rne(r L / sigma), 0, L),  L = 2^r - 1                 sigma = max r of the token and head
    x^ = (r_q sigma / L) c

The search never touches 24 S candidates: <x, p q> = <x conj(q), p>, and the best p is the 24-cell corner nearest to
v = x conj(q), worth max(max |v_i|, sum |v_i| / 2): S of these, one p for the winner. Many: cells (ops/quaternion).

Block, ``packing=ceil`` (one token of one head; w = ceil(log2 24 S): 10, 11, 12, 13 bits)::

    codes     uint8  [ceil(n w / 8)]     24 s + p; chunk 0 in the lowest bits; bit 0 of a code is the sign of p
    radius    uint8  [ceil(n r / 8)]     r_q
    scale     fp16   [1]                 sigma / 2

Where 8 divides n (layout version 5) the same bits are in another order: one mask leaves two signed radii in a register
as fp16 numbers, and few operations turn rows into addresses. Rows 2i and 2i + 1 of the codebook are opposite, so
sign = bit 0 of the code, row = the other w - 1 bits::

    w + r >= 16   codes   uint8  [2 n]            16 bits: sign << 15 | row << 16 - w | low 16 - w bits of r_q
                  radius  uint8  [n x / 8]        high x = w + r - 16 bits of r_q; none at s24_r6, s96_r4, s192_r3
    else          codes   uint8  [n b / 8]        low b bits of the row: 8 at S = 24, else all w - 1
                  radius  uint8  [n / 2]          4 bits: r_q, at r = 3 + 8 sign
                  bits    uint8  [k n / 8]        k planes: bit 8 of the row at S = 24, the sign at r = 4; none at k = 0

All are plain streams, but in a plane of ``bits`` chunk ``c = m g + i`` (m = n / 8, g of 0..7) is bit g of byte i: a
lane that reads m neighbouring chunks shifts the plane by g once and has their bits in as many bytes.

``packing=radix`` (four tokens of one head, every field for all of them): 24 S = 9 * 2^k, so a code is a digit of
0..8 and k = 6, 7, 8, 9 low bits; ``codes`` becomes ``low``, k bits each, and ``digits``: words of 17 digits, sum d_i
9^i, in 54 bits (3.1765 bits a digit where log2 9 = 3.1699; the last word is as narrow as it may be), one bit stream.

Bits: (8 ceil(n w / 8) + 8 ceil(n r / 8) + 16) / D; s24_r3 at D = 128: 54 bytes, 3.375, with radix 203 for 4 tokens,
3.1719. The paper prints (log2 24 S + r) / 4: no scale, and a width that only the radix packing reaches, within .0044 at
D = 128 and 256; its last word is not full at other D (.0075 more at 80, .02 at 64 and 96). Its Med-C outliers are
``outliers=3``, two long chunks a token in fp16: + 1.25 bits at D = 128. This codec sees zeros there.

Deviations from the paper
1. q_s is cut to multiples of 2^-10. All of C is then exact in fp16 and a search in float64 is exact, so a token alone
   gives the bits it gives in a batch. Direction error moves by 2 10^-5 at most.
2. sigma / 2 is stored, the root mean square of the largest chunk: |x| of fp16 values can be 131008, above fp16.
3. ``codebook=int8`` decodes with entries rounded to k/127, half the table: each component of c is off by 1/254 at
   most, relative MSE + 4e-5 at S = 24, + 2e-5 above. The bytes of the cache are the same.

Pitfalls: one chunk 100 times the median zeroes the 3- and 4-bit radii of all others (r=6: a third of them): use
``outliers=3`` on such keys (Qwen2-like). r_q rounds |x|, not <x, c>: decoded chunks are a little long.

Use: 3.2 to 4.9 bits in fine steps (D = 128) without rotation or calibration.

Not for: least error per bit: on the small model measured turboquant-4 at 4.25 bits loses less than any of its presets,
turboquant-3 at 3.25 less than those below 4. Encoding on a CPU: the search costs tens of times int-4's time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Payload, Sample, Site, one_of
from packedkv.codecs.outliers import Outliers, blocks, with_outliers
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.quaternion import (
    chunk_lengths,
    decode_chunks,
    nearest_product,
    products,
    quantize_lengths,
    random_units,
    search_heads,
    split_chunks,
)
from packedkv.registry import register
from packedkv.scheme import KVScheme

Packing = Literal["ceil", "radix"]
Codebook = Literal["fp16", "int8"]

SIZES, RADII = (24, 48, 96, 192), (3, 4, 6)
RADIX_TOKENS = 4
WORD_DIGITS = 17
"""The longest word that wastes so little and whose arithmetic int64 holds."""
UNIT = 16
VERSION, SIGNED_VERSION = 4, 5
"""Of the bytes: plain streams, and the order of ``pack_rows``."""


@dataclass(frozen=True)
class Hqmq(Codec):
    """Quaternion chunks: product codebook for the direction, uniform radius under a scale per token.

    Parameters
    ----------
    s : {24, 48, 96, 192}
        Random quaternions per layer, head and role; 24 s directions.
    r : {3, 4, 6}
        Bits of a chunk's radius; 6 where a few chunks are far longer than the rest.
    packing : {"ceil", "radix"}
        ceil: whole bits per code; radix: 0.2 bits less per element, four tokens to a block.
    codebook : {"fp16", "int8"}
        Entries of the decode table; fp16 is exact, int8 halves the table and adds 2e-5 to 4e-5 of relative MSE.
    """

    s: int = one_of(*SIZES, default=96)
    r: int = one_of(*RADII, default=4)
    packing: Packing = "ceil"
    codebook: Codebook = "fp16"

    @property
    def block_tokens(self) -> int:
        return RADIX_TOKENS if self.packing == "radix" else 1

    @property
    def code_bits(self) -> int:
        """w of a code in whole bits."""
        return (24 * self.s - 1).bit_length()

    @property
    def low_bits(self) -> int:
        """k of 24 S = 9 * 2^k."""
        return (24 * self.s // 9).bit_length() - 1

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("hqmq", head_dim, 1)
        tokens, n = self.block_tokens, -(-head_dim // 4)
        total = n * tokens
        if self._signed(n):
            sizes = row_fields(n, self.code_bits, self.r)
        elif self.packing == "ceil":
            sizes = {"codes": packed_bytes(total, self.code_bits), "radius": packed_bytes(total, self.r)}
        else:
            sizes = {"low": packed_bytes(total, self.low_bits), "digits": packed_digit_bytes(total)}
            sizes["radius"] = packed_bytes(total, self.r)
        fields = [Field(name, "uint8", (size,)) for name, size in sizes.items()]
        fields.append(Field("scale", "float16", (tokens,), "scales"))
        nominal = (math.log2(24 * self.s) + self.r) / head_dim * n
        version = SIGNED_VERSION if self._signed(n) else VERSION
        return Layout(head_dim, tokens, tuple(fields), nominal_bits=nominal, version=version)

    def constants(self, site: Site) -> Constants:
        products, fp16 = (site.num_heads, 24 * self.s, 4), self.codebook == "fp16"
        most = 1 if fp16 else 127
        return {
            "secondary": Constant((site.num_heads, self.s, 4), low=-1, high=1),
            "codebook": Constant(products, torch.float16 if fp16 else torch.int8, -most, most),
            "channels": Constant.order(site.head_dim),
        }

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Sample the secondary quaternions and tabulate the products, int8 in units of 1/127.

        ``channels [1, D]`` tells the decoder D.
        """
        secondary = torch.stack([random_units(self.s, site.generator(head)) for head in range(site.num_heads)])
        table = products(secondary)
        entries = table.half() if self.codebook == "fp16" else (table * 127).round().to(torch.int8)
        channels = torch.arange(site.head_dim, dtype=torch.int16)
        params = {"secondary": secondary[None].float(), "codebook": entries[None], "channels": channels[None]}
        return {name: value.to(site.device) for name, value in params.items()}

    def encode(self, x: Tensor, params: Params) -> Payload:
        tokens = self.block_tokens
        chunks = split_chunks(x)  # [B, H, N, n, 4]
        secondary = params["secondary"][0].double()
        codes = search_heads(chunks, lambda part, head: nearest_product(part, secondary[head]))
        radius, scale = quantize_lengths(chunk_lengths(chunks), self.r)
        return {**self.pack(blocks(codes, tokens), blocks(radius, tokens)), "scale": blocks(scale, tokens)}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        dim = params["channels"].shape[-1]
        n = -(-dim // 4)
        codes, radius = (part.unflatten(-1, (-1, n)).flatten(2, 3) for part in self.unpack(payload, n))
        table = params["codebook"][0].float()  # [H, 24 S, 4]
        if self.codebook == "int8":
            table = table / torch.full_like(table, 127)
        return decode_chunks(table, codes, radius, payload["scale"].flatten(2, 3)[..., None], self.r)[..., :dim]

    def pack(self, codes: Tensor, radius: Tensor) -> Payload:
        """Bytes of a block's integers, both ``[..., tokens n]``; all fields but the scale."""
        if self._signed(codes.shape[-1]):
            return pack_rows(codes, radius, self.code_bits, self.r)
        if self.packing == "ceil":
            return {"codes": pack(codes, self.code_bits), "radius": pack(radius, self.r)}
        low = pack(codes & (1 << self.low_bits) - 1, self.low_bits)
        return {"low": low, "digits": pack_digits(codes >> self.low_bits), "radius": pack(radius, self.r)}

    def unpack(self, payload: Payload, n: int) -> tuple[Tensor, Tensor]:
        """Codes and radii of blocks with ``n`` chunks a token: integers ``[..., tokens n]``."""
        if self._signed(n):
            return unpack_rows(payload, n, self.code_bits, self.r)
        total = n * self.block_tokens
        radius = unpack(payload["radius"], self.r, total)
        if self.packing == "ceil":
            return unpack(payload["codes"], self.code_bits, total), radius
        low = unpack(payload["low"], self.low_bits, total).long()
        return unpack_digits(payload["digits"], total) << self.low_bits | low, radius

    def _signed(self, n: int) -> bool:
        """Whether the bytes of ``n`` chunks are those of ``pack_rows``."""
        return self.packing == "ceil" and n % 8 == 0


# -- signed rows: the order of bits of version 5, w of 10..13 code bits and r of 3, 4, 6 radius bits -------------------


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
    """Pack codes and radii ``[..., n]`` into ``row_fields``, n a multiple of 8."""
    codes, radius = codes.to(torch.int32), radius.to(torch.int32)
    row, sign = codes >> 1, codes & 1
    spare, room = code_bits + radius_bits - UNIT, UNIT - code_bits
    if spare >= 0:
        packed = {"codes": pack(sign << 15 | row << room | radius & (1 << room) - 1, UNIT)}
        return packed | ({"radius": pack(radius >> room, spare)} if spare else {})
    low, planes = _low(code_bits), []
    if low < code_bits - 1:
        planes.append(row >> low)
        row = row & (1 << low) - 1
    if radius_bits == 4:
        planes.append(sign)
    else:
        radius = radius | sign << 3
    packed = {"codes": pack(row, low), "radius": pack(radius, 4)}
    streams = [pack(plane.unflatten(-1, (8, -1)).mT.flatten(-2), 1) for plane in planes]
    return packed | ({"bits": torch.cat(streams, -1)} if streams else {})


def unpack_rows(packed: Mapping[str, Tensor], n: int, code_bits: int, radius_bits: int) -> tuple[Tensor, Tensor]:
    """Undo ``pack_rows``: codes and radii, int32 ``[..., n]``."""
    spare, room = code_bits + radius_bits - UNIT, UNIT - code_bits
    if spare >= 0:
        unit = unpack(packed["codes"], UNIT, n).to(torch.int32)
        radius = unit & (1 << room) - 1
        if spare:
            radius = radius | unpack(packed["radius"], spare, n).to(torch.int32) << room
        return (unit & 0x7FFF) >> room << 1 | unit >> 15, radius
    low = _low(code_bits)
    row, radius = (unpack(packed[name], bits, n).to(torch.int32) for name, bits in (("codes", low), ("radius", 4)))
    streams = packed["bits"].split(n // 8, -1) if "bits" in packed else ()
    planes = [unpack(x, 1, n).unflatten(-1, (-1, 8)).mT.flatten(-2).to(torch.int32) for x in streams]
    if low < code_bits - 1:
        row = row | planes.pop(0) << low
    sign = planes.pop(0) if radius_bits == 4 else radius >> 3
    return row << 1 | sign, radius if radius_bits == 4 else radius & 7


def _low(code_bits: int) -> int:
    """Bits of a row in ``codes`` where chunks have no unit: a byte, or all of them."""
    return 8 if code_bits == 10 else code_bits - 1


# -- radix: base-9 digits as bits --------------------------------------------------------------------------------------


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
    """Pack base-9 digits ``[..., n]`` into one bit stream; the first digit of a word is its lowest."""
    words = []
    for part, bits in zip(digits.split(WORD_DIGITS, -1), _word_bits(digits.shape[-1]), strict=True):
        power = 9 ** torch.arange(part.shape[-1], device=digits.device)
        word = (part * power).sum(-1, keepdim=True)
        words.append(word >> torch.arange(bits, device=digits.device) & 1)
    return pack(torch.cat(words, -1).to(torch.uint8), 1)


def unpack_digits(packed: Tensor, count: int) -> Tensor:
    """Undo ``pack_digits``: int64 ``[..., count]``."""
    widths = _word_bits(count)
    stream = unpack(packed, 1, sum(widths)).long().split(widths, -1)
    digits = []
    for number, bits in enumerate(stream):
        word = (bits << torch.arange(bits.shape[-1], device=packed.device)).sum(-1, keepdim=True)
        have = min(WORD_DIGITS, count - number * WORD_DIGITS)
        digits.append(word // 9 ** torch.arange(have, device=packed.device) % 9)
    return torch.cat(digits, -1)


@register(
    "hqmq",
    source="HQMQ, arXiv:2605.27646, Sec. 3, App. B",
    presets={f"hqmq-s{s}_r{r}": {"s": s, "r": r} for s in SIZES for r in RADII},
)
def hqmq(
    s: Literal[24, 48, 96, 192] = 96,
    r: Literal[3, 4, 6] = 4,
    outliers: Outliers = "off",
    slots: int = 2,
    packing: Packing = "ceil",
    codebook: Codebook = "fp16",
) -> KVScheme:
    """Keys and values in chunks of four: Hurwitz-product direction, 3- to 6-bit radius, no calibration.

    Parameters
    ----------
    outliers : {"off", 3, 4, 5}
        Chunks longer than this many medians are stored in fp16, up to ``slots`` a token; thresholds need a sample.
    slots : int
        Room for such chunks per token, 64 bits each.
    """
    codec = with_outliers(Hqmq(s, r, packing, codebook), outliers, slots)
    return KVScheme(key=codec, value=codec)
