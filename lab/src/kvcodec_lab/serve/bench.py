"""``kvcodec bench serve URL``: load on a running OpenAI-compatible server, or on servers that it starts one by one.

Rows go to ``OUT/serve.jsonl`` when a load is over, then to ``OUT/serve.json``, ``OUT/serve.html`` and drawings
``OUT/serve-*.svg``. ``spec`` is the server's label, ``shape`` the load's name; ``metrics.py`` lists the metrics. A
load that a label has finished is not sent again. Exit status: 0 all requests were answered; 1 a server did not start or
stopped, or requests failed: the rows have the reasons; 130 interrupted.
"""

import argparse
import asyncio
import itertools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcodec.cli.stamp import stamp
from kvcodec.errors import KVError, SpecError
from kvcodec.progress import Progress
from kvcodec_lab.bench.record import Deadline, Recorder, Row
from kvcodec_lab.report.publish import page
from kvcodec_lab.serve.client import Target
from kvcodec_lab.serve.http import Endpoint
from kvcodec_lab.serve.loads import Asked, Load, Point, Prompts, Run, Sessions, send_load
from kvcodec_lab.serve.metrics import Figure, capacity, counted, errors_of, flat, latencies, residency, throughput
from kvcodec_lab.serve.server import About, RefusedToStartError, Start, about, default_endpoint, start_of, started

DONE, START = "requests_done", "start"
FAILED, INTERRUPTED = 1, 130
VOCABULARY = 30_000
"""Ids below this are in every common vocabulary; the server's own size is used if it names a folder with a config."""


class Server(NamedTuple):
    """A server to measure: its label, where it is, and how it is started if it does not run."""

    label: str
    endpoint: Endpoint
    start: Start | None


class Outcome(NamedTuple):
    """Rows of this run and the exit status."""

    rows: list[Row]
    status: int


def loads_of(args: argparse.Namespace) -> list[Load]:
    """Loads in the order in which they are sent: short prompts and few clients first, sessions last."""
    found: list[Load] = []
    if "sweep" in args.load:
        for tokens in args.input_len:
            if args.rate:
                found += [Point(tokens, args.output_len, args.requests or max(8, round(60 * rate)), rate=rate)
                          for rate in args.rate]  # fmt: skip
            else:
                found += [Point(tokens, args.output_len, args.requests or max(8, 4 * n), n) for n in args.concurrency]
    if "sessions" in args.load:
        sizes = (args.shared, args.context, args.turn, args.answer)
        found.append(Sessions(args.sessions, args.rounds, *sizes, args.pause, args.together))
    return found


def servers_of(args: argparse.Namespace) -> list[Server]:
    """Servers in the order in which they are measured.

    Raises
    ------
    SpecError
        If there is none, or two have one label.
    """
    default = default_endpoint(args.url, args.header)
    starts = [start_of(text) for text in args.start]
    if not starts and args.url is None:
        raise SpecError("bench serve: name a running server's URL, or servers to start with --start LABEL=COMMAND.")
    labels = [start.label for start in starts]
    if len(set(labels)) < len(labels):
        raise SpecError(f"bench serve: --start has a label twice ({', '.join(labels)}); rows are kept by it.")
    if args.warmups < 0 or args.shared < 0:
        raise SpecError("bench serve: --warmups and --shared are 0 or more.")
    if starts:
        return [Server(start.label, start.endpoint(default), start) for start in starts]
    return [Server(args.label, default, None)]


