"""Windows of a text, read as ``eval/perplexity.py`` says: ``perplexity``, and ``kl`` against the uncompressed model."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from packedkv.cli.measure.perplexity import TokenScores
from packedkv.models.windows import check_positions, split_windows, tokenize
from packedkv_lab.eval.tasks.base import SEPARATOR, Item, Metric, Scores, Task, TaskSettings, item_id

PARTS = 8
"""Number of parts of a window for which KL and agreement are also reported."""


class Windows(Task):
    """Consecutive windows from the start of the text; the numbers that a subclass picks."""

    default_limit = 10

    def items(self, tokenizer: Any, settings: TaskSettings) -> list[Item]:
        """Cut windows of ``settings.window_tokens`` tokens; fewer than the limit where the text is short."""
        n, limit = settings.window_tokens, self.limit(settings)
        check_positions(settings.positions, n)
        windows = split_windows(tokenize(tokenizer, settings.text.text, limit * n), limit, n)
        ids = [tuple(window.tolist()) for window in windows]
        # a text may repeat itself
        unique = dict.fromkeys(ids)
        return [Item(self.name, item_id(self.name, window), "window", ids=window) for window in unique]

    def about(self, settings: TaskSettings) -> dict[str, Any]:
        return {
            "text": settings.text.name,
            "text_sha256": settings.text.sha256,
            "window_tokens": settings.window_tokens,
        }


class Perplexity(Windows):
    """Loss of the next token."""

    name = "perplexity"
    summary = "perplexity of a text, in windows"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "perplexity": Metric("lower", "exp of the mean loss over all scored tokens", of="nll", exp=True)
    }

    def score(self, item: Item, output: TokenScores) -> Scores:
        return {"nll": total(output.nll)}


class Divergence(Windows):
    """Difference of the next token's distribution from the uncompressed model's."""

    name = "kl"
    summary = "distance of the next token's distribution from the uncompressed model's, in windows"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "kl": Metric("lower", "mean over tokens of KL(uncompressed || compressed), nats"),
        "top1": Metric("higher", "share of tokens where both models find the same next token likeliest"),
        "top5": Metric(
            "higher", "share of tokens where the uncompressed model's likeliest is among the five likeliest"
        ),
    }

    def score(self, item: Item, output: TokenScores) -> Scores:
        """Sums over the window, and over eight parts of it by position."""
        scores: Scores = {}
        n, size = len(item.ids), -(-len(item.ids) // PARTS)
        for name in self.metrics:
            values: Tensor = getattr(output, name)
            scores[name] = total(values)
            for a in range(0, n, size):
                part = values[max(a - output.first, 0) : max(a + size - output.first, 0)]
                if part.numel():
                    scores[f"{name}{SEPARATOR}{a}-{min(a + size, n) - 1}"] = total(part)
        return scores


def total(values: Tensor) -> tuple[float, float]:
    """Sum and count."""
    return values.double().sum().item(), float(values.numel())
