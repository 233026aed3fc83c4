"""SAW-INT4 on the GPU: encode into pages, and the codec's parts of fused decode attention.

Reference: `kvcodec.codecs.saw_int4`; the kernels write and read exactly its bytes.

Page of P tokens of one KV head, planes in order, each on a 16-byte boundary (D=128, P=64)::

    0        K.codes       uint8  [P, D/2]   low nibble = channel 2i, high nibble = channel 2i+1
    4096     K.scale_zero  fp16   [P, 2]     scale s, integer zero z
    4352     V.codes       uint8  [P, D/2]
    8448     V.scale_zero  fp16   [P, 2]     end at 8704

Maths per token and head, y = rotated row:  s = fp16(max((max y - min y) / 15, floor)),
z = rne(-min y / s),  code = clip(rne(y / s) + z, 0, 15),  y' = s (code - z).
"""

# ruff: noqa: SIM102 -- a statement on a constexpr is resolved when compiling, an expression is not

import torch
import triton
import triton.language as tl

from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels._common import (
    ASM,
    RNE,
    butterfly,
    hadamard,
    next_pow2,
    refuse_cpu,
    rne,
    sqrt_order,
)
from kvcodec.kernels._saw_int4_decode import HOOKS

__all__ = ["HOOKS", "encode_to_pages", "page_bytes", "supports"]

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


@triton.jit(do_not_specialize=["n", "heads", "stride_table", "slots"])
def _encode_kernel(
    k_ptr, v_ptr, pages16, pages32, table, start, bad, n, heads,
    skb, skh, skn, svb, svh, svn, stride_table, slots,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, KBLOCK: tl.constexpr,
    VBLOCK: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (row block, sequence x head, 0 for K or 1 for V) encodes BT rows."""
    i = tl.program_id(0) * BT + tl.arange(0, BT)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    ok = i < n
    t = tl.load(start + b) + i
    # a captured step cannot be stopped by the host: what does not fit is dropped, and the flag says so
    if bad is not None:
        if tl.max((ok & (t >= slots)).to(tl.int32), 0) == 1:
            tl.atomic_max(bad, 2)
    ok = ok & (t < slots)
    page = tl.load(table + b.to(tl.int64) * stride_table + t // P, ok, other=0)
    slot = t % P
    unit = page.to(tl.int64) * heads + h
    at16 = pages16 + unit * (P * (D + 8) // 2) + slot * (D // 4)
    at32 = pages32 + unit * (P * (D + 8) // 4) + slot + P * D // 8
    i = i.to(tl.int64)
    b64 = b.to(tl.int64)
    if tl.program_id(2) == 0:
        _encode_rows(k_ptr, b64 * skb + h * skh, skn, i, ok, at16, at32, bad, D, DQ, KBLOCK, KIND, ASM)
    else:
        at16 += P * (D + 8) // 4
        at32 += P * (D + 8) // 8
        _encode_rows(v_ptr, b64 * svb + h * svh, svn, i, ok, at16, at32, bad, D, DQ, VBLOCK, KIND, ASM)


def _encode(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, bad: torch.Tensor | None, key_block: int, value_block: int,
    page_tokens: int,
) -> None:  # fmt: skip
    batch, _, n, _ = k.shape
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
        *k.stride()[:3], *v.stride()[:3], table.stride(0), table.shape[1] * page_tokens,
        D=dim, DQ=next_pow2(dim // 4), P=page_tokens, BT=rows, KBLOCK=key_block,
        VBLOCK=value_block, KIND=kind, ASM=ASM, num_warps=warps, num_stages=1,
    )  # fmt: skip


# the registered operator is what torch.compile traces; an eager call goes straight to the launch, because the
# dispatcher's checks of a mutating operator cost more host time than the launch itself
_op = torch.library.custom_op("kvcodec::saw_int4_encode", _encode, mutates_args=("pages", "bad"))


@_op.register_fake
def _(k, v, pages, table, start, bad, key_block, value_block, page_tokens):
    return None


def _granular(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Return x such that four 16-bit channels can be read as one 8-byte word; copies if needed."""
    whole = x.stride(-1) == 1 and (
        kind == _FP32 or (x.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in x.stride()[:3]))
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
        reads as zeros.  Raised to 2 if tokens lie beyond the table; they are not written.  Never
        read here, so nothing synchronises.

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
    refuse_cpu("encode_to_pages", k)
    run = _op if torch.compiler.is_compiling() else _encode
    run(k, v, pages, table, start, bad, key_block, value_block, page_tokens)
