"""Bits that differ by channel: how many each gets, channels in the order of their bits, and nearest levels.

Levels of all widths stand in one table, those of width w from 2^w - 1 on: one level of width 0, two of width 1, ...
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from packedkv.ops.lloyd_max import midpoints
from packedkv.ops.sums import CHUNK, sum_by_halves, token_chunks


def allot(weights: Tensor, errors: Sequence[float], total: int) -> Tensor:
    """Share ``total`` bits among n groups of channels with the least weighted error.

    One bit at a time goes where it gains most, to the first of equals: water-filling in whole bits, which is optimal
    where the gains of a further bit fall. ``weights [..., n]`` are float64; ``errors`` are the squared errors of the
    widths 0 to the widest. The result is int64 ``[..., n]``.

    >>> allot(torch.tensor([100.0, 10.0, 1.0, 1.0]), [1.0, 0.36, 0.12, 0.035, 0.0095, 0.0025], 12)
    tensor([5, 4, 2, 1])
    """
    gains = [a - b for a, b in pairwise(errors)]
    all_gains = torch.stack([weights * gain for gain in gains], -1).flatten(-2)  # a group's fall, so it is a prefix
    groups = all_gains.sort(dim=-1, descending=True, stable=True).indices[..., :total] // len(gains)
    return torch.zeros_like(weights, dtype=torch.int64).scatter_add_(-1, groups, torch.ones_like(groups))


def channel_squares(x: Tensor) -> Tensor:
    """Sum of the squares of each channel over tokens, in one order on every machine: float64 ``[B, H, D]``."""
    parts = [sum_by_halves(part.double().square(), 2) for part in token_chunks(x, CHUNK)]
    return sum_by_halves(torch.cat(parts, 2), 2).squeeze(2)


def width_cuts(levels: Tensor) -> Tensor:
    """Decision boundaries of each width 0 to W, padded with infinity: float64 ``[W + 1, 2^W - 1]``.

    ``levels [2^(W + 1) - 1]`` are those of all widths.
    """
    widest = (len(levels) + 1).bit_length() - 2
    cuts = torch.full((widest + 1, 2**widest - 1), torch.inf, dtype=torch.float64, device=levels.device)
    for width in range(1, widest + 1):
        cuts[width, : 2**width - 1] = midpoints(levels[2**width - 1 : 2 ** (width + 1) - 1].double())
    return cuts


def nearest_in(cuts: Tensor, x: Tensor) -> Tensor:
    """Number of the level nearest to each of ``x [B, H, N, D]``, the lower on a tie; ``cuts [1 or B, H, D, n]``."""
    batch, _, tokens, _ = x.shape
    if len(cuts) == batch:
        return torch.searchsorted(cuts, x.transpose(2, 3).contiguous()).transpose(2, 3)
    rows = x.permute(1, 3, 0, 2).flatten(2)[None].contiguous()  # the sequences share one table: [1, H, D, B N]
    return torch.searchsorted(cuts, rows)[0].unflatten(2, (batch, tokens)).permute(2, 0, 3, 1)


def for_tokens(index: Tensor, like: Tensor) -> Tensor:
    """Expand an index ``[1 or B, H, n]`` to every token of ``like [B, H, N, *]``: int64 ``[B, H, N, n]``."""
    return index.long().unsqueeze(2).expand(*like.shape[:3], index.shape[-1])


def ordered(x: Tensor, order: Tensor) -> Tensor:
    """Put the channels of ``x [B, H, N, D]`` in an order ``[1 or B, H, D]``."""
    return x.gather(-1, for_tokens(order, x))


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undo ``ordered``."""
    return torch.empty_like(x).scatter_(-1, for_tokens(order, x), x)
