"""Arguments of the kernels: structs passed by value, as ``csrc`` declares them.

Unset fields are zero. Assigning the fields that a call needs is faster than packing all of them.
"""

from typing import Any

import torch
from torch import Tensor

from packedkv.errors import ShapeError
from packedkv.kernels.constants import Constants, fill_factor
from packedkv.kernels.mean import KeyMean, RotatedMean
from packedkv.kernels.spec import CSRC
from packedkv.kernels.structs import address, step_of, structure


def aligned_rows(x: Tensor, numbers: int) -> Tensor:
    """Return a tensor, or a copy, for vector loads: contiguous channels, strides in multiples of so many numbers."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(stride % numbers for stride in x.stride()[:3]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def fill_side(side: Any, constants: Constants) -> None:
    """Set all fields of a ``kv::Side``."""
    side.block = constants.order
    if (tables := constants.tables) is not None:
        side.table, side.table_bytes, side.table_head = tables.data_ptr(), tables.shape[-1], step_of(tables)
    fill_factor(side, constants)


def fill_mean(args: Any, key_mean: KeyMean | None, origin: Tensor | None = None) -> None:
    """Set the fields of a ``kv::KeyMean``, if there is one: the mean, and the positions of slot 0."""
    if key_mean is not None:
        mean, table, _ = key_mean
        args.mean, args.table, args.placed = mean.data_ptr(), table.data_ptr(), address(origin)
        args.batch, args.table_head = step_of(mean), step_of(table)


def fill_encoder(side: Any, constants: Constants, plane: int) -> None:
    """Set the constants of an encoder in a ``kv::EncodeSide``, and the byte at which the role's planes begin."""
    side.plane = plane
    if (tables := constants.tables) is not None:
        side.tables, side.table_head = tables.data_ptr(), step_of(tables)
    fill_factor(side, constants)


def fill_rotated_mean(args: Any, less: RotatedMean) -> None:
    """Set all fields of a ``kv::EncodeMean``: what is subtracted from keys before they are encoded."""
    mean, cosines, sines, args.interleaved = less
    args.mean, args.cosines, args.sines = mean.data_ptr(), cosines.data_ptr(), sines.data_ptr()
    args.batch, args.turn_batch, args.turn_token = step_of(mean), step_of(cosines), cosines.stride(1)
    args.turning = 2 * cosines.shape[2]


def check_pages(name: str, pages: Tensor, least: int, **numbers: Tensor) -> None:
    """Raise ShapeError unless pages have ``least`` bytes, and ``numbers`` are contiguous int32."""
    paged = pages.dim() == 3 and pages.is_contiguous()
    if pages.dtype != torch.uint8 or not paged or pages.shape[2] < least or pages.shape[2] % 16:
        raise ShapeError(
            f"{name}: pages are {pages.dtype} {list(pages.shape)}; a contiguous uint8 [num_pages, H, {least}] or "
            f"longer is needed."
        )
    for what, x in numbers.items():
        if x.dtype != torch.int32 or x.stride(-1) != 1:
            raise ShapeError(f"{name}: {what} is {x.dtype}; contiguous int32 is needed.")


MeanArgs = structure(CSRC / "args.cuh", "KeyMean")
DecodeArgs = structure(CSRC / "args.cuh", "DecodeArgs", Side=structure(CSRC / "args.cuh", "Side"), KeyMean=MeanArgs)
EncodeRoleArgs = structure(CSRC / "encode_args.cuh", "EncodeSide")
EncodeMeanArgs = structure(CSRC / "encode_args.cuh", "EncodeMean")
EncodeArgs = structure(CSRC / "encode_args.cuh", "EncodeArgs", EncodeSide=EncodeRoleArgs, EncodeMean=EncodeMeanArgs)
UnpackArgs = structure(CSRC / "unpack.cuh", "UnpackArgs", KeyMean=MeanArgs)
FitNormArgs = structure(CSRC / "fit_innerq.cuh", "FitNormArgs")
FitGhostArgs = structure(CSRC / "fit_ghost.cuh", "FitGhostArgs")
FitGhostLayers = structure(CSRC / "fit_ghost.cuh", "FitGhostLayers", FitGhostArgs=FitGhostArgs)
Rows = structure(CSRC / "basis.cuh", "Rows")
BasisArgs = structure(CSRC / "basis.cuh", "BasisArgs", Rows=Rows)
FIT_LAYERS, MOST_PARTS = len(FitGhostLayers().keys), len(BasisArgs().parts)
"""Lengths of the arrays of ``FitGhostLayers`` and ``BasisArgs``."""
