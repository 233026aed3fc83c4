"""Kernels of ``ghost``: widths that differ by channel, cubic levels, channels in an order of their own.

The tables of a head are bytes: the channels of the model as sorted, ``uint8 [D]``, then the widths of the quads,
``uint8 [D / 4]``. The kernels make of them what they need. Factors are in the model's order.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params, Role
from kvcodec.codecs.ghost import LANES, SCALES, UNIT, Ghost, levels, power, scales, stream_bytes, stream_unit
from kvcodec.errors import UnsupportedError
from kvcodec.kernels.spec import Encoder, Reader, align, flag
from kvcodec.ops.widths import put_back, width_cuts

LEVEL_BYTES = 128 * 2 * 2**8
"""Bytes of shared memory of the levels of two codes of up to four bits."""


def reader(codec: Codec, head_dim: int, role: Role) -> Reader:
    """As ``spec.reader``."""
    assert isinstance(codec, Ghost)
    if codec.transform != "channels":
        raise UnsupportedError(f"the kernels read transform=channels, not {codec}")
    codec.layout(head_dim)  # refuses what does not fill streams
    values = role == "value"
    name = f"kv::ReadGhost<{head_dim}, {int(2 * codec.bits)}, {flag(values)}"
    own = (9 if values else 5) * head_dim + 16
    return Reader(
        f"{name}>",
        "read_ghost.cuh",
        shared=own + LEVEL_BYTES,
        lends="levels of pairs",
        borrower=f"{name}, true>",
        own_shared=own,
        tables=read_tables,
        factor=sizes,
        team_warps=0,  # constants may be those of a sequence
    )


def sizes(params: Params) -> Tensor:
    """sqrt(v) of the model's channels: float32 ``[B or 1, H, D]``."""
    return _put_back(1 / params["factor"], params)


def _put_back(x: Tensor, params: Params) -> Tensor:
    """Channels as sorted ``[B or 1, H, D]``, in the model's order."""
    return put_back(x.unsqueeze(2), params["order"]).squeeze(2)


def read_tables(params: Params) -> Tensor:
    """Tables of ``kv::ReadGhost``: order and widths, of values then the means over sizes; ``[B or 1, H, bytes]``."""
    head = _padded(torch.cat([params["order"].to(torch.uint8), params["widths"]], -1))
    return torch.cat([head, _bytes(params["centre"])], -1) if "centre" in params else head


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
    """1 / sqrt(v) of the model's channels: float32 ``[B or 1, H, D]``."""
    return _put_back(params["factor"], params)


def write_tables(params: Params, size: int) -> Tensor:
    """Tables of ``kv::GhostRow`` for streams of ``size`` bytes: uint8 ``[B or 1, H, bytes]``."""
    order, widths, weight = params["order"], params["widths"], params["weight"]
    centre = params["centre"] if "centre" in params else torch.zeros_like(weight)
    same, walls, held = _of_all_heads(order.device)
    walls = LANES * (widths > 0).sum(-1, keepdim=True) * walls  # the reference's product, number by number
    walls = torch.nn.functional.pad(walls, (0, 2), value=torch.inf)
    ends = widths.long().cumsum(-1)
    units = torch.arange(0, 8 * size, 8 * stream_unit(size), device=order.device)
    first = (ends.unsqueeze(-2) <= units[:, None]).sum(-1)
    numbers = [x.expand(*walls.shape[:2], -1) for x in (same, walls, held, centre, weight)]
    places = [order.to(torch.uint8), widths, _bytes((ends - widths).to(torch.int16)), first.to(torch.uint8)]
    return _padded(torch.cat([*map(_bytes, numbers), *places], -1))


@lru_cache(maxsize=16)
def _of_all_heads(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Levels and the cuts between them, walls between scales for one channel, scales: float32, never written to."""
    with torch.inference_mode(mode=False):
        infinite = torch.tensor([torch.inf])
        cuts = width_cuts(levels()).float()
        behind = [torch.cat([cuts[w, : 2**w - 1], infinite]) for w in range(len(cuts))]
        same = torch.cat([levels(), infinite, infinite, *behind])
        walls = torch.tensor([power(2 * i + 1 - 2 * UNIT) for i in range(1, SCALES)], dtype=torch.float32)
        return same.to(device), walls.to(device), scales().to(device)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _padded(x: Tensor) -> Tensor:
    """Rows of whole 16 bytes."""
    return torch.nn.functional.pad(x, (0, align(x.shape[-1]) - x.shape[-1]))
