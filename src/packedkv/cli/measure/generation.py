"""Greedy generation from a fixed prompt: speed (one over the median time of a one-token step) and text.

Speed behind a long context is taken without its prefill: the model reads the text in windows, each by itself at its own
positions, and caches are filled with these keys and values. cuDNN plans the attention of one token anew for every
length, so the uncompressed cache is timed with and without it, and the faster time is used.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from packedkv.cli.page.words import agreement
from packedkv.errors import UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.integrations.transformers.rope import record_positions

PROMPT_TOKENS = 256
NEW_TOKENS = 32
CUDNN_OFF = "cuDNN off"
FORMS = ("as torch chooses", CUDNN_OFF)
"""Ways to time transformers' own attention over a cache that grows."""


@dataclass(frozen=True)
class Generation:
    """A greedy continuation: new tokens, seconds of each one-token call, seconds of the prompt's call."""

    tokens: list[int]
    step_seconds: list[float]
    prompt_seconds: float

    @property
    def tokens_per_s(self) -> float:
        """One over the median step."""
        return 1 / median(self.step_seconds)

    def agreement(self, other: "Generation") -> int:
        """Number of leading tokens equal to those of ``other``."""
        return agreement(self.tokens, other.tokens)


def greedy(model: Any, prompt: Tensor, new_tokens: int, cache: Any) -> Generation:
    """Continue ``prompt [n]`` by ``new_tokens`` tokens, storing K and V in ``cache``; end-of-text does not stop it."""
    tokens: list[int] = []
    steps: list[float] = []
    ids, given = prompt.to(model.device)[None], passing(model, cache)
    with torch.no_grad():
        for _ in range(new_tokens):
            start = time.perf_counter()
            logits = model(input_ids=ids, **given, use_cache=True).logits[:, -1]
            ids = logits.argmax(-1, keepdim=True)
            tokens.append(int(ids.item()))
            steps.append(time.perf_counter() - start)
    return Generation(tokens, steps[1:] or steps, steps[0])


def uncompressed_cache(model: Any) -> Any:
    """Build transformers' own cache, in the model's dtype."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def long_context(model: Any, ids: Tensor, window: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer for ``ids [n]``, ``[1, H, n, D]`` each; windows of ``window`` tokens are apart."""
    from transformers import DynamicCache

    from packedkv.integrations.transformers.plan import plan_for

    if any(not layer.holds_kv or layer.window is not None for layer in plan_for(model, "decoded").layers):
        raise UnsupportedError("a layer does not hold the keys and values of all tokens")
    parts: list[list[tuple[Tensor, Tensor]]] = []
    with torch.no_grad():
        for at, piece in zip(range(0, ids.numel(), window), ids.split(window), strict=True):
            cache, positions = DynamicCache(), torch.arange(at, at + piece.numel(), device=model.device)
            given = {"position_ids": positions[None], "use_cache": True, **passing(model.base_model, cache)}
            model.base_model(input_ids=piece.to(model.device)[None], **given)
            parts.append([(layer.keys, layer.values) for layer in cache.layers])
    layers = [zip(*layer, strict=True) for layer in zip(*parts, strict=True)]
    return [(torch.cat(keys, 2), torch.cat(values, 2)) for keys, values in layers]


def fill(cache: Any, context: list[tuple[Tensor, Tensor]]) -> None:
    """Store ``long_context`` in an empty cache, transformers' own or a ``KVCache``."""
    for i, (keys, values) in enumerate(context):
        if (hook := getattr(cache.layers[i], "hook", None)) is not None:
            record_positions(torch.arange(keys.shape[2], device=keys.device)[None], hook.name)
        cache.update(keys, values, i)


@torch.no_grad()
def in_turns(model: Any, last: int, caches: Mapping[str, tuple[Any, str]], steps: int) -> dict[str, Generation]:
    """Continue filled caches greedily from token ``last``, one token each in turn: ``steps`` timed ones after one that
    is not.
    """
    ids = {name: torch.tensor([[last]], device=model.device) for name in caches}
    given = {name: passing(model, cache) for name, (cache, _) in caches.items()}
    made = {name: Generation([], [], 0.0) for name in caches}
    for turn in range(steps + 1):
        for name, (_, attention) in caches.items():
            with implementation(model, attention):
                start = time.perf_counter()
                logits = model(input_ids=ids[name], **given[name], use_cache=True).logits[:, -1]
                ids[name] = logits.argmax(-1, keepdim=True)
                made[name].tokens.append(int(ids[name].item()))
                if turn:
                    made[name].step_seconds.append(time.perf_counter() - start)
    return made


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
    runs = []
    for form in FORMS if model.device.type == "cuda" else FORMS[:1]:
        with attention_backends(form):
            runs.append(greedy(model, prompt, new_tokens, uncompressed_cache(model)))
    return replace(runs[0], step_seconds=max(runs, key=lambda made: made.tokens_per_s).step_seconds)
