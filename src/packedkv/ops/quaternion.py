"""Quaternions (w, x, y, z), Hamilton product; the 24 Hurwitz units, and the search for the best product p q_s.

The units are +-1, +-i, +-j, +-k and (+-1 +-i +-j +-k)/2: a group (closed under the product) and the corners of the
24-cell, 60 degrees apart. The corner nearest to v therefore has a closed form::

    max_p <v, p> = max(max_i |v_i|, (|v_0| + |v_1| + |v_2| + |v_3|) / 2)

and <x, p q> = <x conj(q), p>, so the best of 24 S products p q_s costs S products and S closed forms.

Many vectors are searched faster in cells, which is exact as well. The nearest of +-1, +-i, +-j, +-k turns a vector to
the front, where y_0 is the largest component; cells are boxes of (y_1, y_2, y_3) / y_0, each with the few entries that
can win in it.

Random units are cut to multiples of 2^-10. Products with Hurwitz units are then multiples of 2^-11 of size at most 1,
which fp16 holds exactly: a table of products in fp16 IS the product set, and a search in float64 makes no rounding.
"""

import itertools
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
MANY = 4096
"""Number of vectors from which setting up cells pays."""
GRID_CELLS = 4
"""Cells along each of three axes of a face."""


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

FACE_UNITS = (multiply(UNITS[:8, None], UNITS) @ UNITS.T).max(-1).indices
"""Row of ``p_f p`` for the units p_f = +-1, +-i, +-j, +-k: int64 ``[8, 24]``."""


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
    """Vectors ``[4, n]`` times a power of two each, largest component in [0.5, 1), as float64 multiples of 2^-40.

    Directions do not change, so a search may use it; zero stays zero. 16-bit values lose nothing unless they are
    2^29 times smaller than the largest of their vector.
    """
    exponent = torch.frexp(x.abs().amax(0)).exponent
    return torch.ldexp(x.double(), -exponent.double()).mul_(MANTISSA).round_().div_(MANTISSA)


def nearest_product(x: Tensor, secondary: Tensor) -> Tensor:
    """Index ``24 s + p`` of the product with the largest inner product with each of ``x [n, 4]``: int64 ``[n]``.

    The lowest one on ties; zero gives index 0. A few vectors are searched by the closed form, many in cells:
    ``<p_f y, p_f p q> = <y, p q>``, so one face's cells serve all eight faces. Both are exact and agree, ties included.
    ``secondary``, float64 ``[S, 4]``, comes from ``random_units``.
    """
    x = scaled(x.T.contiguous())
    if not _cells_pay(x):
        return _by_closed_form(x, secondary)
    rows, sizes, y = _by_face(x)
    best = _in_cells(y, products(secondary))
    first = torch.arange(0, 24 * len(secondary), 24, device=x.device)[:, None]
    index = torch.empty_like(rows)
    for units, mine, its in zip(FACE_UNITS.to(x.device), rows.split(sizes), best.split(sizes), strict=True):
        names = torch.cat([(first + units).flatten(), first.new_tensor([-1])])  # p q of y is (p_f p) q of x; -1 stays
        index[mine] = names[its]
    return _settle(index, x, lambda part: _by_closed_form(part, secondary))


def nearest_entry(x: Tensor, table: Tensor, by: Literal["angle", "distance"]) -> Tensor:
    """Row of ``table`` nearest to each of ``x [n, 4]``, the lowest one on ties: int64 ``[n]``.

    ``angle``: largest inner product, for entries of one length; many vectors are searched in cells. ``distance``:
    smallest distance, all entries are tried; x is at most 2 long and rounded to 2^-38, so that every sum is exact.
    ``table``, float64 ``[m, 4]``, holds multiples of 2^-11 of at most 2 in size.
    """
    x = scaled(x.T.contiguous()) if by == "angle" else (x.T.double() * FINE).round_().div_(FINE).contiguous()
    # |x - e|^2 = |x|^2 - 2 (<x, e> - |e|^2 / 2)
    offset = table.square().sum(1, keepdim=True) * (-0.5 if by == "distance" else 0.0)
    if by == "distance" or not _cells_pay(x):
        return _by_trial(x, table, offset)
    rows, sizes, y = _by_face(x)
    index = torch.empty_like(rows)
    for unit, mine, part in zip(UNITS[:8].to(table), rows.split(sizes), y.split(sizes, 1), strict=True):
        index[mine] = _in_cells(part, multiply(conjugate(unit), table))
    return _settle(index, x, lambda part: _by_trial(part, table, offset))


