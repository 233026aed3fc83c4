"""One step's batch: its metadata, the builder that makes it, and tensors that layers with shared blocks share."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.bind import impls_of
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.identity import claim
from packedkv.integrations.vllm.layer import EngineLayer, visible
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.integrations.vllm.precompile import precompile
from packedkv.integrations.vllm.servable import check_page
from packedkv.kernels.cuda.prefill import Chunk, Chunks, Sight, Workspace, gathered
from packedkv.kernels.cuda.prefill_groups import GroupChunks
from packedkv.store.positions import shared

logger = init_logger("vllm.packedkv")


Prompts = tuple[list[Any], list[Chunk]]
"""Prompt chunks on a GPU: ``Chunks`` or ``GroupChunks`` of many requests each, and chunks too long to join others."""


@dataclass
class PackedMetadata(AttentionMetadata):  # type: ignore[misc]
    """One step's batch of B requests: queries of decode steps first, then prompt chunks."""

    # queries of decode steps, each a sequence of its own: one of each request, or its newest token and its drafts
    decodes: int
    chunks: list[Chunk]  # the other queries
    block_table: Tensor  # int32 [B, M]
    seq_lens: Tensor  # int32 [decodes] or longer: tokens visible to each decode query, itself included
    query_table: Tensor  # int32 [decodes, M] or longer: blocks of each decode query's request
    prompts: dict[int, Prompts] = field(default_factory=dict)  # on a GPU: by sliding window of the layers
    # int32 [B + 1], [B]: first decode query and tokens of each request, if kernels read its pages for all its queries
    starts: Tensor | None = None
    totals: Tensor | None = None
    longest: int = 0  # upper bound of the tokens of a request, where there are ``starts``


def bound_layer(impl: Any) -> EngineLayer:
    """Return the layer that stores the tokens of an attention implementation, or of the one it shares K and V with."""
    if impl.packed is None:
        layers = impl.config.compilation_config.static_forward_context
        impl.packed = layers[impl.kv_sharing_target_layer_name].impl.packed
    packed: EngineLayer = impl.packed
    return packed


def metadata_of(layer: Any) -> PackedMetadata | None:
    """Return this step's metadata of a layer; None in vLLM's profiling runs."""
    metadata = get_forward_context().attn_metadata
    m = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
    return m if isinstance(m, PackedMetadata) else None


def longest_sequence(config: VllmConfig) -> int:
    """Tokens of the longest request, or of a step if those are more."""
    return int(max(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens))


