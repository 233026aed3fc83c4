"""Build the layers of a packed cache: each layer's scheme, the mean of its keys, its constants and its kernels."""

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from packedkv.cache.fused import FusedLayerCache
from packedkv.cache.layer import LayerCache
from packedkv.codec import ROLES, Site
from packedkv.errors import (
    BrokenPresetError,
    FitError,
    KVError,
    PackedKVWarning,
    ShapeError,
    SpecError,
    UnsupportedError,
)
from packedkv.files.params import FittedParams, LayerParams, check_given
from packedkv.integrations.transformers.attention_hooks import implementation_of
from packedkv.integrations.transformers.biases import biases_of
from packedkv.integrations.transformers.deferred import Deferred
from packedkv.integrations.transformers.layers import CrossLayer, PackedCacheLayer
from packedkv.integrations.transformers.plan import (
    ATTENTION_NAME,
    ModelPlan,
    decoder_config,
    load_params,
    plan_for,
)
from packedkv.integrations.transformers.queries import query_energies
from packedkv.integrations.transformers.rope import has_rotary, hook_of, rotary_of
from packedkv.integrations.transformers.source_check import adds_position_bias
from packedkv.kernels.choose import Kernels
from packedkv.key_bias import Probe
from packedkv.ops.precision import without_modes
from packedkv.probe import OutlierProbe
from packedkv.registry import get
from packedkv.scheme import KVScheme, Mean
from packedkv.store.site import MEAN, LayerSite, MeanRemoval, check_role, is_missing

logger = logging.getLogger("packedkv")


class Request(NamedTuple):
    """Arguments of ``cache_for`` besides the scheme."""

    model: Any  # or its config
    options: dict[str, Any]  # prefill, attention, seed, page_tokens
    params: LayerParams | str | Path | None
    max_len: int | None
    action: Probe  # the option ``probe``


class Parts(NamedTuple):
    """Arguments of ``KVCache``."""

    layers: list[Any]
    scheme: KVScheme
    plan: ModelPlan
    options: dict[str, Any]
    probe: OutlierProbe | None
    unfused: str = ""


@without_modes
def build(request: Request, scheme: KVScheme) -> Parts:
    """Build the parts of an empty cache; errors as in ``cache_for``.

    With ``attention=None`` a model on a CPU or an NVIDIA GPU gets kernels, if they support every layer. Otherwise
    ``unfused`` of the result is the reason.
    """
    options, accepts = request.options, _acceptance(request)
    if options["attention"] is not None:
        return _built(request, scheme, accepts)
    try:
        _check_default(request.model)
        return _built(request._replace(options={**options, "attention": "fused"}), scheme, accepts)
    except BrokenPresetError:
        raise
    except UnsupportedError as error:
        unfused = str(error)
    request = request._replace(options={**options, "attention": "decoded"})
    return _built(request, scheme, accepts)._replace(unfused=unfused)


