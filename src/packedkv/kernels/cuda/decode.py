"""Decode attention over packed pages in CUDA: the host side of ``decode.cuh``.

One query token per sequence attends to the codes of a page pool, to tokens held dense and to learned sinks, as
``packedkv.cache.host.attend`` defines it. Keys and values may have different codecs. A program is compiled for a
``DecodeSpec`` and launch constants from a table.

Shapes and the grid depend only on the capacity of the page table, lengths live on the device, and nothing synchronises,
so the operator is safe in a CUDA graph and in ``torch.compile``.

Requirements: a page id is read for every tile in ``[start, seq_len)``, so those table entries must be valid; entries
outside are never read. A sequence without tokens gives o = 0 and lse = -inf.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.constants import Constants
from packedkv.kernels.cuda.arguments import DecodeArgs
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.cuda.launch import Config, asked_bytes, config_for, machine, shared_bytes, shares_tables
from packedkv.kernels.mean import KeyMean, checked
from packedkv.kernels.spec import DecodeSpec, align, definitions, includes

LOG2E = 1.4426950408889634
COMBINE_WARPS = 8
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
MOST_SEQUENCES = 65535


# -- the program -------------------------------------------------------------------------------------------------------


def program(
    spec: DecodeSpec, config: Config, cap: bool = False, dense: int = -1, heads: int = 8, several: bool = False
) -> Program:
    """Return the source of ``kv_decode`` and ``kv_combine``.

    Parameters
    ----------
    spec : DecodeSpec
    config : Config
    cap : bool
        Whether scores have a soft cap.
    dense : int
        Kind of the dense tokens, a value of ``KINDS``; -1: there are none.
    heads : int
        Query heads of a CTA, ``DecodeSpec.heads``.
    several : bool
        Whether sequences have several query tokens.
    """
    pairs = f", {spec.pairs}" if spec.pairs or config.tight else ""
    dense_mode = dense + 2 * spec.joins * (1 + spec.value.multiplies) if dense >= 0 else dense
    combine = f"kv::combine<{spec.head_dim}, {COMBINE_WARPS}{', true' if spec.value.matrix else ''}>"
    threads, tile = config.teams * config.warps * 32, align(spec.tile_bytes(config.tile), 128)
    source = "\n".join(
        [
            *definitions(config.halvings),
            *(["#define KV_QUERIES"] if several else []),
            '#include "decode.cuh"',
            *includes(spec.key, spec.value),
            f"using Decode = kv::Decoder<{spec.key.type}, {spec.value.type}, {spec.head_dim}, {spec.page_tokens}, "
            f"{config.tile}, {config.warps}, {config.stages}, {'true' if cap else 'false'}, {dense_mode}, {heads}, "
            f"{config.teams}{pairs}{', true' if config.tight else ''}>;",
            f'static_assert(Decode::TILE == {tile}, "planes as the codec lays them out (plane_bytes?)");',
            f"static_assert(Decode::SHARED == {shared_bytes(spec, config, dense >= 0, heads)}, "
            '"shared memory as the host counts it (Reader.shared is TABLE?)");',
            f"KV_KERNEL void KV_BOUNDS({threads}, {config.resident}) "
            "kv_decode(KV_GRID_CONSTANT kv::DecodeArgs a) { Decode::run(a); }",
            f"KV_KERNEL void KV_BOUNDS({COMBINE_WARPS * 32}, 1) "
            f"kv_combine(KV_GRID_CONSTANT kv::DecodeArgs a) {{ {combine}(a); }}",
            "",
        ]
    )
    folders = tuple(dict.fromkeys((Program("").folders[0], spec.key.folder, spec.value.folder)))
    return Program(source, folders=folders)


def _rows(x: Tensor) -> Tensor:
    """16-bit rows aligned for 16-byte copies: the tensor itself, or a copy."""
    x = x.half() if x.dtype == torch.float32 else x
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def workspace_numel(batch: int, num_q_heads: int, head_dim: int, num_splits: int, dense: bool = False) -> int:
    """Return how many fp32 numbers the partial results take."""
    return batch * num_q_heads * (num_splits + int(dense)) * (head_dim + 2)


# -- the operator ------------------------------------------------------------------------------------------------------

_SPECS: dict[str, DecodeSpec] = {}
"""Specs by the text that represents them in a compiled graph."""


@lru_cache(maxsize=256)
def text_of(spec: DecodeSpec) -> str:
    """Register a spec for ``decode_attention`` and return its name."""
    text = repr(tuple(spec))
    _SPECS[text] = spec
    return text


def decode_spec_of(text: str) -> DecodeSpec:
    """Return the spec that ``text_of`` named.

    Raises
    ------
    UnsupportedError
        It has not been registered in this process.
    """
    if text not in _SPECS:
        raise UnsupportedError(f"spec={text!r} is unknown; pass text_of(decode_spec(...)).")
    return _SPECS[text]


class Plan(NamedTuple):
    """What a call launches: computed once per spec, sizes and device, because look-ups slow eager decoding."""

    config: Config
    decode: Kernel
    combine: Kernel
    shared: int
    early: bool


@lru_cache(maxsize=1024)
def _plan(
    text: str, units: int, capacity: int, given: tuple[int, ...], cap: bool, dense: int, heads: int, several: bool,
    device: torch.device,
) -> Plan:  # fmt: skip
    spec = decode_spec_of(text)
    apart = dense >= 0 and _needs_dense_cta(spec, units, device)
    config = Config._make(given) if given else config_for(spec, units, capacity, machine(device), apart, heads)
    shared, early, there = shared_bytes(spec, config, dense >= 0, heads), shares_tables(spec, config), machine(device)
    if shared > there.shared_block:
        raise UnsupportedError(
            f"{spec.name}: config={config} needs {shared} bytes of shared memory in a block; this GPU has "
            f"{there.shared_block}. Give fewer teams, warps or stages, or shorter tiles, or leave config out."
        )
    # the program does not depend on the number of splits
    source = program(spec, config, cap, dense, heads, several)
    decode, combine = load(source, ("kv_decode", "kv_combine"), device, spec.name)
    if early:  # more than half: the next kernel's CTAs, launched early, do not gather on the first idle multiprocessors
        shared = min(max(shared, there.shared_sm // 2), there.shared_block)
    return Plan(config, decode, combine, asked_bytes(shared, device), early)


def _needs_dense_cta(spec: DecodeSpec, units: int, device: torch.device) -> bool:
    """Whether a CTA is kept for dense tokens: they cannot join, or it takes long where each of many splits is short."""
    return not spec.joins or (spec.value.multiplies and 8 * units <= machine(device).sms)


def splits_of(text: str, q: Tensor, num_kv_heads: int, table: Tensor, dense: bool = False) -> int:
    """Return the number of splits that ``decode_attention`` chooses for these sizes."""
    spec = _SPECS[text]
    group = q.shape[1] // num_kv_heads
    units = q.shape[0] * num_kv_heads * spec.tiles(group)
    apart = dense and _needs_dense_cta(spec, units, q.device)
    capacity = table.shape[1] * spec.page_tokens
    return config_for(spec, units, capacity, machine(q.device), apart, spec.heads(group)).splits


def _attend(
    q: Tensor, pages: Tensor, table: Tensor, seq_lens: Tensor, scale: float, text: str, num_kv_heads: int,
    key_tables: Tensor | None, key_factor: Tensor | None, key_order: int, key_matrix: Tensor | None,
    value_tables: Tensor | None, value_factor: Tensor | None, value_order: int, value_matrix: Tensor | None,
    dense_k: Tensor | None, dense_v: Tensor | None, dense_lens: Tensor | None, dense_start: Tensor | None,
    dense_at: Tensor | None, sinks: Tensor | None, start: Tensor | None, softcap: float, workspace: Tensor | None,
    config: Sequence[int],
    mean: Tensor | None, mean_table: Tensor | None, placed: Tensor | None, starts: Tensor | None, queries: int,
    longest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = _SPECS[text]
    count, num_q_heads, _, dim = q.shape
    batch, each = table.shape[0], num_q_heads // num_kv_heads
    group = each * queries
    tiles = spec.tiles(group)
    rows = batch * num_kv_heads * group
    if q.stride(3) != 1:
        q = q.contiguous()
    if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    args = DecodeArgs()
    dense_kind = -1
    if dense_k is not None and dense_v is not None and dense_k.shape[2]:
        dense_k, dense_v = _rows(dense_k), _rows(dense_v)
        dense_kind, args.dense_width = KINDS[dense_k.dtype], dense_k.shape[2]
        args.dense_k, args.dense_v = dense_k.data_ptr(), dense_v.data_ptr()
        args.dense_k_batch, args.dense_k_head, args.dense_k_token, _ = dense_k.stride()
        args.dense_v_batch, args.dense_v_head, args.dense_v_token, _ = dense_v.stride()
        if dense_lens is not None:
            args.dense_lens = dense_lens.data_ptr()
        if dense_start is not None:
            args.dense_start = dense_start.data_ptr()
        if dense_at is not None:
            args.dense_at, args.dense_step = dense_at.data_ptr(), dense_at.stride(0)
    else:
        dense_k = dense_v = None
    capacity = table.shape[1] * spec.page_tokens
    o = torch.empty(count, num_q_heads, 1, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(count, num_q_heads, dtype=torch.float32, device=q.device)
    if rows * count == 0:
        return o, lse
    units = batch * num_kv_heads * tiles
    several = starts is not None
    plan = _plan(text, units, capacity, tuple(config), softcap > 0.0, dense_kind, spec.heads(group), several, q.device)
    runs = splits = plan.config.splits
    if dense_k is not None and spec.joins and splits > 1 and units * (splits + 1) <= machine(q.device).sms:
        splits += 1  # idle multiprocessors: dense tokens get a CTA of their own
    slots = splits + (dense_k is not None and not spec.joins)
    if slots > 1:
        if workspace is None:
            workspace = torch.empty(rows * slots * (dim + 2), dtype=torch.float32, device=q.device)
        part, size = workspace.data_ptr(), rows * slots * 4
        args.part_o, args.part_m, args.part_l = part, part + size * dim, part + size * (dim + 1)
    # teams of warps share tables: one for all heads, or one per head, each on multiprocessors of its own; what belongs
    # to a sequence as well, [B or 1, H, bytes], they have apart
    own = any(x is not None and x.dim() == 2 and x.shape[0] > 1 for x in (key_tables, value_tables, mean_table))
    alike = 1 if own else num_kv_heads
    pieces = batch * alike * tiles * splits
    if plan.config.teams > 1:
        most = plan.config.resident * machine(q.device).sms * alike // num_kv_heads
        grid = max(1, min(most, -(-pieces // plan.config.teams))), num_kv_heads // alike, 1
    else:
        grid = slots, num_kv_heads * tiles, batch
    args.q, args.pages, args.page_table = q.data_ptr(), pages.data_ptr(), table.data_ptr()
    args.seq_lens, args.out, args.lse = seq_lens.data_ptr(), o.data_ptr(), lse.data_ptr()
    if start is not None:
        args.start = start.data_ptr()
    if sinks is not None:
        args.sinks = sinks.data_ptr()
    args.key.fill(key_tables, key_factor, key_order, key_matrix)
    args.value.fill(value_tables, value_factor, value_order, value_matrix)
    args.mean.fill(mean, mean_table, placed)
    args.q_batch, args.q_head, _, _ = q.stride()
    args.table_row, args.page_bytes = table.stride(0), pages.shape[2]
    args.out_batch, args.out_head = num_q_heads * dim, dim
    args.runs, args.alike, args.pieces = runs, alike, pieces
    args.q_kind = args.out_kind = KINDS[q.dtype]
    args.dense_kind, args.heads, args.group, args.tiles = dense_kind, num_kv_heads, group, tiles
    args.splits, args.slots, args.capacity = splits, slots, min(capacity, longest) if longest else capacity
    if starts is not None:
        args.starts, args.each = starts.data_ptr(), each
    args.scale2, args.softcap = scale * LOG2E, softcap
    # one CTA fills a multiprocessor: the next launch may wait there while the kernel ahead ends elsewhere
    threads = plan.config.teams * plan.config.warps * 32
    plan.decode.launch(grid, threads, plan.shared, args, early=plan.early)
    if slots > 1:
        shared = (COMBINE_WARPS + 1) * (dim + 2) * 4  # kv::combine_shared
        # its own first instruction waits for the partials, so its launch may run beside the decode kernel
        plan.combine.launch((rows, 1, 1), COMBINE_WARPS * 32, shared, args, early=True)
    return o, lse


# compiled graphs trace the operator, eager calls skip the dispatcher
_op = torch.library.custom_op("packedkv::cuda_decode_attention", _attend, mutates_args=("workspace",))


@_op.register_fake
def _(q: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def decode_attention(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    *,
    spec: str,
    key: Constants,
    value: Constants,
    scale: float,
    num_kv_heads: int,
    dense_k: Tensor | None = None,
    dense_v: Tensor | None = None,
    dense_lens: Tensor | None = None,
    dense_start: Tensor | None = None,
    dense_at: Tensor | None = None,
    sinks: Tensor | None = None,
    start: Tensor | None = None,
    softcap: float = 0.0,
    workspace: Tensor | None = None,
    config: Config | None = None,
    mean: KeyMean | None = None,
    placed: Tensor | None = None,
    starts: Tensor | None = None,
    queries: int = 1,
    longest: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend with one query token per sequence to packed pages, dense tokens and learned sinks.

    With ``starts`` a sequence b has several query tokens ``[starts[b], starts[b + 1])`` of ``q``: its newest ones,
    which are encoded already, and each sees the tokens up to itself. Their pages are read once.

    Parameters
    ----------
    q : Tensor ``[B, HQ, 1, D]``
        Model basis (not rotated), fp16, bf16 or fp32; last axis contiguous or copied.
    pages : Tensor uint8 ``[num_pages, H, page_bytes]``
        Or longer, with room behind the codes.
    table : Tensor int32 ``[B, max_pages]``
        Page ids; token t of sequence b lies in page ``table[b, t // P]``, slot ``t % P``.
    seq_lens : Tensor int32 ``[B]``
        Encoded tokens per sequence, on the device.
    spec : str
        ``text_of`` a spec: codecs, head_dim, page size.
    key, value : Constants
        The layer's constants, ``constants.constants_for``.
    scale : float
        Multiplies the scores, usually D ** -0.5.
    num_kv_heads : int
    dense_k, dense_v : Tensor ``[B, H, W, D]``, optional
        Tokens kept dense (sinks, window), model basis; fp32 is rounded to fp16, as caches hold it.
    dense_lens, dense_start : Tensor int32 ``[B]``, optional
        Live dense tokens are ``[dense_start, dense_lens)``; default all W.
    dense_at : Tensor int32 ``[B]``, optional
        Which of ``dense_k, dense_v [N, H, W, D]`` are those of each sequence; default: the first, the second, ...
    sinks : Tensor ``[HQ]``, optional
        One learned logit per query head that only joins the softmax's denominator.
    start : Tensor int32 ``[B]``, optional
        First live encoded token: tokens before it were evicted or are padding.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: they stay.
    workspace : Tensor float32, optional
        At least ``workspace_numel`` numbers; allocated per call if absent.
    config : Config, optional
        Launch constants instead of the table's.
    mean : KeyMean, optional
        The mean before RoPE that the encoded keys are held without (not the dense ones); the spec is of its ``pairs``.
    placed : Tensor int32 ``[B]``, optional
        With ``mean``: position of slot 0 of each sequence, on the device. Slot t has position ``placed + t``, below
        ``MOST_POSITIONS``; slots before ``start`` may have negative ones.
    starts : Tensor int32 ``[B + 1]``, optional
        First query token of each sequence, on the device; q is then ``[tokens, HQ, 1, D]``, and there are neither
        dense tokens nor a ``start``.
    queries : int
        Most query tokens of a sequence.
    longest : int
        Tokens beyond it are not read, whatever ``seq_lens`` says; 0: as many as the table has room for.

    Returns
    -------
    (Tensor ``[B, HQ, 1, D]`` of q's dtype, Tensor float32 ``[B, HQ]``)
        The output, and the log-sum-exp of the scores (natural, sinks included). Those of queries that no sequence has
        are arbitrary.

    Raises
    ------
    ShapeError, UnsupportedError
    """
    several = starts is not None
    _check(q, pages, table, seq_lens, spec, num_kv_heads, dense_k, dense_v, sinks, key, value, several)
    checked("decode_attention", decode_spec_of(spec).pairs, mean, placed, table.shape[0], num_kv_heads)
    if starts is not None:
        _check_starts(starts, table, queries, dense_k, start)
    run = _op if torch.compiler.is_compiling() else _attend
    out: tuple[Tensor, Tensor] = run(
        q, pages, table, seq_lens, float(scale), spec, num_kv_heads, key.tables, key.factor, key.order, key.matrix,
        value.tables, value.factor, value.order, value.matrix, dense_k, dense_v, dense_lens, dense_start, dense_at,
        sinks, start, float(softcap), workspace, list(config or ()), None if mean is None else mean.mean,
        None if mean is None else mean.table, placed, starts, queries, longest,
    )  # fmt: skip
    return out


