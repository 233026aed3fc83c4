"""Encoding into pages for the codecs that hold 4-bit codes and two fp16 numbers per token and head.

Page of P tokens of one KV head; a codec has the two numbers together or in planes of their own (D=128, P=64)::

    0        K.codes       uint8  [P, D/2]   low nibble = channel 2i, high nibble = channel 2i+1
    4096     K.scale_zero  fp16   [P, 2]     or  K.scale fp16 [P], K.zero fp16 [P]
    4352     V.codes       uint8  [P, D/2]
    8448     V.scale_zero  fp16   [P, 2]     or  V.scale fp16 [P], V.zero fp16 [P];  end at 8704

A codec supplies one jit function, ``quantize(x0, x1, x2, x3, hi, lo, ASM)``: four planes [T, D/4] of (rotated) rows,
their maxima and minima [T]; it returns the granules [T, D/4] int32, scale and zero [T] fp16.
"""

# ruff: noqa: SIM102 -- a statement on a constexpr is resolved when compiling, an expression is not

from collections.abc import Callable

import torch
import triton.language as tl

import triton
from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels.triton._common import ASM, butterfly, hadamard, next_pow2, refuse_cpu, sqrt_order

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP32 = 2
# rows and warps of an encoding program, measured on one H200
ENCODE_CONFIG = (16, 1)


def page_bytes(head_dim: int, page_tokens: int) -> int:
    """Return the bytes of one page of one KV head: two code planes, scale and zero of keys and of values."""
    return page_tokens * (head_dim + 8)