def _cells_pay(x: Tensor) -> bool:
    """Whether ``x [4, n]`` is searched in cells: thousands of small products, which are fast only on a CPU."""
    return x.device.type == "cpu" and x.shape[1] >= MANY


def _most(x: Tensor, rows: int) -> int:
    """Columns of ``x`` that are searched together where each has ``rows`` scores."""
    return max(1, (SCORES if x.device.type == "cpu" else WIDE_SCORES) // rows)


def _by_closed_form(x: Tensor, secondary: Tensor) -> Tensor:
    """``nearest_product`` of scaled ``x [4, n]`` by S products and as many closed forms."""
    basis = torch.eye(4, dtype=torch.float64, device=x.device)
    count = len(secondary)
    # row (component c, s) . x = component c of x conj(q_s); exact, so neither order nor shape of the sums matters
    turn = multiply(basis, conjugate(secondary)[:, None]).permute(2, 0, 1).reshape(4 * count, 4).contiguous()
    units = UNITS.to(x.device)
    indices = []
    for part in x.split(_most(x, 4 * count), 1):
        turned = (turn @ part).unflatten(0, (4, count))
        best = corner_score(turned, 0).max(0).indices
        v = turned.gather(1, best.expand(4, 1, -1))[:, 0]
        indices.append(best * 24 + (units @ v).max(0).indices)
    return torch.cat(indices)


def _by_trial(x: Tensor, table: Tensor, offset: Tensor) -> Tensor:
    """Row of the largest ``<x, e> + offset`` for each of ``x [4, n]``."""
    indices = [(table @ part).add_(offset).max(0).indices for part in x.split(_most(x, len(table)), 1)]
    return torch.cat(indices)


def _settle(index: Tensor, x: Tensor, search: Callable[[Tensor], Tensor]) -> Tensor:
    """Replace -1 by 0 for columns of ``x`` that are zero, by what ``search`` finds for the others."""
    tied = (index < 0).nonzero()[:, 0]
    index[tied] = 0
    tied = tied[(x[:, tied] != 0).any(0)]
    index[tied] = search(x[:, tied])
    return index


def _by_face(x: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Sort ``x [4, n]`` by the unit p_f of +-1, +-i, +-j, +-k nearest to it, and rotate that unit to 1.

    Returns columns of x, face by face; how many belong to each of the eight faces; and ``conj(p_f) x [4, n]`` of the
    columns, whose first component is the largest.
    """
    largest = x.abs().amax(0)
    face = torch.zeros_like(largest, dtype=torch.uint8)
    for number in reversed(range(7)):
        part = x[number // 2]
        face = (part > -largest if number % 2 else part < largest) * (1 + face)
    face, rows = face.sort()
    sizes = face.bincount(minlength=8).tolist()
    y = x.index_select(1, rows)
    for unit, part in zip(UNITS[:8].to(x), y.split(sizes, 1), strict=True):
        part.copy_(multiply(conjugate(unit), torch.eye(4).to(x)).T @ part)
    return rows, sizes, y


def _in_cells(y: Tensor, table: Tensor) -> Tensor:
    """Row of ``table [m, 4]`` with the largest inner product, for ``y [4, n]`` whose first component is the largest.

    -1 where several rows are best.
    """
    # a ratio just below a wall may be rounded onto it, see _rivals; zero goes to any cell
    ratio = (y[1:] / y[0].clamp_min(MANTISSA**-1)).add_(1).mul_(GRID_CELLS / 2)
    a, b, c = ratio.to(torch.uint8).clamp_(max=GRID_CELLS - 1)
    cell, order = ((a * GRID_CELLS + b) * GRID_CELLS + c).sort()
    y = y.index_select(1, order)
    front = _rivals(table, 2).any(0).nonzero()[:, 0]  # eight large boxes rule out most rows for this face
    keep = _rivals(table[front], GRID_CELLS)
    rivals = front[keep.nonzero()[:, 1]]
    counts = keep.sum(1).tolist()
    tell = torch.stack([torch.ones_like(rivals), rivals]).to(table).split(counts, 1)
    best = torch.empty_like(y[:2])
    space = torch.empty(SCORES + len(table), dtype=y.dtype, device=y.device)  # reused, so that it stays in cache
    start = 0
    sizes = cell.bincount(minlength=len(counts)).tolist()
    for entries, names, points, count in zip(table[rivals].split(counts), tell, y.split(sizes, 1), counts, strict=True):
        most = SCORES // count + 1
        # nearly all cells are small: a split of one costs as much as a product
        for part in (points,) if points.shape[1] <= most else points.split(most, 1):
            score = space[: count * part.shape[1]].view(count, -1)
            torch.mm(entries, part, out=score)
            torch.ge(score, score.amax(0), out=score)
            # one matrix product counts and names the best rows: much faster than a reduction that keeps indices
            torch.mm(names, score, out=best[:, start : start + part.shape[1]])
            start += part.shape[1]
    index = torch.where(best[0] == 1, best[1], -1.0).long()
    return torch.empty_like(order).index_copy_(0, order, index)


def _rivals(table: Tensor, g: int) -> Tensor:
    """Which rows of ``table [m, 4]`` may be the best somewhere in each of g^3 cells: bool ``[g^3, m]``.

    A cell is what eight corners (1, r) span. Inner products are linear: a row that another one beats at all corners is
    beaten in the whole cell. It is left out when that is the row which is best at the cell's middle. Corners are
    multiples of 2^-1, so all is exact, in float32 too, and what beats does so by 2^-12 or more: enough for a vector
    that rounding put 2^-52 outside its cell.
    """
    walls = torch.linspace(-1, 1, g + 1, dtype=torch.float32).to(table)
    one = walls[-1:]
    middle = (walls[1:] + walls[:-1]) / 2
    score = (torch.cartesian_prod(one, walls, walls, walls) @ table.T).float().view(g + 1, g + 1, g + 1, -1)
    best = (torch.cartesian_prod(one, middle, middle, middle) @ table.T).max(1).indices.view(g, g, g, 1)
    keep = torch.zeros(g, g, g, len(table), dtype=torch.bool, device=table.device)
    for i, j, k in itertools.product((0, 1), repeat=3):
        corner = score[i : i + g, j : j + g, k : k + g]
        keep |= corner >= corner.gather(3, best)
    return keep.flatten(0, 2)


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
    """Look up directions and multiply them by lengths: float32 ``[B, H, N, 4 n]``.

    ``codes`` and ``radius``, integers ``[B, H, N, n]``, are rows of ``table``, float32 ``[H, m, 4]``, and steps of
    ``quantize_lengths``, as are ``bits`` and ``scale``, fp16 ``[B, H, N, 1]``.
    """
    codes = codes.long().clamp_max(table.shape[1] - 1)  # slots that were never written hold any bits
    row = codes + torch.arange(table.shape[0], device=table.device)[:, None, None] * table.shape[1]
    return (table.flatten(0, 1)[row] * decode_lengths(radius, scale, bits)[..., None]).flatten(-2)


def search_heads(chunks: Tensor, search: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Search ``chunks [B, H, N, n, 4]`` of each head: int64 ``[B, H, N, n]``.

    ``search`` maps vectors ``[m, 4]`` of a head to indices. A search in cells is thousands of small matrix products,
    each too small for several threads, so on a CPU each head gets a thread where there are enough elements.
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
