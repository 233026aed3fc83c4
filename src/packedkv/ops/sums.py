"""Sums with a fixed order of additions, and pieces of a call that fit a CPU cache.

``sum(-1)`` adds in an order that depends on the machine and on the shape of the call. Encoded bytes must not: a token
has to give the same bits alone and in a batch, on CPU and GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 15
"""Elements encoded at once on a CPU: float64 temporaries of 256 KB each."""
GPU_CHUNK = 1 << 22
"""And on other devices, where a call takes as long however few elements it has: temporaries of 32 MB."""


def sum_by_halves(x: Tensor, dim: int = -1) -> Tensor:
    """Sum along ``dim``, which stays with size 1: first half plus second half, and so on; padded with zeros.

    >>> sum_by_halves(torch.arange(5.0)).tolist()
    [10.0]
    """
    x = x.movedim(dim, -1)
    if missing := (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, missing))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.movedim(-1, dim)


def row_norm(x: Tensor) -> Tensor:
    """Length of the last axis, ``[..., 1]``."""
    return sum_by_halves(x * x).sqrt()


def token_chunks(x: Tensor, elements: int | None = None) -> tuple[Tensor, ...]:
    """Cut ``x [B, H, N, D]`` along N into pieces of about ``elements`` elements; one, empty, when N is 0.

    By default the size depends on the device; pass it where a result depends on the pieces.
    """
    elements = elements or (CHUNK if x.device.type == "cpu" else GPU_CHUNK)
    return x.split(max(1, elements // max(1, x.shape[0] * x.shape[1] * x.shape[3])), 2)


def in_pieces(encode: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, elements: int | None = None) -> list[Tensor]:
    """Encode ``token_chunks`` of ``x`` one after the other, and join each of the results along N."""
    parts = [encode(piece) for piece in token_chunks(x, elements)]
    return [torch.cat(field, 2) for field in zip(*parts, strict=True)]