def _check_starts(starts: Tensor, table: Tensor, queries: int, dense_k: Tensor | None, start: Tensor | None) -> None:
    name, rows = "decode_attention", table.shape[0]
    if starts.dtype != torch.int32 or starts.shape != (rows + 1,) or starts.stride(0) != 1 or queries < 1:
        raise ShapeError(
            f"{name}: starts is {starts.dtype} {list(starts.shape)} for {queries} queries; contiguous int32 "
            f"[{rows + 1}] is needed, and at least one query."
        )
    if dense_k is not None or start is not None:
        raise UnsupportedError(
            f"{name}: several query tokens of a sequence are served without dense tokens and start; pass each of them "
            f"as a sequence of its own."
        )


def _check(
    q: Tensor, pages: Tensor, table: Tensor, seq_lens: Tensor, text: str, heads: int,
    dense_k: Tensor | None, dense_v: Tensor | None, sinks: Tensor | None, key: Constants, value: Constants,
    several: bool,
) -> None:  # fmt: skip
    name = "decode_attention"
    if q.dim() != 4 or q.shape[2] != 1 or q.dtype not in KINDS:
        raise ShapeError(
            f"{name}: q is {q.dtype} {list(q.shape)}; it takes fp16, bf16 or fp32 [B, HQ, 1, D], one query token per "
            f"sequence."
        )
    spec = decode_spec_of(text)
    batch, num_q_heads, _, dim = q.shape
    if dim != spec.head_dim or num_q_heads % heads:
        raise ShapeError(
            f"{name}: q {list(q.shape)} does not fit head_dim={spec.head_dim} and num_kv_heads={heads}, which must "
            f"divide the query heads."
        )
    want = [heads, spec.tile_bytes(spec.page_tokens)]
    fits = pages.dim() == 3 and pages.shape[1] == heads and pages.shape[2] >= want[1] and pages.shape[2] % 16 == 0
    if pages.dtype != torch.uint8 or not fits or not pages.is_contiguous():
        raise ShapeError(
            f"{name}: pages are {pages.dtype} {list(pages.shape)}; a contiguous uint8 [num_pages, {want[0]}, "
            f"{want[1]}] or longer is needed."
        )
    for what, x in (("table", table), ("seq_lens", seq_lens)):
        if x.dtype != torch.int32 or x.stride(-1) != 1:
            raise ShapeError(f"{name}: {what} is {x.dtype}; contiguous int32 is needed.")
    batch = table.shape[0] if several else batch
    if not table.shape[0] == seq_lens.shape[0] == batch or batch > MOST_SEQUENCES:
        raise ShapeError(
            f"{name}: q has {batch} sequences, table {table.shape[0]}, seq_lens {seq_lens.shape[0]}; they must agree, "
            f"and be {MOST_SEQUENCES} at most."
        )
    if (dense_k is None) != (dense_v is None):
        raise ShapeError(f"{name}: dense_k and dense_v come together or not at all.")
    if (
        dense_k is not None
        and dense_v is not None
        and (dense_k.dtype != dense_v.dtype or dense_k.dtype not in KINDS or dense_k.shape != dense_v.shape)
    ):
        raise ShapeError(
            f"{name}: dense_k is {dense_k.dtype} {list(dense_k.shape)}, dense_v {dense_v.dtype} "
            f"{list(dense_v.shape)}; use one floating dtype and one shape."
        )
    if sinks is not None and sinks.numel() != num_q_heads:
        raise ShapeError(f"{name}: sinks has {sinks.numel()} logits; one per query head, {num_q_heads}, is needed.")
    for what, side in (("key", key), ("value", value)):
        own = [side.factor, None if side.tables is None or side.tables.dim() == 2 else side.tables]
        for held in (part.shape[0] for part in own if part is not None):
            if held not in (1, batch):
                raise ShapeError(f"{name}: the {what} constants are of {held} sequences, q has {batch}.")
