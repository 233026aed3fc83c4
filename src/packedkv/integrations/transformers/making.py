"""The parts of which ``cache_for`` builds a cache: the site of each layer, its kernels, and the layers themselves."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from packedkv.cache.growing import GrowingCache
from packedkv.cache.host import LayerCache
from packedkv.cache.static import StaticCache
from packedkv.errors import BrokenPresetError, KVError, PackedKVWarning, UnsupportedError
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.arrivals import Arrivals
from packedkv.integrations.transformers.biases import biases_of
from packedkv.integrations.transformers.cross import CrossLayer
from packedkv.integrations.transformers.layers import PackedCacheLayer
from packedkv.integrations.transformers.plan import Attention, ModelPlan, plan_for
from packedkv.integrations.transformers.queries import query_energies
from packedkv.integrations.transformers.rope import PositionHook, hook_of
from packedkv.integrations.transformers.schemes import means_of, of_kind
from packedkv.integrations.transformers.windowed import WindowedLayer
from packedkv.kernels.choose import Kernels
from packedkv.key_bias import Probe
from packedkv.ops.precision import without_modes
from packedkv.probe import OutlierProbe
from packedkv.scheme import KVScheme
from packedkv.store.site import LayerSite, is_missing


def unfused_reason(model_or_config: Any) -> str:
    """Return why a model does not use the CPU kernels by default, whatever the scheme, or ``""`` if it may."""
    device = getattr(model_or_config, "device", None)
    if device is None or device.type != "cpu":
        return "kernels are the default on a CPU only; attention='fused' asks for them"
    try:
        plan_for(model_or_config, "fused", encoder_decoder=True)
    except UnsupportedError as error:
        return str(error)
    return ""


def check_rounding(scheme: KVScheme, attention: Attention) -> None:
    """Raise if the scheme rounds queries where the model multiplies them itself."""
    if scheme.query_error and attention == "decoded":
        raise UnsupportedError(
            f"{scheme} rounds queries inside attention, which attention='decoded' leaves to the model; "
            f"use attention='streamed' after model.set_attn_implementation('packedkv')."
        )


@without_modes
def sites_of(
    model_or_config: Any, plan: ModelPlan, schemes: Sequence[KVScheme], given: LayerParams, seed: int
) -> list[LayerSite]:
    """What each layer with K and V encodes with: its scheme, constants, and mean of the keys."""
    means = means_of(model_or_config, plan, schemes, given)
    energies = _energies(model_or_config, plan, schemes, given)
    return [
        LayerSite(
            of_kind(own if layer.index in means or own.mean == "none" else replace(own, mean="none"), layer),
            layer.index,
            seed,
            given.get(layer.index),
            mean=means.get(layer.index),
            most=None if layer.window is None else layer.window - 1,
            energy=energies.get(layer.index),
        )
        for layer, own in zip(plan.kv_layers, schemes, strict=True)
    ]


def _energies(
    model_or_config: Any, plan: ModelPlan, schemes: Sequence[KVScheme], given: LayerParams
) -> dict[int, torch.Tensor]:
    """Query energies of the layers whose key constants are fitted on the first tokens."""
    waiting = [
        layer.index
        for layer, own in zip(plan.kv_layers, schemes, strict=True)
        if own.key.fit_tokens > 1 and is_missing(own.key, given.get(layer.index, {}), "key")
    ]
    known = query_energies(model_or_config) if waiting and isinstance(model_or_config, torch.nn.Module) else {}
    return {index: known[index] for index in waiting if index in known}


def kernels_of(
    plan: ModelPlan, sites: Sequence[LayerSite], model_or_config: Any, max_len: int | None, page_tokens: int | None
) -> Kernels:
    """Choose the kernels of a model's layers.

    Raises
    ------
    UnsupportedError
        They do not support a layer on the model's device (with a config, which has none, this is checked at the first
        token), or a static cache is requested for sliding layers.
    """
    kernels = Kernels(page_tokens, static=max_len is not None)
    device, dtype = (getattr(model_or_config, name, None) for name in ("device", "dtype"))
    for layer, site in zip(plan.kv_layers, sites, strict=True):
        if layer.value_dim not in (None, layer.head_dim):
            raise UnsupportedError(
                f"{plan.name}, layer {layer.index}: keys have {layer.head_dim} channels and values {layer.value_dim}; "
                f"kernels take one head_dim. Use attention='decoded' or 'streamed'."
            )
        if device is None or layer.head_dim is None:
            continue
        try:
            engine = kernels.serve(site.scheme, layer.head_dim, dtype or torch.float16, device).engine
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{plan.name}, layer {layer.index}: {error}. Use attention='decoded' or 'streamed'."
            ) from error
        engine.expect_layer()
    if max_len is not None and len(plan.stacks) > 1:
        raise UnsupportedError(
            f"{plan.name}: an encoder-decoder model has no static cache (max_len={max_len}) with fused attention; "
            f"leave max_len out."
        )
    if max_len is not None and any(layer.window is not None for layer in plan.kv_layers):
        raise UnsupportedError(
            f"{plan.name}: sliding layers free their oldest tokens, which a static cache (max_len={max_len}) does "
            f"not; leave max_len out."
        )
    return kernels


def layers_of(
    model_or_config: Any,
    plan: ModelPlan,
    sites: Sequence[LayerSite],
    kernels: Kernels | None,
    arrivals: Arrivals,
    max_len: int | None,
    options: Mapping[str, Any],
) -> list[Any]:
    """The cache's layers, one for each of the model's that has a cache; without ``kernels`` the reference's."""
    page_tokens, packed = options["page_tokens"], iter(sites)
    layers: list[Any] = []
    hook: PositionHook | None = None
    for planned in plan.layers:
        if not planned.holds_kv:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[planned.type](**planned.options))
            continue
        site = next(packed)
        cache: LayerCache
        if kernels is None:
            cache = LayerCache(site, page_tokens=page_tokens, capacity=0 if planned.is_cross else max_len or 0)
        elif max_len:
            cache = StaticCache(site, page_tokens=page_tokens, capacity=max_len, kernels=kernels)
        else:
            cache = GrowingCache(site, page_tokens=page_tokens, kernels=kernels)
        common = cache, planned.index, options["attention"], options["prefill"], arrivals
        if planned.window is not None:
            layers.append(WindowedLayer(*common, window=planned.window, kind=planned.type))
        else:
            layers.append((CrossLayer if planned.is_cross else PackedCacheLayer)(*common))
        if cache.places_tokens and not planned.is_cross:
            hook = hook or hook_of(model_or_config)
            layers[-1].hook = hook
    return layers


