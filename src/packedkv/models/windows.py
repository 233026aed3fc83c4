"""Tokenize a text and cut it into windows that a model can evaluate."""

import warnings
from typing import Any

import torch
from torch import Tensor

from packedkv.errors import ModelError

WINDOW_TOKENS = 2048


def tokenize(tokenizer: Any, text: str, tokens: int) -> Tensor:
    """First ``tokens`` token ids of ``text`` (fewer if the text is shorter), int64 ``[n]``.

    Only the beginning of a long text is tokenized, far enough past the tokens needed that they are those of the whole.
    """
    head = text[: tokens * 16 + 4096]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sequence is longer than the model's maximum": windows are not
        ids = tokenizer(head, verbose=False)["input_ids"]
        if len(ids) < tokens + 64 and len(head) < len(text):
            ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(ids[:tokens], dtype=torch.long)


def split_windows(ids: Tensor, windows: int, window_tokens: int) -> list[Tensor]:
    """Cut ``ids`` into at most ``windows`` whole windows."""
    if windows < 1 or window_tokens < 2:
        raise ModelError(f"windows={windows}, window_tokens={window_tokens}: expected at least 1 and 2.")
    count = min(windows, ids.numel() // window_tokens)
    if not count:
        raise ModelError(
            f"the text has {ids.numel()} tokens and a window takes {window_tokens}; pass a longer text or "
            f"--window-tokens {max(ids.numel() // 2, 2)}."
        )
    return list(ids[: count * window_tokens].view(count, window_tokens))


def check_window(config: Any, window_tokens: int) -> None:
    """Validate that a window fits the model's positions."""
    check_positions(positions_of(config), window_tokens)


def positions_of(config: Any) -> int | None:
    """Number of positions of a model; None if its config does not state it."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_positions(limit: int | None, window_tokens: int) -> None:
    """Validate that a window has at most ``limit`` positions."""
    if limit and window_tokens > limit:
        raise ModelError(
            f"a window of {window_tokens} tokens does not fit the model, which knows {limit} positions; "
            f"pass --window-tokens {limit} or less."
        )
