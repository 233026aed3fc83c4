"""SAW-INT4: token-wise INT4 of keys rotated by a block-diagonal Hadamard. arXiv:2604.19157, Sec. 3-4.

    y = x diag(H_h, ..., H_h)                      Eq. 16, H orthonormal Sylvester; h = 1 is no rotation
    s = (max y - min y) / 15                       one (s, z) per token and head, over all D channels
    z = rne(-min y / s)                            an integer, NOT clipped to 0..15
    q = clip(rne(y / s) + z, 0, 15),  y^ = s (q - z)

Block (one token of one head)::

    codes       uint8  [D/2]   low nibble = channel 2i, high nibble = channel 2i+1
    scale_zero  fp16   [2]     s, z

Bits: 4 + 32/D; D = 128: 68 bytes, 4.25.

Deviations from the paper
1. One (s, z) per head, not per Hadamard block, although Eq. 16 reads per block: a scale per block costs 32/h bits more
   and breaks the equal-page claim; the printed order of block sizes fits per head.
2. s is held in fp16, codes are computed with the held s. s >= 2^(floor(log2 max|y|) - 9), so that |z| <= 1039 is exact
   in fp16: a constant row comes back within max|y| * 2^-10 (the paper is silent on s = 0).
3. h defaults to the largest power of two that divides D (D = 80: 16, 96: 32, 192: 64), no random signs (App. A.4).

Pitfalls: z is negative for all-positive rows and above 15 for all-negative ones; a 4-bit z loses 10 % relative MSE
there.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcodec.codec import FP16_MAX, Codec, Params, Payload
from kvcodec.errors import ShapeError, SpecError
from kvcodec.layout import Field, Layout, check_whole_bytes
from kvcodec.ops.bitpack import pack, unpack
from kvcodec.ops.hadamard import block_hadamard, power_of_two_divisor
from kvcodec.registry import register
from kvcodec.scheme import KVScheme

SCALE_FLOOR_EXPONENT = -9
SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class SawInt4(Codec):
    """Token-wise INT4 behind a block-diagonal Hadamard.

    Parameters
    ----------
    block : int or None
        Hadamard order h; 1 for no rotation, None for the largest power of two that divides head_dim.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        """Refuse orders that are no power of two."""
        if self.block is not None and (self.block < 1 or self.block & (self.block - 1)):
            raise SpecError(f"saw-int4: block={self.block} is not a power of two; use 16, 32, 64 or 128.")

    def block_for(self, head_dim: int) -> int:
        """Hadamard order used at ``head_dim``."""
        block = power_of_two_divisor(head_dim) if self.block is None else self.block
        if head_dim % block:
            raise ShapeError(
                f"saw-int4: block={block} does not divide head_dim={head_dim}; use block<="
                f"{power_of_two_divisor(head_dim)} (a power of two that divides it) or leave block out."
            )
        return block

    def layout(self, head_dim: int) -> Layout:
        """Codes and (s, z) of one token."""
        check_whole_bytes("saw-int4", head_dim)
        self.block_for(head_dim)
        fields = (
            Field("codes", "uint8", (head_dim // 2,)),
            Field("scale_zero", "float16", (2,), "scales"),
        )
        return Layout(head_dim, 1, fields, nominal_bits=4)

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        """Rotate, Eq. 16."""
        return block_hadamard(x, self.block_for(x.shape[-1]))

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        """Rotate back: the matrix is symmetric and its own inverse."""
        return block_hadamard(x, self.block_for(x.shape[-1]))

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Quantize each token over its D channels."""
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        biggest = torch.maximum(high, -low)
        exponent = torch.frexp(biggest).exponent - 1  # 2^e <= max|y| < 2^(e+1)
        floor = torch.ldexp(torch.ones_like(biggest), exponent + SCALE_FLOOR_EXPONENT)
        floor = torch.where(biggest > 0, floor, 0.0).clamp_min(SMALLEST_SCALE)
        # a tensor, not a number: CUDA divides by a constant through its reciprocal, one ulp off the CPU's bits
        scale = torch.maximum((high - low) / torch.full_like(low, 15), floor).clamp_max(FP16_MAX).half()
        s = scale.float()
        z = torch.round(-low / s)
        codes = (torch.round(x / s) + z).clamp_(0, 15)
        return {
            "codes": pack(codes.to(torch.uint8), 4),
            "scale_zero": torch.cat([scale, z.half()], -1),
        }

    def decode(self, payload: Payload, params: Params) -> Tensor:
        """``s (q - z)``."""
        s, z = payload["scale_zero"].float().unbind(-1)
        codes = unpack(payload["codes"], 4, payload["codes"].shape[-1] * 2).float()
        return codes.sub_(z[..., None]).mul_(s[..., None])


@register("saw-int4", source="SAW-INT4, arXiv:2604.19157, Sec. 3-4, App. A.4", presets={"saw-int4": {}})
def saw_int4(block: int | None = None, rotate: Literal["k", "kv", "none"] = "k") -> KVScheme:
    """Token-wise INT4 with block-diagonal Hadamard rotation, the paper's deployed recipe (keys rotated).

    Parameters
    ----------
    block : int or none
        Hadamard order, a power of two; none: the largest one that divides head_dim.
    rotate : {"k", "kv", "none"}
        What is rotated; none is plain token-wise INT4.
    """
    key = SawInt4(1 if rotate == "none" else block)
    value = SawInt4(block if rotate == "kv" else 1)
    return KVScheme(key=key, value=value)
