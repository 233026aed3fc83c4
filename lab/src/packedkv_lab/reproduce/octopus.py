"""OCTOPUS, arXiv:2605.21226: isotropic Gaussian keys, d = 128 unless said otherwise."""

from typing import get_args

import torch

from packedkv.codec import Codec, Site, roundtrip
from packedkv.codecs.octopus import Octopus, OctopusQJL, Rounding, split_bits
from packedkv.codecs.polarquant import PolarQuant
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL, Variant
from packedkv_lab.reproduce.claims import Figures, recomputes
from packedkv_lab.reproduce.measure import fidelity

VARIANTS: tuple[Variant, ...] = get_args(Variant)
"""Readings of QJL's residual: ``printed`` has signs that do not depend on it."""


def scalar_octopus(bits: int) -> Octopus:
    """OCTOPUS as Table 1 and the needle fit it."""
    return Octopus(*split_bits(bits, "paper"), "scalar", "fp32")


def scalar_qjl(bits: int) -> OctopusQJL:
    """Return the same with a sketch of the residual."""
    return OctopusQJL(*split_bits(bits, "paper"), "scalar", "fp32")


@recomputes("octopus", "Table 1", seconds=60)
def table_1(quick: bool) -> Figures:
    """Synthetic fidelity: 64 seeds x 1024 keys; MSE and cosine of QJL codecs are those of their first stage."""
    seeds = 4 if quick else 64
    stages: dict[tuple[str, int], Codec] = {}
    for bits in (2, 3, 4):
        stages["TQ-MSE", bits] = TurboQuant(bits, "fp32")
        stages["TQ-QJL", bits] = TurboQuant(bits - 1, "fp32")
        stages["PolarQuant", bits] = PolarQuant(bits, "fp32")
        stages["OCTOPUS", bits] = stages["OCTOPUS-QJL", bits] = scalar_octopus(bits)
    fidelities = {codec: fidelity(codec, seeds, 1024) for codec in dict.fromkeys(stages.values())}
    for (name, bits), codec in stages.items():
        item, here = f"{name} b={bits}", fidelities[codec]
        yield item, "cos", here.cos
        yield item, "mse", here.mse
        if name == "TQ-QJL":
            for variant in VARIANTS:
                score = fidelity(TurboQuantQJL(bits, "fp32", variant), seeds, 1024).ip
                yield f"{item} {variant}", "ip_abs_err", score
        else:
            score = fidelity(scalar_qjl(bits), seeds, 1024).ip if name == "OCTOPUS-QJL" else here.ip
            yield item, "ip_abs_err", score


@recomputes("octopus", "Fig. 2b, synthetic needle", seconds=30)
def needle(quick: bool) -> Figures:
    """Mass of softmax(q K / sqrt(d)) on the key that q is a noisy copy of, among 2048 keys of length sqrt(d)."""
    sets = 1 if quick else 8
    codecs: dict[str, Codec | None] = {"fp32": None}
    for bits in (2, 3, 4):
        codecs[f"TQ-MSE b={bits}"] = TurboQuant(bits, "fp32")
        codecs[f"PolarQuant b={bits}"] = PolarQuant(bits, "fp32")
        codecs[f"OCTOPUS b={bits}"] = scalar_octopus(bits)
    codecs["OCTOPUS-QJL b=2"] = scalar_qjl(2)
    for variant in VARIANTS:
        codecs[f"TQ-QJL b=2 {variant}"] = TurboQuantQJL(2, "fp32", variant)
    for item, codec in codecs.items():
        yield item, "mass", needle_mass(codec, sets)


def needle_mass(codec: Codec | None, sets: int) -> float:
    """Mean over sets of 128-channel keys and 512 needles in each; the same keys and queries for every codec."""
    total = 0.0
    for seed in range(sets):
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(1, 1, 2048, 128, generator=generator)
        k = k * (128**0.5 / k.norm(dim=-1, keepdim=True))
        q = k[0, 0, :512] + 0.1 * torch.randn(512, 128, generator=generator)
        k_hat = k if codec is None else roundtrip(codec, k, codec.fit(Site(0, "key", 1, 128, seed)))
        mass = (q @ k_hat[0, 0].T / 128**0.5).softmax(-1).diagonal()
        total += float(mass.mean())
    return total / sets


@recomputes("octopus", "Table 4", seconds=40)
def table_4(quick: bool) -> Figures:
    """Bit-split sweep with local_3x3: 4 seeds x 8192 keys."""
    sweeps = {2: range(1, 4), 3: range(1, 6), 4: range(2, 7)}
    for bits, directions in sweeps.items():
        splits = [(direction, 2 * bits - direction) for direction in directions]
        fidelities = {split: fidelity(Octopus(*split, norm="fp32"), 1 if quick else 4, 8192) for split in splits}
        base = fidelities[bits, bits]
        for split, here in fidelities.items():
            item = f"split {split}"
            yield item, "mse", here.mse
            yield item, "1-cos", 1 - here.cos
            if here is not base:
                yield item, "mse / uniform", here.mse / base.mse
                yield item, "1-cos / uniform", (1 - here.cos) / (1 - base.cos)


@recomputes("octopus", "Table 5", seconds=120)
def table_5(quick: bool) -> Figures:
    """Rounding ablation: 5 seeds x 4096 keys."""
    roundings: tuple[Rounding, ...] = ("scalar", "local_2x2", "local_3x3", "full")
    for bits in (1, 2, 3, 4):
        base = None
        for rounding in roundings:
            if quick and (bits, rounding) == (4, "full"):
                continue  # 1024 candidates for every triplet
            figures = fidelity(Octopus(*split_bits(bits, "paper"), rounding, "fp32"), 1 if quick else 5, 4096)
            item = f"b={bits} {rounding}"
            yield item, "cos", figures.cos
            yield item, "mse", figures.mse
            yield item, "tail95", figures.tail95
            yield item, "ip_abs_err", figures.ip
            if base is None:
                base = figures
            else:
                yield item, "mse / scalar", figures.mse / base.mse
                yield item, "tail95 / scalar", figures.tail95 / base.tail95
