"""vLLM's attention backend, implemented by ``EngineLayer``."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from packedkv.attention import Seen
from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.bind import ServedModel, impls_of
from packedkv.integrations.vllm.engine_args import check_engine, leaves_bytes_to_us
from packedkv.integrations.vllm.fitting import fitted_file
from packedkv.integrations.vllm.groups import GroupedLayer
from packedkv.integrations.vllm.layer import EngineLayer
from packedkv.integrations.vllm.options import EXAMPLE, Options, read_options
from packedkv.integrations.vllm.pending import PendingGroups
from packedkv.integrations.vllm.servable import BLOCK, PAGE_STEP, check_layer, page_step, preferred_page
from packedkv.integrations.vllm.step import (
    PackedBuilder,
    PackedMetadata,
    Prompts,
    SharedStep,
    bound_layer,
    longest_sequence,
    metadata_of,
)
from packedkv.kernels.cuda.build import LEAST
from packedkv.kernels.tokens import Rules, StepTokens
from packedkv.store.pages import rows_bytes
from packedkv.store.positions import part_of


@lru_cache(maxsize=8)
def _options(additional: str, dtype: str, made: Path | None) -> Options | None:
    return read_options(json.loads(additional), dtype, made)


def options_of(config: VllmConfig, made: Path | None = None) -> Options | None:
    """Read packedkv's options from the configuration, ``made`` as in ``read_options``; None: there are none."""
    additional = config.additional_config
    plain = dict(additional) if isinstance(additional, dict) else {}
    return _options(json.dumps(plain, default=str), config.cache_config.cache_dtype, made)


def current_options() -> Options | None:
    """``options_of`` the configuration of the engine that is being built; None outside of that."""
    config = get_current_vllm_config_or_none()
    return None if config is None else options_of(config)


