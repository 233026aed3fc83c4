"""Windows of tokens that a model draws by itself: what constants are fitted on where there is no text."""

from typing import Any

import torch
from torch import Tensor

from kvcodec.errors import FitError
from kvcodec.progress import Progress

WINDOW_TOKENS = 1024
"""Of a window: some 4,000 tokens give the constants of ``ghost`` as a novel does."""


def own_windows(
    model: Any, windows: int, window_tokens: int, *, seed: int = 0, progress: Progress | None = None
) -> list[Tensor]:
    """Draw windows beside each other, of all tokens by the model's own probabilities.

    Each begins with the token that begins texts, else the one that ends them, else any. Where a text ends inside a
    window, the next one follows.

    Parameters
    ----------
    model : PreTrainedModel
    windows, window_tokens : int
    seed : int
    progress : Progress, optional

    Returns
    -------
    list of Tensor int64 ``[window_tokens]``
        On the CPU; the same for the same seed on the same machine.

    Raises
    ------
    FitError
        The model's logits are NaN or Inf.
    """
    from transformers import DynamicCache

    from kvcodec.integrations.transformers.argument import passing  # needs transformers

    shown, generator = progress or Progress(False), torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    ids = torch.full((windows, window_tokens), -1)
    ids[:, 0] = _first(config, windows, generator)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for n in range(1, window_tokens):
            shown.bar("drawing tokens", n, window_tokens, f"{windows} windows")
            last = ids[:, n - 1 : n].to(model.device)
            logits = model(input_ids=last, **passing(model, cache), use_cache=True).logits[:, -1].float().cpu()
            if not bool(logits.isfinite().all()):
                raise FitError(f"the model's logits are not finite after {n} tokens of its own; pass --text FILE.")
            ids[:, n] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return list(ids)


def _first(config: Any, windows: int, generator: torch.Generator) -> Tensor:
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        if isinstance(found, list):
            found = found[0] if found else None
        if found is not None:
            return torch.full((windows,), int(found))
    return torch.randint(config.vocab_size, (windows,), generator=generator)
