"""Cell tables of HQMQ's encoder: which products can be the best where. Read by csrc/encode_hqmq.cuh, ``HqmqSearch``.

A vector is turned by one of the 24 Hurwitz units until 1 is the unit nearest to it: |y_1| + |y_2| + |y_3| <= y_0.
Cells are boxes of (y_1, y_2, y_3) / y_0. Inner products are linear, so a product that another one beats at all eight
corners of a box is beaten in the whole box.
"""

import itertools

import torch
from torch import Tensor

from kvcodec.ops.quaternion import UNITS, multiply, products

MARGIN = 2.0**-16
"""By how much a product must be beaten at the corners: vectors up to 2^-18 outside their cell are served too."""
MOST_PAIRS = 15
"""Longest list of a cell; what is longer is left to the search in double."""

PAIRS = {24: 1792, 48: 2176, 96: 2688, 192: 3840}
"""Room for pairs of products, by S; as in csrc/encode_hqmq.cuh."""
SIDE = 15
"""Cells along an axis; as in csrc/encode_hqmq.cuh."""


def hqmq_table(secondary: Tensor) -> Tensor:
    """Tables of all heads.

    Parameters
    ----------
    secondary : Tensor ``[H, S, 4]``
        From ``random_units``.

    Returns
    -------
    Tensor uint8 ``[H, bytes]`` on its device
    """
    return torch.stack([_head_table(head.double()) for head in secondary])


def _head_table(secondary: Tensor) -> Tensor:
    device = secondary.device
    room = PAIRS[len(secondary)]
    table = products(secondary)
    place, rivals = cell_rivals(table)
    pairs = (rivals.sum(1) + 1) // 2
    # what finds no room is not listed, the longest first
    order = pairs.argsort()
    fits = (pairs[order].cumsum(0) <= room) & (pairs[order] <= MOST_PAIRS)
    listed = torch.zeros_like(fits)
    listed[order] = fits
    pairs = torch.where(listed, pairs, 0)
    start = pairs.cumsum(0) - pairs
    cells = torch.zeros(SIDE**3, dtype=torch.int16, device=device)
    cells[place] = (start << 4 | pairs).to(torch.int32).to(torch.int16)  # as uint16: the bits are what counts
    entries = torch.zeros(2 * room, 4, dtype=torch.float16, device=device)
    names = torch.zeros(2 * room, dtype=torch.int16, device=device)
    row, name = (rivals & listed[:, None]).nonzero(as_tuple=True)
    at = 2 * start[row] + (rivals.cumsum(1) - 1)[row, name]
    entries[at] = table[name].half()
    names[at] = ((name // 24) << 5 | name % 24).to(torch.int16)
    units = UNITS.to(secondary)
    half = torch.tensor([0.5, -0.5]).to(units)
    turns = torch.cat([units[:8], torch.cartesian_prod(half, half, half, half)])  # by signs, as the kernel has them
    times = (multiply(turns[:, None], units) @ units.T).max(-1).indices.to(torch.uint8)
    parts = [part.contiguous().view(torch.uint8).flatten() for part in (entries, names, cells, times)]
    size = sum(part.numel() for part in parts)
    parts.append(torch.zeros(-size % 16, dtype=torch.uint8, device=device))
    return torch.cat([*parts, secondary.float().contiguous().view(torch.uint8).flatten()])


def cell_rivals(table: Tensor, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Which products can be the best in which cell.

    Parameters
    ----------
    table : Tensor float64 ``[m, 4]``
    side : int
        Cells along an axis, odd. They reach a little beyond [-1, 1], so that the corners of the octahedron lie inside.

    Returns
    -------
    place : Tensor int64 ``[n]``
        Cells that the octahedron touches: ``(i * side + j) * side + k``.
    rivals : Tensor bool ``[n, m]``
    """
    scale = 0.5 * side * (1 - 1 / 128)
    walls = (torch.arange(side + 1, dtype=torch.float64, device=table.device) - side // 2 - 0.5) / scale
    # a coarse grid tells which products are worth a look
    front = _rivals(table, walls[[0, side // 2, side]]).any(0).nonzero()[:, 0]
    nearest = torch.where(walls[:-1] * walls[1:] < 0, 0.0, torch.minimum(walls[:-1].abs(), walls[1:].abs()))
    reach = nearest[:, None, None] + nearest[:, None] + nearest
    place = (reach <= 1.001).flatten().nonzero()[:, 0]
    some = table[front]
    keep = _rivals(some, walls, place)
    # of those left, what any other one beats
    width = int(keep.sum(1).max())
    index = keep.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    held = keep.gather(1, index)
    beaten = torch.ones(len(place), width, width, dtype=torch.bool, device=table.device)
    for corner in _corners(walls, place):
        score = (some[index] * corner[:, None]).sum(-1).masked_fill_(~held, -torch.inf)
        beaten &= score[:, :, None] > score[:, None] + MARGIN
    held &= ~beaten.any(1)
    rivals = torch.zeros(len(place), len(table), dtype=torch.bool, device=table.device)
    row, column = held.nonzero(as_tuple=True)
    rivals[row, front[index[row, column]]] = True
    return place, rivals


def _corners(walls: Tensor, place: Tensor) -> list[Tensor]:
    """The eight corners (1, r) of cells: ``[n, 4]`` each."""
    side = len(walls) - 1
    at = (place // side**2, place // side % side, place % side)
    one = torch.ones(len(place), dtype=walls.dtype, device=walls.device)
    return [
        torch.stack([one, *(walls[i + up] for i, up in zip(at, ups, strict=True))], 1)
        for ups in itertools.product((0, 1), repeat=3)
    ]


def _rivals(table: Tensor, walls: Tensor, place: Tensor | None = None) -> Tensor:
    """Rows of ``table [m, 4]`` that the one which is best in the middle does not beat at all corners: ``[n, m]``."""
    if place is None:
        place = torch.arange((len(walls) - 1) ** 3, device=walls.device)
    corners = _corners(walls, place)
    best = (sum(corners[1:], corners[0]) @ table.T).max(1).indices[:, None]
    keep = torch.zeros(len(place), len(table), dtype=torch.bool, device=table.device)
    for corner in corners:
        score = corner @ table.T
        keep |= score >= score.gather(1, best) - MARGIN
    return keep
