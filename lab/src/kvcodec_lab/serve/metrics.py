"""Metrics of a load, from its replies and the server's own counters.

===========================  ========  =================================================================================
metric                       unit      what
===========================  ========  =================================================================================
``requests_per_s``           1/s       requests answered whole / wall time
``output_tokens_per_s``      tokens/s  output tokens of these / wall time: SAW-INT4's system throughput (Eq. 17)
``total_tokens_per_s``       tokens/s  prompt and output tokens / wall time
``request_tokens_per_s``     tokens/s  of a request: output tokens / (E2E - TTFT), SAW-INT4's Eq. 18 (theirs: the mean)
``ttft_ms``                  ms        of a request: until its first token
``tpot_ms``                  ms        of a request: (E2E - TTFT) / (output tokens - 1)
``itl_ms``                   ms        of all requests together: from one event of a stream to the next
``e2e_ms``                   ms        of a request: until its last token
``prefix_hit_share``         x         prompt tokens found in the prefix cache / looked up; the server's counters
``prefix_residency``         x         of a request: tokens found / whole blocks of what its session had computed before
``lost_tokens``              tokens    what is missing there: evicted, and computed again
``preemptions``              requests  as the server counts them
``evicted_blocks_sampled``   blocks    of the blocks that it samples (vLLM: ``--kv-cache-metrics``)
``requests_done``            requests  answered whole; ``failed``, ``unsent`` and ``errors`` beside it count the others
===========================  ========  =================================================================================

Times are of requests that were answered completely. A single number of a whole load fills p20, p50 and p80.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcodec_lab.serve.client import Reply
from kvcodec_lab.serve.loads import Run

PERCENTS = (20, 50, 80, 99)
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LOGGED = re.compile(r"\bKV cache size:\s*([\d,]+) tokens")


class Figure(NamedTuple):
    """The content of a row: metric, unit, values, and their number."""

    metric: str
    unit: str
    values: dict[str, float]
    n: int


def quantiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return p20, p50, p80, p99 and the mean, linear between neighbours as numpy has it."""
    scaled = np.asarray(values, dtype=np.float64) * scale
    found = {f"p{p}": round(float(np.percentile(scaled, p)), 4) for p in PERCENTS}
    return found | {"mean": round(float(scaled.mean()), 4)}


def flat(x: float) -> dict[str, float]:
    """Return one number as values."""
    return dict.fromkeys(("p20", "p50", "p80"), round(x, 4))


def throughput(replies: Sequence[Reply], wall: float) -> list[Figure]:
    """Figures of all requests together; empty if none was answered."""
    done = [reply for reply in replies if reply.ok]
    if not done or wall <= 0:
        return []
    output, prompt = sum(r.output_tokens for r in done), sum(r.prompt_tokens for r in done)
    sums = (("requests_per_s", "1/s", len(done)), ("output_tokens_per_s", "tokens/s", output),
            ("total_tokens_per_s", "tokens/s", prompt + output))  # fmt: skip
    return [Figure(metric, unit, flat(total / wall), len(done)) for metric, unit, total in sums]


def latencies(replies: Sequence[Reply]) -> list[Figure]:
    """Figures of requests one by one; those that no request has are left out."""
    done = [reply for reply in replies if reply.ok]
    found: tuple[tuple[str, str, float, list[float | None]], ...] = (
        ("request_tokens_per_s", "tokens/s", 1.0, [r.tokens_per_s for r in done]),
        ("itl_ms", "ms", 1e3, [gap for r in done for gap in r.gaps]),
        ("e2e_ms", "ms", 1e3, [r.latency for r in done]),
        ("tpot_ms", "ms", 1e3, [r.tpot for r in done]),
        ("ttft_ms", "ms", 1e3, [r.ttft for r in done]),
    )
    out = []
    for metric, unit, scale, values in found:
        known = [x for x in values if x is not None]
        if known:
            out.append(Figure(metric, unit, quantiles(known, scale), len(known)))
    return out


