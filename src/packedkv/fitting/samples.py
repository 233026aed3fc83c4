"""Windows of tokens that a model draws by itself: what constants are fitted on where there is no text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packedkv.errors import FitError
from packedkv.progress import Progress

WINDOW_TOKENS = 1024
"""Of a window: some 4,000 tokens give the constants of ``ghost`` as a novel does."""
WARM_UP_CALLS = 3
"""Calls before a capture: libraries allocate their workspaces during the first ones."""


def capture(call: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls into one CUDA graph, after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def sample_windows(
    model: Any, windows: int, window_tokens: int, *, seed: int = 0, progress: Progress | None = None
) -> list[Tensor]:
    """Draw windows beside each other, of all tokens by the model's own probabilities; int64 ``[window_tokens]``, on the
    CPU.

    Each begins with the token that begins texts, else the one that ends them, else any. Where a text ends inside a
    window, the next one follows. On a GPU the model's step is replayed as a CUDA graph where it can be captured;
    ``progress`` says which way it goes. The same for the same seed and machine, on a CPU: a GPU's attention may sum in
    another order, and a token drawn otherwise changes all after it.
    """
    shown, generator = progress or Progress(False), torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    ids = torch.full((windows, window_tokens), -1)
    ids[:, 0] = _first(config, windows, generator)
    with torch.no_grad():
        step, way = _step(model, windows, window_tokens)
        for n in range(1, window_tokens):
            shown.bar("drawing tokens", n, window_tokens, f"{windows} windows{way}")
            logits = step(ids[:, n - 1 : n].to(model.device)).float().cpu()
            if not bool(logits.isfinite().all()):
                raise FitError(f"the model's logits are not finite after {n} tokens of its own; pass --text FILE.")
            ids[:, n] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return list(ids)


def _step(model: Any, windows: int, tokens: int) -> tuple[Callable[[Tensor], Tensor], str]:
    """The model's step, from the windows' last tokens ``[windows, 1]`` to logits ``[windows, V]``, and how it runs."""
    from transformers import DynamicCache

    from packedkv.integrations.transformers.argument import passing  # needs transformers

    way = ""
    if model.device.type == "cuda":
        try:
            if (captured := _captured(model, windows, tokens)) is not None:
                return captured, ", by a CUDA graph"
            way = ", eager: its layers or their cache need the host"
        except Exception as error:
            way = f", eager: no CUDA graph ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    cache = DynamicCache(config=model.config)
    return lambda ids: model(input_ids=ids, **passing(model, cache), use_cache=True).logits[:, -1], way


def _captured(model: Any, windows: int, tokens: int) -> Callable[[Tensor], Tensor] | None:
    """Capture the step over a cache of fixed size; each replay overwrites the logits.

    None for models that need the host in between.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    from packedkv.integrations.transformers.argument import passing

    if not getattr(model, "_can_compile_fullgraph", False):
        return None
    cache = StaticCache(config=model.config, max_cache_len=max(tokens, WARM_UP_CALLS))
    if any(type(layer) is not StaticLayer for layer in cache.layers):  # a sliding window's counts on the host
        return None
    last = torch.zeros(windows, 1, dtype=torch.int64, device=model.device)
    logits: list[Tensor] = []

    def run() -> None:
        logits[:] = [model(input_ids=last, **passing(model, cache), use_cache=True).logits[:, -1]]

    with torch.cuda.device_of(last):
        graph = capture(run)
    cache.reset()

    def replay(ids: Tensor, memory: Any = cache) -> Tensor:  # the graph does not keep the cache alive
        last.copy_(ids)
        graph.replay()
        return logits[0]

    return replay


def _first(config: Any, windows: int, generator: torch.Generator) -> Tensor:
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list):
            token = token[0] if token else None
        if token is not None:
            return torch.full((windows,), int(token))
    return torch.randint(config.vocab_size, (windows,), generator=generator)
