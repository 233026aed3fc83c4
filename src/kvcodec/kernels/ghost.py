"""Kernels of ``ghost``: widths that differ by channel, cubic levels, channels in an order of their own.

The tables of a head are bytes: the channels of the model as sorted, ``uint8 [D]``, then the widths of the quads,
``uint8 [D / 4]``. The kernels make of them what they need. Factors are in the model's order.
"""

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Role
from kvcodec.codecs.ghost import LANES, SCALES, UNIT, Ghost, levels, power, scales, stream_bytes, stream_unit
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.spec import Encoder, Reader, align, flag
from kvcodec.ops.widths import put_back, width_cuts


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
    order, widths = _of_one(params)
    head = torch.cat([order.to(torch.uint8), widths], 1)
    head = torch.nn.functional.pad(head, (0, align(head.shape[1]) - head.shape[1]))
    if "centre" not in params:
        return head
    return torch.cat([head, _bytes(params["centre"][0])], 1)


def encoder(codec: Codec, head_dim: int, role: Role) -> Encoder:
    """As ``spec.encoder``."""
    assert isinstance(codec, Ghost)
    if codec.transform != "channels":
        raise UnsupportedError(f"the kernels write transform=channels, not {codec}")
    codec.layout(head_dim)
    size = stream_bytes(head_dim, codec.bits)
    return Encoder(
        f"kv::GhostRow<{head_dim}, {int(2 * codec.bits)}>",
        "encode_ghost.cuh",
        tables=lambda params: write_tables(params, size),
        factor=inverse_sizes,
        form="table",
    )


def inverse_sizes(params: Params) -> Tensor:
    """1 / sqrt(v) of the model's channels: float32 ``[1, H, D]``."""
    return _put_back(params["factor"], params)


def write_tables(params: Params, size: int) -> Tensor:
    """Tables of ``kv::GhostRow`` for streams of ``size`` bytes: uint8 ``[H, bytes]``.

    Raises
    ------
    UnsupportedError
        As ``read_tables``.
    """
    order, widths = _of_one(params)
    weight, device = params["weight"][0], order.device
    centre = params["centre"][0] if "centre" in params else torch.zeros_like(weight)
    infinite = torch.tensor([torch.inf])
    cuts = width_cuts(levels()).float()
    behind = [torch.cat([cuts[w, : 2**w - 1], infinite]) for w in range(len(cuts))]
    same = torch.cat([levels(), infinite, infinite, *behind]).to(device)
    # the reference's product, number by number
    walls = torch.tensor([power(2 * i + 1 - 2 * UNIT) for i in range(1, SCALES)], dtype=torch.float32).to(device)
    walls = LANES * (widths > 0).sum(-1, keepdim=True) * walls
    walls = torch.nn.functional.pad(walls, (0, 2), value=torch.inf)
    ends = widths.long().cumsum(-1)
    step = 8 * stream_unit(size)
    units = torch.arange(0, 8 * size, step, device=device)
    first = (ends.unsqueeze(1) <= units[:, None]).sum(-1)
    numbers = torch.cat([_all(same, walls), walls, _all(scales().to(device), walls), centre, weight], 1)
    places = [order.to(torch.uint8), widths, _bytes((ends - widths).to(torch.int16)), first.to(torch.uint8)]
    table = torch.cat([_bytes(numbers), *places], 1)
    return torch.nn.functional.pad(table, (0, align(table.shape[1]) - table.shape[1]))


def _all(x: Tensor, like: Tensor) -> Tensor:
    return x.expand(len(like), -1)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _of_one(params: Params) -> tuple[Tensor, Tensor]:
    """Order ``[H, D]`` and widths ``[H, D/4]``."""
    order, widths = params["order"], params["widths"]
    if order.shape[0] != 1:
        raise UnsupportedError(
            f"ghost: the kernels take constants of one sequence, not of {order.shape[0]}; run "
            f"`kvcodec fit MODEL ghost-3 --text FILE -o PARAMS` (with your spec) and pass params."
        )
    return order[0], widths[0]
