"""TurboQuant, arXiv:2504.19874, and PolarQuant, arXiv:2502.02617: distortions, exact and measured."""

import math

import torch
from torch import Tensor

from packedkv.codec import Site, roundtrip
from packedkv.codecs.polarquant import PolarQuant, angle_levels, tree
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL
from packedkv.ops.lloyd_max import distortion, lloyd_max, midpoints
from packedkv_lab.reproduce.claims import NOT_PRINTED, Figures, recomputes
from packedkv_lab.reproduce.measure import fidelity

STAGE = {2: 0.360889, 3: 0.116000, 4: 0.033966}
"""Relative MSE of the first stage of TurboQuant-QJL by total bits, d = 128."""


@recomputes("turboquant", "Theorem 1", seconds=3)
def mse(quick: bool) -> Figures:
    """Relative MSE at b = 1 to 4: in the limit of large d, and of the codec at d = 128."""
    for bits in (1, 2, 3, 4):
        book = lloyd_max(_gaussian, 2**bits, -8.0, 8.0, symmetric=True)
        yield f"b={bits}, d without bound", "relative_mse", distortion(_gaussian, book, -8.0, 8.0)
        yield f"b={bits}, d=128", "relative_mse", fidelity(TurboQuant(bits, "fp32"), 2 if quick else 8, 2048).mse


@recomputes("turboquant", "Theorem 2", seconds=3)
def inner_products(quick: bool) -> Figures:
    """d times the variance of an estimated score of unit vectors, total bits b."""
    for bits in (2, 3, 4):
        variance = fidelity(TurboQuantQJL(bits, "fp32"), 2 if quick else 8, 2048).mse
        yield f"b={bits}, d=128", "d x variance", variance
        yield f"b={bits}, Gaussian sketch", "d x variance", math.pi / 2 * STAGE[bits]


@recomputes("polarquant", NOT_PRINTED, seconds=3)
def polar(quick: bool) -> Figures:
    """2 (1 - E cos) at d = 128, all angles with b bits: the product over levels of E cos of the angle's error."""
    k = torch.randn(1, 1, 2048, 128, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 4):
        codec = PolarQuant(bits, "fp32")
        yield f"b={bits}, closed form", "relative_mse", closed_form(bits)
        yield f"b={bits}, codec", "relative_mse", fidelity(codec, 2 if quick else 8, 2048).mse
        length = roundtrip(codec, k, codec.fit(Site(0, "key", 1, 128))).norm(dim=-1) / k.norm(dim=-1)
        yield f"b={bits}, length kept", "|k^|/|k|", float(length.mean())


def closed_form(bits: int) -> float:
    """2 (1 - E cos); level 1's angle is uniform, the others have the law of ``angle_levels``."""
    half = math.pi / 2**bits
    cos = math.sin(half) / half
    for level in tree(128):
        _, m, n = level[0]
        cos *= _mean_cos(angle_levels(m, n, bits), m)
    return 2 * (1 - cos)


def _mean_cos(levels: Tensor, m: int) -> float:
    """E cos of the distance to the nearest level, density sin(2 psi)^(m-1) on [0, pi/2]."""
    psi = (torch.arange(200_000, dtype=torch.float64) + 0.5) * (math.pi / 2 / 200_000)
    weight = (2 * psi).sin() ** (m - 1)
    near = levels[torch.bucketize(psi, midpoints(levels))]
    return float((weight * (psi - near).cos()).sum() / weight.sum())


def _gaussian(x: Tensor) -> Tensor:
    return (-x.square() / 2).exp()
