"""SAW-INT4 on the GPU: encode into pages, and the codec's parts of fused decode attention.

Reference: `kvcodec.codecs.saw_int4`; the kernels write and read exactly its bytes.

Page of P tokens of one KV head, planes in order, each on a 16-byte boundary (D=128, P=64)::

    0        K.codes       uint8  [P, D/2]   low nibble = channel 2i, high nibble = channel 2i+1
    4096     K.scale_zero  fp16   [P, 2]     scale s, integer zero z
    4352     V.codes       uint8  [P, D/2]
    8448     V.scale_zero  fp16   [P, 2]     end at 8704

Maths per token and head, y = rotated row:  s = fp16(max((max y - min y) / 15, floor)),
z = rne(-min y / s),  code = clip(rne(y / s) + z, 0, 15),  y' = s (code - z).

Scores without unpacking: a granule holds channels 4g..4g+3; four masked copies of it are the fp16
subnormals code * 2**-24 (x16 for odd channels), so  q.k' = s (2**24 sum_j dot(q_j, m_j) - z sum q).
The x16 goes into q, resp. into the output planes; 2**24 into one factor per token.

Pitfalls: q and P are normalised by powers of two before they are rounded to fp16, so neither large
queries nor small value scales leave fp16's normal range.
"""

import torch
import triton
import triton.language as tl

from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels._common import (
    ASM,
    RNE,
    SUBNORMAL,
    butterfly,
    fold8,
    hadamard,
    mask_granule,
    next_pow2,
    rne,
    sqrt_order,
)
from kvcodec.kernels._decode import Hooks

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BF16, _FP16, _FP32 = range(3)
# rows and warps of an encoding program, measured on one H200
ENCODE_CONFIG = (16, 1)


def page_bytes(head_dim: int, page_tokens: int) -> int:
    """Return the bytes of one page of one KV head: two code planes, two scale planes."""
    return page_tokens * (head_dim + 8)


