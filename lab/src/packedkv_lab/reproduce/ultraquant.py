"""UltraQuant and Ultra-TQ, arXiv:2606.20474: layout, constant c, distortions, centroids, sums of its tables."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from packedkv.codec import Codec, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.codecs.ultra_tq import UltraTQ, gaussian_levels
from packedkv.codecs.ultraquant import E2M1_MAGNITUDES, GROUP, UltraQuant, ue8m0_value
from packedkv.ops.groups import split_channels
from packedkv.ops.lloyd_max import block_norm_density, distortion, midpoints, sample_levels
from packedkv.registry import get
from packedkv_lab.reproduce.claims import NOT_PRINTED, Found, recomputes
from packedkv_lab.reproduce.measure import codec_error, gauss, relative_mse, unit_vectors

DEPLOYED, BEST_POW2 = 0.156, 0.195
BETWEEN = (0.10, 0.11, 0.12, 0.13, 0.15, 0.175, 0.205, 0.23, 0.27, 0.29)
"""Points of the sweep whose reference is quadrature (``real_error``, ``octave_error``)."""
SCORES = {
    "MiniMax-M2.5, GPQA-Diamond": (84.34, 82.32),
    "Qwen2.5-72B, GPQA-Diamond": (49.49, 51.01),
    "Qwen3.5-A3B, LCB-128K": (76.54, 74.07),
    "MiniMax-M2.5, LCB-128K": (75.82, 71.43),
    "Qwen3.5-A3B, AIME25": (90.00, 76.67),
    "MiniMax-M2.5, AIME25": (86.67, 76.67),
    "Qwen2.5-72B, AIME25": (20.00, 16.67),
    "Qwen3.5-A3B, MATH500": (86.00, 86.80),
}
"""Table 2: bf16 and UltraQuant, rows whose printed difference is not 0."""
SHARES = {"c=0.156": "67.4", "c=0.195 and FP8": "63.0", "c=1.0": "58.7"}
"""Table 4, percent of right answers."""


@recomputes("ultraquant", "Secs. 5.1, 7")
def ultraquant_layout(quick: bool) -> Found:
    """Bytes and bits of the layout."""
    codec = UltraQuant()
    yield "32 channels", "bytes", codec.layout(32).block_bytes
    yield "UltraQuant, d=128", "bits", get("ultraquant").effective_bits(128)
    yield "UltraQuant over 4 bits", "percent", 100 * (codec.layout(128).effective_bits / 4 - 1)
    yield "UltraQuant", "ratio_to_fp8", 8 / get("ultraquant").effective_bits(128)


@recomputes("ultraquant", "Sec. 4.1")
def ultra_tq_reach(quick: bool) -> Found:
    """Largest of the theoretical centroids at d = 64."""
    yield "Lloyd-Max, d=64, normal", "largest_level", _levels("gaussian")[-1]


@recomputes("ultraquant", "App. B.2")
def ultraquant_c(quick: bool) -> Found:
    """Best constant for scales that are powers of two, by quadrature over an octave of magnitudes."""
    yield "power-of-two scales", "best_c", _best_pow2()[0]


@recomputes("ultraquant", "Tables 2, 4, differences")
def ultraquant_differences(quick: bool) -> Found:
    """Differences that the tables take of their own accuracies; shares out of the fewest questions that fit them."""
    for item, (bf16, ours) in SCORES.items():
        yield f"Table 2, {item}", "points", ours - bf16
    questions = next(n for n in range(1, 1000) if all(_share(figure, n) is not None for figure in SHARES.values()))
    for item, figure in SHARES.items():
        yield f"Table 4, {item}", "percent", 100 * (_share(figure, questions) or 0) / questions
    deployed, fp8, one = map(float, SHARES.values())
    yield "Table 4, c=0.156 over FP8", "points", deployed - fp8
    yield "Table 4, c=1.0 over FP8", "points", one - fp8


def _share(percent: str, questions: int) -> int | None:
    """Right answers out of ``questions`` that print as ``percent``; None if there are none."""
    right = round(float(percent) * questions / 100)
    return right if f"{100 * right / questions:.1f}" == percent else None


@recomputes("ultraquant", NOT_PRINTED)
def ultraquant_implied(quick: bool) -> Found:
    """Ratios, the sweep of c, Fig. 3's distortions, centroids."""
    yield from _accounting()
    yield from _constant(quick)
    yield from _distortions(quick)
    yield from _ultra_tq(quick)


