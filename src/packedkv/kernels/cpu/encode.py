"""Encoding into packed pages by the CPU kernels: the host side of ``encode.h``."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from packedkv.codec import ROLES, Role
from packedkv.kernels.constants import Constants
from packedkv.kernels.cpu import library
from packedkv.kernels.cpu.attend import fill_constants
from packedkv.kernels.cpu.library import EncodeArgsStruct
from packedkv.kernels.cpu.spec import CpuSpec
from packedkv.kernels.structs import KINDS, step_of
from packedkv.kernels.tokens import NewTokens

ROUNDED = 3
"""Kind of float32 numbers that are rounded to fp16 first."""


def prepared(spec: CpuSpec) -> Any:
    """What every call of ``encode`` for these codecs has in common."""
    args = EncodeArgsStruct()
    args.page_tokens, args.dim = spec.page.page_tokens, spec.page.key.head_dim
    for role in ROLES:
        struct = getattr(args, role)
        struct.block = spec.page.side(role).block_tokens
        if (encoder := spec.encoders[role]) is None:
            continue
        struct.encoder = library.number_of(library.chosen(), "encoder", encoder.name)
        struct.order, struct.divides = encoder.order, encoder.divide
        planes = spec.planes(role)
        struct.planes[:] = [plane.offset for plane in planes] + [-1] * (len(struct.planes) - len(planes))
        struct.sizes[: len(planes)] = [plane.field.nbytes for plane in planes]
        struct.options[: len(encoder.options)] = encoder.options
    return args


def encode(
    new: NewTokens,
    pages: Tensor,
    table: Tensor,
    *,
    common: Any,
    constants: Mapping[Role, Constants],
    rounded: Collection[Role] = (),
) -> None:
    """Encode new tokens of roles with an encoder into their slots.

    ``common`` is ``prepared``, ``constants`` are of the encoders. Float32 numbers of ``rounded`` roles are rounded to
    fp16 first, as caches hold them; what is flagged is checked before.
    """
    assert new.bad is not None
    args = EncodeArgsStruct.from_buffer_copy(common)
    args.pages, args.table, args.first, args.bad = (x.data_ptr() for x in (pages, table, new.first, new.bad))
    args.page_bytes, args.table_row, args.columns = pages.shape[2], table.stride(0), table.shape[1]
    args.batch, args.heads, args.threads = table.shape[0], pages.shape[1], torch.get_num_threads()
    buffers = [_fill(getattr(args, role), constants[role], x, role in rounded) for role, x in new.x.items()]
    if new.less is not None and "key" in new.x:
        less = args.less
        mean, cosines, _ = rotated = [x.contiguous() for x in new.less[:3]]
        less.mean, less.cosines, less.sines = (x.data_ptr() for x in rotated)
        less.mean_batch, less.angles_batch = step_of(mean), step_of(cosines)
        less.pairs, less.interleaved = cosines.shape[2], new.less.interleaved
        buffers += rotated
    library.library().kv_encode(args)
    del buffers  # alive until here


def _fill(struct: Any, constants: Constants, x: Tensor, rounded: bool) -> Tensor:
    """Set the tokens and constants of one role; returns a tensor that must outlive the call."""
    if x.stride(3) != 1:
        x = x.contiguous()
    size = x.element_size()
    kind = ROUNDED if rounded and x.dtype == torch.float32 else KINDS[x.dtype]
    struct.x, struct.kind, struct.tokens = x.data_ptr(), kind, x.shape[2]
    struct.batch, struct.head, struct.token = (size * stride for stride in x.stride()[:3])
    fill_constants(struct, constants)
    return x
