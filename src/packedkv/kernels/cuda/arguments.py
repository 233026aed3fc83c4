"""Arguments of the kernels: structs passed by value, with the fields of those in ``csrc``.

Pointers, then 64-bit numbers, then 32-bit numbers, so that C++ and ctypes lay them out alike; a test compares them.
Unset fields are zero: a null pointer, or an option that is off. Assigning the fields that a call needs is faster than
packing all of them.
"""

import ctypes

from torch import Tensor

from packedkv.kernels.constants import Constants
from packedkv.kernels.mean import KeyMean


class RoleArgs(ctypes.Structure):
    """``kv::Side``: tables and factors of keys or values."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "factor", "matrix")),
        *((name, ctypes.c_int64) for name in ("table_head", "table_bytes", "factor_batch", "block")),
    )

    def fill(self, constants: Constants) -> None:
        """Set all fields."""
        tables, factor, self.block, matrix = constants
        if matrix is not None:
            self.matrix = matrix.data_ptr()
        if tables is not None:
            self.table, self.table_bytes = tables.data_ptr(), tables.shape[-1]
            self.table_head = 0 if tables.shape[0] == 1 else tables.stride(0)
        if factor is not None:
            self.factor, self.factor_batch = factor.data_ptr(), 0 if factor.shape[0] == 1 else factor.stride(0)


class MeanArgs(ctypes.Structure):
    """``kv::KeyMean``: the mean before RoPE that keys are held without."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mean", "table", "placed")),
        *((name, ctypes.c_int64) for name in ("batch", "table_head")),
    )

    def fill(self, key_mean: KeyMean | None, placed: Tensor | None = None) -> None:
        """Set the fields of a mean, if there is one, and of the positions of slot 0."""
        if key_mean is None:
            return
        mean, table, _ = key_mean
        self.mean, self.table = mean.data_ptr(), table.data_ptr()
        self.batch = 0 if mean.shape[0] == 1 else mean.stride(0)
        self.table_head = 0 if table.shape[0] == 1 else table.stride(0)
        if placed is not None:
            self.placed = placed.data_ptr()


class DecodeArgs(ctypes.Structure):
    """``kv::DecodeArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pages", "page_table", "seq_lens", "start")),
        *((name, ctypes.c_void_p) for name in ("dense_k", "dense_v", "dense_lens", "dense_start")),
        *((name, ctypes.c_void_p) for name in ("dense_at", "sinks")),
        *((name, ctypes.c_void_p) for name in ("part_o", "part_m", "part_l", "out", "lse")),
        ("key", RoleArgs),
        ("value", RoleArgs),
        *((name, ctypes.c_int64) for name in ("q_batch", "q_head", "table_row", "page_bytes", "dense_step")),
        *((name, ctypes.c_int64) for name in ("dense_k_batch", "dense_k_head", "dense_k_token")),
        *((name, ctypes.c_int64) for name in ("dense_v_batch", "dense_v_head", "dense_v_token")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "runs", "alike", "pieces")),
        *((name, ctypes.c_int32) for name in ("q_kind", "dense_kind", "out_kind", "heads", "group", "tiles")),
        *((name, ctypes.c_int32) for name in ("splits", "slots", "capacity", "dense_width")),
        ("scale2", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("mean", MeanArgs),
        ("starts", ctypes.c_void_p),
        ("each", ctypes.c_int64),
    )


class EncodeRoleArgs(ctypes.Structure):
    """``kv::EncodeSide``: where new keys or values come from, and where their planes begin."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "tables", "factor", "matrix", "first")),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "table_head", "factor_batch")),
        *((name, ctypes.c_int64) for name in ("plane", "tokens", "rows")),
    )

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
            self.tables, self.table_head = tables.data_ptr(), 0 if tables.shape[0] == 1 else tables.stride(0)
        if factor is not None:
            self.factor, self.factor_batch = factor.data_ptr(), 0 if factor.shape[0] == 1 else factor.stride(0)


