"""What each layer of a transformers model needs from its cache, or why it is refused; the model's identity."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import get_layer_types_and_kwargs

from packedkv.errors import UnsupportedError
from packedkv.files.params import WEIGHTS, FittedParams, ModelIdentity, figures, read_params
from packedkv.integrations.transformers.argument import KNOWN_VERSIONS, cache_argument, unwrapped
from packedkv.integrations.transformers.attention_hooks import implementation_of
from packedkv.integrations.transformers.source_check import check_use_of_cached
from packedkv.scheme import KVScheme

Attention = Literal["decoded", "streamed", "fused"]

ATTENTION_NAME = "packedkv"
"""Name under which the attention function is registered with transformers."""

CROSS = "cross_attention"
"""Type of the layers that hold K and V of an encoder's output; transformers has no name for them."""

_WINDOWED = ("sliding_attention", "chunked_attention")
_STATE_ONLY = ("linear_attention", "conv")
# a layer without attention, or one that borrows K and V: "dummy" stands for both from transformers 5.23 on
_EMPTY = ("moe", "mlp", "dummy")
_REASONS = {
    "hybrid": "it holds attention and recurrent state in one layer",
    "hybrid_sliding": "it holds attention and recurrent state in one layer",
    "indexed_attention": "it caches indexer keys beside K and V",
    "deepseek_sparse_attention": "it caches indexer keys beside K and V",  # transformers 5.17
    "qwen_sparse_attention": "it caches indexer keys beside K and V",  # transformers 5.17
    "minimax_m3_sparse": "it caches indexer keys beside K and V",
    "reference_sliding_attention": "its window slides over generated tokens alone and the prompt stays visible",
    "heavily_compressed_attention": "the model compresses its own cache",
    "compressed_sparse_attention": "the model compresses its own cache",
}
_ADDS_MASKS = ("bigbird_pegasus", "nllb-moe")
_OWN_CACHE = ("reformer", "xlnet", "rwkv", "xlstm", "minimax")


@dataclass(frozen=True)
class LayerPlan:
    """Properties of one cache layer; sizes as the config states them for this layer."""

    index: int  # layer of the model; cross-attention layers are numbered after the decoder's layers
    type: str  # transformers' name of the layer type, or cross_attention
    window: int | None = None  # tokens a query sees in a sliding or chunked layer, itself included; None: all
    holds_kv: bool = True  # False for layers that keep another state, or nothing
    heads: int | None = None  # KV heads
    head_dim: int | None = None
    value_dim: int | None = None  # channels of a value, where the config states them apart (MiMo-V2)
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of transformers' own layer of this type

    @property
    def is_cross(self) -> bool:
        """Whether the layer holds K and V of an encoder's output, written once."""
        return self.type == CROSS

    @property
    def holds_state(self) -> bool:
        """Whether the layer keeps a state that is not packed."""
        return self.type in _STATE_ONLY


@dataclass(frozen=True)
class ModelPlan:
    """The layers of a model."""

    name: str
    layers: tuple[LayerPlan, ...]
    softcap: float = 0.0

    @cached_property
    def kv_layers(self) -> tuple[LayerPlan, ...]:
        """The layers that hold K and V."""
        return tuple(layer for layer in self.layers if layer.holds_kv)

    @cached_property
    def stacks(self) -> tuple[tuple[LayerPlan, ...], ...]:
        """The layers that hold K and V: the decoder's own, and its cross-attention's, if it has any."""
        both = (tuple(layer for layer in self.kv_layers if layer.is_cross is cross) for cross in (False, True))
        return tuple(stack for stack in both if stack)

    @property
    def heads(self) -> int | None:
        """KV heads; None where the config does not state them, or layers differ (Gemma 4)."""
        return _common(layer.heads for layer in self.kv_layers)

    @property
    def head_dim(self) -> int | None:
        """Channels of a head; None where the config does not state them, or layers differ (Gemma 4)."""
        return _common(layer.head_dim for layer in self.kv_layers)


