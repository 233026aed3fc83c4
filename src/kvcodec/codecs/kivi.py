"""KIVI: asymmetric integers, keys grouped along tokens, values grouped along channels. arXiv:2402.02750, Sec. 3.

Keys have a few channels that are large in every token, so a group of keys is G tokens of ONE channel and an outlier
channel enlarges no other step; values have none, so a group is G channels of one token::

    Z = fp16(min x)     S = fp16((max x - Z) / (2^b - 1))     x^ = S clip(rne((x - Z) / S), 0, 2^b - 1) + Z

Blocks (drawn for b = 2, D = 128, G = 32; arithmetic and bytes are ``group_int``'s)::

    keys, 32 tokens of one head              values, one token of one head
    codes   uint8  [32, D b / 8]             codes   uint8  [D b / 8]
    scale   fp16   [D]                       scale   fp16   [ceil(D / G)]
    zero    fp16   [D]                       zero    fp16   [ceil(D / G)]

Values of 2 and 3 bits in groups of 32 are interleaved where 128 divides D (``group_int``): the same bytes in another
order.

Bits: keys b + 32/G, values b + 32 ceil(D/G) / D; D = 128, G = 32, b = 2: 3.0 and 3.0. At D = 80 the last group of a
value has 16 channels: 3.0 and 3.2.

Window: AT LEAST the newest 128 tokens stay in 16 bit. Values leave one by one (exactly 128 stay), keys 32 at a time
(128..159 stay): after a prefill of 128, keys 0-31 are encoded at decode step 32, keys 32-63 at step 64, and one value
at every step. Group edges lie at sink + 32 j, whatever the prefill. The sink variant (``kivi-sink-2``, InnerQ, Table 1)
keeps the first 32 and the newest 96 tokens.

Deviations
1. The authors' code encodes its residual keys 128 at a time, so between 0 and 127 recent keys are exact. InnerQ's code
   for this baseline encodes 32 keys whenever its window holds 32, so the window shrinks to a few tokens. Here it never
   falls short of ``window``, as InnerQ's text says.
2. The held minimum is the offset of the codes, see ``group_int``.

Pitfalls: cropping into the middle of an encoded group of keys leaves dead slots, since a group is never encoded again.
Short contexts gain nothing: below 128 + 32 tokens all keys are still in 16 bit.

Use: keys with outlier channels, at 3 bits in long contexts, without rotation or calibration; the window keeps the
newest 128 tokens exact.

Not for: contexts of a few hundred tokens (all of them in the window), engines whose pages hold no unfinished group,
frequent cropping in mid-context.
"""

from typing import Literal

from kvcodec.codecs.group_int import GroupInt
from kvcodec.registry import register
from kvcodec.scheme import KVScheme


@register(
    "kivi",
    source="KIVI, arXiv:2402.02750, Sec. 3",
    presets={"kivi-2": {"bits": 2}, "kivi-4": {"bits": 4}, "kivi-sink-2": {"bits": 2, "window": 96, "sink": 32}},
)
def kivi(bits: Literal[2, 3, 4, 8] = 2, group: int = 32, window: int = 128, sink: int = 0) -> KVScheme:
    """Asymmetric integers: keys in groups along tokens, values in groups along channels.

    Parameters
    ----------
    bits : {2, 3, 4, 8}
        Bits of a code.
    group : int
        Tokens (keys) or channels (values) that share a scale.
    window : int
        Newest tokens that stay in 16 bit, at least.
    sink : int
        First tokens that stay in 16 bit for ever.
    """
    return KVScheme(
        key=GroupInt(bits, group, "tokens"), value=GroupInt(bits, group, "channels"), sink=sink, window=window
    )
