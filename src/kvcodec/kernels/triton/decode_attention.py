"""Fused decode attention over packed pages: one skeleton, the codec supplies its inner parts.

One query token per sequence attends to the codes of a page pool, without a decoded copy of them.

Work split.  Program (split, sequence x KV head x head tile) owns a run of whole blocks of tokens
and up to 16 query heads of one KV head. Tokens (for V: channels) are the rows of the tensor-core
tile and the heads its narrow side of 8 or 16, so up to 8 heads waste nothing.  It keeps an online
softmax in base 2 and writes unnormalised fp32 partials (m, l, o).  A second kernel merges the
partials, the dense part and the learned sinks by log-sum-exp, and undoes a value rotation once.
The second launch may overlap the first (programmatic dependent launch).

What a codec supplies (`Hooks`, jit functions handed over as ``constexpr``):

=============  ====================================================================================
``load_q``     the query heads as planes, fp32; only started, so that it runs beside other loads
``prepare``    rotated, scaled query planes, in the number format that its ``score`` wants
``load_k/v``   the packed tile of a block and its per-token words; nothing is unpacked here
``score``      scores [BN, N] in log2 units: code planes masked in place into ``dot``, then the
               hooks of scale (one factor per token) and zero (rank one: sum of the rounded q)
``init``       the accumulators of an empty run
``accumulate`` rescales them and adds V^T P: the scale goes on the tokens of P, the zero on a rank-1
               sum
``finish``     four fp32 planes of the unnormalised output in code basis
=============  ====================================================================================

A codec joins by a module of its own in this package that holds ``HOOKS``, ``supports``,
``page_bytes`` and ``encode_to_pages``.

Shapes and the grid depend only on the capacity of the block table, lengths live on the device, and
nothing synchronises, so the operator is safe in a CUDA graph and in ``torch.compile``.

Sources: split-K decoding (Flash-Decoding), grouped heads in one tile (FlashInfer),
online softmax (arXiv:1805.02867); SAW-INT4's scheme of scale and zero per token and head.

Pitfalls: a page id is read for every block in ``[start, seq_len)``, so those table entries must be
valid; entries outside are never read.  Scores of fully masked sequences give o = 0 and lse = -inf.
"""

import importlib
import pkgutil
from functools import lru_cache
from typing import NamedTuple

import torch

from kvcodec.errors import ShapeError, UnsupportedError
from kvcodec.kernels import triton as kernels
from kvcodec.kernels.triton import _decode
from kvcodec.kernels.triton._common import ASM, next_pow2, refuse_cpu

_LOG2E = 1.4426950408889634
_SM_FALLBACK = 132


class Config(NamedTuple):
    """Launch constants: tokens per block, warps, stages, splits per sequence and head."""

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int