def _check_default(model: Any) -> None:
    """Raise UnsupportedError if ``attention=None`` leaves the attention implementation of a model as it is."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError("a config has no device; pass the model")
    if (used := implementation_of(decoder_config(model.config))) == ATTENTION_NAME:
        return
    if used == "eager" and model._supports_sdpa:  # without SDPA it is what transformers chose (GPT-OSS)
        raise UnsupportedError(
            "the model runs attention 'eager', which returns attention weights; attention='fused' replaces it"
        )
    if adds_position_bias(model):
        raise UnsupportedError("the attention of the model adds a position bias to its scores, which no kernel does")


def _acceptance(request: Request) -> Callable[[str], bool]:
    """Return whether a cache of another spec can be built, as a function that does not keep the model alive."""
    given, other = request.model, request._replace(model=None, params=None, action="off")
    model: Callable[[], Any] = weakref.ref(given) if isinstance(given, torch.nn.Module) else lambda: given

    def accepts(spec: str) -> bool:
        if (here := model()) is None:
            return False
        try:
            build(other._replace(model=here), get(spec))
        except KVError:
            return False
        return True

    return accepts


def _built(request: Request, scheme: KVScheme, accepts: Callable[[str], bool]) -> Parts:
    model, options, _, max_len, action = request
    attention, page_tokens, seed = options["attention"], options["page_tokens"], options["seed"]
    if scheme.query_error and attention == "decoded":
        raise UnsupportedError(
            f"{scheme} rounds queries inside attention, which attention='decoded' leaves to the model; "
            f"use attention='streamed'."
        )
    plan = plan_for(model, attention, encoder_decoder=True)
    schemes = layer_schemes(plan, scheme, page_tokens)
    given = _given(request, plan, scheme, schemes)
    schemes = resolve_means(model, plan, scheme, schemes, given)
    scheme = scheme.with_means([own.mean for own in schemes[: len(plan.stacks[0])]])
    sites = _sites(model, plan, schemes, given, seed)
    kernels = _kernels(request, plan, sites) if attention == "fused" else None
    probe = None
    if action != "off":
        biases = biases_of(model, plan)
        probe = OutlierProbe(scheme, action, biases, accepts)
        try:
            if biases:
                biases.check(scheme, params=given, starts=accepts)
        except BrokenPresetError as error:
            if action == "refuse":
                raise
            warnings.warn(str(error), PackedKVWarning, stacklevel=5)  # who called ``cache_for``
            probe.warned = True
    deferred, by_index = Deferred(len(sites), probe), {site.layer: site for site in sites}
    layers: list[Any] = []
    for planned in plan.layers:
        if not planned.holds_kv:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[planned.type](**planned.options))
            continue
        site = by_index[planned.index]
        if kernels is not None:
            cache: LayerCache = FusedLayerCache(site, page_tokens=page_tokens, capacity=max_len or 0, kernels=kernels)
        else:  # max_len is of the decoder, not of the encoder's output
            cache = LayerCache(site, page_tokens=page_tokens, capacity=0 if planned.is_cross else max_len or 0)
        layer = (CrossLayer if planned.is_cross else PackedCacheLayer)(
            cache, planned.index, attention, options["prefill"], deferred, window=planned.window or 0, kind=planned.type
        )
        if cache.places_tokens and not planned.is_cross:
            layer.hook = hook_of(model)
        layers.append(layer)
    return Parts(layers, scheme, plan, options, probe)


def layer_schemes(plan: ModelPlan, scheme: KVScheme, page_tokens: int | None = None) -> list[KVScheme]:
    """Scheme of each of ``kv_layers``; ShapeError if a codec cannot take a layer's head_dim or the page size."""
    schemes = [scheme.for_layer(i, len(stack)) for stack in plan.stacks for i in range(len(stack))]
    seen = set()
    for layer, own in zip(plan.kv_layers, schemes, strict=True):
        if layer.head_dim is None or (asked := (id(own), layer.head_dim)) in seen:
            continue
        seen.add(asked)
        try:
            own.page_layout(layer.head_dim, page_tokens)
        except ShapeError as error:
            raise ShapeError(f"{plan.name}, layer {layer.index}: {error}") from error
    return schemes


def _given(request: Request, plan: ModelPlan, scheme: KVScheme, schemes: Sequence[KVScheme]) -> LayerParams:
    """Constants by layer, after verifying that they fit model, scheme and seed."""
    params, seed = request.params, request.options["seed"]
    if params == "":
        raise SpecError("params='': expected the path of a file of `packedkv fit`, or None for no constants.")
    if isinstance(params, FittedParams | str | Path):
        params = load_params(params, request.model, scheme, seed=seed)
    given: LayerParams = {} if params is None else params
    check_given(plan.name, [layer.index for layer in plan.kv_layers], given)
    for layer, own in zip(plan.kv_layers, schemes, strict=True):
        constants = given.get(layer.index, {})
        for role in ROLES:
            codec = own.codec(role)
            if "queries" in codec.needs and role not in constants:
                raise FitError(
                    f"{scheme}: the {role} constants of layer {layer.index} are fitted with the model's queries, which "
                    f"a prefill does not show; run `packedkv fit MODEL {scheme} --text FILE -o PARAMS` and pass that "
                    f"file as params."
                )
            if layer.heads and layer.head_dim and constants:
                check_role(codec, Site(layer.index, role, layer.heads, layer.head_dim, seed), constants)
    return given


