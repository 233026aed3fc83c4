"""Kernels of outliers held in fp16 beside the codes of ``hqmq`` or of integers without groups."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from packedkv.codec import Codec, Params, Role
from packedkv.codecs.group_int import GroupInt
from packedkv.codecs.hqmq import Hqmq
from packedkv.codecs.outliers import Med
from packedkv.codecs.wrapper import inside
from packedkv.errors import UnsupportedError
from packedkv.kernels import spec
from packedkv.kernels.codecs import hqmq
from packedkv.kernels.constants import Side
from packedkv.kernels.cpu.spec import CpuReader
from packedkv.kernels.cpu.spec import cpu_reader as cpu_reader_of
from packedkv.kernels.cuda.launch import H200, WARPS
from packedkv.kernels.spec import Encoder, Reader, align


def reader(codec: Med, head_dim: int, role: Role) -> Reader:
    """The inner codec's, with ``kv::ReadMed`` of csrc/read_outliers.cuh around it."""
    inner = spec.reader(codec.inner, head_dim, role)
    rest = _rest_of(codec.inner, head_dim)
    if not rest:
        raise UnsupportedError(f"the kernels read outliers beside hqmq and integers of group 0, not {codec}")
    _check(codec, head_dim)
    passes, scratch = passes_of(codec, head_dim, inner.shared)

    def around(name: str) -> str:
        return name and f"kv::ReadMed<{name}, {head_dim}, {min(codec.slots, head_dim // 4)}, {passes}, {rest}>"

    return replace(
        inner,
        type=around(inner.type),
        paired_type=around(inner.paired_type),
        borrowing_type=around(inner.borrowing_type),
        header="read_outliers.cuh",
        also=(*inner.also, inner.header),
        tables=_of_inside(inner),
        scratch=scratch,
        tables_of=codec.inner,
    )


def cpu_reader(codec: Med, head_dim: int, role: Role) -> CpuReader:
    """The inner codec's, and the outliers in place of what it decodes."""
    inner = cpu_reader_of(codec.inner, head_dim, role)
    if not _rest_of(codec.inner, head_dim) or (isinstance(codec.inner, GroupInt) and codec.inner.symmetric):
        raise UnsupportedError(f"the CPU kernels read outliers beside hqmq and integers of group 0, not {codec}")
    flags = [field.name for field in codec.layout(head_dim).fields].index("flags")
    return replace(
        inner,
        name=f"{inner.name} outliers",
        options=(*inner.options, *(0,) * (6 - len(inner.options)), flags, min(codec.slots, -(-head_dim // 4))),
        tables=_of_inside(inner),
        tables_of=codec.inner,
    )


def encoder(codec: Med, head_dim: int, role: Role) -> Encoder:
    """HQMQ's row with ``kv::MedRow`` around it; beside integers PyTorch writes."""
    if type(codec.inner) is not Hqmq:
        raise UnsupportedError(f"no CUDA kernel encodes {codec}")
    _check(codec, head_dim)
    inner = hqmq.encoder(codec.inner, head_dim, role)
    name = f"kv::MedRow<{inner.type}, {min(codec.slots, head_dim // 4)}>"
    return replace(inner, type=name, tables=_of_inside(inner), head_constant="threshold", tables_of=codec.inner)


def _of_inside(inner: Side) -> Callable[[Params], Tensor] | None:
    """Tables of the inner codec, from the constants of both."""
    tables = inner.tables
    return None if tables is None else lambda params: tables(inside(params))


def _check(codec: Med, head_dim: int) -> None:
    if head_dim > 256:
        raise UnsupportedError(f"the kernels take outliers of head_dim up to 256, not {head_dim} ({codec})")


def _rest_of(inner: Codec, head_dim: int) -> str:
    """Return the C++ struct for what a codec decodes where it encoded zeros; empty: no kernel reads outliers there."""
    if isinstance(inner, Hqmq):
        return "kv::RestZero"
    if isinstance(inner, GroupInt) and (inner.along, inner.group) == ("channels", 0):
        return "kv::RestZero" if inner.symmetric else f"kv::RestInt<{head_dim}, {inner.bits}>"
    return ""


def passes_of(codec: Med, head_dim: int, tables: int) -> tuple[int, int]:
    """Return in how many passes outliers are multiplied, and the bytes of shared memory that each warp needs for it.

    Two passes, over half of the channels each, cost more instructions; used where eight warps would not fit otherwise.
    ``tables``: bytes of the inner reader's look-up tables; keys and values have some each.
    """
    inner = codec.inner
    # short integers of 96 channels are unpacked as if they were 128, those of 192 as if they were 256
    wide = isinstance(inner, GroupInt) and inner.bits < {96: 8, 192: 4}.get(head_dim, 0)
    scratch = 32 * (head_dim * 4 // 3 if wide else head_dim)
    stage = 2 * 16 * sum(field.nbytes for field in codec.layout(head_dim).fields)
    query = 40 * head_dim + 64
    fixed, ring = (align(n, 128) for n in (2 * tables + query, stage))
    fits = fixed + WARPS * (2 * ring + scratch) <= H200.shared_block
    passes = 1 if fits or head_dim < 128 else 2
    return passes, scratch // passes
