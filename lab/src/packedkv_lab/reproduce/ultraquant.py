"""UltraQuant and Ultra-TQ, arXiv:2606.20474: bits of the layout, reach of the centroids, the best constant c."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from packedkv.codec import Site
from packedkv.codecs.ultraquant import E2M1_MAGNITUDES, GROUP, UltraQuant
from packedkv.ops.lloyd_max import midpoints
from packedkv.registry import get
from packedkv_lab.reproduce.claims import Figures, recomputes


@recomputes("ultraquant", "Secs. 5.1, 7")
def ultraquant_layout(quick: bool) -> Figures:
    """Bytes and bits of the layout."""
    codec = UltraQuant()
    yield "32 channels", "bytes", codec.layout(32).block_bytes
    yield "UltraQuant, d=128", "bits", get("ultraquant").effective_bits(128)
    yield "UltraQuant over 4 bits", "percent", 100 * (codec.layout(128).effective_bits / 4 - 1)
    yield "UltraQuant", "ratio_to_fp8", 8 / get("ultraquant").effective_bits(128)


@recomputes("ultraquant", "Sec. 4.1")
def ultra_tq_reach(quick: bool) -> Figures:
    """Largest of the theoretical centroids of a key of length 1, d = 64."""
    levels = get("ultra-tq:table=gaussian").key.fit(Site(0, "key", 1, 64))["levels"][0]
    yield "Lloyd-Max, d=64, normal", "largest_level", float(levels[-1]) / 8


@recomputes("ultraquant", "App. B.2")
def ultraquant_c(quick: bool) -> Figures:
    """Best constant for scales that are powers of two, by quadrature over an octave of magnitudes."""
    yield "power-of-two scales", "best_c", minimum(octave_error, 0.15, 0.25)


@lru_cache(maxsize=1)
def group_law() -> tuple[float, Tensor, Tensor]:
    """Normal groups of ``GROUP`` numbers as multiples ``t`` of their largest magnitude m, for quadrature.

    Returns ``top``, ``t`` and ``weights``: the expected squared error of rounding a group to ``m r(t)``, per element of
    variance 1, is ``top (1 - r(1))^2 + sum weights (t - r(t))^2``. Integrated over m to 9, by midpoints in float64.
    """
    nodes, reach = 2000, 9.0
    m = (torch.arange(nodes, dtype=torch.float64) + 0.5) * (reach / nodes)
    t = (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes
    below = torch.erf(m / math.sqrt(2))
    mass = 2 * _phi(m) * below ** (GROUP - 1) * (reach / nodes) * m**2
    weights = torch.zeros_like(t)
    for some, share in zip(m.split(500), (mass * (GROUP - 1) * m / below / nodes).split(500), strict=True):
        weights += share @ (2 * _phi(some[:, None] * t))
    return float(mass.sum()), t, weights


def _phi(x: Tensor) -> Tensor:
    return (-x * x / 2).exp() / math.sqrt(2 * math.pi)


def real_error(c: float) -> float:
    """Relative MSE of normal groups with the scale ``c m``, Eq. 2, exact."""
    top, t, weights = group_law()
    grid = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64) * c
    error = (t - grid[torch.bucketize(t, midpoints(grid))]) ** 2
    return top * float((1 - grid).square().min()) + float(weights @ error)


def octave_error(c: float, steps: int = 64) -> float:
    """Relative MSE with the power of two nearest to ``c m``, mean over magnitudes spread evenly over an octave."""
    return sum(real_error(c * 2 ** ((i + 0.5) / steps - 0.5)) for i in range(steps)) / steps


def minimum(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a unimodal function has its minimum, by golden section."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = error(a), error(b)
    while high - low > 3e-5:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = error(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = error(b)
    return (low + high) / 2
