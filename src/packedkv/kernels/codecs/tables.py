"""Look-up tables that the kernels of several methods share, uint8 ``[1 or H, bytes]``: of all KV heads or of each."""

from collections.abc import Callable

import torch
from torch import Tensor

from packedkv.codec import Params
from packedkv.ops.lloyd_max import midpoints

SLACK = 2.0**-20
"""How far, relative to the number itself, fp32 may be off before double decides; four times the largest error."""
_CODES_OF_AN_INDEX = {1: 8, 2: 4, 3: 2, 4: 2}
"""By the bits of a code; one code for more bits."""


def level_table(levels: Tensor, bits: int) -> Tensor:
    """Levels of all the codes that are looked up at once: uint8 ``[entries * bytes of an entry]``.

    An entry holds the fp16 levels of an index's codes, lowest bits first: a byte of codes of 1, 2 or 4 bits, a pair of
    3-bit codes; of more bits one code, whose level is there twice. ``levels [2**bits]`` are at most 65504 in size, and
    ``bits`` 1 to 6.

    >>> [level_table(torch.zeros(2**b), b).numel() for b in (1, 2, 3, 4, 5, 6)]
    [4096, 2048, 256, 1024, 128, 256]
    """
    per = _CODES_OF_AN_INDEX.get(bits, 1)
    index = torch.arange(2 ** (per * bits), device=levels.device)[:, None]
    shifts = bits * torch.arange(per, device=levels.device)
    entries = levels.half()[index >> shifts & 2**bits - 1]
    if per == 1:
        entries = entries.expand(-1, 2)
    return entries.contiguous().view(torch.uint8).flatten()


def level_bytes(bits: int) -> int:
    """Bytes of shared memory of ``kv::LevelTable<bits>``: 128 for every index."""
    return 128 << bits * _CODES_OF_AN_INDEX.get(bits, 1)


HALVINGS = 3
"""How often the room of look-up tables may be halved, ``KV_HALVINGS`` of csrc/bits.cuh."""


def copied_bytes(entries: int, budget: int, least: int = 1) -> tuple[int, ...]:
    """Bytes of shared memory of ``kv::Table8``: ``entries`` rows of 8 bytes, in as many copies as fit the budget.

    Then those of half of the budget, and so on, until there are ``least`` copies, or no fewer.

    >>> copied_bytes(1024, 131072), copied_bytes(2304, 73728)
    ((131072, 65536, 32768, 8192), (73728, 18432))
    """
    choices = [n for n in (16, 8, 4, 2) if n >= least and (n > 2 or least == 2)]
    copies = [next((n for n in choices if entries * 8 * n <= budget >> i), least) for i in range(HALVINGS + 1)]
    return tuple(entries * 8 * n for n in copies[: copies.index(copies[-1]) + 1])


def half_rows(table: Tensor) -> Tensor:
    """Bytes of fp16 rows: ``[H, n, m]`` -> uint8 ``[H, 2 n m]``."""
    return table.half().flatten(1).contiguous().view(torch.uint8)


def group_levels(unit: float, levels: Tensor) -> Tensor:
    """Table of ``unpack_group_levels`` and ``unpack_levels``: a factor of norms, then the levels ``[n]``; float32."""
    levels = levels.float()
    return torch.cat([levels.new_tensor([unit]), levels]).view(torch.uint8)[None]


def walls_of(levels: Tensor) -> Tensor:
    """Table of ``Nearest`` (cpu/encode_linear.h): float64 walls between ascending ``levels [2**bits]``, infinity."""
    return filled_walls(midpoints(levels.double()), len(levels).bit_length() - 1).view(torch.uint8)[None]


def filled_walls(walls: Tensor, bits: int) -> Tensor:
    """Walls, float64, filled up with infinity: ``[2**bits]``."""
    return torch.cat([walls, walls.new_full(((1 << bits) - len(walls),), torch.inf)])


def nearest_level(bits: int) -> Callable[[Params], Tensor]:
    """Return the function that builds the table of boundaries between a codec's levels."""
    return lambda params: wall_table(midpoints(params["levels"][0].double()), bits)[None].to(params["levels"].device)


def wall_table(walls: Tensor, bits: int, error: float | None = None) -> Tensor:
    """Table of ``Levels<bits>`` in csrc/encode_sums.cuh: uint8 ``[16 + 64 * 2**bits + 8 * 2**bits]``, on the CPU.

    ``walls``, float64, are at most ``2**bits - 1``, ascending; what is counted is how many lie below a number.
    ``error`` bounds the error of the numbers compared, doubled at least; default: ``SLACK`` of the largest wall.
    """
    walls = walls.cpu()
    cells = 8 << bits
    n = len(walls)
    if error is None:
        error = SLACK * float(walls.abs().max()) if n else 0.0
    span = float(walls[-1] - walls[0]) if n else 0.0
    scale = float(torch.tensor((cells - 4) / span if span > 0 else 1.0, dtype=torch.float32))
    first = 2 - round(float(walls[0]) * scale) if n else 0  # the cell of u is round(u * scale) + first
    # the range of a cell and 1 % more; the outer cells are unbounded
    edges = (torch.arange(cells + 1, dtype=torch.float64) - 0.5 - first) / scale
    reach = 2 * error + 0.01 / scale
    low, high = edges[:-1] - reach, edges[1:] + reach
    low[0], high[-1] = -torch.inf, torch.inf
    below = torch.searchsorted(walls, low)
    inside = torch.searchsorted(walls, high, right=True) - below
    # without a wall inside the next one below or above serves as well: u is known to be on one side of it
    near = torch.where(inside > 0, below, (below - 1).clamp_min(0))
    padded = filled_walls(walls, bits)
    wall = padded[near].float()
    wall[inside > 1] = torch.nan  # always decided in double
    if n == 0:
        wall[:] = torch.finfo(torch.float32).max
    head = torch.tensor([scale, 2.0**23 + first, error, 0.0], dtype=torch.float32)
    entries = torch.stack([wall.view(torch.int32), near.int()], 1)
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (head, entries, padded)])
