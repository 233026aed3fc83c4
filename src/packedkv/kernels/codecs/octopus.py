"""Kernels of keys of ``octopus``, triplets of channels as directions and lengths, and of those with a sketch."""

from functools import partial

import torch
from torch import Tensor

from packedkv.codec import Params, Role
from packedkv.codecs.octopus import JOINT_BITS, PARTS, Octopus, OctopusQJL, runs, split_bytes
from packedkv.errors import UnsupportedError
from packedkv.kernels.codecs import sketch
from packedkv.kernels.codecs.tables import SLACK, copied_bytes, filled_walls, half_rows, wall_table
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.ops.hadamard import power_of_two_divisor
from packedkv.ops.lloyd_max import midpoints

TABLE_BUDGET = 131072
"""Bytes up to which tables have copies, as in csrc/read_octopus.cuh."""
ROUNDINGS = {"scalar": "ROUND_SCALAR", "local_2x2": "ROUND_2X2", "local_3x3": "ROUND_3X3", "full": "ROUND_FULL"}


def reader(codec: Octopus, head_dim: int, role: Role) -> Reader:
    """Return the reader of keys: it looks up triplets in tables, which must fit into shared memory."""
    if role == "value":
        raise UnsupportedError(f"the kernels read OCTOPUS' keys, not {codec} as values")
    if codec.direction_bits > 6:  # 4096 directions of 8 bytes
        raise UnsupportedError(f"the table of directions of {codec} does not fit into shared memory")
    kernel = Reader(
        f"kv::ReadOctopus<{_numbers(codec, head_dim)}>",
        "read_octopus.cuh",
        shared=shared_bytes(codec)[0],
        fewer=shared_bytes(codec)[1:],
        tables=partial(read_tables, codec),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        warps=6,
        layer_invariant=True,
    )
    return sketch.sketched(kernel, codec, head_dim) if isinstance(codec, OctopusQJL) else kernel


def cpu_reader(codec: Octopus, head_dim: int, role: Role) -> CpuReader:
    """Triplets looked up in tables; with a sketch in their own order."""
    kernel = CpuReader(
        "octopus",
        cpu_options(codec, head_dim),
        tables=partial(cpu_tables, codec, head_dim),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        layer_invariant=True,
    )
    return sketch.cpu_sketched(kernel, codec, head_dim) if isinstance(codec, OctopusQJL) else kernel


def cpu_options(codec: Octopus, head_dim: int) -> tuple[int, ...]:
    """Return the options that read_triplets.h describes."""
    fields = {field.name: field.nbytes for field in codec.layout(head_dim).fields}
    sizes = fields.get("codes", 0), fields.get("tail", 0)
    return (codec.direction_bits, codec.norm_bits, int(codec.low_bits > 0), int(codec.norm == "fp32"), *sizes)


