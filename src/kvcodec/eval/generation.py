"""Greedy generation from a fixed prompt: speed, the text, and the bytes the cache holds afterwards.

The prompt is one call; every new token is one call more, exactly as ``model.generate`` does it, so the text is
``generate``'s. Tokens/s is one over the median time of a one-token step: the prompt is not in it, and a machine that is
busy now and then does not distort it. On a CPU the reference path decodes in PyTorch; this figure says what a user of
this machine gets, not what a fused kernel does.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

PROMPT_TOKENS = 256
NEW_TOKENS = 32


@dataclass(frozen=True)
class Generation:
    """A greedy continuation.

    Parameters
    ----------
    tokens : list of int
        New tokens.
    step_seconds : list of float
        Time of each one-token call.
    prompt_seconds : float
        Time of the prompt's call.
    """

    tokens: list[int]
    step_seconds: list[float]
    prompt_seconds: float

    @property
    def tokens_per_s(self) -> float:
        """One over the median step."""
        return 1 / median(self.step_seconds)

    def agreement(self, other: "Generation") -> int:
        """Number of leading tokens equal to those of ``other``."""
        for i, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if a != b:
                return i
        return min(len(self.tokens), len(other.tokens))


def greedy(model: Any, prompt: Tensor, new_tokens: int, cache: Any) -> Generation:
    """Continue ``prompt [n]`` by ``new_tokens`` tokens, storing K and V in ``cache``; end-of-text does not stop it."""
    tokens: list[int] = []
    steps: list[float] = []
    ids = prompt.to(model.device)[None]
    with torch.no_grad():
        for _ in range(new_tokens):
            start = time.perf_counter()
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True)
            tokens.append(int(ids.item()))
            steps.append(time.perf_counter() - start)
    return Generation(tokens, steps[1:] or steps, steps[0])


def uncompressed_cache(model: Any) -> Any:
    """Build transformers' own cache, in the model's dtype."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)
