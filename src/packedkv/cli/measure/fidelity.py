"""Attention-output error of a scheme, layer by layer, on the model's own q, k, v, recorded after RoPE.

``|o^ - o| / |o|``, Frobenius norms over the recorded queries and heads, float32. A scheme compresses each layer's exact
k and v, so errors of earlier layers do not accumulate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packedkv.attention import attend_parts, rounded_queries
from packedkv.compressed import compress
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.attention_hooks import watched
from packedkv.registry import get
from packedkv.scheme import KVScheme

QUERIES = 256


@dataclass(frozen=True)
class LayerRecord:
    """One layer's attention inputs: the newest n queries ``[B, HQ, n, D]``, and k, v ``[B, H, N, D]``.

    ``mask`` is additive or boolean ``[B, 1 or HQ, n, N]``, or None for causal; ``softcap`` 0 for none; ``sinks`` are
    learned sink logits ``[HQ]``; ``source`` is the layer whose K and V it borrows.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    softcap: float
    sinks: Tensor | None
    source: int | None = None

    @property
    def owner(self) -> int:
        """The layer whose cache it reads."""
        return self.layer if self.source is None else self.source

    def output(self, k: Tensor, v: Tensor) -> Tensor:
        """Attention output ``[B, HQ, n, D]`` on other keys and values; float32."""
        q, total = self.q.float(), k.shape[2]
        return attend_parts(
            q, [(k, v)], total, scale=self.scale, mask=self.mask, sinks=self.sinks, softcap=self.softcap
        )


@dataclass(frozen=True)
class Fidelity:
    """Relative attention-output errors: mean over layers, the worst one, and all by layer."""

    mean: float
    worst: float
    worst_layer: int
    by_layer: dict[int, float]


@contextmanager
def record(model: Any, queries: int = QUERIES) -> Iterator[list[LayerRecord]]:
    """Record every attention layer's inputs while the block runs the model."""
    records: list[LayerRecord] = []

    def seen(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        n = min(queries, query.shape[2])
        sinks = options.get("s_aux")
        lender = None
        if getattr(module, "is_kv_shared_layer", False):  # the newest layer with the same keys has cached them
            lender = next((r for r in reversed(records) if torch.equal(r.k, key)), None)
        records.append(
            LayerRecord(
                layer=getattr(module, "layer_idx", len(records)),
                q=query[:, :, -n:].clone(),
                k=lender.k if lender else key.clone(),
                v=lender.v if lender else value.clone(),
                mask=None if mask is None else mask[..., -n:, : key.shape[2]].clone(),
                scale=options.get("scaling") or query.shape[-1] ** -0.5,
                softcap=options.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks.detach(),
                source=lender.owner if lender else None,
            )
        )

    with watched(model, seen):
        yield records


def attention_error(
    records: list[LayerRecord],
    exact: list[Tensor],
    spec: str | KVScheme,
    *,
    seed: int = 0,
    params: LayerParams | None = None,
) -> Fidelity:
    """Errors of one scheme on recorded layers.

    ``exact`` has ``record.output(record.k, record.v)`` of each. A layer that shares the K and V of another is
    compressed like it. Constants that ``params`` lacks are fitted on the recorded tensors.
    """
    scheme, given = get(spec), params or {}
    errors: dict[int, float] = {}
    caching = list(dict.fromkeys(r.owner for r in records))
    for r, o in zip(records, exact, strict=True):
        layer_scheme = scheme.for_layer(caching.index(r.owner), len(caching))
        packed = compress(layer_scheme, r.k, r.v, layer=r.owner, seed=seed, params=given.get(r.owner))
        rounded = replace(r, q=rounded_queries(r.q, packed.key.codec, packed.key.params, r.k.shape[1]))
        errors[r.layer] = ((rounded.output(*packed.decode()) - o).norm() / o.norm().clamp_min(1e-30)).item()
    worst = max(errors, key=lambda layer: errors[layer])
    return Fidelity(sum(errors.values()) / len(errors), errors[worst], worst, errors)
