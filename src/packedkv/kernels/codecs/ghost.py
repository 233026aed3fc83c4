"""Kernels of ``ghost``: pairs of channels that share bits, each kind with a table of its own, and the fit."""

from collections.abc import Mapping, Sequence
from ctypes import sizeof
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Codec, Params, Role
from packedkv.codecs.ghost import (
    ERRORS,
    PARTS,
    ROUNDS,
    SCALES,
    SMALLEST,
    TRIM,
    UNIT,
    WIDEST,
    Ghost,
    kinds,
    levels,
    power,
    scales,
)
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import Constants
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.cuda.arguments import FIT_LAYERS, FitGhostLayers
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.engine import FirstTokens, FitBuffers, Fitted
from packedkv.kernels.spec import Encoder, Reader, align, flag
from packedkv.kernels.structs import KINDS, step_of
from packedkv.ops.exact import KERNEL_BITS
from packedkv.ops.widths import put_back, width_cuts
from packedkv.store.pages import stream_of

PARAMS = ("order", "factor", "weight", "widths", "centre")
"""Of the reference's constants, those that a kernel fits."""
FIT_SCRATCH = 64 << 20
"""Bytes of scratch of a launch that fits; where layers need more, there are several."""
CPU_LEAST = 32
"""Channels of a head of which even and odd places each fill the widest vector."""


def level_bytes(total: int, shrink: int = 0) -> int:
    """Bytes of shared memory of ``kv::GhostPairs``: of the levels of all kinds of pairs of ``total`` bits.

    >>> [level_bytes(t) // 1024 for t in range(4, 11)], [level_bytes(8, n) // 1024 for n in (1, 2)]
    ([8, 16, 40, 80, 128, 64, 64], [64, 32])
    """
    blocks = {1: 2, 2: 1}[shrink] if shrink else len(kinds(total)) + 1 if total < 8 else 4 if total == 8 else 1
    return blocks * (128 if total < 10 else 64) * 2**total


