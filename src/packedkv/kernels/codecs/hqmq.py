"""Kernels of ``hqmq``: chunks of four channels as products of quaternions and radii.

The encoder searches in cells: a vector is multiplied by one of the 24 Hurwitz units so that 1 is the unit nearest to
it, |y_1| + |y_2| + |y_3| <= y_0, and cells are boxes of (y_1, y_2, y_3) / y_0. Inner products are linear: a product
that another one beats at all eight corners of a box is beaten in the whole box (``HqmqSearch`` of encode_hqmq.cuh).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.hqmq import Hqmq
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs.tables import copied_bytes, half_rows
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader
from packedkv.ops.quaternion import UNITS, multiply, products

TABLE_BUDGET = 73728
"""Bytes up to which codebooks have copies, as in csrc/read_hqmq.cuh."""
CODEBOOK_UNIT = 2.0**15
"""Factor by which products with radii, fp16 subnormals, become normal numbers."""
MARGIN = 2.0**-16
"""By how much a product must be beaten at the corners: vectors up to 2^-18 outside their cell are served too."""
MOST_PAIRS = 15
"""Longest list of a cell; cells with longer lists are searched in double."""

PAIRS = {24: 1792, 48: 2176, 96: 2688, 192: 3840}
"""Most pairs of products, by S; as in csrc/encode_hqmq.cuh."""
SIDE = 15
"""Cells along an axis; as in csrc/encode_hqmq.cuh."""
HEADS = 8
"""Heads tabulated at a time: bounds the scores, 20 MB of float64 for each at S = 192."""


def reader(codec: Hqmq, head_dim: int, role: Role) -> Reader:
    """The head's codebook in shared memory, in as many copies as fit."""
    if codec.packing != "ceil":
        raise UnsupportedError(f"the kernels read packing=ceil, not {codec}")
    return Reader(
        read_type(codec, head_dim, role, alone=True),
        "read_hqmq.cuh",
        shared=shared_bytes(codec, role)[0],
        fewer=shared_bytes(codec, role)[1:],
        tables=lambda params: read_tables(params, crossed(codec, role)),
        paired_type=read_type(codec, head_dim, role),
        # least shared memory of the readers of keys and values together
        min_shared=512 * 256 if (codec.s, codec.r) in ((24, 3), (24, 4)) else 0,
        tile=16 if codec.s >= 96 else 64,  # codebooks with eight copies or fewer
        team_warps=16,
    )


def cpu_reader(codec: Hqmq, head_dim: int, role: Role) -> CpuReader:
    """Half of the head's codebook; the other half are its negatives."""
    if codec.packing != "ceil":
        raise UnsupportedError(f"the kernels read packing=ceil, not {codec}")
    return CpuReader(f"hqmq{codec.code_bits} {codec.r}", (0, 0, *_cpu_order(codec, head_dim)), tables=cpu_tables)


def _cpu_order(codec: Hqmq, head_dim: int) -> tuple[int, int]:
    """Options 2 and 3 of ``unpack_hqmq`` and ``encode_hqmq``."""
    fields = [field.name for field in codec.layout(head_dim).fields]
    return int(-(-head_dim // 4) % 8 == 0), fields.index("scale")


def cpu_tables(params: Params) -> Tensor:
    """Every second row of each head's codebook, float32: uint8 ``[H, 16 * 2^(code_bits - 1)]``.

    Odd rows are their negatives. Zeros follow the 12 S rows: slots that were never written hold any codes.
    """
    codebook = params["codebook"][0]
    table = codebook.float()
    if codebook.dtype == torch.int8:
        table = table / 127
    named = 1 << (table.shape[1] - 1).bit_length()  # by the bits of a code
    rows = torch.nn.functional.pad(table, (0, 0, 0, named - table.shape[1]))[:, ::2]
    return rows.flatten(1).contiguous().view(torch.uint8)


def encoder(codec: Hqmq, head_dim: int, role: Role) -> Encoder:
    if codec.packing != "ceil":
        raise UnsupportedError(f"no CUDA kernel encodes {codec}")
    name = f"kv::HqmqRow<{head_dim}, {codec.s}, {codec.r}>"
    return Encoder(name, "encode_hqmq.cuh", tables=cell_tables, form="table")


def cpu_encoder(codec: Hqmq, head_dim: int, role: Role) -> CpuEncoder:
    """The nearest product, by the head's secondary quaternions."""
    if codec.packing != "ceil":
        raise UnsupportedError(f"the CPU kernels write packing=ceil, not {codec}")
    return CpuEncoder("hqmq", (codec.s, codec.r, *_cpu_order(codec, head_dim), codec.code_bits), tables=cpu_secondary)


def cpu_secondary(params: Params) -> Tensor:
    """Components of each head's secondary quaternions, float32, rows of a multiple of 16: uint8 ``[H, bytes]``."""
    rows = params["secondary"][0].float().mT
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 16)).flatten(1).contiguous().view(torch.uint8)


