"""Plain INT4 on the GPU, one grid per token and head (`int-4`): encode into pages, and its parts of decode attention.

Reference: `kvcodec.codecs.group_int` with bits=4, group=0, along channels, asymmetric; the kernels write and read
exactly its bytes. The page is drawn in `_int4_encode`: scale and zero lie in planes of their own.

Maths per token and head:  Z = fp16(min x),  S = fp16(max((max x - Z) / 15, 2**-24)), one fp16 step less where
Z + 15 S > 65504,  code = clip(rne((x - Z) / S), 0, 15),  x' = S code + Z.  So with codes c:

    q.x' = S (q.c) + Z sum(q)          sum_t p_t x'_t = sum_t (p_t S_t) c_t + sum_t p_t Z_t

Pitfall: which zero a row's minimum is, where both +0 and -0 are in the row and nothing is below, is up to the machine;
the decoded values do not depend on it.
"""

import triton.language as tl

import triton
from kvcodec.kernels.triton._common import RNE, fold8
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
    if reason := refused_sizes("int-4", head_dim, page_tokens):
        return reason
    if (key_block, value_block) != (1, 1):
        return f"key_block={key_block}, value_block={value_block}; int-4 rotates nothing, both are 1"
    return ""


@triton.jit
def _code(y, s, r, ASM: tl.constexpr):
    """Return clip(rne(y / s), 0, 15) as int32; r = 1 / s.

    Clipped first, to whole numbers, which changes no code and keeps the sum where its low bits are the code.
    """
    t = tl.minimum(tl.maximum(quotient(y, s, r, ASM), 0.0), 15.0)
    return (t + RNE).to(tl.int32, bitcast=True) & 15


@triton.jit
def quantize(x0, x1, x2, x3, hi, lo, ASM: tl.constexpr):
    """Return granules, scale and offset; see `_int4_encode`."""
    z16 = lo.to(tl.float16)
    z = z16.to(tl.float32)
    s = tl.div_rn(hi - z, 15.0 + tl.zeros_like(hi))
    s16 = tl.minimum(tl.maximum(s, 5.9604644775390625e-08), 65504.0).to(tl.float16)
    # 15 S is exact in fp32
    over = z + 15.0 * s16.to(tl.float32) > 65504.0
    s16 = (s16.to(tl.int16, bitcast=True) - over.to(tl.int16)).to(tl.float16, bitcast=True)
    s = s16.to(tl.float32)
    r = tl.div_rn(1.0 + tl.zeros_like(s), s)[:, None]
    sc = s[:, None]
    zc = z[:, None]
    w = granule(
        _code(x0 - zc, sc, r, ASM), _code(x1 - zc, sc, r, ASM), _code(x2 - zc, sc, r, ASM), _code(x3 - zc, sc, r, ASM)
    )
    return w, s16, z16


@triton.jit
def _load_grid(at32, slot, live, P: tl.constexpr, MASKED: tl.constexpr):
    """Load scales and offsets [BN] from planes at `at32`, two tokens to a word; and the bits to shift them by.

    Four bytes a lane can be copied ahead of their use, the two bytes of one token cannot; that costs half the speed.
    """
    s = load_words(at32 + slot // 2, live, MASKED)
    z = load_words(at32 + P // 2 + slot // 2, live, MASKED)
    return s, z, (slot % 2) * 16


@triton.jit
def _half(word, shift):
    """Cut one token's fp16 number out of its word; fp32."""
    return ((word >> shift) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _widen(words):
    """Return scales and offsets in fp32."""
    s, z, shift = words
    return _half(s, shift), _half(z, shift)


@triton.jit
def load_k(at16, at32, slot, live, D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Load key granules [BN, DQ] int16, and the words of scales and offsets [BN] int32."""
    w = load_key_codes(at16, slot, live, D, DQ, MASKED)
    return w, _load_grid(at32 + P * D // 8, slot, live, P, MASKED)


@triton.jit
def load_v(at16, at32, slot, live, D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Load value granules [DQ, BN] int16, and the words of scales and offsets [BN] int32."""
    w = load_value_codes(at16 + P * (D + 8) // 4, slot, live, D, DQ, MASKED)
    return w, _load_grid(at32 + P * (D + 8) // 8 + P * D // 8, slot, live, P, MASKED)


@triton.jit
def score(q, w, words, ASM: tl.constexpr):
    """Return scores [BN, N] in log2 units."""
    s, z = _widen(words)
    d, qsum, undo = score_codes(q, w, ASM)
    return d * (s * undo)[:, None] + qsum[None, :] * (z * undo)[:, None]


@triton.jit
def accumulate(acc, p, alpha, w, words, ASM: tl.constexpr):
    """Add V^T P of one block; the accumulators hold sum p (S / ref) 1024 code, the bias sum p Z."""
    a0, a1, a2, a3, bias, ref = acc
    s, z = _widen(words)
    new, inv = reference_scale(ref, s)
    bias = bias * alpha[None, :] + fold8(p * z[:, None])
    alpha = (alpha * (ref * inv))[None, :]
    ps = p * (s * (inv * 1024.0))[:, None]
    a0, a1, a2, a3 = add_values(a0, a1, a2, a3, alpha, ps, w, ASM)
    return a0, a1, a2, a3, bias, new


@triton.jit
def finish(acc):
    """Return the four fp32 planes [DQ, N] of the unnormalised output."""
    a0, a1, a2, a3, bias, ref = acc
    return finish_planes(a0, a1, a2, a3, ref, tl.sum(bias, 0))


HOOKS = Hooks(load_q, prepare, load_k, score, load_v, init, accumulate, finish)
PAIRED = False
encode_to_pages = encoder("group_int", quantize, PAIRED, supports)