class Trial:
    """Whether a model takes a cache with another spec; errors name such specs only.

    Parameters
    ----------
    make : callable
        (model or config, spec) -> cache.
    model_or_config : PreTrainedModel or PreTrainedConfig
        A model is not kept alive, copied or pickled with a cache.
    """

    def __init__(self, make: Callable[[Any, str], Any], model_or_config: Any) -> None:
        self._make = make
        is_model = isinstance(model_or_config, torch.nn.Module)
        self._model = weakref.ref(model_or_config) if is_model else lambda: model_or_config

    def __call__(self, spec: str) -> bool:
        """Make an empty cache, and drop it."""
        if (model_or_config := self._model()) is None:
            return False
        try:
            self._make(model_or_config, spec)
        except KVError:
            return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trial":
        """Return this trial: the copy of a cache is of the same model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a trial without a model, which accepts nothing."""
        return Trial, (self._make, type(self))


@without_modes
def outlier_probe(
    model_or_config: Any,
    plan: ModelPlan,
    scheme: KVScheme,
    given: LayerParams,
    action: Probe,
    starts: Trial,
) -> OutlierProbe | None:
    """Check a scheme against the model's key biases, and return the probe of the first prefill.

    ``starts`` tries other specs, of which errors name those that a cache can be made with.
    """
    if action == "off":
        return None
    biases = biases_of(model_or_config, plan)
    watch = OutlierProbe(scheme, action, biases, starts)
    if biases and (why := biases.refusal(scheme, params=given, starts=starts)):
        if action == "refuse":
            raise BrokenPresetError(why)
        warnings.warn(why, PackedKVWarning, stacklevel=4)
        watch.warned = True
    return watch
