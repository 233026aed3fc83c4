"""InnerQ: effective bits, windows, error and mask of its quantizers, arithmetic of its tables."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from packedkv.cache.layer import LayerCache
from packedkv.codec import Role, Sample, Site
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.innerq import GROUP, InnerQ, Reading
from packedkv.compressed import compress
from packedkv.registry import get
from packedkv_lab.reproduce.claims import NOT_PRINTED, Found, recomputes
from packedkv_lab.reproduce.measure import adds_up, codec_error, gauss, printed_table

SCORES = printed_table("innerq-1")
LONG_SCORES = printed_table("innerq-2")
LATENCY = printed_table("innerq-4")
QUANTIZE = printed_table("innerq-5")
READINGS: tuple[Reading, ...] = ("literal", "signed", "full")
VARIANTS = ("base", "hybrid", "small")
LENGTHS = (512, 2048, 8192, 32768)
TABLE_4_ELEMENTS = 32 * 128
"""Elements of a token in Table 4: its FP16 keys take 4593 us, which 32 heads explain and 8 KV heads do not."""
JETSON_GB_S = 59.7


@recomputes("innerq", "Table 3")
def innerq_bits(quick: bool) -> Found:
    """Effective bit-widths, from layouts; windows and norms not counted."""
    kivi = get("kivi-2")
    yield "KIVI, key", "bits", kivi.key_bits(128)
    yield "KIVI, value", "bits", kivi.value_bits(128)
    yield "KIVI", "bits", kivi.effective_bits(128)
    keys, values = get("turboquant-4:norm=fp32").key_bits(128), get("turboquant-3:norm=fp32").value_bits(128)
    yield "TurboQuant", "bits", (keys + values) / 2
    for variant in VARIANTS:
        for reading in ("signed", "full"):
            ours = get(f"innerq:variant={variant},symmetric={reading}").effective_bits(128)
            yield f"InnerQ {variant}, {reading}", "bits", ours


@recomputes("innerq", "Sec. 5.3, evictions")
def innerq_evictions(quick: bool) -> Found:
    """Decode steps, after a prefill of 128, at which a cache encodes; tokens in 16 bit are sink and window."""
    blocks: dict[str, tuple[str, Role]] = {"InnerQ": ("innerq-base", "value"), "KIVI": ("kivi-2", "key")}
    for name, (spec, block) in blocks.items():
        single: Role = "key" if block == "value" else "value"
        steps, windows = _decode(spec, 96)
        for turn, (step, count) in enumerate(steps[block]):
            yield f"{name}, {block}s, group {turn + 1}", "step", step
            yield f"{name}, {block}s, group {turn + 1}", "tokens", count
        yield f"{name}, {single}s", "tokens_a_step", sum(n for _, n in steps[single]) / 96
        yield f"{name}, {single}s", "tokens_in_16_bit", max(windows[single])
        yield f"{name}, {block}s", "most_tokens_in_16_bit", max(windows[block])


@recomputes("innerq", "Fig. 4")
def innerq_speed_ups(quick: bool) -> Found:
    """Speed-ups out of the printed latencies, means over the seven lengths."""
    for other in ("FP16", "KIVI", "TurboQuant"):
        for variant in VARIANTS:
            pairs = zip(LATENCY[f"total, {other}"], LATENCY[f"total, {variant.capitalize()}"], strict=True)
            ratios = [slow / fast for slow, fast in pairs]
            yield f"{variant} over {other}", "speed_up", sum(ratios) / len(ratios)
    last = LATENCY["total, KIVI"][-1] / LATENCY["total, Small"][-1]
    yield "small over KIVI, 32768 tokens", "speed_up", last


@recomputes("innerq", "Tables 1, 2, averages")
def innerq_averages(quick: bool) -> Found:
    """Averages and differences that the text takes of the printed scores."""
    rows = {label: row for label, row in SCORES.items() if not label.endswith("Average")}
    sums = 0
    for label, row in SCORES.items():
        if label.endswith("Average"):
            task = [r for name, r in rows.items() if name.split(", ")[0] == label.split(", ")[0]]
            sums += sum(abs(sum(r[i] for r in task) / len(task) - row[i]) <= 0.0101 for i in range(len(row)))
    yield "Table 1, task averages", "averages_that_add_up", sums
    short = ("KIVI", "KIVI_Sink", "TurboQuant", "base", "hybrid", "small")
    long = ("KIVI", "KIVI_Sink", "base", "hybrid", "small")
    pairs = (("base", "KIVI"), ("base", "KIVI_Sink"), ("base", "TurboQuant"), ("base", "small"), ("base", "hybrid"),
             ("hybrid", "small"), ("KIVI_Sink", "KIVI"))  # fmt: skip
    for table, names, scores in (("Table 1", short, list(rows.values())), ("Table 2", long, [*LONG_SCORES.values()])):
        means = {name: sum(r[i] for r in scores) / len(scores) for i, name in enumerate(names, 1)}
        for better, worse in pairs:
            if worse in means:
                yield f"{table}, {better} over {worse}", "points", means[better] - means[worse]


@recomputes("innerq", "Tables 4-6, sums")
def innerq_sums(quick: bool) -> Found:
    """Totals of the printed latencies."""
    totals = [(name.removeprefix("total, "), row) for name, row in LATENCY.items() if name.startswith("total")]
    good = sum(
        adds_up([LATENCY[f"key, {name}"][i], LATENCY[f"value, {name}"][i]], total, 1.0)
        for name, row in totals
        for i, total in enumerate(row)
    )
    yield "Table 4", "totals_that_add_up", good
    good = sum(adds_up([k, v], t, 0.1) for k, v, t in zip(*QUANTIZE.values(), strict=True))
    yield "Table 5", "totals_that_add_up", good
    for tokens, same in ((1024, 1), (4096, 3), (16384, 5), (32768, 6)):
        yield f"Table 6, {tokens} tokens", "microseconds", LATENCY["value, Hybrid"][same]


@recomputes("innerq", NOT_PRINTED)
def innerq_implied(quick: bool) -> Found:
    """What the paper implies: true bits, bits with windows, errors, masks, bandwidth."""
    for variant in VARIANTS:
        yield f"InnerQ {variant}, literal", "bits", get(f"innerq:variant={variant}").effective_bits(128)
    for variant in VARIANTS:
        for tokens in LENGTHS[: 3 if quick else 4]:
            x = torch.randn(1, 1, tokens, 128, generator=torch.Generator().manual_seed(0)).half()
            ours = compress(f"innerq:variant={variant},symmetric=signed", x, x).effective_bits
            yield f"InnerQ {variant}, {tokens} tokens", "bits_with_windows", ours
    x = gauss(quick)
    for bits in (2, 3):
        for reading in READINGS:
            yield f"b={bits}, {reading}", "relative_mse", codec_error(x, InnerQ(bits, symmetric=reading))
        yield f"b={bits}, asymmetric", "relative_mse", codec_error(x, GroupInt(bits, GROUP))
    yield from _masks(quick)
    yield from _norm()
    yield from _bandwidth()


def _masks(quick: bool) -> Found:
    """Share of groups that the hybrid quantizer stores symmetrically, in percent, by law and reading."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, 8192 if quick else 32768, 128)
    draws = {name: draw(shape, generator) for name, draw in LAWS.items()}
    share = {reading: {name: _symmetric_share(reading, x) for name, x in draws.items()} for reading in READINGS}
    for name in LAWS:
        yield f"mask, literal, {name}", "percent_symmetric", share["literal"][name]
    yield "mask, full, least of four laws", "percent_symmetric", min(share["full"].values())
    yield "mask, full, most of four laws", "percent_symmetric", max(share["full"].values())
    yield "mask, signed, most of four laws", "percent_symmetric", max(share["signed"].values())