def refused_sizes(name: str, head_dim: int, page_tokens: int) -> str:
    """Return why the kernels of codec `name` cannot take these sizes, or an empty string if they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}; the {name} kernels take {HEAD_DIMS}"
    if page_tokens < 16 or page_tokens % 16:
        return f"page_tokens={page_tokens}; allowed are multiples of 16"
    return ""


@triton.jit
def quotient(y, s, r, ASM: tl.constexpr):
    """Return y / s as IEEE rounds it; r = 1 / s. One Newton step does it, cheaper than a division."""
    if ASM:
        t = y * r
        t = tl.fma(tl.fma(-t, s, y), r, t)
    else:
        t = tl.div_rn(y, s)
    return t


@triton.jit
def granule(c0, c1, c2, c3):
    """Pack four int32 codes per granule of neighbouring channels."""
    return c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)


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
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _encode_rows(
    x_ptr, base, stride_n, i, ok_n, at16, words, bad,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    PAIRED: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Rotate, quantize and store the rows `i` of one head: codes at `at16`, scale and zero at `words`."""
    g = tl.arange(0, DQ)
    ok = ok_n[:, None] & (g < D // 4)[None, :]
    x0, x1, x2, x3 = _load_planes(x_ptr, base + i * stride_n, ok, g, D, KIND)
    size = _max_nan(_max_nan(tl.abs(x0), tl.abs(x1)), _max_nan(tl.abs(x2), tl.abs(x3)))
    good = tl.reduce(size, 1, _max_nan) <= 65504.0  # in the model's basis, as the codecs ask; false for NaN too
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
    w, s, z = QUANTIZE(x0, x1, x2, x3, hi, lo, ASM)
    if bad is not None:
        if tl.min(good.to(tl.int32), 0) == 0:
            tl.atomic_max(bad, 1)
    tl.store(at16[:, None] + g[None, :], w.to(tl.int16), ok)
    sb = s.to(tl.int16, bitcast=True)
    zb = z.to(tl.int16, bitcast=True)
    # a row that cannot be encoded reads as zeros; the flag says so
    if PAIRED:
        word = (sb.to(tl.int32) & 0xFFFF) | (zb.to(tl.int32) << 16)
        tl.store(words, tl.where(good, word, 0), ok_n)
    else:
        tl.store(words, tl.where(good, sb, 0), ok_n)
        tl.store(words + P, tl.where(good, zb, 0), ok_n)


@triton.jit(do_not_specialize=["n", "heads", "stride_table", "slots"])
def _encode_kernel(
    k_ptr, v_ptr, pages16, pages32, table, start, bad, n, heads,
    skb, skh, skn, svb, svh, svn, stride_table, slots,
    D: tl.constexpr, DQ: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, KBLOCK: tl.constexpr,
    VBLOCK: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, PAIRED: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Program (sequence x head x row block, 0 for K or 1 for V) encodes BT rows; other axes of a grid end at 65535."""
    blocks = tl.cdiv(n, BT)
    which = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    b = which // heads
    h = which % heads
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
    if PAIRED:
        words = pages32 + unit * (P * (D + 8) // 4) + slot + P * D // 8
    else:
        words = pages16 + unit * (P * (D + 8) // 2) + slot + P * D // 4
    i = i.to(tl.int64)
    b64 = b.to(tl.int64)
    if tl.program_id(1) == 0:
        _encode_rows(k_ptr, b64 * skb + h * skh, skn, i, ok, at16, words, bad, D, DQ, P, KBLOCK, KIND, ASM,
                     PAIRED, QUANTIZE)  # fmt: skip
    else:
        at16 += P * (D + 8) // 4
        words += P * (D + 8) // 8 if PAIRED else P * (D + 8) // 4
        _encode_rows(v_ptr, b64 * svb + h * svh, svn, i, ok, at16, words, bad, D, DQ, P, VBLOCK, KIND, ASM,
                     PAIRED, QUANTIZE)  # fmt: skip


def launch(
    quantize: object, paired: bool, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    start: torch.Tensor, bad: torch.Tensor | None, key_block: int, value_block: int, page_tokens: int,
    config: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Launch the encoding of checked tensors; `config`: rows and warps of a program."""
    batch, heads, n, dim = k.shape
    if n == 0 or batch == 0:
        return
    rows, warps = config or ((16, 1) if n <= 16 else ENCODE_CONFIG)
    kind = DTYPES.index(k.dtype)
    k, v = _granular(k, kind), _granular(v, kind)
    kp, vp = (k, v) if kind == _FP32 else (k.view(torch.int64), v.view(torch.int64))
    _encode_kernel[(triton.cdiv(n, rows) * batch * heads, 2)](
        kp, vp, pages.view(torch.int16), pages.view(torch.int32), table, start, bad, n, heads,
        *k.stride()[:3], *v.stride()[:3], table.stride(0), table.shape[1] * page_tokens,
        D=dim, DQ=next_pow2(dim // 4), P=page_tokens, BT=rows, KBLOCK=key_block,
        VBLOCK=value_block, KIND=kind, ASM=ASM, PAIRED=paired, QUANTIZE=quantize, num_warps=warps, num_stages=1,
    )  # fmt: skip


def _granular(x: torch.Tensor, kind: int) -> torch.Tensor:
    """Return x such that four 16-bit channels can be read as one 8-byte word; copies if needed."""
    whole = x.stride(-1) == 1 and (
        kind == _FP32 or (x.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in x.stride()[:3]))
    )
    return x if whole else x.contiguous()


def encoder(name: str, quantize: object, paired: bool, supports: Callable[[int, int, int, int], str]) -> Callable:
    """Return ``encode_to_pages`` of a codec.

    Parameters
    ----------
    name : str
        Stem of the codec's module; the operator that compiled graphs trace is ``kvcodec::<name>_encode``.
    quantize : jit function
    paired : bool
        Scale and zero of a token lie together, not in planes of their own.
    supports : function (head_dim, key_block, value_block, page_tokens) -> str
        Why these sizes are refused, or "".
    """

    def encode(
        k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
        start: torch.Tensor, bad: torch.Tensor | None, key_block: int, value_block: int,
        page_tokens: int,
    ) -> None:  # fmt: skip
        launch(quantize, paired, k, v, pages, table, start, bad, key_block, value_block, page_tokens)

    # the registered operator is what torch.compile traces; an eager call goes straight to the launch, because the
    # dispatcher's checks of a mutating operator cost more host time than the launch itself
    op = torch.library.custom_op(f"kvcodec::{name}_encode", encode, mutates_args=("pages", "bad"))

    @op.register_fake
    def _(k, v, pages, table, start, bad, key_block, value_block, page_tokens):
        return None

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
            Raised to 1 if a row holds NaN, Inf or a magnitude above 65504; such a row
            reads as zeros.  Raised to 2 if tokens lie beyond the table; they are not written.  Never
            read here, so nothing synchronises.

        Raises
        ------
        ShapeError, UnsupportedError
        """
        _check(k, v, pages, table, start, supports(k.shape[-1], key_block, value_block, page_tokens), page_tokens)
        refuse_cpu("encode_to_pages", k)
        run = op if torch.compiler.is_compiling() else encode
        run(k, v, pages, table, start, bad, key_block, value_block, page_tokens)

    return encode_to_pages


def _check(k, v, pages, table, start, reason, page_tokens):
    if k.shape != v.shape or k.dim() != 4 or k.dtype != v.dtype:
        raise ShapeError(
            f"encode_to_pages: k is {k.dtype} {list(k.shape)}, v is {v.dtype} {list(v.shape)}; both "
            "must be [B, H, n, D] of one dtype."
        )
    if k.dtype not in DTYPES:
        raise UnsupportedError(f"encode_to_pages: {k.dtype}; use one of {DTYPES}.")
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
