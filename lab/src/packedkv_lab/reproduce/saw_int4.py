"""SAW-INT4, arXiv:2604.19157: bytes, and what follows from the printed scores and kernel times."""

from packedkv.registry import get
from packedkv_lab.reproduce.claims import Figures, recomputes
from packedkv_lab.reproduce.measure import printed_table, token_bytes

PREFILL = printed_table("saw-int4-6")
DECODE = printed_table("saw-int4-7")
HESSIAN, HESSIAN_MEAN, BF16_MEAN = (60.10, 84.27, 42.11, 53.33, 87.80), 65.52, 75.64
"""Table 2, Qwen3-4B: scores of Hessian+BDR-128 and their printed mean; printed mean of BF16."""


@recomputes("saw-int4", "Sec. 1, Table 1")
def saw_printed(quick: bool) -> Figures:
    """Cache of Llama 4 Scout (48 layers, 8 KV heads of 128 channels) at 10M tokens, and the ratio of INT4."""
    yield "Llama 4 Scout, 10M tokens", "bf16_tib", token_bytes("dense", 48, 8, 128) * 10e6 / 2**40
    yield "INT4, BDR", "ratio_to_bf16", 16 / get("saw-int4").effective_bits(128)


@recomputes("saw-int4", "Table 2, means")
def saw_means(quick: bool) -> Figures:
    """Mean over five tasks, and drop from BF16, of one row of Table 2."""
    yield "Table 2, Hessian+BDR-128", "drop", HESSIAN_MEAN - BF16_MEAN
    yield "Sec. 3.1, Hessian+BDR-128", "mean", sum(HESSIAN) / len(HESSIAN)


@recomputes("saw-int4", "Tables 6, 7, ratios")
def saw_ratios(quick: bool) -> Figures:
    """Shares and ratios of the printed kernel times."""
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