def _symmetric_share(reading: str, x: Tensor) -> float:
    codec = get(f"innerq:variant=hybrid,symmetric={reading}").value
    asymmetric = torch.signbit(codec.encode(x, {})["scale"])
    return 100 * (1 - float(asymmetric.double().mean()))


def _norm() -> Found:
    """Largest key of a channel after the norm against the root of the largest before, Sec. 4.3; per rotary pair."""
    keys = torch.randn(1, 4, 512, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 128)
    codec = InnerQ(3, norm=True)
    held = codec.to_code(keys, codec.fit(Site(0, "key", 4, 128), Sample(keys))).abs().amax(2)
    ratio = _pair_max(held) / _pair_max(keys.abs().amax(2)).sqrt()
    yield "key norm, least channel", "max_over_root", float(ratio.min())
    yield "key norm, most channel", "max_over_root", float(ratio.max())


def _pair_max(largest: Tensor) -> Tensor:
    half = largest.shape[-1] // 2
    return torch.maximum(largest[..., :half], largest[..., half:])


def _bandwidth() -> Found:
    """Bandwidth that the latencies of 32768 tokens imply; the module peaks at 59.7 GB/s."""

    def speed(part: str, method: str, bits: float, elements: int = TABLE_4_ELEMENTS) -> float:
        return 32768 * elements * bits / 8 / LATENCY[f"{part}, {method}"][-1] / 1e3  # bytes a microsecond -> GB/s

    yield "FP16 keys, 8 KV heads", "gb_per_s", speed("key", "FP16", 16, 8 * 128)
    yield "FP16 keys, 32 heads", "gb_per_s", speed("key", "FP16", 16)
    turbo = get("turboquant-4:norm=fp32").key_bits(128), get("turboquant-3:norm=fp32").value_bits(128)
    bits = {"FP16": (16.0, 16.0), "KIVI": (get("kivi-2").key_bits(128), get("kivi-2").value_bits(128))}
    bits["TurboQuant"] = turbo
    for variant in VARIANTS:
        scheme = get(f"innerq:variant={variant},symmetric=signed")
        bits[variant.capitalize()] = scheme.key_bits(128), scheme.value_bits(128)
    methods = {
        "key": ("FP16", "KIVI", "TurboQuant", "Base"),
        "value": ("KIVI", "TurboQuant", "Base", "Hybrid", "Small"),
    }
    for part, names in methods.items():
        for method in names:
            share = 100 * speed(part, method, bits[method][part == "value"]) / JETSON_GB_S
            yield f"{part}, {method}, 32768 tokens", "percent_of_peak_bandwidth", share


