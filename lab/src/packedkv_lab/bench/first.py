"""``packedkv bench first``: time to the first token of a new cache, and of a later turn.

A model of Llama-3.2-1B's shape with random bf16 weights, one sequence, eager; host times from the prompt to its first
token read back.

- ``first_cache_ms``: the first cache of a spec in the process, its construction, constants and kernels included
- ``first_token_ms``: later caches, at prompts of ``PROMPTS``; ``next_turn_ms``: new tokens over ``HISTORY`` ones

DynamicCache, with the faster of ``FORMS``, takes turns with every preset, because a host's times move by half within a
minute. ``vs_dynamic`` is the median ratio of a preset's time to the mean of the two turns of the rival beside it,
``beyond_ms`` the median of time - 1.5 x rival. A first cache is compared with DynamicCache's median.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from packedkv.cli.measure.generation import FORMS, attention_backends, uncompressed_cache
from packedkv.description import describe
from packedkv.integrations.transformers.argument import passing
from packedkv.registry import presets
from packedkv_lab.bench.generate import make_model, require_transformers
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.timing import Spread, flat, spread, synchronize

PROMPTS = (512, 1024, 4096, 16384)
FIRST_PROMPT = 1024
HISTORY, NEW = 14336, (1024, 128)
REPEATS, SECONDS = 7, 3.0
"""Number of caches per median; at least two, but fewer if they take longer than this."""
ALLOWED = 1.5
"""Of DynamicCache's time: ``beyond_ms`` is what goes beyond it."""


def served() -> list[str]:
    """Presets whose keys and values kernels encode and read; ``dense`` is the rival."""
    pairs = [(preset, str(describe(preset)["kernels"])) for preset in presets()]
    return [preset for preset, kernels in pairs if "none" not in kernels and preset != "dense"]


def shape_name(tokens: int, new: int = 0) -> str:
    """Name as rows carry it.

    >>> shape_name(1024), shape_name(14336, 128)
    ('llama_1b_1024', 'llama_1b_14336_128')
    """
    return f"llama_1b_{tokens}" + (f"_{new}" if new else "")


