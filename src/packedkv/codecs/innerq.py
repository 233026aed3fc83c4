"""InnerQ: groups along the inner dimension, symmetric or hybrid; keys normalised per channel. InnerQ, Sec. 4.

Groups of G = 32 along what the matrix-vector product reduces over: channels of ONE token for keys, tokens of ONE
channel for values.

    symmetric    S = fp16(max |x| / L)          code = clip(rne(x / S), lo, hi)          x^ = S code          Eq. 13
    asymmetric   Z = fp16(min x), S = fp16((max x - Z) / (2^b - 1)), code in 0..2^b - 1   x^ = S code + Z      Eq. 10-12
    hybrid       both; asymmetric (M = 1) where its squared error is smaller              x^ = S code + M Z

Three readings of the symmetric codes of "b bits" (``symmetric``)::

    reading    L            lo..hi              levels at b = 3, 2    true bits
    literal    2^b - 1      -L..L               15, 7                 b + 1
    signed     2^(b-1) - 1  -L..L               7, 3                  b
    full       2^(b-1)      -L..L-1             8, 4                  b

The published accuracy and mask sparsity are those of ``literal`` (Eq. 13 as printed), the published bits those of b.

Keys are divided by norm_k = sqrt(max over the prefill |K_k|) per KV head and channel (0 counts as 1), frozen, and
queries multiplied by it; both channels (i, i + D/2) of a rotary pair share the larger one.

Blocks, w = true bits of a code::

    keys, one token of one head            values, 32 tokens of one head
    codes  uint8  [D w / 8]                codes  uint8  [32, D w / 8]
    scale  fp16   [ceil(D / 32)]           scale  fp16   [D]     sign bit = M (hybrid)
                                           zero   fp16   [D]     hybrid only

Symmetric codes are stored as code + 2^(w-1), asymmetric ones as they are.

Bits: w + 16/32, hybrid w + 32/32. literal: base 4.5 + 4.5, small 4.5 + 3.5 = 4.0, hybrid 4.5 + 4.0 = 4.25; signed and
full: 3.5, 3.0, 3.25 as published. The first 32 and AT LEAST the newest 96 tokens stay dense (keys leave one by one,
values in groups of 32 whose edges lie at 32 + 32 j); they and the norms are not counted here.

Deviations from the paper
1. Eq. 13 needs one bit more than the paper counts; it is counted here.
2. The paper folds norm_k into W_Q and W_K, per channel. Before RoPE that changes the logits unless a pair shares its
   norm; here it is shared and applied to cached keys and queries, so batched prompts each have their own.
   ``integrations.transformers.fold.fold_key_norms`` folds the norms of one prompt into a model's weights; use
   ``norm=false`` there.
3. The hybrid metric is unstated: squared error, a tie is symmetric. Codes are computed with the stored S.
4. "The last 96 tokens" could also be read as at most 96 (values 65 to 96); only the other reading is offered.

Pitfalls: hybrid gains nothing over small on centred data (fewer than 1 group in 1000 is asymmetric with ``literal``).
``symmetric=signed`` at two bits has three levels (relative MSE 0.43). A channel that is tiny in the prefill gets a tiny
norm: the scale of a later, large key is clipped where S would exceed 65504.

Use: batch-1 decode on devices with little bandwidth: groups lie along the dimension that each product reduces over, so
a scale is applied once per partial sum.

Not for: contexts below about a thousand tokens (128 stay in 16 bit), batches that share folded weights, counting on the
published 3.25 bits at the published accuracy.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from packedkv.checks import needed
from packedkv.codec import FP16_MAX, NO_SAMPLE, Codec, Constant, Constants, Params, Part, Payload, Sample, Site, one_of
from packedkv.codecs.group_int import Along, grid_fields
from packedkv.errors import SpecError
from packedkv.layout import Layout, check_head_dim
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.groups import fp16_scale, split_channels, spread_channels
from packedkv.ops.sums import sum_by_halves
from packedkv.registry import register
from packedkv.scheme import KVScheme

Reading = Literal["literal", "signed", "full"]

GROUP = 32


@dataclass(frozen=True)
class InnerQ(Codec):
    """Symmetric or hybrid integers in groups of 32.

    Parameters
    ----------
    bits : {2, 3}
        The paper's b.
    along : {"channels", "tokens"}
        Axis of a group.
    symmetric : {"literal", "signed", "full"}
        Reading of b-bit symmetric codes; literal is Eq. 13 and takes b + 1 bits, the others b.
    hybrid : bool
        The better of symmetric and asymmetric per group; along tokens only.
    norm : bool
        Divide key channels by norms fitted on the prefill.
    """

    bits: int = one_of(2, 3, default=3)
    along: Along = "channels"
    symmetric: Reading = "literal"
    hybrid: bool = False
    norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hybrid and self.along != "tokens":
            raise SpecError(f"InnerQ: along={self.along!r} with hybrid is not allowed; use tokens.")

    @property
    def block_tokens(self) -> int:
        return GROUP if self.along == "tokens" else 1

    @property
    def needs(self) -> frozenset[Part]:
        return frozenset({"tensor"} if self.norm else ())

    @property
    def width(self) -> int:
        """True bits w of a code."""
        return self.bits + (self.symmetric == "literal")

    @property
    def steps(self) -> int:
        """L of the reading."""
        return 2 ** (self.width - 1) - (self.symmetric != "full")

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("innerq", head_dim)
        fields = grid_fields(head_dim, self.width, GROUP, self.along, zero=self.hybrid)
        return Layout(head_dim, self.block_tokens, fields, nominal_bits=float(self.width))

    def constants(self, site: Site) -> Constants:
        return {"norm": Constant.sizes(site.num_heads, site.head_dim)} if self.norm else {}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Take the norms of each sequence: ``norm [B, H, D]`` float32, or nothing without ``norm``."""
        if not self.norm:
            return {}
        pairs = needed("innerq: norm=true", sample.tensor, ", use norm=false").unflatten(-1, (2, -1))
        most = torch.linalg.vector_norm(pairs, torch.inf, (2, 3), dtype=torch.float32)
        norm = most.double().sqrt_().float()  # torch's root of a float is not rounded alike on all machines
        norm.masked_fill_(norm == 0, 1.0)
        return {"norm": torch.cat([norm, norm], -1).to(site.device)}

    def to_code(self, x: Tensor, params: Params) -> Tensor:
        return x.float() / params["norm"].unsqueeze(2) if self.norm else x

    def query_to_code(self, q: Tensor, params: Params) -> Tensor:
        return self.from_code(q, params)

    def from_code(self, x: Tensor, params: Params) -> Tensor:
        return x * params["norm"].unsqueeze(2) if self.norm else x

    def encode(self, x: Tensor, params: Params) -> Payload:
        dim = x.shape[-1]
        if self.along == "tokens":
            x = x.unflatten(2, (-1, GROUP))  # [B, H, M, 32, D]
            low, high = x.amin(-2), x.amax(-2)
        else:
            groups = split_channels(x, GROUP)
            low, high = groups.amin(-1), groups.amax(-1)
        scale = fp16_scale(torch.maximum(high, -low), self.steps)
        s = self._spread(scale, dim)
        top = self.steps - (self.symmetric == "full")
        codes = (x / s).round_().clamp_(-self.steps, top)
        offset = 2 ** (self.width - 1)
        if not self.hybrid:
            return {"codes": pack((codes + offset).to(torch.uint8), self.width), "scale": scale}
        # asymmetric codes of the same groups, kept where their error is smaller
        zero = low.clamp(-FP16_MAX, FP16_MAX).half()
        most = 2**self.bits - 1
        other_scale = fp16_scale(high - zero.float(), most, zero.float())
        t, z = self._spread(other_scale, dim), self._spread(zero, dim)
        other = ((x - z) / t).round_().clamp_(0, most)
        mask = _group_error(other * t + z - x) < _group_error(codes * s - x)  # [B, H, M, D]
        codes = torch.where(mask.unsqueeze(-2), other, codes + offset)
        return {
            "codes": pack(codes.to(torch.uint8), self.width),
            "scale": torch.where(mask, -other_scale, scale),
            "zero": zero,
        }

    def decode(self, payload: Payload, params: Params) -> Tensor:
        dim = payload["codes"].shape[-1] * 8 // self.width
        codes = unpack(payload["codes"], self.width, dim).float()
        scale = self._spread(payload["scale"], dim)
        offset = 2 ** (self.width - 1)
        if self.hybrid:
            mask = torch.signbit(scale)
            codes = torch.where(mask, codes, codes - offset) * scale.abs()
            x = codes + torch.where(mask, self._spread(payload["zero"], dim), 0.0)
        else:
            x = (codes - offset) * scale
        return x.flatten(2, 3) if self.along == "tokens" else x

    def _spread(self, numbers: Tensor, head_dim: int) -> Tensor:
        """Give every element of a block its group's number in float32, ready to broadcast."""
        if self.along == "tokens":
            return numbers.float().unsqueeze(-2)
        return spread_channels(numbers.float(), GROUP, head_dim)


def _group_error(difference: Tensor) -> Tensor:
    """Squared error over the 32 tokens in float64, ``[B, H, M, D]``."""
    return sum_by_halves(difference.double() ** 2, -2).squeeze(-2)


@register(
    "innerq",
    source="InnerQ: Hardware-Aware Tuning-Free Quantization of KV Cache, Sec. 4",
    presets={f"innerq-{variant}": {"variant": variant} for variant in ("base", "small", "hybrid")},
)
def innerq(
    variant: Literal["base", "small", "hybrid"] = "base",
    symmetric: Reading = "literal",
    norm: bool = True,
    sink: int = 32,
    window: int = 96,
) -> KVScheme:
    """Integers grouped along the inner dimension: keys along channels and normalised, values along tokens.

    Parameters
    ----------
    variant : {"base", "small", "hybrid"}
        Values: base 3-bit symmetric, small 2-bit symmetric, hybrid the better of 2-bit symmetric and asymmetric.
    window : int
        Newest tokens that stay in 16 bit, at least.
    """
    value = InnerQ(3 if variant == "base" else 2, "tokens", symmetric, hybrid=variant == "hybrid")
    return KVScheme(key=InnerQ(3, "channels", symmetric, norm=norm), value=value, sink=sink, window=window)