class EncodeMeanArgs(ctypes.Structure):
    """``kv::EncodeMean``: what is subtracted from keys before they are encoded."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mean", "cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("batch", "turn_batch", "turn_token")),
        *((name, ctypes.c_int32) for name in ("turning", "interleaved")),
    )

    def fill(self, mean: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> None:
        """Set the fields from the parts of an ``encode.Turned``."""
        self.mean, self.cosines, self.sines = mean.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        self.batch = 0 if mean.shape[0] == 1 else mean.stride(0)
        self.turn_batch, self.turn_token = 0 if cosines.shape[0] == 1 else cosines.stride(0), cosines.stride(1)
        self.turning, self.interleaved = 2 * cosines.shape[2], interleaved


class EncodeArgs(ctypes.Structure):
    """``kv::EncodeArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "page_table", "bad")),
        ("key", EncodeRoleArgs),
        ("value", EncodeRoleArgs),
        *((name, ctypes.c_int64) for name in ("page_bytes", "table_row")),
        *((name, ctypes.c_int32) for name in ("kind", "page_tokens", "capacity", "heads")),
        ("mean", EncodeMeanArgs),
        ("kept", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
    )


class UnpackArgs(ctypes.Structure):
    """``kv::UnpackArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "page_table", "k_table", "v_table", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("k_table_head", "v_table_head", "table_row", "page_bytes")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "out_token")),
        *((name, ctypes.c_int32) for name in ("heads", "first", "count", "kind")),
        ("mean", MeanArgs),
        ("factor", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("factor_batch", "block")),
        *((name, ctypes.c_void_p) for name in ("k_matrix", "v_matrix", "ends")),
        *((name, ctypes.c_void_p) for name in ("k_factor", "v_factor")),
        *((name, ctypes.c_int64) for name in ("k_order", "v_order")),
        *((name, ctypes.c_void_p) for name in ("near", "near_keys", "near_values")),
        ("near_group", ctypes.c_int64),
    )


class FitNormArgs(ctypes.Structure):
    """``kv::FitNormArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "norm", "reciprocal")),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "tokens")),
        *((name, ctypes.c_int32) for name in ("kind", "heads")),
    )


class FitGhostArgs(ctypes.Structure):
    """``kv::FitGhostArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("padding", "cosines", "sines", "back_cosines", "back_sines")),
        *((name, ctypes.c_void_p) for name in ("same", "rows", "mean", "order", "factor", "weight")),
        *((name, ctypes.c_void_p) for name in ("centre", "widths", "sizes", "inverse", "read", "write")),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "turn_batch", "turn_token", "every")),
        ("errors", ctypes.c_double * 8),
        *((name, ctypes.c_double) for name in ("trim", "smallest")),
        *((name, ctypes.c_int32) for name in ("kind", "tokens", "heads", "turning", "interleaved", "rounds")),
    )


FIT_LAYERS = 128
"""Of ``FitGhostLayers``."""


class FitGhostLayers(ctypes.Structure):
    """``kv::FitGhostLayers``: what one launch fits."""

    _fields_ = (
        ("key", FitGhostArgs),
        ("value", FitGhostArgs),
        ("step", ctypes.c_int64),
        *((name, ctypes.c_void_p * FIT_LAYERS) for name in ("keys", "values", "energies")),
    )


MOST_PARTS = 5
"""Of ``BasisArgs``."""


class Rows(ctypes.Structure):
    """``kv::Rows``: one tensor whose basis is changed."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "factor")),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token", "out_batch", "out_head", "out_token")),
        *((name, ctypes.c_int64) for name in ("factor_batch", "block")),
        *((name, ctypes.c_int32) for name in ("kind", "out_kind", "heads", "tokens", "group", "way")),
        *((name, ctypes.c_void_p) for name in ("at", "ends")),
        ("at_step", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("source", "target", "other", "lse", "other_lse", "sinks")),
        *((name, ctypes.c_int64) for name in ("lse_head", "wide")),
    )


class BasisArgs(ctypes.Structure):
    """``kv::BasisArgs``."""

    _fields_ = (("parts", Rows * MOST_PARTS),)