def run(args: argparse.Namespace, progress: Progress) -> Outcome:
    """Measure; write rows, page and drawings.

    Raises
    ------
    KVError
        Before anything is sent: no server, a folder that cannot be written.
    """
    servers, loads = servers_of(args), loads_of(args)
    out = None if args.out is None else Path(args.out)
    if out is not None:
        from kvcodec.cli.measure.rows import check_writable

        check_writable(out)
    common = stamp(torch.device("cpu"), args.seed, args.commit) | _machine(args.gpu, servers)
    recorder = Recorder(None if out is None else out / "serve.jsonl", common, progress.say)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, recorder, progress, Path(scratch) if out is None else out)
        status = 0
        try:
            asyncio.run(bench.all(servers, loads))
        except KeyboardInterrupt:
            progress.say("interrupted: the rows hold what was finished; the same command goes on")
            status = INTERRUPTED
    if out is not None and not args.rows_only and recorder.rows:
        page(out, progress.say)
    return Outcome(recorder.new, status or (FAILED if bench.failures else 0))


def _machine(name: str | None, servers: Sequence[Server]) -> dict[str, Any]:
    """What the servers run on. Not by torch, which would allocate GPU memory beside the server."""
    if name:
        return {"gpu": name}
    if not all(server.endpoint.local for server in servers):
        return {"gpu": "unknown (a server elsewhere)"}
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    done = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        return {}
    return {"gpu": names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"}


class Bench:
    """Sends loads to servers and writes their rows.

    Parameters
    ----------
    args : argparse.Namespace
    recorder : Recorder
    progress : Progress
    folder : Path
        For the logs of servers that are started.
    """

    def __init__(self, args: argparse.Namespace, recorder: Recorder, progress: Progress, folder: Path) -> None:
        self.args, self.recorder, self.progress, self.folder = args, recorder, progress, folder
        self.deadline = Deadline(args.deadline)
        self.failures = 0
        self.salt = f"kvcodec {recorder.common['run']}"

    async def all(self, servers: Sequence[Server], loads: Sequence[Load]) -> None:
        """Every load on every server, what the rows do not hold yet."""
        for server in servers:
            todo = [load for load in loads if not self.recorder.has(server.label, DONE, load.name)]
            if not todo:
                self.progress.say(f"{server.label}: finished before")
            elif self.deadline.passed:
                self.progress.say(f"{server.label}: out of time; {len(todo)} loads are left for the same command")
            else:
                await self._server(server, todo)

    async def _server(self, server: Server, loads: Sequence[Load]) -> None:
        if server.start is None:
            await self._loads(server, loads, "")
            return
        log = self.folder / f"serve-{server.label}.log"
        begun = False
        try:
            async with started(
                server.start, server.endpoint, log, timeout=self.args.start_timeout, update=self.progress.update
            ) as seconds:
                begun = True
                self._row(server, Figure("start_s", "s", flat(seconds), 1), START, command=server.start.shown())
                await self._loads(server, loads, log.read_text(encoding="utf-8", errors="replace"))
        except RefusedToStartError as error:
            self._missing(server, "start_s", "s", START, f"refused to start: {error}", command=server.start.shown())
        except KVError as error:
            if not begun:
                raise
            self._missing(server, DONE, "requests", START, f"failed: {error}")

    async def _loads(self, server: Server, loads: Sequence[Load], log: str) -> None:
        found = await about(server.endpoint, self.args.model)
        target = Target(server.endpoint, found.model, self.args.timeout, self.salt)
        size = capacity(log, await target.metrics())
        more = {"server": {"model": found.model, "version": found.version, "kv_cache_tokens": size.tokens,
                           "block_tokens": size.block}}  # fmt: skip
        if size.tokens is None:
            self._missing(server, "kv_cache_tokens", "tokens", START, "the server does not say", 0, **more)
        else:
            self._row(server, Figure("kv_cache_tokens", "tokens", flat(size.tokens), 1), START, **more)
        prompts = Prompts(self.args.seed, self.args.vocabulary or found.vocabulary or VOCABULARY)
        for i, load in enumerate(loads):
            if self.deadline.passed:
                self.progress.say(f"{server.label}: out of time; {len(loads) - i} loads are left for the same command")
                return
            if not await self.load(server, target, load, prompts, found, more, size.block):
                return

    async def load(
        self, server: Server, target: Asked, load: Load, prompts: Prompts, found: About, more: Row, block: int | None
    ) -> bool:
        """Send one load and write its rows; whether the server is still there."""
        more = more | {"load": "sweep" if isinstance(load, Point) else "sessions", "sizes": load.sizes()}
        if found.max_tokens is not None and load.most_tokens > found.max_tokens:
            why = f"not sent: a request has {load.most_tokens} tokens, the server takes {found.max_tokens}"
            self._missing(server, DONE, "requests", load.name, why, **more)
            return True
        label = f"{server.label} {load.name}"
        begin, busy = time.monotonic(), time.process_time()

        def tick(done: int, total: int, failed: int) -> None:
            seconds = f"{time.monotonic() - begin:.0f} s"
            self.progress.bar(label, done, total, f"{done}/{total} {seconds}" + f", {failed} failed" * bool(failed))

        self.progress.update(f"{label}: warming up")
        result = await send_load(target, load, prompts, warmups=self.args.warmups, tick=tick)
        more["client_cpu"] = round((time.process_time() - busy) / max(time.monotonic() - begin, 1e-9), 3)
        more |= {"wall_s": round(result.wall, 3), "unsent": result.unsent} | errors_of(result)
        self.failures += bool(result.failed or result.unsent)
        done = len(result.replies) - len(result.failed)
        first = next((str(reply.error) for reply in result.failed), "")
        if result.gone:
            self._missing(server, DONE, "requests", load.name,
                          f"the server was gone after {done} of {load.requests} requests: {first}", **more)  # fmt: skip
            return False
        if not done:
            why = f"failed: none of {load.requests} requests was answered: {first}"
            self._missing(server, DONE, "requests", load.name, why, **more)
            return True
        for shape, figure in figures_of(load, result, block):
            self._row(server, figure, shape, **more)
        if isinstance(load, Sessions) and not any(reply.cached_tokens is not None for reply in result.replies):
            why = "the server does not say what it found (vLLM: --enable-prompt-tokens-details)"
            self._missing(server, "prefix_residency", "x", load.name, why, 0, **more)
        # last: its row marks this load as done
        self._row(server, Figure(DONE, "requests", flat(done), load.requests), load.name, **more)
        if result.failed:
            self.progress.say(f"{label}: {len(result.failed)} of {load.requests} requests failed; the first: {first}")
        return True

    def _row(self, at: Server, figure: Figure, shape: str, **more: Any) -> None:
        self.recorder.add(at.label, None, figure.metric, figure.unit, shape, figure.values, n=figure.n, **more)

    def _missing(
        self, at: Server, metric: str, unit: str, shape: str, status: str, failures: int = 1, **more: Any
    ) -> None:
        self.failures += failures
        self.recorder.add(at.label, None, metric, unit, shape, None, status=status, **more)


def figures_of(load: Load, result: Run, block: int | None) -> Iterator[tuple[str, Figure]]:
    """Yield shapes and figures of a load: of all of it, then of a session load's rounds and groups of rounds.

    Groups are UltraQuant's: warm rounds (2 to half of them) and late ones (the rest); with six, 2-3 and 4-6.
    """
    for figure in (*throughput(result.replies, result.wall), *latencies(result.replies)):
        yield load.name, figure
    for figure in counted(result.pages[0], result.pages[-1]):
        yield load.name, figure
    if isinstance(load, Point):
        return
    for figure in residency(result.replies, block):
        yield load.name, figure
    half = load.rounds // 2
    for first, last in dict.fromkeys(
        [*((r, r) for r in range(1, load.rounds + 1)), (2, half), (half + 1, load.rounds)]
    ):
        here = [reply for reply in result.replies if first <= reply.round <= last]
        shape = f"{load.name}_r{first}" + f"-{last}" * (last > first)
        yield from zip(itertools.repeat(shape), (*latencies(here), *residency(here, block)), strict=False)
        if load.together and first == last < len(result.pages):
            yield from zip(itertools.repeat(shape), counted(*result.pages[first - 1 : first + 1]), strict=False)
