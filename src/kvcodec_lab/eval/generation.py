"""Greedy generation from a fixed prompt: speed, the text, and the bytes the cache holds afterwards.

The prompt is one call; every new token is one call more, exactly as ``model.generate`` does it, so the text is
``generate``'s. Tokens/s is one over the median time of a one-token step: the prompt is excluded, and occasional load on
the machine does not distort it. On a CPU the reference path decodes in PyTorch, so the figure is the speed on this
machine, not that of a fused kernel.

On recent GPUs torch computes the attention of one token over a growing cache with cuDNN, which makes a new plan for
every new length. The uncompressed cache is therefore timed with and without cuDNN's attention, and the faster time is
used.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

PROMPT_TOKENS = 256
NEW_TOKENS = 32
CUDNN_OFF = "cuDNN off"
FORMS = ("as torch chooses", CUDNN_OFF)
"""Ways to time transformers' own attention over a cache that grows."""


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


@contextlib.contextmanager
def attention_backends(form: str) -> Iterator[None]:
    """Restrict torch's attention backends to those that ``form`` of ``FORMS`` allows."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and form != CUDNN_OFF)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def uncompressed(model: Any, prompt: Tensor, new_tokens: int) -> Generation:
    """``greedy`` through transformers' own cache; on a GPU the times are those of the faster of ``FORMS``."""
    found = []
    for form in FORMS if model.device.type == "cuda" else FORMS[:1]:
        with attention_backends(form):
            found.append(greedy(model, prompt, new_tokens, uncompressed_cache(model)))
    return replace(found[0], step_seconds=max(found, key=lambda made: made.tokens_per_s).step_seconds)
