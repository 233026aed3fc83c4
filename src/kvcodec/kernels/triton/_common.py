"""Device helpers shared by the Triton kernels.

``ASM`` selects between two equal forms of every kernel: inline PTX for CUDA, and plain Triton for
AMD and for Triton's CPU interpreter, which knows no inline assembly and computes bfloat16 wrongly.

The *plane* form.  A row of ``D`` channels is held as four planes of ``DQ`` channels, plane ``j``
being the channels ``4 g + j``.  This is the order in which a 16-bit granule holds its four codes,
so packing, unpacking, the rotation and the two matrix products of attention need no shuffle.
"""

import os

import torch
import triton.language as tl

import triton
from kvcodec.errors import UnsupportedError

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a build of triton without the CUDA backend
    gdc_launch_dependents = gdc_wait = None

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
ASM = not INTERPRETED and torch.version.hip is None

# Exponent adjustment that turns a masked nibble, read as an fp16 subnormal, back into its code.
SUBNORMAL = tl.constexpr(16777216.0)  # 2**24
# 1.5 * 2**23: adding and subtracting it rounds |x| < 2**22 to the nearest even integer in fp32.
RNE = tl.constexpr(12582912.0)


def next_pow2(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def refuse_cpu(name: str, x: torch.Tensor) -> None:
    """Raise if Triton's compiler would be asked to run on a CPU tensor."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise UnsupportedError(
            f"{name}: the tensors are on the CPU, the kernels run on CUDA and ROCm devices; use the reference "
            "codec, or set TRITON_INTERPRET=1 to run them (slowly) in Triton's interpreter."
        )


@triton.jit
def rne(x):
    """Round fp32 to the nearest integer, ties to even; |x| < 2**22."""
    return (x + RNE) - RNE


@triton.jit
def mask_granule(w, SHIFT: tl.constexpr, MASK: tl.constexpr, ASM: tl.constexpr):
    """Return ``(w >> SHIFT) & MASK`` of 16-bit granules, read as fp16 subnormals.

    MASK is 0x000F (value code * 2**-24) or 0x00F0 (value code * 2**-20), SHIFT is 0 or 8.  The
    assembly form works on two granules per register; its shift drags four foreign bits into each
    half, which the mask removes.
    """
    if ASM:
        if SHIFT == 8:
            w = tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [w], tl.int16, True, 2)
        if MASK == 0x000F:
            m = tl.inline_asm_elementwise("and.b32 $0, $1, 0x000f000f;", "=r,r", [w], tl.float16, True, 2)
        else:
            m = tl.inline_asm_elementwise("and.b32 $0, $1, 0x00f000f0;", "=r,r", [w], tl.float16, True, 2)
    else:
        m = ((w >> SHIFT) & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    return m


@triton.jit
def hadamard(N: tl.constexpr, ORDER: tl.constexpr):
    """Return the block-diagonal Sylvester matrix diag(H, H, ...) of order ORDER, entries +-1, 0.

    Returns
    -------
    [N, N] fp32
    """
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    x = i & j & (ORDER - 1)
    # parity of the common bits
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    x = (x ^ (x >> 1)) & 1
    return tl.where(i // ORDER == j // ORDER, 1.0 - 2.0 * x.to(tl.float32), 0.0)


@triton.jit
def butterfly(a, b, c, d, BLOCK: tl.constexpr):
    """Apply the two lowest stages of the Hadamard butterfly across the four planes (fp32)."""
    if BLOCK >= 2:
        a, b, c, d = a + b, a - b, c + d, c - d
    if BLOCK >= 4:
        a, b, c, d = a + c, b + d, a - c, b - d
    return a, b, c, d


@triton.jit
def sqrt_order(BLOCK: tl.constexpr):
    """Return 1/sqrt(BLOCK) for a power of two, correctly rounded to fp32."""
    x: tl.constexpr = 1.0 / BLOCK**0.5
    return x


@triton.jit
def fold8(x):
    """Sum [T, N] over the tokens, but leave eight partial sums [8, N].

    In the tensor core's accumulator a lane holds every eighth token, so this adds registers only;
    the shuffles between lanes wait until the loop is over.
    """
    return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), 0)
