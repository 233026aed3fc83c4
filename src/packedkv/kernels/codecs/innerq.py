"""Kernels of ``innerq``: keys in groups along channels, values in groups along tokens, norms of channels."""

from collections.abc import Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from packedkv.codec import Codec, Role
from packedkv.codecs.innerq import GROUP, InnerQ
from packedkv.errors import UnsupportedError
from packedkv.kernels.constants import Constants
from packedkv.kernels.cpu.spec import CpuEncoder, CpuReader
from packedkv.kernels.cuda.arguments import FitNormArgs, aligned_rows
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.engine import FirstTokens, FitBuffers, Fitted
from packedkv.kernels.spec import Encoder, Reader, flag
from packedkv.kernels.structs import KINDS

FIT_THREADS = 1024
"""``kv::FIT_NORM_THREADS``."""


def reader(codec: InnerQ, head_dim: int, role: Role) -> Reader:
    factor = "norm" if codec.norm else ""
    if codec.along == "channels":
        if role == "value":
            raise UnsupportedError(f"along channels the kernels read InnerQ's keys, not {codec} as values")
        return Reader(f"kv::ReadInnerKey<{head_dim}, {codec.width}>", "read_group.cuh", factor=factor)
    if role == "key":
        raise UnsupportedError(f"along tokens the kernels read InnerQ's values, not {codec} as keys")
    name = f"kv::ReadInnerValue<{head_dim}, {codec.width}, {flag(codec.hybrid)}>"
    return Reader(name, "read_group.cuh", block=32, factor=factor)


def cpu_reader(codec: InnerQ, head_dim: int, role: Role) -> CpuReader:
    factor = "norm" if codec.norm else ""
    if codec.along == "channels":
        if codec.hybrid:
            raise UnsupportedError(f"no CPU kernel reads {codec} along channels")
        return CpuReader(f"int{codec.width} symmetric", (GROUP, 0), factor=factor)
    kind = "hybrid" if codec.hybrid else "symmetric"
    return CpuReader(f"tokens{codec.width} {kind}", (GROUP,), factor=factor)


def encoder(codec: InnerQ, head_dim: int, role: Role) -> Encoder:
    factor, reading = "norm" if codec.norm else "", f"kv::{codec.symmetric.upper()}"
    if codec.along == "channels":
        name = f"kv::EncodeInnerq<{head_dim}, {codec.bits}, {reading}>"
        return Encoder(name, "encode_innerq.cuh", factor=factor, divide=True)
    if codec.hybrid and head_dim > 256:
        raise UnsupportedError(f"the kernels write hybrid values of head_dim up to 256, not {head_dim} ({codec})")
    name = f"kv::EncodeTokensInnerq<{head_dim}, {codec.bits}, {reading}, {flag(codec.hybrid)}>"
    return Encoder(name, "encode_blocks.cuh", factor=factor, divide=True, block=codec.block_tokens, form="blocks")


def cpu_encoder(codec: InnerQ, head_dim: int, role: Role) -> CpuEncoder:
    if codec.hybrid or codec.symmetric == "full":
        raise UnsupportedError(f"the CPU kernels write symmetric=literal and signed, and no hybrid, not {codec}")
    factor = "norm" if codec.norm else ""
    if codec.along == "channels":
        return CpuEncoder(f"int{codec.width} symmetric", (GROUP, 0), factor=factor, divide=True)
    return CpuEncoder(f"tokens{codec.width} symmetric", factor=factor, divide=True)


def fit_program(codecs: Mapping[Role, Codec], head_dim: int) -> Program:
    """Return the source of ``kv_fit``, which depends on the head_dim alone."""
    return Program(
        '#include "fit_innerq.cuh"\n'
        f"KV_KERNEL void KV_BOUNDS({FIT_THREADS}, 1) kv_fit(KV_GRID_CONSTANT kv::FitNormArgs a) "
        f"{{ kv::fit_norms<{head_dim}>(a); }}\n",
        fma=False,
    )


@lru_cache(maxsize=64)
def _fit_kernel(head_dim: int, device: torch.device) -> Kernel:
    return load(fit_program({}, head_dim), ("kv_fit",), device, f"fitting norms of {head_dim} channels")[0]


def fit(
    codecs: Mapping[Role, Codec], head_dim: int, samples: Mapping[Role, FirstTokens], buffers: FitBuffers
) -> dict[Role, Fitted]:
    """As ``InnerQ.fit`` of all tokens; one launch for each role, nothing synchronises.

    A role whose sample is some of the tokens, or keys that lose their mean, is left to the reference.
    """
    return {role: _fit(head_dim, sample.x, buffers) for role, sample in samples.items() if not sample.tokens}


def _fit(head_dim: int, x: Tensor, buffers: FitBuffers) -> Fitted:
    x = aligned_rows(x, 4)
    batch, heads, tokens, _ = x.shape
    shape = batch, heads, head_dim
    norm, reciprocal = buffers.take((shape, x.device), partial(_allocate, shape, x.device))
    args = FitNormArgs(x=x.data_ptr(), norm=norm.data_ptr(), reciprocal=reciprocal.data_ptr())
    args.batch, args.head, args.token, _ = x.stride()
    args.tokens, args.kind, args.heads = tokens, KINDS[x.dtype], heads
    _fit_kernel(head_dim, x.device).launch((heads, batch, 1), FIT_THREADS, 0, args)
    return Fitted({"norm": norm}, Constants(None, norm, 1), Constants(None, reciprocal, 1))


def _allocate(shape: tuple[int, int, int], device: torch.device, layers: int) -> list[tuple[Tensor, Tensor]]:
    """Norms and their reciprocals of so many layers."""
    norms = torch.empty(layers, *shape, dtype=torch.float32, device=device)
    return list(zip(norms.unbind(), torch.empty_like(norms, dtype=torch.float64).unbind(), strict=True))
