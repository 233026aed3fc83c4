"""OCTOPUS, arXiv:2605.21226: isotropic Gaussian keys, d = 128 unless said otherwise."""

import math
from typing import get_args

import torch

from packedkv.codec import Codec, Site, roundtrip
from packedkv.codecs.octopus import (
    Octopus,
    Rounding,
    coordinate_density,
    direction_centroids,
    norm_centroids,
    split_bits,
)
from packedkv.codecs.octopus_qjl import OctopusQJL
from packedkv.codecs.polarquant import PolarQuant
from packedkv.codecs.turboquant import TurboQuant, TurboQuantQJL, Variant, coordinate_centroids
from packedkv.ops.lloyd_max import block_norm_density, distortion, lloyd_max
from packedkv_lab.reproduce.claims import NOT_PRINTED, Found, recomputes
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
def table_1(quick: bool) -> Found:
    """Synthetic fidelity: 64 seeds x 1024 keys; MSE and cosine of QJL codecs are those of their first stage."""
    seeds = 4 if quick else 64
    stages: dict[tuple[str, int], Codec] = {}
    for bits in (2, 3, 4):
        stages["TQ-MSE", bits] = TurboQuant(bits, "fp32")
        stages["TQ-QJL", bits] = TurboQuant(bits - 1, "fp32")
        stages["PolarQuant", bits] = PolarQuant(bits, "fp32")
        stages["OCTOPUS", bits] = stages["OCTOPUS-QJL", bits] = scalar_octopus(bits)
    found = {codec: fidelity(codec, seeds, 1024) for codec in dict.fromkeys(stages.values())}
    for (name, bits), codec in stages.items():
        item, here = f"{name} b={bits}", found[codec]
        yield item, "cos", here.cos
        yield item, "mse", here.mse
        if name == "TQ-QJL":
            for variant in VARIANTS:
                score = fidelity(TurboQuantQJL(bits, "fp32", variant), seeds, 1024).ip
                yield f"{item} {variant}", "ip_abs_err", score
        else:
            score = fidelity(scalar_qjl(bits), seeds, 1024).ip if name == "OCTOPUS-QJL" else here.ip
            yield item, "ip_abs_err", score


@recomputes("octopus", f"{NOT_PRINTED}: Table 1 with local_3x3", seconds=20)
def table_1_local(quick: bool) -> Found:
    """Table 1 with the rounding that the text calls the default."""
    seeds = 4 if quick else 16
    for bits in (2, 3, 4):
        split = split_bits(bits, "paper")
        plain = fidelity(Octopus(*split, "local_3x3", "fp32"), seeds, 1024)
        yield f"OCTOPUS b={bits}", "mse", plain.mse
        yield f"OCTOPUS b={bits}", "ip_abs_err", plain.ip
        score = fidelity(OctopusQJL(*split, "local_3x3", "fp32"), seeds, 1024).ip
        yield f"OCTOPUS-QJL b={bits}", "ip_abs_err", score


@recomputes("octopus", "Fig. 2b, synthetic needle", seconds=30)
def needle(quick: bool) -> Found:
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
def table_4(quick: bool) -> Found:
    """Bit-split sweep with local_3x3: 4 seeds x 8192 keys."""
    sweeps = {2: range(1, 4), 3: range(1, 6), 4: range(2, 7)}
    for bits, directions in sweeps.items():
        splits = [(direction, 2 * bits - direction) for direction in directions]
        found = {split: fidelity(Octopus(*split, norm="fp32"), 1 if quick else 4, 8192) for split in splits}
        base = found[bits, bits]
        for split, here in found.items():
            item = f"split {split}"
            yield item, "mse", here.mse
            yield item, "1-cos", 1 - here.cos
            if here is not base:
                yield item, "mse / uniform", here.mse / base.mse
                yield item, "1-cos / uniform", (1 - here.cos) / (1 - base.cos)


@recomputes("octopus", "Table 5", seconds=120)
def table_5(quick: bool) -> Found:
    """Rounding ablation: 5 seeds x 4096 keys."""
    roundings: tuple[Rounding, ...] = ("scalar", "local_2x2", "local_3x3", "full")
    for bits in (1, 2, 3, 4):
        base = None
        for rounding in roundings:
            if quick and (bits, rounding) == (4, "full"):
                continue  # 1024 candidates for every triplet
            found = fidelity(Octopus(*split_bits(bits, "paper"), rounding, "fp32"), 1 if quick else 5, 4096)
            item = f"b={bits} {rounding}"
            yield item, "cos", found.cos
            yield item, "mse", found.mse
            yield item, "tail95", found.tail95
            yield item, "ip_abs_err", found.ip
            if base is None:
                base = found
            else:
                yield item, "mse / scalar", found.mse / base.mse
                yield item, "tail95 / scalar", found.tail95 / base.tail95


@recomputes("octopus", "Table 6")
def table_6(quick: bool) -> Found:
    """Bits per scalar of the language model rows: bare b of keys, groups of 32 values with fp16 scale and offset."""
    for bits in (4, 3, 2):
        codes_and_groups = (bits + (bits + 2 * 16 / 32)) / 2
        yield f"llm b={bits}", "bits", codes_and_groups
        yield f"llm b={bits} QJL", "bits", codes_and_groups + 0.5


