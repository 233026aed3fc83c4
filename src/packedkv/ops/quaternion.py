"""Quaternions (w, x, y, z), Hamilton product; the 24 Hurwitz units, and the search for the best product p q_s.

The units are +-1, +-i, +-j, +-k and (+-1 +-i +-j +-k)/2: a group (closed under the product) and the corners of the
24-cell, 60 degrees apart. The corner nearest to v therefore has a closed form::

    max_p <v, p> = max(max_i |v_i|, (|v_0| + |v_1| + |v_2| + |v_3|) / 2)

and <x, p q> = <x conj(q), p>, so the best of 24 S products p q_s costs S products and S closed forms.

Random units are cut to multiples of 2^-10. Products with Hurwitz units are then multiples of 2^-11 of size at most 1,
which fp16 holds exactly: a table of products in fp16 IS the product set, and a search in float64 makes no rounding.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

GRID = 2.0**-10
MANTISSA = 2.0**40
"""Vectors are rounded to 40 bits below their largest component: with GRID, every sum fits float64's 53 bits."""
FINE = 2.0**38
SCORES = 1 << 17
"""Numbers of one temporary of the search; 1 MB of float64 stays in cache."""
WIDE_SCORES = 1 << 25
"""The same on a GPU: 256 MB, so that a search is a few launches."""
THREADED = 1 << 18
"""Elements of all heads from which one thread per head pays."""


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


def _units() -> Tensor:
    one, i, j, _ = torch.eye(4, dtype=torch.float64)
    both = torch.tensor([0.5, -0.5], dtype=torch.float64)
    halves = torch.cartesian_prod(both[:1], both[1:], both, both)
    pairs = torch.cat([one[None], j[None], halves])
    pairs = torch.stack([pairs, multiply(i, pairs)], 1).flatten(0, 1)
    return torch.stack([pairs, -pairs], 1).flatten(0, 1)


UNITS = _units()
"""The 24 Hurwitz units, float64 ``[24, 4]``: rows 4n, 4n + 1, 4n + 2 and 4n + 3 are p, -p, i p and -i p.

So the lowest bit of a code is a sign, and the next one a product with i, which exchanges components: half of the signs,
and a quarter of all, need not be stored in a table. p is 1, j, then (1 - i +-j +-k)/2, + before -, j slower.
"""


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


def corner_score(v: Tensor) -> Tensor:
    """Largest inner product of ``v [4, ...]`` with a Hurwitz unit: ``[...]``."""
    a, b, c, d = v.abs()  # pairwise and in place: much faster than a reduction over so short an axis
    half = a.add(b).add_(c).add_(d).mul_(0.5)
    for other in (b, c, d, half):
        torch.maximum(a, other, out=a)
    return a


def scaled(x: Tensor) -> Tensor:
    """Vectors ``[4, n]`` times a power of two each, largest component in [0.5, 1), as float64 multiples of 2^-40.

    Directions do not change, so a search may use it; zero stays zero. 16-bit values lose nothing unless they are
    2^29 times smaller than the largest of their vector.
    """
    exponent = torch.frexp(x.abs().amax(0)).exponent
    return torch.ldexp(x.double(), -exponent.double()).mul_(MANTISSA).round_().div_(MANTISSA)


def nearest_product(x: Tensor, secondary: Tensor) -> Tensor:
    """Index ``24 s + p`` of the product with the largest inner product with each of ``x [n, 4]``: int64 ``[n]``.

    The lowest one on ties; zero gives index 0. ``secondary``, float64 ``[S, 4]``, comes from ``random_units``.
    """
    x = scaled(x.T.contiguous())
    basis = torch.eye(4, dtype=torch.float64, device=x.device)
    count = len(secondary)
    # row (component c, s) . x = component c of x conj(q_s); exact, so neither order nor shape of the sums matters
    turn = multiply(basis, conjugate(secondary)[:, None]).permute(2, 0, 1).reshape(4 * count, 4).contiguous()
    units = UNITS.to(x.device)
    found = []
    for part in x.split(_most(x, 4 * count), 1):
        turned = (turn @ part).unflatten(0, (4, count))
        best = corner_score(turned).max(0).indices
        v = turned.gather(1, best.expand(4, 1, -1))[:, 0]
        found.append(best * 24 + (units @ v).max(0).indices)
    return torch.cat(found)


