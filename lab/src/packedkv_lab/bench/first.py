"""Time to the first token of a new cache, and of a later turn's: ``packedkv bench first``.

A model of Llama-3.2-1B's shape with random bf16 weights (speed only), one sequence, eager. Times are
the host's, from the prompt to its first token read back; for a new cache they include its construction.

==================  ====  ============================================================================================
metric              unit  what
==================  ====  ============================================================================================
``first_cache_ms``  ms    the first cache of this spec in the process, ``FIRST_PROMPT`` tokens: constants are built and
                          kernels loaded (compiled too, unless ``packedkv compile`` ran before);
                          ``caches_before`` counts the caches of other specs
``first_token_ms``  ms    the caches after it, at prompts of ``PROMPTS``
``next_turn_ms``    ms    new tokens over a cache that holds ``HELD``
==================  ====  ============================================================================================

The rival is DynamicCache, both as torch chooses the backend of its attention and with cuDNN's switched off; the faster
of the two then takes turns with every preset, because a host's times move by half within a minute. A preset's time is
compared with the mean of the two turns of the rival beside it, so what slows both cancels: ``vs_dynamic`` is the median
of these ratios, ``beyond_ms`` that of time - 1.5 x rival in the same pairs, ``dynamic_ms`` the rival's median. For a
first cache, which is timed once, ``vs_dynamic`` is the ratio to DynamicCache's median. ``paths`` are those of the
cache's report.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from packedkv.cli.measure.generation import FORMS, attention_backends
from packedkv.description import describe
from packedkv.errors import KVError, UnsupportedError
from packedkv.integrations.transformers.argument import passing
from packedkv.registry import presets
from packedkv_lab.bench.record import Deadline, DeviceLostError, Recorder, Row, device_lost, spread
from packedkv_lab.bench.timing import synchronize

PROMPTS = (512, 1024, 4096, 16384)
FIRST_PROMPT = 1024
HELD, NEW = 14336, (1024, 128)
REPEATS, SECONDS = 7, 3.0
"""Number of caches per median; at least two, but fewer if they take longer than this."""
ALLOWED = 1.5
"""Of DynamicCache's time: ``beyond_ms`` is what goes beyond it."""


def served() -> list[str]:
    """Presets whose keys and values kernels encode and read; ``dense`` is the rival."""
    found = [(preset, str(describe(preset)["kernels"])) for preset in presets()]
    return [preset for preset, kernels in found if "none" not in kernels and preset != "dense"]


def shape_name(tokens: int, new: int = 0) -> str:
    """Name as rows carry it.

    >>> shape_name(1024), shape_name(14336, 128)
    ('llama_1b_1024', 'llama_1b_14336_128')
    """
    return f"llama_1b_{tokens}" + (f"_{new}" if new else "")


def make_model(device: torch.device, layers: int = 16, **sizes: Any) -> Any:
    """Return a randomly initialised Llama-3.2-1B (or another size, for tests)."""
    transformers = importlib.import_module("transformers")
    shape = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }  # fmt: skip
    config = transformers.LlamaConfig(**(shape | sizes))
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class Subject(NamedTuple):
    """A cache to time: spec and form as rows carry them, and how one is made."""

    spec: str
    cache: str
    form: str
    make: Callable[[], Any]


class Fastest(NamedTuple):
    """DynamicCache's time, and which ``FORMS`` of attention it took."""

    ms: float
    form: str


class Runner:
    """Runs prompts and turns of a model.

    Parameters
    ----------
    model : PreTrainedModel
    held : int
        Tokens of a cache that a turn goes on with.
    """

    def __init__(self, model: Any, held: int) -> None:
        self.model, self.held, self.device = model, held, model.device
        config = model.config
        generator = torch.Generator(self.device).manual_seed(0)
        most = max(*PROMPTS, *NEW, held)
        self.ids = torch.randint(10, config.vocab_size, (1, most), generator=generator, device=self.device)

    def dense(self) -> Any:
        """Return an empty DynamicCache."""
        return importlib.import_module("transformers").DynamicCache(config=self.model.config)

    def packed(self, spec: str) -> Any:
        """Return an empty packed cache, as a user makes it."""
        cache_for = importlib.import_module("packedkv.integrations.transformers.cache").cache_for
        return cache_for(self.model, spec, attention="fused")

    def filled(self, make: Callable[[], Any]) -> Any:
        """Return a cache filled with ``held`` tokens."""
        cache = make()
        self.token(cache, self.held)
        return cache

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
        cache = self.filled(make)
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
) -> tuple[dict[str, float], dict[str, Any]]:
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
    found = {key: report[key] for key in ("effective_bits", "paths") if key in report}
    if rival is not None:
        found |= beside(times, [*others, rival()])
    return spread(times), found | {"caches": len(times)}


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


