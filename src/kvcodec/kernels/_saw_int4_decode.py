"""SAW-INT4's parts of fused decode attention; the page and the maths are in `saw_int4`.

Scores without unpacking: a granule holds channels 4g..4g+3; four masked copies of it are the fp16
subnormals code * 2**-24 (x16 for odd channels), so  q.k' = s (2**24 sum_j dot(m_j, q_j) - z sum q).
The x16 goes into q, resp. into the output planes; 2**24 into one factor per token.

K and V are the first operand, tokens resp. channels as its rows, and up to 16 heads the narrow
second one: with 8 heads no row of a tensor-core tile is empty.

Pitfalls: q and P are normalised by powers of two before they are rounded to fp16, so neither large
queries nor small value scales leave fp16's normal range.
"""

# ruff: noqa: SIM108 -- a statement on a constexpr is resolved when compiling, an expression is not

import triton
import triton.language as tl

from kvcodec.kernels._common import (
    SUBNORMAL,
    butterfly,
    fold8,
    hadamard,
    mask_granule,
    sqrt_order,
)
from kvcodec.kernels._decode import Hooks


@triton.jit
def _exponent_scale(top, TARGET: tl.constexpr):
    """Return c and 1/c, powers of two, with top * c in [2**TARGET, 2**(TARGET+1))."""
    e = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    e = tl.minimum(tl.maximum(e, TARGET + 1), 253)
    c = ((254 + TARGET - e) << 23).to(tl.float32, bitcast=True)
    inv = ((e - TARGET) << 23).to(tl.float32, bitcast=True)
    return c, inv


