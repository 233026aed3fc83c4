"""Exhaustive searches through every codeword, the baseline for the closed forms and tables of the codecs.

Each is the direct implementation of its paper: scores of all codewords by one matrix product, then argmax, chunk by
chunk. In float64, as the codecs search: float32 scores would decide near ties by the order of additions, so a
token could get different bytes alone and in a batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params
from kvcodec.codecs.additive import Additive
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec.codecs.ultra_tq import UltraTQ

PIECE = 1 << 22
"""Scores held at once: 32 MB."""

Search = Callable[[Tensor, Params], Tensor]


def exhaustive(codec: Codec) -> tuple[int, Search] | None:
    """Size of a codec's codebook and the search through all of it; None where there is no codebook to search.

    The search takes ``x [B, H, N, D]`` (float64, code basis) and the site's constants, and returns one index per chunk,
    triplet or coordinate: int64 ``[B, H, N, n]``.
    """
    if isinstance(codec, Hqmq):
        return 24 * codec.s, _products
    if isinstance(codec, Additive):
        return codec.k**2, _sums(by_angle=codec.reading == "normalised")
    if isinstance(codec, Octopus):
        return 4**codec.direction_bits, _directions
    if isinstance(codec, TurboQuant):
        # one of QJL's bits is the sign of a sketch, which is no codeword
        return 2 ** (codec.bits - isinstance(codec, TurboQuantQJL)), _levels
    if isinstance(codec, UltraTQ):
        return 16, _levels
    return None


def _products(x: Tensor, params: Params) -> Tensor:
    """HQMQ: largest inner product of a chunk with all p q_s."""
    chunks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4))
    return _per_head(chunks, params["codebook"][0].to(x.dtype), by_angle=True)


def _sums(by_angle: bool) -> Search:
    def search(x: Tensor, params: Params) -> Tensor:
        chunks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4))
        length = chunks.norm(dim=-1, keepdim=True)
        return _per_head(chunks / length.clamp_min(1e-30), params["codebook"][0].to(x.dtype), by_angle)

    return search


def _directions(x: Tensor, params: Params) -> Tensor:
    """OCTOPUS, Eq. 12: largest inner product of a triplet with all 4^b_dir directions."""
    triplets = torch.nn.functional.pad(x, (0, -x.shape[-1] % 3)).unflatten(-1, (-1, 3))
    table = params["directions"].to(x.dtype)
    return _per_head(triplets.flatten(1, 2)[:, None], table, by_angle=True).view(triplets.shape[:-1])


def _levels(x: Tensor, params: Params) -> Tensor:
    """Scalar quantizers: nearest of all levels of the normalised coordinate."""
    levels = params["levels"][0].to(x.dtype)
    unit = x.square().mean(-1, keepdim=True).sqrt()
    u = x / unit.clamp_min(1e-30)
    if levels.abs().max() < 1:  # levels of a unit vector, not of coordinates of variance 1
        u = u / x.shape[-1] ** 0.5
    flat = u.flatten()
    step = PIECE // len(levels)
    found = [(piece[:, None] - levels).abs_().argmin(1) for piece in flat.split(step)]
    return torch.cat(found).view(x.shape)


def _per_head(vectors: Tensor, tables: Tensor, by_angle: bool) -> Tensor:
    """Rows of ``tables [H, m, c]`` nearest to ``vectors [B, H, N, n, c]``, by inner product or by distance."""
    found = []
    for head, table in enumerate(tables):
        part = vectors[:, head].reshape(-1, vectors.shape[-1])
        offset = table.square().sum(1) * (0.0 if by_angle else -0.5)
        pieces = [(p @ table.T).add_(offset).argmax(1) for p in part.split(max(1, PIECE // len(table)))]
        found.append(torch.cat(pieces).view(vectors[:, head].shape[:-1]))
    return torch.stack(found, 1)
