"""Med: chunks of four far longer than the median stay in fp16, beside any codec. HQMQ, arXiv:2605.27646, Sec. 3.

    x = 4 neighbouring channels, r = |x|          D is zero-padded to a multiple of 4; n = ceil(D / 4)
    outlier  iff  r > threshold = C r_med         r_med: median of r, per layer, head and role (Alg. 1, lines 11-13)
    outliers -> fp16, one flag bit per chunk      everything else -> the inner codec, which sees zeros in their place

Block (T = ``block_tokens`` of the inner codec, of one head): the inner codec's fields, then ::

    flags     uint8  [ceil(T n / 8)]     which chunks are stored; token 0, chunk 0 in the lowest bit
    outliers  fp16   [T slots, 4]        those chunks, ``slots`` rows per token, ascending; unused rows are zero

Bits: the inner codec's + (8 ceil(T n / 8) / T + 64 slots) / D; D = 128: + 0.75, 1.25, 1.75 with 1, 2, 3 slots. The
paper's side channel has no fixed size; its printed bits imply outliers in 0.6 to 1.9 chunks of 32.

Which ``slots``: outliers lie in a few fixed channels, so take the chunks per token above the threshold, p n rounded up,
of the worst head, and let ``Med.overflow`` tell what still finds no place. One outlier without a place spoils its
token; a slot too many costs 64 / D bits. On Qwen2.5-Coder-1.5B two are too few: every token of layer 0 has more, and
with room for all of them the loss of ``outliers=3`` is gone (docs/key-biases.md).

Outliers are those of the model basis: the inner codec's ``to_code`` and ``from_code`` run inside ``encode`` and
``decode``. A rotating inner codec loses only the time to rotate back each decoded token.

Deviations from the paper
1. The threshold is frozen at ``fit``: C times the sample's median. The paper takes the median of the whole batch at
   each call, and leaves streaming open; a running median would make a token's bytes depend on the calls before it.
2. The median is per head, as App. D has it; Sec. 3 also says across heads.
3. A token has ``slots`` places: its longest chunks above the threshold take them, the lowest first on ties. What finds
   no place is quantized with the rest. Nothing is clamped, but that token is as coarse as without outliers.

Pitfalls
1. The zeros enter the inner codec's scales. They are harmless to a symmetric range and to an asymmetric one that spans
   zero; a token whose other channels all lie on one side of zero gets a range that reaches to zero.
2. A cache without constants fits on its first call. 10^3 chunks make a stable median (Sec. 3): 32 tokens of D = 128.
3. Outliers are not all that plain integers lack: the paper's int4 + Med3 stays broken on Qwen2.5 (Table 2).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from packedkv.checks import needed
from packedkv.codec import LARGEST, NO_SAMPLE, Codec, Constant, Constants, Params, Part, Payload, Sample, Site
from packedkv.codecs.wrapper import Wrapper, around, inside
from packedkv.errors import SpecError
from packedkv.layout import Field, Layout
from packedkv.ops.bitpack import pack, packed_bytes, unpack
from packedkv.ops.quaternion import chunk_lengths, split_chunks
from packedkv.shared import seeded_params

Outliers = Literal["off", 3, 4, 5]
"""What recipes offer: off, or C."""
SIDE = ("flags", "outliers")


@dataclass(frozen=True)
class Med(Wrapper):
    """Store the chunks that are longer than ``c`` medians in fp16, and give the rest to ``inner``.

    Parameters
    ----------
    c : float
        C, positive; the paper has 3, 4 and 5.
    slots : int
        Room for outliers per token, 64 bits each.
    """

    c: float = 3
    slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.c, (int, float)) or not 0 < self.c < float("inf"):
            raise SpecError(f"Med: c={self.c!r} is not allowed; use a positive number of medians, e.g. 3, 4 or 5.")
        if not isinstance(self.slots, int) or self.slots < 1:
            raise SpecError(f"Med: slots={self.slots!r} is not allowed; use at least 1, or outliers=off.")

    @property
    def needs(self) -> frozenset[Part]:
        return self.inner.needs | {"tensor"}

    to_code, query_to_code, from_code = Codec.to_code, Codec.query_to_code, Codec.from_code

    def layout(self, head_dim: int) -> Layout:
        """The inner codec's fields, then flags and outliers; raises SpecError if it has outliers of its own."""
        inner = self.inner.layout(head_dim)
        tokens, n = inner.block_tokens, -(-head_dim // 4)
        side = (
            Field("flags", "uint8", (packed_bytes(tokens * n, 1),), "flags"),
            Field("outliers", "float16", (tokens * min(self.slots, n), 4), "outliers"),
        )
        for taken in {f.name for f in inner.fields} & {f.name for f in side}:
            name = type(self.inner).__name__
            raise SpecError(f"Med: {name} has a field {taken!r} of its own; use a codec without outliers.")
        return replace(inner, fields=(*inner.fields, *side))

    def constants(self, site: Site) -> Constants:
        return {"threshold": Constant((site.num_heads,), low=0, each=True), **super().constants(site)}

    def fit(self, site: Site, sample: Sample = NO_SAMPLE) -> Params:
        """Set ``threshold [B, H]``, C times each sequence's median length; fit the inner codec on the other chunks."""
        empty = sample.tensor is None or 0 in sample.tensor.shape[1:]
        x = needed("Med: the median of chunk lengths", None if empty else sample.tensor, ", use outliers=off")
        chunks = split_chunks(x.float())
        median = chunk_lengths(chunks).flatten(2).median(2).values  # of each sequence: no row depends on its neighbours
        threshold = torch.where(median > 0, self.c * median, LARGEST)  # mostly zeros: nothing to compare with
        threshold = threshold.clamp_max(LARGEST).float()
        if self.inner.needs or sample.queries is not None:
            bulk = _zeroed(chunks, _longest(_above(chunks, threshold), self.slots), x.shape[-1])
            inner = self.inner.fit(site, replace(sample, tensor=bulk))
        else:  # a cache shares random constants
            inner = seeded_params(self.inner, site)
        return around({"threshold": threshold.to(site.device)}, inner)

    def encode(self, x: Tensor, params: Params) -> Payload:
        chunks = split_chunks(x)  # [B, H, N, n, 4]
        flags = _longest(_above(chunks, params["threshold"]), self.slots)
        slots = min(self.slots, flags.shape[-1])
        count = torch.arange(1, slots + 1, device=x.device).expand(*flags.shape[:-1], slots)
        place = torch.searchsorted(flags.cumsum(-1), count.contiguous())  # [B, H, N, slots], n where unused
        padded = torch.nn.functional.pad(chunks, (0, 0, 0, 1))
        outliers = padded.gather(3, place[..., None].expand(*place.shape, 4)).half()
        bulk, constants = _zeroed(chunks, flags, x.shape[-1]), inside(params)
        return {
            **self.inner.encode(self.inner.to_code(bulk, constants), constants),
            "flags": pack(blocks(flags.to(torch.uint8), self.block_tokens), 1),
            "outliers": blocks(outliers, self.block_tokens),
        }

    def decode(self, payload: Payload, params: Params) -> Tensor:
        constants = inside(params)
        x = self.inner.from_code(
            self.inner.decode({n: t for n, t in payload.items() if n not in SIDE}, constants), constants
        )
        tokens, dim = self.block_tokens, x.shape[-1]
        n = -(-dim // 4)
        flags = unpack(payload["flags"], 1, tokens * n).unflatten(-1, (tokens, n)).flatten(2, 3).bool()
        outliers = payload["outliers"].float().unflatten(-2, (tokens, -1)).flatten(2, 3)
        slot = (flags.long().cumsum(-1) - 1).clamp(0, outliers.shape[-2] - 1)
        values = outliers.gather(3, slot[..., None].expand(*slot.shape, 4))
        return torch.where(flags[..., None], values, split_chunks(x)).flatten(-2)[..., :dim]

    def overflow(self, x: Tensor, params: Params) -> Tensor:
        """Count the chunks above the threshold that find no slot, per token of ``x [B, H, N, D]``, model basis.

        The largest number of the result, int64 ``[B, H, N]``, says how many slots are missing.
        """
        above = _above(split_chunks(x), params["threshold"])
        return ((above > 0).sum(-1) - self.slots).clamp_min(0)


def blocks(x: Tensor, tokens: int) -> Tensor:
    """Fold ``tokens`` neighbouring tokens: ``[B, H, N, n, ...]`` -> ``[B, H, N / tokens, tokens n, ...]``."""
    return x.unflatten(2, (-1, tokens)).flatten(3, 4)


def with_outliers(codec: Codec, outliers: Outliers, slots: int) -> Codec:
    """What recipes with the options ``outliers`` and ``slots`` build: ``codec``, or Med around it."""
    return codec if outliers == "off" else Med(codec, outliers, slots)


def _above(chunks: Tensor, threshold: Tensor) -> Tensor:
    """Lengths of ``chunks [B, H, N, n, 4]`` above ``threshold [B or 1, H]``, float64; -1 below."""
    length = chunk_lengths(chunks)
    return torch.where(length > threshold.double()[..., None, None], length, -1.0)


def _longest(above: Tensor, slots: int) -> Tensor:
    """Mark the ``slots`` longest chunks of each token among those above the threshold; ties go to the lowest."""
    left = above.clone()
    for _ in range(min(slots, above.shape[-1])):  # few: faster than a sort
        left.scatter_(-1, left.max(-1, keepdim=True).indices, -1.0)
    return left < above


def _zeroed(chunks: Tensor, flags: Tensor, head_dim: int) -> Tensor:
    """Chunks back in a row, zeros where a flag is set: ``[B, H, N, D]``."""
    return chunks.masked_fill(flags[..., None], 0.0).flatten(-2)[..., :head_dim]
