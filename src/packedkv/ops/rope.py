"""Rotary position embedding with fixed frequencies: ``R_t x`` and its inverse, from positions alone.

A pair of channels (a, b) of frequency w becomes at position t, with s the scaling that some models put on cosines and
sines (YaRN)::

    a' = s (a cos(t w) - b sin(t w)),     b' = s (b cos(t w) + a sin(t w))

Angles, cosines and sines are computed in float64 and rounded once, so they are right at any position and the same on
every machine; products are float32.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary embedding of a model's keys.

    Parameters
    ----------
    frequencies : Tensor float32 ``[R / 2]``
        Radians per position of each pair of the first R channels; other channels are neither rotated nor scaled.
    scaling : float
        Factor of the rotated channels.
    interleaved : bool
        Pairs are (2i, 2i + 1); otherwise (i, i + R / 2).
    """

    frequencies: Tensor
    scaling: float = 1.0
    interleaved: bool = False

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn ``x [B, H, n, D]`` (each size may be 1) to ``positions [B, n]``: float32 ``[B, H, n, D]``."""
        return self.turned(x, *self.angles(positions.to(x.device)))

    def turn_back(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of ``turn``."""
        return self.turned(x, *self.angles_back(positions.to(x.device)))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at ``positions [B, n]`` by which ``turn`` multiplies: float32 ``[B, n, R / 2]`` each."""
        return self._angles(positions, self.scaling, 1.0)

    def angles_back(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As ``angles``, of ``turn_back``."""
        return self._angles(positions, 1.0 / self.scaling, -1.0)

    @cached_property
    def radians(self) -> tuple[float, ...]:
        """The frequencies as numbers; synchronises on a GPU."""
        return tuple(self.frequencies.tolist())

    @cached_property
    def name(self) -> Hashable:
        """Name, equal for equal rotary embeddings; synchronises on a GPU."""
        return self.radians, self.scaling, self.interleaved

    def _angles(self, positions: Tensor, factor: float, sign: float) -> tuple[Tensor, Tensor]:
        angle = positions.double()[..., None] * self.frequencies.to(positions.device).double()
        return (angle.cos() * factor).float(), (angle.sin() * (factor * sign)).float()

    def turned(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Turn ``x [B, H, n, D]`` (each size may be 1) by ``angles``: float32 ``[B, H, n, D]``."""
        x, width = x.float(), 2 * self.frequencies.shape[0]
        cos, sin = cosines[:, None], sines[:, None]
        turned, rest = x[..., :width], x[..., width:]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        first, second = a * cos - b * sin, b * cos + a * sin
        out = torch.stack([first, second], -1).flatten(-2) if self.interleaved else torch.cat([first, second], -1)
        if not rest.shape[-1]:
            return out
        return torch.cat([out, rest.expand(*out.shape[:-1], -1)], -1)


NOT_TURNED = Rotary(torch.empty(0))
"""Of vectors that are the same at all positions."""
