"""The decoded-K/V oracle: a plain cache of full tensors that quantizes each token when the schedule says so.

Written to be obviously right, not fast: every token is a slice of one dense tensor plus a mark in a list. It shares the
codecs' maths (``codec.roundtrip``) with the library, and nothing else: no pages, slots, runs or chunks.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import kvcodec
from kvcodec.codec import Sample, Site, roundtrip, storage_dtype
from kvcodec.integrations.transformers.plan import plan_for


class OracleRole:
    """Keys or values of one layer: what attention reads of every token, and whether it has been encoded."""

    def __init__(self, scheme: kvcodec.KVScheme, role: str, layer: int, seed: int) -> None:
        self.scheme, self.role, self.layer, self.seed = scheme, role, layer, seed
        self.codec = scheme.codec(role)
        self.params: Any = None
        self.read: Tensor | None = None
        self.marks: list[str] = []

    def append(self, x: Tensor) -> None:
        if self.read is None:
            self.read = x[:, :, :0]
            self.codec = self.codec.for_dtype(x.dtype)
        rounded = x.to(storage_dtype(x.dtype))
        if self.params is None:
            site = Site(self.layer, self.role, x.shape[1], x.shape[3], self.seed)
            self.params = self.codec.fit(site, Sample(rounded))
        self.read = torch.cat([self.read, rounded.to(x.dtype)], 2)
        for _ in range(x.shape[2]):
            in_sink = len(self.marks) < self.scheme.sink and all(m == "sink" for m in self.marks)
            self.marks.append("sink" if in_sink else "dense")
        unit = self.codec.block_tokens
        while self.marks.count("dense") - self.scheme.window >= unit:
            first = self.marks.index("dense")
            block = self.read[:, :, first : first + unit]
            self.read[:, :, first : first + unit] = roundtrip(self.codec, block, self.params).to(x.dtype)
            self.marks[first : first + unit] = ["encoded"] * unit

    def keep(self, tokens: slice) -> None:
        if self.read is not None:
            self.read, self.marks = self.read[:, :, tokens].clone(), self.marks[tokens]

    def rows(self, index: Tensor) -> None:
        if self.read is not None:
            self.read = self.read[index]
            if "tensor" in self.codec.needs:
                self.params = {k: p[index] if p.shape[0] > 1 else p for k, p in self.params.items()}


class OracleLayer(CacheLayerMixin):
    is_croppable = True
    supports_early_init = False

    def __init__(self, scheme: kvcodec.KVScheme, layer: int, seed: int, prefill: str, window: int | None) -> None:
        super().__init__()
        scheme = scheme if window is None else kvcodec.KVScheme(scheme.key, scheme.value, 0, scheme.window)
        self.roles = [OracleRole(scheme, role, layer, seed) for role in ("key", "value")]
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
        for role, x in zip(self.roles, (keys, values), strict=True):
            role.append(x[:, :, stored])
        out = (keys, values) if exact else tuple(role.read[:, :, -visible:].clone() for role in self.roles)
        if not self.record_past:
            self._shrink()
        return out

    def _shrink(self) -> None:
        if self.window is not None:
            for role in self.roles:
                role.keep(slice(max(len(role.marks) - self.window + 1, 0), None))

    def crop(self, tokens_to_remove: int) -> None:
        left = min(tokens_to_remove, self.seen) if tokens_to_remove > 0 else self.seen + tokens_to_remove
        for role in self.roles:
            role.keep(slice(0, len(role.marks) - (self.seen - left)))
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
        for role in self.roles:
            role.read, role.params, role.marks = None, None, []

    def batch_select_indices(self, indices: Tensor) -> None:
        for role in self.roles:
            role.rows(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        for role in self.roles:
            if role.read is not None:
                role.rows(torch.arange(role.read.shape[0]).repeat_interleave(repeats))


def oracle_for(model: Any, spec: str, *, prefill: str = "exact", seed: int = 0) -> Cache:
    """The oracle's cache for ``model``."""
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    plan, scheme = plan_for(model, "decoded"), kvcodec.get(spec)
    total, at, layers = len(plan.kv_layers), 0, []
    for layer in plan.layers:
        if not layer.holds_kv:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer.type](**layer.options))
            continue
        layers.append(OracleLayer(scheme.for_layer(at, total), layer.index, seed, prefill, layer.window))
        at += 1
    return Cache(layers=layers)
