"""UltraQuant and Ultra-TQ, arXiv:2606.20474: layout, constant c, distortions, centroids, sums of its tables."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from kvcodec.codec import Codec, Site
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.saw_int4 import SawInt4
from kvcodec.codecs.ultra_tq import UltraTQ, gaussian_levels
from kvcodec.codecs.ultraquant import GROUP, UltraQuant
from kvcodec.ops.fp4 import E2M1_MAGNITUDES, ue8m0_value
from kvcodec.ops.groups import split_channels
from kvcodec.ops.lloyd_max import block_norm_density, distortion, midpoints, sample_levels
from kvcodec.registry import get
from kvcodec_lab.reproduce.claims import NOT_PRINTED, Axes, Claim, cannot, reproduces
from kvcodec_lab.reproduce.measure import codec_error, gauss, relative_mse, unit_vectors

DEPLOYED, BEST_POW2 = 0.156, 0.195
SWEEP = f"{NOT_PRINTED}: sweep of c"
BETWEEN = (0.10, 0.11, 0.12, 0.13, 0.15, 0.175, 0.205, 0.23, 0.27, 0.29)
"""Points of the sweep that the reference does not have; quadrature stands in for it."""


@reproduces("ultraquant", "Secs. 5.1, 7")
def ultraquant_layout(quick: bool) -> Iterator[Claim]:
    """Bytes and bits of the layout."""
    codec = UltraQuant()
    yield Claim("32 channels", "bytes", "17.0", codec.layout(32).block_bytes)
    yield Claim("UltraQuant, d=128", "bits", "4.25", get("ultraquant").effective_bits(128))
    over = 100 * (codec.layout(128).effective_bits / 4 - 1)
    yield Claim("UltraQuant over 4 bits", "percent", "6", over, 0.0, "within 6 %", "6.25")
    note = "half of FP8's footprint"
    yield Claim("UltraQuant", "ratio_to_fp8", "2", 8 / get("ultraquant").effective_bits(128), 0.0, note, "1.882")


@reproduces("ultraquant", "Sec. 4.1")
def ultra_tq_reach(quick: bool) -> Iterator[Claim]:
    """Largest of the theoretical centroids at d = 64."""
    note = "the levels of N(0, 1/64); the law that the text names, of a unit vector's coordinate, gives 0.331"
    yield Claim("Lloyd-Max, d=64, normal", "largest_level", "0.342", _levels("gaussian")[-1], 0.0, note)


@reproduces("ultraquant", "App. B.2")
def ultraquant_c(quick: bool) -> Iterator[Claim]:
    """Best constant for scales that are powers of two."""
    best, least = _best_pow2()
    cost = 100 * (octave_error(BEST_POW2) / least - 1)
    note = f"quadrature, normal groups of 32, magnitudes over an octave; flat: 0.195 costs {cost:.2f} % of the error"
    yield Claim("power-of-two scales", "best_c", "0.195", best, 0.003, note)


@reproduces("ultraquant", "Tables 2, 4, differences")
def ultraquant_differences(quick: bool) -> Iterator[Claim]:
    """Differences that the tables take of their own accuracies."""
    for item, bf16, ours, printed in (
        ("MiniMax-M2.5, GPQA-Diamond", 84.34, 82.32, "-2.02"),
        ("Qwen2.5-72B, GPQA-Diamond", 49.49, 51.01, "1.52"),
        ("Qwen3.5-A3B, LCB-128K", 76.54, 74.07, "-2.47"),
        ("MiniMax-M2.5, LCB-128K", 75.82, 71.43, "-4.39"),
        ("Qwen3.5-A3B, AIME25", 90.00, 76.67, "-13.33"),
        ("MiniMax-M2.5, AIME25", 86.67, 76.67, "-10.00"),
        ("Qwen2.5-72B, AIME25", 20.00, 16.67, "-3.33"),
        ("Qwen3.5-A3B, MATH500", 86.00, 86.80, "0.80"),
    ):
        yield Claim(f"Table 2, {item}", "points", printed, ours - bf16, 0.0, "rows that print 0.00 are left out")
    shares = ("67.4", "63.0", "58.7")
    questions = next(n for n in range(1, 1000) if all(_share(figure, n) is not None for figure in shares))
    note = f"right answers out of {questions} questions, the smallest number that fits all three"
    for item, figure in zip(("c=0.156", "c=0.195 and FP8", "c=1.0"), shares, strict=True):
        right = _share(figure, questions)
        yield Claim(f"Table 4, {item}", "percent", figure, 100 * (right or 0) / questions, 0.0, note)
    yield Claim("Table 4, c=0.156 over FP8", "points", "4.4", 67.4 - 63.0, 0.0, "two questions of 46")
    yield Claim("Table 4, c=1.0 over FP8", "points", "-4.3", 58.7 - 63.0, 0.0, "two questions of 46")


def _share(percent: str, questions: int) -> int | None:
    """Right answers out of ``questions`` that print as ``percent``; None if there are none."""
    right = round(float(percent) * questions / 100)
    return right if f"{100 * right / questions:.1f}" == percent else None


@reproduces("ultraquant", NOT_PRINTED)
def ultraquant_implied(quick: bool) -> Iterator[Claim]:
    """Ratios, the sweep of c, Fig. 3's distortions, centroids."""
    yield from _accounting()
    yield from _constant(quick)
    yield from _distortions(quick)
    yield from _ultra_tq(quick)


