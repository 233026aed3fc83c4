"""Mean squares of a model's queries, channel by channel, measured on random tokens instead of a text."""

import threading
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from packedkv.errors import PackedKVWarning
from packedkv.integrations.transformers.attention_hooks import watched

TOKENS = 128
SKIPPED = 4
"""First tokens, whose states are unlike all others."""

_LOCK = threading.Lock()
_known: "weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], dict[int, Tensor]]]" = weakref.WeakKeyDictionary()


def query_energies(model: Any) -> dict[int, Tensor]:
    """Mean squares of the queries of each KV head's group, by layer: float64 ``[1, H, D]`` where the layer's keys are.

    The model runs once on 128 tokens, and again after a change of its weights. The dict is empty for a model without
    weights (meta), and, with a warning, for one that does not run on tokens alone.
    """
    with _LOCK:  # caches that several threads make share one run of the model
        parameters = _parameters(model)
        now = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        if (known := _known.get(model)) is not None and known[0] == now:
            return known[1]
        if any(p.is_meta for p in parameters):
            return {}
        _known[model] = now, _measured(model)
        return _known[model][1]


def _measured(model: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}

    def seen(module: Any, query: Tensor, key: Tensor, *_: Any) -> None:
        own = query[:, :, SKIPPED:].double().square().mean((0, 2))
        found.setdefault(module.layer_idx, own.unflatten(0, (key.shape[1], -1)).mean(1)[None])

    size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(0, size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode(False), torch.no_grad(), watched(model, seen):
            model.get_decoder()(input_ids=tokens.to(model.device), use_cache=False)
    except Exception as error:  # whatever a model's own code raises that wants more than tokens
        found.clear()
        warnings.warn(
            f"{type(model).__name__} did not run on tokens alone ({error}); constants of keys are fitted without its "
            f"queries, at some loss. `packedkv fit` takes them from a text.",
            PackedKVWarning,
            stacklevel=8,  # who called ``cache_for``
        )
    return found


def _parameters(model: nn.Module) -> list[Tensor]:
    """As ``model.parameters()``, in a tenth of its time; those that modules share more than once."""
    found: list[Tensor | None] = []
    modules: list[nn.Module | None] = [model]
    for module in modules:  # which grows
        if module is not None:
            found += module._parameters.values()
            modules += module._modules.values()
    return [p for p in found if p is not None]
