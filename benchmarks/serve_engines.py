"""One engine of ``serve_h200.py`` in a process of its own: starts it, does one part, appends rows.

It imports vLLM, then waits for a line on standard input: its turn, of so many seconds at most.
"""

import argparse
import asyncio
import collections
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from serve_sizes import (
    DRAFTS,
    LOADS,
    ON_A_CPU,
    RIVALS,
    SAID,
    SCALES,
    SEED,
    Job,
    Scale,
    folder_of,
    goal,
    kind_of,
    loads_of,
    rows_file,
)


def force(variant: str) -> None:
    """Let vLLM's packed dtypes run where it would not: FlashAttention-3 for what they keep dense, UltraQuant on NVIDIA.

    In this process only, before vLLM's backends are imported.
    """
    if variant in ("turboquant_4bit_nc", "ultraquant_4bit"):
        import vllm.v1.attention.backends.fa_utils as versions

        versions.get_flash_attn_version = lambda *args, **more: 3
    if variant == "ultraquant_4bit":
        import vllm.platforms.cuda as platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        offered = platform._get_backend_priorities
        platform._get_backend_priorities = lambda *args, **more: [
            *offered(*args, **more),
            AttentionBackendEnum.ULTRAQUANT,
        ]


def options_of(job: Job, scale: Scale, on_gpu: bool, folder: Path) -> dict[str, Any]:
    """Arguments of ``LLM`` for a job and a model; the same for every variant but for what names its cache."""
    loaded = job.part in LOADS
    sizes = [1, 2, 4, 8, 16, 32, 64] + [128, 192, 256] * loaded
    given: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "max_model_len": scale.most(job.part) + 256, "max_num_seqs": sizes[-1],
        "max_num_batched_tokens": scale.chunk, "enable_prefix_caching": True, "gpu_memory_utilization": scale.memory,
        "kv_cache_dtype": RIVALS.get(job.variant, "auto"), "enforce_eager": job.eager,
        "disable_log_stats": not loaded and job.part != "drafts",
    }  # fmt: skip
    if job.part == "smoke":
        given |= {"kv_cache_memory_bytes": scale.smoke_bytes, "gpu_memory_utilization": 0.05, "max_num_seqs": 64,
                  "max_num_batched_tokens": min(2048, scale.chunk)}  # fmt: skip
    if job.part == "sessions":
        given["kv_cache_memory_bytes"] = scale.sessions_bytes
    if job.part == "offload":
        given["kv_cache_memory_bytes"], room = scale.offload_bytes
        extra = {"cpu_bytes_to_use": room, **({} if on_gpu else ON_A_CPU)}
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        given["kv_transfer_config"] = connector
    if job.part == "drafts":  # on the GPU, because numba is not part of every installation
        method = "ngram_gpu" if on_gpu else "ngram"
        given["speculative_config"] = {
            "method": method, "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 1
        }  # fmt: skip
        given["max_num_seqs"] = scale.sequences[0]
        sizes = [scale.sequences[0] * (1 + DRAFTS)]  # in tokens; one graph, as there is one load
    if on_gpu and not job.eager:
        given["compilation_config"] = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes
        }  # fmt: skip
    if not on_gpu:
        given |= {"enforce_eager": True, "kv_cache_memory_bytes": given.get("kv_cache_memory_bytes", 1 << 24)}
        given["block_size"] = 32
        del given["gpu_memory_utilization"]
    if job.variant not in RIVALS:
        given["additional_config"] = {"kvcodec": kvcodec_of(job, folder)}
        if on_gpu:
            given["attention_backend"] = "CUSTOM"
    return given


def kvcodec_of(job: Job, folder: Path) -> dict[str, Any]:
    """The plugin's options: the preset, without dense tokens beside its pages, with constants if it needs a file."""
    from kvcodec.codec import ROLES
    from kvcodec.integrations.vllm.servable import group_tokens
    from kvcodec.registry import get

    scheme = get(job.variant.removeprefix("kvcodec:"))
    inner = scheme.for_layer(18, 36)
    found: dict[str, Any] = {"preset": str(scheme)}
    beside = ("window", "sink") if group_tokens(inner) > 1 else ("window",)
    found |= {name: 0 for name in beside if getattr(scheme, name) or getattr(inner, name)}
    fits = any(inner.codec(role).needs for role in ROLES)
    if fits or inner.mean in ("pre", "post"):
        found["params"] = str(fitted(scheme, folder, folder.parent / f"params-{job.name}.safetensors"))
    return found


