"""K-means: centroids by scikit-learn, and the nearest centroid by exact sums."""

import warnings

import torch
from torch import Tensor

from packedkv.errors import FitError
from packedkv.ops.exact import dot_bits, to_grid

SCORES = 1 << 21
"""Distances held at once: float64 temporaries of 16 MB each."""


def nearest_centroid(x: Tensor, centroids: Tensor) -> Tensor:
    """``argmin_j |x - c_j|^2``, a tie to the lowest j.

    Of ``|x|^2/2 - x c_j + |c_j|^2/2`` the last two terms decide. Both are taken of points on grids (``ops/exact``),
    relative to the middle of the centroids, so their sums are exact and only the difference is rounded: the result is
    exact for points whose components are moved by at most ``2^-22`` of their largest one (D up to 256; more beyond),
    whatever else is in the call.

    Parameters
    ----------
    x : Tensor ``[B, H, N, D]``
    centroids : Tensor ``[1 or B, H, C, D]``

    Returns
    -------
    Tensor int64 ``[B, H, N]``
    """
    batch, heads, _, dim = x.shape
    wide = centroids.double()
    middle = (wide.amin(2, keepdim=True) + wide.amax(2, keepdim=True)) / 2
    bits = dot_bits(dim)
    c, c_unit = to_grid(wide - middle, bits)
    half = ((c * c).sum(-1, keepdim=True) * (c_unit * c_unit / 2)).transpose(2, 3)  # [., H, 1, C]
    c, c_unit = c.transpose(2, 3), c_unit.transpose(2, 3)
    found = []
    for piece in x.split(max(1, SCORES // max(1, batch * heads * half.shape[-1])), 2):
        whole, unit = to_grid(piece.double() - middle, bits)
        found.append((half - (whole @ c).mul_(unit).mul_(c_unit)).argmin(-1))
    return torch.cat(found, 2)


def fit_centroids(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cluster points: k-means++ and Lloyd's iteration; one centroid is the mean.

    Parameters
    ----------
    points : Tensor ``[N, D]``
        N at least 1. Fewer distinct points than ``count`` are all centroids, the first of them several times.
    count : int
    generator : torch.Generator
        Seeds k-means++.

    Returns
    -------
    Tensor float64 ``[count, D]``, on the CPU

    Raises
    ------
    FitError
        If scikit-learn is needed and not installed.
    """
    points = points.detach().cpu().double()  # scikit-learn converts float32 again in every step of k-means++
    if count == 1:
        return points.mean(0, keepdim=True)
    distinct = points.unique(dim=0)
    if len(distinct) <= count:
        return torch.cat([distinct, distinct[:1].expand(count - len(distinct), -1)])
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise FitError(
            f"k-means of {count} clusters needs scikit-learn, which is not here ({error}); "
            f"install packedkv[fit], or use one cluster (the mean)."
        ) from error
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator))
    means = KMeans(count, init="k-means++", n_init=1, random_state=seed)
    # one thread: threads would add partial means in the order in which they finish
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # nearly equal points: spare centroids do no harm
        means.fit(points.numpy())
    return torch.from_numpy(means.cluster_centers_)
