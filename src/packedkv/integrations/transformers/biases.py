"""Key biases of a transformers model, and which mean its RoPE allows to subtract from its keys."""

import weakref
from typing import Any

from torch import nn

from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.plan import ModelPlan
from packedkv.integrations.transformers.rope import has_rotary
from packedkv.key_bias import KeyBiases
from packedkv.key_layer import KeyLayer, key_layer
from packedkv.scheme import Mean

_known: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], KeyBiases]]" = weakref.WeakKeyDictionary()


def biases_of(model: Any, plan: ModelPlan) -> KeyBiases | None:
    """Return the key biases of a model; None: unknown, because it is a config, has no weights or another structure."""
    if not isinstance(model, nn.Module):
        return None
    if model in _known and _known[model][0] == _known[model][1].versions():
        return _known[model][1]
    order = [layer.index for layer in plan.kv_layers]
    try:
        found = KeyBiases(plan.name, _layers_of(model, set(order)), order)
    except Exception:  # a model of another structure
        return None
    if found.unread and all(p.is_meta for p in model.parameters()):  # no weights, and no hook that brings them
        return None
    biased = [index for index in order if index in found.layers or index in found.unread]
    mean: Mean = "pre" if all(has_rotary(model, index) for index in biased) else "post"
    found.removable = lambda scheme: mean
    if not found.unread:  # values may be read later
        _known[model] = found.versions(), found
    return found


def _layers_of(model: Any, wanted: set[int]) -> list[KeyLayer]:
    """Layers of a transformers model that add a bias to their keys; UnsupportedError if one has two attentions."""
    decoder, found = model.get_decoder(), []
    config = model.config.get_text_config(decoder=True)
    modules = dict(decoder.named_modules())
    for name, module in modules.items():
        if (index := getattr(module, "layer_idx", None)) not in wanted:
            continue
        head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        own = key_layer(
            module,
            modules.get(name.rpartition(".")[0]) if name else None,
            index,
            config,
            query_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=float(getattr(module, "scaling", None) or head_dim**-0.5),
        )
        found += [own] if own is not None else []
    if len({layer.index for layer in found}) != len(found):
        raise UnsupportedError("two attention modules of one layer")
    return found
