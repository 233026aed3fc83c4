"""A cache of transformers over the oracle of ``tests.fuzz``: plain tensors, no pages, slots, runs or chunks."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import packedkv
from packedkv.integrations.transformers.plan import plan_for
from packedkv.store.site import LayerSite
from tests.fuzz.oracle import LayerTokens


class OracleLayer(CacheLayerMixin):
    is_croppable = True
    supports_early_init = False

    def __init__(self, scheme: packedkv.KVScheme, layer: int, seed: int, prefill: str, window: int | None) -> None:
        super().__init__()
        scheme = scheme if window is None else packedkv.KVScheme(scheme.key, scheme.value, 0, scheme.window)
        self.tokens = LayerTokens(LayerSite(scheme, layer, seed))
        self.prefill, self.window = prefill, window
        self.is_sliding = window is not None
        self.seen, self.record_past = 0, False

    def lazy_initialization(self, *_: Any) -> None: ...

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        exact = self.seen == 0 and self.prefill == "exact"
        visible = keys.shape[2] + (self.seen if self.window is None else min(self.seen, self.window - 1))
        self.seen += keys.shape[2]
        stored = slice(None)
        if self.window is not None and exact and not self.record_past:
            stored = slice(max(keys.shape[2] - self.window + 1, 0), None)
        self.tokens.append(keys[:, :, stored], values[:, :, stored])
        k, v = (keys, values) if exact else (x[:, :, -visible:].clone() for x in self.tokens.decode())
        if not self.record_past:
            self._shrink()
        return k, v

    def _shrink(self) -> None:
        if self.window is not None:
            self.tokens.evict(max(len(self.tokens) - self.window + 1, 0))

    def crop(self, tokens_to_remove: int) -> None:
        left = min(tokens_to_remove, self.seen) if tokens_to_remove > 0 else self.seen + tokens_to_remove
        self.tokens.crop(len(self.tokens) - (self.seen - left))
        self.seen = left
        self._shrink()

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        past = self.seen if self.window is None else min(self.seen, self.window - 1)
        return past + query_length, self.seen - past

    def reset(self) -> None:
        self.seen = 0
        self.tokens.reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.tokens.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tokens.select(torch.arange(self.tokens.batch).repeat_interleave(repeats))


def oracle_for(model: Any, spec: str, *, prefill: str = "exact", seed: int = 0) -> Cache:
    """The oracle's cache for ``model``."""
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    plan, scheme = plan_for(model, "decoded"), packedkv.get(spec)
    total, at, layers = len(plan.kv_layers), 0, []
    for layer in plan.layers:
        if not layer.holds_kv:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer.type](**layer.options))
            continue
        layers.append(OracleLayer(scheme.for_layer(at, total), layer.index, seed, prefill, layer.window))
        at += 1
    return Cache(layers=layers)
