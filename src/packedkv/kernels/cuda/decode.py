"""Decode attention over packed pages in CUDA: the host side of ``decode.cuh``, one query token per sequence.

Shapes and the grid depend only on the capacity of the page table, lengths are on the device, and nothing synchronises:
the operator is safe in CUDA graphs and ``torch.compile``. Table entries of all tiles in ``[start, seq_len)`` must be
valid; entries outside are never read. A sequence without tokens gives o = 0 and lse = -inf.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.attention import Seen
from packedkv.errors import ShapeError, UnsupportedError
from packedkv.kernels.constants import Constants, constants_of, tensors_of
from packedkv.kernels.cuda.arguments import DecodeArgs, aligned_rows, check_pages, fill_mean, fill_side
from packedkv.kernels.cuda.build import Kernel, Program, load
from packedkv.kernels.cuda.launch import Config, asked_bytes, config_for, machine, shared_bytes, shares_tables
from packedkv.kernels.mean import KeyMean, checked
from packedkv.kernels.spec import DecodeSpec, align, definitions, includes, spec_of
from packedkv.kernels.structs import KINDS, address
from packedkv.kernels.tokens import Rules, StepTokens

LOG2E = 1.4426950408889634
COMBINE_WARPS = 8
MOST_SEQUENCES = 65535


def program(
    spec: DecodeSpec, config: Config, cap: bool = False, dense: int = -1, heads: int = 8, several: bool = False
) -> Program:
    """Return the source of ``kv_decode`` and ``kv_combine``.

    ``cap``: whether scores have a soft cap. ``dense``: dtype of the dense tokens, a value of ``KINDS``, or -1.
    ``heads``: query heads of a CTA, ``DecodeSpec.heads``. ``several``: whether sequences have several query tokens.
    """
    pairs = f", {spec.pairs}" if spec.pairs or config.overlap_prologue else ""
    dense_mode = dense + 2 * spec.joins * (1 + spec.value.multiplies) if dense >= 0 else dense
    combine = f"kv::combine<{spec.head_dim}, {COMBINE_WARPS}{', true' if spec.value.matrix else ''}>"
    threads, tile = config.teams * config.warps * 32, align(spec.tile_bytes(config.tile), 128)
    return Program.of(
        [
            *definitions(config.table_shrink),
            *(["#define KV_QUERIES"] if several else []),
            '#include "decode.cuh"',
            *includes(spec.key, spec.value),
            f"using Decode = kv::Decoder<{spec.key.type}, {spec.value.type}, {spec.head_dim}, {spec.page_tokens}, "
            f"{config.tile}, {config.warps}, {config.stages}, {'true' if cap else 'false'}, {dense_mode}, {heads}, "
            f"{config.teams}{pairs}{', true' if config.overlap_prologue else ''}>;",
            f'static_assert(Decode::TILE == {tile}, "planes as the codec lays them out (plane_bytes?)");',
            f"static_assert(Decode::SHARED == {shared_bytes(spec, config, dense >= 0, heads)}, "
            '"shared memory as the host counts it (Reader.shared is TABLE?)");',
            f"KV_KERNEL void KV_BOUNDS({threads}, {config.resident}) "
            "kv_decode(KV_GRID_CONSTANT kv::DecodeArgs a) { Decode::run(a); }",
            f"KV_KERNEL void KV_BOUNDS({COMBINE_WARPS * 32}, 1) "
            f"kv_combine(KV_GRID_CONSTANT kv::DecodeArgs a) {{ {combine}(a); }}",
        ],
        (spec.key.folder, spec.value.folder),
    )


class Plan(NamedTuple):
    """Cached launch parameters of a call: look-ups would slow eager decoding."""

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
    spec = spec_of(text, DecodeSpec)
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


def workspace_bytes(text: str, q: Tensor, num_kv_heads: int, table: Tensor, dense: bool) -> int:
    """Bytes of the partial results that the splits of a launch with these sizes leave to be merged."""
    spec = spec_of(text, DecodeSpec)
    batch, num_q_heads, _, dim = q.shape
    group = num_q_heads // num_kv_heads
    units = batch * num_kv_heads * spec.tiles(group)
    apart = dense and _needs_dense_cta(spec, units, q.device)
    capacity = table.shape[1] * spec.page_tokens
    splits = config_for(spec, units, capacity, machine(q.device), apart, spec.heads(group)).splits
    return 4 * batch * num_q_heads * (splits + dense) * (dim + 2)


def _attend(
    q: Tensor, tokens: StepTokens, rules: Rules, text: str, key: Constants, value: Constants, mean: KeyMean | None,
    config: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec, (pages, table) = spec_of(text, DecodeSpec), tokens[:2]
    count, num_q_heads, _, dim = q.shape
    batch, num_kv_heads = table.shape[0], pages.shape[1]
    each = num_q_heads // num_kv_heads
    group = each * tokens.queries
    tiles = spec.tiles(group)
    rows = batch * num_kv_heads * group
    if q.stride(3) != 1:
        q = q.contiguous()
    sinks, softcap = rules.sinks, rules.seen.softcap
    if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    args = DecodeArgs()
    dense_kind, dense_k, dense_v = -1, tokens.dense_k, tokens.dense_v
    if dense_k is not None and dense_v is not None and dense_k.shape[2]:
        dense_k, dense_v = (aligned_rows(x.half() if x.dtype == torch.float32 else x, 8) for x in (dense_k, dense_v))
        dense_kind, args.dense_width = KINDS[dense_k.dtype], dense_k.shape[2]
        args.dense_k, args.dense_v = dense_k.data_ptr(), dense_v.data_ptr()
        args.dense_k_batch, args.dense_k_head, args.dense_k_token, _ = dense_k.stride()
        args.dense_v_batch, args.dense_v_head, args.dense_v_token, _ = dense_v.stride()
        args.dense_lens, args.dense_start = address(tokens.dense_lens), address(tokens.dense_start)
        if tokens.dense_at is not None:
            args.dense_at, args.dense_step = tokens.dense_at.data_ptr(), tokens.dense_at.stride(0)
    else:
        dense_k = dense_v = None
    capacity = table.shape[1] * spec.page_tokens
    o = torch.empty(count, num_q_heads, 1, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(count, num_q_heads, dtype=torch.float32, device=q.device)
    if rows * count == 0:
        return o, lse
    units = batch * num_kv_heads * tiles
    several = tokens.starts is not None
    plan = _plan(text, units, capacity, tuple(config), softcap > 0.0, dense_kind, spec.heads(group), several, q.device)
    runs = splits = plan.config.splits
    if dense_k is not None and spec.joins and splits > 1 and units * (splits + 1) <= machine(q.device).sms:
        splits += 1  # idle multiprocessors: dense tokens get a CTA of their own
    slots = splits + (dense_k is not None and not spec.joins)
    if slots > 1:
        workspace = tokens.workspace
        if workspace is None:
            workspace = torch.empty(rows * slots * (dim + 2), dtype=torch.float32, device=q.device)
        part, size = workspace.data_ptr(), rows * slots * 4
        args.part_o, args.part_m, args.part_l = part, part + size * dim, part + size * (dim + 1)
    # teams of warps share tables: one for all heads, or one per head, each on multiprocessors of its own; what belongs
    # to a sequence as well, [B or 1, H, bytes], they have apart
    shared_by_all = key.tables, value.tables, None if mean is None else mean.table
    per_head = any(x is not None and x.dim() == 2 and x.shape[0] > 1 for x in shared_by_all)
    alike = 1 if per_head else num_kv_heads
    pieces = batch * alike * tiles * splits
    if plan.config.teams > 1:
        most = plan.config.resident * machine(q.device).sms * alike // num_kv_heads
        grid = max(1, min(most, -(-pieces // plan.config.teams))), num_kv_heads // alike, 1
    else:
        grid = slots, num_kv_heads * tiles, batch
    args.q, args.pages, args.page_table = q.data_ptr(), pages.data_ptr(), table.data_ptr()
    args.seq_lens, args.out, args.lse = tokens.seq_lens.data_ptr(), o.data_ptr(), lse.data_ptr()
    args.start, args.sinks = address(tokens.start), address(sinks)
    fill_side(args.key, key)
    fill_side(args.value, value)
    fill_mean(args.mean, mean, tokens.origin)
    args.q_batch, args.q_head, _, _ = q.stride()
    args.table_row, args.page_bytes = table.stride(0), pages.shape[2]
    args.out_batch, args.out_head = num_q_heads * dim, dim
    args.runs, args.alike, args.pieces = runs, alike, pieces
    args.q_kind = args.out_kind = KINDS[q.dtype]
    args.dense_kind, args.heads, args.group, args.tiles = dense_kind, num_kv_heads, group, tiles
    args.splits, args.slots = splits, slots
    args.capacity = min(capacity, tokens.longest) if tokens.longest else capacity
    args.starts, args.each = address(tokens.starts), each
    args.scale2, args.softcap = rules.scale * LOG2E, softcap
    # one CTA fills a multiprocessor: the next launch may wait there while the kernel ahead ends elsewhere
    threads = plan.config.teams * plan.config.warps * 32
    plan.decode.launch(grid, threads, plan.shared, args, early=plan.early)
    if slots > 1:
        shared = (COMBINE_WARPS + 1) * (dim + 2) * 4  # kv::combine_shared
        # its own first instruction waits for the partials, so its launch may run beside the decode kernel
        plan.combine.launch((rows, 1, 1), COMBINE_WARPS * 32, shared, args, early=True)
    return o, lse


# compiled graphs trace the operator, which takes tensors, numbers and texts only; eager calls skip the dispatcher
@torch.library.custom_op("packedkv::cuda_decode_attention", mutates_args=("workspace",))
def _op(
    q: Tensor, tokens: Sequence[Tensor | None], workspace: Tensor | None, constants: Sequence[Tensor | None],
    text: str, scale: float, softcap: float, numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *places, sinks, starts = tokens
    queries, longest, key_order, value_order, pairs, *config = numbers
    *sides, mean, mean_table = constants
    return _attend(
        q,
        StepTokens._make([*places, workspace, starts, queries, longest]),
        Rules(scale, Seen(softcap=softcap), sinks),
        text,
        *constants_of(sides, (key_order, value_order)),
        None if mean is None or mean_table is None else KeyMean(mean, mean_table, pairs),
        config,
    )


@_op.register_fake
def _(q: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def decode_attention(
    q: Tensor,
    tokens: StepTokens,
    rules: Rules,
    *,
    spec: str,
    key: Constants,
    value: Constants,
    mean: KeyMean | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one query token per sequence, or several, to packed pages, dense tokens and learned sinks.

    ``q [B, HQ, 1, D]`` is in the model's basis (not rotated), fp16, bf16 or fp32. A query sees all live tokens; the
    soft cap is the only field of ``rules.seen`` that is used. ``spec`` is ``spec.text_of`` a spec: codecs, head_dim,
    page size, and the ``pairs`` of ``mean``, which encoded keys are stored without, but not dense ones. ``key`` and
    ``value`` are the layer's constants, ``constants.constants_for`` the readers. ``config``: launch constants instead
    of the table's.

    Returns the output ``[B, HQ, 1, D]`` of q's dtype, and the log-sum-exp of the scores, float32 ``[B, HQ]`` (natural,
    sinks included); both are arbitrary for queries of no sequence. Raises ShapeError and UnsupportedError.
    """
    _check(q, tokens, rules, spec, key, value)
    checked(
        "decode_attention", spec_of(spec, DecodeSpec).pairs, mean, tokens.origin, tokens.table.shape[0],
        tokens.pages.shape[1],
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        return _attend(q, tokens, rules, spec, key, value, mean, config or ())
    out: tuple[Tensor, Tensor] = _op(
        q,
        [*tokens[:10], rules.sinks, tokens.starts],
        tokens.workspace,
        [*tensors_of(key, value), *(mean or (None, None))[:2]],
        spec,
        float(rules.scale),
        float(rules.seen.softcap),
        [tokens.queries, tokens.longest, key.order, value.order, 0 if mean is None else mean.pairs, *(config or ())],
    )
    return out


def _check(q: Tensor, tokens: StepTokens, rules: Rules, text: str, key: Constants, value: Constants) -> None:
    name, (pages, table, seq_lens) = "decode_attention", tokens[:3]
    if q.dim() != 4 or q.shape[2] != 1 or q.dtype not in KINDS:
        raise ShapeError(
            f"{name}: q is {q.dtype} {list(q.shape)}; it takes fp16, bf16 or fp32 [B, HQ, 1, D], one query token per "
            f"sequence."
        )
    spec = spec_of(text, DecodeSpec)
    num_q_heads, dim = q.shape[1], q.shape[3]
    check_pages(name, pages, spec.tile_bytes(spec.page_tokens), table=table, seq_lens=seq_lens)
    heads = pages.shape[1]
    if dim != spec.head_dim or num_q_heads % heads:
        raise ShapeError(
            f"{name}: q {list(q.shape)} does not fit head_dim={spec.head_dim} and {heads} KV heads, which must divide "
            f"the query heads."
        )
    batch = q.shape[0] if tokens.starts is None else table.shape[0]
    if not table.shape[0] == seq_lens.shape[0] == batch or batch > MOST_SEQUENCES:
        raise ShapeError(
            f"{name}: q has {batch} sequences, table {table.shape[0]}, seq_lens {seq_lens.shape[0]}; they must agree, "
            f"and be {MOST_SEQUENCES} at most."
        )
    k, v, sinks, starts = tokens.dense_k, tokens.dense_v, rules.sinks, tokens.starts
    if (k is None) != (v is None):
        raise ShapeError(f"{name}: dense_k and dense_v come together or not at all.")
    if k is not None and v is not None and (k.dtype != v.dtype or k.dtype not in KINDS or k.shape != v.shape):
        raise ShapeError(
            f"{name}: dense_k is {k.dtype} {list(k.shape)}, dense_v {v.dtype} {list(v.shape)}; use one floating dtype "
            f"and one shape."
        )
    if sinks is not None and sinks.numel() != num_q_heads:
        raise ShapeError(f"{name}: sinks has {sinks.numel()} logits; one per query head, {num_q_heads}, is needed.")
    for what, side in (("key", key), ("value", value)):
        tensors = [side.factor, None if side.tables is None or side.tables.dim() == 2 else side.tables]
        for count in (part.shape[0] for part in tensors if part is not None):
            if count not in (1, batch):
                raise ShapeError(f"{name}: the {what} constants are of {count} sequences, q has {batch}.")
    if starts is None:
        return
    if starts.dtype != torch.int32 or starts.shape != (batch + 1,) or starts.stride(0) != 1 or tokens.queries < 1:
        raise ShapeError(
            f"{name}: starts is {starts.dtype} {list(starts.shape)} for {tokens.queries} queries; contiguous int32 "
            f"[{batch + 1}] is needed, and at least one query."
        )
    if k is not None or tokens.start is not None:
        raise UnsupportedError(
            f"{name}: several query tokens of a sequence are served without dense tokens and start; pass each of them "
            f"as a sequence of its own."
        )
