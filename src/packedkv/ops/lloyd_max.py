"""Lloyd-Max scalar quantizers for a density on an interval, solved in float64.

    c_i = E[x | b_i < x <= b_{i+1}],   b_i = (c_{i-1} + c_i) / 2          the two conditions of Lloyd and Max

The plain iteration converges by a factor 1 - O(1/levels^2) per round. Here a few rounds are followed by Newton steps on
``r(c) = E[x | cell] - c``, whose Jacobian is tridiagonal; a step that breaks the order of the centroids or does not
reduce the residual is replaced by a plain round. Cell moments are composite Gauss-Legendre sums, so any density that is
smooth inside the interval will do; it need not be normalised.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Density = Callable[[Tensor], Tensor]

PANELS = 12
NODES = 16
LLOYD_ROUNDS = 32
MAX_ROUNDS = 2000
GRID = 256
SAMPLE_ROUNDS = 500
NORMAL_REACH = 9.0


def block_norm_density(dim: int, block: int) -> Density:
    """Density (not normalised) of the norm of ``block`` coordinates of a uniform unit vector in R^``dim``.

    ``f(r) ~ r^(block-1) (1 - r^2)^((dim-block-2)/2)`` on [0, 1]: OCTOPUS Eq. 4 at block = 3. At block = 1 it is the
    density of |u|, and, as it is even, of one coordinate u on [-1, 1] (Eq. 3). It is bounded for dim >= block + 2.
    """
    if block < 1 or dim < block + 2:
        raise ValueError(f"dim={dim}, block={block}: expected block >= 1 and dim >= block + 2.")
    power = (dim - block - 2) / 2
    return lambda r: r.abs() ** (block - 1) * (1 - r * r).clamp_min(0) ** power


def lloyd_max(density: Density, levels: int, low: float, high: float, *, symmetric: bool = False) -> Tensor:
    """Centroids of the least-squares quantizer of ``density`` on ``[low, high]``: float64 ``[levels]``, ascending.

    Decision boundaries are their ``midpoints``. ``density`` maps float64 tensors to non-negative ones, up to a constant
    factor; with ``symmetric`` it is even about the interval's middle, and the centroids are made exactly symmetric.
    Raises ArithmeticError if there is no fixed point, e.g. for a density that vanishes on much of the interval.

    >>> [round(c, 9) for c in lloyd_max(torch.ones_like, 4, 0.0, 1.0).tolist()]
    [0.125, 0.375, 0.625, 0.875]
    """
    if levels < 1 or not low < high:
        raise ValueError(f"levels={levels}, low={low}, high={high}: expected levels >= 1 and low < high.")
    centroids = _companded(density, levels, low, high)
    residual = _cell_means(density, centroids, low, high) - centroids
    for turn in range(MAX_ROUNDS):
        if not residual.isfinite().all():
            break
        if turn >= LLOYD_ROUNDS:
            newton = _newton_step(density, centroids, residual, low, high)
            trial = centroids + newton
            if bool(low < trial[0]) and bool(trial[-1] < high) and bool((trial.diff() > 0).all()):
                after = _cell_means(density, trial, low, high) - trial
                if after.abs().max() < residual.abs().max():
                    centroids, residual = trial, after
                    continue
            if residual.abs().max() < 1e-13 * (high - low):
                break
        centroids = centroids + residual
        residual = _cell_means(density, centroids, low, high) - centroids
    if not residual.abs().max() < 1e-11 * (high - low):
        raise ArithmeticError(
            f"Lloyd-Max with {levels} levels on [{low}, {high}] stopped at residual {residual.abs().max().item():.1e}; "
            f"give an interval on which the density is positive."
        )
    if symmetric:
        middle = (low + high) / 2
        centroids = middle + ((centroids - middle) - (centroids - middle).flip(0)) / 2
    return centroids


@lru_cache(maxsize=16)
def normal_levels(levels: int) -> Tensor:
    """Centroids of N(0, 1), float64 ``[levels]``."""
    return lloyd_max(lambda x: (-x * x / 2).exp(), levels, -NORMAL_REACH, NORMAL_REACH, symmetric=True)


@lru_cache(maxsize=64)
def unit_levels(dim: int, levels: int) -> Tensor:
    """Centroids of one coordinate of a uniform unit vector in R^``dim``, float64 ``[levels]``."""
    return lloyd_max(block_norm_density(dim, 1), levels, -1.0, 1.0, symmetric=True)


def midpoints(centroids: Tensor) -> Tensor:
    """Decision boundaries ``[levels - 1]`` between ascending ``centroids [levels]``.

    ``torch.bucketize(x, midpoints(c))`` is the nearest centroid's index; the lower one on a tie.
    """
    return (centroids[1:] + centroids[:-1]) / 2


def nearest_level(centroids: Tensor) -> Callable[[Tensor], Tensor]:
    """Prepare a search for the nearest of ascending ``centroids [levels]``, see ``interval``."""
    return interval(midpoints(centroids))


def interval(cuts: Tensor) -> Callable[[Tensor], Tensor]:
    """Prepare a search for the interval between ascending ``cuts [n]`` in which a number lies.

    The result is ``x -> torch.bucketize(x, cuts)`` for finite x of the same dtype, in a few elementwise steps: a
    uniform grid gives the start, a few comparisons the result. That is two to three times faster on a CPU than a binary
    search per element, which mispredicts half of its branches.
    """
    if len(cuts) == 0:
        return lambda x: torch.zeros_like(x, dtype=torch.long)
    low = float(cuts[0])
    scale = GRID / (float(cuts[-1]) - low or 1.0)
    # a grid cell may be off by one in floating point: start a cell early, end a cell late
    edges = low + torch.arange(-1, GRID + 2, dtype=torch.float64, device=cuts.device)[:, None] / scale
    start = (cuts < edges[:GRID]).sum(1)
    end = (cuts <= edges[3:]).sum(1)
    end[-1] = len(cuts)
    steps = int((end - start).max())
    walls = torch.cat([cuts, cuts.new_tensor([torch.inf])])

    def search(x: Tensor) -> Tensor:
        level = start.index_select(0, ((x.flatten() - low) * scale).clamp_(0, GRID - 1).long()).view(x.shape)
        for _ in range(steps):
            level += x > walls.index_select(0, level.flatten()).view(x.shape)
        return level

    return search


def sample_levels(x: Tensor, start: Tensor) -> Tensor:
    """Lloyd's iteration on float64 samples ``[n]``, mirrored about 0: levels, ascending and symmetric.

    ``start`` is shrunk to the samples' range first, so that no outer level is without samples; without samples it is
    the result.
    """
    levels = start.to(x)
    if len(x) == 0:
        return levels
    levels = levels * (x.abs().max() / levels[-1]).clamp_max(1)
    x = torch.cat([x, -x]).sort().values
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    for _ in range(SAMPLE_ROUNDS):
        cut = torch.searchsorted(x, midpoints(levels), right=True)
        edges = torch.cat([cut.new_zeros(1), cut, cut.new_full((1,), len(x))])
        count = edges.diff()
        means = torch.where(count > 0, sums[edges].diff() / count.clamp_min(1), levels)
        means = (means - means.flip(0)) / 2
        if torch.equal(means, levels):
            break
        levels = means
    return levels


def distortion(density: Density, centroids: Tensor, low: float, high: float) -> float:
    """Mean squared error ``E (x - Q(x))^2`` of nearest-centroid quantization under ``density``."""
    x, mass = _samples(density, _edges(centroids, low, high))
    return float((mass * (x - centroids[:, None]) ** 2).sum() / mass.sum())


def _gauss_legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1] (Golub and Welsch: eigenvalues of the Jacobi matrix)."""
    k = torch.arange(1, n, dtype=torch.float64)
    beta = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beta, 1) + torch.diag(beta, -1))
    return (nodes + 1) / 2, vectors[0] ** 2


