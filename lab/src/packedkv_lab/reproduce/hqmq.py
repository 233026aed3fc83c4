"""HQMQ, arXiv:2605.27646: bits, memory, the geometry of the codebook, errors on Gaussian tokens."""

import math

import torch
from torch import Tensor

from packedkv.codecs.additive import Additive
from packedkv.ops.quaternion import products, random_units
from packedkv.registry import get
from packedkv_lab.reproduce.claims import NOT_PRINTED, Figures, recomputes
from packedkv_lab.reproduce.measure import token_bytes

SIZES = (24, 48, 96, 192)
CONFIGS = tuple(f"s{s}_r{r}" for s in SIZES for r in (3, 4, 6))


@recomputes("hqmq", "Tables 2, 8, 9, bits")
def printed_bits(quick: bool) -> Figures:
    """(log2(24 S) + r) / 4 of all configurations, and (2 log2 K + r) / 4 of the additive baseline; no scale."""
    for config in CONFIGS:
        yield config, "bits", get(f"hqmq-{config}").nominal_bits(128)
    for k, r in ((24, 3), (48, 4), (192, 4)):
        yield f"additive, K={k} r={r} (Table 16)", "bits", Additive(k, r).layout(128).nominal_bits


@recomputes("hqmq", "Tables 12, 21")
def bits_with_scale(quick: bool) -> Figures:
    """Bits with the scale, and compression, from the bytes of the radix packing."""
    for config in ("s24_r3", "s24_r4", "s48_r4", "s96_r4", "s192_r4", "s192_r6"):
        bits = get(f"hqmq-{config}:packing=radix").effective_bits(128)
        yield config, "bits", bits
        yield config, "ratio_to_fp16", 16 / bits


@recomputes("hqmq", "Sec. 4.10, memory")
def memory(quick: bool) -> Figures:
    """Decimal GB of whole caches, by the radix packing."""
    for model, layers, tokens in (("Mistral-7B, 32k tokens", 32, 32768), ("Llama-3-70B, 128k tokens", 80, 131072)):
        yield model, "fp16_gb", token_bytes("dense", layers, 8, 128) * tokens / 1e9
        packed = token_bytes("hqmq-s24_r3:packing=radix", layers, 8, 128) * tokens / 1e9
        yield f"{model}, s24_r3", "gb", packed


@recomputes("hqmq", "Eq. 2, Med-C bits")
def outlier_bits(quick: bool) -> Figures:
    """What outliers at 16 bits and a flag of 1/4 bit add to s192_r6: (1 - p) b + 16 p + 1/4 - b, outlier share p."""
    base = get("hqmq-s192_r6").nominal_bits(128)
    yield "Mistral-7B, what Med adds (Sec. 4.1)", "bits", 0.024 * (16 - base) + 1 / 4


@recomputes("hqmq", "Tables 2, 3")
def baseline_bits(quick: bool) -> Figures:
    """Bits that the paper prints for its baselines, against bytes held."""
    for bits in (2, 3, 4):
        yield f"naive int{bits}", "bits", get(f"int-{bits}").effective_bits(128)
    for bits in (2, 4):
        yield f"KIVI-{bits}", "bits", get(f"kivi-{bits}").effective_bits(128)


@recomputes("hqmq", f"{NOT_PRINTED}: geometry (Prop. 3.1)", seconds=60)
def geometry(quick: bool) -> Figures:
    """Covering radii: the largest holes found by climbing from many points, so lower bounds that are all but exact."""
    units = products(torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    yield "2T alone, covering radius", "degrees", covering_radius(units, 4096, 0)
    seeds = 6 if quick else 20
    means: dict[int, float] = {}
    for s in SIZES[:2] if quick else (6, 12, *SIZES):
        means[s] = (
            sum(covering_radius(products(random_units(s, _generator(500 + i))), 2048, i) for i in range(seeds)) / seeds
        )
        if s in SIZES:
            yield f"S={s}, 2T x random", "degrees", means[s]
    if not quick:
        log_n = torch.tensor([math.log(s) for s in means])
        log_radius = torch.tensor([math.log(radius) for radius in means.values()])
        slope = float(((log_n - log_n.mean()) * log_radius).sum() / (log_n - log_n.mean()).square().sum())
        yield "rate of the covering radius in S", "log-log slope", slope


def covering_radius(points: Tensor, starts: int, seed: int) -> float:
    """Angle in degrees from the emptiest place of the sphere to the nearest of ``points [n, 4]``.

    The largest holes are circumcentres: equally far from four points, with no other nearer. From the emptiest of
    ``starts`` random places, each step goes to the emptiest circumcentre of four of the eight nearest points, while
    the hole grows. What is found is a lower bound: a larger hole would have to have been missed by every start.
    """
    points = points.double()
    u = torch.randn(starts, 4, generator=_generator(1000 + seed), dtype=torch.float64)
    u = u / u.norm(dim=1, keepdim=True)
    coarse = points.float().T.contiguous()
    near = torch.cat([(part.float() @ coarse).amax(1) for part in u.split(1024)])
    u = u[near.topk(min(starts, 256), largest=False).indices]
    best = (u @ points.T).amax(1)
    fours = torch.combinations(torch.arange(min(8, len(points))), 4)
    for _ in range(4):
        around = points[(u @ points.T).topk(min(24, len(points))).indices]
        corners = around[:, fours]
        flat = torch.linalg.det(corners).abs() < 1e-9
        corners[flat] = torch.eye(4, dtype=torch.float64)
        centres = torch.linalg.solve(corners, torch.ones_like(corners[..., 0]))
        centres = centres / centres.norm(dim=-1, keepdim=True)
        height = (centres @ around.mT).amax(-1)
        height[flat | ((centres * u[:, None]).sum(-1) < best[:, None])] = 1.0  # another hole's
        trial = centres[torch.arange(len(u)), height.argmin(1)]
        after = (trial @ points.T).amax(1)
        better = after < best
        u, best = torch.where(better[:, None], trial, u), torch.where(better, after, best)
    return math.degrees(math.acos(float(best.min())))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