def fitted(scheme: Any, folder: Path, path: Path) -> Path:
    """Write constants fitted to Gaussian keys, values and queries: the model's weights are random as well.

    Channels differ in size, as a real model's do, so that codecs whose widths go by it give some more bits than others.
    """
    import torch
    from transformers import AutoConfig

    from kvcodec.codec import ROLES, Sample, Site
    from kvcodec.files.params import FittedParams, sites_to_fit
    from kvcodec.integrations.transformers.identity import identify
    from kvcodec.store.site import MEAN

    model = identify(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(SEED)
    sizes = torch.randn(1, model.kv_heads, 1, model.head_dim, generator=generator).mul(0.7).exp()
    x = sizes * torch.randn(1, model.kv_heads, 256, model.head_dim, generator=generator)
    if scheme.mean == "auto" and any(own.key.without_mean for own in scheme.layer_schemes):
        scheme = scheme.with_means(["pre"] * len(model.layers))
    made: dict[str, dict[int, Any]] = {role: {} for role in ROLES}
    codecs = {}
    for layer, role, codec in sites_to_fit(scheme, list(model.layers)):
        codecs[role] = codec.for_dtype(torch.bfloat16)
        site = Site(layer, role, model.kv_heads, model.head_dim, 0, torch.device("cpu"))
        made[role][layer] = codecs[role].fit(site, Sample(x, x))
    layers: dict[int, dict[Any, Any]] = {layer: {} for found in made.values() for layer in found}
    for role, codec in codecs.items():
        for layer, params in zip(made[role], codec.settle(list(made[role].values())), strict=True):
            layers[layer][role] = params
    for index, layer in enumerate(model.layers):
        if scheme.for_layer(index, len(model.layers)).mean in ("pre", "post"):
            mean = torch.randn(1, model.kv_heads, model.head_dim, generator=generator)
            layers[layer]["key"] = {**layers[layer].get("key", {}), MEAN: mean}
    FittedParams(scheme, model, layers, 0, False, 256, 1, 256, "Gaussian").save(path)
    return path


class Worker:
    """A process with an engine.

    Parameters
    ----------
    job : Job
    args : argparse.Namespace
    """

    def __init__(self, job: Job, args: argparse.Namespace) -> None:
        self.job, self.scale, self.out = job, SCALES[args.scale], args.out
        self.begun = time.monotonic()
        force(job.variant)
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        from kvcodec_lab.serve import engine as serve_engine  # noqa: F401  imported before the turn begins

        self.on_gpu = not current_platform.is_cpu()
        self.LLM, self.version = LLM, vllm.__version__
        self.params = lambda new: SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        sizes = self.scale.smoke if job.part == "smoke" else self.scale.model
        self.vocabulary, self.folder = sizes["vocab_size"], folder_of(args.out, sizes)
        self.options = options_of(job, self.scale, self.on_gpu, self.folder)
        print(f"== imported after {time.monotonic() - self.begun:.1f} s", flush=True)
        if not (line := sys.stdin.readline()):
            sys.exit(3)  # the parent process is gone
        self.limit = float(line)
        import torch

        from kvcodec.cli.stamp import stamp
        from kvcodec_lab.bench.record import Recorder

        self.begun = time.monotonic()
        common = stamp(torch.device("cuda" if self.on_gpu else "cpu"), SEED, args.commit or None) | {"run": args.run}
        common["versions"]["vllm"] = vllm.__version__
        self.recorder = Recorder(rows_file(args.out, job.part), common, lambda text: print(text, flush=True))

    def row(self, metric: str, unit: str, shape: str, values: Any, **more: Any) -> None:
        self.recorder.add(self.job.variant, None, metric, unit, shape, values, **more)

    def run(self) -> int:
        """Do the job; a failure is a row."""
        metric, unit, shape = goal(self.job, self.scale)
        try:
            self.start()
            getattr(self, "load" if self.job.part in LOADS else self.job.part)()
        except BaseException as error:
            traceback.print_exc()
            words = " ".join(str(error).split())
            status = f"failed: {type(error).__name__}: {words[:400]}"
            said = traceback.format_exc()[-SAID:]
            self.row(metric, unit, shape, None, status=status, said=said, **kind_of(self.job, self.scale))
            return 1
        return 0

    def start(self) -> None:
        """Start the engine; rows of its capacity."""
        from kvcodec_lab.serve.metrics import capacity, flat

        self.llm = self.LLM(model=str(self.folder), **self.options)
        self.engine = self.llm.llm_engine
        seconds = time.monotonic() - self.begun
        cache = self.engine.vllm_config.cache_config
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        printed = capacity((self.out / "logs" / f"{self.job.name}.log").read_text(errors="replace"), "").tokens
        tokens = printed or getattr(cache, "kv_cache_size_tokens", 0) or cache.num_gpu_blocks * cache.block_size
        self.about = {
            "model": self.folder.name, "version": self.version, "kv_cache_tokens": tokens,
            "block_tokens": cache.block_size, "blocks": cache.num_gpu_blocks, "path": paths(self.engine),
        }  # fmt: skip
        print(f"== {self.job.name}: up after {seconds:.1f} s, {self.about}", flush=True)
        if self.job.part == "steps":
            options = " ".join(f"{k}={json.dumps(v)}" for k, v in self.options.items())
            self.row("kv_cache_tokens", "tokens", "start", flat(tokens), n=1, server=self.about, command=options)
            self.row("start_s", "s", "start", flat(seconds), n=1, command=options)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def ask(
        self, prompts: list[list[int]], new: int, between: Any = lambda done: None
    ) -> tuple[list[list[int]], list[float], list[int]]:
        """Greedy tokens of prompts, all at once; seconds between steps of pure decode; tokens found in the cache."""
        names = [f"ask-{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
        found: dict[str, list[int]] = {name: [] for name in names}
        cached = dict.fromkeys(names, 0)
        for name, ids in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": ids}, self.params(new))
        gaps, last, pure = [], 0.0, 0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            came = 0
            for output in outputs:
                ids = list(output.outputs[0].token_ids)
                came += len(ids)
                found[output.request_id] += ids
                cached[output.request_id] = max(cached[output.request_id], output.num_cached_tokens or 0)
            begun = all(len(ids) > 1 for ids in found.values())
            if begun and came >= len(prompts):
                pure += 1
                if pure > 4:  # the first ones still wait for what prompts left behind
                    gaps.append(now - last)
                between(pure)
            last = now
        return list(found.values()), gaps, list(cached.values())

    def prompts(self, name: str, lengths: list[int]) -> list[list[int]]:
        from kvcodec_lab.serve.loads import Prompts

        own = Prompts(SEED, self.vocabulary)
        return [own.ids(name, i, n) for i, n in enumerate(lengths)]

    def steps(self) -> None:
        """Cold prompts, then decode steps of as many of them as are asked for, the most first, all of it twice."""
        from kvcodec_lab.serve.metrics import flat, quantiles

        s = self.scale
        asked = self.prompts("steps", [s.tokens] * max(s.sequences))
        begin = time.perf_counter()
        self.ask(asked, 1)
        seconds = time.perf_counter() - begin
        self.row("prefill_s", "s", f"n{len(asked)}_i{s.tokens}", flat(seconds), n=1, load="prefill",
                 sizes={"sequences": len(asked), "tokens": s.tokens})  # fmt: skip
        for count in s.sequences:
            runs = [self.ask(asked[:count], s.new) for _ in range(2)]
            gaps = [gap for run in runs for gap in run[1]]
            self.row("step_ms", "ms", f"n{count}_i{s.tokens}", quantiles(gaps, 1e3), n=len(gaps),
                     repeats=[quantiles(run[1], 1e3)["p50"] for run in runs], cached_tokens=min(runs[0][2]),
                     load="steps", sizes={"sequences": count, "tokens": s.tokens}, server=self.about)  # fmt: skip

    def first(self) -> None:
        """The first token of a lone prompt that nothing is known of, ten times for each length; what takes the time."""
        from kvcodec_lab.serve.metrics import quantiles

        for tokens in self.scale.lone:
            seconds = []
            *timed, for_kernels, for_host = self.prompts(f"first {tokens}", [tokens] * 15)
            for ids in timed:
                begin = time.perf_counter()
                self.ask([ids], 1)
                seconds.append(time.perf_counter() - begin)
            found = quantiles(seconds[3:], 1e3)  # the first ones choose kernels
            with self.profiler() as profiler:
                self.ask([for_kernels], 1)
                self.synchronize()
            kernels = self.kernels(profiler, 1)
            self.row("first_ms", "ms", f"n1_i{tokens}", found, n=len(seconds) - 3, server=self.about,
                     busy_ms=sum(k["us"] for k in kernels) / 1e3, launches=sum(k["calls"] for k in kernels),
                     kernels=kernels[:12], host=self.host(for_host))  # fmt: skip

    def host(self, ids: list[int]) -> list[dict[str, Any]]:
        """Python's functions of a lone prompt, those of most time of their own first; the profiler adds to all."""
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        profiler.runcall(self.ask, [ids], 1)
        found = []
        for (file, _, name), (_, calls, own, whole, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
            where = "/".join(Path(file).parts[-2:])
            found.append({"function": f"{where}:{name}", "calls": calls, "own_ms": own * 1e3, "ms": whole * 1e3})
        return sorted(found, key=lambda f: -f["own_ms"])[:25]

    def drafts(self) -> None:
        """Tokens a second of many sequences with drafts by n-grams, how many drafts were accepted, and kernels."""
        from kvcodec_lab.serve.metrics import flat, quantiles

        s = self.scale
        asked = self.prompts("steps", [s.tokens] * s.sequences[0])
        self.ask(asked, 1)
        for _ in range(2):  # the first time with what has to be captured or compiled
            begin = time.perf_counter()
            self.ask(asked, 1)  # prompts found in the prefix cache
            before = time.perf_counter() - begin
            begin = time.perf_counter()
            found, gaps, _ = self.ask(asked, 2 * s.new)
            seconds = time.perf_counter() - begin - before
        counts = {m.name: m.value for m in self.llm.get_metrics() if m.name.startswith("vllm:spec_decode_num_")
                  and hasattr(m, "value")}  # fmt: skip
        profiler, steps = self.profiler(), (1, 1 + max(1, s.new // 8))

        def between(done: int) -> None:
            if done == steps[0]:
                profiler.start()
            elif done == steps[1]:
                self.synchronize()
                profiler.stop()

        self.ask(asked, 2 * s.new, between)
        kernels = self.kernels(profiler, steps[1] - steps[0])
        self.row("drafted_tokens_per_s", "tokens/s", f"n{len(asked)}_i{s.tokens}",
                 flat(sum(map(len, found)) / seconds), n=1, drafts=counts, step_ms=quantiles(gaps, 1e3),
                 busy_ms=sum(k["us"] for k in kernels) / 1e3, kernels=kernels[:12], server=self.about)  # fmt: skip

    def load(self) -> None:
        """Send the part's loads to the engine, one after the other; rows as ``bench serve`` writes them."""
        from prometheus_client import generate_latest

        from kvcodec.progress import Progress
        from kvcodec_lab.serve.bench import Bench, Server
        from kvcodec_lab.serve.engine import EngineTarget
        from kvcodec_lab.serve.loads import Prompts
        from kvcodec_lab.serve.metrics import flat
        from kvcodec_lab.serve.server import About

        args = argparse.Namespace(seed=SEED, deadline=None, warmups=1)
        bench = Bench(args, self.recorder, Progress(), self.out)
        left = self.limit - 10 - (time.monotonic() - self.begun)
        target = EngineTarget(self.engine, self.params, lambda: generate_latest().decode(), left)
        most, block = self.engine.vllm_config.model_config.max_model_len, self.about["block_tokens"]
        begin, under_way = time.perf_counter(), ""

        async def send() -> None:
            nonlocal begin, under_way
            async with target.running():
                for load in loads_of(self.job, self.scale):
                    if target.broken is None:
                        begin, under_way, target.tokens = time.perf_counter(), load.name, 0
                        server = Server(self.job.variant, None, None)
                        await bench.load(server, target, load, Prompts(SEED, self.vocabulary),
                                         About("in process", most), {"server": self.about}, block)  # fmt: skip

        asyncio.run(send())
        if target.broken is not None:  # what came until then says something as well
            rate = target.tokens / (time.perf_counter() - begin)
            self.row(
                "output_tokens_per_s_cut", "tokens/s", under_way, flat(rate), n=target.tokens, cut=str(target.broken)
            )

    def timeline(self) -> None:
        """Kernels of decode steps and of prompts by their time."""
        from kvcodec_lab.serve.metrics import quantiles

        s = self.scale
        asked = self.prompts("steps", [s.tokens] * max(s.sequences))
        self.ask(asked, 1)
        plain = self.ask(asked, s.new)[1]
        profiler, first, last = self.profiler(), 6, min(s.new - 2, 26)

        def between(done: int) -> None:
            if done == first:
                profiler.start()
            elif done == last:
                self.synchronize()
                profiler.stop()

        self.ask(asked, s.new, between)
        decode = self.kernels(profiler, last - first)
        fresh = [self.prompts(name, [s.tokens] * 4) for name in ("warm", "timed", "profiled")]
        self.ask(fresh[0], 1)
        begin = time.perf_counter()
        self.ask(fresh[1], 1)
        prompt_ms = (time.perf_counter() - begin) * 1e3 / len(fresh[1])
        with self.profiler() as profiler:
            self.ask(fresh[2], 1)
            self.synchronize()
        prompts = self.kernels(profiler, len(fresh[2]))
        step = quantiles(plain, 1e3)
        text = {"variant": self.job.variant, "step_ms": step, "prompt_ms": prompt_ms, "sequences": len(asked),
                "tokens": s.tokens, "server": self.about, "decode": decode[:40], "prompts": prompts[:40]}  # fmt: skip
        (self.out / f"timeline-{self.job.variant.replace(':', '-')}.json").write_text(json.dumps(text, indent=1) + "\n")
        for what, ms, kernels in (("step", step["p50"], decode), ("prompt", prompt_ms, prompts)):
            busy = sum(k["us"] for k in kernels) / 1e3
            print(f"== a {what}: {ms:.3f} ms without the profiler; kernels {busy:.3f} ms")
            for k in kernels[:15]:
                print(f"== {k['us']:9.1f} us {k['calls']:7.1f} calls  {k['kernel'][:110]}")

    def profiler(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        return profile(activities=[ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU])

    def synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def kernels(self, profiler: Any, per: int) -> list[dict[str, Any]]:
        """Kernels of a profile, the dearest first; calls and microseconds of one of ``per``."""
        name = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda e: -getattr(e, name))
        found = [{"kernel": e.key, "calls": e.count / per, "us": getattr(e, name) / per} for e in events]
        return [k for k in found if k["us"] > 0]

    def smoke(self) -> None:
        """Tokens of short and long prompts, twice; weights are made such that tokens say something."""
        import torch
        from serve_check import Recorder, compare

        @torch.no_grad()
        def again(model: Any) -> None:
            # vLLM's dummy weights make a model that repeats its last token
            torch.manual_seed(SEED)
            for p in model.parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.02)

        self.llm.apply_model(again)
        s = self.scale
        asked = self.prompts("smoke", [*s.smoke_tokens, *[40 + 7 * i for i in range(12)]])
        with Recorder(self.engine) as recorder:
            first, _, _ = self.ask(asked, min(64, s.new))
        served = compare(recorder)  # before other requests get the blocks that these left
        if served and not served["requests"]:
            raise RuntimeError("no request was recorded whole: nothing was compared with the library")
        second, _, cached = self.ask(asked, min(64, s.new))
        print(f"== against the library: {served}", flush=True)
        found = {"variant": self.job.variant, "eager": self.job.eager, "tokens": first, "again": second, **served,
                 "cached_tokens": cached, "server": self.about, "seconds": time.monotonic() - self.begun}  # fmt: skip
        (self.out / "smoke").mkdir(exist_ok=True)
        (self.out / "smoke" / f"{self.job.name}.json").write_text(json.dumps(found))


def paths(engine: Any) -> dict[str, int]:
    """What computes attention, and in how many layers: backend, implementation, kvcodec's kernels."""
    count: collections.Counter[str] = collections.Counter()
    for layer in engine.vllm_config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if impl is not None:
            packed = getattr(impl, "packed", None)
            kernels = sorted({e.name for e in packed.engines.values()}) if packed is not None else []
            scheme = [str(packed.scheme)] if packed is not None else []
            count[" ".join([layer.attn_backend.get_name(), type(impl).__name__, *scheme, *kernels])] += 1
    return dict(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--out", "--scale", "--commit", "--run", "--job"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    args.out = Path(args.out)
    try:
        status = Worker(Job(*json.loads(args.job)), args).run()
    except Exception:
        traceback.print_exc()
        status = 2
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # an engine takes seconds to take itself apart, and the next one waits


if __name__ == "__main__":
    sys.exit(main())
