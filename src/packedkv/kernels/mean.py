"""Keys that are held without their mean before RoPE: what ``csrc/mean.cuh`` reads to give the mean back.

A score lacks ``q . R_t mu``, the product with the mean turned to the token's position. Decode attention adds it to the
scores, unpacking adds ``R_t mu`` to the keys. Both need the positions of a sequence's slots to be one run, ``origin``,
``origin + 1`` and so on, below ``MOST_POSITIONS``. Pairs of channels without a mean cost nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.spec import align

ROWS, BITS, DIGITS = 16, 7, 3
"""Tokens of the table's rows, and the digits of a position: ``kv::MEAN_ROWS``, ``TURN_BITS``, ``TURN_DIGITS``."""
MOST_POSITIONS = 1 << BITS * DIGITS
BLOCK = 16
"""Pairs of channels of a product; ``pairs`` is a multiple of it."""


class KeyMean(NamedTuple):
    """The mean of a layer's keys as kernels read it, on their device."""

    mean: Tensor  # float32 [1 or B, H, D], before RoPE; the channels that turn times the scaling of cosines and sines
    table: Tensor  # uint8 [1 or H, bytes], of the pairs that have a mean
    pairs: int  # number of these, rounded up to BLOCK; programs are compiled for it (decode_spec)


class RotatedMean(NamedTuple):
    """What is subtracted from keys before they are encoded: their mean before RoPE, turned as the model turns it.

    The reference's operations are repeated one by one in float32, so bytes are the reference's if cosines and sines
    are.
    """

    mean: Tensor  # float32 [1 or B, H, D]
    # float32 [1 or B, N, R / 2], of the angle of each new token and pair of channels, as the model's rotary embedding
    # gives them, its scaling included; the first R channels turn
    cosines: Tensor
    sines: Tensor
    interleaved: bool = False  # whether the pairs are channels 2 p, 2 p + 1 instead of p, p + R / 2


