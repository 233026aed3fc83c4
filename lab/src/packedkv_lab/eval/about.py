"""What a run is of, for its ``run.json``: a folder is continued only by a run of the same."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from packedkv.cli.measure.compare import about_params
from packedkv.cli.measure.quantized_cache import PACKAGES, QuantizedCacheSpec
from packedkv.cli.measure.rows import Row
from packedkv.cli.stamp import versions
from packedkv.errors import ShapeError
from packedkv.files.params import FittedParams
from packedkv.models.loading import LoadedModel
from packedkv.registry import COMMON
from packedkv.scheme import KVScheme
from packedkv_lab.eval.tasks.base import Item, Task, TaskSettings


def about_run(
    model: LoadedModel,
    tasks: Sequence[Task],
    items: Mapping[str, Sequence[Item]],
    schemes: Sequence[KVScheme | QuantizedCacheSpec],
    params: Sequence[FittedParams | None],
    settings: TaskSettings,
    prefill: str,
    changes: Mapping[str, Any],
) -> Row:
    """What ``run.json`` says: the model, its weights, versions, tasks with their data, specs with their constants."""
    from packedkv.integrations.transformers.plan import plan_for

    plan = plan_for(model.model, "decoded")
    device = model.model.device
    about: Row = {
        "model": {
            "name": model.name,
            "origin": model.origin,
            "sha256": weights_sha256(model.model),
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "layers": len(plan.kv_layers),
            "kv_heads": plan.heads,
            "head_dim": plan.head_dim,
        },
        "versions": versions()
        | {PACKAGES[s.backend][1]: s.version for s in schemes if isinstance(s, QuantizedCacheSpec)},
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "seed": settings.seed,
        "settings": {"prefill": prefill, "mean": COMMON["mean"].default, **changes},
        "tasks": {},
        "specs": [str(scheme) for scheme in schemes],
        "bits": {str(scheme): _bits(scheme, plan.head_dim) for scheme in schemes},
        # by checksum: the file may be replaced under the same name
        "recipes": {
            str(s): {"sha256": hashlib.sha256(s.to_json().encode()).hexdigest()}
            for s in schemes
            if isinstance(s, KVScheme) and s.layers
        },
        "params": {str(scheme): about_params(given) for scheme, given in zip(schemes, params, strict=True)},
    }
    for task in tasks:
        mine, source = items[task.name], task.source(settings)
        about["tasks"][task.name] = {
            **task.about(settings),
            "limit": task.limit(settings),
            "items": len(mine),
            "source": asdict(source) if source else None,
            "metrics": {name: asdict(metric) for name, metric in task.metrics.items()},
        }
    return about


def _bits(scheme: KVScheme | QuantizedCacheSpec, head_dim: int | None) -> Row:
    try:
        return {"key_bits": scheme.key_bits(head_dim or 128), "value_bits": scheme.value_bits(head_dim or 128)}
    except ShapeError:
        return {"key_bits": None, "value_bits": None}


def weights_sha256(model: torch.nn.Module) -> str:
    """sha256 over the names and bytes of all weights in order of name; tied weights count once."""
    digest = hashlib.sha256()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        place = tensor.data_ptr(), tuple(tensor.shape)
        if place in seen and tensor.numel():
            continue
        seen.add(place)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().flatten().cpu()
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()
