"""Ultra-TQ (TQ4/4): 16 centroids for rotated keys, 4-bit integers for values. arXiv:2606.20474, Sec. 4, Alg. 2.

    y = k H                               orthonormal Hadamard, no signs
    s = fp16(sqrt(mean y^2))              per token and head, or per 32 channels (norm=block)
    code = argmin_j |y / s - c_j|         16 Lloyd-Max levels of a distribution of variance 1
    y^ = s c_code
    values: Z = fp16(min), S = fp16((max - Z) / 15), v^ = S code + Z      per 32 channels (``group_int``)

In the paper's scale, y / |y| over n channels, a level is c_j / sqrt(n). The distribution (``table``)::

    gaussian     N(0, 1), whatever n; largest level 2.7326 = 0.34157 sqrt(64), the paper's 0.342
    sphere       one coordinate of a uniform vector of length sqrt(n); n = 64: 2.6464 = 0.33080 sqrt(64)
    calibrated   Lloyd's iteration on the keys of a sample, mirrored about 0; one table per layer. ``packedkv fit``
                 keeps it in the ceil(refit n) of n layers that the Gaussian table serves worst; the others keep it

Blocks (one token of one head; g = ceil(D / 32), the last group shorter when 32 does not divide D)::

    keys                                   values
    codes  uint8  [D/2]                    codes  uint8  [D/2]     low nibble = channel 2i, high nibble = channel 2i+1
    norm   fp16   [1], or [g] per block    scale  fp16   [g]
                                           zero   fp16   [g]

A block's norm is stored over 2^r, r = ceil(log2(h / 32) / 2) for a rotation of order h > 32, so that it stays an fp16
number where the rotation gathers a whole key in one block; r = 0 otherwise and for token norms.

Bits: keys 4 + 16/D (norm=block: 4 + 16 g/D), values 4 + 32 g/D; D = 128: 66 bytes, 4.125, and 80 bytes, 5.0, together
4.5625. The first two and the last two layers are dense, as in all of the paper's results.

Deviations from the paper
1. Norm per token is Secs. 4.1, 5.3 and B.1, norm per block is Alg. 2; the default is the former. It is stored as a root
   mean square in fp16 (the paper prints no bits).
2. The text names the sphere's distribution, but its 0.342 is the Gaussian's: that table is the default.
3. ``calibrated`` fits on the prefill unless constants are given, and then refits every layer that is not dense: a
   cache layer does not see the others. The paper's 10 % (``refit``) is chosen by ``packedkv fit``, on a
   text of the user's, by the mean of (y / s - c_code)^2 over the keys of a layer; the paper fits on some 20 vectors.
4. With norm=block, the sphere's table is that of 32 channels for a shorter last group as well. D that is no power of
   two: block-diagonal Hadamard (ops/hadamard).

Pitfalls
1. Without random signs a key whose channels are all alike becomes one spike, of which the top level reaches a third
   (D = 64): relative MSE 0.45. This rotation is for keys with large channels, not with a large mean.
2. Token norms share one scale among all channels: on keys that stay uneven after the rotation norm=block is better, at
   16 (g - 1) / D bits more.
3. ``calibrated`` on a prefill of several sequences fits one table for all of them, so a sequence's bytes depend on its
   neighbours; constants from ``packedkv fit`` do not.

Use: 4-bit keys where values need per-group offsets: the accuracy variant of UltraQuant, 4.56 bits per element (D = 128)
outside the four dense layers, which weigh most in shallow models: 6.1 bits in all with 30 layers of D = 64.

Not for: keys with a large common mean, or a budget of 4.25 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from packedkv.checks import needed
from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Part, Payload, Sample, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, unpack
from packedkv.ops.groups import group_count, spread_channels
from packedkv.ops.hadamard import Rotated, power_of_two_divisor
from packedkv.ops.lloyd_max import nearest_level, normal_levels, sample_levels, unit_levels
from packedkv.ops.scale_search import Scale, quantized
from packedkv.ops.sums import sum_by_halves
from packedkv.registry import register
from packedkv.scheme import KVScheme

Norm = Literal["token", "block"]
Table = Literal["gaussian", "sphere", "calibrated"]

GROUP = 32
LEVELS = 16
SAMPLE = 1 << 19
"""Elements that a calibration looks at; tokens are skipped evenly beyond that."""


@dataclass(frozen=True)
class UltraTQ(Rotated, Codec):
    """Rotated, normalised, nearest of 16 levels: the keys of Ultra-TQ.

    Parameters
    ----------
    norm : {"token", "block"}
        One key norm per token, or per 32 channels.
    table : {"gaussian", "sphere", "calibrated"}
        Centroids: Lloyd-Max of the normal law (the paper's production table), of the exact law of a rotated unit
        vector, or of the layer's own keys.
    refit : float
        With table=calibrated and ``packedkv fit``: share of the layers, those with the largest error, that keep their
        own centroids; 1 for all. Fitted on a prefill, all layers do.
    """

    norm: Norm = "token"
    table: Table = "gaussian"
    refit: float = 0.1
    scale: Scale = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.refit <= 1:
            raise SpecError(f"ultra-tq: refit={self.refit} is not allowed; use a share of the layers, 0 to 1.")

    @property
    def needs(self) -> frozenset[Part]:
        return frozenset({"tensor"} if self.table == "calibrated" else ())

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("ultra-tq", head_dim)
        fields = (
            Field("codes", "uint8", (head_dim // 2,)),
            Field("norm", "float16", (group_count(head_dim, self.group),), "norms"),
        )
        return Layout(head_dim, 1, fields, nominal_bits=4.0)

    @property
    def group(self) -> int:
        """Channels that share a norm; 0 for all of them."""
        return 0 if self.norm == "token" else GROUP

    def constants(self, site: Site) -> Constants:
        return {"levels": Constant((16,), low=-(site.head_dim**0.5), high=site.head_dim**0.5)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Tabulate the levels, ascending and symmetric, for coordinates of mean square 1.

        With queries (a calibration) and table=calibrated also ``error [1, 1]`` float32 for ``settle``: the mean of
        (y / s - c_code)^2 over the sample, Gaussian levels.
        """
        params: dict[str, Tensor] = {}
        if self.table == "gaussian":
            levels = normal_levels(LEVELS)
        elif self.table == "sphere":
            channels = min(self.group or site.head_dim, site.head_dim)
            levels = unit_levels(channels, LEVELS) * channels**0.5
        else:
            u = self._coordinates(needed("ultra-tq: table=calibrated", sample.tensor, ", use table=gaussian"))
            gaussian = normal_levels(LEVELS)
            levels = sample_levels(u, gaussian)
            if sample.queries is not None:
                gaussian = gaussian.to(u.device)
                error = ((u - gaussian[nearest_level(gaussian)(u)]) ** 2).sum() / max(1, len(u))
                params["error"] = error.float().view(1, 1).to(site.device)
        return {"levels": levels[None].float().to(site.device), **params}

    def settle(self, fitted: Sequence[Params]) -> list[Params]:
        """Keep calibrated levels in the layers with the largest ``error`` (Sec. 4.1); the others get the Gaussian's."""
        if self.table != "calibrated":
            return list(fitted)
        keep = math.ceil(self.refit * len(fitted) - 1e-9)  # 0.07 * 100 is 7.000000000000001
        worst = sorted(range(len(fitted)), key=lambda i: -float(fitted[i]["error"]))[:keep]
        levels = [params["levels"] for params in fitted]
        gaussian = normal_levels(LEVELS)[None].float()
        return [{"levels": x if i in worst else gaussian.to(x.device)} for i, x in enumerate(levels)]

    def _coordinates(self, sample: Tensor) -> Tensor:
        """Rotated keys over their stored norms, float64 ``[n]``; keys of zeros have no shape to learn from."""
        step = max(1, sample.numel() // SAMPLE)
        y = self.to_code(sample[:, :, ::step].float(), {})
        channel_norms = self._channel_norms(self._norms(y), y.shape[-1])
        return (y.double() / channel_norms)[(channel_norms > 0).expand_as(y)]

    def encode(self, x: Tensor, params: Params) -> Payload:
        search = nearest_level(params["levels"][0].double())

        def quantize(rows: Tensor, factor: float) -> tuple[Tensor, Tensor]:
            norm = self._norms(rows, factor)
            channel_norms = self._channel_norms(norm, rows.shape[-1])
            return search(torch.where(channel_norms > 0, rows.double() / channel_norms, 0.0)).to(torch.uint8), norm

        codes, norm = quantized(x, quantize, partial(self._value, params), self.scale, self.group)
        return {"codes": pack(codes, 4), "norm": norm}

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return self._value(params, unpack(payload["codes"], 4, payload["codes"].shape[-1] * 2), payload["norm"])

    def _value(self, params: Params, codes: Tensor, norm: Tensor) -> Tensor:
        return params["levels"][0][codes.int()] * self._channel_norms(norm, codes.shape[-1]).float()

    def _norms(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """Root mean squares times ``factor``, as stored: fp16 ``[..., groups]``; sums by halves."""
        dim = x.shape[-1]
        size = self.group or dim
        squares = x.double() ** 2
        squares = torch.nn.functional.pad(squares, (0, -dim % size)).unflatten(-1, (-1, size))
        total = sum_by_halves(squares)[..., 0]
        count = torch.full_like(total, size)
        if dim % size:
            count[..., -1] = dim % size
        return ((total / count).sqrt() * factor / self.unit(dim)).half()

    def _channel_norms(self, norm: Tensor, head_dim: int) -> Tensor:
        """Norm of every channel in float64, from the stored numbers; token norms stay ``[..., 1]`` and broadcast."""
        wide = norm.double() * self.unit(head_dim)
        return spread_channels(wide, self.group, head_dim) if self.group else wide

    def unit(self, head_dim: int) -> float:
        """2^r: a rotation can gather h channels in one, so a block's norm may exceed every element's range."""
        if not self.group:
            return 1.0
        return 2.0 ** max(0, math.ceil(math.log2(power_of_two_divisor(head_dim) / self.group) / 2))


@register("ultra-tq", source="Ultra-TQ (TQ4/4), arXiv:2606.20474, Sec. 4, Alg. 2", presets={"ultra-tq": {}})
def ultra_tq(
    norm: Norm = "token",
    table: Table = "gaussian",
    refit: float = 0.1,
    group: int = 32,
    dense_layers: int = 2,
    scale: Scale = "own",
) -> KVScheme:
    """Keys rotated, normalised and rounded to 16 centroids, values group-wise 4-bit integers, outer layers dense.

    Parameters
    ----------
    dense_layers : int
        How many of the first and of the last layers keep keys and values dense.
    """
    key, value = UltraTQ(norm, table, refit, scale=scale), GroupInt(4, group, "channels", scale=scale)
    return KVScheme(key=key, value=value, dense_key_layers=dense_layers, dense_value_layers=dense_layers)
