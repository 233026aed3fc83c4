"""OCTOPUS, arXiv:2605.21226: isotropic Gaussian keys, d = 128."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcodec.codec import Site, roundtrip
from kvcodec.codecs.octopus import Octopus, Rounding
from kvcodec.eval.reproduce.claims import Claim, reproduces
from kvcodec.registry import get


@dataclass(frozen=True)
class Fidelity:
    """Means over seeds of what OCTOPUS prints: per-coordinate MSE, cosine, |score error|, 95th percentile of MSE."""

    mse: float
    cos: float
    ip: float
    tail95: float


def fidelity(codec: Octopus, seeds: int, keys: int, queries: int, dim: int = 128) -> Fidelity:
    """Encode and decode ``keys`` N(0, I) keys per seed, each seed with rotations of its own."""
    total = torch.zeros(4, dtype=torch.float64)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(1, 1, keys, dim, generator=generator)
        q = torch.randn(queries, dim, generator=generator)
        k_hat = roundtrip(codec, k, codec.fit(Site(0, "key", 1, dim, seed)))
        error = (k - k_hat)[0, 0]
        squared = error.square().mean(-1)
        cosine = torch.nn.functional.cosine_similarity(k, k_hat, dim=-1).mean()
        tail = squared.quantile(0.95)
        total += torch.stack([squared.mean(), cosine, (error @ q.T).abs().mean(), tail]).double()
    return Fidelity(*(total / seeds).tolist())


def _split(bits: int) -> tuple[int, int]:
    return (bits + 1, bits - 1) if bits > 1 else (1, 1)


@reproduces("octopus", "Table 1")
def octopus_table_1(quick: bool) -> Iterator[Claim]:
    """Synthetic fidelity, the OCTOPUS rows: 64 seeds x 1024 keys x 16 queries."""
    printed = {2: ("0.9547", "0.0897", "2.682"), 3: ("0.9871", "0.0260", "1.444"), 4: ("0.9965", "0.0071", "0.753")}
    for bits, (cos, mse, ip) in printed.items():
        found = fidelity(Octopus(*_split(bits), "scalar", "fp32"), 8 if quick else 64, 1024, 16)
        item, note = f"OCTOPUS b={bits}", "fits scalar rounding only; the text says local_3x3"
        yield Claim(item, "cos", cos, found.cos, 5e-4, note)
        yield Claim(item, "mse", mse, found.mse, 0.02 if quick else 0.005, note)
        yield Claim(item, "ip_abs_err", ip, found.ip, 0.04 if quick else 0.01, note)


@reproduces("octopus", "Table 4")
def octopus_table_4(quick: bool) -> Iterator[Claim]:
    """Bit-split sweep with local_3x3: 4 seeds x 8192 keys."""
    printed = {
        2: {(1, 3): ("0.4555", "0.2628"), (2, 2): ("0.1409", "0.0729"), (3, 1): ("0.0831", "0.0421")},
        3: {
            (1, 5): ("0.4501", "0.2593"),
            (2, 4): ("0.1273", "0.0658"),
            (3, 3): ("0.0374", "0.0188"),
            (4, 2): ("0.0243", "0.0120"),
            (5, 1): ("0.0537", "0.0268"),
        },
        4: {
            (2, 6): ("0.1262", "0.0653"),
            (3, 5): ("0.0332", "0.0168"),
            (4, 4): ("0.0096", "0.0048"),
            (5, 3): ("0.0067", "0.0033"),
            (6, 2): ("0.0166", "0.0081"),
        },
    }
    gain = {2: "-41.0", 3: "-35.0", 4: "-30.5"}
    for bits, splits in printed.items():
        mse: dict[tuple[int, int], float] = {}
        for split, (printed_mse, printed_cos) in splits.items():
            found = fidelity(Octopus(*split, norm="fp32"), 1 if quick else 4, 8192, 1)
            mse[split] = found.mse
            yield Claim(f"split {split}", "mse", printed_mse, found.mse, 0.03 if quick else 0.01)
            yield Claim(f"split {split}", "1-cos", printed_cos, 1 - found.cos, 0.03 if quick else 0.015)
        change = 100 * (mse[bits + 1, bits - 1] / mse[bits, bits] - 1)
        note = "not rate-neutral: one step costs one more bit per triplet"
        yield Claim(
            f"({bits + 1}, {bits - 1}) against ({bits}, {bits})", "mse_change_percent", gain[bits], change, 0.02, note
        )


@reproduces("octopus", "Table 5")
def octopus_table_5(quick: bool) -> Iterator[Claim]:
    """Rounding ablation: 5 seeds x 4096 keys x 64 queries."""
    joint_1 = ("0.703", "0.5172", "0.6664", "6.554")
    printed: dict[tuple[int, Rounding], tuple[str, str, str, str]] = {
        (1, "scalar"): ("0.692", "0.6022", "0.7935", "7.065"),
        (1, "local_2x2"): joint_1,
        (1, "local_3x3"): joint_1,
        (1, "full"): joint_1,
        (2, "scalar"): ("0.955", "0.0897", "0.1205", "2.722"),
        (2, "local_2x2"): ("0.957", "0.0858", "0.1152", "2.662"),
        (2, "local_3x3"): ("0.958", "0.0832", "0.1119", "2.620"),
        (2, "full"): ("0.958", "0.0832", "0.1119", "2.620"),
        (3, "scalar"): ("0.987", "0.0261", "0.0365", "1.464"),
        (3, "local_2x2"): ("0.988", "0.0250", "0.0351", "1.433"),
        (3, "local_3x3"): ("0.988", "0.0243", "0.0343", "1.414"),
        (3, "full"): ("0.988", "0.0243", "0.0343", "1.414"),
        (4, "scalar"): ("0.997", "0.0071", "0.0102", "0.763"),
        (4, "local_2x2"): ("0.997", "0.0068", "0.0098", "0.749"),
        (4, "local_3x3"): ("0.997", "0.0067", "0.0096", "0.739"),
        (4, "full"): ("0.997", "0.0067", "0.0096", "0.739"),
    }
    for (bits, rounding), (cos, mse, tail, ip) in printed.items():
        codec = Octopus(*_split(bits), rounding, "fp32")
        found = fidelity(codec, 2 if quick else 5, 1024 if quick else 4096, 64)
        item = f"b={bits} {rounding}"
        note = "(b_dir, b_nrm) = (1, 1)" if bits == 1 else ""
        note = "{j, j+1} from the nearest index, as printed" if rounding == "local_2x2" and bits > 1 else note
        yield Claim(item, "cos", cos, found.cos, 3e-3 if quick else 1e-3, note)
        yield Claim(item, "mse", mse, found.mse, 0.03 if quick else 0.01, note)
        yield Claim(item, "tail95", tail, found.tail95, 0.04 if quick else 0.015, note)
        yield Claim(item, "ip_abs_err", ip, found.ip, 0.04 if quick else 0.02, note)


@reproduces("octopus", "Table 7")
def octopus_table_7(quick: bool) -> Iterator[Claim]:
    """KV ratio: exact byte counts under the paper's packing."""
    printed = {
        ("video", 64, 32): {4: "2.8", 3: "3.6", 2: "4.5"},
        ("audio", 64, 16): {4: "2.4", 3: "2.9", 2: "3.5"},
        ("llm", 128, 32): {4: "3.0", 3: "3.7", 2: "4.8"},
    }
    for (shape, dim, group), ratios in printed.items():
        triplets = -(-dim // 3)
        for bits, ratio in ratios.items():
            key = 4 + _stream_bytes(2 * triplets, bits + 1) + _stream_bytes(triplets, bits - 1)
            value = _stream_bytes(dim, bits) + 8 * dim // group
            here = get(f"octopus-{bits}:group={group}")
            held = here.key.layout(dim).block_bytes + here.value.layout(dim).block_bytes
            note = f"fp32 norm, scale and offset, byte-aligned streams; this library's bytes give {4 * dim / held:.3f}"
            yield Claim(f"{shape} d={dim} g={group} b={bits}", "kv_ratio", ratio, 4 * dim / (key + value), 0.0, note)


def _stream_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` codes where the smallest run of codes that fills whole bytes is the unit."""
    per = {1: 8, 2: 4, 4: 2}.get(bits, 8)
    return -(-n // per) * per * bits // 8
