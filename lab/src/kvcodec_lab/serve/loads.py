"""The papers' two loads, sent to a server: SAW-INT4's sweep of concurrency, UltraQuant's sessions of many rounds.

**Sweep** (SAW-INT4, Appendix D). A point is so many clients at once, each sending its next request when the last one is
answered (closed loop), or a Poisson stream of requests whose mean gap is 1 / rate (open loop; the gaps are scaled so
that all requests fall into requests / rate seconds, as vLLM's benchmark does). Prompts are random token ids, different
in every request and point, so that nothing is found in the prefix cache.

**Sessions** (UltraQuant, Section 3). A session's first prompt is a prefix that all sessions share and a context of its
own; every later one is the whole of the round before, its answer and a tool's output. Sessions run beside each other
without waiting for each other, or round by round (``together``). The paper gives 32 sessions and six rounds; lengths
are ours.
"""

import asyncio
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from kvcodec_lab.serve.client import Reply

FIRST_ID = 100
"""Ids below this are special tokens in most vocabularies."""
Tick = Callable[[int, int, int], None]


class Asked(Protocol):
    """The interface of ``client.Target`` that a load uses."""

    async def complete(self, prompt: list[int], output: int, want_ids: bool = False) -> Reply:
        """Send one prompt."""

    async def alive(self) -> bool:
        """Whether the server is still there."""

    async def metrics(self) -> str:
        """Its page of metrics."""


@dataclass(frozen=True)
class Point:
    """One point of the sweep.

    Parameters
    ----------
    input_len, output_len : int
        Tokens.
    requests : int
    concurrency : int
        Clients; 0: an open loop.
    rate : float
        Requests per second of an open loop.
    """

    input_len: int
    output_len: int
    requests: int
    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """As rows have it in ``shape``."""
        load = f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"
        return f"{load}_i{self.input_len}_o{self.output_len}"

    @property
    def most_tokens(self) -> int:
        """Of one request."""
        return self.input_len + self.output_len

    def sizes(self) -> dict[str, Any]:
        """As rows have it in ``sizes``."""
        return {k: v for k, v in asdict(self).items() if v}


@dataclass(frozen=True)
class Sessions:
    """Sessions of several rounds.

    Parameters
    ----------
    sessions, rounds : int
    shared : int
        Tokens that all sessions begin with.
    context : int
        Tokens of its own that a session's first prompt goes on with.
    turn : int
        Tokens of a tool's output, from the second round on.
    answer : int
        Tokens of output in every round.
    pause : float
        Seconds between an answer and the next round: the tool's work.
    together : bool
        Whether a round begins for all sessions when all have finished the one before.
    """

    sessions: int = 32
    rounds: int = 6
    shared: int = 1024
    context: int = 16384
    turn: int = 2048
    answer: int = 256
    pause: float = 0.0
    together: bool = False

    @property
    def name(self) -> str:
        """As rows have it in ``shape``; a round's rows end in ``_r1``, ``_r2``, ..."""
        more = f"_w{self.pause:g}" * bool(self.pause) + "_together" * self.together
        sizes = f"p{self.shared}_c{self.context}_t{self.turn}_a{self.answer}"
        return f"s{self.sessions}x{self.rounds}_{sizes}{more}"

    @property
    def requests(self) -> int:
        """In all rounds."""
        return self.sessions * self.rounds

    @property
    def most_tokens(self) -> int:
        """Of one request: the last round's."""
        return self.shared + self.context + (self.rounds - 1) * (self.turn + self.answer) + self.answer

    def sizes(self) -> dict[str, Any]:
        """As rows have it in ``sizes``."""
        return asdict(self)


Load = Point | Sessions


@dataclass
class Run:
    """The result of a load.

    Parameters
    ----------
    replies : list of Reply
        In the order in which they ended.
    wall : float
        Seconds from the first request to the end of the last.
    unsent : int
        Requests that were not sent because the server was gone, or a session had failed before.
    gone : bool
        Whether the server stopped answering.
    pages : list of str
        Its metrics: before, then after everything, or after every round of sessions that wait for each other.
    """

    replies: list[Reply] = field(default_factory=list)
    wall: float = 0.0
    unsent: int = 0
    gone: bool = False
    pages: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Reply]:
        """Requests without a complete answer."""
        return [reply for reply in self.replies if not reply.ok]


class Prompts:
    """Random token ids, the same for the same seed, name and number.

    Parameters
    ----------
    seed : int
    vocabulary : int
        Ids are below it.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed, self.vocabulary = seed, vocabulary

    def ids(self, name: str, number: int, tokens: int) -> list[int]:
        """Return ``tokens`` ids."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode()), number])
        found: list[int] = rng.integers(min(FIRST_ID, self.vocabulary - 1), self.vocabulary, tokens).tolist()
        return found


