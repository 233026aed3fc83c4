"""Perplexity, KL divergence and top-1 agreement under a compressed cache. The protocol, the same everywhere:

1. The text is tokenized once and cut into consecutive windows; each starts with an empty cache.
2. All tokens of a window but its first are scored.
3. ``prefill="decoded"`` (default): a window is one call, and attention reads the decoded K and V of every token, its
   own included, as the papers evaluate. Sink and window are those after the last token, so results of windowed methods
   are pessimistic. ``prefill="exact"``: calls of 256 tokens, of which the first attends fresh K and V.

KL is ``mean_t sum_v p ln(p / q)`` in nats, p uncompressed, q compressed. Standard errors are over tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packedkv.cli.measure.caches import Prefill, packed_cache
from packedkv.files.params import LayerParams
from packedkv.integrations.transformers.argument import passing
from packedkv.key_bias import Probe
from packedkv.scheme import KVScheme

EXACT_CALL_TOKENS = 256
ROWS_AT_ONCE = 16
"""Rows of logits scored together: few enough that their passes stay in a core's cache (2x faster than 256)."""


@dataclass(frozen=True)
class TokenScores:
    """Numbers of each scored token ``[n]``, in order; ``first`` is the position of the first in the window.

    ``nll`` and ``kl`` (from the uncompressed model's distribution to this one) in nats; ``top1``, ``top5``: whether the
    uncompressed model's most likely token is the most likely here, or among the five most likely.
    """

    nll: Tensor
    kl: Tensor
    top1: Tensor
    top5: Tensor
    first: int = 1


@dataclass(frozen=True)
class WindowScore:
    """Sums over the scored tokens of a window: negative log-likelihood, its rise over the uncompressed model's, KL;
    nats.

    ``agree`` counts positions whose most likely token is the uncompressed model's; ``squares`` are sums of squares of
    nll, rise and kl, for standard errors.
    """

    tokens: int
    nll: float
    rise: float
    kl: float
    agree: int
    squares: tuple[float, float, float]


@dataclass(frozen=True)
class Quality:
    """Means over windows, with standard errors over tokens."""

    windows: int
    tokens: int
    nll: float
    nll_se: float
    nll_rise: float
    nll_rise_se: float
    kl: float
    kl_se: float
    top1_agreement: float

    @property
    def perplexity(self) -> float:
        """``exp(nll)``; infinite where that overflows."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    @property
    def perplexity_se(self) -> float:
        """Standard error of the perplexity, to first order."""
        return self.perplexity * self.nll_se


@dataclass
class Reference:
    """The uncompressed model on one window: ``log_p [n, V]`` (float32, nats), and values derived from it once."""

    targets: Tensor
    log_p: Tensor
    nll: Tensor = field(init=False)
    best: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nll = -self.log_p.gather(1, self.targets[:, None])[:, 0].double()
        self.best = self.log_p.argmax(-1)

    def itself(self, first: int = 1) -> TokenScores:
        """Score the uncompressed model from position ``first`` on: no divergence."""
        nll = self.nll[first - 1 :]
        same = torch.ones_like(nll, dtype=torch.bool)
        return TokenScores(nll, torch.zeros_like(nll), same, same, first)

    def compare(self, logits: Tensor, first: int = 1) -> TokenScores:
        """Score a compressed run's ``logits [m, V]``, which predict the tokens from position ``first`` on."""
        nll, kl, top1, top5 = [], [], [], []
        for a in range(0, logits.shape[0], ROWS_AT_ONCE):
            q = logits[a : a + ROWS_AT_ONCE].float()
            rows = slice(a + first - 1, a + first - 1 + q.shape[0])
            p, best = self.log_p[rows], self.best[rows]
            lse = torch.logsumexp(q, -1)
            # sum p (ln p - ln q), with ln q = logit - lse; the rounding of equal rows may fall below 0
            kl.append((p - q).mul_(p.exp()).sum(-1).add_(lse).clamp_min_(0.0))
            nll.append(lse - q.gather(1, self.targets[rows, None])[:, 0])
            top1.append(q.argmax(-1) == best)
            top5.append((q.topk(min(5, q.shape[1]), -1).indices == best[:, None]).any(-1))
        return TokenScores(torch.cat(nll), torch.cat(kl), torch.cat(top1), torch.cat(top5), first)

    def score_itself(self) -> WindowScore:
        """Sums over a window of the uncompressed model."""
        return self._sums(self.itself())

    def score(self, logits: Tensor) -> WindowScore:
        """Sums over a window of a compressed run's ``logits [n, V]``."""
        return self._sums(self.compare(logits))

    def _sums(self, scores: TokenScores) -> WindowScore:
        nll, kl = scores.nll.double(), scores.kl.double()
        rise = nll - self.nll
        squares = nll.square().sum().item(), rise.square().sum().item(), kl.square().sum().item()
        agree = int(scores.top1.sum())
        return WindowScore(nll.numel(), nll.sum().item(), rise.sum().item(), kl.sum().item(), agree, squares)


def uncompressed(model: Any, window: Tensor) -> Reference:
    """Run the model on a window without any cache."""
    ids = window.to(model.device)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        log_p = logits.sub_(torch.logsumexp(logits, -1, keepdim=True))  # in place: one copy of [n, V] is large enough
    return Reference(ids[0, 1:], log_p)


def compressed_logits(
    model: Any,
    spec: str | KVScheme,
    window: Tensor,
    *,
    prefill: Prefill = "decoded",
    seed: int = 0,
    params: LayerParams | None = None,
    probe: Probe = "warn",
) -> tuple[Tensor, Any]:
    """Logits ``[n - 1, V]`` of a window read through a compressed cache, and that cache, filled.

    A scheme that rounds queries is read by the attention function ``packedkv`` (``attention="streamed"``); the model's
    own is set again afterwards.
    """
    ids = window.to(model.device)[None]
    step = ids.shape[1] if prefill == "decoded" else EXACT_CALL_TOKENS
    parts = []
    options: dict[str, Any] = {"prefill": prefill, "seed": seed, "params": params, "probe": probe}
    with packed_cache(model, spec, **options) as cache, torch.no_grad():
        given = passing(model, cache)
        for a in range(0, ids.shape[1], step):
            parts.append(model(input_ids=ids[:, a : a + step], **given, use_cache=True).logits[0])
    logits = parts[0] if len(parts) == 1 else torch.cat(parts)
    return logits[:-1], cache


def summarize(scores: Iterable[WindowScore]) -> Quality:
    """Means and standard errors over the tokens of all windows."""
    scores = list(scores)
    n = sum(s.tokens for s in scores)
    means = [sum(getattr(s, name) for s in scores) / n for name in ("nll", "rise", "kl")]
    errors = []
    for i, mean in enumerate(means):
        variance = max(sum(s.squares[i] for s in scores) / n - mean**2, 0.0)
        errors.append(math.sqrt(variance / n))
    agreement = sum(s.agree for s in scores) / n
    return Quality(len(scores), n, means[0], errors[0], means[1], errors[1], means[2], errors[2], agreement)
