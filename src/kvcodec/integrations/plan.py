"""What each layer of a transformers model needs from its cache, or why it is refused.

Reads only the model's config, as ``DynamicCache(config=...)`` does: full, sliding and chunked attention layers hold
packed K and V; linear-attention, convolution and MLP layers keep the state that transformers gives them; layers whose
K and V are borrowed from an earlier one hold nothing. Everything else is refused, by layer and with the reason.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcodec.errors import ShapeError, UnsupportedError

Attention = Literal["decoded", "streamed", "fused"]

ATTENTION_NAME = "kvcodec"
"""Name under which the attention function is registered with transformers."""

_WINDOWED = ("sliding_attention", "chunked_attention")
_STATE_ONLY = ("linear_attention", "conv", "moe", "mlp")
_REASONS = {
    "hybrid": "it holds attention and recurrent state in one layer",
    "hybrid_sliding": "it holds attention and recurrent state in one layer",
    "deepseek_sparse_attention": "it caches indexer keys beside K and V",
    "qwen_sparse_attention": "it caches indexer keys beside K and V",
    "heavily_compressed_attention": "the model compresses its own cache",
    "compressed_sparse_attention": "the model compresses its own cache",
}
_OWN_CACHE = ("reformer", "xlnet", "rwkv", "xlstm", "minimax")


@dataclass(frozen=True)
class LayerPlan:
    """What one cache layer is.

    Parameters
    ----------
    index : int
        Layer of the model.
    type : str
        transformers' name of the layer type.
    window : int or None
        Tokens a query sees in a sliding or chunked layer, itself included; None for full attention.
    holds_kv : bool
        False for linear-attention, convolution and MLP layers.
    """

    index: int
    type: str
    window: int | None = None
    holds_kv: bool = True


@dataclass(frozen=True)
class ModelPlan:
    """The layers of a model, and the sizes that its config states (None where it does not)."""

    name: str
    layers: tuple[LayerPlan, ...]
    heads: int | None
    head_dim: int | None
    state_options: dict[str, Any]
    softcap: float = 0.0

    @property
    def kv_layers(self) -> tuple[LayerPlan, ...]:
        """The layers that hold K and V."""
        return tuple(layer for layer in self.layers if layer.holds_kv)


def plan_for(model_or_config: Any, attention: Attention) -> ModelPlan:
    """Read the layers of a model.

    Parameters
    ----------
    model_or_config : PreTrainedModel or PreTrainedConfig
    attention : {"decoded", "streamed", "fused"}

    Returns
    -------
    ModelPlan

    Raises
    ------
    UnsupportedError
        If the model, or one of its layers, cannot be served; the text names the layer and the reason.
    """
    model = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
    config = model.config if model is not None else model_or_config
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedError(
            f"got {type(model_or_config).__name__}; expected a transformers model or its config. "
            f"For other models use kvcodec.LayerCache on bare tensors."
        )
    name = type(model).__name__ if model is not None else type(config).__name__
    text = config.get_text_config(decoder=True)
    _check_model(name, model, config, text)
    _check_attention(name, model, config, text, attention)
    types, options = get_layer_types_and_kwargs(text)
    layers = tuple(_layer(name, i, kind, options.get("sliding_window")) for i, kind in enumerate(types))
    if not any(layer.holds_kv for layer in layers):
        raise UnsupportedError(f"{name}: no layer caches keys and values (all are {types[0]}); nothing to compress.")
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    states = {k: v for k, v in options.items() if k == "number_of_states"}
    softcap = float(getattr(text, "attn_logit_softcapping", None) or 0.0)
    return ModelPlan(name, layers, heads, _head_dim(text), states, softcap)


def _check_model(name: str, model: Any, config: Any, text: Any) -> None:
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedError(
            f"{name}: an encoder-decoder model; its cross-attention caches are not packed. Use a decoder-only model."
        )
    encoder = getattr(text, "is_decoder", None) is False and hasattr(text, "add_cross_attention")
    own_cache = text.model_type in _OWN_CACHE
    if model is not None:
        own_cache |= "past_key_values" not in inspect.signature(model.forward).parameters
    if encoder or own_cache or getattr(text, "num_attention_heads", None) is None or not hasattr(text, "vocab_size"):
        raise UnsupportedError(
            f"{name}: a model without an attention cache (no past_key_values of keys and values); "
            f"kvcodec takes decoder-only models with attention."
        )
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:
        last = text.num_hidden_layers - 1
        raise UnsupportedError(
            f"{name}: layers 0..{last} use multi-head latent attention (kv_lora_rank={rank}): they cache one latent "
            f"and one RoPE key instead of K and V per head, which these codecs do not take."
        )


def _check_attention(name: str, model: Any, config: Any, text: Any, attention: Attention) -> None:
    if attention == "decoded":
        return
    set_on = {c._attn_implementation for c in (config, text)}
    built = model is not None or any(set_on)
    if built and ATTENTION_NAME not in set_on:
        raise UnsupportedError(
            f"{name}: attention={attention!r} reads the packed cache inside the attention function, but this model "
            f"runs {text._attn_implementation!r}; call model.set_attn_implementation({ATTENTION_NAME!r}) first."
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"{name}: the last {text.num_kv_shared_layers} layers borrow K and V from earlier ones, which "
            f"attention={attention!r} does not hand on; use attention='decoded'."
        )


def _layer(name: str, index: int, kind: str, window: int | None) -> LayerPlan:
    if kind == "full_attention":
        return LayerPlan(index, kind)
    if kind in _WINDOWED:
        return LayerPlan(index, kind, window)
    if kind in _STATE_ONLY:
        return LayerPlan(index, kind, holds_kv=False)
    reason = _REASONS.get(kind, "this layer type is unknown to kvcodec")
    raise UnsupportedError(
        f"{name}: layer {index} is {kind!r}: {reason}; it is not packed. Use transformers' DynamicCache for this model."
    )


def _head_dim(text: Any) -> int | None:
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and getattr(text, "hidden_size", None):
        head_dim = text.hidden_size // text.num_attention_heads
    return head_dim


def check_fits(plan: ModelPlan, layers: list[Any]) -> str:
    """Return why loaded layer caches do not fit a model, or ``""`` if they do."""
    wanted = plan.kv_layers
    if len(layers) != len(wanted):
        return f"the file holds {len(layers)} layers, {plan.name} caches {len(wanted)}"
    for held, layer in zip(layers, wanted, strict=True):
        if held.store is None:
            continue
        site = held.roles["key"].site
        for word, came, want in (("KV heads", site.num_heads, plan.heads), ("head_dim", site.head_dim, plan.head_dim)):
            if want is not None and came != want:
                return f"layer {layer.index} of the file has {came} {word}, {plan.name} has {want}"
    return ""


def check_layouts(plan: ModelPlan, schemes: list[Any], page_tokens: int | None = None) -> None:
    """Refuse a head_dim that a codec cannot take, or a page that blocks do not fill, before any token is seen.

    Raises
    ------
    ShapeError
    """
    if plan.head_dim is None:
        return
    for layer, scheme in zip(plan.kv_layers, schemes, strict=True):
        try:
            scheme.page_layout(plan.head_dim, page_tokens)
        except ShapeError as error:
            raise ShapeError(f"{plan.name}, layer {layer.index}: {error}") from error