def plan_for(model_or_config: Any, attention: Attention, *, encoder_decoder: bool = False) -> ModelPlan:
    """Read the layers of a model, of its config, or of a model inside a wrapper.

    ``encoder_decoder``: whether the caller takes encoder-decoder models.

    Raises
    ------
    UnsupportedError
        If the model, or one of its layers, cannot be served; the text names the layer and the reason.
    """
    model_or_config = unwrapped(model_or_config)
    model = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
    config = model.config if model is not None else model_or_config
    if not isinstance(config, PreTrainedConfig):
        way = "For other models use packedkv.LayerCache on bare tensors."
        if isinstance(model_or_config, str):
            way = "Load the model first, e.g. with AutoModelForCausalLM.from_pretrained."
        raise UnsupportedError(
            f"got {type(model_or_config).__name__}; expected a transformers model or its config. {way}"
        )
    name = type(model).__name__ if model is not None else type(config).__name__
    text = decoder_config(config)
    crossed = config.is_encoder_decoder or text.is_encoder_decoder
    if crossed and not encoder_decoder:
        raise UnsupportedError(
            f"{name}: an encoder-decoder model; those are taken by cache_for and load_cache only. Use a decoder-only "
            f"model."
        )
    _check_model(name, model, text, crossed)
    _check_attention(name, model, config, text, attention)
    types = _types_and_options(name, text)
    if text.per_layer_attributes:
        sizes = [_heads(text.per_layer_config[i]) for i in range(len(types))]
    else:  # a config is slow to ask
        sizes = [_heads(text)] * len(types)
    layers = tuple(_layer(name, i, *of, *size) for i, (of, size) in enumerate(zip(types, sizes, strict=True)))
    if crossed:
        layers += tuple(LayerPlan(len(types) + i, CROSS, None, True, *size) for i, size in enumerate(sizes))
    if not any(layer.holds_kv for layer in layers):
        kinds = ", ".join(sorted({layer.type for layer in layers}))
        raise UnsupportedError(f"{name}: no layer caches keys and values (all are {kinds}); nothing to compress.")
    return ModelPlan(name, layers, float(getattr(text, "attn_logit_softcapping", None) or 0.0))


def decoder_config(config: Any) -> Any:
    """Config of what generates text; for a flat config of encoder and decoder with the decoder's number of layers."""
    text = config.get_text_config(decoder=True)
    layers = getattr(config, "num_decoder_layers", None)  # T5 and its kind state it beside the encoder's
    if config.is_encoder_decoder and layers is not None and layers != text.num_hidden_layers:
        text = copy.deepcopy(text)
        try:
            text.num_hidden_layers = layers
        except NotImplementedError:  # ProphetNet gives the encoder's by that name
            text.num_encoder_layers = layers
    return text


