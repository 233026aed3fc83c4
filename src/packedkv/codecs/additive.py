"""Additive: chunks of four on sums of two random codebooks, untrained; HQMQ's baseline. arXiv:2605.27646, App. Q.

    x = 4 neighbouring channels = r u,  r = |x|          D is zero-padded to a multiple of 4; n = ceil(D/4)
    c_1[i], c_2[j], i, j < K: random unit 4-vectors, per layer, head and role
    x^ = (r_q sigma / L) e(i, j),   r_q = clip(rne(r L / sigma), 0, L),  L = 2^r - 1,  sigma = max r of the token

App. Q gives the form c_1 + c_2 and the bits, neither the lengths nor the search. Three readings::

    reading      e(i, j)                   search                               E|u - e|^2, K = 24, 48, 96
    normalised   (c_1 + c_2)/|c_1 + c_2|   all K^2: argmax <u, e>               .042   .0155  .0060
    raw          c_1 + c_2                 all K^2: argmin |u - e|^2            .107   .052   .026
    greedy       c_1 + c_2                 c_1 nearest u, c_2 nearest u - c_1   .42 to .51

Block (one token of one head; w = ceil(2 log2 K): 10, 12, 14, 16 bits)::

    codes   uint8  [ceil(n w / 8)]     K i + j; chunk 0 in the lowest bits
    radius  uint8  [ceil(n r / 8)]     r_q
    scale   fp16   [1]                 sigma / 2

Bits: (8 ceil(n w / 8) + 8 ceil(n r / 8) + 16) / D. D = 128, K = 48, r = 4: 48 + 16 + 2 = 66 bytes, 4.125. The paper
prints (2 log2 K + r)/4, here 3.79: fractional widths and no scale.

Deviations from the paper
1. Codebook entries are uniform on the sphere; the paper only says random and fixed.
2. e(i, j) is cut to multiples of 2^-10, exact in fp16: a search in float64 makes no rounding, so a token alone gives
   the bits it gives in a batch.
3. sigma / 2 is stored, as in hqmq: a chunk of fp16 values may be longer than fp16 can hold.

Pitfalls: the paper's 3 to 12 times higher perplexity fits ``raw`` or ``greedy``; normalised sums are only 3 to 24 %
worse than as many of HQMQ's products. The search has no closed form: many normalised sums are searched in cells
(ops/quaternion); ``raw`` tries all K^2 sums, an order of magnitude slower than HQMQ's.

Use: measuring what HQMQ's product structure gains at equal bits.

Not for: anything else; hqmq has a slightly smaller error in the same bytes, and a faster search.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Payload, Sample, Site, one_of
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.quaternion import (
    GRID,
    chunk_lengths,
    decode_chunks,
    nearest_entry,
    quantize_lengths,
    random_units,
    search_heads,
    split_chunks,
)
from packedkv.registry import register
from packedkv.scheme import KVScheme

Reading = Literal["normalised", "raw", "greedy"]


@dataclass(frozen=True)
class Additive(Codec):
    """Sum of two random codewords for the direction, uniform radius under a scale per token.

    Parameters
    ----------
    k : {24, 48, 96, 192}
        Entries of each codebook; k^2 sums.
    r : {3, 4, 6}
        Bits of a chunk's radius.
    reading : {"normalised", "raw", "greedy"}
        normalised: sums on the sphere; raw: sums as they are, best pair; greedy: one codeword after the other.
    """

    k: int = one_of(24, 48, 96, 192, default=48)
    r: int = one_of(3, 4, 6, default=4)
    reading: Reading = "normalised"

    @property
    def code_bits(self) -> int:
        """w of a pair of codewords in whole bits."""
        return (self.k**2 - 1).bit_length()

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("additive", head_dim, 1)
        n = -(-head_dim // 4)
        fields = (
            Field("codes", "uint8", (packed_bytes(n, self.code_bits),)),
            Field("radius", "uint8", (packed_bytes(n, self.r),)),
            Field("scale", "float16", (1,), "scales"),
        )
        return Layout(head_dim, 1, fields, nominal_bits=(2 * math.log2(self.k) + self.r) * n / head_dim)

    def constants(self, site: Site) -> Constants:
        book, sums = (site.num_heads, self.k, 4), (site.num_heads, self.k**2, 4)
        return {
            "first": Constant(book, low=-1, high=1),
            "second": Constant(book, low=-1, high=1),
            "codebook": Constant(sums, torch.float16, -2, 2),
            "channels": Constant.order(site.head_dim),
        }

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Sample the two codebooks and tabulate their sums, row ``K i + j``; ``channels`` tells the decoder D."""
        draws = [
            [random_units(self.k, site.generator(head, stream)) for head in range(site.num_heads)] for stream in (0, 1)
        ]
        first, second = (torch.stack(books) for books in draws)
        sums = (first[:, :, None] + second[:, None]).flatten(1, 2)
        if self.reading == "normalised":
            length = chunk_lengths(sums)[..., None]
            sums = torch.where(length > 0, (sums / length / GRID).trunc() * GRID, 0.0)
        # plain sums are multiples of 2^-10 up to 2: fp16 holds them as they are
        tables = {"first": first.float(), "second": second.float(), "codebook": sums.half()}
        tables["channels"] = torch.arange(site.head_dim, dtype=torch.int16)
        return {name: table[None].to(site.device) for name, table in tables.items()}

    def encode(self, x: Tensor, params: Params) -> Payload:
        chunks = split_chunks(x)
        length = chunk_lengths(chunks)
        u = chunks
        if self.reading != "normalised":  # whose search is by angle, whatever the length
            u = (u.double() / length[..., None]).masked_fill_(length[..., None] == 0, 0.0)
        codes = search_heads(u, lambda part, head: self._search(part, params, head)).masked_fill(length == 0, 0)
        radius, scale = quantize_lengths(length, self.r)
        return {"codes": pack(codes, self.code_bits), "radius": pack(radius, self.r), "scale": scale}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        dim = params["channels"].shape[-1]
        n = -(-dim // 4)
        codes, radius = unpack(payload["codes"], self.code_bits, n), unpack(payload["radius"], self.r, n)
        return decode_chunks(params["codebook"][0].float(), codes, radius, payload["scale"], self.r)[..., :dim]

    def _search(self, u: Tensor, params: Params, head: int) -> Tensor:
        """Rows of the codebook for ``u [n, 4]``, unit vectors unless the search is by angle; the lowest on ties."""
        if self.reading != "greedy":
            by_angle = self.reading == "normalised"
            return nearest_entry(u, params["codebook"][0, head].double(), "angle" if by_angle else "distance")
        first, second = (params[name][0, head].double() for name in ("first", "second"))
        i = nearest_entry(u, first, by="distance")
        return i * self.k + nearest_entry(u - first[i], second, by="distance")


@register(
    "additive",
    source="HQMQ, arXiv:2605.27646, App. Q (its untrained additive baseline)",
    presets={"additive-k48_r4": {"k": 48, "r": 4}},
    mark="baseline",
)
def additive(k: Literal[24, 48, 96, 192] = 48, r: Literal[3, 4, 6] = 4, reading: Reading = "normalised") -> KVScheme:
    """Keys and values in chunks of four on sums of two random codebooks: HQMQ's baseline."""
    codec = Additive(k, r, reading)
    return KVScheme(key=codec, value=codec)
