"""Parts of fused decode attention for 4-bit codes with a scale and a zero point per token and head.

Scores without unpacking: a granule holds channels 4g..4g+3; four masked copies of it are the fp16
subnormals code * 2**-24 (x16 for odd channels), so  q.code = 2**24 sum_j dot(m_j, q_j).
The x16 goes into q, resp. into the output planes; 2**24 into one factor per token.

K and V are the first operand, tokens resp. channels as its rows, and up to 16 heads the narrow
second one: with 8 heads no row of a tensor-core tile is empty.

Pitfalls: q and P are normalised by powers of two before they are rounded to fp16, so neither large
queries nor small value scales leave fp16's normal range.
"""

# ruff: noqa: SIM108 -- a statement on a constexpr is resolved when compiling, an expression is not

import triton.language as tl

import triton
from kvcodec.kernels.triton._common import SUBNORMAL, butterfly, hadamard, mask_granule, sqrt_order


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
def load_key_codes(at16, slot, live, D: tl.constexpr, DQ: tl.constexpr, MASKED: tl.constexpr):
    """Load key granules [BN, DQ] int16."""
    g = tl.arange(0, DQ)
    at = (at16 + slot * (D // 4))[:, None] + g[None, :]
    if MASKED:
        w = tl.load(at, live[:, None] & (g < D // 4)[None, :], other=0)
    elif DQ == D // 4:
        w = tl.load(at)
    else:
        w = tl.load(at, (g < D // 4)[None, :], other=0)
    return w


@triton.jit
def load_value_codes(at16, slot, live, D: tl.constexpr, DQ: tl.constexpr, MASKED: tl.constexpr):
    """Load value granules [DQ, BN] int16; `at16` is where the plane begins."""
    g = tl.arange(0, DQ)
    at = (at16 + slot * (D // 4))[None, :] + g[:, None]
    if MASKED:
        w = tl.load(at, live[None, :] & (g < D // 4)[:, None], other=0)
    elif DQ == D // 4:
        w = tl.load(at)
    else:
        w = tl.load(at, (g < D // 4)[:, None], other=0)
    return w


@triton.jit
def load_words(at, live, MASKED: tl.constexpr):
    """Load one word per token [BN]; zero for dead tokens."""
    if MASKED:
        w = tl.load(at, live, other=0)
    else:
        w = tl.load(at)
    return w


@triton.jit
def score_codes(q, w, ASM: tl.constexpr):
    """Return q.code [BN, N] and sum(q) [N], both in units of 2**-24 / c, and that unit's inverse."""
    q0, q1, q2, q3, qsum, undo = q
    d = tl.dot(mask_granule(w, 0, 0x000F, ASM), q0)
    d = tl.dot(mask_granule(w, 0, 0x00F0, ASM), q1, d)
    d = tl.dot(mask_granule(w, 8, 0x000F, ASM), q2, d)
    d = tl.dot(mask_granule(w, 8, 0x00F0, ASM), q3, d)
    return d, qsum, undo


@triton.jit
def init(N: tl.constexpr, DQ: tl.constexpr):
    """Return four empty planes, the zero-point sum, and the reference scale (a power of two)."""
    a0 = tl.zeros([DQ, N], tl.float32)
    a1 = tl.zeros([DQ, N], tl.float32)
    a2 = tl.zeros([DQ, N], tl.float32)
    a3 = tl.zeros([DQ, N], tl.float32)
    return a0, a1, a2, a3, tl.zeros([8, N], tl.float32), 5.9604644775390625e-08


@triton.jit
def reference_scale(ref, s):
    """Return the new reference, the largest scale seen cut to a power of two, and its inverse.

    Rounding P s / ref to fp16 then keeps 11 bits.
    """
    top = (tl.max(s, 0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    new = tl.maximum(ref, top)
    inv = (0x7F000000 - new.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return new, inv


@triton.jit
def add_values(a0, a1, a2, a3, alpha, ps, w, ASM: tl.constexpr):
    """Return the planes times `alpha` [1, N], plus codes^T `ps` [BN, N]."""
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
    return a0, a1, a2, a3


@triton.jit
def finish_planes(a0, a1, a2, a3, ref, b):
    """Return four fp32 planes [DQ, N] in units of the values, plus `b` [N]."""
    b = b[None, :]
    even = (ref * 0.0009765625) * SUBNORMAL
    odd = even * 0.0625
    return a0 * even + b, a1 * odd + b, a2 * even + b, a3 * odd + b
