"""Kernels of ``ghost``: widths that differ by channel, cubic levels, channels in an order of their own.

The tables of a head are bytes: the channels of the model as sorted, ``uint8 [D]``, then the widths of the quads,
``uint8 [D / 4]``. The kernels make of them what they need. Factors are in the model's order.
"""

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Role
from kvcodec.codecs.ghost import Ghost
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.spec import Reader, align, flag
from kvcodec.ops.widths import put_back


def reader(codec: Codec, head_dim: int, role: Role) -> Reader:
    """As ``spec.reader``."""
    assert isinstance(codec, Ghost)
    if codec.transform != "channels":
        raise UnsupportedError(f"the kernels read transform=channels, not {codec}")
    codec.layout(head_dim)  # refuses what does not fill streams
    return Reader(
        f"kv::ReadGhost<{head_dim}, {int(2 * codec.bits)}, {flag(role == 'value')}>",
        "read_ghost.cuh",
        shared=4 * head_dim + head_dim + (4 * head_dim if role == "value" else 0),
        tables=read_tables,
        factor=sizes,
    )


def sizes(params: Params) -> Tensor:
    """sqrt(v) of the model's channels: float32 ``[1, H, D]``."""
    return _put_back(1 / params["factor"], params)


def _put_back(x: Tensor, params: Params) -> Tensor:
    """Channels as sorted ``[1, H, D]``, in the model's order."""
    return put_back(x.unsqueeze(2), params["order"]).squeeze(2)


def read_tables(params: Params) -> Tensor:
    """Tables of ``kv::ReadGhost``: order and widths, of values then the means over sizes; uint8 ``[H, bytes]``.

    Raises
    ------
    UnsupportedError
        The constants are of several sequences.
    """
    order, widths = params["order"], params["widths"]
    if order.shape[0] != 1:
        raise UnsupportedError(
            f"ghost: the kernels take constants of one sequence, not of {order.shape[0]}; run "
            f"`kvcodec fit MODEL ghost-3 --text FILE -o PARAMS` (with your spec) and pass params."
        )
    head = torch.cat([order[0].to(torch.uint8), widths[0]], 1)
    head = torch.nn.functional.pad(head, (0, align(head.shape[1]) - head.shape[1]))
    if "centre" not in params:
        return head
    return torch.cat([head, params["centre"][0].contiguous().view(torch.uint8)], 1)
