"""Gradients of a model's loss by its keys and values, for labels drawn from its own distribution.

Their second moments are the Fisher information: no text has to be right for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from packedkv.errors import FitError

PIECE = 256
"""Tokens whose distribution over the vocabulary is held in float32 at a time."""


class NoGradientsError(FitError):
    """A model cannot be run backwards, not within the memory, or not in its dtype."""


@contextmanager
def from_embeddings(model: Any) -> Iterator[None]:
    """Record what follows from the embeddings of the tokens, whatever weights are frozen or quantized."""

    def leaf(module: Any, given: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


@torch.no_grad()
def gradients(out: Any, of: Sequence[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Gradients by ``of`` of the summed cross-entropy of labels that are drawn from the model's own distribution.

    ``out`` is the output for one sequence within ``from_embeddings``; its logits ``[1, n, V]`` are used. The results
    have the shapes and dtypes of ``of``.
    """
    logits = getattr(out, "logits", None)
    if logits is None:
        raise NoGradientsError("the model returns no logits, so it has no loss.")
    generator = torch.Generator(logits.device).manual_seed(seed)
    slope = torch.empty_like(logits)  # of the loss by the logits: the distribution, less 1 at the label
    for own, out in zip(logits[0].split(PIECE), slope[0].split(PIECE), strict=True):
        chances = own.float().softmax(-1)
        label = torch.multinomial(chances, 1, generator=generator)
        out.copy_(chances.scatter_add_(1, label, -torch.ones_like(label, dtype=chances.dtype)))
    found = torch.autograd.grad(logits, of, slope)
    if not all(bool(x.isfinite().all()) for x in found):
        raise NoGradientsError(f"gradients in {str(logits.dtype).removeprefix('torch.')} are not finite; try bfloat16.")
    return found