def _types_and_options(name: str, text: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each layer's type and the arguments of transformers' cache layer.

    transformers 5.17 and 5.18 give one dict for all layers, later ones a list with one for each.
    """
    found = get_layer_types_and_kwargs(text)
    types, options = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if isinstance(types, list | tuple):
        each = [options] * len(types) if isinstance(options, dict) else options
        if (
            isinstance(each, list | tuple)
            and len(each) == len(types)
            and all(isinstance(kind, str) for kind in types)
            and all(isinstance(own, dict) for own in each)
            and all("sliding_window" in own for kind, own in zip(types, each, strict=True) if kind in _WINDOWED)
        ):
            return list(zip(types, each, strict=True))
    raise UnsupportedError(
        f"{name}: transformers {transformers_version} describes the layers as {found!r:.200}; this version of "
        f"packedkv reads a list of layer types with one dict of options, or one for each layer, and sliding_window in "
        f"those of sliding and chunked layers. Install a transformers that it knows ({KNOWN_VERSIONS}), or a newer "
        f"packedkv."
    )


def _check_model(name: str, model: Any, text: Any, crossed: bool) -> None:
    encoder = not crossed and getattr(text, "is_decoder", None) is False and hasattr(text, "add_cross_attention")
    heads = "num_attention_heads"  # stated for all layers or for each, which is not read from the config itself
    attends = heads in (text.per_layer_attributes or ()) or getattr(text, heads, None) is not None
    if encoder or text.model_type in _OWN_CACHE or not attends or not hasattr(text, "vocab_size"):
        raise UnsupportedError(
            f"{name}: a model without an attention cache of keys and values; packedkv takes decoders with attention."
        )
    if model is not None:
        cache_argument(model)  # raises if its forward takes no cache
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:
        last = text.num_hidden_layers - 1
        raise UnsupportedError(
            f"{name}: layers 0..{last} use multi-head latent attention (kv_lora_rank={rank}): they cache one latent "
            f"and one RoPE key instead of K and V per head, which these codecs do not take."
        )


def _check_attention(name: str, model: Any, config: Any, text: Any, attention: Attention) -> None:
    if text.model_type in _ADDS_MASKS and implementation_of(text) == ATTENTION_NAME:
        raise UnsupportedError(
            f"{name}: its encoder computes with attention masks itself, and those of {ATTENTION_NAME!r} are boolean; "
            f"call model.set_attn_implementation('eager') first."
        )
    if attention == "decoded":
        return
    set_on = {implementation_of(c) for c in (config, text)}
    if model is None and any(set_on) and ATTENTION_NAME not in set_on:
        raise UnsupportedError(
            f"{name}: attention={attention!r} reads the packed cache inside the attention function, but this config "
            f"names {implementation_of(text)!r}; pass the model, whose attention cache_for sets."
        )
    if model is not None and ATTENTION_NAME not in set_on and not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"{name}: its attention does not go through transformers' attention interface, which "
            f"attention={attention!r} needs; use attention='decoded'."
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{name}: the last {text.num_kv_shared_layers} layers borrow K and V from earlier ones, which "
            f"attention={attention!r} does not hand on; use attention='decoded'."
        )
    if model is not None:
        try:
            check_use_of_cached(model)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{name}: {error}, which attention={attention!r} leaves packed; use attention='decoded'."
            ) from error


def _layer(name: str, index: int, kind: str, options: dict[str, Any], *sizes: int | None) -> LayerPlan:
    if kind in _STATE_ONLY:
        # of the options that transformers 5.17 and 5.18 give for all layers, these layers use only this one
        states = {key: value for key, value in options.items() if key == "number_of_states"}
        return LayerPlan(index, kind, holds_kv=False, options=states)
    if kind in _EMPTY:
        return LayerPlan(index, kind, holds_kv=False)
    if kind != "full_attention" and kind not in _WINDOWED:
        reason = _REASONS.get(kind, "this layer type is unknown to packedkv")
        raise UnsupportedError(
            f"{name}: layer {index} is {kind!r}: {reason}; it is not packed. Use transformers' DynamicCache for this "
            f"model."
        )
    window = options["sliding_window"] if kind in _WINDOWED else None
    heads, head_dim, value_dim = sizes
    return LayerPlan(index, kind, window, True, heads, head_dim, value_dim)


def _heads(own: Any) -> tuple[int | None, int | None, int | None]:
    """KV heads, head_dim and channels of a value that a config states; None: it does not."""
    queries = getattr(own, "num_attention_heads", None)
    head_dim, hidden = getattr(own, "head_dim", None), getattr(own, "hidden_size", None)
    if head_dim is None and hidden and queries:
        head_dim = hidden // queries
    return getattr(own, "num_key_value_heads", None) or queries, head_dim, getattr(own, "v_head_dim", None)


def _common(sizes: Iterable[int | None]) -> int | None:
    """Return the size of all layers, or None if they differ."""
    different = set(sizes)
    return different.pop() if len(different) == 1 else None


def identify(model_or_config: Any, name: str = "") -> ModelIdentity:
    """Read the identity of a model or config; ``name`` defaults to the class name. Errors as ``plan_for``."""
    model_or_config = unwrapped(model_or_config)
    plan = plan_for(model_or_config, "decoded")
    config = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
    layers = tuple(layer.index for layer in plan.kv_layers)
    weights: dict[str, tuple[int, float, float]] = {}
    if isinstance(model_or_config, torch.nn.Module):
        names = [n for n, p in model_or_config.named_parameters() if p.is_floating_point() and p.ndim > 1]
        chosen = [names[round(i)] for i in torch.linspace(0, len(names) - 1, min(WEIGHTS, len(names))).tolist()]
        weights = figures(model_or_config, chosen)
    return ModelIdentity(name or plan.name, config.model_type, layers, plan.heads, plan.head_dim, weights)


def load_params(
    params: str | Path | FittedParams, model_or_config: Any, spec: str | KVScheme, *, seed: int = 0
) -> FittedParams:
    """Read a params file for a model, or its config, and a scheme, as ``cache_for`` takes it.

    Constants that were read before are only checked. Weights are compared if a model is given, not a config.
    FormatError if the file is cut, altered, foreign or newer, or was fitted for another scheme, model, shape or seed.
    """
    fitted = params if isinstance(params, FittedParams) else read_params(params)
    model_or_config = unwrapped(model_or_config)
    here = identify(getattr(model_or_config, "config", model_or_config))
    model = model_or_config if isinstance(model_or_config, torch.nn.Module) else None
    fitted.check(here, spec, seed=seed, model=model)
    return fitted
