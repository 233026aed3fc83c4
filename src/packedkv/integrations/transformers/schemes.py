"""The scheme of each layer of a model: what its kind of attention leaves of it, and the mean of its keys."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from packedkv.errors import FitError, ShapeError
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.biases import biases_of, is_followed, rotary_of
from packedkv.integrations.transformers.plan import LayerPlan, ModelPlan
from packedkv.ops.precision import without_modes
from packedkv.scheme import KVScheme, Mean
from packedkv.store.site import MEAN, MeanRemoval, is_missing

logger = logging.getLogger(__name__)


def by_layer(plan: ModelPlan, scheme: KVScheme) -> list[KVScheme]:
    """Scheme of each of ``kv_layers``; outer layers are those of a stack."""
    return [scheme.for_layer(i, len(stack)) for stack in plan.stacks for i in range(len(stack))]


def of_kind(scheme: KVScheme, layer: LayerPlan) -> KVScheme:
    """Scheme of one layer without what its kind of attention has no use for."""
    if layer.is_cross:
        return scheme.without_windows()
    return scheme if layer.window is None or not scheme.sink else replace(scheme, sink=0)


def check_layouts(plan: ModelPlan, schemes: Sequence[KVScheme], page_tokens: int | None = None) -> None:
    """Validate head_dim and page size for the codecs of every layer, before any token is seen.

    Raises
    ------
    ShapeError
    """
    seen = set()
    for layer, scheme in zip(plan.kv_layers, schemes, strict=True):
        if layer.head_dim is None or (asked := (id(scheme), layer.head_dim)) in seen:
            continue
        seen.add(asked)
        try:
            scheme.page_layout(layer.head_dim, page_tokens)
        except ShapeError as error:
            raise ShapeError(f"{plan.name}, layer {layer.index}: {error}") from error


@without_modes
def decided(
    model_or_config: Any, plan: ModelPlan, scheme: KVScheme, given: LayerParams | None = None
) -> list[KVScheme]:
    """Schemes of the model's KV layers; constants given, the codec or the key biases decide ``mean=auto``."""
    schemes = by_layer(plan, scheme)
    if all(own.mean != "auto" for own in schemes):
        return schemes
    biases = biases_of(model_or_config, plan)
    means = [own.mean for own in schemes]
    if biases is not None and (biases.layers or biases.unread):
        means = biases.means(scheme)
        if not given:
            logger.info("packedkv: %s", biases.summary(scheme, means))
    found = []
    made: dict[tuple[int, Mean], KVScheme] = {}
    for layer, own, mean in zip(plan.kv_layers, schemes, means, strict=True):
        if own.mean == "auto":
            keys = (given or {}).get(layer.index, {}).get("key")
            if keys:
                mean = "pre" if MEAN in keys else "none"
            elif own.key.without_mean and isinstance(model_or_config, torch.nn.Module):
                mean = "pre" if is_followed(model_or_config, layer) else "post"
            chosen: Mean = "none" if mean == "auto" else mean
            if (id(own), chosen) not in made:
                made[id(own), chosen] = replace(own, mean=chosen)
            own = made[id(own), chosen]
        found.append(own)
    return found


def means_of(
    model_or_config: Any, plan: ModelPlan, schemes: Sequence[KVScheme], given: LayerParams
) -> dict[int, MeanRemoval]:
    """Means of the keys by layer; a layer with a small bias has none, where the weights give those of others.

    Raises
    ------
    FitError
        The mean before RoPE is asked for, and only a config is at hand.
    UnsupportedError
        It is unknown how the model turns its keys.
    """
    means: dict[int, MeanRemoval] = {}
    for layer, own in zip(plan.kv_layers, schemes, strict=True):
        if own.mean not in ("pre", "post"):
            continue
        fitted = given.get(layer.index, {})
        mean = fitted.get("key", {}).get(MEAN)
        if own.mean == "post":
            means[layer.index] = MeanRemoval("post", None, mean, "first tokens" if mean is None else "params")
            continue
        if not isinstance(model_or_config, torch.nn.Module):
            raise FitError(
                f"{plan.name}: mean=pre needs the rotary embedding and the biases of the model, which a config does "
                f"not have; pass the model itself, or use mean=post or mean=none."
            )
        rotary = rotary_of(model_or_config, layer)
        waits = own.key.fit_tokens > 1 and is_missing(own.key, fitted, "key")
        biases = None if waits else biases_of(model_or_config, plan)
        if mean is not None:
            means[layer.index] = MeanRemoval("pre", rotary, mean, "params")
        elif not biases or layer.index in biases.unread:
            means[layer.index] = MeanRemoval("pre", rotary)
        elif layer.index in biases.layers:
            means[layer.index] = MeanRemoval("pre", rotary, biases.layers[layer.index].mean[None], "weights")
    return means