def reader(codec: Ghost, head_dim: int, role: Role) -> Reader:
    """Pairs of channels by their kinds; the sizes multiply queries and outputs, or a matrix does (``klt``)."""
    _check(codec, head_dim)
    total, mixed, values = codec.total, codec.transform == "klt", role == "value"
    head_bytes = align(head_dim * 3 // 2) + (4 * head_dim if values else 0)
    name = f"kv::ReadGhost<{head_dim}, {total}, {flag(values)}"
    return Reader(
        _struct(f"{name}>", codec),
        "read_ghost.cuh",
        shared=level_bytes(total),
        fewer=tuple(level_bytes(total, n) for n in (1, 2) if total in (7, 8)),
        shares_table_with=f"levels of pairs of {total} bits",
        borrowing_type=_struct(f"{name}, true>", codec),
        by_head=head_bytes,
        tables=lambda params: read_tables(params, total),
        factor="" if mixed else sizes,
        matrix=partial(read_lines, values=values) if mixed else None,
    )


def _check(codec: Ghost, head_dim: int) -> None:
    codec.layout(head_dim)  # refuses what does not fill quarters
    if head_dim > 256:
        raise UnsupportedError(f"the kernels number a channel of ghost in a byte: head_dim up to 256, not {head_dim}")


def _struct(name: str, codec: Ghost) -> str:
    return f"kv::Mixed<{name}>" if codec.transform == "klt" else name


def sizes(params: Params) -> Tensor:
    """sqrt(v) of the model's channels: float32 ``[B or 1, H, D]``."""
    return 1 / inverse_sizes(params)


def inverse_sizes(params: Params) -> Tensor:
    """1 / sqrt(v) of the model's channels: float32 ``[B or 1, H, D]``."""
    return put_back(params["factor"].unsqueeze(2), params["order"]).squeeze(2)


def order_of(params: Params) -> Tensor:
    """Return the channel at each place of the kernels' order, ``[B or 1, H, D]`` int16; with ``klt`` the identity."""
    if "order" in params:
        return params["order"]
    widths = params["widths"]
    return torch.arange(widths.shape[-1], dtype=torch.int16, device=widths.device).expand(widths.shape)


def way_back(params: Params) -> Tensor:
    """From codes over a scale to the model's basis: float64 ``[1, H, D, D]``."""
    return params["inverse"].double() / params["factor"].double().unsqueeze(-1)


def read_lines(params: Params, values: bool) -> Tensor:
    """Lines of outputs and unpacked values, or queries and then unpacked keys: uint8 ``[n, H, bytes]`` (mixed.cuh)."""
    back = way_back(params)
    # over the unit the largest number of a matrix is from 2^14 to 2^15
    unit = torch.exp2(torch.frexp(back.abs().amax((-2, -1))).exponent.double() - 15).float()
    head, scaled = _bytes(torch.nn.functional.pad(unit.unsqueeze(-1), (0, 3))), back / unit.double()[..., None, None]
    both = (scaled,) if values else (scaled.mT, scaled)
    return torch.cat([torch.cat([head, _bytes(_lines(matrix))], -1) for matrix in both])


def _lines(matrix: Tensor) -> Tensor:
    """Repack a matrix ``[..., D, D]`` as fp16 in tiles of eight rows: ``[..., D D]``."""
    return matrix.half().unflatten(-2, (-1, 8)).transpose(-1, -2).flatten(-3)


def write_lines(params: Params) -> Tensor:
    """What multiplies new tokens: uint8 ``[1, H, bytes]`` of mixed.cuh."""
    whole = whole_matrix(params)
    high = ((whole + 128) / 256).floor()
    return _bytes(torch.cat([_lines(high), _lines(whole - 256 * high)], -1))


def whole_matrix(params: Params) -> Tensor:
    """2^15 times what multiplies new tokens: integers, float32 ``[1, H, D, D]``."""
    return params["matrix"] * 2.0**KERNEL_BITS


def read_tables(params: Params, total: int) -> Tensor:
    """Tables of ``kv::ReadGhost``: uint8 ``[B or 1, H, bytes]``.

    The channel at each place ``[D]``, the kinds of pairs ``[D / 2]``; of values then the means over sizes, float32.
    """
    pair_kinds = kinds(total)
    kind = params["widths"][..., ::2] - pair_kinds[0][0]
    kind[..., -PARTS:] = len(pair_kinds)
    head = _padded(torch.cat([order_of(params).to(torch.uint8), kind], -1))
    return torch.cat([head, _bytes(params["centre"])], -1) if "centre" in params else head


def encoder(codec: Ghost, head_dim: int, role: Role) -> Encoder:
    """Rows by the kinds of pairs; with few tokens, and head_dims of 128 or 256, by teams of 32 threads."""
    _check(codec, head_dim)
    mixed = codec.transform == "klt"
    row = Encoder(
        _struct(f"kv::GhostRow<{head_dim}, {codec.total}>", codec),
        "encode_ghost.cuh",
        tables=write_tables,
        factor="factor" if mixed else inverse_sizes,
        matrix=write_lines if mixed else None,
        form="table",
        resident=2,
    )
    if mixed or head_dim % 128:
        return row
    return replace(row, small_batch=replace(row, type=f"kv::GhostRow<{head_dim}, {codec.total}, 32>", team=32))


def cpu_reader(codec: Ghost, head_dim: int, role: Role) -> CpuReader:
    """Channels by their widths; the sizes multiply queries and outputs, or a matrix does (``klt``)."""
    _check_cpu(codec, head_dim, "read")
    name, values = f"ghost{codec.total}", role == "value"
    kernel = CpuReader(name, (int(values),), tables=cpu_read_tables)
    if codec.transform == "klt":
        return replace(kernel, matrix=lambda params: (way_back(params) if values else way_back(params).mT).float())
    return replace(kernel, factor=sizes)


def cpu_encoder(codec: Ghost, head_dim: int, role: Role) -> CpuEncoder:
    _check_cpu(codec, head_dim, "write")
    options = codec.total, int(role == "value")
    if codec.transform == "klt":
        return CpuEncoder("ghost", options, tables=cpu_write_tables, factor="factor", matrix=whole_matrix)
    return CpuEncoder("ghost", options, tables=cpu_write_tables, factor=inverse_sizes)


def _check_cpu(codec: Ghost, head_dim: int, verb: str) -> None:
    if head_dim < CPU_LEAST:
        raise UnsupportedError(f"the CPU kernels {verb} ghost of a head_dim of {CPU_LEAST} or more, not {head_dim}")
    codec.layout(head_dim)  # refuses what does not fill quarters


def cpu_read_tables(params: Params) -> Tensor:
    """Tables of ``unpack_ghost`` (read_ghost.h): uint8 ``[B or 1, H, bytes]``."""
    order, widths = order_of(params), params["widths"]
    table = levels()
    positive = [table[(1 << w) - 1 + (1 << w - 1) : (1 << w + 1) - 1] for w in range(1, WIDEST + 1)]
    same = torch.cat([torch.zeros(1), *positive, scales()]).expand(*order.shape[:2], -1)
    apart = [x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (widths, params.get("centre")) if x is not None]
    parts = [order.to(torch.int16), apart[0], same, *apart[1:]]  # even places apart from odd ones
    return _padded(torch.cat([_bytes(x) for x in parts], -1))


def cpu_write_tables(params: Params) -> Tensor:
    """Tables of ``encode_ghost`` (encode_ghost.h): uint8 ``[B or 1, H, bytes]``."""
    order, widths = order_of(params), params["widths"]
    (behind, walls), zero = _cuts_and_walls(), torch.zeros(1)
    same = torch.cat([zero, behind, levels(), zero, walls, zero, zero, scales()]).expand(*order.shape[:2], -1)
    numbers = [same, params["weight"], *([params["centre"]] if "centre" in params else [])]
    return _padded(torch.cat([_bytes(order.to(torch.int16)), widths, *map(_bytes, numbers)], -1))


def write_tables(params: Params) -> Tensor:
    """Tables of ``kv::GhostRow``: uint8 ``[B or 1, H, bytes]``."""
    order, widths, weight = order_of(params), params["widths"], params["weight"]
    centre = params["centre"] if "centre" in params else torch.zeros_like(weight)
    same, walls, scale_table = _of_all_heads(order.device)[:3]
    walls = (widths > 0).sum(-1, keepdim=True) * walls  # the reference's product, number by number
    walls = torch.nn.functional.pad(walls, (0, 2), value=torch.inf)
    numbers = [x.expand(*walls.shape[:2], -1) for x in (same, walls, scale_table, centre, weight)]
    return _padded(torch.cat([*map(_bytes, numbers), order.to(torch.uint8), widths], -1))


@lru_cache(maxsize=16)
def _of_all_heads(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels and the cuts between them, walls between scales, scales, and all together: float32, never written to."""
    with torch.inference_mode(False):
        behind, walls = _cuts_and_walls()
        parts = torch.cat([levels(), torch.full((2,), torch.inf), behind]), walls, scales()
        same, walls, scale_table = (x.to(device) for x in parts)
        return same, walls, scale_table, torch.cat([same, walls, scale_table])


def _cuts_and_walls() -> tuple[Tensor, Tensor]:
    """Cuts between the levels of each width, infinity behind them; walls between the scales of one channel: float32."""
    cuts = torch.nn.functional.pad(width_cuts(levels()).float(), (0, 1), value=torch.inf)
    walls = torch.tensor([power(2 * i + 1 - 2 * UNIT) for i in range(1, SCALES)], dtype=torch.float32)
    return torch.cat([row[: 2**w] for w, row in enumerate(cuts)]), walls


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _padded(x: Tensor) -> Tensor:
    """Rows of whole 16 bytes."""
    return torch.nn.functional.pad(x, (0, align(x.shape[-1]) - x.shape[-1]))


# -- the fit -----------------------------------------------------------------------------------------------------------


def fit_program(codecs: Mapping[Role, Codec], head_dim: int) -> Program:
    """Return the source of ``kv_fit`` of these roles."""
    calls = []
    for role, codec in codecs.items():
        assert isinstance(codec, Ghost)
        name = f"kv::FitGhost<{head_dim}, {codec.total}, {flag(role == 'value')}>"
        calls += [
            f'static_assert({name}::THREADS == {fit_threads(head_dim)}, "threads as the host counts them");',
            f"if (kv::block_z() % 2 == {ROLES.index(role)}) {name}::fit(a.{role}, a, a.{role}s);",
        ]
    bounds = f"KV_BOUNDS({fit_threads(head_dim)}, 1)"
    lines = [
        f'static_assert(sizeof(kv::FitGhostLayers) == {sizeof(FitGhostLayers)}, "arguments as the host has them");',
        f"KV_KERNEL void {bounds} kv_fit(KV_GRID_CONSTANT kv::FitGhostLayers a) {{",
        *(*calls, "}", ""),
    ]
    return Program("\n".join(['#include "fit_ghost.cuh"', *lines]), fma=False)


def fit_threads(head_dim: int) -> int:
    """``kv::FitGhost::THREADS``."""
    return head_dim * (8 if head_dim <= 64 else 4 if head_dim <= 128 else 2)


@lru_cache(maxsize=64)
def _fit_kernel(codecs: tuple[tuple[Role, Codec], ...], head_dim: int, device: torch.device) -> Kernel:
    label = " and ".join(f"{codec} of {role}s" for role, codec in codecs)
    return load(fit_program(dict(codecs), head_dim), ("kv_fit",), device, f"fitting {label}")[0]


@dataclass(eq=False)
class _Layers:
    """Layers of a shape, and the launch that fits those of them that wait."""

    kernel: Kernel
    grid: tuple[int, int]  # heads and sequences
    threads: int  # of a block
    args: Any  # FitGhostLayers, filled but for the samples
    parts: Mapping[Role, Sequence[tuple[str, int]]]  # names and addresses of the first layer's part of the outputs
    scratch: Tensor  # of ``most`` layers; ``args`` point to it
    most: int
    first: int = 0  # first layer of the next launch
    jobs: list[object] = field(default_factory=list)  # inputs and outputs of the added layers
    shared: object = None  # properties that their samples share

    def add(self, layer: int, samples: Mapping[Role, FirstTokens], fitted: object, buffers: FitBuffers) -> None:
        """Add a layer to the next launch; a layer out of order, or with other strides, runs the earlier ones first."""
        shared = [_shared(x) for x in samples.values()]
        if self.jobs and (len(self.jobs) == self.most or layer != self.first + len(self.jobs) or shared != self.shared):
            self.run()
        if not self.jobs:
            self.first, self.shared = layer, shared
            for role, sample in samples.items():
                _fill(getattr(self.args, role), sample, self.parts[role], layer * self.args.step)
            buffers.waiting.append(self.run)
        args, at, energy = self.args, len(self.jobs), None
        for role, sample in samples.items():
            (args.keys if role == "key" else args.values)[at] = sample.x.data_ptr()
            if role == "key":
                energy = None if sample.energy is None else sample.energy.double().contiguous()
                args.energies[at] = None if energy is None else energy.data_ptr()
        self.jobs.append((samples, energy, fitted))

    def run(self) -> None:
        """Launch what waits."""
        if jobs := self.jobs:
            self.jobs = []
            self.kernel.launch((*self.grid, len(jobs) * len(ROLES)), self.threads, 0, self.args)


def fit(
    codecs: Mapping[Role, Codec], head_dim: int, samples: Mapping[Role, FirstTokens], buffers: FitBuffers
) -> dict[Role, Fitted]:
    """As ``Ghost.fit`` of the samples without their mean, launched by ``buffers.launch``; nothing synchronises."""
    some = next(iter(samples.values()))
    device, (batch, heads) = some.x.device, some.x.shape[:2]
    shapes = tuple([(role, sample.tokens, sample.angles is not None) for role, sample in samples.items()])
    make = partial(_allocate, codecs, head_dim, shapes, batch, heads, device)
    layers, layer, fitted = buffers.take((shapes, batch, heads, device, stream_of(device)), make)
    layers.add(layer, samples, fitted, buffers)
    return fitted


def _shared(sample: FirstTokens) -> object:
    """What layers must have in common to be fitted by one launch: all that ``_fill`` reads."""
    turns = [x.data_ptr() for both in (sample.angles, sample.back) if both is not None for x in both]
    padding = None if sample.padding is None else sample.padding.data_ptr()
    return sample.x.dtype, sample.x.stride(), sample.every, padding, turns, sample.interleaved


def _fill(args: Any, sample: FirstTokens, parts: Sequence[tuple[str, int]], behind: int) -> None:
    """Set the addresses and strides of the tokens, of their RoPE angles, and of the outputs."""
    x = sample.x
    args.kind = KINDS[x.dtype]
    args.batch, args.head, args.token, _ = x.stride()
    args.every = sample.every
    args.padding = None if sample.padding is None else sample.padding.data_ptr()
    if sample.angles is not None:
        cosines, sines = sample.angles
        args.cosines, args.sines = cosines.data_ptr(), sines.data_ptr()
        args.turn_batch, args.turn_token = step_of(cosines), cosines.stride(1)
        args.turning, args.interleaved = 2 * cosines.shape[2], sample.interleaved
    args.back_cosines, args.back_sines = [x.data_ptr() for x in sample.back] if sample.back else (None, None)
    for name, address in parts:
        setattr(args, name, address + behind)


def _fitted_sizes(head_dim: int, role: Role, mean: bool) -> tuple[tuple[str, int, torch.dtype], ...]:
    """What the kernel writes for a head: name in ``FitGhostArgs``, how many, of what."""
    values = role == "value"
    numbers = ["factor", "weight", "sizes", "inverse", *(["centre"] if values else []), *(["mean"] if mean else [])]
    return (
        *((name, head_dim, torch.float32) for name in numbers),
        ("order", head_dim, torch.int16),
        ("widths", head_dim, torch.uint8),
        ("read", align(head_dim * 3 // 2) + 4 * head_dim * values, torch.uint8),
        ("write", align(2048 + 128 + 10 * head_dim), torch.uint8),
    )


def _allocate(
    codecs: Mapping[Role, Codec],
    head_dim: int,
    shapes: Sequence[tuple[Role, int, bool]],
    batch: int,
    heads: int,
    device: torch.device,
    layers: int,
) -> list[tuple[_Layers, int, dict[Role, Fitted]]]:
    """Allocate what the kernel writes for so many layers, one behind the other: parts ``[B, H, count]``."""
    kernel, args = _fit_kernel(tuple(codecs.items()), head_dim, device), FitGhostLayers()
    each = batch * heads * head_dim * sum(n for _, n, _ in shapes)
    most = min(layers, FIT_LAYERS, max(1, FIT_SCRATCH // (4 * each)))
    scratch = torch.empty(most * each, dtype=torch.float32, device=device)
    rows, same = scratch.data_ptr(), _of_all_heads(device)[3].data_ptr()
    parts: dict[Role, list[tuple[str, int]]] = {}
    views: list[tuple[Role, str, int, int, torch.dtype]] = []
    at = 0
    for role, tokens, mean in shapes:
        one, parts[role] = getattr(args, role), []
        one.same, one.rows, one.heads, one.tokens = same, rows, heads, tokens
        one.errors[:] = ERRORS
        one.trim, one.smallest, one.rounds = TRIM * head_dim, SMALLEST, ROUNDS
        rows += 4 * most * batch * heads * head_dim * tokens
        for name, count, dtype in _fitted_sizes(head_dim, role, mean):
            parts[role].append((name, at))
            views.append((role, name, at, count, dtype))
            at += align(batch * heads * count * dtype.itemsize)
    args.step = at
    whole = torch.empty(layers * at, dtype=torch.uint8, device=device)
    of = {dtype: whole.view(dtype) for dtype in (torch.uint8, torch.int16, torch.float32)}
    made: dict[Role, list[dict[str, Tensor]]] = {role: [{} for _ in range(layers)] for role in parts}
    for role, name, begin, count, dtype in views:
        size, strides = dtype.itemsize, (at // dtype.itemsize, heads * count, count, 1)
        blocks = of[dtype].as_strided((layers, batch, heads, count), strides, begin // size).unbind()
        for tensors, x in zip(made[role], blocks, strict=True):
            tensors[name] = x
    base = whole.data_ptr()
    begins = {role: [(name, base + begin) for name, begin in places] for role, places in parts.items()}
    together = _Layers(kernel, (heads, batch), fit_threads(head_dim), args, begins, scratch, most)
    one_of = [{role: _fitted(tensors[i]) for role, tensors in made.items()} for i in range(layers)]
    return [(together, i, one_of[i]) for i in range(layers)]


def _fitted(made: Mapping[str, Tensor]) -> Fitted:
    params = {name: made[name] for name in PARAMS if name in made}
    reading, writing = Constants(made["read"], made["sizes"], 1), Constants(made["write"], made["inverse"], 1)
    return Fitted(params, reading, writing, made.get("mean"))
