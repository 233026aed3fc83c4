"""Soak of the served engine: vLLM's AsyncLLM under random load on a small pool of packed pages, every answer checked.

    python benchmarks/soak_serve.py --model DIR --preset saw-int4 --seconds 1800 --out DIR [--commit ID]
    python benchmarks/soak_serve.py --model CONFIG_DIR --load-format dummy --device cuda --seconds 300 --out DIR \
        --engine '{"speculative_config": ..., "kv_transfer_config": ...}'

Clients come and go in phases (idle, few, many): prompts share prefixes on three levels or none, answers are followed by
a second turn, and some requests are cancelled: while they wait, in the middle of a prompt or of an answer. The pool
holds fewer tokens than the running requests, so that some are thrown out and computed again. Afterwards

- *wrong pages*: every prompt is run alone with an empty prefix cache; each answer of the load (those that were cut as
  well) must have its tokens. One that differs is read again in one piece, over the pages of that run: how much less
  likely than the best token its tokens are. Up to ``--tie`` it is rounding (other batches sum in other orders), above
  it is a wrong page. If ``--check-seconds`` end this early, the report says how far it came, and the soak fails;
- *leaks*: when idle all blocks are free, the prefix cache can be dropped (vLLM refuses while a block is held), and the
  line fitted to resident memory of all processes, warm-up left out, grows by at most ``--leak``;
- *hangs*: for ``--hang`` seconds no step of the engine while requests run: stacks of all processes, exit status 3;
- *proof*: preemptions, prefix hits, prompts in chunks and cancellations of each kind happened; with speculation drafts
  were accepted and rejected, with a KV connector tokens loaded; and when the pages of a cached prompt are exchanged for
  others', its answer changes. Else the soak has shown nothing, and fails.

On a GPU the model computes in float32 by default, for which fewer answers differ and the tie is closer, and the load
draws from so few prompts and second turns that all can be run alone. ``--plant`` makes a fault that must be found.

OUT/soak-PRESET-DEVICE.json has everything; exit status 0 if nothing failed.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import importlib.metadata
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name, value in {"VLLM_PLUGINS": "kvcodec", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
                    "PYTHONFAULTHANDLER": "1"}.items():  # fmt: skip
    os.environ.setdefault(name, value)

from soak_check import Checks, Found  # noqa: E402
from soak_load import KINDS, WIDTH, Prompts, Request, pack, unpack, words_of  # noqa: E402
from soak_report import MB, descendants, failures_of, growth, resident, result_of, write  # noqa: E402
from vllm import AsyncEngineArgs, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: E402

from kvcodec.cli.stamp import commit as commit_here  # noqa: E402

HUNG = 3


class Probe:
    """What the soak calls inside the workers (``worker_extension_cls``)."""

    def soak_weights(self, seed):
        """Draw weights: those of ``load_format="dummy"`` repeat one token whatever the cache holds."""
        import torch

        torch.manual_seed(seed)
        with torch.no_grad():
            for key, weight in self.get_model().named_parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 0.02)
                else:
                    weight.fill_("norm" in key)

    def soak_device_bytes(self):
        import torch

        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def soak_exchange_pages(self, pair=None):
        """Move every block's bytes by half of the pool, or exchange two: valid pages, most of them of other prompts."""
        import torch

        seen = set()
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel() and cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                if pair is None:
                    cache.copy_(cache.roll(cache.shape[0] // 2, 0))
                else:
                    cache[list(pair)] = cache[list(pair)[::-1]]


class Watch(StatLoggerBase):
    """The engine's own figures, step by step."""

    def __init__(self, vllm_config=None, engine_index=0):
        self.steps = self.preemptions = self.hits = self.queries = 0
        self.drafted = self.accepted = self.loaded = 0
        self.waiting = self.running = self.most_running = 0
        self.usage = self.most_usage = 0.0
        self.beat = time.monotonic()

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.steps += 1
        self.beat = time.monotonic()
        if (s := scheduler_stats) is not None:
            self.running, self.waiting = s.num_running_reqs, s.num_waiting_reqs + s.num_skipped_waiting_reqs
            self.usage = s.kv_cache_usage
            self.most_running = max(self.most_running, self.running)
            self.most_usage = max(self.most_usage, self.usage)
            if s.prefix_cache_stats is not None:
                self.hits += s.prefix_cache_stats.hits
                self.queries += s.prefix_cache_stats.queries
            if s.connector_prefix_cache_stats is not None:
                self.loaded += s.connector_prefix_cache_stats.hits
            if s.spec_decoding_stats is not None:
                self.drafted += s.spec_decoding_stats.num_draft_tokens
                self.accepted += s.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self):
        pass


# -- the load ----------------------------------------------------------------------------------------------------------


class Soak(Checks):
    """Sends the load; what came is checked by ``Checks``."""

    def __init__(self, engine, watch, prompts, args):
        self.engine, self.watch, self.prompts, self.args = engine, watch, prompts, args
        self.rng, self.ids = random.Random(args.seed + 1), itertools.count()
        self.inflight, self.requests, self.errors = {}, [], []
        self.kept, self.seen, self.turned = {}, set(), set()  # equal bytes, once; hashes of prompts; second turns
        self.found, self.planted, self.blocks = Found(), [], 0
        self.idle, self.series, self.device_series = [], [], []
        self.begun = time.monotonic()
        self.phase, self.busy = "start", 0

    def say(self, text):
        print(f"[{time.monotonic() - self.begun:6.0f} s] {text}", flush=True)

    async def generate(self, prompt, request=None, **sampling):
        """The output for one prompt, greedy; a request gets its tokens as they come."""
        sampling["output_kind"] = RequestOutputKind.FINAL_ONLY if request is None else RequestOutputKind.DELTA
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **sampling)
        self.watch.beat = time.monotonic()
        self.busy += 1
        try:
            stream = self.engine.generate({"prompt_token_ids": unpack(prompt)}, params, f"soak-{next(self.ids)}")
            async with contextlib.aclosing(stream):
                async for out in stream:
                    if request is not None:
                        request.tokens += pack(out.outputs[0].token_ids)
                        held = len(request.tokens) // WIDTH
                        if request.kind == "decode" and held >= request.cut and not out.finished:
                            raise asyncio.CancelledError  # leaving the stream is what a client that hangs up does
            return out
        finally:
            self.busy -= 1

    def launch(self, request):
        request.at, request.step = len(self.requests), self.watch.steps
        self.requests.append(request)
        self.seen.add(hash(request.prompt))
        if self.args.plant == "memory":
            self.planted.append(b"x" * MB)
        task = asyncio.create_task(self._run(request))
        self.inflight[task] = request
        task.add_done_callback(self.inflight.pop)
        return task

    async def _run(self, request):
        work = asyncio.create_task(self.generate(request.prompt, request, max_tokens=request.new))
        asked = asyncio.create_task(self._canceller(request, work))
        try:
            await work
            request.ended = "whole"
        except asyncio.CancelledError:
            if request.ended == "running":
                request.ended = "decode" if request.tokens else "queued"
        except Exception as error:  # counted, and the load goes on
            request.ended = "error"
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            asked.cancel()
            # what the checks need is kept, and what many requests have in common once
            request.tokens = self.kept.setdefault(request.tokens, request.tokens)
            request.prompt = self.kept.setdefault(request.prompt, request.prompt) if request.tokens else b""

    async def _canceller(self, request, work):
        """Cancel a request that waits, or one that runs and has no token yet."""
        if request.kind == "queued":
            await asyncio.sleep(request.cut)
            if request.tokens:
                return
        elif request.kind == "prefill":
            while not request.tokens and not self.surely_runs(request):
                await asyncio.sleep(0.005)
        else:
            return
        if not work.done():
            request.ended = "decode" if request.tokens else request.kind
            work.cancel()

    def surely_runs(self, request):
        """Whether the engine computes a request: it takes them in order, and fewer wait than came after this one."""
        seen = self.watch.steps - 2
        behind = (r for r in self.inflight.values() if r.at > request.at and r.step <= seen and not r.tokens)
        return request.step <= seen and self.watch.waiting <= sum(1 for _ in behind)

    async def follow(self, at, task, request):
        """The second turn of a whole answer: its prompt has pages that were written while decoding.

        Each other answer gives another prompt to run alone: of ``--turns``, some come at any time.
        """
        await task
        if request.ended != "whole":
            return
        turn = request.prompt + request.tokens + self.prompts.turns[at]
        part = min(1.0, (time.monotonic() - self.begun) / self.args.seconds)
        if turn in self.turned or len(self.turned) < self.args.turns * part:
            self.turned.add(turn)
            await self.launch(Request(turn, self.args.answer, "whole", 0))

    async def load(self):
        """Random arrivals until the time is over, in phases between idle and more than fit.

        Up to twice the time, ten minutes at least, while something that the soak must show has not happened.
        """
        rng, args = self.rng, self.args
        end, turns = time.monotonic() + args.seconds, set()
        while len(self.errors) < 10:
            if (now := time.monotonic()) >= end and (self.shown() or now >= end + max(args.seconds, 600.0)):
                break
            most = rng.choice((0, args.seqs // 2, 2 * args.seqs, 2 * args.seqs, 3 * args.seqs))
            gap = args.gap * rng.choice((0.05, 0.3, 1))
            self.phase = f"at most {most} clients, {gap:.3g} s apart"
            until = now + min(60.0, args.seconds / 6) * rng.uniform(0.3, 1)
            until = min(end, until) if now < end else until
            while most and time.monotonic() < until:
                if len(self.inflight) < most:
                    at, request = self.prompts.draw(2 * args.gap)
                    task = self.launch(request)
                    if request.kind == "whole" and request.new == args.answer and len(turns) < 2 * args.seqs:
                        turn = asyncio.create_task(self.follow(at, task, request))
                        turns.add(turn)
                        turn.add_done_callback(turns.discard)
                await asyncio.sleep(min(rng.expovariate(1 / gap), max(0.0, until - time.monotonic())))
            if not most:
                await self.drain(turns)
        await self.drain(turns)

    def shown(self):
        ended = self.counts()
        return self.watch.preemptions and self.watch.hits and all(ended[kind] for kind in KINDS)

    async def drain(self, turns):
        """Wait for every request; all blocks must be free then."""
        self.phase = "draining"
        while self.inflight or turns:
            await asyncio.wait([*self.inflight, *turns])
        # figures come with steps: one more, of a prompt that no one has
        await self.generate(pack((1, 2, 1)), max_tokens=1)
        for _ in range(20):
            if not self.watch.usage:
                break
            await asyncio.sleep(0.1)
        self.idle.append(round(self.watch.usage, 6))

    async def sample(self):
        """Memory over time, and a line of text now and then."""
        every = max(0.5, self.args.seconds / 300)
        spoken = 0.0
        while True:
            now = time.monotonic() - self.begun
            own, others = resident([os.getpid()]), resident(descendants())
            self.series.append((round(now, 1), round(own, 2), round(others, 2)))
            if self.args.device == "cuda":
                held = sum(await self.engine.collective_rpc("soak_device_bytes"))
                self.device_series.append((round(now, 1), round(held / MB, 2)))
            if now - spoken > self.args.every:
                spoken = now
                ended = self.counts()
                self.say(
                    f"{ended['whole']} answered, {ended['queued']}+{ended['prefill']}+{ended['decode']} cancelled, "
                    f"{len(self.inflight)} in flight, {self.watch.preemptions} preempted, {self.watch.hits} tokens "
                    f"from the cache, pool {self.watch.usage:.0%}, {own:.0f}+{others:.0f} MB; {self.phase}"
                )
            await asyncio.sleep(every)

    def counts(self):
        return {kind: sum(r.ended == kind for r in self.requests) for kind in (*KINDS, "error")}

    def figures(self):
        """What the load was."""
        watch = self.watch
        return {
            "requests": len(self.requests), "ended": self.counts(),
            "distinct_prompts": len(self.seen), "distinct_second_turns": len(self.turned),
            "prompt_tokens": sum(r.length for r in self.requests),
            "answer_tokens": sum(len(r.tokens) // WIDTH for r in self.requests),
            "prefix_hit_tokens": watch.hits, "prefix_query_tokens": watch.queries, "preemptions": watch.preemptions,
            "drafted_tokens": watch.drafted, "accepted_tokens": watch.accepted, "loaded_tokens": watch.loaded,
            "steps": watch.steps, "most_running": watch.most_running, "most_pool_used": round(watch.most_usage, 4),
        }  # fmt: skip


class Watchdog(threading.Thread):
    """Ends the process when the engine takes no step for too long while requests wait."""

    def __init__(self, soak, seconds, report):
        super().__init__(daemon=True)
        self.soak, self.seconds, self.report = soak, seconds, report

    def run(self):
        while True:
            time.sleep(1)
            still = time.monotonic() - self.soak.watch.beat
            if not self.soak.busy or still < self.seconds:
                continue
            print(f"no step for {still:.0f} s, {self.soak.busy} requests in flight: stacks", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            others = descendants()
            for number in (signal.SIGABRT, signal.SIGKILL):  # the first prints their stacks (PYTHONFAULTHANDLER)
                for pid in others:
                    try:
                        os.kill(pid, number)
                    except OSError:
                        continue
                time.sleep(3)
            self.report([f"hang: no step for {still:.0f} s"])
            os._exit(HUNG)


def announce_plugin(folder):
    """Let vLLM's processes find kvcodec's entry point where the package is only on the path."""
    if any(e.name == "kvcodec" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return
    info = Path(folder) / "kvcodec_soak-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcodec-soak\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvcodec = kvcodec.integrations.vllm:register\n")
    sys.path.append(str(folder))


def engine_options(args, options):
    longest = args.prompt * 9 // 8 + 2 * args.answer + 2
    longest += -longest % args.block
    pool = args.pool or max(longest, int(0.45 * args.seqs * (0.6 * args.prompt + args.answer / 2)))
    cuda = {"attention_backend": "CUSTOM", "gpu_memory_utilization": 0.15, "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}}  # fmt: skip
    cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    planted = {"scheduler_cls": "soak_plant.Forgetful", "async_scheduling": False} if args.plant == "block" else {}
    return {
        "dtype": args.dtype, "load_format": args.load_format, "max_model_len": longest, "block_size": args.block,
        "num_gpu_blocks_override": -(-pool // args.block) + 1, "max_num_seqs": args.seqs,
        "max_num_batched_tokens": max(args.chunk, args.seqs), "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "skip_tokenizer_init": True, "seed": args.seed,
        "additional_config": {"kvcodec": options}, **(cuda if args.device == "cuda" else cpu), **planted, **args.engine,
    }  # fmt: skip


async def soak_of(args):
    options = {"preset": args.preset} | ({} if args.window is None else {"window": args.window})
    given, watch = engine_options(args, options), Watch()
    if args.load_format == "dummy" and args.device == "cpu":
        raise SystemExit("soak_serve: on a CPU weights are packed when they are loaded; give a model with weights.")
    arguments = AsyncEngineArgs(model=str(args.model), worker_extension_cls=f"{Path(__file__).stem}.Probe", **given)
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda config, index: watch])
    prompts = Prompts(args, words_of(args), random.Random(args.seed))
    soak = Soak(engine, watch, prompts, args)
    soak.options, soak.engine_options, soak.blocks = options, given, given["num_gpu_blocks_override"] - 1
    Watchdog(soak, args.hang, lambda why: write(args, result_of(soak, args, why, soak.figures()))).start()
    control, series, background = [], [], []
    try:
        if args.load_format == "dummy":
            await engine.collective_rpc("soak_weights", args=(args.seed,))
        soak.say(f"{args.preset} on {args.device}: pool of {given['num_gpu_blocks_override']} blocks of {args.block}")
        await soak.generate(prompts.all[0], max_tokens=4)  # kernels are compiled, weights touched
        soak.begun = time.monotonic()
        background = [asyncio.create_task(work()) for work in (soak.sample, soak.plant)]
        await soak.load()
        for task in background:
            task.cancel()
        series, soak.phase = list(soak.series), "checks"
        loaded = {"load_s": round(time.monotonic() - soak.begun, 1), **soak.figures()}
        # what there is if the process is ended from outside
        write(args, result_of(soak, args, ["the answers were not checked"], loaded))
        control = await soak.control(await soak.check())
    except Exception as error:  # such as an engine that is gone: what is known until here is written
        traceback.print_exc()
        soak.errors.append(f"{type(error).__name__}: {error}")
        loaded = soak.figures()
    finally:
        engine.shutdown()
    grown = growth(series, args.warm * args.seconds)
    failures = failures_of(soak, args, loaded, soak.found, control, grown)
    checked = soak.found.figures()
    growth_found = dict(zip(("mb", "mb_per_minute", "seconds"), (round(x, 3) for x in grown or ()), strict=False))
    more = {"tie": args.tie, "leak_limit_mb": args.leak, "resident_growth": growth_found, "checked": checked}
    path = write(args, result_of(soak, args, failures, loaded, **more, control=control))
    soak.say(f"resident growth {growth_found}, control {control}")
    soak.say(
        f"{soak.counts()}, {watch.preemptions} preemptions, {checked['equal']} answers equal, {checked['differ']} "
        f"differ; checked in {checked['seconds']} s: {path}"
    )
    for failure in failures:
        soak.say(f"FAILED: {failure}")
    return 1 if failures else 0


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", type=Path, required=True, help="folder; of a config alone with --load-format dummy")
    p.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    p.add_argument("--preset", default="saw-int4")
    p.add_argument("--window", type=int, help="0: of presets that keep the newest tokens dense")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtype", default="float32", help="of the model (%(default)s)")
    p.add_argument("--seconds", type=float, default=1800.0, help="of load; checks come after it")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--commit", help="stamped on the result where there is no checkout")
    p.add_argument("--prompts", type=int, help="distinct first prompts (64; GPU 96)")
    p.add_argument("--turns", type=int, help="distinct second turns (any number; GPU 64)")
    p.add_argument("--prompt", type=int, help="tokens of the longest first prompt (256; GPU 2048)")
    p.add_argument("--answer", type=int, help="tokens of the longest answer (32; GPU 128)")
    p.add_argument("--seqs", type=int, help="requests that run at once (8; GPU 32)")
    p.add_argument("--chunk", type=int, help="tokens of a step (48; GPU 512)")
    p.add_argument("--block", type=int, help="tokens of a page (16; GPU 64)")
    p.add_argument("--pool", type=int, help="tokens of the pool (fewer than the requests that run have)")
    p.add_argument("--gap", type=float, help="seconds between arrivals at their slowest (1; GPU 0.2)")
    p.add_argument("--tie", type=float, help="log-probability that rounding may cost (1e-3; GPU 0.1; 16-bit 0.5)")
    p.add_argument("--leak", type=float, default=32.0, help="MB that resident memory may grow (%(default)s)")
    p.add_argument("--warm", type=float, default=0.25, help="part of the time that is warm-up (%(default)s)")
    p.add_argument("--hang", type=float, default=180.0, help="seconds without a step (%(default)s)")
    p.add_argument("--every", type=float, default=15.0, help="seconds between lines (%(default)s)")
    p.add_argument("--check-seconds", type=float, default=float("inf"), help="that prompts may be run alone (no limit)")
    p.add_argument("--plant", choices=("pages", "block", "memory"), help="a fault: pages exchanged, one kept, a leak")
    p.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="other arguments of the engine")
    args = p.parse_args(argv)
    cuda = args.device == "cuda"
    usual = {"prompts": (64, 96), "turns": (10**9, 64), "prompt": (256, 2048), "answer": (32, 128), "seqs": (8, 32),
             "chunk": (48, 512), "block": (16, 64), "gap": (1.0, 0.2)}  # fmt: skip
    for key, values in usual.items():
        if getattr(args, key) is None:
            setattr(args, key, values[cuda])
    if args.tie is None:
        args.tie = 0.5 if args.dtype != "float32" else 0.1 if cuda else 1e-3  # kernels compute in fp16
    args.commit = args.commit or commit_here()  # now: the checkout may move on
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        announce_plugin(folder)
        return asyncio.run(soak_of(args))


if __name__ == "__main__":
    sys.exit(main())
