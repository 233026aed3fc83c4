"""Search of a scale: of several encodings of a token or group, the one of least squared error (``scale=search``).

Codes for a few multiples of the method's own scale cost no byte, and any reader decodes them: a row with one large
channel wants a larger scale than a normal one, a coarse code wants a range that its outermost numbers exceed::

    for each factor f in FACTORS:  codes and scale by the method's rule, its norm or range times f
    keep those of least sum of (x - x^)^2, x^ as decoded; the first of equals, so the method's own unless one is better

``fp8``, whose steps follow each number, and ``hqmq``, whose vectors have radii of their own, lack the option.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from packedkv.ops.groups import spread_channels
from packedkv.ops.sums import in_pieces, sum_by_halves

Scale = Literal["own", "search"]
FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 1.05, 1.1, 1.15, 1.2)
"""Multiples of the method's own norm or range, its own first."""
Quantized = tuple[Tensor, ...]
"""Codes ``[..., n]`` and scales ``[..., groups]`` of the same rows, in the codec's order."""


def quantized(
    x: Tensor,
    quantize: Callable[[Tensor, float], Quantized],
    value: Callable[..., Tensor],
    scale: str,
    group: int = 0,
    factors: Sequence[float] = FACTORS,
) -> Quantized:
    """Quantize ``x [B, H, N, ...]`` by the codec's own rule, or with ``scale="search"`` by the best of ``factors``.

    ``quantize`` maps rows and a factor to codes and scales; ``value`` maps these to the rows as decoded. ``group`` as
    in ``least_error``.
    """
    if scale != "search":
        return quantize(x, factors[0])
    return tuple(in_pieces(lambda piece: least_error(piece, partial(quantize, piece), value, group, factors), x))


def least_error(
    x: Tensor,
    quantize: Callable[[float], Quantized],
    value: Callable[..., Tensor],
    group: int = 0,
    factors: Sequence[float] = FACTORS,
) -> Quantized:
    """Return the encoding of ``x [..., D]`` with the least squared error in each group; sums by halves in float64.

    ``group`` neighbouring channels share a scale; 0: all of them. ``factors`` are tried in order.

    >>> x = torch.tensor([[0.4, 0.4, 0.4, -1.0]])
    >>> least_error(x, lambda f: ((x / f).round(), torch.full((1, 1), f)), lambda codes, scale: codes * scale)
    (tensor([[ 1.,  1.,  1., -2.]]), tensor([[0.6000]]))
    """
    best = quantize(factors[0])
    least = _errors(x, value(*best), group)
    for factor in factors[1:]:
        trial = quantize(factor)
        error = _errors(x, value(*trial), group)
        better = error < least  # False for what is not finite: a norm beyond fp16
        least = torch.where(better, error, least)
        masks = (
            spread_channels(better, group, field.shape[-1]) if group and field.shape[-1] != better.shape[-1] else better
            for field in trial
        )
        best = tuple(map(torch.where, masks, trial, best))
    return best


def around_middle(low: Tensor, high: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Ends of a range ``factor`` times as long about the same middle; at 1 they keep their bits, a zero's sign too."""
    if factor == 1:
        return low, high
    cut = (high - low) * ((1 - factor) / 2)
    return low + cut, high - cut


def _errors(x: Tensor, decoded: Tensor, group: int) -> Tensor:
    """Sum of the squared errors of each group: float64 ``[..., groups]``."""
    squares = (x.double() - decoded).square()
    if not group:
        return sum_by_halves(squares)
    squares = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % group))
    return sum_by_halves(squares.unflatten(-1, (-1, group))).squeeze(-1)