class PackedBackend(AttentionBackend):  # type: ignore[misc]
    """``CUSTOM``: packed pages."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    token_bytes: ClassVar[int | None] = None
    """Bytes of a token's codes in one KV head; None before the layer is bound."""
    sink_bytes: ClassVar[int] = 0
    """Bytes of one KV head that every block reserves for first tokens in 16 bit."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PackedImpl"]:
        return PackedImpl

    @staticmethod
    def get_builder_cls() -> type["PackedBuilder"]:
        return PackedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # whole groups of tokens, at which no plane of a page needs padding
        return [MultipleOf(_step())]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        options = current_options()
        return BLOCK if options is None else preferred_page(options.scheme)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a block is a run of pages, one per head

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return leaves_bytes_to_us(kv_cache_dtype)

    supports_sliding_window = supports_sink = classmethod(lambda cls: True)
    supports_per_head_quant_scales = supports_sink  # a checkpoint may have scales of another KV cache, not used here

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= LEAST

    @classmethod
    def supports_combination(cls, head_size: int, *args: Any, **more: Any) -> str | None:
        options = current_options()
        if options is not None and len(options.scheme.layer_schemes) == 1:
            try:
                check_layer(options.scheme, head_size, fitted=options.fitted)
            except UnsupportedError as error:
                return str(error)
        return None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if spec.state_content_bytes is not None:
            return spec
        content, sink_bytes = cls.token_bytes, cls.sink_bytes
        if content is None:  # before layers are bound: as inner layers
            options = current_options()
            if options is None:
                return spec
            step, scheme = _step(), options.scheme
            content = scheme.page_layout(spec.head_size, step).page_bytes // step
            sink_bytes = rows_bytes(scheme.sink, spec.head_size)
        tokens = BLOCK if spec.block_size == 1 else spec.block_size  # 1: vLLM compares types of layers
        return replace(spec, dtype=torch.uint8, state_content_bytes=content + -(-sink_bytes // tokens))


def _step() -> int:
    options = current_options()
    return PAGE_STEP if options is None else page_step(options.scheme)


class PackedImpl(AttentionImpl[PackedMetadata]):  # type: ignore[misc]
    """Attention of one layer; arguments as vLLM passes them."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        self.config = get_current_vllm_config()
        options = options_of(self.config)
        if options is None:
            raise UnsupportedError(f"packedkv: no preset is named; add {EXAMPLE}.")
        absent = {"chunk_lookback": -1}  # this value means it is not used
        unknown = [n for n, x in more.items() if x is not None and x is not False and absent.get(n, x is None) != x]
        if alibi_slopes is not None:
            unknown.append("alibi_slopes")
        if unknown:
            raise UnsupportedError(f"packedkv: the model's attention has {unknown[0]}, which it does not compute.")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(
                f"packedkv: a layer of type {attn_type!r} keeps no cache of a decoder; serve encoders and "
                f"encoder-decoder models without packedkv in --additional-config."
            )
        if not PackedBackend.supports_kv_cache_dtype(kv_cache_dtype):
            raise UnsupportedError(
                f"packedkv: --kv-cache-dtype, or the checkpoint, asks for a KV cache of {kv_cache_dtype}; give "
                f"--kv-cache-dtype bfloat16."
            )
        check_engine(self.config, options)
        others = impls_of(self.config, PackedImpl)
        # vLLM builds draft models after the model is loaded
        self.draft = any(impl.packed is not None for impl in others.values())
        models = [impl.model for impl in others.values()]
        if not models:
            made = fitted_file(self.config, options) if options.to_fit else None
            models = [ServedModel(self.config, options_of(self.config, made) or options, PackedBackend)]
        self.model: ServedModel = models[0]
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.rules = Rules(self.scale, Seen(window=sliding_window or 0, softcap=float(logits_soft_cap or 0.0)), sinks)
        self.modules: list[nn.Module] = []
        """The modules around the layer, once ``weights.find_modules`` has found them."""
        self.packed: EngineLayer | None = None
        self.digest = ""
        self.shared: SharedStep | None = None
        self.pending: PendingGroups | None = None
        self.leads = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.model.bind(self, act_dtype)

    # -- a step --------------------------------------------------------------------------------------------------------

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        count = slot_mapping.shape[0]
        if kv_cache.numel() == 0 or count == 0:
            return
        packed, m, shared = bound_layer(self), metadata_of(layer), self.shared
        key, value = key[:count], value[:count]
        assert shared is not None
        if self.leads:
            shared.begin_step()
        positions = shared.positions(count, m) if packed.mean is not None else None
        if packed.unserved:
            packed.write(key, value, kv_cache, slot_mapping, positions)
            return
        if m is not None and m.chunks and not packed.batched:
            # a CPU's kernels take a chunk as one sequence; the tokens before the chunks are decode steps
            for row, first, last, seq_len in m.chunks:
                at = None if positions is None else part_of(positions, first, last)
                packed.encode_chunk(key[first:last], value[first:last], kv_cache, m.block_table[row], seq_len, at)
            key, value, slot_mapping = key[: m.decodes], value[: m.decodes], slot_mapping[: m.decodes]
            positions = None if positions is None else part_of(positions, 0, m.decodes)
        if slot_mapping.shape[0]:
            packed.encode(key, value, kv_cache, slot_mapping, positions)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PackedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("packedkv: fused quantization of the output is not computed; switch that pass off.")
        if attn_metadata is None:  # a profiling run; before there is a cache it measures memory
            if kv_cache.numel() == 0 and query.is_cuda:
                packed = bound_layer(self)
                most = packed.most_tokens(longest_sequence(self.config))
                size = packed.prefill_bytes(query.shape[0], most, self.num_heads, self.rules)
                torch.empty(size, dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        packed, m = bound_layer(self), attn_metadata
        query, out = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        if isinstance(packed, GroupedLayer):
            self._forward_groups(packed, query, key, value, kv_cache, m, out)
            return output
        if m.decodes:
            out[: m.decodes] = self._decode(packed, query[: m.decodes], kv_cache, m)
        together, alone = self._chunks(packed, m)
        for one in together:
            part = slice(one.first, one.last)
            packed.attend_chunks(query[part], kv_cache, one, self.rules, out[part])
        attend = packed.attend if packed.unserved else packed.prefill
        for row, first, last, seq_len in alone:
            out[first:last] = attend(query[first:last], kv_cache, m.block_table[row], seq_len, self.rules)
        return output

    def _chunks(self, packed: EngineLayer, m: PackedMetadata) -> Prompts:
        if m.chunks and packed.takes_chunks(self.rules):
            return m.prompts[self.rules.seen.window]
        return [], m.chunks

    def _forward_groups(
        self, packed: GroupedLayer, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, m: PackedMetadata, out: Tensor
    ) -> None:
        """Store new tokens and attend, into ``out``: a query also reads the pending tokens of its group."""
        pending, n, rules, kernels = self.pending, m.decodes, self.rules, not packed.unserved
        assert pending is not None
        assert pending.page_tokens == cache.shape[2]
        together, alone = self._chunks(packed, m)
        parts = [slice(one.first, one.last) for one in together]
        # all tokens are stored before any query attends: a prompt may find blocks that another one fills in this step
        dense = packed.store_steps(k[:n], v[:n], cache, pending) if n else {}
        stored = [packed.store_chunks(k[x], v[x], cache, one) for one, x in zip(together, parts, strict=True)]
        recent = []
        for row, first, last, seq_len in alone:
            blocks, slot = m.block_table[row], pending.slot[row : row + 1]
            recent.append(
                packed.take_chunk(k[first:last], v[first:last], cache, blocks, seq_len, slot, kernels=kernels)
            )
        if n:
            space = self._workspace(packed, q, cache, m)
            tokens = StepTokens(cache, m.query_table[:n], m.seq_lens[:n], workspace=space)
            out[:n] = packed.attend_steps(q[:n], dense, tokens, pending, rules)
        for one, x, kv in zip(together, parts, stored, strict=True):
            packed.attend_chunk_groups(q[x], kv, cache, one, rules, out[x])
        attend = packed.prefill_request if kernels else packed.attend_request
        for (row, first, last, seq_len), rows in zip(alone, recent, strict=True):
            out[first:last] = attend(q[first:last], cache, m.block_table[row], seq_len, rules, rows)

    def _decode(self, packed: EngineLayer, q: Tensor, kv_cache: Tensor, m: PackedMetadata) -> Tensor:
        shared, rules = self.shared, self.rules
        assert shared is not None
        space = self._workspace(packed, q, kv_cache, m)
        if m.starts is not None and m.totals is not None:
            tokens = StepTokens(kv_cache, m.block_table[: m.totals.shape[0]], m.totals, workspace=space)
            tokens = tokens._replace(starts=m.starts, queries=shared.queries, longest=m.longest)
        else:
            seq_lens = m.seq_lens[: m.decodes]
            fields = shared.visible(seq_lens, packed.sink, rules.seen.window)
            tokens = StepTokens(kv_cache, m.query_table[: m.decodes], seq_lens, workspace=space, **fields)
        return packed.decode(q, tokens, rules)

    def _workspace(self, packed: EngineLayer, q: Tensor, kv_cache: Tensor, m: PackedMetadata) -> Tensor | None:
        """Memory for decode steps that a graph captures; a CPU's kernels have their own."""
        if not q.is_cuda:
            return None
        shared = self.shared
        assert shared is not None
        if shared.workspace is None:  # the first call is a profiling run, outside of any graph
            columns, most = m.block_table.shape[1], max(shared.most, m.decodes)
            size = packed.workspace_bytes(most, self.num_heads, kv_cache, columns, self.rules)
            if (queries := shared.queries) > 1 and packed.takes_several(self.rules):
                most, heads = -(-most // queries), self.num_heads * queries
                size = max(size, packed.workspace_bytes(most, heads, kv_cache, columns, self.rules))
            shared.workspace = torch.empty(-(-size // 4), dtype=torch.float32, device=q.device)
        return shared.workspace
