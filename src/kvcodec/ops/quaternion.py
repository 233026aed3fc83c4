"""Quaternions (w, x, y, z), Hamilton product; the 24 Hurwitz units, and the unit p and q_s whose product fits best.

The units are +-1, +-i, +-j, +-k and (+-1 +-i +-j +-k)/2: a group (closed under the product) and the corners of the
24-cell, 60 degrees apart. The corner nearest to v therefore has a closed form::

    max_p <v, p> = max(max_i |v_i|, (|v_0| + |v_1| + |v_2| + |v_3|) / 2)

and <x, p q> = <x conj(q), p>, so the best of 24 S products p q_s costs S products and S closed forms.

Random units are cut to multiples of 2^-10. Products with Hurwitz units are then multiples of 2^-11 of size at most 1,
which fp16 holds exactly: a table of products in fp16 IS the product set, and a search in float64 makes no rounding.
"""

from typing import Literal

import torch
from torch import Tensor

GRID = 2.0**-10
MANTISSA = 2.0**40
"""Searched vectors keep 40 bits below their largest component: with GRID, every sum fits float64's 53 bits."""
FINE = 2.0**38
SCORES = 1 << 17
"""Numbers of one temporary of the search; 1 MB of float64 stays in cache."""


def _units() -> Tensor:
    axes = torch.eye(4, dtype=torch.float64)
    signs = torch.cartesian_prod(*[torch.tensor([0.5, -0.5], dtype=torch.float64)] * 4)
    return torch.cat([torch.stack([axes, -axes], 1).flatten(0, 1), signs])


