"""``packedkv bench generate``: time and memory of decode steps of a Qwen3-8B-shaped model with random weights.

Caches are filled with random keys and values, one token short of the prompt. Three ways of stepping:

- ``generate``: the call a user makes, with its compilation off; times between the logits of one token and the next
- ``graph``: one step captured in a CUDA graph and replayed, which excludes the host; beside StaticCache
- ``compiled``: ``generate`` with its own torch.compile, as it runs by itself with a cache of fixed capacity

cuDNN plans anew for every length that it has not seen, in a cache that grows in every step: such caches are timed with
cuDNN's attention and without, and compared in the faster form.
"""

import contextlib
import gc
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from packedkv.cli.measure.generation import FORMS, attention_backends
from packedkv.description import describe
from packedkv.errors import SpecError, UnsupportedError
from packedkv.fitting.samples import capture
from packedkv.integrations.transformers.argument import passing
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.rivals import quantizer_rivals
from packedkv_lab.bench.timing import spread, synchronize

WAYS = ("generate", "graph", "compiled")
BATCHES = (8, 1)
PROMPT = 32768
RIVALS = {"generate": "DynamicCache", "graph": "StaticCache", "compiled": "StaticCache"}
"""16-bit caches of transformers that each way is compared with."""
QUANTIZED_BITS = 4
"""Of transformers' QuantizedCache."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("Qwen3Config", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    }),
    "Llama-3.2-1B": ("LlamaConfig", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
"""Models by name: class of the config, and its sizes."""
UNCOUNTED = 3
"""Steps of a call that are not counted: the first ones of a compiled call record its graphs."""


def shape_name(batch: int, prompt: int) -> str:
    """Name as rows carry it.

    >>> shape_name(8, 32768)
    'qwen3_8b_b8_32k'
    """
    return f"qwen3_8b_b{batch}_{prompt // 1024}k"


def batches_of(names: str) -> tuple[int, ...]:
    """Sequences of shapes by name, comma-separated; of the default prompt only.

    >>> batches_of("qwen3_8b_b1_32k,qwen3_8b_b8_32k")
    (1, 8)
    """
    batches = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        match = re.fullmatch(r"qwen3_8b_b([1-9]\d*)_32k", name)
        if match is None:
            raise SpecError(f"bench generate: no shape {name!r}; use e.g. {shape_name(8, PROMPT)}.")
        batches.append(int(match[1]))
    return tuple(batches)


def require_transformers(bench: str) -> None:
    """Import transformers and register the attention function; ``UnsupportedError`` without transformers."""
    try:
        importlib.import_module("transformers")
        importlib.import_module("packedkv.integrations.transformers.cache")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"bench {bench} needs transformers; run: pip install 'packedkv[transformers]'"
        ) from error


def make_model(name: str, device: torch.device, **sizes: Any) -> Any:
    """Return a model of ``SHAPES`` (or of other sizes, for tests) with random bf16 weights."""
    transformers = importlib.import_module("transformers")
    kind, shape = SHAPES[name]
    torch.manual_seed(0)
    with device:
        config = getattr(transformers, kind)(**(shape | sizes))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


class GpuLock:
    """A lock for processes that share a GPU, through a file; without a file there is no other process.

    torch.compile takes most of a minute of CPU time per cache and hardly uses the GPU. Processes compile in parallel
    (``exclusive=False``); while one is timed, no other process runs.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    @contextlib.contextmanager
    def hold(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the lock; waits for the processes that exclude this one."""
        if self.path is None:
            yield
            return
        import fcntl  # not on every system

        handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)  # releases the lock, as does the end of the process


class Filler:
    """Makes caches of ``batch`` sequences that hold random tokens, one short of the prompt.

    A cache of fixed capacity holds ``room`` tokens more than the prompt.
    """

    def __init__(self, model: Any, batch: int, prompt: int, room: int) -> None:
        self.model, self.batch, self.prompt, self.room = model, batch, prompt, room
        config, device = model.config, model.device
        generator = torch.Generator(device).manual_seed(0)
        size = (batch, config.num_key_value_heads, prompt - 1, config.head_dim)
        # one pair for all layers: what a step costs does not depend on the values
        self.k, self.v = (torch.randn(size, generator=generator, device=device, dtype=model.dtype) for _ in "kv")
        self.ids = torch.randint(10, config.vocab_size, (batch, prompt), generator=generator, device=device)

    def filled(self, cache: Any) -> Any:
        """Fill a cache layer by layer."""
        # a cache that holds keys without their mean listens to the model's positions
        self.model.get_decoder().rotary_emb(self.k, torch.arange(self.prompt - 1, device=self.k.device)[None])
        for layer in range(self.model.config.num_hidden_layers):
            cache.update(self.k, self.v, layer)
        return cache

    def dense(self, kind: str) -> Any:
        """Return an empty 16-bit cache of transformers."""
        transformers = importlib.import_module("transformers")
        if kind == "DynamicCache":
            return transformers.DynamicCache(config=self.model.config)
        return transformers.StaticCache(config=self.model.config, max_cache_len=self.prompt + self.room)

    def quantized(self, backend: str) -> Any:
        """Return an empty QuantizedCache of transformers, as its documentation makes one for this backend."""
        transformers = importlib.import_module("transformers")
        axis = 1 if backend == "hqq" else 0
        return transformers.QuantizedCache(
            backend, self.model.config, nbits=QUANTIZED_BITS, axis_key=axis, axis_value=axis
        )

    def packed(self, spec: str, fixed: bool) -> Any:
        """Return an empty packed cache served by the kernels; ``fixed``: of fixed capacity.

        ``UnsupportedError`` if no kernel encodes a role: the reference would take minutes to fill all layers.
        """
        written = describe(spec)["kernels"]["encode"]
        if not written or "none" in str(written):
            raise UnsupportedError(f"no kernel encodes {spec} (keys and values: {written})")
        cache_for = importlib.import_module("packedkv.integrations.transformers.cache").cache_for
        max_len = self.prompt + self.room if fixed else None
        return cache_for(self.model, spec, attention="fused", max_len=max_len, probe=False)


class Job(NamedTuple):
    """A cache to benchmark: fields of its row, and its factory; ``form`` of caches that grow."""

    spec: str
    cache: str
    make: Callable[[Filler], Any]
    form: str = ""


def generate_rows(
    specs: Sequence[str],
    recorder: Recorder,
    *,
    batches: Sequence[int] = BATCHES,
    ways: Sequence[str] = WAYS,
    dense: bool = True,
    lock: GpuLock | None = None,
    prompt: int = PROMPT,
    new_tokens: int = 16,
    model: Any = None,
) -> None:
    """Time transformers' caches (16-bit ones if ``dense``) and presets; what is recorded already is left out.

    Weights and tokens are random, seed 0. ``UnsupportedError`` without transformers, ``SpecError`` for an unknown way.
    """
    if unknown := set(ways) - set(WAYS):
        raise SpecError(f"bench generate: no way {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}.")
    require_transformers("generate")
    lock = lock or GpuLock()
    for way in ways:
        for batch in batches:
            jobs = _jobs(way, specs, dense, recorder.libraries)
            metric, name = f"ms_per_token_{way}", shape_name(batch, prompt)
            jobs = [job for job in jobs if not recorder.has(job.spec, metric, name, job.form or None)]
            filler = None
            for job in jobs:
                if recorder.late(f"{way} of {job.spec}, {batch} sequences"):
                    return
                if model is None:
                    with lock.hold(exclusive=False):
                        model = make_model("Qwen3-8B", recorder.device)
                filler = filler or Filler(model, batch, prompt, new_tokens + 32)
                _row(job, way, filler, new_tokens, recorder, lock)


def _jobs(way: str, specs: Sequence[str], dense: bool, libraries: bool) -> list[Job]:
    kind = RIVALS[way]
    forms = FORMS if way == "generate" else ("",)  # a StaticCache has one length
    jobs = [Job("dense", kind, partial(Filler.dense, kind=kind), form) for form in forms if dense]
    jobs += [Job(s, "packedkv fused", partial(Filler.packed, spec=s, fixed=way != "generate")) for s in specs]
    if libraries and dense and way == "generate":
        for rival in quantizer_rivals(128):
            backend, _, bits = rival.name.partition("-")
            if int(bits) == QUANTIZED_BITS:
                make = partial(Filler.quantized, backend=backend)
                jobs += [Job(rival.name, "QuantizedCache", make, form) for form in FORMS]
    return jobs


def _row(job: Job, way: str, filler: Filler, new_tokens: int, recorder: Recorder, lock: GpuLock) -> None:
    model, name = filler.model, shape_name(filler.batch, filler.prompt)
    model.set_attn_implementation("packedkv" if job.cache == "packedkv fused" else "sdpa")
    model.generation_config.disable_compile = way != "compiled"
    more = {"cache": job.cache, "prompt_tokens": filler.prompt, "new_tokens": new_tokens,
            "model": f"Qwen3-8B-shaped, {model.config.num_hidden_layers} layers, random bf16 weights"}  # fmt: skip
    more |= {"form": job.form} if job.form else {}
    bits = 16.0 if job.spec == "dense" else None
    timed, make = timed_graph if way == "graph" else timed_generate, partial(job.make, filler)
    with (
        recorder.case(
            job.spec, name, f"ms_per_token_{way}", "ms", bits=bits, name=f"{way} of {job.spec}", more=more
        ) as case,
        attention_backends(job.form),
    ):
        if way != "graph":
            with lock.hold(exclusive=False):
                timed(filler, make, UNCOUNTED + 2)  # compiles
        with lock.hold(exclusive=True):
            results = timed(filler, make, new_tokens)
        case.bits = results.pop("effective_bits", bits)
        case.add(f"ms_per_token_{way}", "ms", results.pop("values"), **results)


def _clean(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


class Stamps:
    """A logits processor that only records the time of each token; on a GPU, by the GPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.stamps: list[Any] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note one token's time."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.stamps.append(event)
        else:
            self.stamps.append(time.perf_counter())
        return scores

    def milliseconds(self) -> list[float]:
        """From each token to the next."""
        pairs = pairwise(self.stamps)
        return [a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3 for a, b in pairs]


@torch.no_grad()
def timed_generate(filler: Filler, make: Callable[[], Any], new_tokens: int) -> dict[str, Any]:
    """Run ``generate`` on a filled cache; milliseconds from token to token, without the first ones, and memory."""
    model, device = filler.model, filler.model.device
    before = _clean(device)
    cache, stamps = filler.filled(make()), Stamps(device)
    synchronize(device)
    n = UNCOUNTED + new_tokens
    noting = importlib.import_module("transformers").LogitsProcessorList([stamps])
    model.generate(
        filler.ids, **passing(model, cache), max_new_tokens=n, min_new_tokens=n, do_sample=False,
        attention_mask=torch.ones_like(filler.ids), logits_processor=noting,
    )  # fmt: skip
    synchronize(device)
    results: dict[str, Any] = {"values": spread(stamps.milliseconds()[UNCOUNTED - 1 :])}
    if device.type == "cuda":
        results |= {"peak_bytes": torch.cuda.max_memory_allocated() - before,
                    "held_bytes": torch.cuda.memory_allocated() - before}  # fmt: skip
    if hasattr(cache, "report"):
        about = cache.report()
        results |= {"effective_bits": about["effective_bits"], "paths": about["paths"]}
    return results


@torch.no_grad()
def timed_graph(filler: Filler, make: Callable[[], Any], replays: int) -> dict[str, Any]:
    """Capture one decode step of a filled cache and replay it; milliseconds and memory."""
    model, device = filler.model, filler.model.device
    before = _clean(device)
    cache = filler.filled(make())
    token = filler.ids[:, -1:].clone()
    position = torch.full((filler.batch, 1), filler.prompt - 1, device=device)
    given = passing(model, cache)

    def step() -> None:
        out = model(token, position_ids=position, **given, use_cache=True).logits
        token.copy_(out[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    graph, times = capture(step), []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    results: dict[str, Any] = {"values": spread(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}
    if hasattr(cache, "report"):
        results["effective_bits"] = cache.report()["effective_bits"]
    return results
