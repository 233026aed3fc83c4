"""KIVI: asymmetric integers, keys grouped along tokens, values grouped along channels. arXiv:2402.02750, Sec. 3.

Keys have a few channels that are large in every token, so a group of keys is G tokens of ONE channel and an outlier
channel enlarges no other step; values have none, so a group is G channels of one token. Arithmetic and bytes are those
of asymmetric ``int`` (drawn for b = 2, D = 128, G = 32)::

    keys, 32 tokens of one head              values, one token of one head
    codes   uint8  [32, D b / 8]             codes   uint8  [D b / 8]
    scale   fp16   [D]                       scale   fp16   [ceil(D / G)]
    zero    fp16   [D]                       zero    fp16   [ceil(D / G)]

With ``values=turboquant`` values are TurboQuant-MSE instead (``turboquant``). Neither role is fitted on data.

Bits: keys b + 32/G; values b + 32 ceil(D/G) / D, TurboQuant b + 16/D. The last group of a value may be shorter: at
D = 80 and G = 32 it has 16 channels, at D = 64 and G = 128 there is one of 64.

Window: AT LEAST the newest 128 tokens stay in 16 bit. Values leave one by one (exactly 128 stay), keys G at a time
(128 .. 127 + G stay): with G = 32, after a prefill of 128, keys 0-31 are encoded at decode step 32, keys 32-63 at step
64, and one value at every step. Group edges lie at sink + G j, whatever the prefill; a page holds whole groups. The
sink variant (``kivi-sink-2``, InnerQ, Table 1) keeps the first 32 and the newest 96 tokens. ``kivi-tq`` has
``window=0``: a value is encoded alone, and the unfinished group leaves the newest 0 to 127 keys exact, as many as the
authors' code does. So it costs its bits from 128 tokens on, and engines whose requests share pages serve it as it is.

Deviations
1. The authors' code encodes its residual keys 128 at a time, so between 0 and 127 recent keys are exact. InnerQ's code
   for this baseline encodes 32 keys whenever its window holds 32, so the window shrinks to a few tokens. Here it never
   falls short of ``window``, as InnerQ's text says.
2. The stored minimum is the offset of the codes, see ``group_int``.

Pitfalls: cropping into the middle of an encoded group of keys leaves dead slots, since a group is never encoded again.
Short contexts gain nothing: below window + G tokens all keys are still in 16 bit.

Use: keys with outlier channels or biases, without calibration. ``kivi-tq`` has the fewest bits at equal quality;
``kivi-4`` and ``kivi-2`` are the paper's groups, with the newest 128 tokens exact.

Not for: contexts of a few hundred tokens (all of them in the window), engines whose pages hold no unfinished group,
frequent cropping in mid-context.
"""

from typing import Literal

from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.turboquant import TurboQuant
from packedkv.errors import SpecError
from packedkv.ops.scale_search import Scale
from packedkv.registry import register
from packedkv.scheme import KVScheme

_TQ = {"group": 128, "values": "turboquant", "window": 0}


@register(
    "kivi",
    source="KIVI, arXiv:2402.02750, Sec. 3",
    presets={
        "kivi-2": {"bits": 2},
        "kivi-4": {"bits": 4},
        "kivi-sink-2": {"bits": 2, "window": 96, "sink": 32},
        "kivi-g64-4": {"bits": 4, "group": 64},
        "kivi-g64-3": {"bits": 3, "group": 64},
        "kivi-g128-4": {"bits": 4, "group": 128},
        "kivi-tq-4": {"bits": 4, **_TQ},
        "kivi-tq-3": {"bits": 3, **_TQ},
    },
    recommended=("kivi-4", "kivi-tq-4"),
)
def kivi(
    bits: Literal[2, 3, 4, 8] = 2,
    group: int = 32,
    window: int = 128,
    values: Literal["int", "turboquant"] = "int",
    scale: Scale = "own",
) -> KVScheme:
    """Asymmetric integers: keys in groups along tokens, values in groups along channels or TurboQuant.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code; with TurboQuant values 2, 3 or 4.
    group : int
        Tokens (keys) or channels (integer values) that share a scale.
    window : int
        Newest tokens that stay in 16 bit, at least.
    values : {"int", "turboquant"}
        What values are: integers as well, or TurboQuant-MSE with a norm for each token.
    """
    if values == "turboquant" and bits == 8:
        raise SpecError("kivi: bits=8 with values=turboquant is not allowed; use 2, 3 or 4 bits, or values=int.")
    value = GroupInt(bits, group, "channels", scale=scale) if values == "int" else TurboQuant(bits, scale=scale)
    return KVScheme(key=GroupInt(bits, group, "tokens", scale=scale), value=value, window=window)
