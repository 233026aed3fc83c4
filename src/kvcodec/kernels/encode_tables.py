"""C++ structs and look-up tables of the row encoders that decide in fp32 and settle what is close in double.

The layout of every table is stated beside the struct that reads it, in csrc/encode_*.cuh.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcodec.codec import Codec, Params
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.med import Med
from kvcodec.codecs.octopus import Octopus
from kvcodec.codecs.octopus_qjl import OctopusQJL
from kvcodec.codecs.turboquant import TurboQuant, TurboQuantQJL
from kvcodec.codecs.ultra_tq import GROUP, UltraTQ
from kvcodec.codecs.wrapper import inside
from kvcodec.kernels.hqmq_tables import hqmq_table
from kvcodec.ops.bitpack import pack
from kvcodec.ops.hadamard import power_of_two_divisor
from kvcodec.ops.lloyd_max import midpoints
from kvcodec.ops.qjl import hadamard_matrix

ROUNDINGS = {"scalar": "ROUND_SCALAR", "local_2x2": "ROUND_2X2", "local_3x3": "ROUND_3X3", "full": "ROUND_FULL"}
SLACK = 2.0**-20
"""How far, relative to the number itself, fp32 may be off before double decides; four times what can happen."""


@dataclass(frozen=True)
class RowEncoder:
    """How ``encode_with_table`` of csrc/encode_table.cuh writes a codec's rows.

    Parameters
    ----------
    type, header : str
        The C++ struct and the file that defines it.
    tables : callable
        Params -> uint8 ``[H or 1, bytes]`` on their device.
    factor : str
        Name of the constant that rows are multiplied with on their way into the code basis; empty: none.
    order : int
        Of the Hadamard rotation behind that; 1 for none.
    own : str
        Name of a constant ``[B or 1, H]`` that takes the factor's place in the arguments; empty: none.
    alike : bool
        Whether the tables are the same in all layers, unless their constants come from a sample.
    """

    type: str
    header: str
    tables: Callable[[Params], Tensor]
    factor: str = ""
    order: int = 1
    own: str = ""
    alike: bool = False


def row_encoder(codec: Codec, head_dim: int) -> RowEncoder | None:
    """Return how rows of ``codec`` are encoded with tables; None: not here.

    Examples
    --------
    >>> row_encoder(TurboQuant(4), 128).type
    'kv::TurboQuantRow<128, 4, false>'
    """
    order = power_of_two_divisor(head_dim)
    if type(codec) is TurboQuant:
        name = f"kv::TurboQuantRow<{head_dim}, {codec.bits}, {_flag(codec.norm == 'fp32')}>"
        return RowEncoder(name, "encode_turboquant.cuh", _nearest(codec.bits), "signs", order, alike=True)
    if type(codec) is TurboQuantQJL:
        name = f"kv::TurboQuantQjlRow<{head_dim}, {codec.bits - 1}, {_flag(codec.norm == 'fp32')}>"
        return RowEncoder(name, "encode_qjl.cuh", _turboquant_qjl(codec), "signs", order)
    if type(codec) is UltraTQ:
        blocks = codec.norm == "block"
        shift = max(0, math.ceil(math.log2(order / GROUP) / 2)) if blocks else 0
        name = f"kv::UltraTqRow<{head_dim}, {_flag(blocks)}, {shift}>"
        return RowEncoder(name, "encode_ultra_tq.cuh", _nearest(4), "", order, alike=True)
    if isinstance(codec, Octopus) and type(codec) in (Octopus, OctopusQJL):
        numbers = f"{head_dim}, {codec.direction_bits}, {codec.norm_bits}, {_flag(codec.norm == 'fp32')}"
        numbers += f", kv::{ROUNDINGS[codec.rounding]}"
        if type(codec) is Octopus:
            name = f"kv::OctopusRow<{numbers}>"
            return RowEncoder(name, "encode_octopus.cuh", _octopus(codec), "signs", order, alike=True)
        return RowEncoder(f"kv::OctopusQjlRow<{numbers}>", "encode_qjl.cuh", _octopus_qjl(codec), "signs", order)
    if type(codec) is Hqmq and codec.packing == "ceil":
        name = f"kv::HqmqRow<{head_dim}, {codec.s}, {codec.r}>"
        return RowEncoder(name, "encode_hqmq.cuh", lambda params: hqmq_table(params["secondary"][0]))
    if type(codec) is Med and type(codec.inner) is Hqmq and (inner := row_encoder(codec.inner, head_dim)):
        name = f"kv::MedRow<{inner.type}, {min(codec.slots, head_dim // 4)}>"
        tables = inner.tables
        return RowEncoder(name, "encode_hqmq.cuh", lambda params: tables(inside(params)), own="threshold")
    return None


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _nearest(bits: int) -> Callable[[Params], Tensor]:
    def build(params: Params) -> Tensor:
        levels = params["levels"]
        return level_table(midpoints(levels[0].double()), bits)[None].to(levels.device)

    return build


def _octopus(codec: Octopus) -> Callable[[Params], Tensor]:
    def build(params: Params) -> Tensor:
        xi, rho, directions = (params[name][0].cpu().double() for name in ("xi", "rho", "directions"))
        walls = xi[1:-1] if codec.rounding == "local_3x3" else midpoints(xi)
        half = 2**codec.direction_bits // 2
        # levels are symmetric to the last bit: signs give the other three quarters
        quarter = directions.view(2 * half, 2 * half, 3)[half:, half:]
        copies = {6: 4, 7: 1}.get(codec.direction_bits, 8)
        entries = torch.nn.functional.pad(quarter, (0, 1)).float()[:, :, None].expand(-1, -1, copies, -1)
        parts = (
            level_table(walls, codec.direction_bits, SLACK),
            level_table(midpoints(rho), codec.norm_bits),
            entries.contiguous().view(torch.uint8).flatten(),
        )
        return torch.cat(parts)[None].to(params["xi"].device)

    return build


def _octopus_qjl(codec: Octopus) -> Callable[[Params], Tensor]:
    stage = _octopus(codec)
    return lambda params: _with_sketch(params, stage(params), _filled(params["rho"]))


def _turboquant_qjl(codec: TurboQuantQJL) -> Callable[[Params], Tensor]:
    stage = _nearest(codec.bits - 1)
    return lambda params: _with_sketch(params, stage(params), _filled(params["levels"]))


def _filled(numbers: Tensor) -> Tensor:
    """Bytes of float32 ``[1, n]``, filled up to a multiple of 16: uint8 ``[1, m]``."""
    return torch.nn.functional.pad(numbers.float(), (0, -numbers.shape[-1] % 4)).view(torch.uint8)


def _with_sketch(params: Params, *stage: Tensor) -> Tensor:
    """Stage tables ``[1, n]`` and what ``Sketch`` of csrc/encode_qjl.cuh reads, per head."""
    signs = params["sketch"][0]
    heads, dim = signs.shape
    parts = [*(part.expand(heads, -1) for part in stage), signs.float().contiguous().view(torch.uint8)]
    if dim & (dim - 1):
        minus = hadamard_matrix(dim, str(signs.device)) < 0
        parts.append(pack(minus.to(torch.uint8), 1).flatten()[None].expand(heads, -1))
    return torch.cat(parts, 1)


def level_table(walls: Tensor, bits: int, error: float | None = None) -> Tensor:
    """Table of ``Levels<bits>`` in csrc/encode_sums.cuh.

    Parameters
    ----------
    walls : Tensor float64 ``[n]``
        Ascending, at most ``2**bits - 1``; what is counted is how many lie below a number.
    bits : int
    error : float, optional
        Bound on the error of the numbers compared, doubled at least; default: ``SLACK`` of the largest wall.

    Returns
    -------
    Tensor uint8 ``[16 + 64 * 2**bits + 8 * 2**bits]``, on the CPU
    """
    walls = walls.cpu()
    cells = 8 << bits
    n = len(walls)
    if error is None:
        error = SLACK * float(walls.abs().max()) if n else 0.0
    span = float(walls[-1] - walls[0]) if n else 0.0
    scale = float(torch.tensor((cells - 4) / span if span > 0 else 1.0, dtype=torch.float32))
    first = 2 - round(float(walls[0]) * scale) if n else 0  # the cell of u is round(u * scale) + first
    # what a cell spans, and a hundredth more; the outer ones have no end
    edges = (torch.arange(cells + 1, dtype=torch.float64) - 0.5 - first) / scale
    reach = 2 * error + 0.01 / scale
    low, high = edges[:-1] - reach, edges[1:] + reach
    low[0], high[-1] = -torch.inf, torch.inf
    below = torch.searchsorted(walls, low)
    inside = torch.searchsorted(walls, high, right=True) - below
    # without a wall inside the next one below or above serves as well: u is known to be on one side of it
    near = torch.where(inside > 0, below, (below - 1).clamp_min(0))
    padded = torch.cat([walls, walls.new_full(((1 << bits) - n,), torch.inf)])
    wall = padded[near].float()
    wall[inside > 1] = torch.nan  # never sure
    if n == 0:
        wall[:] = torch.finfo(torch.float32).max
    head = torch.tensor([scale, 2.0**23 + first, error, 0.0], dtype=torch.float32)
    entries = torch.stack([wall.view(torch.int32), near.int()], 1)
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (head, entries, padded)])
