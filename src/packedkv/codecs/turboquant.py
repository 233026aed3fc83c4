"""TurboQuant: scalar Lloyd-Max of a rotated unit vector; and with a 1-bit QJL residual. arXiv:2504.19874, Alg. 1-2.

TurboQuant-MSE, keys and values::

    gamma = |x|,  u = H (s * x / gamma)            s in {-1, +1}^D per head, H orthonormal Hadamard
    i_j = argmin_i |u_j - c_i|                     c: 2^b Lloyd-Max levels of f(t) ~ (1 - t^2)^((D-3)/2) on [-1, 1]
    x^ = gamma s * H c[i]                          no renormalisation: E |x^|^2 = (1 - MSE) |x|^2

TurboQuant-QJL, keys (values stay MSE at b bits): b - 1 bits as above and one sign per coordinate of what is left,
arXiv:2406.03482 with an orthonormal sketch R' of signs s' independent of s (ops/qjl)::

    r = u - c[i],  sigma = sign(R' r),  g = |r|                                    sign(0) = +1
    u^ = c[i] + g sqrt(pi / (2 D)) R'^T sigma                E <q, u^> = <q, u>: the estimator is linear, so it decodes

Block (one token of one head); w = b, or b - 1 with the last two fields for QJL keys; bit 1 of ``signs`` is +1::

    codes     uint8          [D w / 8]     coordinate 0 in the lowest bits (ops/bitpack)
    norm      fp16 or fp32   [1]           gamma / sqrt(D)
    signs     uint8          [D / 8]       QJL: sigma
    residual  fp16           [1]           QJL: g

Bits: b + 16/D, QJL keys b + 32/D; with fp32 norms + 16/D.

Relative MSE at D = 128: .1160 .03397 .00932 at b = 2, 3, 4. QJL has pi/2 - 1 = .57 of its stage's error energy and
unshrinks the scores, but its bit is worth a factor of 3 to 4: at equal b, MSE has the smaller error.

Deviations from the papers
1. The rotation is a signed Hadamard, not a dense orthogonal matrix: OCTOPUS' baselines (arXiv:2605.21226, Sec. 4) are
   built so. D that is no power of two: block-diagonal (ops/hadamard), which spreads an outlier channel less. R' is not:
   blocks would bias the scores (ops/qjl).
2. The sketch is orthonormal. A Gaussian one (coefficient sqrt(pi/2) / D) multiplies the error energy by 1.56, not .57.
3. The norm is stored as the root mean square, in fp16 (``norm=fp32`` is the paper's): |x| < 2^-25 sqrt(D) gives zeros.

``variant=printed`` is for reproducing Table 1 of OCTOPUS only. The TurboQuant-QJL scores printed there leave out the
residual: they fit signs INDEPENDENT of r at the coefficient sqrt(pi/2) / D on an orthonormal sketch, an error
energy of 1 + pi/(2D); why is unknown. Here the decoder's R'' is sampled apart from the encoder's R', so that the bytes
are the correct variant's and only their reading is wrong: mean score error 5.44 instead of 4.06 at b = 2.

Pitfalls: TurboQuant-MSE scores are short by the relative MSE (slope -.116 at b = 2). ``bits`` of QJL counts the sign.

Use: a strong scalar baseline at any width from 1 to 6 bits, no groups, no calibration; at equal true bits hard to beat
on keys without structure.

Not for: keys that are far from isotropic after rotation (head_dim 80). ``turboquant-qjl`` is for unbiased scores, not
for least error: its sign bit gains less than one bit of TurboQuant-MSE, and on the small model turboquant-3 is better
in fewer bytes.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from packedkv.codec import NO_SAMPLE, Codec, Constant, Constants, Params, Payload, Sample, Site, one_of
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout, check_head_dim
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.hadamard import Norm, UnitRotated, random_signs
from packedkv.ops.lloyd_max import nearest_level, unit_levels
from packedkv.ops.qjl import estimate, sketched, sketched_layout
from packedkv.ops.scale_search import Scale, quantized
from packedkv.ops.sums import in_pieces
from packedkv.registry import register
from packedkv.scheme import KVScheme

Variant = Literal["correct", "printed"]


@dataclass(frozen=True)
class TurboQuant(UnitRotated, Codec):
    """Lloyd-Max of every rotated, normalised coordinate: TurboQuant-MSE.

    Parameters
    ----------
    bits : {1, 2, 3, 4, 5, 6}
        Bits of a coordinate; the norm comes on top.
    """

    bits: int = one_of(1, 2, 3, 4, 5, 6, default=4)
    norm: Norm = "fp16"
    scale: Scale = field(default="own", kw_only=True)

    def layout(self, head_dim: int) -> Layout:
        check_head_dim("turboquant", head_dim)
        codes = Field("codes", "uint8", (packed_bytes(head_dim, self.bits),))
        return Layout(head_dim, 1, (codes, self.norm_field), nominal_bits=self.bits)

    def constants(self, site: Site) -> Constants:
        signs = Constant((site.num_heads, site.head_dim), low=-1, high=1)
        return {"signs": signs, "levels": Constant((2**self.bits,), low=-1, high=1)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        levels = unit_levels(site.head_dim, 2**self.bits)
        return {"signs": random_signs(site), "levels": levels[None].float().to(site.device)}

    def encode(self, x: Tensor, params: Params) -> Payload:
        search = nearest_level(params["levels"][0].double())

        def quantize(rows: Tensor, factor: float) -> tuple[Tensor, Tensor]:
            u, norm = self.unit(rows, factor)
            return search(u), norm

        def value(codes: Tensor, norm: Tensor) -> Tensor:
            return at(codes, params) * self.length(norm, x.shape[-1])

        def encoded(piece: Tensor) -> tuple[Tensor, Tensor]:
            codes, norm = quantized(piece, quantize, value, self.scale)
            return pack(codes, self.bits), norm

        return dict(zip(("codes", "norm"), in_pieces(encoded, x), strict=True))

    def decode(self, payload: Payload, params: Params) -> Tensor:
        return self.look_up(payload, params) * self.length(payload["norm"], params["signs"].shape[-1])

    def look_up(self, payload: Payload, params: Params) -> Tensor:
        """Levels of the codes: u^ in float32."""
        return at(unpack(payload["codes"], self.bits, params["signs"].shape[-1]), params)


def at(codes: Tensor, params: Params) -> Tensor:
    """Levels of integers: float32 of their shape."""
    return params["levels"][0].index_select(0, codes.flatten().int()).view(codes.shape)


@dataclass(frozen=True)
class TurboQuantQJL(TurboQuant):
    """TurboQuant-MSE at ``bits - 1`` and the signs of a sketch of its residual; the same rotation.

    Parameters
    ----------
    bits : {2, 3, 4}
        Bits of a coordinate, in keys with the residual's sign; norms come on top.
    variant : {"correct", "printed"}
        printed fits a published table whose residuals carry nothing; for reproduction only.
    """

    bits: int = one_of(2, 3, 4, default=3)
    variant: Variant = "correct"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "own":
            raise SpecError(f"turboquant-qjl: scale={self.scale!r} is not allowed; only turboquant searches scales.")

    @property
    def stage(self) -> TurboQuant:
        """The codec of the vector itself."""
        return TurboQuant(self.bits - 1, self.norm)

    def layout(self, head_dim: int) -> Layout:
        return sketched_layout("turboquant-qjl", self.stage.layout(head_dim))

    def constants(self, site: Site) -> Constants:
        constants = self.stage.constants(site)
        return {**constants, "sketch": constants["signs"], "sketch_back": constants["signs"]}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Add s' of the encoder and of the decoder, ``sketch`` and ``sketch_back [1, H, D]``, to the stage's."""
        signs = random_signs(site, stream=1)
        back = signs if self.variant == "correct" else random_signs(site, stream=2)
        return {**self.stage.fit(site), "sketch": signs, "sketch_back": back}

    def encode(self, x: Tensor, params: Params) -> Payload:
        stage = self.stage
        payload = stage.encode(x, params)
        return sketched(payload, lambda u, part: self.unit(u)[0] - stage.look_up(part, params), x, params["sketch"])

    def decode(self, payload: Payload, params: Params) -> Tensor:
        dim = params["signs"].shape[-1]
        r = estimate(payload["signs"], payload["residual"], params["sketch_back"])
        if self.variant == "printed":
            r = r * dim**-0.5  # the coefficient of a Gaussian sketch, on one of unit rows
        return (self.stage.look_up(payload, params) + r) * self.length(payload["norm"], dim)


