"""UltraQuant: FP4 (E2M1) codes with one power-of-two scale per 32 channels. arXiv:2606.20474, Sec. 5, Alg. 1.

    y = x H                           keys; H orthonormal Hadamard. Values are not rotated.
    m = max |y| over a group          32 neighbouring channels of one token, no per-token norm
    E = round(log2(c m))              clipped to -127..127; c = 0.156, one constant for every head and model
    code = q(y / 2^E)                 nearest of +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, beyond 6 saturates
    y^ = code 2^E                     Eq. 1

E2M1: bit 3 of a code is the sign, bits 0-2 number the magnitudes; a negative number that rounds to zero keeps its sign,
code 8, as hardware casts do. With ``scale=real`` the scale is c m itself, which is what Eq. 2 optimises c for.
``scale=search`` takes of E - 1, E and E + 1 the one of least squared error, in the same bytes.

Block (one token of one head; g = ceil(D / 32) groups, the last one shorter when 32 does not divide D)::

    codes  uint8           [D/2]   E2M1, low nibble = channel 2i, high nibble = channel 2i+1
    scale  uint8 or fp16   [g]     E + 127 (UE8M0; 0 for a group of zeros, 255 never), or c m / 2^r with scale=real

r = ceil(log2(h) / 2) for keys rotated in blocks of h channels (2^r >= sqrt(h), the most a rotation can add to a
maximum, so that the stored scale never leaves the fp16 range), r = 0 for values.

Bits: 4 + 8 g / D, D = 128: 68 bytes, 4.25; real scales 4 + 16 g / D, 4.5. D = 80 has 3 groups: 43 bytes, 4.3. The first
two and the last two layers are dense: with 48 layers of D = 128 the mean is 5.229 bits.

Deviations from the paper
1. Queries stay as they are. The paper rounds rotated queries to E4M3 before QK: ``queries=fp8`` does so (saturating at
   448) wherever attention reads the packed cache (``attend``, ``attention="streamed"``); a model that is handed decoded
   keys multiplies them with queries of its own, so ``attention="decoded"`` refuses the option.
2. D that is no power of two: block-diagonal Hadamard (ops/hadamard).
3. Unstated, chosen here: ties go to the even code, nibble order, m = 0, the clip of E.

Pitfalls
1. "0.156 is MSE-optimal" holds for no stored format: with real scales of Gaussian groups the best c is 0.1625 (relative
   MSE 0.01011; 0.156 gives 0.01041); with the power-of-two scales that are stored it is 0.195 (0.0125), and 0.156 gives
   0.0168 and saturates the largest element of 60 % of the groups (0.195: 27 %). The paper's accuracies, of some dozens
   of questions, prefer 0.156 all the same. ``c=0.195`` is the choice for reconstruction.
2. The power of two makes the error depend on the magnitude: at c = 0.156 the relative MSE of Gaussian groups runs
   between 0.0151 and 0.0186 over an octave (at 0.195 between 0.0124 and 0.0127).
3. c = 1 (no shrinkage) uses the levels 0, 0.5 and 1 only: relative MSE 0.13.
4. Models of up to four layers are dense altogether; ``dense_layers=0`` compresses them.

Use: hardware with FP4 tensor formats, and serving with exactly 17 bytes per 32 channels.

Not for: least error at 4.25 bits: integers with a zero point (saw-int4) are closer, since a power of two misses the
wanted scale by up to a factor of sqrt 2; shallow models, of which four layers stay dense (5.8 bits in all with 30).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.groups import SMALLEST_SCALE, group_count, split_channels, spread_channels
from packedkv.ops.hadamard import Rotated, power_of_two_divisor
from packedkv.ops.scale_search import quantized
from packedkv.registry import register
from packedkv.scheme import KVScheme

Scale = Literal["pow2", "real", "search"]
Queries = Literal["exact", "fp8"]

GROUP = 32
POWERS = (1.0, 2.0, 0.5)
"""Multiples of c m that scale=search tries."""
E4M3_MAX = 448
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_BIAS = 127
UE8M0_LARGEST = 254


@dataclass(frozen=True)
class UltraQuant(Rotated, Codec):
    """E2M1 codes, one scale per 32 channels; ``rotate``: Hadamard before the codes (keys).

    Parameters
    ----------
    c : float
        Scale over a group's largest magnitude: 0.156 (the paper's), 0.195 (least error with pow2), 1.0 (no shrinkage).
    scale : {"pow2", "real", "search"}
        pow2: one UE8M0 byte per group; real: c m in fp16, 8 bits per group more; search: of pow2's byte and its
        neighbours the one of least squared error.
    queries : {"exact", "fp8"}
        fp8: attention rounds rotated queries to E4M3, as the paper's kernels do; needs ``attention="streamed"``.
    """

    rotate: bool = True
    c: float = 0.156
    scale: Scale = "pow2"
    queries: Queries = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.c <= 2:
            raise SpecError(f"ultraquant: c={self.c} is not allowed; use 0.156, 0.195 or another number in (0, 2].")

    @property
    def query_error(self) -> float:
        """Half a step of E4M3 when queries are rounded."""
        return 2.0**-4 if self.queries == "fp8" else 0.0

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("ultraquant", head_dim)
        groups = (group_count(head_dim, GROUP),)
        real = Field("scale", "float16", groups, "scales")
        power = Field("scale", "uint8", groups, "scales", reads="float8_e8m0fnu")
        fields = Field("codes", "uint8", (head_dim // 2,)), real if self.scale == "real" else power
        return Layout(head_dim, 1, fields, nominal_bits=4.0)

    def order_for(self, head_dim: int) -> int:
        return power_of_two_divisor(head_dim) if self.rotate else 1

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        """Rotate queries, Alg. 1 line 9; rounded to E4M3 when ``queries`` is fp8."""
        rotated = self.to_code(q, params)
        if self.queries == "exact":
            return rotated
        return rotated.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()

    def encode(self, x: Tensor, params: Params) -> Payload:
        codes, scale = quantized(x, self._quantize, self._value, self.scale, GROUP, POWERS)
        return {"codes": pack(codes, 4), "scale": scale}

    def _quantize(self, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """Codes, and scales of c m times ``factor``."""
        dim = x.shape[-1]
        target = split_channels(x.abs(), GROUP).amax(-1).double() * (self.c * factor)
        if self.scale == "real":
            scale = (target / self.unit(dim)).float().clamp(SMALLEST_SCALE, FP16_MAX).half()
            y = x / spread_channels(self._group_scales(scale, dim), GROUP, dim)
        else:
            scale = nearest_ue8m0(target)
            y = x * spread_channels(ue8m0_reciprocal(scale), GROUP, dim)
        return encode_e2m1(y), scale

    def _value(self, codes: Tensor, scale: Tensor) -> Tensor:
        dim = codes.shape[-1]
        return decode_e2m1(codes).mul_(spread_channels(self._group_scales(scale, dim), GROUP, dim))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return self._value(unpack(payload["codes"], 4, payload["codes"].shape[-1] * 2), payload["scale"])

    def _group_scales(self, scale: Tensor, head_dim: int) -> Tensor:
        """Scales of the groups in float32, from the stored numbers."""
        return scale.float() * self.unit(head_dim) if self.scale == "real" else ue8m0_value(scale)

    def unit(self, head_dim: int) -> float:
        """2^r, the unit of stored real scales; a power of two, so that it rounds nothing."""
        return 2.0 ** math.ceil(math.log2(self.order_for(head_dim)) / 2)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes of float ``x``; ties go to the even code, beyond 6 saturates.

    >>> encode_e2m1(torch.tensor([0.25, 0.75, 2.5, 5.0, 9.0, -0.5])).tolist()
    [0, 2, 4, 6, 7, 9]
    """
    y = x.abs()
    # the code as a function of the magnitude is the minimum of three lines of slope 2, 1 and 1/2 (it is concave);
    # rounding half to even preserves this, because neighbouring lines meet at an even code
    code = torch.minimum((y * 2).round_(), y.round() + 2)
    code = torch.minimum(code, (y / 2).round_() + 4).clamp_max_(7)
    return code.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of integer ``codes`` in 0..15; float32 of the same shape."""
    return _levels(codes.device)[codes.int()]


@lru_cache(maxsize=32)
def _levels(device: torch.device) -> Tensor:
    """Values of all codes, float32 ``[16]``; cached, because a copy to a GPU synchronizes."""
    with torch.inference_mode(False):
        levels = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32)
        return torch.cat([levels, -levels]).to(device)


def nearest_ue8m0(y: Tensor) -> Tensor:
    """Bytes of the powers of two nearest to ``y >= 0`` on a log scale, ``clip(round(log2 y), -127, 127) + 127``.

    0 for 0; ``y`` is float64. Decided on mantissa and exponent, not by a logarithm, whose last bit differs between
    machines. There is no tie: sqrt(1/2) is not a floating point number.

    >>> nearest_ue8m0(torch.tensor([0.0, 1.0, 1.41, 1.42, 2.0**-130], dtype=torch.float64)).tolist()
    [0, 127, 127, 128, 0]
    """
    mantissa, exponent = torch.frexp(y)  # y = mantissa 2^exponent, 1/2 <= mantissa < 1
    exponent = exponent - (mantissa < math.sqrt(0.5)).to(exponent.dtype)
    byte = (exponent + UE8M0_BIAS).clamp(0, UE8M0_LARGEST)
    return torch.where(y > 0, byte, 0).to(torch.uint8)


def ue8m0_value(byte: Tensor) -> Tensor:
    """``2^(byte - 127)``, exact: float32 of the same shape, for bytes 0..254."""
    bits = byte.int()
    # the byte is the float32's exponent field; only 2^-127 is subnormal
    return torch.where(bits > 0, bits << 23, 1 << 22).to(torch.int32).view(torch.float32)


def ue8m0_reciprocal(byte: Tensor) -> Tensor:
    """``2^(127 - byte)``, exact: a factor in place of a division."""
    return ue8m0_value(UE8M0_LARGEST - byte.int())


@register("ultraquant", source="UltraQuant, arXiv:2606.20474, Sec. 5-6, Alg. 1", presets={"ultraquant": {}})
def ultraquant(c: float = 0.156, scale: Scale = "pow2", queries: Queries = "exact", dense_layers: int = 2) -> KVScheme:
    """FP4 with a power-of-two scale per 32 channels, keys rotated, outer layers dense: the paper's deployed recipe.

    Parameters
    ----------
    dense_layers : int
        How many of the first and of the last layers keep keys and values dense.
    """
    key, value = UltraQuant(True, c, scale, queries), UltraQuant(False, c, scale)
    return KVScheme(key=key, value=value, dense_key_layers=dense_layers, dense_value_layers=dense_layers)