class Runner:
    """Runs prompts of a model, and turns over a cache that holds ``history`` tokens."""

    def __init__(self, model: Any, history: int) -> None:
        self.model, self.history, self.device = model, history, model.device
        config = model.config
        generator = torch.Generator(self.device).manual_seed(0)
        most = max(*PROMPTS, *NEW, history)
        self.ids = torch.randint(10, config.vocab_size, (1, most), generator=generator, device=self.device)

    def dense(self) -> Any:
        """Return an empty DynamicCache."""
        return uncompressed_cache(self.model)

    def packed(self, spec: str) -> Any:
        """Return an empty packed cache, as a user makes it."""
        cache_for = importlib.import_module("packedkv.integrations.transformers.cache").cache_for
        return cache_for(self.model, spec, attention="fused")

    def token(self, cache: Any, n: int) -> int:
        """Run ``n`` tokens and read the first new one back."""
        out = self.model(self.ids[:, :n], **passing(self.model, cache), use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    @torch.no_grad()
    def first(self, make: Callable[[], Any], n: int) -> tuple[float, Any]:
        """Milliseconds to make a cache and get the first token of a prompt, and the cache."""
        synchronize(self.device)
        begun = time.perf_counter()
        cache = make()
        self.token(cache, n)
        return (time.perf_counter() - begun) * 1e3, cache

    @torch.no_grad()
    def turn(self, make: Callable[[], Any], n: int) -> tuple[float, Any]:
        """Milliseconds to the first token of a turn of ``n`` tokens over a filled cache, and the cache."""
        cache = make()
        self.token(cache, self.history)
        synchronize(self.device)
        begun = time.perf_counter()
        self.token(cache, n)
        return (time.perf_counter() - begun) * 1e3, cache

    def dynamic(self, one: "Turn", n: int, form: str) -> float:
        """Milliseconds of ``one`` with a DynamicCache and ``form`` of torch's attention."""
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("sdpa")
        try:
            with attention_backends(form):
                return one(self.dense, n)[0]
        finally:
            self.model.set_attn_implementation(attention)


def repeated(
    one: Callable[[], tuple[float, Any]], repeats: int, rival: Callable[[], float] | None = None
) -> tuple[Spread, dict[str, Any]]:
    """Spread of the times of ``one``, and what the last cache reports; with a rival that goes before and after each."""
    times: list[float] = []
    others: list[float] = []
    begun = time.monotonic()
    cache: Any = None
    while len(times) < repeats and (len(times) < 2 or time.monotonic() - begun < SECONDS):
        del cache  # before the next one is made
        if rival is not None:
            others.append(rival())
        ms, cache = one()
        times.append(ms)
    report = cache.report() if hasattr(cache, "report") else {}
    del cache
    entries = {key: report[key] for key in ("effective_bits", "paths") if key in report}
    if rival is not None:
        entries |= beside(times, [*others, rival()])
    return spread(times), entries | {"caches": len(times)}


def beside(times: Sequence[float], rivals: Sequence[float]) -> dict[str, float]:
    """Compare each time with the mean of the rival's before and after it; medians of what the pairs say.

    >>> beside([6.0, 14.0], [3.0, 5.0, 9.0])
    {'vs_dynamic': 1.75, 'beyond_ms': 1.75, 'dynamic_ms': 5.0}
    """
    pairs = [(ms, (before + after) / 2) for ms, before, after in zip(times, rivals[:-1], rivals[1:], strict=True)]
    return {
        "vs_dynamic": round(median(ms / other for ms, other in pairs), 3),
        "beyond_ms": round(median(ms - ALLOWED * other for ms, other in pairs), 3),
        "dynamic_ms": round(median(rivals), 4),
    }


Turn = Callable[[Callable[[], Any], int], tuple[float, Any]]


class Timing(NamedTuple):
    """One figure: metric, shape, tokens of the prompt or turn, and the method of ``Runner`` that times it."""

    metric: str
    shape: str
    tokens: int
    run: Turn


def first_rows(
    specs: Sequence[str],
    recorder: Recorder,
    *,
    prompts: Sequence[int] = PROMPTS,
    first_prompt: int = FIRST_PROMPT,
    history: int = HISTORY,
    new: Sequence[int] = NEW,
    repeats: int = REPEATS,
    model: Any = None,
) -> None:
    """Time DynamicCache and presets; presets whose rows are there already are left out.

    ``first_prompt`` is that of the first cache of a spec; ``new`` tokens are run over ``history``. A median is of at
    most ``repeats`` caches. ``UnsupportedError`` without transformers.
    """
    require_transformers("first")
    last = shape_name(history, new[-1])
    wanted = [spec for spec in specs if not recorder.has(spec, "next_turn_ms", last)]
    if not wanted or recorder.out_of_time:
        return
    runner = Runner(model or make_model("Llama-3.2-1B", recorder.device), history)
    timings = [Timing("first_token_ms", shape_name(n), n, runner.first) for n in prompts]
    timings += [Timing("next_turn_ms", shape_name(history, n), n, runner.turn) for n in new]
    fastest: dict[tuple[str, str], tuple[float, str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the probe warns on random weights
        runner.model.set_attn_implementation("sdpa")
        for form in FORMS:
            if recorder.late("dense"):
                return
            with attention_backends(form):
                for timing in timings:
                    _dense_row(timing, form, runner, recorder, repeats, fastest)
        runner.model.set_attn_implementation("packedkv")
        for before, spec in enumerate(wanted):
            if recorder.late(spec):
                return
            if _first_cache(spec, first_prompt, before, runner, recorder, fastest):
                for timing in timings:
                    _packed_row(spec, timing, runner, recorder, repeats, fastest)


def _dense_row(
    timing: Timing, form: str, runner: Runner, recorder: Recorder, repeats: int, fastest: dict[Any, tuple[float, str]]
) -> None:
    """Time DynamicCache with one form of attention; keep the faster form of each metric and shape in ``fastest``."""
    metric, shape, n, run = timing
    more = {"cache": "DynamicCache", "form": form}
    with recorder.case("dense", shape, metric, "ms", bits=16.0, more=more) as case:
        run(runner.dense, n)  # plans of shapes that the process has not seen
        values, entries = repeated(partial(run, runner.dense, n), repeats)
        mine = values["p50"], form
        fastest[metric, shape] = min(fastest.get((metric, shape), mine), mine)
        case.add(metric, "ms", values, **entries)


def _first_cache(
    spec: str, prompt: int, before: int, runner: Runner, recorder: Recorder, fastest: dict[Any, tuple[float, str]]
) -> bool:
    """Time the first cache of a spec; return whether it works."""
    shape = shape_name(prompt)
    with recorder.case(spec, shape, "first_cache_ms", "ms", more={"cache": "packedkv fused"}) as case:
        ms, _ = runner.first(partial(runner.packed, spec), prompt)
        told = {}
        if (known := fastest.get(("first_token_ms", shape))) is not None:
            told = {"vs_dynamic": round(ms / known[0], 3), "dynamic_ms": known[0]}
        case.add("first_cache_ms", "ms", flat(ms), caches_before=before, **told)
        return True
    return False


def _packed_row(
    spec: str, timing: Timing, runner: Runner, recorder: Recorder, repeats: int, fastest: dict[Any, tuple[float, str]]
) -> None:
    """Time later caches of a spec, in turns with DynamicCache."""
    metric, shape, n, run = timing
    with recorder.case(spec, shape, metric, "ms", more={"cache": "packedkv fused"}) as case:
        known = fastest.get((metric, shape))
        rival = None if known is None else partial(runner.dynamic, run, n, known[1])
        values, entries = repeated(partial(run, partial(runner.packed, spec), n), repeats, rival)
        case.bits = entries.pop("effective_bits", None)
        case.add(metric, "ms", values, **entries)