def _accounting() -> Found:
    scheme = get("ultraquant")
    for dim in (64, 128, 256):
        yield f"UltraQuant, d={dim}", "bytes", scheme.key.layout(dim).block_bytes
    yield "UltraQuant", "ratio_to_bf16", 16 / scheme.effective_bits(128)
    for layers in (48, 62, 80):  # two layers at either end dense
        ours = sum(scheme.for_layer(i, layers).effective_bits(128) for i in range(layers)) / layers
        yield f"UltraQuant, {layers} layers", "bits", ours


# -- the constant c ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLaw:
    """Normal groups of G numbers as multiples ``t`` of their largest magnitude m: what quadrature needs.

    The expected squared error of rounding a group to ``m r(t)`` is, an element of variance 1,
    ``top (1 - r(1))^2 + sum weights (t - r(t))^2``.
    """

    top: float
    t: Tensor
    weights: Tensor


@lru_cache(maxsize=8)
def group_law(group: int) -> GroupLaw:
    """Integrate over the law of the maximum of ``group`` normal magnitudes, to 9, by midpoints in float64."""
    nodes, reach = 2000, 9.0
    m = (torch.arange(nodes, dtype=torch.float64) + 0.5) * (reach / nodes)
    t = (torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes
    density = 2 * _phi(m)
    below = torch.erf(m / math.sqrt(2))
    mass = group * density * below ** (group - 1) * (reach / nodes) * m**2 / group
    weights = torch.zeros_like(t)
    for some, share in zip(m.split(500), (mass * (group - 1) * m / below / nodes).split(500), strict=True):
        weights += share @ (2 * _phi(some[:, None] * t))
    return GroupLaw(float(mass.sum()), t, weights)


def _phi(x: Tensor) -> Tensor:
    return (-x * x / 2).exp() / math.sqrt(2 * math.pi)


def real_error(c: float, group: int = GROUP, levels: tuple[float, ...] = E2M1_MAGNITUDES) -> float:
    """Relative MSE of normal groups with the scale ``c m``, Eq. 2, exact; ``levels``: the magnitudes there are."""
    law = group_law(group)
    grid = torch.tensor(levels, dtype=torch.float64) * c
    error = (law.t - grid[torch.bucketize(law.t, midpoints(grid))]) ** 2
    return law.top * float((1 - grid).square().min()) + float(law.weights @ error)


def octave_error(c: float, levels: tuple[float, ...] = E2M1_MAGNITUDES, steps: int = 64) -> float:
    """Relative MSE with the power of two nearest to ``c m``, mean over magnitudes spread evenly over an octave."""
    return sum(real_error(c * 2 ** ((i + 0.5) / steps - 0.5), GROUP, levels) for i in range(steps)) / steps


@lru_cache(maxsize=1)
def _best_pow2() -> tuple[float, float]:
    return _minimum(octave_error, 0.15, 0.25)


def _minimum(error: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Golden section: the minimum of a unimodal function and its value."""
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
    return (low + high) / 2, min(at_a, at_b)


def _octave_measured(c: float, tokens: int) -> tuple[float, float]:
    """Through the codec's bytes: relative MSE over an octave of magnitudes, share of groups whose maximum saturates."""
    codec = UltraQuant(rotate=False, c=c)
    x = torch.randn(1, 1, tokens, 128, generator=torch.Generator().manual_seed(0))
    size = 2 ** ((torch.arange(tokens) + 0.5) / tokens)[:, None]
    payload = codec.encode(x * size, {})
    error = codec.decode(payload, {}) / size - x
    most = split_channels((x * size).abs(), GROUP).amax(-1)
    saturated = most > E2M1_MAGNITUDES[-1] * ue8m0_value(payload["scale"])
    return float(error.square().sum() / x.square().sum()), float(saturated.double().mean())


def _constant(quick: bool) -> Found:
    """Best constants and their errors, by quadrature over normal groups; shares of saturated groups, measured."""
    for group in (16, 32, 64, 128, 256):
        best, error = _minimum(partial(real_error, group=group), 0.14, 0.175)
        yield f"real scales, groups of {group}", "best_c", best
        if group == GROUP:
            yield "real scales, best c", "relative_mse", error
    best, error = _best_pow2()
    yield "power-of-two scales", "best_c", best
    yield "power-of-two scales, best c", "relative_mse", error
    # to round log2 down or up is to round it to the nearest half an octave aside
    yield "MX rule, floor(log2 m) - 2", "relative_mse", octave_error(math.sqrt(2) / 8)
    yield "ceil(log2(m / 6))", "relative_mse", octave_error(math.sqrt(2) / 6)
    best, error = _minimum(partial(octave_error, levels=tuple(float(k) for k in range(8))), 0.12, 0.19)
    yield "INT4 -7..7, power-of-two scales", "best_c", best
    yield "INT4 -7..7, power-of-two scales", "relative_mse", error
    for c in (DEPLOYED, BEST_POW2):
        yield f"c={c}", "percent_saturated", 100 * _octave_measured(c, 4096 if quick else 32768)[1]


@recomputes("ultraquant", f"{NOT_PRINTED}: sweep of c", seconds=8)
def ultraquant_sweep(quick: bool) -> Found:
    """Relative MSE by c: real scales, powers of two over an octave, powers of two at variance 1/d."""
    tokens = 4096 if quick else 32768
    x = gauss(False)[:, :, :tokens]
    for c in (0.140, 0.156, 1 / 6, 0.185, 0.195, 0.215, 0.250, 1.0, *BETWEEN):
        item = f"c={c:.4g}"
        yield f"{item}, real", "relative_mse", codec_error(x, UltraQuant(c=c, scale="real"))
        yield f"{item}, power of two", "relative_mse", _octave_measured(c, tokens)[0]
        for dim in () if c in BETWEEN else (64, 128, 256):  # an octave apart is the same
            y = gauss(True, dim)[:, :, : tokens // 4] / dim**0.5
            yield f"{item}, power of two, d={dim}", "relative_mse", codec_error(y, UltraQuant(c=c))


# -- Fig. 3 and Ultra-TQ -----------------------------------------------------------------------------------------------


def _distortions(quick: bool) -> Found:
    """Relative MSE of 4-bit quantizers of random unit vectors, at d = 64, 128, 256."""
    keys = {dim: unit_vectors(2048 if quick else 16384, dim) for dim in (64, 128, 256)}
    table: dict[str, Codec] = {
        "Lloyd-Max 16, norm per token": UltraTQ("token", "sphere"),
        "FP4, scale m/6": UltraQuant(c=1 / 6, scale="real"),
        "FP4, scale 0.156 m": UltraQuant(c=DEPLOYED, scale="real"),
        "FP4, scale 0.1625 m": UltraQuant(c=0.1625, scale="real"),
        "FP4, 0.156, power of two": UltraQuant(c=DEPLOYED),
        "FP4, 0.195, power of two": UltraQuant(c=BEST_POW2),
        "INT4 -7..7, per 32": GroupInt(4, GROUP, symmetric=True),
        "INT4 -7..7, per token": GroupInt(4, 0, symmetric=True),
        "INT4 min/max, float zero, per 32": GroupInt(4, GROUP),
        "INT4 min/max, integer zero, per token": SawInt4(1),
    }
    for item, codec in table.items():
        for dim, x in keys.items():
            yield f"{item}, d={dim}", "relative_mse", codec_error(x, codec)
    for levels in (16, 15):
        for dim in keys:
            yield f"uniform {levels}, best step, d={dim}", "relative_mse", _uniform_error(levels, dim)
    midrise = tuple((k + 0.5) / 7.5 for k in range(8))
    yield "uniform 16 on [-m, m], per 32", "relative_mse", real_error(1.0, GROUP, midrise)
    yield "Lloyd fit to x / m, per 32", "relative_mse", _lloyd_on_maximum(keys[64])


def _uniform_error(levels: int, dim: int) -> float:
    """Relative MSE of the best uniform quantizer of a coordinate of a random unit vector."""
    places = torch.arange(levels, dtype=torch.float64) - (levels - 1) / 2
    density = block_norm_density(dim, 1)
    return dim * _minimum(lambda step: distortion(density, places * step, -1.0, 1.0), 0.1 / dim**0.5, 0.6 / dim**0.5)[1]


def _lloyd_on_maximum(keys: Tensor) -> float:
    """Relative MSE of 16 levels fitted to groups of 32 over their largest magnitude (the paper's LMPb)."""
    groups = keys.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    shape = groups / largest
    levels = sample_levels(shape.flatten(), gaussian_levels())
    error = (levels[torch.bucketize(shape, midpoints(levels))] - shape) * largest
    return float(error.square().sum() / groups.square().sum())


def _ultra_tq(quick: bool) -> Found:
    keys = unit_vectors(8192 if quick else 65536, 64)
    for table in ("sphere", "gaussian"):
        for i, level in enumerate(_levels(table)):
            yield f"{table} table, d=64, level {i + 1}", "level", level
        ours = relative_mse(keys, get(f"ultra-tq:table={table}")) / 64 * 1e4
        yield f"{table} table, d=64", "mse_times_1e4", ours


def _levels(table: str) -> list[float]:
    """Positive levels of a key of length 1, d = 64, as the codec of ``ultra-tq`` tabulates them."""
    levels = get(f"ultra-tq:table={table}").key.fit(Site(0, "key", 1, 64))["levels"][0]
    return [float(level) / 8 for level in levels[8:]]
