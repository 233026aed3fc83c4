"""Sign sketch of a first stage's residual (QJL): keys of ``octopus_qjl`` and ``turboquant``'s sketch."""

from collections.abc import Callable
from dataclasses import replace
from math import pi

import torch
from torch import Tensor

from packedkv.codec import Codec, Params
from packedkv.errors import UnsupportedError
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.spec import Reader
from packedkv.ops.bitpack import pack
from packedkv.ops.qjl import hadamard_matrix


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
        tables=_read(stage.tables),
        factor=stage.factor,
        order=stage.order,
        also=(stage.header,),
        queries=2,
    )


def cpu_sketched(stage: CpuReader, codec: Codec, dim: int) -> CpuReader:
    """Return the CPU kernels' reader of a stage's keys and the sign sketch of its residual."""
    _check(codec, dim)
    tables = stage.tables
    assert tables is not None
    signs = [field.name for field in codec.layout(dim).fields].index("signs")

    def build(params: Params) -> Tensor:
        head = params["sketch"][0].float()  # [H, D]
        factor = head.new_full((len(head), 1), (pi / 2) ** 0.5 / dim)
        mine = torch.cat([head, factor], 1).contiguous().view(torch.uint8)
        return torch.cat([mine, tables(params).expand(len(head), -1)], 1)

    options = (*stage.options, *(0,) * (6 - len(stage.options)), signs)
    return replace(stage, name=f"{stage.name} sketch", options=options, tables=build, layer_invariant=False)


def cpu_sketch_written(stage: CpuEncoder, codec: Codec, dim: int) -> CpuEncoder:
    """Return the CPU kernels' encoder of a stage's keys and the sign sketch of its residual."""
    _check(codec, dim)
    tables = stage.tables
    assert tables is not None
    signs = [field.name for field in codec.layout(dim).fields].index("signs")

    def build(params: Params) -> Tensor:
        head = params["sketch"][0].float().contiguous().view(torch.uint8)  # [H, 4 D]
        return torch.cat([head, tables(params).expand(len(head), -1)], 1)

    options = (*stage.options, *(0,) * (7 - len(stage.options)), signs)
    return replace(stage, name=f"{stage.name} sketch", options=options, tables=build, layer_invariant=False)


def _read(stage: Callable[[Params], Tensor]) -> Callable[[Params], Tensor]:
    """Build the tables of ``ReadSketch``: signs of the sketch, then the stage's tables."""

    def build(params: Params) -> Tensor:
        signs = params["sketch"][0].float().contiguous().view(torch.uint8)  # [H, 4 D]
        return torch.cat([signs, stage(params).expand(signs.shape[0], -1)], 1)

    return build


def written(stage: Callable[[Params], Tensor], levels: str) -> Callable[[Params], Tensor]:
    """Return the function that builds the tables of encoders of a sketched stage.

    The stage's tables, its levels (the constant of that name) and what ``Sketch`` of csrc/encode_qjl.cuh reads.
    """
    return lambda params: _with_sketch(params, stage(params), _filled(params[levels]))


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
