"""Positions of the tokens that a cache holds: what RoPE turned each key by."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvcodec.errors import UnsupportedError


def consecutive(positions: Tensor) -> bool:
    """Whether each row of ``positions [B, n]`` counts up by one, left padding aside."""
    n = positions.shape[1]
    if n == 0:
        return True
    expected = positions[:, -1:].long() - (n - 1) + torch.arange(n, device=positions.device)
    return not bool(((positions != expected) & (expected >= 0)).any())  # before position 0 there is only padding


class Positions:
    """Positions of the live tokens of one layer, as runs of consecutive positions: a few integers, not one per token.

    Sequences of a batch may begin at positions of their own (left padding). Padding may have any position.
    """

    def __init__(self) -> None:
        self.runs: list[tuple[int, Tensor]] = []  # tokens, and the position of the first: int64 [B], or [1] for all

    def __len__(self) -> int:
        return sum(count for count, _ in self.runs)

    def append(self, positions: Tensor) -> None:
        """Add the positions of new tokens.

        Parameters
        ----------
        positions : Tensor of int ``[B, n]`` or ``[1, n]``

        Raises
        ------
        UnsupportedError
            They are not consecutive.
        """
        n = positions.shape[1]
        if n == 0:
            return
        if not consecutive(positions):
            raise UnsupportedError(
                "the positions of the new tokens are not consecutive (images or packed sequences?), which keys held "
                "without their mean before RoPE need; use mean=post or mean=none."
            )
        first = positions[:, -1].long() - (n - 1)
        if self.runs and torch.equal(self.runs[-1][1] + self.runs[-1][0], first):
            self.runs[-1] = (self.runs[-1][0] + n, self.runs[-1][1])
        else:
            self.runs.append((n, first))

    def of(self, first: int, last: int) -> Tensor:
        """Positions of the live tokens ``[first, last)``: int64 ``[B, last - first]``, or ``[1, last - first]``."""
        parts = [
            start[:, None] + torch.arange(count, device=start.device) for count, start in self._within(first, last)
        ]
        rows = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(rows, -1) for part in parts], 1)

    def remove(self, first: int, last: int) -> None:
        """Forget the live tokens ``[first, last)``."""
        self.runs = [*self._within(0, first), *self._within(last, len(self))]

    def select(self, indices: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        self.runs = [(n, start if len(start) == 1 else start.index_select(0, indices)) for n, start in self.runs]

    def _within(self, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        at = 0
        for count, start in self.runs:
            lo, hi = max(first, at), min(last, at + count)
            if lo < hi:
                yield hi - lo, start + (lo - at)
            at += count
