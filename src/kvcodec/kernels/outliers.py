"""Template arguments of ``kv::ReadMed`` in csrc/read_med.cuh, and the shared memory that it takes."""

from kvcodec.codec import Codec
from kvcodec.codecs.group_int import GroupInt
from kvcodec.codecs.hqmq import Hqmq
from kvcodec.codecs.med import Med

SHARED_BLOCK = 232448
"""Bytes of shared memory of a block on sm_90."""
WARPS = 8
"""What a multiprocessor needs to hide memory's latency; as ``config_for`` has it."""


def rest_of(inner: Codec, head_dim: int) -> str:
    """Return the C++ struct of what a codec decodes where it encoded zeros; empty: outliers beside it are not read."""
    if isinstance(inner, Hqmq):
        return "kv::RestZero"
    if isinstance(inner, GroupInt) and (inner.along, inner.group) == ("channels", 0):
        return "kv::RestZero" if inner.symmetric else f"kv::RestInt<{head_dim}, {inner.bits}>"
    return ""


def passes_of(codec: Med, head_dim: int, tables: int) -> tuple[int, int]:
    """Return in how many passes outliers are multiplied, and the bytes of shared memory that each warp wants for it.

    Two passes, over half of the channels each, cost more instructions: where eight warps would not find room.

    Parameters
    ----------
    codec : Med
        Around a codec that ``rest_of`` knows.
    head_dim : int
    tables : int
        Bytes of the inner reader's look-up tables; keys and values have some each.
    """
    inner = codec.inner
    # short integers of 96 channels are unpacked as if they were 128, those of 192 as if they were 256
    longer = (
        {96: 128, 192: 256} if isinstance(inner, GroupInt) and inner.bits < {96: 8, 192: 4}.get(head_dim, 0) else {}
    )
    scratch = 32 * longer.get(head_dim, head_dim)
    stage = 2 * 16 * sum(field.nbytes for field in codec.layout(head_dim).fields)
    query = 40 * head_dim + 64
    fixed, ring = (-(-n // 128) * 128 for n in (2 * tables + query, stage))
    fits = fixed + WARPS * (2 * ring + scratch) <= SHARED_BLOCK
    passes = 1 if fits or head_dim < 128 else 2
    return passes, scratch // passes
