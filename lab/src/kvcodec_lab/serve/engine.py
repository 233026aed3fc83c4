"""A vLLM engine in this process instead of a server, for the loads of ``bench serve``, without HTTP.

Requests are added between two of the engine's steps, which block: times include the scheduler, the model and the
engine's own work, but no network, JSON or second process.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from kvcodec_lab.serve.client import Reply
from kvcodec_lab.serve.http import RequestError


class Steps(Protocol):
    """The methods of vLLM's ``LLMEngine`` that are used."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Queue a request."""

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> list[Any]:
        """Run the model once; outputs of requests that got tokens."""

    def abort_request(self, request_ids: list[str]) -> None:
        """Drop requests."""


class EngineTarget:
    """An engine with the interface of a server (``loads.Asked``).

    Parameters
    ----------
    engine : LLMEngine
        With its core in this process.
    params : callable
        Number of output tokens to the engine's sampling parameters; outputs must be new tokens only (``DELTA``).
    page : callable
        Returns its page of Prometheus metrics.
    seconds : float
        From the first step on; unfinished requests then time out, and the engine counts as gone.
    """

    def __init__(
        self,
        engine: Steps,
        params: Callable[[int], Any],
        page: Callable[[], str] = str,
        seconds: float = float("inf"),
    ) -> None:
        self.engine, self.params, self.page, self.seconds = engine, params, page, seconds
        self.waiting: dict[str, tuple[Reply, asyncio.Future[None]]] = {}
        self.numbers = itertools.count()
        self.tokens = 0
        self.wake = asyncio.Event()
        self.end = float("inf")
        self.broken: RequestError | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["EngineTarget"]:
        """Step the engine while the block runs."""
        task = asyncio.create_task(self._drive())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if self.waiting and self.broken is None:
                self.engine.abort_request(list(self.waiting))

    async def complete(self, prompt: list[int], output: int, want_ids: bool = False) -> Reply:
        """Send one prompt; failures are in the reply, none is raised."""
        reply = Reply(output, len(prompt), time.perf_counter())
        if self.broken is not None:
            reply.error = self.broken
        else:
            name, done = f"bench-{next(self.numbers)}", asyncio.get_running_loop().create_future()
            try:
                self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params(output))
            except Exception as error:  # the engine's own errors, e.g. a prompt that is too long
                reply.error = RequestError("refused", f"{type(error).__name__}: {error}")
            else:
                self.waiting[name] = (reply, done)
                self.wake.set()
                await done
        reply.ended = time.perf_counter()
        return reply

    async def alive(self) -> bool:
        """Whether more can be sent."""
        return self.broken is None

    async def metrics(self) -> str:
        """Return the page of metrics."""
        return self.page()

    async def _drive(self) -> None:
        while True:
            if not self.engine.has_unfinished_requests():
                self.wake.clear()
                await self.wake.wait()
            self.end = min(self.end, time.perf_counter() + self.seconds)
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._break(RequestError("connection", f"{type(error).__name__}: {error}"))
                return
            now = time.perf_counter()
            for output in outputs:
                self._take(output, now)
            if now > self.end:
                left = list(self.waiting)
                self._break(RequestError("timeout", f"no whole answer after {self.seconds:g} s of this load"))
                self.engine.abort_request(left)
                return
            await asyncio.sleep(0)  # clients send what they have

    def _take(self, output: Any, now: float) -> None:
        if output.request_id not in self.waiting:
            return
        reply, done = self.waiting[output.request_id]
        if (cached := getattr(output, "num_cached_tokens", None)) is not None:
            reply.cached_tokens = int(cached)
        if ids := list(output.outputs[0].token_ids):
            if reply.ttft is None:
                reply.ttft = now - reply.started
            else:
                reply.gaps.append(now - reply.started - reply.latency)
            reply.latency = now - reply.started
            reply.token_ids += ids
            self.tokens += len(ids)
            reply.output_tokens += len(ids)
        if output.finished:
            if reply.output_tokens < reply.asked:
                came = f"{reply.output_tokens} tokens came of {reply.asked} asked for"
                reply.error = RequestError("short", came)
            del self.waiting[output.request_id]
            done.set_result(None)

    def _break(self, error: RequestError) -> None:
        self.broken = error
        for reply, done in self.waiting.values():
            reply.error = error
            done.set_result(None)
        self.waiting.clear()