def supports(head_dim: int, key_block: int = 1, value_block: int = 1, page_tokens: int = 64) -> str:
    """Return why the kernels cannot take these sizes, or an empty string if they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}; the saw-int4 kernels take {HEAD_DIMS}"
    for name, block in (("key_block", key_block), ("value_block", value_block)):
        if block < 1 or block & (block - 1) or head_dim % block:
            return f"{name}={block}; allowed are powers of two that divide head_dim={head_dim}"
    if page_tokens < 16 or page_tokens % 16:
        return f"page_tokens={page_tokens}; allowed are multiples of 16"
    return ""


# ------------------------------------------------------------------ decode: the codec's parts


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
    top = tl.maximum(
        tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))
    )
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


# ------------------------------------------------------------------ encode


@triton.jit
def _load_planes(x_ptr, rows, ok, g, D: tl.constexpr, KIND: tl.constexpr):
    """Load rows as four fp32 planes; 16-bit inputs come as 8-byte granules of four channels."""
    if KIND == 2:
        at = x_ptr + rows[:, None] + 4 * g[None, :]
        x0 = tl.load(at, ok, other=0.0)
        x1 = tl.load(at + 1, ok, other=0.0)
        x2 = tl.load(at + 2, ok, other=0.0)
        x3 = tl.load(at + 3, ok, other=0.0)
    else:
        w = tl.load(x_ptr + (rows // 4)[:, None] + g[None, :], ok, other=0)
        lo = w.to(tl.int32)
        hi = (w >> 32).to(tl.int32)
        if KIND == 0:
            x0 = (lo << 16).to(tl.float32, bitcast=True)
            x1 = (lo & -65536).to(tl.float32, bitcast=True)
            x2 = (hi << 16).to(tl.float32, bitcast=True)
            x3 = (hi & -65536).to(tl.float32, bitcast=True)
        else:
            x0 = (lo & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            x1 = (lo >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            x2 = (hi & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            x3 = (hi >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _rotate(x, hm, KIND: tl.constexpr, ASM: tl.constexpr):
    """Multiply one fp32 plane by a +-1 matrix, exact products, fp32 sums."""
    if ASM and KIND == 0:
        y = tl.dot(x.to(tl.bfloat16), hm.to(tl.bfloat16))
    elif ASM and KIND == 1:
        y = tl.dot(x.to(tl.float16), hm.to(tl.float16))
    elif ASM:
        y = tl.dot(x, hm, input_precision="tf32x3")
    else:
        y = tl.dot(x, hm, input_precision="ieee")
    return y


@triton.jit
def _code(y, s, r, z_bits, ASM: tl.constexpr):
    """Return clip(rne(y / s) + z, 0, 15) as int32; r = 1 / s.

    One Newton step rounds the quotient as IEEE does, cheaper than a division.  Adding 1.5 * 2**23
    rounds it to an integer that stands in the low bits; z_bits is z less the bits of that constant.
    """
    if ASM:
        t = y * r
        t = tl.fma(tl.fma(-t, s, y), r, t)
    else:
        t = tl.div_rn(y, s)
    code = (t + RNE).to(tl.int32, bitcast=True) + z_bits
    return tl.minimum(tl.maximum(code, 0), 15)


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _encode_rows(
    x_ptr, base, stride_n, i, ok_n, at16, at32, bad,
    D: tl.constexpr, DQ: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rotate, quantize and store the rows `i` of one head at the slots `at16`, `at32`."""
    g = tl.arange(0, DQ)
    ok = ok_n[:, None] & (g < D // 4)[None, :]
    x0, x1, x2, x3 = _load_planes(x_ptr, base + i * stride_n, ok, g, D, KIND)
    if BLOCK >= 8:
        hm = hadamard(DQ, BLOCK // 4)
        x0 = _rotate(x0, hm, KIND, ASM)
        x1 = _rotate(x1, hm, KIND, ASM)
        x2 = _rotate(x2, hm, KIND, ASM)
        x3 = _rotate(x3, hm, KIND, ASM)
    x0, x1, x2, x3 = butterfly(x0, x1, x2, x3, BLOCK)
    if BLOCK > 1:
        c = sqrt_order(BLOCK)
        x0, x1, x2, x3 = x0 * c, x1 * c, x2 * c, x3 * c

    hi = _max_nan(_max_nan(x0, x1), _max_nan(x2, x3))
    lo = _min_nan(_min_nan(x0, x1), _min_nan(x2, x3))
    if DQ != D // 4:
        hi = tl.where((g < D // 4)[None, :], hi, float("-inf"))
        lo = tl.where((g < D // 4)[None, :], lo, float("inf"))
    hi = tl.reduce(hi, 1, _max_nan)
    lo = tl.reduce(lo, 1, _min_nan)
    biggest = _max_nan(hi, -lo)
    # false for NaN too; from 2**25 on no fp16 scale keeps the zero point in range
    good = biggest < 33554432.0
    if bad is not None:
        if tl.min(good.to(tl.int32), 0) == 0:
            tl.atomic_max(bad, 1)
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
    w = _code(x0, sc, r, zc, ASM) | (_code(x1, sc, r, zc, ASM) << 4)
    w = w | (_code(x2, sc, r, zc, ASM) << 8) | (_code(x3, sc, r, zc, ASM) << 12)
    tl.store(at16[:, None] + g[None, :], w.to(tl.int16), ok)
    sb = s16.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    zb = z.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    # a row that cannot be encoded reads as zeros; the flag says so
    tl.store(at32, tl.where(good, sb | (zb << 16), 0), ok_n)


@triton.jit
def _encode_kernel(
    k_ptr, v_ptr, pages16, pages32, table, start, bad, n, heads,
    skb, skh, skn, svb, svh, svn, stride_table,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, KBLOCK: tl.constexpr,
    VBLOCK: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (row block, sequence x head, 0 for K or 1 for V) encodes BT rows."""
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    ok = i < n
    t = tl.load(start + b) + i
    page = tl.load(table + b.to(tl.int64) * stride_table + t // P, ok, other=0)
    slot = t % P
    unit = page.to(tl.int64) * heads + h
    at16 = pages16 + unit * (P * (D + 8) // 2) + slot * (D // 4)
    at32 = pages32 + unit * (P * (D + 8) // 4) + slot + P * D // 8
    i = i.to(tl.int64)
    b64 = b.to(tl.int64)
    if tl.program_id(2) == 0:
        _encode_rows(
            k_ptr, b64 * skb + h * skh, skn, i, ok, at16, at32, bad, D, DQ, KBLOCK, KIND, ASM
        )
    else:
        at16 += P * (D + 8) // 4
        at32 += P * (D + 8) // 8
        _encode_rows(
            v_ptr, b64 * svb + h * svh, svn, i, ok, at16, at32, bad, D, DQ, VBLOCK, KIND, ASM
        )


@torch.library.custom_op("kvcodec::saw_int4_encode", mutates_args=("pages", "bad"))
def _op(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, bad: torch.Tensor | None, key_block: int, value_block: int,
    page_tokens: int,
) -> None:  # fmt: skip
    batch, heads, n, dim = k.shape
    if n == 0 or batch == 0:
        return
    rows, warps = (16, 1) if n <= 16 else ENCODE_CONFIG
    _launch(k, v, pages, table, start, bad, key_block, value_block, page_tokens, rows, warps)


def _launch(k, v, pages, table, start, bad, key_block, value_block, page_tokens, rows, warps):
    batch, heads, n, dim = k.shape
    kind = DTYPES.index(k.dtype)
    k, v = _granular(k, kind), _granular(v, kind)
    kp, vp = (k, v) if kind == _FP32 else (k.view(torch.int64), v.view(torch.int64))
    _encode_kernel[(triton.cdiv(n, rows), batch * heads, 2)](
        kp, vp, pages.view(torch.int16), pages.view(torch.int32), table, start, bad, n, heads,
        *k.stride()[:3], *v.stride()[:3], table.stride(0),
        D=dim, DQ=next_pow2(dim // 4), P=page_tokens, BT=rows, KBLOCK=key_block,
        VBLOCK=value_block, KIND=kind, ASM=ASM, num_warps=warps, num_stages=1,
    )  # fmt: skip


@_op.register_fake
def _(k, v, pages, table, start, bad, key_block, value_block, page_tokens):
    return None


def _granular(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Return x such that four 16-bit channels can be read as one 8-byte word; copies if needed."""
    whole = x.stride(-1) == 1 and (
        kind == _FP32
        or (x.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in x.stride()[:3]))
    )
    return x if whole else x.contiguous()


def encode_to_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    *,
    key_block: int,
    value_block: int,
    page_tokens: int,
    bad: torch.Tensor | None = None,
) -> None:
    """Encode n tokens per sequence and write them into their pages, keys and values in one launch.

    Parameters
    ----------
    k, v : Tensor [B, H, n, D]
        Model basis; bf16, fp16 or fp32, any strides.
    pages : Tensor uint8 [num_pages, H, page_bytes]
        Written in place.
    table : Tensor int32 [B, max_pages]
    start : Tensor int32 [B]
        Position of the first new token of each sequence, on the device.
    key_block, value_block : int
        Hadamard orders of the codec at this D; 1 for none.
    page_tokens : int
    bad : Tensor int32 [1], optional
        Raised to 1 if a row holds NaN, Inf or (rotated) a magnitude from 2**25 on; such a row
        reads as zeros.  Never read here, so nothing synchronises.

    Raises
    ------
    ShapeError, UnsupportedError
    """
    if k.shape != v.shape or k.dim() != 4 or k.dtype != v.dtype:
        raise ShapeError(
            f"encode_to_pages: k is {k.dtype} {list(k.shape)}, v is {v.dtype} {list(v.shape)}; both "
            "must be [B, H, n, D] of one dtype."
        )
    if k.dtype not in DTYPES:
        raise UnsupportedError(f"encode_to_pages: {k.dtype}; use one of {DTYPES}.")
    reason = supports(k.shape[-1], key_block, value_block, page_tokens)
    if reason:
        raise UnsupportedError(f"encode_to_pages: {reason}.")
    want = [k.shape[1], page_bytes(k.shape[-1], page_tokens)]
    if pages.dtype != torch.uint8 or list(pages.shape[1:]) != want or not pages.is_contiguous():
        raise ShapeError(
            f"encode_to_pages: pages are {pages.dtype} {list(pages.shape)}; a contiguous uint8 "
            f"[num_pages, {want[0]}, {want[1]}] is needed."
        )
    for name, x in (("table", table), ("start", start)):
        if x.dtype != torch.int32 or x.stride(-1) != 1:
            raise ShapeError(f"encode_to_pages: {name} is {x.dtype}; contiguous int32 is needed.")
    _op(k, v, pages, table, start, bad, key_block, value_block, page_tokens)