class _Watch:
    """Counts replies as they end, and notices when the server is gone."""

    def __init__(self, target: Asked, total: int, tick: Tick, probe: float) -> None:
        self.target, self.total, self.tick, self.probe = target, total, tick, probe
        self.run = Run()

    async def send(self, prompt: list[int], output: int, want_ids: bool = False) -> Reply:
        reply = await self.target.complete(prompt, output, want_ids)
        self.run.replies.append(reply)
        self.tick(len(self.run.replies), self.total, len(self.run.failed))
        if reply.error is not None and reply.error.kind in ("connection", "cut", "timeout") and not self.run.gone:
            self.run.gone = not await self._answers()
        return reply

    async def _answers(self) -> bool:
        for wait in (0.0, self.probe, 2 * self.probe):
            await asyncio.sleep(wait)
            if await self.target.alive():
                return True
        return False


async def send_load(
    target: Asked, load: Load, prompts: Prompts, *, warmups: int = 0, tick: Tick = lambda *_: None, probe: float = 1.0
) -> Run:
    """Send a load, after ``warmups`` requests of the same lengths, which are not counted.

    Parameters
    ----------
    target : Target
    load : Point or Sessions
    prompts : Prompts
    warmups : int
        Sent at once; a server compiles and captures graphs while it answers them. Of sessions: rounds of one token.
    tick : callable
        Gets requests done, all, failed.
    probe : float
        Seconds between health checks of a server that failed.

    Returns
    -------
    Run
    """
    short = load.input_len if isinstance(load, Point) else load.shared + load.context
    output = min(load.output_len, 16) if isinstance(load, Point) else 1
    first = [target.complete(prompts.ids(f"warm-up {load.name}", i, short), output) for i in range(warmups)]
    await asyncio.gather(*first)
    watch = _Watch(target, load.requests, tick, probe)
    watch.run.pages.append(await target.metrics())
    begin = time.perf_counter()
    if isinstance(load, Sessions):
        await _sessions(watch, load, prompts)
    elif load.concurrency:
        await _closed(watch, load, prompts)
    else:
        await _open(watch, load, prompts)
    # the end of the last request, not of the health check after it
    watch.run.wall = max((reply.ended for reply in watch.run.replies), default=begin) - begin
    watch.run.unsent = load.requests - len(watch.run.replies)
    if not (isinstance(load, Sessions) and load.together):
        watch.run.pages.append(await target.metrics())
    return watch.run


async def _closed(watch: _Watch, point: Point, prompts: Prompts) -> None:
    numbers = iter(range(point.requests))

    async def client() -> None:
        for number in numbers:  # shared: each takes the next
            if watch.run.gone:
                return
            await watch.send(prompts.ids(point.name, number, point.input_len), point.output_len)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(point.concurrency, point.requests)):
            group.create_task(client())


async def _open(watch: _Watch, point: Point, prompts: Prompts) -> None:
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(arrivals(point, prompts.seed)):
            prompt = prompts.ids(point.name, number, point.input_len)
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            if watch.run.gone:
                return
            group.create_task(watch.send(prompt, point.output_len))


def arrivals(point: Point, seed: int) -> Iterator[float]:
    """Seconds at which an open loop's requests are sent: exponential gaps, the last at requests / rate."""
    gaps = np.random.default_rng([seed, zlib.crc32(point.name.encode())]).exponential(size=point.requests)
    return itertools.accumulate((gaps * (point.requests / point.rate / gaps.sum())).tolist())


class _Session:
    """One session: its prompt so far."""

    def __init__(self, load: Sessions, number: int, prompts: Prompts) -> None:
        self.load, self.number, self.prompts = load, number, prompts
        self.prompt = prompts.ids(load.name, 0, load.shared) + self._ids("context", load.context)
        self.known = 0
        self.over = False

    def _ids(self, what: str, tokens: int) -> list[int]:
        return self.prompts.ids(f"{self.load.name} {what}", 1 + self.number, tokens)

    async def rounds(self, watch: _Watch) -> AsyncIterator[int]:
        """Play all rounds; yields after each."""
        load = self.load
        for turn in range(1, load.rounds + 1):
            if watch.run.gone:
                return
            reply = await watch.send(self.prompt, load.answer, want_ids=True)
            reply.round, reply.prefix_tokens = turn, self.known
            if not reply.ok:
                return
            said = len(reply.token_ids) == load.answer
            # the last token of an answer is never run through the model; a made-up answer is not in the cache at all
            self.known = len(self.prompt) + (load.answer - 1 if said else 0)
            answer = reply.token_ids if said else self._ids(f"answer {turn}", load.answer)
            self.prompt = [*self.prompt, *answer, *self._ids(f"turn {turn}", load.turn)]
            yield turn
            if load.pause and turn < load.rounds:
                await asyncio.sleep(load.pause)


async def _sessions(watch: _Watch, load: Sessions, prompts: Prompts) -> None:
    playing = [_Session(load, i, prompts).rounds(watch) for i in range(load.sessions)]

    async def all_of(session: AsyncIterator[int]) -> None:
        async for _ in session:
            pass

    if not load.together:
        async with asyncio.TaskGroup() as group:
            for session in playing:
                group.create_task(all_of(session))
        return
    for _ in range(load.rounds):
        await asyncio.gather(*(anext(session, None) for session in playing))
        watch.run.pages.append(await watch.target.metrics())
