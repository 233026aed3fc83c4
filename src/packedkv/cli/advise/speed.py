"""Speed of generation on this machine with the advised spec, and uncompressed."""

import warnings
from typing import Any

from torch import Tensor

from packedkv.cli.measure.caches import generating_cache
from packedkv.cli.measure.generation import greedy, uncompressed
from packedkv.errors import PackedKVWarning
from packedkv.integrations.transformers.attention_hooks import implementation
from packedkv.scheme import KVScheme

NEW_TOKENS = 16
PROMPT_TOKENS = 256


def speed(model: Any, scheme: KVScheme, window: Tensor, seed: int) -> dict[str, Any]:
    """Greedy tokens per second, one over the median step, through the cache of the printed line and transformers' own.

    The prompt is the beginning of ``window [n]``, one sequence.
    """
    prompt = window[: max(1, min(PROMPT_TOKENS, window.numel() - NEW_TOKENS))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackedKVWarning)
        cache, attention = generating_cache(model, scheme, seed=seed)
        with implementation(model, attention):
            made = greedy(model, prompt, NEW_TOKENS, cache)
    plain = uncompressed(model, prompt, NEW_TOKENS)
    return {
        "tokens_per_s": made.tokens_per_s,
        "uncompressed_tokens_per_s": plain.tokens_per_s,
        "prompt_tokens": prompt.numel(),
        "new_tokens": NEW_TOKENS,
        "device": str(model.device),
    }