def _accounting() -> Iterator[Claim]:
    scheme = get("ultraquant")
    for dim, size in ((64, "34.0"), (128, "68.0"), (256, "136.0")):
        yield Claim(f"UltraQuant, d={dim}", "bytes", size, scheme.key.layout(dim).block_bytes)
    bits = scheme.effective_bits(128)
    yield Claim("UltraQuant", "ratio_to_bf16", "3.765", 16 / bits)
    for layers, mean in ((48, "5.229"), (62, "5.008"), (80, "4.8375")):
        ours = sum(scheme.for_layer(i, layers).effective_bits(128) for i in range(layers)) / layers
        yield Claim(f"UltraQuant, {layers} layers", "bits", mean, ours, 0.0, "two layers at either end dense")


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


def _constant(quick: bool) -> Iterator[Claim]:
    optima = {16: "0.16385", 32: "0.16255", 64: "0.16075", 128: "0.15808", 256: "0.15408"}
    for group, printed in optima.items():
        best, error = _minimum(partial(real_error, group=group), 0.14, 0.175)
        yield Claim(f"real scales, groups of {group}", "best_c", printed, best, 0.001, "quadrature over normal groups")
        if group == GROUP:
            yield Claim("real scales, best c", "relative_mse", "0.010110", error)
    best, error = _best_pow2()
    note = "quadrature; magnitudes over an octave"
    yield Claim("power-of-two scales", "best_c", "0.1954", best, 0.002, note)
    yield Claim("power-of-two scales, best c", "relative_mse", "0.012517", error, 3e-4, note)
    # to round log2 down or up is to round it to the nearest half an octave aside
    yield Claim("MX rule, floor(log2 m) - 2", "relative_mse", "0.013352", octave_error(math.sqrt(2) / 8), 3e-4, note)
    yield Claim("ceil(log2(m / 6))", "relative_mse", "0.013663", octave_error(math.sqrt(2) / 6), 3e-4, note)
    integers = tuple(float(k) for k in range(8))
    best, error = _minimum(partial(octave_error, levels=integers), 0.12, 0.19)
    yield Claim("INT4 -7..7, power-of-two scales", "best_c", "0.1503", best, 0.002, note)
    yield Claim("INT4 -7..7, power-of-two scales", "relative_mse", "0.013768", error, 3e-4, note)
    tokens = 4096 if quick else 32768
    for c, share in ((DEPLOYED, "59.5"), (BEST_POW2, "27.3")):
        ours = 100 * _octave_measured(c, tokens)[1]
        note = "groups whose largest element lies beyond 6 times the scale"
        yield Claim(f"c={c}", "percent_saturated", share, ours, 0.02 if quick else 0.01, note)