def _edges(centroids: Tensor, low: float, high: float) -> Tensor:
    ends = centroids.new_tensor([low, high])
    return torch.cat([ends[:1], midpoints(centroids), ends[1:]])


def _samples(density: Density, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Quadrature points and their mass in every cell, ``[cells, PANELS * NODES]`` each."""
    nodes, weights = _gauss_legendre(NODES)
    panel = torch.arange(PANELS, dtype=torch.float64)
    unit = ((panel[:, None] + nodes) / PANELS).flatten()
    width = edges.diff()[:, None]
    x = edges[:-1, None] + width * unit
    return x, density(x) * width * (weights / PANELS).repeat(PANELS)


def _cell_means(density: Density, centroids: Tensor, low: float, high: float) -> Tensor:
    x, mass = _samples(density, _edges(centroids, low, high))
    return (x * mass).sum(1) / mass.sum(1)


def _newton_step(density: Density, centroids: Tensor, residual: Tensor, low: float, high: float) -> Tensor:
    """Solve ``(I - J) step = residual`` with ``J = d E[x | cell] / d c``, tridiagonal."""
    edges = _edges(centroids, low, high)
    _, mass = _samples(density, edges)
    weight = mass.sum(1)
    means = centroids + residual
    inner = density(edges[1:-1])
    # a cell's mean moves with its lower edge by f(b)(m - b)/w, with its upper edge by f(b)(b - m)/w;
    # an inner edge is the mean of its two centroids, so each of them moves it by half
    upper = inner * (edges[1:-1] - means[:-1]) / weight[:-1] / 2
    lower = inner * (means[1:] - edges[1:-1]) / weight[1:] / 2
    diagonal = torch.ones_like(centroids)
    diagonal[:-1] -= upper
    diagonal[1:] -= lower
    matrix = torch.diag(diagonal) - torch.diag(upper, 1) - torch.diag(lower, -1)
    return torch.linalg.solve(matrix, residual)


def _companded(density: Density, levels: int, low: float, high: float) -> Tensor:
    """Start: quantiles of ``density^(1/3)``, the optimal point density at high rate (Panter and Dite)."""
    grid = torch.linspace(low, high, 4097, dtype=torch.float64)
    centre = (grid[1:] + grid[:-1]) / 2
    share = density(centre) ** (1 / 3)
    cumulative = torch.cat([share.new_zeros(1), share.cumsum(0)])
    targets = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels * cumulative[-1]
    cell = (torch.searchsorted(cumulative, targets, right=True) - 1).clamp(0, len(centre) - 1)
    inside = (targets - cumulative[cell]) / share[cell]
    return grid[cell] + inside * (grid[1] - grid[0])
