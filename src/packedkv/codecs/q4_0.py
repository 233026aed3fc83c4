"""q4_0: llama.cpp's quantized cache (`-ctk q4_0 -ctv q4_0`), with the Hadamard rotation that it applies since #21038.

    y = x diag(H_h, ..., H_h)           H orthonormal Sylvester; keys: h = the largest power of two in D; values: h = 64
    m = the first element of largest magnitude of 32 neighbouring channels, with its sign
    d = m / -8                          the float d makes the codes, fp16(d) is stored
    q = min(15, trunc(y (1 / d) + 8.5)),   y^ = fp16(d) (q - 8)

The 16 levels are -8..7 times d: m itself is code 0, and the other sign has one level less. Rows are rotated
where 64 divides D, as in llama.cpp, and nowhere else.

Block (one token of one head)::

    codes   uint8  [D/2]    byte 16 g + j of group g: low nibble = channel 32 g + j, high nibble = channel 32 g + 16 + j
    scale   fp16   [D/32]   d

Bits: 4 + 16/32 = 4.5 at every D; D = 128: 72 bytes. The bytes of a group are those of ggml's `block_q4_0` (`gguf`'s
Python quantizer gives the same), which has a group's d in front of its codes; here scales are a plane of their own.

Sources: ggml, `quantize_row_q4_0_ref`; llama.cpp, pull request 21038, "rotate activations for better quantization", and
`llama_kv_cache::build_input_k_rot`, `build_input_v_rot` (orders). `rotate=none` is LLAMA_ATTN_ROT_DISABLE=1, and what
llama.cpp did before April 2026.

Deviations
1. |d| is at most 65504, where ggml has infinity (a rotated group above 524032); then the codes saturate.
2. A group whose d is below 2^-120 has code 8 throughout; fp16(d) is 0 there anyway.
3. Queries and sums are float32, as everywhere here; llama.cpp's CPU attention rounds queries to 8 bits for q4_0 keys.

Pitfalls: D must be a multiple of 32; llama.cpp refuses others too. Without rotation the largest channel of a group
sets its step. A group with several elements of largest magnitude takes the first one's sign.

Use: to compare with what llama.cpp's cache does, at its bytes, in the same harness.

Not for: speed here: no kernel reads it, the PyTorch reference runs. saw-int4 is the same idea with a quarter bit less
at D = 128, and has kernels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, Codec, Params, Payload
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.hadamard import Rotated, power_of_two_divisor
from packedkv.registry import register
from packedkv.scheme import KVScheme

GROUP = 32
ROTATED = 64
"""Rotated is where this divides head_dim; the order of the values' rotation, and the least of the keys'."""
SMALLEST = 2.0**-120
"""Of |d|: its reciprocal and what is multiplied by it stay finite."""


@dataclass(frozen=True)
class Q40(Rotated, Codec):
    """ggml's q4_0 behind llama.cpp's rotation.

    Parameters
    ----------
    rotation : {"whole", "64", "none"}
        Order of the Hadamard matrix: the largest power of two that divides head_dim, or 64; none where 64 does not
        divide head_dim.
    """

    rotation: Literal["whole", "64", "none"] = "whole"

    def order_for(self, head_dim: int) -> int:
        """Order of the Hadamard matrix; 1: no rotation.

        >>> [Q40().order_for(d) for d in (64, 96, 128, 192, 256)], Q40("64").order_for(256)
        ([64, 1, 128, 64, 256], 64)
        """
        if self.rotation == "none" or head_dim % ROTATED:
            return 1
        return power_of_two_divisor(head_dim) if self.rotation == "whole" else ROTATED

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("q4_0", head_dim, GROUP)
        codes = Field("codes", "uint8", (head_dim // 2,))
        return Layout(head_dim, 1, (codes, Field("scale", "float16", (head_dim // GROUP,), "scales")), nominal_bits=4)

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Quantize each group of 32 channels; in float32, operation by operation as ggml does."""
        groups = x.unflatten(-1, (-1, GROUP))
        loudest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # the first one where several are
        # an all-zero group has d = -0, as in ggml, whose maximum starts from 0
        d = (torch.where(loudest == 0, 0.0, loudest) / -8).clamp(-FP16_MAX, FP16_MAX)
        inverse = torch.where(d.abs() >= SMALLEST, d.reciprocal(), 0.0)
        codes = (groups * inverse).add_(8.5).clamp_(0, 15).to(torch.uint8)  # truncates
        # channels j and j + 16 of a group share a byte
        codes = codes.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-3)
        return {"codes": pack(codes, 4), "scale": d[..., 0].half()}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        packed = payload["codes"]
        codes = unpack(packed, 4, packed.shape[-1] * 2).unflatten(-1, (-1, GROUP // 2, 2)).transpose(-1, -2)
        return codes.flatten(-2).float().sub_(8).mul_(payload["scale"].float()[..., None]).flatten(-2)


@register("q4_0", source="llama.cpp: ggml q4_0, rotation of pull request 21038", mark="baseline")
def q4_0(rotate: Literal["kv", "k", "none"] = "kv", *, window: int = 0) -> KVScheme:
    """llama.cpp's q4_0 cache: blocks of 32 with one fp16 scale, Hadamard-rotated.

    Parameters
    ----------
    rotate : {"kv", "k", "none"}
        Roles that are rotated; kv is llama.cpp's default for quantized caches, none its behaviour before April 2026.
    window : int
        Newest tokens that stay in 16 bit; llama.cpp has none.
    """
    key, value = Q40("none" if rotate == "none" else "whole"), Q40("64" if rotate == "kv" else "none")
    return KVScheme(key=key, value=value, window=window)
