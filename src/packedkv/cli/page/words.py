"""How numbers are written, and what each task measures and does not."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from packedkv.cli.page.rows import UNCOMPRESSED

DASH = "–"


class About(NamedTuple):
    """A task in two sentences."""

    title: str
    is_: str
    is_not: str


TASKS = {
    "perplexity": About(
        "Perplexity",
        "How well the next token of a real text is foreseen, window by window; one number for all positions.",
        "It averages over easy tokens: a cache may lose the one fact that matters and hardly move it. Compare it on "
        "the same text and window length only.",
    ),
    "kl": About(
        "KL divergence",
        "How far the next token's distribution moved from the uncompressed model's, position by position. It needs no "
        "right answer, so it sees small damage first and has the narrowest intervals.",
        "It does not say whether the moved answer is worse, and it sees contexts of one window only.",
    ),
    "needle": About(
        "Needle in a haystack",
        "One number hidden in real text is asked for, by context length and depth.",
        "Finding one odd sentence is the easiest kind of long-context use: passing it promises nothing about reasoning "
        "over the context.",
    ),
    "needle_multikey": About(
        "Needle among needles",
        "One of four numbers hidden in real text is asked for: keys that blur get mixed up.",
        "It is still retrieval of a literal text; nothing has to be combined.",
    ),
    "kv_retrieval": About(
        "Key-value retrieval",
        "The value of one random UUID among as many as fit. Nothing can be guessed; every character must survive.",
        "Random strings are unlike text. Where the 16-bit model fails as well, it says nothing about a preset.",
    ),
    "variable_tracking": About(
        "Variable tracking",
        "A chain of assignments hidden in text is to be followed to its end.",
        "A small model that cannot follow the chain in 16 bit measures nothing here.",
    ),
    "common_words": About(
        "Common words",
        "The words that are most frequent in a long list: information from everywhere has to be added up.",
        "Losing a few positions hardly shows, because every word stands there many times.",
    ),
}

SHARES = ("top1", "top5", "recall", "prefix", "accuracy", "accuracy_norm", "probability", "f1", "exact", "agreement")
"""Metrics between 0 and 1, written in percent."""
METRICS = {
    "perplexity": "perplexity",
    "kl": "KL",
    "top1": "top-1 agreement",
    "top5": "top-5 agreement",
    "recall": "recall",
    "prefix": "prefix",
    "agreement": "same answer as 16 bit",
}


def bytes_text(n: float) -> str:
    """Bytes with a decimal unit.

    >>> bytes_text(999), bytes_text(12_345_678)
    ('999 B', '12.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"


def scalar_text(value: Any) -> str:
    """A float in four digits; anything else as it is.

    >>> scalar_text(0.123456), scalar_text("int-4")
    ('0.1235', 'int-4')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def small_text(x: float) -> str:
    """Four decimals, or an exponent if they would all be 0.

    >>> small_text(0.0312), small_text(2.5e-6), small_text(0)
    ('0.0312', '2.5e-06', '0')
    """
    return "0" if x == 0 else f"{x:.1e}" if abs(x) < 1e-3 else f"{x:.4f}"


def about_task(task: str) -> About:
    """Description of a task; for an unknown one, its name."""
    return TASKS.get(task, About(task.replace("_", " "), "", ""))


def metric_name(metric: str) -> str:
    """A metric as tables call it."""
    return METRICS.get(metric, metric.replace("_", " "))


def headline(task: str, metric: str) -> str:
    """Task and metric, once where they are called alike.

    >>> headline("perplexity", "perplexity"), headline("needle", "recall")
    ('Perplexity', 'Needle in a haystack: recall')
    """
    title, name = about_task(task).title, metric_name(metric)
    return title if name.lower() in title.lower() else f"{title}: {name}"


def value_text(metric: str, value: float | None) -> str:
    """Write a metric's value.

    >>> value_text("recall", 0.625), value_text("kl", 0.0312), value_text("perplexity", 21.456), value_text("kl", None)
    ('62.5 %', '0.0312', '21.46', '–')
    """
    if value is None:
        return DASH
    if metric in SHARES:
        return f"{100 * value:.1f} %"
    if metric == "kl":
        return small_text(value)
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def interval_text(metric: str, low: float | None, high: float | None) -> str:
    """Write an interval, in the unit of the value before it; empty where there is none.

    >>> interval_text("recall", 0.5, 0.75), interval_text("kl", None, None)
    ('[50.0, 75.0]', '')
    """
    if low is None or high is None:
        return ""
    if metric in SHARES:
        return f"[{100 * low:.1f}, {100 * high:.1f}]"
    return f"[{value_text(metric, low)}, {value_text(metric, high)}]"


def change_text(metric: str, value: float | None, low: float | None, high: float | None) -> str:
    """Write a difference with its interval; shares in percentage points.

    >>> change_text("recall", -0.125, -0.25, 0.0)
    '−12.5 pp [−25.0, +0.0]'
    """
    if value is None:
        return DASH
    scale, unit = (100, " pp") if metric in SHARES else (1, "")
    digits = ".1f" if metric in SHARES else ".4f" if metric == "kl" else ".2f"
    ends = "" if low is None or high is None else f" [{_signed(scale * low, digits)}, {_signed(scale * high, digits)}]"
    return f"{_signed(scale * value, digits)}{unit}{ends}"


def _signed(value: float, digits: str) -> str:
    return f"{value:+,{digits}}".replace("-", "−")


def bits_text(value: float | None) -> str:
    """Write bits."""
    return DASH if value is None else f"{value:.2f}"


def spec_name(spec: str) -> str:
    """A spec as tables call it."""
    return "16 bit" if spec == UNCOMPRESSED else spec


def agreement(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common beginning of two texts or lists of tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def listed(names: list[str], most: int = 8) -> str:
    """Names in a sentence, the rest counted.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c"], 2)
    ('a', 'a, b and c', 'a, b and 1 more')
    """
    shown = names if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