def read_type(codec: Hqmq, head_dim: int, role: Role, alone: bool = False) -> str:
    """Return the C++ struct that reads the codec's keys or values.

    Unless ``alone``, ``codec`` holds both keys and values. Dead slots then need no bounds check: an address outside of
    one table lies in the other one, or in the bytes that the readers' ``min_shared`` reserves.
    """
    place = "ALONE" if alone else {"key": "KEYS", "value": "VALUES"}[role]
    return f"kv::ReadHqmq<{head_dim}, {codec.s}, {codec.r}, {str(crossed(codec, role)).lower()}, kv::{place}>"


def crossed(codec: Hqmq, role: Role) -> bool:
    """Whether a quarter of the codebook is held, ``CROSSED`` of csrc/read_hqmq.cuh.

    Twice the copies for more instructions. With s = 96, where shared memory is what limits, it is worth them for keys
    alone: at r = 3 128 x 1,024 tokens on an H100 take 56.8 us, 54.4 so, and 59.5 with values as well; at r = 4 32 x
    32,768 take 398, 382 and 390, and one sequence of 65,536 0.4 more. At r = 6 it does not pay.
    """
    if _is_word(codec):
        return codec.s == 192 or (codec.s, codec.r, role) == (96, 4, "key")
    return codec.s == 96 and role == "key"


def _is_word(codec: Hqmq) -> bool:
    """Whether a chunk has 16 bits or more, ``UNITS`` of csrc/hqmq.cuh."""
    return codec.code_bits + codec.r >= 16


def shared_bytes(codec: Hqmq, role: Role) -> tuple[int, ...]:
    """Bytes of shared memory of the reader's codebook, and of fewer copies of it."""
    quarter = crossed(codec, role)
    shift = 16 - codec.code_bits + quarter  # bits below a row's place in a word of 16 bits: ``FROM``
    least = 1 << shift - 3 if _is_word(codec) else 4 if quarter else 1
    return copied_bytes(6 * codec.s if quarter else 12 * codec.s, TABLE_BUDGET, least)


def read_tables(params: Params, crossed: bool) -> Tensor:
    """Rows of each head's codebook, times 2^15, of which the others follow: uint8 ``[H, 96 S]`` or ``[H, 48 S]``.

    Every second row, as odd ones are their negatives; or every fourth, channels 1, 3, 0, 2 (``crossed``).
    """
    codebook = params["codebook"][0]
    table = codebook.float()
    if codebook.dtype == torch.int8:
        table = table / 127
    table = table[:, ::4][..., [1, 3, 0, 2]] if crossed else table[:, ::2]
    return half_rows(table * CODEBOOK_UNIT)


def cell_tables(params: Params) -> Tensor:
    """Tables of the encoder for all heads, uint8 ``[H, bytes]``, built together: launches dominate their cost."""
    return torch.cat([_tables(heads.double()) for heads in params["secondary"][0].split(HEADS)])


