"""SAW-INT4: token-wise INT4 of keys rotated by a block-diagonal Hadamard. arXiv:2604.19157, Sec. 3-4.

    y = x diag(H_h, ..., H_h)                      Eq. 16, H orthonormal Sylvester; h = 1 is no rotation
    s = (max y - min y) / 15                       one (s, z) per token and head, over all D channels
    z = rne(-min y / s)                            an integer, NOT clipped to 0..15; zero=float: -min y / s itself
    q = clip(rne(y / s) + z, 0, 15),  y^ = s (q - z)       zero=float: q = clip(rne(y / s + z), 0, 15)

Around it, as the paper's ablations: ``kmeans=C`` (App. A.2, codecs/kmeans_residual) and ``hessian=true`` (App. A.3,
codecs/hessian); ``oscar=true`` is a later paper's order of the two rotations, for keys (codecs/hessian).

Block (one token of one head)::

    codes       uint8  [D/2]   byte i: low nibble = channel 2i, high nibble = channel 2i+1       pack=neighbours
                               byte i: low nibble = channel i, high nibble = channel i + D/2     pack=halves
    scale_zero  fp16   [2]     s, z
    ids         uint8  [w]     kmeans=C: w = 1 byte up to C = 256, 2 beyond, none for C = 1

Bits: 4 + 32/D, with ids + 8w/D; D = 128: 68 bytes, 4.25.

Deviations from the paper
1. One (s, z) per head, not per Hadamard block, although Eq. 16 reads per block: a scale per block costs 32/h bits more
   and breaks the equal-page claim; the printed order of block sizes fits per head.
2. s is held in fp16, codes are computed with the held s. s >= 2^(floor(log2 max|y|) - 9), so that |z| <= 1039 is exact
   in fp16: a constant row comes back within max|y| * 2^-10 (the paper is silent on s = 0).
3. h defaults to the largest power of two that divides D, no random signs (App. A.4).
4. zero=float is what the public kernels do, trunc(y / s + z + 0.5) with s and z in fp32. Here both are held in fp16 and
   q is computed with the held ones, hence the nearest of the 16 points; trunc of a number clipped at 0 rounds a tie up,
   rne to even, and both points are as near. Relative MSE on N(0, 1), D = 128: rounded 0.01011, float 0.00996.
5. "Two neighboring values into one byte": pack=neighbours; the order of nibbles is not printed. pack=halves is the
   public kernels' order. The fused kernels here read neighbours and rounded only.

Pitfalls: z is negative for all-positive rows and above 15 for all-negative ones; a 4-bit z loses 10 % relative MSE
there.

Use: serving: one token is one row of bytes, so pages, prefix reuse and batching work as in 16 bit, at 4.25 bits;
with fused kernels.

Not for: less than 4 bits, or least loss: on the small model measured, perplexity rises by 5 %, with kivi-4 at 5.7 bits
in all by 1 %, with int-8 by less than 0.1 %.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload
from packedkv.codecs.hessian import HessianRotated, OscarRotated
from packedkv.codecs.kmeans_residual import KMeansResidual
from packedkv.errors import ShapeError, SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.groups import SMALLEST_SCALE
from packedkv.ops.hadamard import Rotated, power_of_two_divisor
from packedkv.ops.scale_search import Scale, around_middle, quantized
from packedkv.registry import register
from packedkv.scheme import KVScheme

Zero = Literal["rounded", "float"]
Packing = Literal["neighbours", "halves"]

SCALE_FLOOR_EXPONENT = -9


@dataclass(frozen=True)
class SawInt4(Rotated, Codec):
    """Token-wise INT4 behind a block-diagonal Hadamard.

    Parameters
    ----------
    block : int or None
        Hadamard order, a power of two; none: the largest one that divides head_dim. 1: no rotation.
    zero : {"rounded", "float"}
        Zero point: an integer, as in the paper, or not rounded, as in the public kernels.
    pack : {"neighbours", "halves"}
        Channels that share a byte: 2i and 2i + 1, or i and i + D/2.
    """

    block: int | None = None
    zero: Zero = "rounded"
    pack: Packing = "neighbours"
    scale: Scale = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block is not None and (self.block < 1 or self.block & (self.block - 1)):
            raise SpecError(f"saw-int4: block={self.block} is not a power of two; use 16, 32, 64 or 128.")

    def order_for(self, head_dim: int) -> int:
        """Order h of the Hadamard matrix; raises ShapeError if ``block`` does not divide ``head_dim``."""
        block = power_of_two_divisor(head_dim) if self.block is None else self.block
        if head_dim % block:
            raise ShapeError(
                f"saw-int4: block={block} does not divide head_dim={head_dim}; use block<="
                f"{power_of_two_divisor(head_dim)} (a power of two that divides it) or leave block out."
            )
        return block

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("saw-int4", head_dim)
        self.order_for(head_dim)
        fields = Field("codes", "uint8", (head_dim // 2,)), Field("scale_zero", "float16", (2,), "scales")
        return Layout(head_dim, 1, fields, nominal_bits=4)

    def encode(self, x: Tensor, params: Params) -> Payload:
        codes, scale, z = quantized(x, self._quantize, self._value, self.scale)
        if self.pack == "halves":
            codes = codes.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return {"codes": pack(codes, 4), "scale_zero": torch.cat([scale, z], -1)}

    def _quantize(self, x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, s and z of a range that is ``factor`` times a token's, about the same middle."""
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        biggest = torch.maximum(high, -low)
        low, high = around_middle(low, high, factor)
        exponent = torch.frexp(biggest).exponent - 1  # 2^e <= max|y| < 2^(e+1)
        floor = torch.ldexp(torch.ones_like(biggest), exponent + SCALE_FLOOR_EXPONENT)
        floor = torch.where(biggest > 0, floor, 0.0).clamp_min(SMALLEST_SCALE)
        # a tensor, not a number: CUDA divides by a constant through its reciprocal, one ulp off the CPU's bits
        scale = torch.maximum((high - low) / torch.full_like(low, 15), floor).clamp_max(FP16_MAX).half()
        s = scale.float()
        if self.zero == "rounded":
            z = torch.round(-low / s)
            codes = torch.round(x / s) + z
        else:
            z = (-low / s).half().float()
            codes = torch.round(x.double() / s + z)  # |z| up to 1039: float32 would blur y / s
        return codes.clamp_(0, 15).to(torch.uint8), scale, z.half()

    def _value(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return codes.float().sub_(zero.float()).mul_(scale.float())

    def decode(self, payload: Payload, params: Params) -> Tensor:
        scale, zero = payload["scale_zero"].split(1, -1)
        codes = unpack(payload["codes"], 4, payload["codes"].shape[-1] * 2)
        if self.pack == "halves":
            codes = codes.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self._value(codes, scale, zero)


@register(
    "saw-int4", source="SAW-INT4, arXiv:2604.19157, Sec. 3-4, App. A", presets={"saw-int4": {}}, mark="recommended"
)
def saw_int4(
    block: int | None = None,
    rotate: Literal["k", "kv", "none"] = "k",
    zero: Zero = "rounded",
    pack: Packing = "neighbours",
    kmeans: int = 0,
    hessian: bool = False,
    oscar: bool = False,
    scale: Scale = "own",
) -> KVScheme:
    """Token-wise INT4 with block-diagonal Hadamard rotation, the paper's deployed recipe (keys rotated).

    Parameters
    ----------
    rotate : {"k", "kv", "none"}
        Roles that are rotated; none is plain token-wise INT4.
    kmeans : int
        Centroids C per layer, head and role, of which the nearest is subtracted first; 0: none, 1: the mean.
    hessian : bool
        Rotate by the eigenvectors of the queries' second moment, after the Hadamard: keys, and values with rotate=kv;
        with rotate=none it alone rotates the keys. Needs params from `packedkv fit`.
    oscar : bool
        Rotate keys by the eigenvectors of their head's queries, before the Hadamard. Needs params from `packedkv fit`.
    """
    if kmeans < 0:
        raise SpecError(f"saw-int4: kmeans={kmeans} is not allowed; use 0 (none) or 1 to 65536 clusters.")
    key: Codec = SawInt4(1 if rotate == "none" else block, zero, pack, scale=scale)
    value: Codec = SawInt4(block if rotate == "kv" else 1, zero, pack, scale=scale)
    if hessian and oscar:
        raise SpecError("saw-int4: hessian=true and oscar=true are two bases of the same keys; use one of them.")
    if oscar:
        key = OscarRotated(key)
    if hessian:
        key = HessianRotated(key)
        value = HessianRotated(value) if rotate == "kv" else value
    if kmeans:
        key, value = KMeansResidual(key, kmeans), KMeansResidual(value, kmeans)
    return KVScheme(key=key, value=value)
