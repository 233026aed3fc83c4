"""The octahedral map between unit 3-vectors and the square [-1, 1]^2 (OCTOPUS Eqs. 5-7, App. C.6-C.8).

    l = |x| + |y| + |z|,  p = (x, y, z) / l,  sign(0) = +1
    p_z >= 0:  (xi, eta) = (p_x, p_y)
    p_z <  0:  (xi, eta) = (sign(p_x) (1 - |p_y|), sign(p_y) (1 - |p_x|))

Every step is one elementwise IEEE operation, so a vector gives the same bits alone and in a batch.
"""

import math

import torch
from torch import Tensor

TINY = 1e-300  # avoids 0/0: the zero vector maps to (0, 0)


def _signed(magnitude: Tensor, like: Tensor) -> Tensor:
    """``magnitude`` with the sign of ``like``, zero (either one) counting as positive."""
    return torch.where(like >= 0, magnitude, -magnitude)


def _fold(a: Tensor, b: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange the inner square and the outer triangles where ``lower``; its own inverse."""
    return (
        torch.where(lower, _signed(1 - b.abs(), a), a),
        torch.where(lower, _signed(1 - a.abs(), b), b),
    )


def to_square(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Octahedral coordinates of the direction of ``(x, y, z)``, Eq. 5.

    Parameters
    ----------
    x, y, z : Tensor float64, one shape
        A vector of any length; the zero vector gives (0, 0).

    Returns
    -------
    (xi, eta) : Tensors of the same shape, in [-1, 1]

    Examples
    --------
    >>> x, y, z = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64).unbind(-1)
    >>> torch.stack(to_square(x, y, z), -1).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    length = (x.abs() + y.abs() + z.abs()).clamp_min(TINY)
    return _fold(x / length, y / length, z < 0)


def from_square(xi: Tensor, eta: Tensor) -> Tensor:
    """Unit vectors ``[..., 3]`` of square coordinates, Eq. 6; the inverse of ``to_square``."""
    z = 1 - xi.abs() - eta.abs()
    x, y = _fold(xi, eta, z < 0)
    v = torch.stack([x, y, z], -1)
    return v / (x * x + y * y + z * z).sqrt()[..., None]


def direction_table(centroids: Tensor) -> Tensor:
    """Directions of every centroid pair: ``[n, 3]`` -> row ``i * len(centroids) + j`` is ``from_square(c_i, c_j)``."""
    n = len(centroids)
    return from_square(centroids.repeat_interleave(n), centroids.repeat(n))


def coordinate_density(xi: Tensor) -> Tensor:
    """Density of one octahedral coordinate of a uniform direction on [-1, 1], Eq. 7; integrates to 1."""
    a = xi.abs()
    inner = (1 - a) / (1 - 2 * a + 3 * a * a)
    outer = a / (2 - 4 * a + 3 * a * a)
    return (inner + outer) / (math.pi * (a * a + (1 - a) * (1 - a)).sqrt())