@reproduces("ultraquant", SWEEP, axes=Axes("c, scale over largest magnitude", "relative MSE"), seconds=8)
def ultraquant_sweep(quick: bool) -> Iterator[Claim]:
    """Relative MSE by c: real scales, powers of two over an octave, powers of two at variance 1/d."""
    tokens, allowance = (4096, 0.02) if quick else (32768, 0.008)
    printed = {
        0.140: ("0.014207", "0.022115", "0.025403", "0.018889"),
        0.156: ("0.010412", "0.016820", "0.017811", "0.015866"),
        1 / 6: ("0.010220", "0.014644", "0.014748", "0.014516"),
        0.185: ("0.013003", "0.012764", "0.012657", "0.012862"),
        0.195: ("0.015801", "0.012517", "0.012458", "0.012573"),
        0.215: ("0.013362", "0.012980", "0.012740", "0.013223"),
        0.250: ("0.011511", "0.014202", "0.013914", "0.014487"),
        1.0: ("0.115617", "0.129914", "0.119171", "0.140642"),
    }
    x = gauss(False)[:, :, :tokens]
    for c, (real, octave, odd, even) in printed.items():
        item = f"c={c:.4g}"
        curves = ("real scales", "powers of two") if c < 1 else ("", "")  # far off the figure
        yield Claim(
            f"{item}, real",
            "relative_mse",
            real,
            codec_error(x, UltraQuant(c=c, scale="real")),
            allowance,
            curve=curves[0],
            x=c,
        )
        ours = _octave_measured(c, tokens)[0]
        yield Claim(f"{item}, power of two", "relative_mse", octave, ours, allowance, curve=curves[1], x=c)
        for dim, figure in ((64, odd), (128, even), (256, odd)):
            y = gauss(True, dim)[:, :, : tokens // 4] / dim**0.5
            ours = codec_error(y, UltraQuant(c=c))
            note = "normal keys of variance 1/d; an octave apart is the same"
            yield Claim(f"{item}, power of two, d={dim}", "relative_mse", figure, ours, 2 * allowance, note)
    note = "against quadrature"
    for c in BETWEEN:
        ours = codec_error(x, UltraQuant(c=c, scale="real"))
        reference = f"{real_error(c):.6f}"
        yield Claim(f"c={c}, real", "relative_mse", reference, ours, allowance, note, curve="real scales", x=c)
        ours = _octave_measured(c, tokens)[0]
        reference = f"{octave_error(c):.6f}"
        yield Claim(f"c={c}, power of two", "relative_mse", reference, ours, allowance, note, "", "powers of two", c)


# -- Fig. 3 and Ultra-TQ -----------------------------------------------------------------------------------------------


def _distortions(quick: bool) -> Iterator[Claim]:
    """Relative MSE of 4-bit quantizers of random unit vectors, at d = 64, 128, 256."""
    tokens, allowance = (2048, 0.02) if quick else (16384, 0.006)
    keys = {dim: unit_vectors(tokens, dim) for dim in (64, 128, 256)}
    table: dict[str, tuple[Codec, tuple[str, str, str]]] = {
        "Lloyd-Max 16, norm per token": (UltraTQ("token", "sphere"), ("0.009132", "0.009315", "0.009408")),
        "FP4, scale m/6": (UltraQuant(c=1 / 6, scale="real"), ("0.01022",) * 3),
        "FP4, scale 0.156 m": (UltraQuant(c=DEPLOYED, scale="real"), ("0.01041",) * 3),
        "FP4, scale 0.1625 m": (UltraQuant(c=0.1625, scale="real"), ("0.01011",) * 3),
        "FP4, 0.156, power of two": (UltraQuant(c=DEPLOYED), ("0.0184", "0.0156", "0.0179")),
        "FP4, 0.195, power of two": (UltraQuant(c=BEST_POW2), ("0.0125", "0.0126", "0.0125")),
        "INT4 -7..7, per 32": (GroupInt(4, GROUP, symmetric=True), ("0.00941",) * 3),
        "INT4 -7..7, per token": (GroupInt(4, 0, symmetric=True), ("0.0116", "0.0138", "0.0160")),
        "INT4 min/max, float zero, per 32": (GroupInt(4, GROUP), ("0.00612",) * 3),
        "INT4 min/max, integer zero, per token": (SawInt4(1), ("0.0083", "0.0101", "0.0120")),
    }
    for item, (codec, printed) in table.items():
        for dim, figure in zip(keys, printed, strict=True):
            yield Claim(f"{item}, d={dim}", "relative_mse", figure, codec_error(keys[dim], codec), allowance)
    for levels, printed in ((16, ("0.010907", "0.011220", "0.011380")), (15, ("0.012198", "0.012539", "0.012713"))):
        for dim, figure in zip(keys, printed, strict=True):
            ours = _uniform_error(levels, dim)
            yield Claim(f"uniform {levels}, best step, d={dim}", "relative_mse", figure, ours, 0.0, "quadrature")
    midrise = tuple((k + 0.5) / 7.5 for k in range(8))
    note = "quadrature over normal groups of 32"
    yield Claim("uniform 16 on [-m, m], per 32", "relative_mse", "0.00820", real_error(1.0, GROUP, midrise), 0.0, note)
    yield Claim("Lloyd fit to x / m, per 32", "relative_mse", "0.00665", _lloyd_on_maximum(keys[64]), allowance)


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


def _ultra_tq(quick: bool) -> Iterator[Claim]:
    sphere = ".015919 .048090 .081312 .116487 .154926 .198856 .252914 .330796"
    normal = ".016049 .048506 .082095 .117793 .157029 .202256 .258627 .341574"
    for table, printed in (("sphere", sphere), ("gaussian", normal)):
        for i, figure in enumerate(printed.split()):
            yield Claim(f"{table} table, d=64, level {i + 1}", "level", "0" + figure, _levels(table)[i], 1e-5)
    keys = unit_vectors(8192 if quick else 65536, 64)
    for table, printed in (("sphere", "1.427"), ("gaussian", "1.433")):
        ours = relative_mse(keys, get(f"ultra-tq:table={table}")) / 64 * 1e4
        note = "a coordinate of a random unit vector, d=64; norms in fp16"
        yield Claim(f"{table} table, d=64", "mse_times_1e4", printed, ours, 0.01 if quick else 0.003, note)


def _levels(table: str) -> list[float]:
    """Positive levels of a key of length 1, d = 64, as the codec of ``ultra-tq`` tabulates them."""
    levels = get(f"ultra-tq:table={table}").key.fit(Site(0, "key", 1, 64))["levels"][0]
    return [float(level) / 8 for level in levels[8:]]


cannot(
    "ultraquant", "Tables 2-4: accuracies", "need the authors' models and questions; differences and shares are checked"
)
cannot("ultraquant", "Table 1, Figs. 1, 4-9: latency, throughput", "need MI355X GPUs and a serving engine")
cannot(
    "ultraquant",
    "Sec. 5.3: c = 0.156 is optimal",
    "was fitted to captured keys; the law that the text names gives 0.1625",
)
cannot(
    "ultraquant",
    "Sec. 4.1: 1.32e-4 to 1.18e-4, 10.3 %; 0.288; 2.3 times without rotation",
    "need captured keys; a fit to a few vectors depends on where it starts",
)
cannot("ultraquant", "Fig. 3: distortions", "no figures are printed in the text; recomputed under 'not printed'")