UNITS = _units()
"""The 24 Hurwitz units, float64 ``[24, 4]``; row 0 is 1."""


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Hamilton product ``a b`` of quaternions ``[..., 4]``; leading dimensions broadcast.

    >>> i, j = torch.eye(4)[1], torch.eye(4)[2]
    >>> multiply(i, j).tolist(), multiply(j, i).tolist()
    ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, -1.0])
    """
    w, x, y, z = a.unbind(-1)
    s, t, u, v = b.unbind(-1)
    product = [
        w * s - x * t - y * u - z * v,
        w * t + x * s + y * v - z * u,
        w * u - x * v + y * s + z * t,
        w * v + x * u - y * t + z * s,
    ]
    return torch.stack(product, -1)


def conjugate(q: Tensor) -> Tensor:
    """``(w, -x, -y, -z)``, the inverse of a unit quaternion."""
    return torch.cat([q[..., :1], -q[..., 1:]], -1)


def random_units(count: int, generator: torch.Generator) -> Tensor:
    """Uniform unit quaternions, float64 ``[count, 4]``, cut towards zero to multiples of ``GRID``."""
    q = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return (q / q.square().sum(-1, keepdim=True).sqrt() / GRID).trunc() * GRID


def products(secondary: Tensor) -> Tensor:
    """All ``p q_s``: ``[..., S, 4]`` -> ``[..., 24 S, 4]``; row ``24 s + p``."""
    units = UNITS.to(secondary)
    return multiply(units, secondary.unsqueeze(-2)).flatten(-3, -2)


def corner_score(v: Tensor, dim: int = -1) -> Tensor:
    """Largest inner product of ``v`` with a Hurwitz unit; the four components lie along ``dim``, which is dropped."""
    a, b, c, d = v.abs().unbind(dim)  # pairwise and in place: much faster than a reduction over so short an axis
    half = a.add(b).add_(c).add_(d).mul_(0.5)
    for other in (b, c, d, half):
        torch.maximum(a, other, out=a)
    return a


def scaled(x: Tensor) -> Tensor:
    """Vectors ``[..., n]`` times a power of two each, largest component in [0.5, 1), as float64 multiples of 2^-40.

    Directions stay as they are, so a search may use it; zero stays zero. 16-bit values lose nothing unless they are
    2^29 times smaller than the largest of their vector.
    """
    x = x.double()
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
    return (torch.ldexp(x, -exponent.double()) * MANTISSA).round() / MANTISSA


def nearest_product(x: Tensor, secondary: Tensor) -> Tensor:
    """Index ``24 s + p`` of the product that has the largest inner product with ``x``; the lowest one on ties.

    Parameters
    ----------
    x : Tensor ``[n, 4]``
        Of any length; zero gives index 0.
    secondary : Tensor float64 ``[S, 4]``
        From ``random_units``.

    Returns
    -------
    Tensor int64 ``[n]``
    """
    basis = torch.eye(4, dtype=torch.float64, device=x.device)
    count = len(secondary)
    # row (component c, s) . x = component c of x conj(q_s); exact, so neither order nor shape of the sums matters
    turn = multiply(basis, conjugate(secondary)[:, None]).permute(2, 0, 1).reshape(4 * count, 4).contiguous()
    x = scaled(x)
    index = torch.empty(len(x), dtype=torch.int64, device=x.device)
    step = max(1, SCORES // (4 * count))
    units = UNITS.to(x.device)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        turned = (turn @ part.T).unflatten(0, (4, count))
        best = corner_score(turned, 0).max(0).indices
        v = turned.gather(1, best.expand(4, 1, -1))[:, 0]
        index[start : start + step] = best * 24 + (units @ v).max(0).indices
    return index


def nearest_entry(x: Tensor, table: Tensor, by: Literal["angle", "distance"]) -> Tensor:
    """Row of ``table`` nearest to ``x``, by trying them all; the lowest one on ties.

    Parameters
    ----------
    x : Tensor ``[n, 4]``
        At most 2 long; held to 2^-38, so that every sum is exact.
    table : Tensor float64 ``[m, 4]``
        Multiples of 2^-11, at most 2 in size.
    by : {"angle", "distance"}
        Largest inner product (for entries of one length), or smallest distance.

    Returns
    -------
    Tensor int64 ``[n]``
    """
    x = (x.double() * FINE).round() / FINE
    # |x - e|^2 = |x|^2 - 2 (<x, e> - |e|^2 / 2)
    offset = table.square().sum(1, keepdim=True) * (-0.5 if by == "distance" else 0.0)
    index = torch.empty(len(x), dtype=torch.int64, device=x.device)
    step = max(1, SCORES // len(table))
    for start in range(0, len(x), step):
        score = table @ x[start : start + step].T
        index[start : start + step] = score.add_(offset).max(0).indices
    return index


def split_chunks(x: Tensor) -> Tensor:
    """Cut the last axis into quaternions, zero-padded: ``[..., D]`` -> ``[..., ceil(D/4), 4]``."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4))


def chunk_lengths(chunks: Tensor) -> Tensor:
    """Euclidean length of the last axis, float64, in one order of additions: ``[..., 4]`` -> ``[...]``."""
    a, b, c, d = chunks.double().square().unbind(-1)
    return ((a + b) + (c + d)).sqrt()


def quantize_lengths(length: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round lengths to 2^bits - 1 steps of the longest in the last axis.

    Parameters
    ----------
    length : Tensor float64 ``[..., n]``
    bits : int

    Returns
    -------
    steps : Tensor uint8 ``[..., n]``
    scale : Tensor float16 ``[..., 1]``
        Half of the longest, so that it stays in range: a chunk of fp16 values may be 131008 long.
    """
    levels = 2**bits - 1
    scale = (length.amax(-1, keepdim=True) * 0.5).half()
    sigma = scale.double() * 2
    steps = torch.where(sigma > 0, (length * levels / sigma).round(), 0.0).clamp_(0, levels)  # sigma may round down
    return steps.to(torch.uint8), scale


def decode_lengths(steps: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Inverse of ``quantize_lengths``: float32 ``[..., n]``."""
    step = scale.float() * 2
    # a tensor, not a number: CUDA divides by a constant through its reciprocal
    return steps * (step / torch.full_like(step, 2**bits - 1))