def _tables(secondary: Tensor) -> Tensor:
    heads, count, _ = secondary.shape
    device, room = secondary.device, PAIRS[count]
    place, names, valid = cell_rivals(products(secondary))
    pairs = (valid.sum(2) + 1) // 2  # [H, n]
    # lists that exceed the limit are dropped, the longest first
    ordered, order = pairs.sort(dim=1, stable=True)
    fits = (ordered.cumsum(1) <= room) & (ordered <= MOST_PAIRS)
    listed = torch.zeros_like(fits).scatter_(1, order, fits)
    pairs = torch.where(listed, pairs, 0)
    start = pairs.cumsum(1) - pairs
    cells = torch.zeros(heads, SIDE**3, dtype=torch.int16, device=device)
    cells[:, place] = (start << 4 | pairs).to(torch.int32).to(torch.int16)  # the bits of a uint16
    # products go to their places, unlisted ones behind the end
    at = 2 * start[..., None] + valid.cumsum(2) - 1
    at = torch.where(valid & listed[..., None], at, 2 * room).flatten(1)
    names = names.flatten(1)
    rows = products(secondary).half().gather(1, names[..., None].expand(-1, -1, 4))
    entries = rows.new_zeros(heads, 2 * room + 1, 4).scatter_(1, at[..., None].expand(-1, -1, 4), rows)[:, :-1]
    labels = (names // 24 << 5 | names % 24).to(torch.int16)
    labels = labels.new_zeros(heads, 2 * room + 1).scatter_(1, at, labels)[:, :-1]
    parts = [part.contiguous().view(torch.uint8).flatten(1) for part in (entries, labels, cells)]
    parts.append(_turns(device).expand(heads, -1))
    size = sum(part.shape[1] for part in parts)
    parts.append(torch.zeros(heads, -size % 16, dtype=torch.uint8, device=device))
    return torch.cat([*parts, secondary.float().contiguous().view(torch.uint8).flatten(1)], 1)


@lru_cache(maxsize=8)
def _turns(device: torch.device) -> Tensor:
    """Row of ``p_t p`` for the 24 units p, by the unit p_t that turns: uint8 ``[1, 24 * 24]``."""
    half = torch.tensor([0.5, -0.5]).to(UNITS)
    turns = torch.cat([UNITS[:8], torch.cartesian_prod(half, half, half, half)])  # by signs, as the kernel has them
    return (multiply(turns[:, None], UNITS) @ UNITS.T).max(-1).indices.to(torch.uint8).flatten()[None].to(device)


class _Cells(NamedTuple):
    """Boxes of (y_1, y_2, y_3) / y_0 that the octahedron touches, and boxes thrice as wide around them."""

    place: Tensor  # int64 [n]: (i * side + j) * side + k
    corners: Tensor  # float64 [n, 8, 4]: (1, r) of each corner
    wide: Tensor  # float64 [k, 8, 4]: corners of the wide boxes
    inside: Tensor  # int64 [n]: the wide box in which a box lies


@lru_cache(maxsize=8)
def _cells(side: int, device: torch.device) -> _Cells:
    scale = 0.5 * side * (1 - 1 / 128)
    edges = (torch.arange(side + 1, dtype=torch.float64) - side // 2 - 0.5) / scale
    low, high = edges[:-1], edges[1:]
    nearest = torch.where(low * high < 0, 0.0, torch.minimum(low.abs(), high.abs()))
    at = (nearest[:, None, None] + nearest[:, None] + nearest <= 1.001).nonzero()  # [n, 3]
    wide, inside = torch.unique(at // 3, dim=0, return_inverse=True)
    ends = torch.cartesian_prod(*[torch.arange(2)] * 3)

    def corners(first: Tensor, step: int) -> Tensor:
        return torch.nn.functional.pad(edges[first[:, None] + step * ends], (1, 0), value=1.0)

    place = (at * torch.tensor([side**2, side, 1])).sum(1)
    return _Cells(*(x.to(device) for x in (place, corners(at, 1), corners(3 * wide, 3), inside)))


def cell_rivals(table: Tensor, side: int = SIDE) -> tuple[Tensor, Tensor, Tensor]:
    """Which products of ``table``, float64 ``[H, m, 4]``, can be the best in which cell.

    ``side``: cells along an axis, an odd multiple of 3. They reach a little beyond [-1, 1], so that the corners of the
    octahedron lie inside. Returns the cells that the octahedron touches, int64 ``[n]``: ``(i * side + j) * side + k``;
    rows of the table, int64 ``[H, n, w]``, ascending where they are held; and which of them can win there.
    """
    cells = _cells(side, table.device)
    # the wide boxes rule out most products
    names, valid = (x[:, cells.inside] for x in _packed(_rivals(cells.wide @ table.mT[:, None])))
    some = table.gather(1, names.flatten(1)[..., None].expand(-1, -1, 4)).unflatten(1, names.shape[1:])
    scores = (cells.corners @ some.mT).masked_fill_(~valid[:, :, None], -torch.inf)
    near, there = _packed(_rivals(scores))
    # of those left, drop what another one beats
    scores = scores.gather(3, near[:, :, None].expand(-1, -1, 8, -1))
    beaten = torch.ones(*there.shape, there.shape[2], dtype=torch.bool, device=table.device)
    for score in scores.unbind(2):
        beaten &= score[..., None] > score[..., None, :] + MARGIN
    beaten &= there[..., None]
    return cells.place, names.gather(2, near), there & ~beaten.any(2)


def _packed(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Number the set bits of the last axis, ascending, ``[..., w]``; also which places are taken. One host sync."""
    count = bits.sum(-1, keepdim=True)
    width = int(count.max())
    to = torch.where(bits, bits.cumsum(-1) - 1, width)
    number = torch.arange(bits.shape[-1], device=bits.device).expand(bits.shape)
    names = to.new_zeros(*bits.shape[:-1], width + 1).scatter_(-1, to, number)[..., :-1]
    return names, torch.arange(width, device=bits.device) < count


def _rivals(scores: Tensor) -> Tensor:
    """Products that are not beaten at all corners by the one which is best in the middle: bool ``[H, n, m]``.

    ``scores``, float64 ``[H, n, 8, m]``, are of the corners of n boxes.
    """
    best = scores.sum(2, keepdim=True).max(3, keepdim=True).indices.expand(-1, -1, 8, -1)
    return (scores >= scores.gather(3, best) - MARGIN).any(2)
