"""What each preset must reach on one H200, and what it aims at; a row of results is marked by them.

Speed-ups over the fastest bf16 attention of the same run, cold L2, at ``llm64k`` / ``b32_8k`` / ``b32_32k``; encode in
microseconds for 64k tokens of 4 KV heads at head_dim 128, keys and values.
"""

from typing import NamedTuple

from kvcodec_lab.bench.shapes import Shape

SHAPE_NAMES = ("llm64k", "b32_8k", "b32_32k")
FP8_RIVAL = "FlashAttention-3, fp8 cache"
APART_US = {
    "FlashAttention-3, bf16 cache": (52.9, 261.0, 983.0),
    FP8_RIVAL: (44.7, 203.0, 755.0),
    "int4_per_token_head (Triton)": (635.0, 1119.0, 4356.0),
    "turboquant_4bit_nc (Triton)": (707.0, 1370.0, 5348.0),
    "turboquant_3bit_nc (Triton)": (957.0, 2201.0, 8686.0),
    "ultraquant_4bit (Triton, made for another GPU)": (804.0, 1006.0, 3866.0),
}
"""vLLM 0.33's own attention on an H200, microseconds, cold by the same method, in the order of ``SHAPE_NAMES``;
measured apart from the rows, because they need an engine around them."""
FP8_BITS = 5.0
"""A preset of the table that holds no more bits than this shall also beat FP8_RIVAL at 32 sequences."""


class Target(NamedTuple):
    """Must and aim of one preset, in the order of ``SHAPE_NAMES``."""

    must: tuple[float, float, float]
    aim: tuple[float, float, float]


_INT = Target((1.8, 2.7, 3.2), (2.15, 3.1, 3.6))
_ULTRAQUANT = Target((1.7, 2.5, 3.0), (1.9, 2.95, 3.5))
_INNERQ = Target((1.7, 2.5, 3.0), (2.0, 2.9, 3.5))
_KIVI = Target((1.8, 2.8, 3.5), (2.2, 3.6, 4.6))
_TABLE16 = Target((1.6, 2.3, 2.8), (1.85, 2.9, 3.4))
DECODE = {
    "saw-int4": _INT,
    "int-4": _INT,
    "ultraquant": _ULTRAQUANT,
    "innerq-base": _INNERQ,
    "innerq-small": _INNERQ,
    "innerq-hybrid": _INNERQ,
    "kivi-2": _KIVI,
    "ultra-tq": _TABLE16,
    "turboquant-4": _TABLE16,
    "octopus-2": Target((1.7, 2.7, 3.3), (2.0, 3.4, 4.2)),
    "octopus-3": Target((1.6, 2.5, 3.1), (1.9, 3.0, 3.5)),
    "octopus-4": Target((1.3, 2.0, 2.6), (1.6, 2.3, 2.85)),
    "hqmq-s24_r3": Target((1.5, 2.3, 2.7), (1.75, 2.9, 3.4)),
    "hqmq-s96_r4": Target((1.4, 1.9, 2.3), (1.7, 2.5, 3.2)),
}
ENCODE_SHAPE = Shape("llm64k", 1, 28, 4, 128, 65536)
_BYTES = (164.0, 82.0)
ENCODE_US = {
    **dict.fromkeys(("saw-int4", "int-4", "ultraquant", "innerq-base", "innerq-small", "innerq-hybrid"), _BYTES),
    **dict.fromkeys(("octopus-2", "octopus-3", "octopus-4"), (400.0, 120.0)),
    "hqmq-s96_r4": (1200.0, 150.0),
}
"""Must and aim; those of integers and FP4 are four and two times the byte floor."""

FIRST_TOKEN = ((4096, 1.5, 3.0), (1 << 30, 1.15, 0.0))
"""Time to the first token of a new cache, for prompts up to so many tokens: a factor of DynamicCache's, and ms."""
FIRST_CACHE_MORE_MS = 300.0
"""What the first cache of a process may take beside that."""
NEXT_TURN = 1.6
"""New tokens over a filled cache, as a factor of DynamicCache's time."""


def most_ms(metric: str, tokens: int, dynamic: float) -> float:
    """Milliseconds that a row of ``bench first`` may have at most, where DynamicCache takes ``dynamic``.

    >>> most_ms("first_token_ms", 1024, 12.0), most_ms("first_cache_ms", 1024, 12.0), most_ms("next_turn_ms", 128, 20.0)
    (21.0, 321.0, 32.0)
    """
    if metric == "next_turn_ms":
        return NEXT_TURN * dynamic
    factor, more = next((factor, more) for most, factor, more in FIRST_TOKEN if tokens <= most)
    return factor * dynamic + more + (FIRST_CACHE_MORE_MS if metric == "first_cache_ms" else 0.0)


def verdict(spec: str, shape: str, metric: str, value: float) -> str | None:
    """``aim met``, ``must met`` or ``must missed``; None where nothing is asked.

    Parameters
    ----------
    spec, shape, metric : str
        As in a result row: ``speedup_vs_bf16_cold`` (a ratio) and ``encode_us`` have targets.
    value : float

    Examples
    --------
    >>> verdict("kivi-2", "b32_32k", "speedup_vs_bf16_cold", 3.6), verdict("kivi-2", "video", "encode_us", 1.0)
    ('must met', None)
    """
    if metric == "speedup_vs_bf16_cold" and spec in DECODE and shape in SHAPE_NAMES:
        i = SHAPE_NAMES.index(shape)
        must, aim = DECODE[spec].must[i], DECODE[spec].aim[i]
        return "aim met" if value >= aim else "must met" if value >= must else "must missed"
    if metric == "encode_us" and spec in ENCODE_US and shape == ENCODE_SHAPE.name:
        most, aim = ENCODE_US[spec]
        return "aim met" if value <= aim else "must met" if value <= most else "must missed"
    return None
