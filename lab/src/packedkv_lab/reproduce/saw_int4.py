"""SAW-INT4, arXiv:2604.19157: accounting, error of token-wise INT4, orders of the rotation, sums of its tables."""

import torch
from torch import Tensor

from packedkv.codec import roundtrip
from packedkv.codecs.saw_int4 import SawInt4
from packedkv.registry import get
from packedkv_lab.reproduce.claims import NOT_PRINTED, Found, recomputes
from packedkv_lab.reproduce.measure import adds_up, codec_error, gauss, printed_table, relative_mse, token_bytes

ACCURACY = printed_table("saw-int4-accuracy")
STEP = printed_table("saw-int4-4")
PREFILL = printed_table("saw-int4-6")
DECODE = printed_table("saw-int4-7")
OUTLIER = 30.0


@recomputes("saw-int4", "Sec. 1, Table 1")
def saw_printed(quick: bool) -> Found:
    """Cache of Llama 4 Scout (48 layers, 8 KV heads of 128 channels) at 10M tokens, and the ratio of INT4."""
    yield "Llama 4 Scout, 10M tokens", "bf16_tib", token_bytes("dense", 48, 8, 128) * 10e6 / 2**40
    yield "INT4, BDR", "ratio_to_bf16", 16 / get("saw-int4").effective_bits(128)


@recomputes("saw-int4", "Tables 2, 3, 5, 8, 9, means")
def saw_means(quick: bool) -> Found:
    """Means over five tasks, and drops from BF16, of the printed scores."""
    odd = "2, Qwen3-4B, Hessian+BDR-128"
    for table in sorted({label[0] for label in ACCURACY}):
        mine = {label: row for label, row in ACCURACY.items() if label[0] == table}
        good = sum(abs(sum(row[:5]) / 5 - row[5]) <= 0.0101 for row in mine.values())
        yield f"Table {table}", "means_that_add_up", good
        drops = {
            label: row[5] - ACCURACY[f"{label.rpartition(', ')[0]}, BF16"][5] - row[6]
            for label, row in mine.items()
            if len(row) == 7 and label != odd
        }
        if drops:
            yield f"Table {table}", "drops_that_add_up", sum(abs(off) <= 0.0151 for off in drops.values())
    yield "Table 2, Hessian+BDR-128", "drop", ACCURACY[odd][5] - ACCURACY["2, Qwen3-4B, BF16"][5]
    yield "Sec. 3.1, Hessian+BDR-128", "mean", sum(ACCURACY[odd][:5]) / 5


@recomputes("saw-int4", "Tables 4, 6, 7, sums")
def saw_sums(quick: bool) -> Found:
    """Totals, shares and ratios of the printed kernel times."""
    parts = [row for label, row in STEP.items() if label != "total"]
    good = sum(adds_up([row[i] for row in parts], STEP["total"][i], 1) for i in (0, 1, 2))
    yield "Table 4", "totals_that_add_up", good
    for name, table in (("Table 6", PREFILL), ("Table 7", DECODE)):
        good = 0
        for rows in _methods(table).values():
            total = rows.pop("total")
            good += sum(adds_up([row[i] for row in rows.values()], total[i], 0.01) for i in range(5))
        yield name, "totals_that_add_up", good
    plain, fused, unfused, means = _methods(PREFILL).values()
    for kernel in ("set_kv", "flatten_dequant"):
        ratios = [slow / fast for slow, fast in zip(fused[kernel], plain[kernel], strict=True)]
        yield f"fused over INT4, {kernel}, least", "time_ratio", min(ratios)
        yield f"fused over INT4, {kernel}, most", "time_ratio", max(ratios)
    for length, i in (("8k", 0), ("128k", 4)):
        added = sum(fused[kernel][i] - plain[kernel][i] for kernel in ("set_kv", "flatten_dequant"))
        yield f"fused, prefill of {length}", "percent_added", 100 * added / fused["total"][i]
        yield f"unfused, prefill of {length}", "percent_of_total", 100 * unfused["rotation"][i] / unfused["total"][i]
        yield f"k-means, prefill of {length}", "percent_of_total", 100 * means["k-means"][i] / means["total"][i]
    plain, _, unfused, means = _methods(DECODE).values()
    for i, batch in enumerate((1, 4, 8, 16, 32)):
        yield f"unfused, decode of {batch}", "percent_of_total", 100 * unfused["rotation"][i] / unfused["total"][i]
    slower = [slow / fast for slow, fast in zip(means["attention"], plain["attention"], strict=True)]
    yield "k-means over INT4, attention, least", "time_ratio", min(slower)
    yield "k-means over INT4, attention, most", "time_ratio", max(slower)


