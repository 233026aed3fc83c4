"""Sign sketch of a first stage's residual (QJL): of ``octopus`` and ``turboquant``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import pi
from typing import TypeVar

import torch
from torch import Tensor

from packedkv.codec import Codec, Params
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Encoder, Reader
from packedkv.ops.bitpack import pack
from packedkv.ops.qjl import hadamard_matrix

CpuSide = TypeVar("CpuSide", CpuReader, CpuEncoder)


def _check(codec: Codec, dim: int) -> None:
    if dim & (dim - 1):
        raise UnsupportedError(f"the kernels sketch at head_dim 64, 128, 256 and 512, not {dim} ({codec})")


def sketched(stage: Reader, codec: Codec, dim: int) -> Reader:
    """Return the reader of a stage's keys and the sign sketch of its residual."""
    _check(codec, dim)
    assert stage.tables is not None
    return Reader(
        f"kv::ReadSketch<{stage.type}, {dim}>",
        "read_sketch.cuh",
        shared=stage.shared,
        fewer=stage.fewer,
        tables=partial(_behind_sketch, stage.tables, None),
        factor=stage.factor,
        order=stage.order,
        also=(stage.header,),
        queries=2,
    )


def cpu_sketched(stage: CpuSide, codec: Codec, dim: int) -> CpuSide:
    """Return the CPU kernels' reader or encoder of a stage's keys and the sign sketch of its residual."""
    _check(codec, dim)
    assert stage.tables is not None
    signs = [field.name for field in codec.layout(dim).fields].index("signs")
    reads: bool = not isinstance(stage, CpuEncoder)
    options = (*stage.options, *(0,) * (7 - reads - len(stage.options)), signs)
    tables = partial(_behind_sketch, stage.tables, (pi / 2) ** 0.5 / dim if reads else None)
    return replace(stage, name=f"{stage.name} sketch", options=options, tables=tables, layer_invariant=False)


def _behind_sketch(stage: Callable[[Params], Tensor], unit: float | None, params: Params) -> Tensor:
    """The sketch's signs of each head, its unit if there is one, and the stage's tables: uint8 ``[H, bytes]``."""
    head = params["sketch"][0].float()  # [H, D]
    if unit is not None:
        head = torch.nn.functional.pad(head, (0, 1), value=unit)
    return torch.cat([head.contiguous().view(torch.uint8), stage(params).expand(len(head), -1)], 1)


def sketched_row(stage: Encoder, levels: str) -> Encoder:
    """Return the encoder of a stage's keys, with the constant ``levels``, and the sign sketch of its residual."""
    assert stage.tables is not None
    name, tables = stage.type.replace("Row<", "QjlRow<"), partial(_write_tables, stage.tables, levels)
    return replace(stage, type=name, header="encode_qjl.cuh", tables=tables, layer_invariant=False, uneven=False)


def _write_tables(stage: Callable[[Params], Tensor], levels: str, params: Params) -> Tensor:
    """The stage's tables, its levels and what ``Sketch`` of csrc/encode_qjl.cuh reads: uint8 ``[H, bytes]``."""
    signs = params["sketch"][0]
    heads, dim = signs.shape
    numbers = torch.nn.functional.pad(params[levels].float(), (0, -params[levels].shape[-1] % 4))  # whole 16 bytes
    parts = [x.expand(heads, -1) for x in (stage(params), numbers.view(torch.uint8))]
    parts.append(signs.float().contiguous().view(torch.uint8))
    if dim & (dim - 1):
        minus = hadamard_matrix(dim, str(signs.device)) < 0
        parts.append(pack(minus.to(torch.uint8), 1).flatten()[None].expand(heads, -1))
    return torch.cat(parts, 1)
