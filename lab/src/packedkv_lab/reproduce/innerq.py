"""InnerQ: effective bits, windows, and what follows from the printed scores and latencies."""

import torch

from packedkv.cache.layer import LayerCache
from packedkv.codec import Role
from packedkv.registry import get
from packedkv_lab.reproduce.claims import Figures, recomputes
from packedkv_lab.reproduce.measure import printed_table

SCORES = printed_table("innerq-1")
LONG_SCORES = printed_table("innerq-2")
LATENCY = printed_table("innerq-4")
VARIANTS = ("base", "hybrid", "small")


@recomputes("innerq", "Table 3")
def innerq_bits(quick: bool) -> Figures:
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
def innerq_evictions(quick: bool) -> Figures:
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
def innerq_speed_ups(quick: bool) -> Figures:
    """Speed-ups out of the printed latencies, means over the seven lengths."""
    for other in ("FP16", "KIVI", "TurboQuant"):
        for variant in VARIANTS:
            pairs = zip(LATENCY[other], LATENCY[variant.capitalize()], strict=True)
            ratios = [slow / fast for slow, fast in pairs]
            yield f"{variant} over {other}", "speed_up", sum(ratios) / len(ratios)
    last = LATENCY["KIVI"][-1] / LATENCY["Small"][-1]
    yield "small over KIVI, 32768 tokens", "speed_up", last


@recomputes("innerq", "Tables 1, 2, averages")
def innerq_averages(quick: bool) -> Figures:
    """Averages and differences that the text takes of the printed scores."""
    short = ("KIVI", "KIVI_Sink", "TurboQuant", "base", "hybrid", "small")
    long = ("KIVI", "KIVI_Sink", "base", "hybrid", "small")
    pairs = (("base", "KIVI"), ("base", "KIVI_Sink"), ("base", "TurboQuant"), ("base", "small"), ("base", "hybrid"),
             ("hybrid", "small"), ("KIVI_Sink", "KIVI"))  # fmt: skip
    for table, names, scores in (("Table 1", short, [*SCORES.values()]), ("Table 2", long, [*LONG_SCORES.values()])):
        means = {name: sum(r[i] for r in scores) / len(scores) for i, name in enumerate(names, 1)}
        for better, worse in pairs:
            if worse in means:
                yield f"{table}, {better} over {worse}", "points", means[better] - means[worse]


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