def residency(replies: Sequence[Reply], block: int | None) -> list[Figure]:
    """For rounds after the first, how much of the session's prefix was still cached; empty if the server does not say.

    Parameters
    ----------
    replies : sequence of Reply
    block : int, optional
        Tokens of a block: only whole ones can be found again.
    """
    shares, lost = [], []
    for reply in replies:
        whole = reply.prefix_tokens // block * block if block else reply.prefix_tokens
        if reply.ok and reply.cached_tokens is not None and whole:
            shares.append(min(reply.cached_tokens / whole, 1.0))
            lost.append(max(whole - reply.cached_tokens, 0))
    if not shares:
        return []
    return [Figure("prefix_residency", "x", quantiles(shares), len(shares)),
            Figure("lost_tokens", "tokens", flat(sum(lost)), len(lost))]  # fmt: skip


def errors_of(run: Run, replies: Iterable[Reply] | None = None) -> dict[str, Any]:
    """How many requests failed, how many of each kind, and what the first of each kind said."""
    failed = run.failed if replies is None else [r for r in replies if not r.ok]
    kinds: Counter[str] = Counter()
    said: dict[str, str] = {}
    for reply in failed:
        assert reply.error is not None
        kinds[reply.error.kind] += 1
        said.setdefault(reply.error.kind, reply.error.text)
    return {"failed": len(failed), "errors": {k: {"count": n, "first": said[k]} for k, n in kinds.items()}}


# -- the server's own counters -----------------------------------------------------------------------------------------


class Page:
    """A page of Prometheus metrics.

    Parameters
    ----------
    text : str
        Lines that are not samples are ignored.
    """

    def __init__(self, text: str) -> None:
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match:
                try:
                    value = float(match[3])
                except ValueError:
                    continue
                self.samples.append((match[1], dict(_LABEL.findall(match[2] or "")), value))

    def total(self, name: str) -> float | None:
        """Sum of a counter over its series (engines, ranks); None if the server has none of that name."""
        found = [value for n, _, value in self.samples if n in (name, f"{name}_total")]
        return sum(found) if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        """Labels of every series of a metric."""
        return [labels for n, labels, _ in self.samples if n == name]


COUNTERS = {
    "preemptions": ("requests", "vllm:num_preemptions"),
    "evicted_blocks_sampled": ("blocks", "vllm:kv_block_lifetime_seconds_count"),
}


def counted(before: str, after: str) -> list[Figure]:
    """Figures of what a server counted between two of its pages; empty where it counts nothing."""
    first, last = Page(before), Page(after)

    def grown(name: str) -> float | None:
        end = last.total(name)
        return None if end is None else end - (first.total(name) or 0.0)

    found = []
    hits, asked = grown("vllm:prefix_cache_hits"), grown("vllm:prefix_cache_queries")
    if hits is not None and asked:
        found.append(Figure("prefix_hit_share", "x", flat(hits / asked), int(asked)))
    for metric, (unit, name) in COUNTERS.items():
        count = grown(name)
        if count is not None:
            found.append(Figure(metric, unit, flat(count), 1))
    return found


class Capacity(NamedTuple):
    """What a server's cache holds: tokens of all its engines, tokens of a block."""

    tokens: int | None
    block: int | None


def capacity(log: str, page: str) -> Capacity:
    """Read the cache's size from what the server printed, else from its metrics.

    Parameters
    ----------
    log : str
        vLLM prints ``GPU KV cache size: 797,488 tokens``, on CPUs as well; every data-parallel engine its own.
    page : str
        Its ``vllm:cache_config_info`` has the size, or blocks and tokens of a block as labels.
    """
    about = Page(page).labels("vllm:cache_config_info")

    def number(labels: Mapping[str, str], name: str) -> int:
        text = labels.get(name, "")
        return int(text) if text.isdigit() else 0

    block = next((number(labels, "block_size") for labels in about), 0)
    sizes = [number(x, "kv_cache_size_tokens") or number(x, "num_gpu_blocks") * number(x, "block_size") for x in about]
    printed = [int(text.replace(",", "")) for text in _LOGGED.findall(log)]
    # one engine may print it twice, each of several prints it once
    tokens = sum(printed[-max(len(about), 1) :]) if printed else sum(sizes)
    return Capacity(tokens or None, block or None)