def config_for(units: int, tile: int, head_dim: int, page_tokens: int, capacity: int, sms: int) -> Config:
    """Choose launch constants from a table measured on one H200; nothing is tuned at run time.

    Parameters
    ----------
    units : int
        Sequences x KV heads x head tiles: programs without any split.
    tile : int
        Query heads per program, 8 or 16.
    head_dim, page_tokens : int
    capacity : int
        Tokens that the block table can hold per sequence.
    sms : int
        Multiprocessors of the device.
    """
    block = 64 if page_tokens % 64 == 0 else min(page_tokens & -page_tokens, 64)
    wide = head_dim > 128
    # one warp per program keeps the softmax inside the warp; two where its registers run out. Never
    # four: the one such form tried (D=256, 16 heads, 64 tokens) gave wrong sums on an H200; why was
    # not established, wgmma on operands masked in registers is the suspect
    warps = 2 if wide or (tile == 16 and head_dim > 64) else 1
    if wide and tile == 16:
        block = min(block, 32)
    blocks = max(1, -(-capacity // block))
    full = 8 * sms // warps  # what registers let an SM hold
    if units <= full:
        # half full is best for large tiles: more programs leave more partials to merge
        share = full if head_dim <= 64 else full / 2
        splits = max(1, round(share / max(units, 1)))
    else:
        # at least four waves, so that the last one weighs little
        splits = max(1, round(4 * full / units))
    return Config(block, warps, 2 if wide else 3, min(splits, blocks, 512))


def tile_heads(group: int) -> int:
    """Return the query heads per tile: the N of the tensor-core tile."""
    return 8 if group <= 8 else 16


def _workspace_numel(rows: int, slots: int, head_dim: int) -> int:
    return rows * slots * (4 * next_pow2(head_dim // 4) + 2)


def workspace_numel(batch: int, num_q_heads: int, head_dim: int, num_splits: int, dense: bool = False) -> int:
    """Return how many fp32 numbers a `workspace` for these sizes must hold."""
    return _workspace_numel(batch * num_q_heads, num_splits + int(dense), head_dim)


def _load_codecs() -> dict:
    """Import every kernel module of the package that fills the skeleton, by its stem."""
    found = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        if not info.name.startswith("_") and info.name != "decode_attention":
            module = importlib.import_module(f"kvcodec.kernels.triton.{info.name}")
            if hasattr(module, "HOOKS"):
                found[info.name] = module
    return found


# at import, because a compiled graph cannot import
CODECS = _load_codecs()


@lru_cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _SM_FALLBACK
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(q, pages, table, seq_lens, scale, key_block, value_block, page_tokens, num_kv_heads,
            dense_k, dense_v, dense_lens, dense_start, sinks, start, workspace, config, codec,
            pdl):  # fmt: skip
    batch, num_q_heads, _, dim = q.shape
    group = num_q_heads // num_kv_heads
    tile = tile_heads(group)
    tiles = -(-group // tile)
    width = next_pow2(dim // 4)
    dense = dense_k is not None and dense_k.shape[2] > 0
    hooks = CODECS[codec].HOOKS
    page_bytes = CODECS[codec].page_bytes
    if q.stride(-1) != 1:
        q = q.contiguous()
    if dense:
        dense_k = dense_k if dense_k.stride(-1) == 1 else dense_k.contiguous()
        dense_v = dense_v if dense_v.stride(-1) == 1 else dense_v.contiguous()
        dense_strides = (*dense_k.stride()[:3], *dense_v.stride()[:3])
    else:
        dense_strides = (0,) * 6
    slots = config.num_splits + int(dense)
    rows = batch * num_q_heads
    need = _workspace_numel(rows, slots, dim)
    if workspace is None:
        workspace = torch.empty(need, dtype=torch.float32, device=q.device)
    size = rows * slots
    part_o = workspace[: size * 4 * width]
    part_m = workspace[size * 4 * width : size * (4 * width + 1)]
    part_l = workspace[size * (4 * width + 1) : need]
    o = torch.empty(batch, num_q_heads, 1, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_q_heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return o, lse
    pdl = pdl and ASM and _has_pdl(q.device)
    extra = {"launch_pdl": True} if pdl else {}
    _decode._split_kernel[(slots, batch * num_kv_heads * tiles)](
        q, pages.view(torch.int16), pages.view(torch.int32), table, seq_lens, start,
        part_o, part_m, part_l, dense_k, dense_v, dense_lens, dense_start,
        q.stride(0), q.stride(1), table.stride(0), *dense_strides,
        num_kv_heads, group, scale * _LOG2E, config.num_splits,
        dense_k.shape[2] if dense else 0, table.shape[1] * page_tokens,
        D=dim, DQ=width, P=page_tokens, BN=config.block_n, NH=tile, MT=tiles,
        DENSE=dense, BND=32, KBLOCK=key_block, ASM=ASM, PDL=pdl,
        PAGE_BYTES=page_bytes(dim, page_tokens), LOAD_Q=hooks.load_q, PREPARE=hooks.prepare,
        LOAD_K=hooks.load_k, SCORE=hooks.score, LOAD_V=hooks.load_v, INIT=hooks.init, ACCUMULATE=hooks.accumulate,
        FINISH=hooks.finish, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    _decode._combine_kernel[(rows, 4 if value_block == 1 else 1)](
        part_o, part_m, part_l, sinks, o, lse, o.stride(0), o.stride(1), num_q_heads, slots,
        D=dim, DQ=width, SB=max(next_pow2(slots), 2), DENSE=dense, VBLOCK=value_block,
        PDL=pdl, num_warps=4, **extra,
    )  # fmt: skip
    return o, lse


def _attend(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, key_block: int, value_block: int, page_tokens: int, num_kv_heads: int,
    dense_k: torch.Tensor | None, dense_v: torch.Tensor | None, dense_lens: torch.Tensor | None,
    dense_start: torch.Tensor | None, sinks: torch.Tensor | None, start: torch.Tensor | None,
    workspace: torch.Tensor | None, num_splits: int, codec: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, num_q_heads, _, dim = q.shape
    group = num_q_heads // num_kv_heads
    tiles = -(-group // tile_heads(group))
    config = config_for(
        batch * num_kv_heads * tiles, tile_heads(group), dim, page_tokens,
        table.shape[1] * page_tokens, _sms(q.device),
    )  # fmt: skip
    if num_splits:
        config = config._replace(num_splits=num_splits)
    return _launch(q, pages, table, seq_lens, scale, key_block, value_block, page_tokens,
                   num_kv_heads, dense_k, dense_v, dense_lens, dense_start, sinks, start,
                   workspace, config, codec, True)  # fmt: skip


# see `kvcodec.kernels.triton._int4_encode`: compiled graphs trace the operator, eager calls skip the dispatcher
_op = torch.library.custom_op("kvcodec::decode_attention", _attend, mutates_args=("workspace",))


@_op.register_fake
def _(q, pages, table, seq_lens, scale, key_block, value_block, page_tokens, num_kv_heads,
      dense_k, dense_v, dense_lens, dense_start, sinks, start, workspace, num_splits,
      codec):  # fmt: skip
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def _check(q, pages, table, seq_lens, key_block, value_block, page_tokens, num_kv_heads, dense_k,
           dense_v, sinks, codec):  # fmt: skip
    if q.dim() != 4 or q.shape[2] != 1:
        raise ShapeError(
            f"decode_attention: q is {list(q.shape)}; it takes [B, HQ, 1, D], one query token per sequence."
        )
    dim = q.shape[-1]
    if codec not in CODECS:
        raise UnsupportedError(
            f"decode_attention: no fused kernel for codec={codec!r}; there is one for {', '.join(sorted(CODECS))}."
        )
    page_bytes = CODECS[codec].page_bytes
    reason = CODECS[codec].supports(dim, key_block, value_block, page_tokens)
    if reason:
        raise UnsupportedError(f"decode_attention: {reason}.")
    if q.shape[1] % num_kv_heads:
        raise ShapeError(f"decode_attention: {q.shape[1]} query heads are no multiple of num_kv_heads={num_kv_heads}.")
    want = [num_kv_heads, page_bytes(dim, page_tokens)]
    if pages.dtype != torch.uint8 or list(pages.shape[1:]) != want or not pages.is_contiguous():
        raise ShapeError(
            f"decode_attention: pages are {pages.dtype} {list(pages.shape)}; a contiguous uint8 "
            f"[num_pages, {want[0]}, {want[1]}] is needed."
        )
    for name, x in (("table", table), ("seq_lens", seq_lens)):
        if x.dtype != torch.int32 or x.stride(-1) != 1:
            raise ShapeError(f"decode_attention: {name} is {x.dtype}; contiguous int32 is needed.")
    if not table.shape[0] == seq_lens.shape[0] == q.shape[0]:
        raise ShapeError(
            f"decode_attention: q has {q.shape[0]} sequences, table {table.shape[0]}, seq_lens {seq_lens.shape[0]}; "
            f"they must agree."
        )
    if (dense_k is None) != (dense_v is None):
        raise ShapeError("decode_attention: dense_k and dense_v come together or not at all.")
    if dense_k is not None and dense_k.dtype != dense_v.dtype:
        raise ShapeError(f"decode_attention: dense_k is {dense_k.dtype}, dense_v {dense_v.dtype}; use one dtype.")
    if sinks is not None and sinks.numel() != q.shape[1]:
        raise ShapeError(
            f"decode_attention: sinks has {sinks.numel()} logits; one per query head, {q.shape[1]}, is needed."
        )


def decode_attention(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor, *,
    scale: float, key_block: int, value_block: int, page_tokens: int, num_kv_heads: int,
    dense_k: torch.Tensor | None = None, dense_v: torch.Tensor | None = None,
    dense_lens: torch.Tensor | None = None, dense_start: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, start: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None, num_splits: int | None = None,
    return_lse: bool = False, codec: str = "saw_int4",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend with one query token per sequence to packed pages, dense tokens and learned sinks.

    Parameters
    ----------
    q : Tensor [B, HQ, 1, D]
        Model basis (not rotated), fp16, bf16 or fp32; last axis contiguous or copied.
    pages : Tensor uint8 [num_pages, H, page_bytes]
    table : Tensor int32 [B, max_pages]
        Page ids; token t of sequence b lies in page ``table[b, t // P]``, slot ``t % P``.
    seq_lens : Tensor int32 [B]
        Encoded tokens per sequence, on the device.
    scale : float
        Multiplies the scores, usually D ** -0.5.
    key_block, value_block : int
        Hadamard orders of the codec at this D; 1 for none.
    page_tokens, num_kv_heads : int
    dense_k, dense_v : Tensor [B, H, W, D], optional
        Tokens kept in 16 or 32 bit (sinks, window), model basis.
    dense_lens, dense_start : Tensor int32 [B], optional
        Live dense tokens are ``[dense_start, dense_lens)``; default all W.
    sinks : Tensor [HQ], optional
        One learned logit per query head that only joins the softmax's denominator.
    start : Tensor int32 [B], optional
        First live encoded token: tokens before it were evicted or are padding.
    workspace : Tensor float32, optional
        At least `workspace_numel` numbers; allocated per call if absent.
    num_splits : int, optional
        Parts per sequence and head; default from a table, by capacity.
    return_lse : bool
        Also return the log-sum-exp (natural, sinks included), float32 [B, HQ].

    Returns
    -------
    Tensor [B, HQ, 1, D] of q's dtype, and the log-sum-exp if asked for

    Raises
    ------
    ShapeError, UnsupportedError
    """
    _check(q, pages, table, seq_lens, key_block, value_block, page_tokens, num_kv_heads, dense_k,
           dense_v, sinks, codec)  # fmt: skip
    refuse_cpu("decode_attention", q)
    run = _op if torch.compiler.is_compiling() else _attend
    o, lse = run(q, pages, table, seq_lens, float(scale), key_block, value_block, page_tokens,
                 num_kv_heads, dense_k, dense_v, dense_lens, dense_start, sinks, start, workspace,
                 num_splits or 0, codec)  # fmt: skip
    return (o, lse) if return_lse else o
