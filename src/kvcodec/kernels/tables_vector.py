"""Look-up tables of the codecs that hold vectors, as the kernels read them: octopus' triplets, hqmq's chunks of four.

Rows are four fp16 numbers, one read of 8 bytes. ``*_reader`` name the C++ struct, ``*_tables`` build from a site's
constants what its ``fill`` copies, ``*_shared`` say how many bytes of shared memory that takes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvcodec.codec import Params, Role
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.octopus import JOINT_BITS, Octopus

DIRECTION_BITS = 6
"""Largest b_dir: 4096 directions of 8 bytes."""
OCTOPUS_ROOM, HQMQ_ROOM = 131072, 73728
"""Bytes up to which tables have copies, ROOM of Table8 in bits.cuh."""
CODEBOOK_UNIT = 2.0**15
"""Products with radii that are fp16 subnormals become normal numbers."""


def _copied(entries: int, room: int) -> int:
    """Bytes of a table of ``entries`` rows with as many copies as ``Table8`` makes."""
    copies = next((n for n in (16, 8, 4) if entries * 8 * n <= room), 1)
    return entries * 8 * copies


def _rows(table: Tensor) -> Tensor:
    """Bytes of fp16 rows: ``[H, n, m]`` -> uint8 ``[H, 2 n m]``."""
    return table.half().flatten(1).contiguous().view(torch.uint8)


def octopus_reader(codec: Octopus, head_dim: int) -> str:
    """Return the C++ struct that reads the codec's keys; empty if there is none."""
    if codec.direction_bits > DIRECTION_BITS:
        return ""
    norm32 = "true" if codec.norm == "fp32" else "false"
    return f"kv::ReadOctopus<{head_dim}, {codec.direction_bits}, {codec.norm_bits}, {norm32}>"


def octopus_shared(codec: Octopus) -> int:
    """Bytes of shared memory of the reader's tables."""
    if codec.code_bits <= JOINT_BITS:
        return _copied(2**codec.code_bits, OCTOPUS_ROOM)
    lengths = 2 ** (2 * codec.norm_bits if codec.norm_bits <= 3 else codec.norm_bits)
    return _copied(4**codec.direction_bits, OCTOPUS_ROOM) + lengths * 128


def octopus_tables(codec: Octopus) -> Callable[[Params], Tensor]:
    """Return the function that tabulates triplets, times sqrt(D) as norms are root mean squares.

    Its result is uint8 ``[1, bytes]``: rows of (x, y, z, 0) of all codes; for longer codes rows of all directions,
    then ``2^b_nrm`` lengths.
    """

    def build(params: Params) -> Tensor:
        rho = params["rho"][0].double() * params["signs"].shape[-1] ** 0.5
        rows = torch.nn.functional.pad(params["directions"][0].double(), (0, 1))
        if codec.code_bits <= JOINT_BITS:
            return _rows((rows[:, None] * rho[:, None]).flatten(0, 1)[None])
        return torch.cat([_rows(rows[None]), _rows(rho[None, :, None])], 1)

    return build


def hqmq_reader(codec: Hqmq, head_dim: int, role: Role | None = None) -> str:
    """Return the C++ struct that reads the codec's keys or values; empty if there is none.

    ``role`` says that keys and values are both held by ``codec``. Then dead slots cost nothing: what their bits lead to
    outside of one table lies in the other one, or in the bytes that ``hqmq_reach`` asks for.
    """
    if codec.packing != "ceil":
        return ""
    place = {None: "ALONE", "key": "KEYS", "value": "VALUES"}[role]
    return f"kv::ReadHqmq<{head_dim}, {codec.s}, {codec.r}, kv::{place}>"


def hqmq_shared(codec: Hqmq) -> int:
    """Bytes of shared memory of the reader's codebook."""
    return _copied(12 * codec.s, HQMQ_ROOM)


def hqmq_reach(codec: Hqmq) -> int:
    """Least bytes of shared memory of the readers of keys and values together."""
    return 512 * 256 if (codec.s, codec.r) in ((24, 3), (24, 4)) else 0


def hqmq_tables(params: Params) -> Tensor:
    """Every second row of each head's codebook, times 2^15: uint8 ``[H, 8 * 12 S]``; those between are opposite."""
    codebook = params["codebook"][0]
    table = codebook.float()
    if codebook.dtype == torch.int8:
        table = table / 127
    return _rows(table[:, ::2] * CODEBOOK_UNIT)
