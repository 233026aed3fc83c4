"""Keys that are held without their mean: what ``mean.h`` reads to give scores the term ``q . R_t mu``.

A mean after RoPE is one of which no channel turns.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.kernels.mean import BITS, BLOCK, DIGITS, chosen_pairs, pairs_of
from packedkv.ops.rope import Rotary

SPAN = 64
"""Tokens whose terms are computed at once: ``kv::SPAN``."""
SLOW, POWERS = 0.4, 8
"""Radians that a slow pair turns by in half a span, at most; the powers of which there is a sum. What is left out is
``0.4^8 / 8!`` = 2^-26 of a pair at most."""


class CpuMean(NamedTuple):
    """The mean of a layer's keys as the CPU kernels read it."""

    # float32 [1 or B, H, 2, P]: first and second channels of the table's pairs, times the scaling of cosines and sines;
    # P is a multiple of BLOCK. None: no channel that turns has a mean
    turning: Tensor | None
    still: Tensor | None  # float32 [1 or B, H, D]: channels that do not turn, zero elsewhere. None: all of them turn
    table: Tensor | None  # uint8 [1 or H, bytes], of the pairs that have a mean, by falling frequency
    fast: int = 0  # number of them, at the beginning, that are not SLOW


def cpu_mean(mean: Tensor, rotary: Rotary) -> CpuMean:
    """Make the constants of a layer from the mean that its keys lost before ``rotary``: float32 ``[1 or B, H, D]``."""
    dim, turns = mean.shape[2], 2 * len(rotary.frequencies)
    still = None
    if turns < dim:
        still = mean.clone(memory_format=torch.contiguous_format)
        still[..., :turns] = 0
    if not mean[..., :turns].any():
        return CpuMean(None, mean.new_zeros(mean.shape) if still is None else still, None)
    channels = pairs_of(dim, turns, rotary.interleaved)[: turns // 2]
    theta = rotary.radians
    rows = [tuple(sorted(row, key=lambda p: -abs(theta[p]))) for row in chosen_pairs(mean, channels)]
    padding = -len(rows[0]) % BLOCK
    fast = max(sum(abs(theta[p]) * (SPAN - 1) / 2 > SLOW for p in row) for row in rows)
    if len(rows[0]) - fast <= POWERS // 2:
        fast = len(rows[0]) + padding
    at = [[channels[p] for p in row] for row in rows]
    index = torch.tensor(at).mT.expand(mean.shape[1], 2, -1)  # [H, 2, pairs]
    parts = mean.unsqueeze(2).expand(-1, -1, 2, -1).gather(3, index.expand(len(mean), -1, -1, -1))
    parts = torch.nn.functional.pad(parts * rotary.scaling, (0, padding)).contiguous()
    table = torch.stack([_table(theta, channels, row, padding, fast) for row in rows])
    return CpuMean(parts, still, table, fast)


@lru_cache(maxsize=64)
def _table(
    theta: tuple[float, ...], channels: tuple[tuple[int, int], ...], chosen: tuple[int, ...], padding: int, fast: int
) -> Tensor:
    """The table of a KV head for the chosen pairs and as many of channel 0 as ``padding``, uint8 ``[bytes]``."""
    with torch.inference_mode(False):
        angle = torch.tensor([*(theta[p] for p in chosen), *[0.0] * padding], dtype=torch.float64)
        digits = (torch.arange(1 << BITS) << BITS * torch.arange(DIGITS)[:, None])[..., None] * angle
        middle, tile = (SPAN - 1) / 2 * angle, angle[:fast, None] * (torch.arange(SPAN // 2) + 0.5)
        tokens, terms = torch.stack([tile.cos(), tile.sin()], 1), torch.empty(0)
        if fast < len(angle):
            place, power = (torch.arange(SPAN // 2) + 0.5) * 2 / (SPAN - 1), torch.arange(POWERS)
            tokens = torch.cat([tokens, (place.double() ** power[:, None]).unflatten(0, (-1, 2))])
            factorials = torch.tensor([math.factorial(j) * (-1) ** (j // 2) for j in range(POWERS)])
            terms = middle ** power[:, None] / factorials[:, None]
            terms[:, :fast] = 0
            terms = terms[:, fast // BLOCK * BLOCK :]
        names = torch.tensor([*(channels[p] for p in chosen), *[(0, 0)] * padding], dtype=torch.int16)
        parts = (
            torch.stack([digits.cos(), digits.sin()], -2),
            torch.stack([middle.cos(), middle.sin()]),
            tokens.float(),
            terms.float(),
            names.mT.contiguous(),
        )
        return torch.cat([x.flatten().view(torch.uint8) for x in parts])