def key_mean(
    mean: Tensor, frequencies: Sequence[float], *, scaling: float = 1.0, interleaved: bool = False, look: bool = True
) -> KeyMean:
    """Make the constants of a layer from what is subtracted from its keys, ``mean [1 or B, H, D]``, before RoPE.

    ``frequencies`` are the R / 2 of RoPE, radians a token; the first R channels turn. They are the same for all
    positions. ``scaling`` is what the model multiplies cosines and sines by (YaRN); where it is 1, a float32 mean is
    not copied. ``interleaved``: whether the pairs are channels 2 p, 2 p + 1 instead of p, p + R / 2. ``look``: leave
    pairs out whose mean is zero, which synchronises. Raises ShapeError.
    """
    if mean.ndim != 3 or mean.shape[2] % 16 or 2 * len(frequencies) > mean.shape[2]:
        raise ShapeError(
            f"key_mean: mean {list(mean.shape)} and {len(frequencies)} frequencies; expected [1 or B, H, D], D a "
            f"multiple of 16, and R / 2 with R at most D."
        )
    dim, turning = mean.shape[2], 2 * len(frequencies)
    scaled = mean.float().contiguous()
    if scaling != 1.0:
        scaled = scaled.clone()
        scaled[..., :turning] *= scaling
    rows = chosen_pairs(mean, pairs_of(dim, turning, interleaved)) if look else [tuple(range(dim // 2))]
    tables = [_table(tuple(frequencies), dim, interleaved, row, mean.device) for row in rows]
    return KeyMean(scaled, torch.cat(tables) if len(tables) > 1 else tables[0], align(len(rows[0]), BLOCK))


def most_pairs(head_dim: int) -> int:
    """Pairs of a program for a mean of all channels."""
    return align(head_dim // 2, BLOCK)


def chosen_pairs(mean: Tensor, channels: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Numbers of the pairs that have a mean, for each KV head or, if they are the same, for all.

    ``mean`` is ``[1 or B, H, D]``; ``channels`` are the two of each pair. Each pair is there once. All heads have as
    many, a multiple of ``BLOCK`` (made up by others) or all.
    """
    there = (mean != 0).any(0)[:, torch.tensor(channels, device=mean.device)].any(-1).cpu()  # [H, pairs]
    count = max(BLOCK, align(int(there.sum(-1).max()), BLOCK))
    if count >= len(channels):
        return [tuple(range(len(channels)))]
    rows = [tuple(sorted(row.int().argsort(descending=True, stable=True)[:count].tolist())) for row in there]
    return rows[:1] if len(set(rows)) == 1 else rows


@lru_cache(maxsize=64)
def pairs_of(head_dim: int, turning: int, interleaved: bool) -> tuple[tuple[int, int], ...]:
    """Channels of each pair that turns together, and of couples of those that do not turn."""
    half = turning // 2
    turned = [(2 * p, 2 * p + 1) if interleaved else (p, p + half) for p in range(half)]
    return (*turned, *((c, c + 1) for c in range(turning, head_dim, 2)))


@lru_cache(maxsize=64)
def _table(
    frequencies: tuple[float, ...], head_dim: int, interleaved: bool, chosen: tuple[int, ...], device: torch.device
) -> Tensor:
    """The table of a KV head for the chosen pairs, uint8 ``[1, bytes]``, never written to; angles in float64.

    The last pair is repeated up to a multiple of ``BLOCK``; ``kv::MeanTerm`` takes pairs behind D / 2 as zero.
    """
    turning = 2 * len(frequencies)
    channels, theta = pairs_of(head_dim, turning, interleaved), (*frequencies, *[0.0] * ((head_dim - turning) // 2))
    table = chosen + chosen[-1:] * (-len(chosen) % BLOCK)
    angle = torch.tensor([theta[p] for p in table], dtype=torch.float64)
    tile = (torch.arange(ROWS)[:, None] * angle).unflatten(1, (-1, 2))
    digits = (torch.arange(1 << BITS) << BITS * torch.arange(DIGITS)[:, None])[..., None] * angle
    names, inverse = torch.zeros(len(table), dtype=torch.int32), torch.arange(2 * len(theta), dtype=torch.int32)
    for place, (a, b) in enumerate(channels[p] for p in table):
        names[place] = a | b << 16
        inverse[a], inverse[b] = b | place << 16, a | place << 16 | 1 << 30
    parts = (
        torch.stack([tile.cos() - 1, tile.sin()], 2).half(),
        torch.stack([digits.cos(), digits.sin()], -1).float(),
        names,
        inverse,
    )
    return torch.cat([x.flatten().view(torch.uint8) for x in parts])[None].to(device)


def team_bytes(pairs: int, tile: int, heads: int, warps: int, overlap: int = 0) -> tuple[int, int]:
    """Bytes of shared memory of a team of warps for the term, in tiles of ``tile``: throughout, and of those that
    programs with ``overlap_prologue`` need at the start alone (``kv::MeanTerm``'s ``SHARED`` and ``START``).
    """
    if not pairs:
        return 0, 0
    angle = 8 * pairs
    blocks = max(0, pairs // BLOCK - 16 // heads)  # for which there are no registers
    start, shared = heads * (angle + 16) + warps * angle, 128 + tile // ROWS * angle
    if overlap:
        return align(shared + 64 * pairs * (blocks > 0), 128), align(start, 128)
    return align(start + shared + warps * blocks * heads // 4 * 512, 128), 0


def checked(name: str, pairs: int, mean: KeyMean | None, origin: Tensor | None, batch: int, heads: int) -> None:
    """Raise UnsupportedError or ShapeError unless mean and positions fit a kernel that was compiled for ``pairs``."""
    if (mean is None) != (pairs == 0) or (mean is not None and mean.pairs != pairs):
        raise UnsupportedError(
            f"{name}: the spec is of {pairs} pairs of channels with a mean, and the mean given has "
            f"{0 if mean is None else mean.pairs}; make it by decode_spec(..., pairs=mean.pairs)."
        )
    if mean is None:
        return
    if mean.mean.shape[0] not in (1, batch) or mean.mean.shape[1] != heads or mean.table.shape[0] not in (1, heads):
        raise ShapeError(
            f"{name}: mean {list(mean.mean.shape)} and its table {list(mean.table.shape)} do not fit {batch} sequences "
            f"and {heads} KV heads."
        )
    if origin is None or origin.dtype != torch.int32 or origin.shape != (batch,) or not origin.is_contiguous():
        raise ShapeError(
            f"{name}: keys without their mean need the position of slot 0 of each sequence, contiguous int32 "
            f"[{batch}]; got {None if origin is None else (origin.dtype, list(origin.shape))}."
        )