def _decode(spec: str, steps: int) -> tuple[dict[Role, list[tuple[int, int]]], dict[Role, list[int]]]:
    """Prefill 128 tokens and decode: ``(step, tokens encoded)`` and 16-bit tokens after each step, by role."""
    cache = LayerCache(get(spec))
    x = torch.randn(1, 1, 128 + steps, 32, generator=torch.Generator().manual_seed(0)).half()
    cache.append(x[:, :, :128], x[:, :, :128])
    encoded: dict[Role, list[tuple[int, int]]] = {"key": [], "value": []}
    dense: dict[Role, list[int]] = {"key": [], "value": []}
    for step in range(1, steps + 1):
        before = {role: state.encoded for role, state in cache.roles.items()}
        token = x[:, :, 127 + step : 128 + step]
        cache.append(token, token)
        for role, state in cache.roles.items():
            if state.encoded > before[role]:
                encoded[role].append((step, state.encoded - before[role]))
            dense[role].append(len(cache) - state.encoded)
    return encoded, dense


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _laplace(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    u = torch.rand(*shape, generator=generator) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def _student(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    chi = sum((_normal(shape, generator) ** 2 for _ in range(5)), torch.zeros(shape))
    return _normal(shape, generator) / (chi / 5).sqrt()


def _shifted(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """N(0, 1) around a mean of its own for every group of 32 tokens, N(0, 1) as well."""
    x = _normal(shape, generator)
    means = torch.randn(*shape[:2], shape[2] // GROUP, 1, shape[3], generator=generator)
    return (x.unflatten(2, (-1, GROUP)) + means).flatten(2, 3)


LAWS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": _normal,
    "Laplace": _laplace,
    "t, 5 degrees": _student,
    "normal, shifted": _shifted,
}
