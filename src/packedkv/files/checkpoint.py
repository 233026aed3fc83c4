"""A model's weights on disk, as safetensors: which they are, without loading them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from packedkv.errors import ModelError
from packedkv.files.params import same_figures

SAMPLE = 4096
"""Bytes of each tensor that go into the digest, from its middle."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights as transformers reads them, in order; ModelError if there are none."""
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not found:  # `consolidated*` hold the same weights once more, in Mistral's own form
        raise ModelError(f"{folder} holds no weights as .safetensors; a model folder is what save_pretrained writes.")
    return found


def digest_of(folder: Path) -> str:
    """Return the sha256 of a checkpoint: config, every tensor's name, dtype and shape, and some bytes of each.

    Raises ModelError if a file is missing or is not safetensors.
    """
    found = hashlib.sha256()
    try:
        found.update((folder / "config.json").read_bytes())
        for path in weight_files(folder):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("it is cut, or not safetensors")
                header: dict[str, Any] = json.loads(file.read(size))
                header.pop("__metadata__", None)
                found.update(json.dumps(header, sort_keys=True).encode())
                for own in header.values():
                    first, last = own["data_offsets"]
                    count = min(SAMPLE, last - first)
                    file.seek(8 + size + (first + last - count) // 2)
                    found.update(file.read(count))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}; copy them again.") from error
    return found.hexdigest()


def other_weights(folder: Path, weights: Mapping[str, tuple[int, float, float]]) -> list[str]:
    """Return the names of a ``ModelIdentity.weights`` whose numbers differ in a checkpoint.

    Names that are missing or quantized in the checkpoint are ignored. Errors as ``weight_files``.
    """
    differ = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(weights.keys() & set(file.keys())):
                tensor = file.get_tensor(name)
                plain = tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
                if plain and not same_figures(tensor, weights[name]):
                    differ.append(name)
    return differ
