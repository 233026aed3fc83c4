"""Arguments of kernels: new tokens, the tokens that queries attend to, and the rules of their scores.

Pages are uint8 ``[num_pages, H, page_bytes]``, or longer, with space behind the codes. A table, int32 ``[B, M]``, has
page ids: token t of sequence b is at place ``t % P`` of page ``table[b, t // P]``. Dense keys and values are 16-bit
``[B, H, t, D]`` in the model's basis.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from packedkv.attention import BEFORE_IT, Seen
from packedkv.codec import Role
from packedkv.kernels.mean import RotatedMean

Dense = tuple[Tensor, Tensor]
"""Keys and values ``[B, H, t, D]`` in 16 bit, model basis."""


class Rules(NamedTuple):
    """How scores are computed, and which tokens a query sees."""

    scale: float  # multiplies the scores, usually D ** -0.5
    seen: Seen = BEFORE_IT  # mask, window and soft cap; default: all tokens up to the query's own
    sinks: Tensor | None = None  # [HQ]: one learned logit per query head that only joins the softmax's denominator


class NewTokens(NamedTuple):
    """New tokens of some roles, and the slots that they are encoded into."""

    x: Mapping[Role, Tensor]  # [B, H, n, D], model basis, fp16, bf16 or float32; n a multiple of the codec's block
    first: Tensor  # int32 [B]: slot of token 0, on the device; a multiple of the block
    # int32 [1], raised to 1 by numbers that codecs cannot represent (NaN, Inf, magnitudes above 65504), whose block is
    # stored as zero bytes; to 2 by tokens behind the pages, which are dropped
    bad: Tensor | None = None
    less: RotatedMean | None = None  # the rotated mean that is subtracted from keys first, in float32
    sink: int = 0  # so many first tokens of every page are also written in 16 bit (``write_sink_rows``)


class StepTokens(NamedTuple):
    """Tokens of a decode step: lengths are on the device, so a CUDA graph can capture the step.

    With ``starts`` a sequence b has the query tokens ``[starts[b], starts[b + 1])``: its newest tokens, which are
    encoded already. Each sees the tokens up to itself, and their pages are read once. Dense tokens in fp32 are rounded
    to fp16.
    """

    pages: Tensor
    table: Tensor
    seq_lens: Tensor  # int32 [B]: encoded tokens of each sequence
    start: Tensor | None = None  # int32 [B]: first live encoded token; tokens before it were evicted or are padding
    # int32 [B]: position of slot 0, where keys are stored without their mean. Slot t has position origin + t, below
    # mean.MOST_POSITIONS; slots before ``start`` may have negative ones
    origin: Tensor | None = None
    dense_k: Tensor | None = None  # [B, H, W, D]
    dense_v: Tensor | None = None
    dense_lens: Tensor | None = None  # int32 [B]: dense tokens [dense_start, dense_lens) are live; default: all W
    dense_start: Tensor | None = None
    dense_at: Tensor | None = None  # int32 [B]: row of dense_k, dense_v [N, H, W, D] of sequence b; default: row b
    workspace: Tensor | None = None  # float32, Engine.workspace_bytes, for partial results; default: allocated per call
    starts: Tensor | None = None  # int32 [B + 1]; q is [tokens, HQ, 1, D], without dense tokens or ``start``
    queries: int = 1  # most query tokens of a sequence
    longest: int = 0  # tokens beyond it are not read, whatever seq_lens says; 0: the room of the table


class ChunkTokens(NamedTuple):
    """All tokens of a cache, oldest first, with lengths that the host knows: dense, in slots, dense."""

    pages: Tensor
    table: Tensor
    first: int  # slots [first, last) of the packed tokens
    last: int
    sink: Dense | None = None  # dense tokens before the packed ones
    window: Dense | None = None  # and behind them
    origin: Tensor | None = None  # as of StepTokens
    recurring: bool = False  # whether histories of this length will be attended again and again

    @property
    def sink_tokens(self) -> int:
        """Dense tokens before the packed ones."""
        return 0 if self.sink is None else self.sink[0].shape[2]

    @property
    def total(self) -> int:
        """Number of tokens."""
        window = 0 if self.window is None else self.window[0].shape[2]
        return self.sink_tokens + self.last - self.first + window


class GroupTokens(NamedTuple):
    """Tokens of one sequence whose codec packs groups: a query reads its own group in 16 bit, groups before it packed.

    Whole groups of the ``length`` tokens are in the pages already.
    """

    pages: Tensor
    table: Tensor
    length: int
    group: int  # tokens of a group; blocks of both codecs and tiles of 32 divide it
    dense: Dense  # [1, H, t, D]: the tokens from the beginning of the first query's group on