@register(
    "turboquant",
    source="TurboQuant, arXiv:2504.19874, Alg. 1; OCTOPUS, arXiv:2605.21226, Sec. 4.1",
    presets=("turboquant-4", "turboquant-3", "turboquant-2"),
)
def turboquant(
    bits: Literal[1, 2, 3, 4, 5, 6] = 4, window: int = 0, norm: Norm = "fp16", scale: Scale = "own"
) -> KVScheme:
    """Scalar Lloyd-Max of rotated keys and values: TurboQuant-MSE."""
    codec = TurboQuant(bits, norm, scale=scale)
    return KVScheme(key=codec, value=codec, window=window)


@register(
    "turboquant-qjl",
    source="TurboQuant, arXiv:2504.19874, Alg. 2; QJL, arXiv:2406.03482",
    presets=("turboquant-qjl-3",),
)
def turboquant_qjl(
    bits: Literal[2, 3, 4] = 3, variant: Variant = "correct", window: int = 0, norm: Norm = "fp16"
) -> KVScheme:
    """Keys with unbiased scores, a bit less of Lloyd-Max and 1-bit QJL residuals; values TurboQuant-MSE."""
    return KVScheme(key=TurboQuantQJL(bits, norm, variant), value=TurboQuant(bits, norm), window=window)
