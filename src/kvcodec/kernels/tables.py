"""Look-up tables of the CUDA readers, from the codecs' constants; ``read_levels.cuh`` says how they are used.

A table is uint8 ``[1 or H, bytes]``: one for all KV heads, or one of each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvcodec.codec import Params
from kvcodec.codecs.ultra_tq import Norm


def level_table(levels: Tensor, bits: int) -> Tensor:
    """Levels of all the codes that are looked up at once.

    An entry holds the fp16 levels of an index's codes, lowest bits first: a byte of codes of 1, 2 or 4 bits, a pair of
    3-bit codes; of more bits one code, whose level is there twice.

    Parameters
    ----------
    levels : Tensor ``[2**bits]``
        At most 65504 in size; rounded to fp16 here.
    bits : int
        1 to 6.

    Returns
    -------
    Tensor uint8 ``[entries * bytes of an entry]``

    Examples
    --------
    >>> [level_table(torch.zeros(2**b), b).numel() for b in (1, 2, 3, 4, 5, 6)]
    [4096, 2048, 256, 1024, 128, 256]
    """
    per = {1: 8, 2: 4, 3: 2, 4: 2}.get(bits, 1)
    index = torch.arange(2 ** (per * bits), device=levels.device)[:, None]
    shifts = bits * torch.arange(per, device=levels.device)
    entries = levels.half()[index >> shifts & 2**bits - 1]
    if per == 1:
        entries = entries.expand(-1, 2)
    return entries.contiguous().view(torch.uint8).flatten()


def level_bytes(bits: int) -> int:
    """Bytes of shared memory of ``LevelTable<bits>``: 128 for every index."""
    return 128 << bits * {1: 8, 2: 4, 3: 2, 4: 2}.get(bits, 1)


def with_sketch(stage: Callable[[Params], Tensor]) -> Callable[[Params], Tensor]:
    """Return the function that tabulates what ``ReadSketch`` needs: signs of the sketch, then the stage's tables."""

    def build(params: Params) -> Tensor:
        signs = params["sketch"][0].float().contiguous().view(torch.uint8)  # [H, 4 D]
        return torch.cat([signs, stage(params).expand(signs.shape[0], -1)], 1)

    return build


def turboquant_table(params: Params, head_dim: int) -> Tensor:
    """Table of ``ReadTurboQuant``: levels of the unit vector's coordinates times sqrt(D), uint8 ``[1, bytes]``."""
    levels = params["levels"][0].double() * head_dim**0.5
    return level_table(levels, len(levels).bit_length() - 1)[None]


def ultra_tq_table(params: Params, norm: Norm) -> Tensor:
    """Table of ``ReadUltraTQ``: the levels, over 4 when blocks have norms of their own, uint8 ``[1, 1024]``."""
    levels = params["levels"][0].double()
    return level_table(levels / 4 if norm == "block" else levels, 4)[None]
