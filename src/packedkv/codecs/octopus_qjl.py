"""OCTOPUS-QJL: octahedral keys and one bit per coordinate of their residual. arXiv:2605.21226, Sec. 3.6, C.15.

    codes, gamma, u^ = OCTOPUS                               codecs/octopus.py; all b of its bits
    r = u - u^                                               rotated unit-vector scale, u^ as the decoder has it
    sigma = sign(R' r),  g = |r|                             R' orthonormal, its signs s' independent of s; sign(0) = +1
    k^ = gamma s * H (u^ + g sqrt(pi / (2 D)) R'^T sigma)    ops/qjl

The paper corrects scores, gamma (<R q, u^> + sqrt(pi / (2 D)) g <R' R q, sigma>) with R of Eq. 2. That is linear in q:
it is <q, k^> of the vector above, and any attention over decoded keys has it. E <q, k^> = <q, k> over s'.

Block (one token of one head); one code of w = 2 b_dir + b_nrm bits for each of T = ceil(D/3) triplets; bit 1 of
``signs`` is +1::

    codes     uint8          [16 h]                   as in codecs/octopus.py
    tail      uint8          [ceil(T w / 8) - 16 h]
    norm      fp16 or fp32   [1]                      gamma / sqrt(D)
    signs     uint8          [D / 8]                  sigma, coordinate 0 in the lowest bit
    residual  fp16           [1]                      g

Bits: (8 ceil(T w / 8) + 32) / D + 1, with fp32 norms + 16 / D: OCTOPUS' and 1.125. D = 128, T = 43::

    b                  2 (3,1)   3 (4,2)   4 (5,3)   plus: (3,2)   (4,3)   (5,4)     1 (1,1)
    bytes, fp16 norm        58        74        90            63      80      96          37
    bits, fp16 norm      3.625     4.625     5.625        3.9375     5.0     6.0      2.3125
    bits, fp32 norm       3.75      4.75      5.75        4.0625   5.125   6.125      2.4375
    paper's streams     3.8125      4.75    5.9375        two byte-grouped streams, fp32 norm

The error of k^ has pi/2 - 1 = .571 of OCTOPUS' energy (.753 of its rms at D = 128), and scores are no longer short by
.068 at b = 2 (``scalar``). Mean |q.k - q.k^| of N(0, I) keys and queries, D = 128::

    b                      2       3       4
    scalar             2.017   1.082    .566     Table 1; without QJL 2.685, 1.447, .754
    local_3x3          1.943   1.047    .548

Deviations from the paper
1. Those of OCTOPUS: norm held as a root mean square in fp16, one joint stream of codes, block-diagonal rotation.
2. R' is orthonormal, as the paper's is. It is not QJL's Gaussian matrix, for which there is no option: that one
   multiplies the error energy by pi/2 - 1/D = 1.56, so with it the residual makes scores worse.
3. D that is no power of two: R' mixes all coordinates though the rotation does not; blocks would bias scores (ops/qjl).
4. The cosine and MSE columns of Table 1 leave the residual out (they equal OCTOPUS' own); ``decode`` includes it.

Pitfalls: the signs cost a whole bit. At equal true bits plain OCTOPUS has the smaller error: b = 3 (3.5 bits, 1.398)
against 1.943 here at b = 2 (3.625). QJL is for scores that must not be short on average, not for smaller errors.

Use: unbiased attention scores from few bits: shrunk scores flatten the softmax, so one key among very many keeps less
of its mass (synthetic needle, b = 2: .958 of the mass here, .914 in octopus with scalar rounding, .960 exact).

Not for: least error per bit: the sketch's bit per coordinate buys a factor 1.75 in error energy, one more bit of
octopus a factor 3.5.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from packedkv.codec import NO_SAMPLE, Constant, Constants, Params, Payload, Sample, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.octopus import Octopus, Rounding, Split, split_bits
from packedkv.errors import SpecError
from packedkv.layout import Layout
from packedkv.ops.hadamard import Norm, random_signs
from packedkv.ops.qjl import estimate, sketched, sketched_layout
from packedkv.registry import register
from packedkv.scheme import KVScheme


@dataclass(frozen=True)
class OctopusQJL(Octopus):
    """OCTOPUS and the signs of a sketch of its residual; the residual's length is fp16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "own":
            raise SpecError(f"octopus-qjl: scale={self.scale!r} is not allowed; only octopus searches scales.")

    def layout(self, head_dim: int) -> Layout:
        return sketched_layout("octopus-qjl", super().layout(head_dim))

    def constants(self, site: Site) -> Constants:
        return {**super().constants(site), "sketch": Constant((site.num_heads, site.head_dim), low=-1, high=1)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Add ``sketch [1, H, D]``, s', sampled apart from s, to OCTOPUS' constants."""
        return {**super().fit(site), "sketch": random_signs(site, stream=1)}

    def encode(self, x: Tensor, params: Params) -> Payload:
        """Encode as OCTOPUS does, then sketch the residual of the unit vector."""
        payload = super().encode(x, params)
        return sketched(payload, lambda u, own: self.unit(u)[0] - self.look_up(own, params), x, params["sketch"])

    def decode(self, payload: Payload, params: Params) -> Tensor:
        """Add the residual's estimate to the triplets, then scale."""
        r = estimate(payload["signs"], payload["residual"], params["sketch"])
        return (self.look_up(payload, params) + r) * self.length(payload["norm"], params["signs"].shape[-1])


@register(
    "octopus-qjl",
    source="OCTOPUS, arXiv:2605.21226, Sec. 3-4; QJL, arXiv:2406.03482",
    presets=("octopus-qjl-4", "octopus-qjl-3", "octopus-qjl-2"),
)
def octopus_qjl(
    bits: Literal[1, 2, 3, 4] = 4,
    rounding: Rounding = "local_3x3",
    split: Split = "paper",
    window: int = 32,
    group: int = 32,
    dense_keys: int = 1,
    norm: Norm = "fp16",
) -> KVScheme:
    """Octahedral keys with unbiased scores, by 1-bit QJL residuals; the rest as in octopus.

    Parameters
    ----------
    bits : {1, 2, 3, 4}
        The paper's b of keys and values; keys cost b + 1/3 bits, one more for the residual's sign, and two norms.
    split : {"paper", "plus", -2, -1, 0, 1, 2}
        (b_dir, b_nrm): paper (b+1, b-1), plus (b+1, b), a number d (b+d, b-d).
    dense_keys : int
        How many of the first and of the last layers keep keys dense.
    """
    key, value = OctopusQJL(*split_bits(bits, split), rounding, norm), GroupInt(max(2, bits), group, "channels")
    return KVScheme(key=key, value=value, window=window, dense_key_layers=dense_keys)
