"""The builder of a step's metadata; made once for the layers that share blocks, it also sets up what they share."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.ahead import compile_ahead
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.identity import claim
from packedkv.integrations.vllm.layer import EngineLayer, Several
from packedkv.integrations.vllm.metadata import Expanded, PackedMetadata, Prompts, SharedStep, longest_sequence
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.integrations.vllm.servable import page_refusal
from packedkv.kernels.cuda.prompts import Chunk, Chunks, Room, Sight, gathered
from packedkv.kernels.cuda.prompts_groups import GroupChunks

logger = init_logger("vllm.packedkv")


class PackedBuilder(AttentionMetadataBuilder[PackedMetadata]):  # type: ignore[misc]
    """Builds ``PackedMetadata``; a full CUDA graph holds decode steps of one token per request, and of its drafts."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Return which batches a full graph may hold."""
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
        scheduler = vllm_config.scheduler_config
        context = vllm_config.compilation_config.static_forward_context
        impls = [context[name].impl for name in layer_names]
        # decode steps of all requests at once; the reference attends request by request
        self.fused = not any(impl.packed.unserved for impl in impls)
        if self.fused:
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        options, block = impls[0].options, vllm_config.cache_config.block_size
        what = f"{options.scheme} with seed {options.seed} in blocks of {block} tokens"
        claim(vllm_config.kv_transfer_config, f"{impls[0].digest}-{block}", what)
        # a draft model's first pass has one query more in each row
        self.drafts = all(impl.draft for impl in impls)
        self.most_queries = (self.reorder_batch_threshold or 1) + self.drafts
        self.expanded: Expanded | None = None
        self.joint = all(impl.packed.takes_several(impl.rules) for impl in impls)
        self.windows = {impl.rules.window for impl in impls}
        everywhere = [
            layer.impl for layer in context.values() if isinstance(getattr(layer, "impl", None), type(impls[0]))
        ]
        if all(impl.shared is None for impl in everywhere):  # the first builder
            _log_preset([impl for impl in everywhere if not impl.draft], block)
        _log_kernels([impl.packed for impl in impls], kv_cache_spec.block_size)
        if device.type == "cuda":
            compile_ahead(impls, kv_cache_spec.block_size, vllm_config, device, self.most_queries)
        if vllm_config.model_config.is_hybrid:
            logger.info(
                "packedkv: vLLM makes blocks as large as the other layers' state, here %d tokens, and the fewer bytes "
                "a token takes, the longer they are; the prefix cache finds whole blocks, so shorter prefixes are "
                "computed again.",
                vllm_config.cache_config.block_size,
            )
        tokens = max(scheduler.max_num_batched_tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self.first: EngineLayer = impls[0].packed
        self.leader = impls[0]
        shared = self.shared = SharedStep(tokens, max(scheduler.max_num_seqs, tokens if self.fused else 1), device)
        shared.most, shared.queries = scheduler.max_num_seqs * self.most_queries, self.most_queries
        for impl in impls:
            impl.shared, impl.leads = shared, impl is impls[0]
        self.pending = self._pending_of(
            [impl.packed for impl in impls], kv_cache_spec.block_size, shared.start.shape[0]
        )
        for impl in impls:
            impl.pending = self.pending

    def _pending_of(self, layers: list[EngineLayer], page_tokens: int, rows: int) -> PendingGroups | None:
        """Make the pending slots if the layers encode groups of tokens; all layers of a builder do, or none."""
        if not isinstance(first := layers[0], GroupedLayer):
            return None
        if why := page_refusal(first.scheme, page_tokens):
            raise UnsupportedError(f"packedkv: {why}")
        held = sum(layer.pending_bytes for layer in layers if isinstance(layer, GroupedLayer))
        logger.info(
            "packedkv: beside the cache, %d layers hold unfinished groups of %d tokens of %d requests: %.1f MB",
            *(len(layers), first.unit, first.slots, held / 1e6),
        )
        longest = self.vllm_config.model_config.max_model_len
        return PendingGroups(
            first.slots, first.unit, page_tokens, max(rows, first.slots), first.device, first.halves, longest
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PackedMetadata:
        """Return the metadata of a batch that has no requests."""
        if self.pending is not None:
            self.pending.blank(common_attn_metadata.num_actual_tokens)
        return self._metadata(common_attn_metadata)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        """Return the metadata of a step; only prompt chunks need numbers on the host."""
        c = common_attn_metadata
        if self.leader.stopped:
            raise UnsupportedError(self.leader.stopped)
        if self.pending is not None:
            queries = None if self.vllm_config.speculative_config is None else self._split(c)[2]
            given = c.block_table_tensor, c.seq_lens, c.query_start_loc, c.slot_mapping, c.req_idx, queries
            self.pending.put(*given)
        return self._metadata(c)

    def _split(self, c: CommonAttentionMetadata) -> tuple[int, int, int]:
        """Rows of decode steps, which come first, other rows, and queries of decode steps."""
        if not self.fused:
            return 0, c.num_reqs, 0
        rows, others, queries, _ = split_decodes_and_prefills(c, self.most_queries)
        return rows, others, queries

    def _metadata(self, c: CommonAttentionMetadata) -> PackedMetadata:
        if c.causal is not True:
            raise UnsupportedError("packedkv: drafts that see each other are not served; use another kind of drafts.")
        rows, prefills, decodes = self._split(c)
        chunks = []
        if prefills:
            at = c.query_start_loc_cpu.tolist()
            # exact on the host for prompts, but not for a draft model's: there the row has a token more
            exact = c.seq_lens_cpu_upper_bound is None or self.drafts or c.seq_lens.device.type == "cpu"
            lengths = (c.seq_lens if exact else c.seq_lens_cpu_upper_bound).tolist()
            most = self.vllm_config.model_config.max_model_len
            for i in range(rows, c.num_reqs):
                over = max(0, lengths[i] - most)  # a draft behind the longest request
                if at[i + 1] - over > at[i]:
                    chunks.append((i, at[i], at[i + 1] - over, lengths[i] - over))
        prompts = self._prompts(chunks, c.block_table_tensor)
        if self.vllm_config.speculative_config is None:
            return PackedMetadata(rows, chunks, c.block_table_tensor, c.seq_lens, c.block_table_tensor, prompts)
        if self.expanded is None:
            # the first batch is one of a profiling run: graphs that are captured later find these addresses
            wide = max(self.shared.most, self.vllm_config.compilation_config.max_cudagraph_capture_size or 0)
            self.expanded = Expanded(wide, c.block_table_tensor.shape[1], self.device)
        longest = self.vllm_config.model_config.max_model_len
        self.expanded.put(c, rows, decodes, longest)
        several = None
        if self.joint and rows < decodes:
            several = Several(c.query_start_loc[: rows + 1], self.most_queries, longest)
        return PackedMetadata(
            decodes, chunks, c.block_table_tensor, self.expanded.lengths, self.expanded.tables, prompts, several,
            c.seq_lens[:rows],
        )  # fmt: skip

    def _prompts(self, chunks: list[Chunk], table: Tensor) -> dict[int, Prompts]:
        """Return how a GPU's kernels attend the chunks, for each sliding window."""
        if not chunks or not self.first.batched:
            return {}
        most, pending, rooms = self.first.most_tokens(longest_sequence(self.vllm_config)), self.pending, [Room()]
        prompts = {}
        for window in self.windows:
            sight = Sight(window, self.kv_cache_spec.block_size)
            found, alone = gathered(chunks, most, sight)
            if pending is None:
                together: list[Any] = [Chunks.of(own, table, rooms[0], sight) for own in found]
            else:  # which hold all own tokens of a step at once
                rooms += [Room() for _ in found[len(rooms) :]]
                given = pending.slot, pending.unit, pending.page_tokens
                together = [
                    GroupChunks.of(own, table, *given, room, pending.halves, window)
                    for own, room in zip(found, rooms, strict=False)
                ]
            prompts[window] = Prompts(together, alone)
        return prompts


def _log_preset(impls: list[Any], page_tokens: int) -> None:
    """Log what the layers of this process hold, in numbers that servers can be compared by."""
    lead = impls[0]
    layers = [impl.packed for impl in impls if impl.kv_sharing_target_layer_name is None]
    numbers = sum(2 * layer.heads * layer.head_dim for layer in layers)
    bits = 8 * sum(layer.heads * layer.token_bytes(page_tokens) for layer in layers) / numbers
    params = lead.options.params
    logger.info(
        "packedkv: preset %s: %.4g bits a number, %.2fx as many tokens as 16 bit",
        *(lead.options.scheme, bits, 16 / bits),
    )
    logger.info(
        "packedkv: seed %d, params %s, %d of %d layers hold keys without their mean, identity %s-%d",
        *(lead.options.seed, "none" if params is None else f"{params.file} ({params.sha256[:12]})"),
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
    slow = Counter(layer.unserved for layer in layers if layer.unserved)
    for why, count in slow.items():
        logger.warning(
            "packedkv: %d of %d layers are served by the reference, which is slow: %s", count, len(layers), why
        )
