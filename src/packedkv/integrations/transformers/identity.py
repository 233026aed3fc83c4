"""Identity of a transformers model, and params files checked against it."""

from pathlib import Path
from typing import Any

import torch

from packedkv.files.params import WEIGHTS, FittedParams, ModelIdentity, figures, read_params
from packedkv.integrations.transformers.argument import unwrapped
from packedkv.integrations.transformers.plan import plan_for
from packedkv.scheme import KVScheme


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

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        No file there.
    FormatError
        The file is cut, altered, foreign or newer, or was fitted for another scheme, model, shape or seed.
    """
    fitted = params if isinstance(params, FittedParams) else read_params(params)
    model_or_config = unwrapped(model_or_config)
    here = identify(getattr(model_or_config, "config", model_or_config))
    model = model_or_config if isinstance(model_or_config, torch.nn.Module) else None
    fitted.check(here, spec, seed=seed, model=model)
    return fitted