def first_rows(
    specs: Sequence[str],
    recorder: Recorder,
    *,
    device: torch.device,
    seed: int = 0,
    deadline: Deadline | None = None,
    prompts: Sequence[int] = PROMPTS,
    first_prompt: int = FIRST_PROMPT,
    held: int = HELD,
    new: Sequence[int] = NEW,
    repeats: int = REPEATS,
    model: Any = None,
) -> Iterator[Row]:
    """Time DynamicCache and presets; presets whose rows are there already are left out.

    Parameters
    ----------
    specs : sequence of str
    recorder, device, deadline
        As ``decode.decode_rows``.
    seed : int
        Stamped; weights and tokens are drawn from 0.
    prompts : sequence of int
    first_prompt : int
        Of the first cache of a spec.
    held : int
    new : sequence of int
        New tokens over ``held``.
    repeats : int
        Caches that a median is of, at most.
    model : PreTrainedModel, optional
        Default ``make_model``.

    Returns
    -------
    iterator of dict
        Rows as they are measured.

    Raises
    ------
    UnsupportedError
        If transformers is not installed.
    """
    deadline = deadline or Deadline()
    try:
        importlib.import_module("transformers")
        importlib.import_module("packedkv.integrations.transformers.cache")  # registers the attention function
    except ModuleNotFoundError as error:
        raise UnsupportedError("bench first needs transformers; run: pip install 'packedkv[transformers]'") from error
    last = shape_name(held, new[-1])
    wanted = [spec for spec in specs if not recorder.has(spec, "next_turn_ms", last)]
    if not wanted or deadline.passed:
        return
    runner = Runner(model or make_model(device), held)
    dynamic: dict[str, Fastest] = {}
    subjects = [Subject("dense", "DynamicCache", form, runner.dense) for form in FORMS]
    subjects += [Subject(spec, "packedkv fused", "", partial(runner.packed, spec)) for spec in wanted]
    for before, subject in enumerate(subjects):
        if deadline.passed:
            recorder.say(f"out of time before {subject.spec}; run again to go on")
            return
        runner.model.set_attn_implementation("sdpa" if subject.spec == "dense" else "packedkv")
        with attention_backends(subject.form), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the probe warns on random weights
            plan = [("first_token_ms", shape_name(n), n, runner.first) for n in prompts]
            plan += [("next_turn_ms", shape_name(held, n), n, runner.turn) for n in new]
            common = {"before": max(before - len(FORMS), 0), "first_prompt": first_prompt, "repeats": repeats}
            yield from _subject_rows(subject, plan, recorder, runner, dynamic, **common)


Turn = Callable[[Callable[[], Any], int], tuple[float, Any]]
Plan = Sequence[tuple[str, str, int, Turn]]


def _subject_rows(
    subject: Subject,
    plan: Plan,
    recorder: Recorder,
    runner: Runner,
    dynamic: dict[str, Fastest],
    *,
    before: int,
    first_prompt: int,
    repeats: int,
) -> Iterator[Row]:
    dense = subject.spec == "dense"
    common: dict[str, Any] = {"cache": subject.cache} | ({"form": subject.form} if subject.form else {})
    metric, shape = "first_cache_ms", shape_name(first_prompt)
    try:
        ms, _ = runner.first(subject.make, first_prompt)
        if not dense:  # DynamicCache's first call includes the start-up of the process
            values = dict.fromkeys(("p20", "p50", "p80"), round(ms, 3))
            told = {}
            if (known := dynamic.get(f"first_token_ms {shape}")) is not None:
                told = {"vs_dynamic": round(ms / known.ms, 3), "dynamic_ms": known.ms}
            yield recorder.add(subject.spec, None, metric, "ms", shape, values, caches_before=before, **told, **common)
        for metric, shape, n, one in plan:
            if dense:
                one(subject.make, n)  # plans of shapes that the process has not seen
            key = f"{metric} {shape}"
            fastest = None if dense else dynamic.get(key)
            rival = None if fastest is None else partial(runner.dynamic, one, n, fastest.form)
            values, found = repeated(partial(one, subject.make, n), repeats, rival)
            bits = found.pop("effective_bits", 16.0 if dense else None)
            if dense:
                mine = Fastest(values["p50"], subject.form)
                dynamic[key] = min(dynamic.get(key, mine), mine)
            yield recorder.add(subject.spec, bits, metric, "ms", shape, values, **found, **common)
    except Exception as error:  # a failed cache must not lose the others' results
        lost = device_lost(runner.device)
        word = "device lost" if lost else "no kernel" if isinstance(error, UnsupportedError) else "failed"
        status = f"{word}: {type(error).__name__}: {str(error)[:300]}"
        yield recorder.add(subject.spec, None, metric, "ms", shape, None, status=status, **common)
        if lost:
            raise DeviceLostError(f"bench first: {subject.spec} broke the CUDA context.") from error
        if not isinstance(error, KVError | RuntimeError | ValueError):
            recorder.say(f"unexpected {type(error).__name__}; the row says what")