@recomputes("octopus", "Table 7")
def table_7(quick: bool) -> Found:
    """KV ratio: exact byte counts under the paper's packing: fp32 norm, scale and offset, byte-aligned streams."""
    for shape, dim, group in (("video", 64, 32), ("audio", 64, 16), ("llm", 128, 32)):
        triplets = -(-dim // 3)
        for bits in (4, 3, 2):
            value = _stream_bytes(dim, bits) + 8 * dim // group
            octopus = _stream_bytes(2 * triplets, bits + 1) + _stream_bytes(triplets, bits - 1)
            for name, codes in (("OCTOPUS", octopus), ("TQ-MSE", _stream_bytes(dim, bits))):
                yield f"{shape} d={dim} g={group} {name} b={bits}", "kv_ratio", 4 * dim / (4 + codes + value)


def _stream_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` codes where the smallest run of codes that fills whole bytes is the unit."""
    per = {1: 8, 2: 4, 4: 2}.get(bits, 8)
    return -(-n // per) * per * bits // 8


@recomputes("octopus", f"{NOT_PRINTED}: codebooks")
def codebooks(quick: bool) -> Found:
    """Lloyd-Max levels of three densities; of symmetric books the positive half, of xi at 5 bits that below 1/2."""
    books = {f"xi {bits} bits": direction_centroids(bits) for bits in (2, 3, 4, 5)}
    for dim in (128, 64):
        for bits in (1, 2, 3):
            books[f"rho {bits} bit{'s' * (bits > 1)}, d={dim}"] = norm_centroids(dim, bits)
    for bits in (1, 2, 3, 4):
        books[f"coordinate {bits} bit{'s' * (bits > 1)}, d=128"] = coordinate_centroids(128, bits)
    for name, book in books.items():
        for i, level in enumerate(book[book > 0].tolist()[:8]):
            yield f"{name}, level {i + 1}", "centroid", level
    norm_density = block_norm_density(128, 3)
    for bits in (1, 2, 3, 4, 5, 6):
        mse = distortion(coordinate_density, direction_centroids(bits), -1.0, 1.0)
        yield f"xi {bits} bits", "distortion", mse
        mse = distortion(norm_density, norm_centroids(128, bits), 0.0, 1.0) * 128 / 3
        yield f"rho {bits} bits, x d/3", "distortion", mse


@recomputes("octopus", f"{NOT_PRINTED}: MSE by head_dim", seconds=15)
def by_head_dim(quick: bool) -> Found:
    """MSE of a coordinate at 64, 128 and 256 channels."""
    roundings: tuple[Rounding, ...] = ("scalar", "local_3x3")
    for dim in (64, 128, 256):
        for rounding in roundings:
            for bits in (2, 3, 4):
                codec = Octopus(*split_bits(bits, "paper"), rounding, "fp32")
                found = unit_mse(codec, 8192 if quick else 32768, dim)
                yield f"d={dim} {rounding} b={bits}", "mse", found


@recomputes("octopus", f"{NOT_PRINTED}: equal rate", seconds=15)
def equal_rate(quick: bool) -> Found:
    """OCTOPUS splits against scalar Lloyd-Max levels at the same true rate of codes, unit vectors."""
    for split in ((2, 2), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (5, 4)):
        rate = (2 * split[0] + split[1]) / 3
        yield f"split {split}", "mse", unit_mse(Octopus(*split, norm="fp32"), 8192 if quick else 32768)
        # between two level counts, log MSE is linear in the rate
        yield f"scalar at {rate:.3f} bits", "mse", scalar_mse_at(rate)
        low, share = int(rate), rate - int(rate)
        widths = (1 - share) * scalar_mse(2**low) + (share * scalar_mse(2 ** (low + 1)) if share else 0.0)
        yield f"widths {low} and {low + 1}, {rate:.3f} bits", "mse", widths


def unit_mse(codec: Codec, keys: int, dim: int = 128) -> float:
    """Relative MSE on directions: N(0, I) keys scaled to length sqrt(dim)."""
    k = torch.randn(1, 1, keys, dim, generator=torch.Generator().manual_seed(1))
    k = k * (dim**0.5 / k.norm(dim=-1, keepdim=True))
    return float((roundtrip(codec, k, codec.fit(Site(0, "key", 1, dim, 1))) - k).square().mean())


def scalar_mse(levels: int) -> float:
    """Relative MSE of ``levels`` Lloyd-Max levels for every coordinate of a random direction in 128; exact."""
    density = block_norm_density(128, 1)
    return 128 * distortion(density, lloyd_max(density, levels, -1.0, 1.0, symmetric=True), -1.0, 1.0)


def scalar_mse_at(bits: float) -> float:
    """Relative MSE of scalar quantizers at a rate that need not be log2 of a whole number."""
    low = math.floor(2**bits + 1e-9)
    share = max(0.0, (bits - math.log2(low)) / math.log2((low + 1) / low))
    return scalar_mse(low) ** (1 - share) * scalar_mse(low + 1) ** share
