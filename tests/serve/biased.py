"""A model with large key biases on disk, and constants fitted to it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from packedkv.files.params import FittedParams
from packedkv.fitting.fit import fit_model
from packedkv.models.loading import LoadedModel
from tests.serve.engines import WORDS, save_model


class Biased(NamedTuple):
    """A model, where it is, and its tokenizer."""

    folder: Path
    model: Any
    tokenizer: Any

    def fitted(self, spec: str, to: Path) -> FittedParams:
        words = torch.randint(3, WORDS, (600,), generator=torch.Generator().manual_seed(7)).tolist()
        text = " ".join(f"t{i}" for i in words)
        loaded = LoadedModel(self.model, self.tokenizer, "biased", "made in the test")
        return fit_model(loaded, spec, text, windows=2, window_tokens=256).save(to)


def biased_at(folder: Path) -> Biased:
    """A Qwen2 with large biases in all channels of its keys, the largest in a slowly turning pair."""
    from transformers import PreTrainedTokenizerFast

    model = save_model(folder, "qwen2", vocab_size=WORDS)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            bias = layer.self_attn.k_proj.bias
            bias.copy_(20 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(i)))
            bias[61] = 400.0
            layer.self_attn.q_proj.weight.mul_(4)
    model.save_pretrained(folder)
    return Biased(folder, model, PreTrainedTokenizerFast.from_pretrained(folder))
