"""Arguments of the kernels: structs passed by value, as ``csrc`` declares them.

Unset fields are zero. Assigning the fields that a call needs is faster than packing all of them.
"""

import ctypes

import torch
from torch import Tensor

from packedkv.kernels.constants import Constants
from packedkv.kernels.mean import KeyMean, RotatedMean
from packedkv.kernels.spec import CSRC
from packedkv.kernels.structs import fields, step_of, structure


def aligned_rows(x: Tensor, numbers: int) -> Tensor:
    """Return a tensor, or a copy, for vector loads: contiguous channels, strides in multiples of so many numbers."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(stride % numbers for stride in x.stride()[:3]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


class RoleArgs(ctypes.Structure):
    """``kv::Side``: tables and factors of keys or values."""

    _fields_ = fields(CSRC / "args.cuh", "Side")

    def fill(self, constants: Constants) -> None:
        """Set all fields."""
        tables, factor, self.block, matrix = constants
        if matrix is not None:
            self.matrix = matrix.data_ptr()
        if tables is not None:
            self.table, self.table_bytes, self.table_head = tables.data_ptr(), tables.shape[-1], step_of(tables)
        if factor is not None:
            self.factor, self.factor_batch = factor.data_ptr(), step_of(factor)


class MeanArgs(ctypes.Structure):
    """``kv::KeyMean``: the mean before RoPE that keys are held without."""

    _fields_ = fields(CSRC / "args.cuh", "KeyMean")

    def fill(self, key_mean: KeyMean | None, placed: Tensor | None = None) -> None:
        """Set the fields of a mean, if there is one, and of the positions of slot 0."""
        if key_mean is None:
            return
        mean, table, _ = key_mean
        self.mean, self.table = mean.data_ptr(), table.data_ptr()
        self.batch, self.table_head = step_of(mean), step_of(table)
        if placed is not None:
            self.placed = placed.data_ptr()


DecodeArgs = structure(CSRC / "args.cuh", "DecodeArgs", Side=RoleArgs, KeyMean=MeanArgs)


class EncodeRoleArgs(ctypes.Structure):
    """``kv::EncodeSide``: where new keys or values come from, and where their planes begin."""

    _fields_ = fields(CSRC / "encode_args.cuh", "EncodeSide")

    def fill(self, x: Tensor, constants: Constants, first: Tensor, plane: int) -> None:
        """Set the fields for new tokens ``[B, H, N, D]`` and the constants of their encoder."""
        self.x, self.first, self.tokens = x.data_ptr(), first.data_ptr(), x.shape[2]
        self.batch, self.head, self.token, _ = x.stride()
        self.constants(constants, plane)

    def constants(self, constants: Constants, plane: int) -> None:
        """Set the constants of the encoder, and the byte at which the role's planes begin."""
        tables, factor, _, matrix = constants
        self.plane = plane
        if matrix is not None:
            self.matrix = matrix.data_ptr()
        if tables is not None:
            self.tables, self.table_head = tables.data_ptr(), step_of(tables)
        if factor is not None:
            self.factor, self.factor_batch = factor.data_ptr(), step_of(factor)


class EncodeMeanArgs(ctypes.Structure):
    """``kv::EncodeMean``: what is subtracted from keys before they are encoded."""

    _fields_ = fields(CSRC / "encode_args.cuh", "EncodeMean")

    def fill(self, turned: RotatedMean) -> None:
        """Set all fields."""
        mean, cosines, sines, self.interleaved = turned
        self.mean, self.cosines, self.sines = mean.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        self.batch, self.turn_batch, self.turn_token = step_of(mean), step_of(cosines), cosines.stride(1)
        self.turning = 2 * cosines.shape[2]


EncodeArgs = structure(CSRC / "encode_args.cuh", "EncodeArgs", EncodeSide=EncodeRoleArgs, EncodeMean=EncodeMeanArgs)
UnpackArgs = structure(CSRC / "unpack.cuh", "UnpackArgs", KeyMean=MeanArgs)
FitNormArgs = structure(CSRC / "fit_innerq.cuh", "FitNormArgs")
FitGhostArgs = structure(CSRC / "fit_ghost.cuh", "FitGhostArgs")
FitGhostLayers = structure(CSRC / "fit_ghost.cuh", "FitGhostLayers", FitGhostArgs=FitGhostArgs)
Rows = structure(CSRC / "basis.cuh", "Rows")
BasisArgs = structure(CSRC / "basis.cuh", "BasisArgs", Rows=Rows)
FIT_LAYERS, MOST_PARTS = len(FitGhostLayers().keys), len(BasisArgs().parts)
"""Lengths of the arrays of ``FitGhostLayers`` and ``BasisArgs``."""