def _methods(table: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """Rows ``method, part`` by method, in their order."""
    methods: dict[str, dict[str, list[float]]] = {}
    for label, row in table.items():
        method, part = label.split(", ")
        methods.setdefault(method, {})[part] = row
    return methods


@recomputes("saw-int4", NOT_PRINTED)
def saw_implied(quick: bool) -> Found:
    """True bits, serving bytes, and the error of token-wise INT4 on N(0, 1), d = 128."""
    bits = get("saw-int4").effective_bits(128)
    yield "saw-int4, d=128", "bits", bits
    yield "saw-int4, d=128", "ratio_to_bf16", 16 / bits
    for centroids in (16, 256, 2048):
        layout = get(f"saw-int4:kmeans={centroids}").key.layout(128)
        yield f"k-means C={centroids}, d=128", "bits", layout.nominal_bits + 32 / 128
    # 80 GB x 0.8 less 16.4 GB of weights; requests of 17408 tokens, where throughput bends, and of 1280
    room = 80e9 * 0.8 - 16.4e9
    for spec in ("dense", "saw-int4"):
        ours = token_bytes(spec, 36, 8, 128)
        yield f"Qwen3-8B, {spec}", "bytes_per_token", ours
        yield f"Qwen3-8B, {spec}", "resident_requests", room / (17408 * ours)
        yield f"Qwen3-8B, {spec}", "resident_short_requests", room / (1280 * ours)
    x = gauss(quick)
    yield "token-wise INT4, rounded zero", "relative_mse", relative_mse(x, get("saw-int4:rotate=none"))
    yield "token-wise INT4, float zero", "relative_mse", relative_mse(x, get("saw-int4:rotate=none,zero=float"))
    yield "token-wise INT4, z in 4 bits", "relative_mse", _clipped_error(x.abs() + 3)


def _clipped_error(x: Tensor) -> float:
    """Relative MSE of token-wise INT4 whose zero point is clipped to 0..15, as a 4-bit field would."""
    codec = SawInt4(1)
    payload = codec.encode(x, {})
    s, z = payload["scale_zero"].float().split(1, -1)
    clipped = z.clamp(0, 15)
    decoded = s * ((torch.round(x / s) + clipped).clamp(0, 15) - clipped)
    return float((decoded - x).square().sum() / x.square().sum())


@recomputes("saw-int4", f"{NOT_PRINTED}: rotation blocks")
def saw_blocks(quick: bool) -> Found:
    """Error of INT4 behind rotations of order h, with n channels of every key at +-30 on top of N(0, 1).

    MSE over the variance of the rest, one scale and zero point per head as in ``saw-int4``, or per block of h channels
    (each block a head of its own).
    """
    for outliers in (1, 2, 4, 8):
        keys = _outlier_keys(outliers, 96, 64 if quick else 256)
        for h in (1, 16, 32, 64, 128):
            item = f"{outliers} outliers, " + ("not rotated" if h == 1 else f"h={h}, per head")
            yield item, "mse", _mse(keys, SawInt4(h))
        for h in (16, 32, 64):
            parts = keys.unflatten(-1, (-1, h)).transpose(2, 3).flatten(1, 2)
            yield f"{outliers} outliers, h={h}, per block", "mse", _mse(parts, SawInt4(h))
        # one centroid subtracts the mean, and the outliers with it
        codec = get("saw-int4:rotate=none,kmeans=1,zero=float").key
        yield f"{outliers} outliers, C=1", "mse", codec_error(keys, codec, keys) * float(keys.square().mean())


def _mse(keys: Tensor, codec: SawInt4) -> float:
    return float((roundtrip(codec, keys, {}) - keys).square().mean((1, 2, 3)).mean())


def _outlier_keys(outliers: int, patterns: int, tokens: int) -> Tensor:
    """Keys ``[patterns, 1, tokens, 128]``, each pattern with channels and signs of its own."""
    generator = torch.Generator().manual_seed(outliers)
    keys = torch.randn(patterns, 1, tokens, 128, generator=generator)
    for pattern in keys:
        channels = torch.randperm(128, generator=generator)[:outliers]
        signs = torch.randint(0, 2, (outliers,), generator=generator) * 2.0 - 1
        pattern[..., channels] += OUTLIER * signs
    return keys
