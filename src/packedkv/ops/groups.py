"""Groups of numbers that share a scale: splitting channels into groups, and scales that are valid in fp16.

Along channels the last group is shorter when the group does not divide head_dim: 80 channels in groups of 32 are
32 + 32 + 16. ``group = 0`` is one group of all channels.
"""

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX

SMALLEST_SCALE = 2.0**-24
"""Smallest positive fp16: a scale never underflows to zero, so a division by it is always defined."""


def group_count(head_dim: int, group: int) -> int:
    """Groups along channels of one token.

    >>> [group_count(d, 32) for d in (16, 64, 80, 128)], group_count(128, 0)
    ([1, 2, 3, 4], 1)
    """
    return -(-head_dim // group) if group else 1


def split_channels(x: Tensor, group: int) -> Tensor:
    """Cut ``x [..., D]`` into groups ``[..., group_count(D, group), group]``.

    A shorter last group is filled up with copies of its last channel, which changes neither minimum nor maximum.
    """
    dim = x.shape[-1]
    if group == 0:
        return x.unsqueeze(-2)
    missing = -dim % group
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return x.unflatten(-1, (-1, group))


def spread_channels(per_group: Tensor, group: int, head_dim: int) -> Tensor:
    """Give every channel its group's number: ``[..., groups]`` -> ``[..., head_dim]``.

    >>> spread_channels(torch.tensor([1, 2, 3]), 32, 80).bincount().tolist()
    [0, 32, 32, 16]
    """
    return per_group.repeat_interleave(group or head_dim, -1)[..., :head_dim]


def fp16_scale(span: Tensor, steps: int, zero: Tensor | float = 0.0) -> Tensor:
    """Scale that maps codes 0 to ``steps`` onto a float32 ``span`` above ``zero``: fp16, finite and never zero.

    ``rne(span / steps)``, one fp16 step smaller where ``zero + steps * scale`` would leave the fp16 range: rounding
    65504 / 3 up to 21840 would decode to 65520, which is infinity in fp16. A negative span counts as 0.

    >>> fp16_scale(torch.tensor([3.0, 0.0, 65504.0]), 3).tolist()
    [1.0, 5.960464477539063e-08, 21824.0]
    """
    # a tensor, not a number: CUDA divides by a constant through its reciprocal, one ulp off the CPU's bits
    scale = (span / torch.full_like(span, steps)).clamp(SMALLEST_SCALE, FP16_MAX).half()
    below = (scale.view(torch.int16) - 1).view(torch.float16)
    return torch.where(zero + steps * scale.float() > FP16_MAX, below, scale)