@without_modes
def resolve_means(
    model_or_config: Any, plan: ModelPlan, scheme: KVScheme, schemes: list[KVScheme], given: LayerParams | None = None
) -> list[KVScheme]:
    """Decide ``mean=auto`` of the KV layers' schemes: by constants given, the codec, or the key biases."""
    if all(own.mean != "auto" for own in schemes):
        return schemes
    biases = biases_of(model_or_config, plan)
    means = [own.mean for own in schemes]
    if biases is not None and (biases.layers or biases.unread):
        means = biases.means(scheme)
        if not given:
            logger.info("%s", biases.summary(scheme, means))
    resolved = []
    shared: dict[tuple[int, Mean], KVScheme] = {}
    for layer, own, mean in zip(plan.kv_layers, schemes, means, strict=True):
        if own.mean == "auto":
            keys = (given or {}).get(layer.index, {}).get("key")
            if keys:
                mean = "pre" if MEAN in keys else "none"
            elif own.key.without_mean and isinstance(model_or_config, torch.nn.Module):
                mean = "pre" if has_rotary(model_or_config, layer.index) else "post"
            chosen: Mean = "none" if mean == "auto" else mean
            own = shared.setdefault((id(own), chosen), replace(own, mean=chosen))
        resolved.append(own)
    return resolved


def _sites(
    model_or_config: Any, plan: ModelPlan, schemes: Sequence[KVScheme], given: LayerParams, seed: int
) -> list[LayerSite]:
    """What each layer with K and V encodes with: its scheme, constants, and mean of the keys."""
    sites, energies = [], None
    for layer, own in zip(plan.kv_layers, schemes, strict=True):
        fitted = given.get(layer.index, {})
        # whether constants of the keys are fitted on the first tokens; then their mean is as well
        fits_keys = own.key.fit_tokens > 1 and is_missing(own.key, fitted, "key")
        mean = _mean(model_or_config, plan, layer.index, own.mean, fitted.get("key", {}).get(MEAN), fits_keys)
        if mean is None and own.mean != "none":
            own = replace(own, mean="none")
        if fits_keys and energies is None:
            energies = query_energies(model_or_config) if isinstance(model_or_config, torch.nn.Module) else {}
        if layer.is_cross:  # sink and window are of no use there
            own = own.without_windows()
        elif layer.window is not None and own.sink:
            own = replace(own, sink=0)
        most = None if layer.window is None else layer.window - 1
        energy = energies.get(layer.index) if fits_keys and energies else None
        sites.append(LayerSite(own, layer.index, seed, given.get(layer.index), mean=mean, most=most, energy=energy))
    return sites


def _mean(
    model_or_config: Any, plan: ModelPlan, layer: int, kind: Mean, mean: Tensor | None, fits_keys: bool
) -> MeanRemoval | None:
    """What a layer subtracts from its keys; None: nothing, because the weights say that the layer's bias is small."""
    if kind == "post":
        return MeanRemoval("post", None, mean, "first tokens" if mean is None else "params")
    if kind != "pre":
        return None
    if not isinstance(model_or_config, torch.nn.Module):
        raise FitError(
            f"{plan.name}: mean=pre needs the rotary embedding and the biases of the model, which a config does "
            f"not have; pass the model itself, or use mean=post or mean=none."
        )
    rotary = rotary_of(model_or_config, layer)
    if mean is not None:
        return MeanRemoval("pre", rotary, mean, "params")
    biases = None if fits_keys else biases_of(model_or_config, plan)
    if not biases or layer in biases.unread:
        return MeanRemoval("pre", rotary)
    if (biased := biases.layers.get(layer)) is not None:
        return MeanRemoval("pre", rotary, biased.mean[None], "weights")
    return None


def _kernels(request: Request, plan: ModelPlan, sites: Sequence[LayerSite]) -> Kernels:
    """Choose the kernels of a model's layers; with a config, which has no device, at the first token."""
    max_len = request.max_len
    kernels = Kernels(request.options["page_tokens"], static=max_len is not None)
    device, dtype = (getattr(request.model, name, None) for name in ("device", "dtype"))
    for layer, site in zip(plan.kv_layers, sites, strict=True):
        where = f"{plan.name}, layer {layer.index}"
        if layer.value_dim not in (None, layer.head_dim):
            raise UnsupportedError(
                f"{where}: keys have {layer.head_dim} channels and values {layer.value_dim}; "
                f"kernels take one head_dim. Use attention='decoded' or 'streamed'."
            )
        if device is None or layer.head_dim is None:
            continue
        try:
            engine = kernels.serve(site.scheme, layer.head_dim, dtype or torch.float16, device).engine
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}. Use attention='decoded' or 'streamed'.") from error
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
