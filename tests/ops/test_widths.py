"""Bits that differ by channel: widths are those of one bit at a time to where it gains most."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from packedkv.ops.widths import allot

ERRORS = (1.0, 0.36, 0.12, 0.035, 0.0095, 0.0025)


def one_at_a_time(weights: Sequence[float], errors: Sequence[float], total: int) -> list[int]:
    """The definition, with plain numbers."""
    widths, gains = [0] * len(weights), [a - b for a, b in pairwise(errors)]
    for _ in range(total):
        free = (i for i, width in enumerate(widths) if width < len(gains))
        widths[max(free, key=lambda i: weights[i] * gains[widths[i]])] += 1
    return widths


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 200.0])
def test_widths_are_those_of_the_definition(spread: float) -> None:
    """Equal weights, zeros and weights that differ beyond all bounds among them; several heads at once."""
    draw = torch.Generator().manual_seed(int(spread))
    weights = 10.0 ** (torch.randn(2, 3, 24, generator=draw, dtype=torch.float64) * spread)
    weights[0, 0, 5:9] = weights[0, 0, 5]
    weights[0, 1, 10:] = 0.0
    weights[1, 2] = 0.0
    for total in (0, 1, 24, 71, 120):
        found = allot(weights, ERRORS, total)
        assert found.tolist() == [[one_at_a_time(head, ERRORS, total) for head in heads] for heads in weights.tolist()]