@triton.jit
def _rotate_half(x, DQ: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Multiply one fp16 plane [DQ, N] by the high factor of the Hadamard matrix; exact in fp32."""
    hm = hadamard(DQ, BLOCK // 4)
    if ASM:
        y = tl.dot(hm.to(tl.float16), x)
    else:
        y = tl.dot(hm, x.to(tl.float32), input_precision="ieee")
    return y


@triton.jit
def _largest(x0, x1, x2, x3):
    """Return max |x| over four planes."""
    top = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    return tl.max(tl.max(top, 1), 0)


@triton.jit
def load_q(q_ptr, qrow, rows_ok, D: tl.constexpr, DQ: tl.constexpr):
    """Load the query heads as four fp32 planes [DQ, N]."""
    g = tl.arange(0, DQ)
    at = q_ptr + qrow[None, :] + 4 * g[:, None]
    ok = rows_ok[None, :] & (g < D // 4)[:, None]
    x0 = tl.load(at, ok, other=0.0).to(tl.float32)
    x1 = tl.load(at + 1, ok, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2, ok, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3, ok, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def prepare(x, scale2, DQ: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    """Rotate, scale and round the query heads.

    Returns
    -------
    four fp16 planes [DQ, N] (odd ones divided by 16), 2**-24 x the sum of the rounded query [N],
    and 2**24 / c
    """
    x0, x1, x2, x3 = x
    if BLOCK >= 8:
        # 16-bit inputs survive the cast exactly: only their exponent moves
        c, undo = _exponent_scale(_largest(x0, x1, x2, x3), 8)
        x0 = _rotate_half((x0 * c).to(tl.float16), DQ, BLOCK, ASM)
        x1 = _rotate_half((x1 * c).to(tl.float16), DQ, BLOCK, ASM)
        x2 = _rotate_half((x2 * c).to(tl.float16), DQ, BLOCK, ASM)
        x3 = _rotate_half((x3 * c).to(tl.float16), DQ, BLOCK, ASM)
        scale2 = scale2 * undo
    x0, x1, x2, x3 = butterfly(x0, x1, x2, x3, BLOCK)
    scale2 = scale2 * sqrt_order(BLOCK)
    x0, x1, x2, x3 = x0 * scale2, x1 * scale2, x2 * scale2, x3 * scale2
    c, undo = _exponent_scale(_largest(x0, x1, x2, x3), 10)
    q0 = (x0 * c).to(tl.float16)
    q1 = (x1 * (c * 0.0625)).to(tl.float16)
    q2 = (x2 * c).to(tl.float16)
    q3 = (x3 * (c * 0.0625)).to(tl.float16)
    # the rounded query, so that the zero-point correction cancels exactly
    even = tl.sum(q0.to(tl.float32), 0) + tl.sum(q2.to(tl.float32), 0)
    odd = tl.sum(q1.to(tl.float32), 0) + tl.sum(q3.to(tl.float32), 0)
    # the dot's unit is 2**-24, so the correction is brought to it
    return q0, q1, q2, q3, (even + 16.0 * odd) / SUBNORMAL, undo * SUBNORMAL


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
    g = tl.arange(0, DQ)
    at = (at16 + slot * (D // 4))[:, None] + g[None, :]
    words = at32 + P * D // 8 + slot
    if MASKED:
        w = tl.load(at, live[:, None] & (g < D // 4)[None, :], other=0)
        sz = tl.load(words, live, other=0)
    else:
        if DQ == D // 4:
            w = tl.load(at)
        else:
            w = tl.load(at, (g < D // 4)[None, :], other=0)
        sz = tl.load(words)
    return w, sz


@triton.jit
def load_v(at16, at32, slot, live, D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Load value granules [DQ, BN] int16 and the words of scale and zero [BN] int32."""
    g = tl.arange(0, DQ)
    at = (at16 + P * (D + 8) // 4 + slot * (D // 4))[None, :] + g[:, None]
    words = at32 + P * (D + 8) // 8 + P * D // 8 + slot
    if MASKED:
        w = tl.load(at, live[None, :] & (g < D // 4)[:, None], other=0)
        sz = tl.load(words, live, other=0)
    else:
        if DQ == D // 4:
            w = tl.load(at)
        else:
            w = tl.load(at, (g < D // 4)[:, None], other=0)
        sz = tl.load(words)
    return w, sz


@triton.jit
def score(q, w, words, ASM: tl.constexpr):
    """Return scores [BN, N] in log2 units."""
    q0, q1, q2, q3, qsum, undo = q
    s, z = _unpack_word(words)
    d = tl.dot(mask_granule(w, 0, 0x000F, ASM), q0)
    d = tl.dot(mask_granule(w, 0, 0x00F0, ASM), q1, d)
    d = tl.dot(mask_granule(w, 8, 0x000F, ASM), q2, d)
    d = tl.dot(mask_granule(w, 8, 0x00F0, ASM), q3, d)
    # in this order one factor per token and two operations per score are left
    return (d - qsum[None, :] * z[:, None]) * (s * undo)[:, None]


@triton.jit
def init(N: tl.constexpr, DQ: tl.constexpr):
    """Return four empty planes, the zero-point sum, and the reference scale (a power of two)."""
    a0 = tl.zeros([DQ, N], tl.float32)
    a1 = tl.zeros([DQ, N], tl.float32)
    a2 = tl.zeros([DQ, N], tl.float32)
    a3 = tl.zeros([DQ, N], tl.float32)
    return a0, a1, a2, a3, tl.zeros([8, N], tl.float32), 5.9604644775390625e-08


@triton.jit
def accumulate(acc, p, alpha, w, words, ASM: tl.constexpr):
    """Add V^T P of one block; the accumulators hold sum p (s / ref) 1024 code."""
    a0, a1, a2, a3, bias, ref = acc
    s, z = _unpack_word(words)
    # the largest scale seen, cut to a power of two: rounding P s / ref to fp16 keeps 11 bits
    top = (tl.max(s, 0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    new = tl.maximum(ref, top)
    inv = (0x7F000000 - new.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    alpha = alpha * (ref * inv)
    ps = p * (s * (inv * 1024.0))[:, None]
    alpha = alpha[None, :]
    bias = bias * alpha + fold8(ps * z[:, None])
    ps = ps.to(tl.float16)
    # each block starts from zero: the tensor core truncates its sums, thousands of steps in one
    # accumulator shrink it, and subtracting the zero points magnifies that a hundredfold.  fma and
    # not +, because the compiler folds a sum back into the product.
    b0 = tl.dot(mask_granule(w, 0, 0x000F, ASM), ps)
    b1 = tl.dot(mask_granule(w, 0, 0x00F0, ASM), ps)
    b2 = tl.dot(mask_granule(w, 8, 0x000F, ASM), ps)
    b3 = tl.dot(mask_granule(w, 8, 0x00F0, ASM), ps)
    alpha = tl.broadcast_to(alpha, a0.shape)
    a0 = tl.fma(a0, alpha, b0)
    a1 = tl.fma(a1, alpha, b1)
    a2 = tl.fma(a2, alpha, b2)
    a3 = tl.fma(a3, alpha, b3)
    return a0, a1, a2, a3, bias, new


@triton.jit
def finish(acc):
    """Return the four fp32 planes [DQ, N] of the unnormalised output."""
    a0, a1, a2, a3, bias, ref = acc
    c = ref * 0.0009765625
    b = (tl.sum(bias, 0) * c)[None, :]
    even = c * SUBNORMAL
    odd = even * 0.0625
    return a0 * even - b, a1 * odd - b, a2 * even - b, a3 * odd - b


HOOKS = Hooks(load_q, prepare, load_k, score, load_v, init, accumulate, finish)