def nearest_entry(x: Tensor, table: Tensor, by: Literal["angle", "distance"]) -> Tensor:
    """Row of ``table`` nearest to each of ``x [n, 4]``, the lowest one on ties: int64 ``[n]``.

    All entries are tried. ``angle``: largest inner product, for entries of one length. ``distance``: smallest
    distance; x is at most 2 long and rounded to 2^-38, so that every sum is exact. ``table``, float64 ``[m, 4]``, holds
    multiples of 2^-11 of at most 2 in size.
    """
    x = scaled(x.T.contiguous()) if by == "angle" else (x.T.double() * FINE).round_().div_(FINE).contiguous()
    # |x - e|^2 = |x|^2 - 2 (<x, e> - |e|^2 / 2)
    offset = table.square().sum(1, keepdim=True) * (-0.5 if by == "distance" else 0.0)
    found = [(table @ part).add_(offset).max(0).indices for part in x.split(_most(x, len(table)), 1)]
    return torch.cat(found)


def _most(x: Tensor, rows: int) -> int:
    """Columns of ``x`` that are searched together where each has ``rows`` scores."""
    return max(1, (SCORES if x.device.type == "cpu" else WIDE_SCORES) // rows)


def split_chunks(x: Tensor) -> Tensor:
    """Cut the last axis into quaternions, zero-padded: ``[..., D]`` -> ``[..., ceil(D/4), 4]``."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)).unflatten(-1, (-1, 4))


def chunk_lengths(chunks: Tensor) -> Tensor:
    """Euclidean length of the last axis, float64, in one order of additions: ``[..., 4]`` -> ``[...]``."""
    a, b, c, d = (part * part for part in (component.double() for component in chunks.unbind(-1)))
    return a.add_(b).add_(c.add_(d)).sqrt_()


def quantize_lengths(length: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round float64 lengths ``[..., n]`` to 2^bits - 1 steps of the longest: uint8 steps, fp16 scale ``[..., 1]``.

    The scale is half of the longest, so that it stays in range: a chunk of fp16 values may be 131008 long.
    """
    levels = 2**bits - 1
    scale = (length.amax(-1, keepdim=True) * 0.5).half()
    sigma = scale.double() * 2
    steps = torch.where(sigma > 0, (length * levels / sigma).round(), 0.0).clamp_(0, levels)  # sigma may round down
    return steps.to(torch.uint8), scale


def decode_lengths(steps: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Undo ``quantize_lengths``: float32 ``[..., n]``."""
    step = scale.float() * 2
    # a tensor, not a number: CUDA divides by a constant by way of its reciprocal
    return steps * (step / torch.full_like(step, 2**bits - 1))


def decode_chunks(table: Tensor, codes: Tensor, radius: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Look up directions and multiply them by lengths.

    Parameters
    ----------
    table : Tensor float32 ``[H, m, 4]``
    codes, radius : integer Tensors ``[B, H, N, n]``
        Rows of the table, and steps of ``quantize_lengths``.
    scale : Tensor float16 ``[B, H, N, 1]``
    bits : int
        As of ``quantize_lengths``.

    Returns
    -------
    Tensor float32 ``[B, H, N, 4 n]``
    """
    codes = codes.long().clamp_max(table.shape[1] - 1)  # slots that were never written hold any bits
    row = codes + torch.arange(table.shape[0], device=table.device)[:, None, None] * table.shape[1]
    return (table.flatten(0, 1)[row] * decode_lengths(radius, scale, bits)[..., None]).flatten(-2)


def search_heads(chunks: Tensor, search: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Search ``chunks [B, H, N, n, 4]`` of each head: int64 ``[B, H, N, n]``.

    ``search`` maps vectors ``[m, 4]`` of a head to indices. Its temporaries are too small for several threads, so on a
    CPU each head gets a thread where there are enough elements.
    """

    def run(head: int) -> Tensor:
        part = chunks[:, head]
        return search(part.reshape(-1, 4), head).reshape(part.shape[:-1])

    heads, inference = chunks.shape[1], torch.is_inference_mode_enabled()
    workers = min(heads, torch.get_num_threads())
    if chunks.device.type != "cpu" or workers < 2 or chunks.numel() < THREADED:
        return torch.stack([run(head) for head in range(heads)], 1)

    def threaded(head: int) -> Tensor:
        # modes are per thread: pass no_grad and inference_mode on
        with torch.inference_mode(inference), torch.no_grad():
            return run(head)

    with ThreadPoolExecutor(workers) as pool:
        return torch.stack(list(pool.map(threaded, range(heads))), 1)
