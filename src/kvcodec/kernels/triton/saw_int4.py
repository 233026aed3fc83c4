"""SAW-INT4 on the GPU: encode into pages, and the codec's parts of fused decode attention.

Reference: `kvcodec.codecs.saw_int4`; the kernels write and read exactly its bytes. The page is drawn in
`_int4_encode`: scale and zero of a token lie together.

Maths per token and head, y = rotated row:  s = fp16(max((max y - min y) / 15, floor)),
z = rne(-min y / s),  code = clip(rne(y / s) + z, 0, 15),  y' = s (code - z).
"""

import triton.language as tl

import triton
from kvcodec.kernels.triton._common import RNE, fold8, rne
from kvcodec.kernels.triton._decode import Hooks
from kvcodec.kernels.triton._int4_decode import (
    add_values,
    finish_planes,
    init,
    load_key_codes,
    load_q,
    load_value_codes,
    load_words,
    prepare,
    reference_scale,
    score_codes,
)
from kvcodec.kernels.triton._int4_encode import encoder, granule, page_bytes, quotient, refused_sizes

__all__ = ["HOOKS", "encode_to_pages", "page_bytes", "supports"]


def supports(head_dim: int, key_block: int = 1, value_block: int = 1, page_tokens: int = 64) -> str:
    """Return why the kernels cannot take these sizes, or an empty string if they can."""
    if reason := refused_sizes("saw-int4", head_dim, page_tokens):
        return reason
    for name, block in (("key_block", key_block), ("value_block", value_block)):
        if block < 1 or block & (block - 1) or head_dim % block:
            return f"{name}={block}; allowed are powers of two that divide head_dim={head_dim}"
    return ""


@triton.jit
def _code(y, s, r, z_bits, ASM: tl.constexpr):
    """Return clip(rne(y / s) + z, 0, 15) as int32; r = 1 / s.

    Adding 1.5 * 2**23 rounds the quotient to an integer that stands in the low bits; z_bits is z less the bits of that
    constant.
    """
    code = (quotient(y, s, r, ASM) + RNE).to(tl.int32, bitcast=True) + z_bits
    return tl.minimum(tl.maximum(code, 0), 15)


@triton.jit
def quantize(x0, x1, x2, x3, hi, lo, ASM: tl.constexpr):
    """Return granules, scale and zero point; see `_int4_encode`."""
    biggest = tl.maximum(hi, -lo, propagate_nan=tl.PropagateNan.ALL)
    # floor = 2**(floor(log2 max|y|) - 9), at least 2**-24: keeps |z| where fp16 is exact
    bits = biggest.to(tl.int32, bitcast=True)
    floor = (tl.maximum((bits >> 23) - 9, 103) << 23).to(tl.float32, bitcast=True)
    s = tl.maximum(tl.div_rn(hi - lo, 15.0 + tl.zeros_like(hi)), floor)
    s16 = tl.minimum(s, 65504.0).to(tl.float16)
    s = s16.to(tl.float32)
    z = rne(tl.div_rn(-lo, s))
    r = tl.div_rn(1.0 + tl.zeros_like(s), s)[:, None]
    sc = s[:, None]
    zc = (z.to(tl.int32) - 0x4B400000)[:, None]
    w = granule(
        _code(x0, sc, r, zc, ASM), _code(x1, sc, r, zc, ASM), _code(x2, sc, r, zc, ASM), _code(x3, sc, r, zc, ASM)
    )
    return w, s16, z.to(tl.float16)


@triton.jit
def _unpack_word(w):
    """Split the 32-bit word of a token into (scale, zero), fp32."""
    s = (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    z = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return s.to(tl.float32), z.to(tl.float32)


@triton.jit
def load_k(at16, at32, slot, live, D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Load key granules [BN, DQ] int16 and the words of scale and zero [BN] int32."""
    w = load_key_codes(at16, slot, live, D, DQ, MASKED)
    return w, load_words(at32 + P * D // 8 + slot, live, MASKED)


@triton.jit
def load_v(at16, at32, slot, live, D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Load value granules [DQ, BN] int16 and the words of scale and zero [BN] int32."""
    w = load_value_codes(at16 + P * (D + 8) // 4, slot, live, D, DQ, MASKED)
    return w, load_words(at32 + P * (D + 8) // 8 + P * D // 8 + slot, live, MASKED)


@triton.jit
def score(q, w, words, ASM: tl.constexpr):
    """Return scores [BN, N] in log2 units."""
    s, z = _unpack_word(words)
    d, qsum, undo = score_codes(q, w, ASM)
    # in this order one factor per token and two operations per score are left
    return (d - qsum[None, :] * z[:, None]) * (s * undo)[:, None]


@triton.jit
def accumulate(acc, p, alpha, w, words, ASM: tl.constexpr):
    """Add V^T P of one block; the accumulators hold sum p (s / ref) 1024 code, the bias sum p (s / ref) 1024 z."""
    a0, a1, a2, a3, bias, ref = acc
    s, z = _unpack_word(words)
    new, inv = reference_scale(ref, s)
    alpha = (alpha * (ref * inv))[None, :]
    ps = p * (s * (inv * 1024.0))[:, None]
    bias = bias * alpha + fold8(ps * z[:, None])
    a0, a1, a2, a3 = add_values(a0, a1, a2, a3, alpha, ps, w, ASM)
    return a0, a1, a2, a3, bias, new


@triton.jit
def finish(acc):
    """Return the four fp32 planes [DQ, N] of the unnormalised output."""
    a0, a1, a2, a3, bias, ref = acc
    return finish_planes(a0, a1, a2, a3, ref, -(tl.sum(bias, 0) * (ref * 0.0009765625)))


HOOKS = Hooks(load_q, prepare, load_k, score, load_v, init, accumulate, finish)
PAIRED = True
encode_to_pages = encoder("saw_int4", quantize, PAIRED, supports)
