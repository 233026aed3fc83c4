"""int: plain round-to-nearest integers, the baseline that every paper compares with (it calls it RTN or naive INT).

One grid per token and head (``group=0``), or per group of neighbouring channels, asymmetric by default; the maths and
the rounding are ``group_int``'s. Keys and values alike, no rotation, no window::

    Z = fp16(min x)     S = fp16((max x - Z) / (2^b - 1))     x^ = S clip(rne((x - Z) / S), 0, 2^b - 1) + Z

Block (one token of one head)::

    codes   uint8  [D b / 8]         channel 0 in the lowest bits, or interleaved
    scale   fp16   [1]               [ceil(D / G)] in groups
    zero    fp16   [1]               asymmetric only

Codes of 2 and 3 bits are interleaved with ``group=32`` where 128 divides D (``group_int``): the same bytes in another
order.

Bits: b + 32/D; D = 128, b = 4: 68 bytes, 4.25. Groups of 32: b + 1. Symmetric: half of that overhead.

``outliers=3`` is HQMQ's "naive int + Med3" (arXiv:2605.27646, Sec. 4.5): chunks of four longer than 3 medians are held
in fp16 by ``med``, up to ``slots`` a token, and the integers see zeros in their place. Two slots: + 1.25, 5.5 bits.

Deviations: none; there is no paper to deviate from. Relative MSE on Gaussian tokens of D = 128, per token: 0.251,
0.0457, 0.0099 and 3.4e-5 at 2, 3, 4 and 8 bits; in groups of 32: 0.154, 0.0281, 0.0061 and 2.1e-5.

Pitfalls: one outlier channel sets the step of the whole token. Keys of models with a key bias (Qwen2.5) have such
channels, and INT4 keys break there; use saw-int4 or kivi. With ``outliers=3`` the paper's int4 still does (Table 2).

Use: a baseline, and models whose keys have no outlier channels (probe: ``cache.report()["keys"]``). int-4 has fused
kernels, without options.

Not for: keys with a few large channels (Qwen2-like): one of them sets the step of all others. saw-int4 costs the same
bytes and spreads it; ``outliers=3`` holds it in fp16, for 1.25 bits more (D = 128; 2.25 at D = 64, where groups of 32,
``group=32``, + 0.5, do as well on the small model measured).
"""

from typing import Literal

from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.outliers import Outliers, with_outliers
from packedkv.errors import SpecError
from packedkv.ops.scale_search import Scale
from packedkv.registry import register
from packedkv.scheme import KVScheme


@register("int", source="round-to-nearest baseline", presets=("int-2", "int-3", "int-4", "int-8"), mark="baseline")
def int_naive(
    bits: Literal[2, 3, 4, 8] = 4,
    symmetric: bool = False,
    group: int = 0,
    outliers: Outliers = "off",
    slots: int = 2,
    scale: Scale = "own",
) -> KVScheme:
    """Plain integers, one scale per token and head: the baseline.

    Parameters
    ----------
    outliers : {"off", 3, 4, 5}
        Chunks of four longer than this many medians are stored in fp16, up to ``slots`` a token; needs a sample.
    slots : int
        Room for such chunks per token, 64 bits each.
    """
    if scale == "search" and outliers != "off":
        raise SpecError(
            f"int: scale=search with outliers={outliers} is not allowed: it would count errors of the zeros that stand "
            f"for outliers; use one of the two."
        )
    codec = with_outliers(GroupInt(bits, group, "channels", symmetric, scale=scale), outliers, slots)
    return KVScheme(key=codec, value=codec)