class SharedStep:
    """Results that layers with shared blocks compute once per step, and their workspace.

    The first of them computes it (``PackedImpl.leads``). The tensors keep their addresses, because captured graphs hold
    them. ``tokens, requests``: upper bounds for a step. ``queries, most``: upper bounds of the decode queries of a
    request, and of a step. ``layers``: sink and window of each layer.
    """

    def __init__(
        self,
        tokens: int,
        requests: int,
        queries: int,
        most: int,
        layers: set[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.requests, self.queries, self.most = requests, queries, most
        zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        self._visible = {layer: {name: zeros.clone() for name in visible(zeros, *layer)} for layer in layers}
        self._computed: set[tuple[int, int]] = set()
        self._newest = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._positions: Tensor | None = None
        self.workspace: Tensor | None = None

    def begin_step(self) -> None:
        self._positions = None
        self._computed.clear()

    def positions(self, count: int, m: PackedMetadata | None) -> Tensor:
        """Positions of a step's tokens ``[1, count]``; arbitrary for tokens behind the requests' own."""
        if self._positions is None:
            steps = count if m is None or not m.chunks else m.decodes
            if m is not None:
                known = min(steps, m.seq_lens.shape[0])
                self._newest[:known] = m.seq_lens[:known] - 1
            positions = self._newest[:steps].clamp(min=0)
            if m is not None and m.chunks:
                parts, at = [positions], steps
                for _, _, last, length in m.chunks:  # a draft behind the longest request is in no chunk
                    parts.append(torch.arange(length - (last - at), length, device=positions.device))
                    at = last
                positions = torch.cat([*parts, positions.new_zeros(count - at)])
            self._positions = shared(positions[None])
        return self._positions

    def visible(self, seq_lens: Tensor, sink: int, window: int) -> dict[str, Any]:
        """Cache ``layer.visible`` of these requests."""
        count, fields = seq_lens.shape[0], self._visible[sink, window]
        if (sink, window) not in self._computed:
            self._computed.add((sink, window))
            for name, x in visible(seq_lens, sink, window).items():
                fields[name][:count] = x
        return {name: x[:count] for name, x in fields.items()}


class DraftQueries:
    """The queries of a step with drafts as sequences of their own: query i of q sees ``seq_len - (q - 1 - i)`` tokens.

    Computed on the device, which alone knows the accepted drafts. The tensors keep their addresses. ``queries``: upper
    bound for a step; ``columns``: width of block tables.
    """

    def __init__(self, queries: int, columns: int, device: torch.device) -> None:
        self.seq_lens = torch.zeros(queries, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(queries, columns, dtype=torch.int32, device=device)
        self.order = torch.arange(queries, dtype=torch.int32, device=device)

    def put(self, c: CommonAttentionMetadata, rows: int, queries: int, longest: int) -> None:
        """Set the first ``queries`` queries, which the first ``rows`` rows have; ``longest``: tokens of a request."""
        self.seq_lens.zero_()  # a graph may have more queries than the step
        if queries:
            order, ends = self.order[:queries], c.query_start_loc[1 : rows + 1]
            row = torch.searchsorted(ends, order, right=True).clamp_(max=rows - 1)
            seq_lens = c.seq_lens[:rows][row] - (ends[row] - 1 - order)
            self.seq_lens[:queries] = seq_lens.clamp_(min=0, max=longest)
            self.block_table[:queries] = c.block_table_tensor[:rows][row]


class PackedBuilder(AttentionMetadataBuilder[PackedMetadata]):  # type: ignore[misc]
    """Builds ``PackedMetadata``; a full CUDA graph has decode steps of one token per request, and of its drafts."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        if vllm_config.speculative_config is None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(kv_cache_spec, "page_size_padded", None) is not None:
            raise UnsupportedError(
                "packedkv: layers with and without a sliding window take different numbers of bytes per token, which "
                "vLLM evens out with gaps between pages; use a preset that treats all layers alike, such as saw-int4, "
                "and leave --kv-cache-dtype-skip-layers out."
            )
        context = vllm_config.compilation_config.static_forward_context
        impls = [context[name].impl for name in layer_names]
        layers: list[EngineLayer] = [bound_layer(impl) for impl in impls]
        self.leader, self.first = impls[0], layers[0]
        self.page_tokens = kv_cache_spec.block_size
        self.longest = vllm_config.model_config.max_model_len
        self.windows = {impl.rules.seen.window for impl in impls}
        # kernels serve the decode steps of all requests at once; the reference attends request by request
        self.fused = not any(layer.unserved for layer in layers)
        if self.fused:
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # a draft model's first pass has one query more in each row
        self.drafts = all(impl.draft for impl in impls)
        self.most_queries = (self.reorder_batch_threshold or 1) + self.drafts
        self.joint = all(layer.takes_several(impl.rules) for layer, impl in zip(layers, impls, strict=True))
        model, block = self.leader.model, vllm_config.cache_config.block_size
        options = model.options
        what = f"{options.scheme} with seed {options.seed} in blocks of {block} tokens"
        claim(vllm_config.kv_transfer_config, f"{self.leader.digest}-{block}", what)
        if all(impl.shared is None for impl in impls_of(vllm_config, type(self.leader)).values()):  # the first builder
            _log_preset([*model.impls().values()], block)
        _log_kernels(layers, self.page_tokens)
        if device.type == "cuda":
            precompile(impls, self.page_tokens, vllm_config, device, self.most_queries)
        if vllm_config.model_config.is_hybrid:
            logger.info(
                "packedkv: vLLM makes blocks as large as the other layers' state, here %d tokens, and the fewer bytes "
                "a token takes, the longer they are; the prefix cache finds whole blocks, so shorter prefixes are "
                "computed again.",
                block,
            )
        scheduler = vllm_config.scheduler_config
        self.widest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        tokens = max(scheduler.max_num_batched_tokens, self.widest)
        self.shared = SharedStep(
            tokens,
            max(scheduler.max_num_seqs, tokens if self.fused else 1),
            self.most_queries,
            scheduler.max_num_seqs * self.most_queries,
            {(layer.sink, impl.rules.seen.window) for layer, impl in zip(layers, impls, strict=True)},
            device,
        )
        self.draft_queries: DraftQueries | None = None
        self.pending = self._pending_of(layers)
        for impl in impls:
            impl.shared, impl.leads, impl.pending = self.shared, impl is self.leader, self.pending

    def _pending_of(self, layers: list[EngineLayer]) -> PendingGroups | None:
        """Make the slots if the layers encode groups of tokens; all layers of a builder do, or none."""
        if not isinstance(first := layers[0], GroupedLayer):
            return None
        check_page(first.scheme, self.page_tokens)
        total = sum(layer.pending_bytes for layer in layers if isinstance(layer, GroupedLayer))
        logger.info(
            "packedkv: beside the cache, %d layers hold unfinished groups of %d tokens of %d requests: %.1f MB",
            *(len(layers), first.unit, first.slots, total / 1e6),
        )
        rows = max(self.shared.requests, first.slots)
        sizes = first.slots, first.unit, self.page_tokens, rows
        return PendingGroups(*sizes, first.device, first.halves, self.longest)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PackedMetadata:
        if self.pending is not None:
            self.pending.blank(common_attn_metadata.num_actual_tokens)
        return self._metadata(common_attn_metadata, *self._split(common_attn_metadata))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        c = common_attn_metadata
        if self.leader.model.stopped:
            raise UnsupportedError(self.leader.model.stopped)
        rows, decodes = self._split(c)
        if self.pending is not None:
            queries = None if self.vllm_config.speculative_config is None else decodes
            self.pending.put(
                c.block_table_tensor, c.seq_lens, c.query_start_loc, c.slot_mapping, c.req_idx, queries=queries
            )
        return self._metadata(c, rows, decodes)

    def _split(self, c: CommonAttentionMetadata) -> tuple[int, int]:
        """Rows of decode steps, which come first, and their queries."""
        if not self.fused:
            return 0, 0
        rows, _, queries, _ = split_decodes_and_prefills(c, self.most_queries)
        return rows, queries

    def _metadata(self, c: CommonAttentionMetadata, rows: int, decodes: int) -> PackedMetadata:
        if c.causal is not True:
            raise UnsupportedError("packedkv: drafts that see each other are not served; use another kind of drafts.")
        chunks = self._chunks(c, rows) if rows < c.num_reqs else []
        prompts, table = self._prompts(chunks, c.block_table_tensor), c.block_table_tensor
        if self.vllm_config.speculative_config is None:
            return PackedMetadata(rows, chunks, table, c.seq_lens, table, prompts)
        if (queries := self.draft_queries) is None:
            # the first batch is one of a profiling run: graphs that are captured later find these addresses
            queries = DraftQueries(max(self.shared.most, self.widest), table.shape[1], self.device)
            self.draft_queries = queries
        queries.put(c, rows, decodes, self.longest)
        step = PackedMetadata(decodes, chunks, table, queries.seq_lens, queries.block_table, prompts)
        if self.joint and rows < decodes:
            step.starts, step.totals, step.longest = c.query_start_loc[: rows + 1], c.seq_lens[:rows], self.longest
        return step

    def _chunks(self, c: CommonAttentionMetadata, first: int) -> list[Chunk]:
        """Prompt chunks of the rows from ``first`` on: row, first and last query, tokens of the request."""
        at, chunks = c.query_start_loc_cpu.tolist(), []
        # the host's lengths are exact for prompts, but not for a draft model's, whose rows have a token more
        exact = c.seq_lens_cpu_upper_bound is None or self.drafts or c.seq_lens.device.type == "cpu"
        seq_lens = (c.seq_lens if exact else c.seq_lens_cpu_upper_bound).tolist()
        for i in range(first, c.num_reqs):
            over = max(0, seq_lens[i] - self.longest)  # a draft behind the longest request
            if at[i + 1] - over > at[i]:
                chunks.append((i, at[i], at[i + 1] - over, seq_lens[i] - over))
        return chunks

    def _prompts(self, chunks: list[Chunk], block_table: Tensor) -> dict[int, Prompts]:
        """Return how a GPU's kernels attend the chunks, for each sliding window."""
        if not chunks or not self.first.batched:
            return {}
        most, pending, rooms = self.first.most_tokens(longest_sequence(self.vllm_config)), self.pending, [Workspace()]
        prompts: dict[int, Prompts] = {}
        for window in self.windows:
            sight = Sight(window, self.page_tokens)
            lists, alone = gathered(chunks, most, sight)
            if pending is None:
                prompts[window] = [Chunks.of(batch, block_table, rooms[0], sight) for batch in lists], alone
                continue
            # a request's new tokens are stored for all lists before any of them attends: each has memory of its own
            rooms += [Workspace() for _ in lists[len(rooms) :]]
            given = pending.slot, pending.unit, pending.page_tokens
            together = [
                GroupChunks.of(batch, block_table, *given, room, pending.halves, window)
                for batch, room in zip(lists, rooms, strict=False)
            ]
            prompts[window] = together, alone
        return prompts


def _log_preset(impls: list[Any], page_tokens: int) -> None:
    """Log the preset of this process's layers, in numbers that compare servers."""
    lead, options = impls[0], impls[0].model.options
    layers = [impl.packed for impl in impls if impl.kv_sharing_target_layer_name is None]
    numbers = sum(2 * layer.heads * layer.head_dim for layer in layers)
    bits = 8 * sum(layer.heads * layer.token_bytes(page_tokens) for layer in layers) / numbers
    params = options.params
    logger.info(
        "packedkv: preset %s: %.4g bits a number, %.2fx as many tokens as 16 bit",
        *(options.scheme, bits, 16 / bits),
    )
    logger.info(
        "packedkv: seed %d, params %s, %d of %d layers hold keys without their mean, identity %s-%d",
        *(options.seed, "none" if params is None else f"{params.file} ({params.sha256[:12]})"),
        *(sum(layer.mean is not None for layer in layers), len(layers), lead.digest, page_tokens),
    )


def _log_kernels(layers: list[EngineLayer], page_tokens: int) -> None:
    """Log whether kernels or the reference serve the layers, and why it is the reference."""
    served = [layer.engine(page_tokens) for layer in layers if not layer.unserved]
    for name, count in Counter(engine.name for engine in served).items():
        logger.info("packedkv: %d of %d layers are served by the kernels %r", count, len(layers), name)
    if sink := max(layer.sink for layer in layers):
        logger.info(
            "packedkv: each block of %d tokens has room for the first %d in 16 bit, which takes %.2f bits a number; a "
            "larger --block-size takes less",
            *(page_tokens, sink, 16 * sink / page_tokens),
        )
    for why, count in Counter(layer.unserved for layer in layers if layer.unserved).items():
        logger.warning(
            "packedkv: %d of %d layers are served by the reference, which is slow: %s", count, len(layers), why
        )
