"""FP8: E4M3 with one scale per token and head, or none. Micikevicius et al., arXiv:2209.05433, Sec. 3 (OCP E4M3).

E4M3 has 1 sign, 4 exponent (bias 7) and 3 fraction bits, no infinity, largest value 448, smallest normal 2^-6,
smallest subnormal 2^-9::

    s = fp16(max |x| / 448)          per token and head; s = 1 without a scale
    code = E4M3(clip(x / s, -448, 448)),  round to nearest even
    x^ = s code

Block (one token of one head)::

    codes   uint8  [D]     the E4M3 byte: sign, exponent, fraction from the top bit down
    scale   fp16   [1]     scale=token only

Bits: 8 + 16/D; D = 128: 130 bytes, 8.125. Without a scale: 8.

Deviations: the scale is stored in fp16, not float32, and never below 2^-24; codes are computed with the stored scale.

Pitfalls
1. Without a scale everything above 448 saturates, and what is below 2^-10 becomes zero. Engines' ``fp8`` without
   calibration is this variant.
2. The clip is needed: PyTorch before 2.12 casts 464 and below to 448 and larger numbers to NaN; later ones saturate.
3. Where max |x| < 0.027 the fp16 scale is subnormal: the largest elements of the token may lose up to 448 x 2^-25.

Use: halving the cache in a number format that hardware supports, at a small loss (KL 0.005 on the small model).

Not for: a factor above 2, or least error at 8 bits: int-8 takes two bytes more per token and head, and its KL is 15
times smaller there.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import Codec, Params, Payload
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.groups import fp16_scale
from packedkv.registry import register
from packedkv.scheme import KVScheme

E4M3_MAX = 448


@dataclass(frozen=True)
class Fp8(Codec):
    """E4M3 bytes; ``scaled``: with one fp16 scale per token and head."""

    scaled: bool = True

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("fp8", head_dim, 1)
        fields = [Field("codes", "uint8", (head_dim,), reads="float8_e4m3fn")]
        if self.scaled:
            fields.append(Field("scale", "float16", (1,), "scales"))
        return Layout(head_dim, 1, tuple(fields), nominal_bits=8.0)

    def encode(self, x: Tensor, params: Params) -> Payload:
        if not self.scaled:
            return {"codes": _e4m3(x)}
        scale = fp16_scale(x.abs().amax(-1, keepdim=True), E4M3_MAX)
        return {"codes": _e4m3(x / scale.float()), "scale": scale}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        x = payload["codes"].contiguous().view(torch.float8_e4m3fn).float()
        return x * payload["scale"].float() if self.scaled else x


def _e4m3(x: Tensor) -> Tensor:
    """E4M3 bytes of ``x``, saturated at +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


@register("fp8", source="FP8 formats, arXiv:2209.05433, Sec. 3 (E4M3)", mark="baseline")
def fp8(scale: Literal["token", "none"] = "token") -> KVScheme:
    """Eight-bit floating point, E4M3, for keys and values.

    Parameters
    ----------
    scale : {"token", "none"}
        token: one fp16 scale per token and head; none: scale-free, saturates at 448.
    """
    codec = Fp8(scaled=scale == "token")
    return KVScheme(key=codec, value=codec)
