"""Arguments of attention kernels: the tokens that queries attend to, and the rules of their scores.

Pages are uint8 ``[num_pages, H, page_bytes]``, or longer, with space behind the codes. A table, int32 ``[B, M]``, has
page ids: token t of sequence b is at place ``t % P`` of page ``table[b, t // P]``. Dense keys and values are 16-bit
``[B, H, t, D]`` in the model's basis.
"""

from typing import NamedTuple

from torch import Tensor

from packedkv.attention import BEFORE_IT, Seen

Dense = tuple[Tensor, Tensor]
"""Keys and values ``[B, H, t, D]`` in 16 bit, model basis."""


class Rules(NamedTuple):
    """How scores are computed, and which tokens a query sees.

    Parameters
    ----------
    scale : float
        Multiplies the scores, usually D ** -0.5.
    seen : Seen
        Mask, window and soft cap; default: all tokens up to the query's own.
    sinks : Tensor ``[HQ]``, optional
        One learned logit per query head that only joins the softmax's denominator.
    """

    scale: float
    seen: Seen = BEFORE_IT
    sinks: Tensor | None = None


class StepTokens(NamedTuple):
    """Tokens of a decode step: lengths are on the device, so a CUDA graph can capture the step.

    With ``starts`` a sequence b has the query tokens ``[starts[b], starts[b + 1])``: its newest tokens, which are
    encoded already. Each sees the tokens up to itself, and their pages are read once.

    Parameters
    ----------
    pages, table : Tensor
    seq_lens : Tensor int32 ``[B]``
        Encoded tokens of each sequence.
    start : Tensor int32 ``[B]``, optional
        First live encoded token: tokens before it were evicted or are padding.
    placed : Tensor int32 ``[B]``, optional
        Position of slot 0 of each sequence, where keys are stored without their mean. Slot t has position
        ``placed + t``, below ``mean.MOST_POSITIONS``; slots before ``start`` may have negative ones.
    dense_k, dense_v : Tensor ``[B, H, W, D]``, optional
        Dense tokens; fp32 is rounded to fp16.
    dense_lens, dense_start : Tensor int32 ``[B]``, optional
        Live dense tokens are ``[dense_start, dense_lens)``; default: all W.
    dense_at : Tensor int32 ``[B]``, optional
        Row of ``dense_k, dense_v [N, H, W, D]`` of each sequence; default: row b of sequence b.
    workspace : Tensor float32, optional
        Memory for partial results, ``Engine.workspace_bytes``; allocated per call if absent.
    starts : Tensor int32 ``[B + 1]``, optional
        First query token of each sequence; q is then ``[tokens, HQ, 1, D]``, without dense tokens or ``start``.
    queries : int
        Most query tokens of a sequence.
    longest : int
        Tokens beyond it are not read, whatever ``seq_lens`` says; 0: as many as the table has room for.
    """

    pages: Tensor
    table: Tensor
    seq_lens: Tensor
    start: Tensor | None = None
    placed: Tensor | None = None
    dense_k: Tensor | None = None
    dense_v: Tensor | None = None
    dense_lens: Tensor | None = None
    dense_start: Tensor | None = None
    dense_at: Tensor | None = None
    workspace: Tensor | None = None
    starts: Tensor | None = None
    queries: int = 1
    longest: int = 0


class ChunkTokens(NamedTuple):
    """All tokens of a cache, oldest first, with lengths that the host knows: dense, in slots, dense.

    Parameters
    ----------
    pages, table : Tensor
    first, last : int
        Slots ``[first, last)`` of the packed tokens.
    sink, window : Dense, optional
        Dense tokens before and behind the packed ones.
    placed : Tensor int32 ``[B]``, optional
        As ``StepTokens``.
    recurring : bool
        Whether histories of this length will be attended again and again.
    """

    pages: Tensor
    table: Tensor
    first: int
    last: int
    sink: Dense | None = None
    window: Dense | None = None
    placed: Tensor | None = None
    recurring: bool = False

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

    Parameters
    ----------
    pages, table : Tensor
        Whole groups of the ``length`` tokens are there already.
    length : int
    group : int
        Tokens of a group; blocks of both codecs and tiles of 32 divide it.
    own : Dense
        ``[1, H, t, D]``: the tokens from the beginning of the first query's group on.
    """

    pages: Tensor
    table: Tensor
    length: int
    group: int
    own: Dense