def cpu_tables(codec: Octopus, head_dim: int, params: Params) -> Tensor:
    """Tables of ``unpack_octopus`` (read_triplets.h): uint8 ``[1, bytes]``."""
    bits, low, n = codec.code_bits, codec.low_bits, -(-head_dim // 3)
    fields = [(low, bits, 4), (0, low, 0)] if low else [(0, bits, 4)]
    order = list(range(n)) if isinstance(codec, OctopusQJL) else cpu_order(n, bits, low)
    places = []
    for field in fields:
        table = cpu_places(n, bits, low, *field)
        table[:, :n] = table[:, order]
        places.append(table.flatten())
    rho = params["rho"][0].float()
    rows = torch.nn.functional.pad(params["directions"][0].float(), (0, 1))
    root = rho.new_tensor([head_dim**0.5, 0, 0, 0])
    numbers = [rows.flatten(), rho] if low else [(rows[:, None] * rho[:, None]).flatten()]
    parts = [root, *(where.to(rho.device) for where in places), *numbers]
    return torch.cat([part.view(torch.uint8) for part in parts])[None]


def cpu_order(n: int, bits: int, low: int) -> list[int]:
    """Return the order of ``n`` triplets (read_triplets.h): by fours of each part, then those with bits in the tail."""
    head = split_bytes(n, bits).get("codes", 0)
    code, _, _, byte, _ = runs(n, bits, low, "cpu")
    late = set(code[byte >= head].tolist())
    each, more = divmod(n, PARTS)
    starts = [part * each + min(part, more) for part in range(PARTS)]
    whole = next((i for i in range(each) if any(start + i in late for start in starts)), each)
    first = [start + i for four in range(0, whole - 3, 4) for start in starts for i in range(four, four + 4)]
    return first + sorted({*range(n)} - {*first})


def cpu_places(n: int, bits: int, low: int, first: int, end: int, by: int) -> Tensor:
    """Return where bits ``[first, end)`` of ``n`` codes lie (read_triplets.h): int32 ``[7, n rounded up to 16]``.

    The numbers come times ``2**by``.
    """
    codes = 8 * split_bytes(n, bits).get("codes", 0)
    places = torch.zeros(7, -(-n // 16) * 16, dtype=torch.int32)
    for code, shift, mask, byte, bit in zip(*(x.tolist() for x in runs(n, bits, low, "cpu")), strict=True):
        begin, stop = max(shift, first), min(shift + mask.bit_length(), end)
        if begin >= stop:
            continue
        at, to = 8 * byte + bit + begin - shift, begin - first + by
        row, at = (0, at) if at < codes else (3, at - codes)
        unit = at // 16
        if row == 0:
            places[6, code] = 2 * (unit % (codes // PARTS // 16)) * 0x01010101 + 0x03020100
        numbers = unit | (unit + 1) << 16, (to - at % 16) % 32, (1 << stop - begin) - 1 << to
        places[row : row + 3, code] = torch.tensor(numbers)
    return places


def encoder(codec: Octopus, head_dim: int, role: Role) -> Encoder:
    kernel = Encoder(
        f"kv::OctopusRow<{_numbers(codec, head_dim)}, kv::{ROUNDINGS[codec.rounding]}>",
        "encode_octopus.cuh",
        tables=partial(write_tables, codec),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        form="table",
        layer_invariant=True,
    )
    return sketch.sketched_row(kernel, "rho") if isinstance(codec, OctopusQJL) else kernel


def cpu_encoder(codec: Octopus, head_dim: int, role: Role) -> CpuEncoder:
    kernel = CpuEncoder(
        "octopus",
        (*cpu_options(codec, head_dim), list(ROUNDINGS).index(codec.rounding)),
        tables=partial(cpu_write_tables, codec),
        factor="signs",
        order=power_of_two_divisor(head_dim),
        layer_invariant=True,
    )
    return sketch.cpu_sketched(kernel, codec, head_dim) if isinstance(codec, OctopusQJL) else kernel


def cpu_write_tables(codec: Octopus, params: Params) -> Tensor:
    """Tables of ``encode_octopus`` (encode_triplets.h): uint8 ``[1, bytes]``."""
    xi, rho = params["xi"][0].double(), params["rho"][0].double()
    square = xi[1:-1] if codec.rounding == "local_3x3" else midpoints(xi)
    rows = torch.nn.functional.pad(params["directions"][0].float(), (0, 1))
    walls = filled_walls(square, codec.direction_bits), filled_walls(midpoints(rho), codec.norm_bits)
    return torch.cat([part.view(torch.uint8) for part in (*walls, rows.flatten(), rho.float())])[None]


def _numbers(codec: Octopus, head_dim: int) -> str:
    return f"{head_dim}, {codec.direction_bits}, {codec.norm_bits}, {flag(codec.norm == 'fp32')}"


def shared_bytes(codec: Octopus) -> tuple[int, ...]:
    """Bytes of shared memory of the reader's tables, and with fewer copies of them."""
    if codec.code_bits <= JOINT_BITS:
        return copied_bytes(2**codec.code_bits, TABLE_BUDGET)
    lengths = 2 ** (2 * codec.norm_bits if codec.norm_bits <= 3 else codec.norm_bits)
    return tuple(n + lengths * 128 for n in copied_bytes(4**codec.direction_bits, TABLE_BUDGET))


def read_tables(codec: Octopus, params: Params) -> Tensor:
    """Tabulate triplets, times sqrt(D) as norms are root mean squares: fp16, uint8 ``[1, bytes]``.

    Rows of (x, y, z, 0) of all codes; for longer codes rows of all directions, then ``2^b_nrm`` lengths.
    """
    rho = params["rho"][0].double() * params["signs"].shape[-1] ** 0.5
    rows = torch.nn.functional.pad(params["directions"][0].double(), (0, 1))
    if codec.code_bits <= JOINT_BITS:
        return half_rows((rows[:, None] * rho[:, None]).flatten(0, 1)[None])
    return torch.cat([half_rows(rows[None]), half_rows(rho[None, :, None])], 1)


def write_tables(codec: Octopus, params: Params) -> Tensor:
    """Tables of ``OctopusRow`` in csrc/encode_octopus.cuh: uint8 ``[1, bytes]``."""
    xi, rho, directions = (params[name][0].cpu().double() for name in ("xi", "rho", "directions"))
    walls = xi[1:-1] if codec.rounding == "local_3x3" else midpoints(xi)
    half = 2**codec.direction_bits // 2
    # levels are exactly symmetric: signs give the other three quadrants
    quarter = directions.view(2 * half, 2 * half, 3)[half:, half:]
    copies = {6: 4, 7: 1}.get(codec.direction_bits, 8)
    entries = torch.nn.functional.pad(quarter, (0, 1)).float()[:, :, None].expand(-1, -1, copies, -1)
    parts = (
        wall_table(walls, codec.direction_bits, SLACK),
        wall_table(midpoints(rho), codec.norm_bits),
        entries.contiguous().view(torch.uint8).flatten(),
    )
    return torch.cat(parts)[None].to(params["xi"].device)
