"""Sign sketch of a first stage's residual (QJL): of ``octopus`` and ``turboquant``."""

from collections.abc import Callable
from dataclasses import replace
from math import pi
from typing import TypeVar

import torch
from torch import Tensor

from packedkv.codec import Codec, Params
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Reader
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
        tables=_behind_sketch(stage.tables),
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
    tables = _behind_sketch(stage.tables, (pi / 2) ** 0.5 / dim if reads else None)
    return replace(stage, name=f"{stage.name} sketch", options=options, tables=tables, layer_invariant=False)


def _behind_sketch(stage: Callable[[Params], Tensor], unit: float | None = None) -> Callable[[Params], Tensor]:
    """Return the function that builds the sketch's signs of each head, its unit if there is one, and stage tables."""

    def build(params: Params) -> Tensor:
        head = params["sketch"][0].float()  # [H, D]
        if unit is not None:
            head = torch.nn.functional.pad(head, (0, 1), value=unit)
        return torch.cat([head.contiguous().view(torch.uint8), stage(params).expand(len(head), -1)], 1)

    return build


def written(stage: Callable[[Params], Tensor], levels: str) -> Callable[[Params], Tensor]:
    """Return the function that builds the tables of encoders of a sketched stage.

    The stage's tables, its levels (the constant of that name) and what ``Sketch`` of csrc/encode_qjl.cuh reads.
    """

    def build(params: Params) -> Tensor:
        signs = params["sketch"][0]
        heads, dim = signs.shape
        numbers = torch.nn.functional.pad(params[levels].float(), (0, -params[levels].shape[-1] % 4))  # whole 16 bytes
        parts = [x.expand(heads, -1) for x in (stage(params), numbers.view(torch.uint8))]
        parts.append(signs.float().contiguous().view(torch.uint8))
        if dim & (dim - 1):
            minus = hadamard_matrix(dim, str(signs.device)) < 0
            parts.append(pack(minus.to(torch.uint8), 1).flatten()[None].expand(heads, -1))
        return torch.cat(parts, 1)

    return build
