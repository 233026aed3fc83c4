"""One completion from a server, timed token by token.

==========  ===========================================================================================================
``ttft``    seconds from the request's sending to the first event with a choice in it
``gaps``    seconds from one such event to the next (ITL); a slow server puts several tokens into one event
``latency`` seconds from the request's sending to the last such event (E2E); usage and ``[DONE]`` behind it do not count
==========  ===========================================================================================================

These are the definitions of vLLM's own ``vllm bench serve``. The clock starts after the request's JSON is made and
before the connection is opened.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcodec_lab.serve.http import Endpoint, Events, RequestError, get, request, session

if TYPE_CHECKING:
    import aiohttp

SHOWN = 400
"""Characters of an error message that are kept."""


@dataclass
class Reply:
    """The result of one request.

    Parameters
    ----------
    asked : int
        Tokens of output that were asked for.
    started, ended : float
        Seconds on the clock of ``time.perf_counter``: sent; answered, refused or given up.
    prompt_tokens, output_tokens : int
        As the server counts them; output without its count: tokens or events that came.
    cached_tokens : int, optional
        Of the prompt, found in the prefix cache; None where the server does not say.
    token_ids : list of int
        Of the output, where the server was asked for them and gives them.
    error : RequestError, optional
        If the request failed; its times are not used.
    round, prefix_tokens : int
        Of a session's request: which round, and how much of the prompt the server had computed in those before.
    """

    asked: int
    prompt_tokens: int
    started: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    error: RequestError | None = None
    round: int = 0
    prefix_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether it was answered completely."""
        return self.error is None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token without the first; None of outputs of one token."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """SAW-INT4's per-request rate (Eq. 18): output tokens over the time after the first."""
        if self.ttft is None or self.latency <= self.ttft:
            return None
        return self.output_tokens / (self.latency - self.ttft)


@dataclass
class Target:
    """A running server, and how requests are sent to it.

    Parameters
    ----------
    endpoint : Endpoint
    model : str
    timeout : float
        Seconds that one request may take.
    salt : str
        Sent with every prompt, so that prefix-cache blocks of an earlier run with the same seed are not reused.
    """

    endpoint: Endpoint
    model: str
    timeout: float
    salt: str = ""

    async def complete(self, prompt: list[int], output: int, want_ids: bool = False) -> Reply:
        """Send one prompt; failures are in the reply, none is raised."""
        asked: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.salt:
            asked["cache_salt"] = self.salt
        if want_ids:
            asked["return_token_ids"] = True
        body = json.dumps(asked, separators=(",", ":")).encode()
        async with session() as client:
            reply = Reply(output, len(prompt), time.perf_counter())
            try:
                async with asyncio.timeout(self.timeout):
                    await self._stream(client, body, reply)
            except TimeoutError:
                reply.error = RequestError("timeout", f"no whole answer in {self.timeout:g} s")
            except RequestError as error:
                reply.error = error
            reply.ended = time.perf_counter()
        return reply

    async def _stream(self, client: "aiohttp.ClientSession", body: bytes, reply: Reply) -> None:
        async with request(client, self.endpoint, "/v1/completions", body) as response:
            if response.status != 200:
                text = (await response.read()).decode(errors="replace").strip()
                raise RequestError("refused", f"HTTP {response.status} {_message(text) or response.reason}")
            events, reading = Events(), _Reading(reply)
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for data in events.feed(piece):
                    reading.take(data, now)
            for data in events.end():
                reading.take(data, time.perf_counter())
            reading.finish()

    async def alive(self) -> bool:
        """Whether the server's health check still succeeds."""
        return await get(self.endpoint, "/health") is not None

    async def metrics(self) -> str:
        """Return its page of Prometheus metrics; empty where it has none."""
        return (await get(self.endpoint, "/metrics") or b"").decode(errors="replace")


class _Reading:
    """Events of one stream into a reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.events, self.last, self.done, self.counted = 0, reply.started, False, False

    def take(self, data: str, now: float) -> None:
        reply = self.reply
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise RequestError("malformed", f"an event is not JSON ({error.msg}): {data[:60]!r}") from error
        if not isinstance(event, dict):
            raise RequestError("malformed", f"an event is not an object: {data[:60]!r}")
        if event.get("error"):
            raise RequestError("error", _message(data))
        if event.get("choices"):
            choice = event["choices"][0]
            ids = choice.get("token_ids")
            reply.token_ids += ids or []
            # llama.cpp and others end with an event of the finish reason, without a token
            if not (choice.get("finish_reason") and not choice.get("text") and not ids and self.events >= reply.asked):
                self.events += 1
                if reply.ttft is None:
                    reply.ttft = now - reply.started
                else:
                    reply.gaps.append(now - self.last)
                self.last = now
                reply.latency = now - reply.started
        usage = event.get("usage")
        if usage:
            self.counted = True
            reply.output_tokens = int(usage.get("completion_tokens") or 0)
            reply.prompt_tokens = int(usage.get("prompt_tokens") or reply.prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens") is not None:
                reply.cached_tokens = int(details["cached_tokens"])

    def finish(self) -> None:
        reply = self.reply
        if not self.counted:
            reply.output_tokens = len(reply.token_ids) or self.events
        if not self.done:
            raise RequestError("cut", f"the stream ended without [DONE], after {reply.output_tokens} tokens")
        if reply.ttft is None:
            raise RequestError("short", "the stream ended without a token")
        if reply.output_tokens < reply.asked:
            raise RequestError("short", f"{reply.output_tokens} tokens came of {reply.asked} asked for")


def _message(text: str) -> str:
    """The message of an error response, without the JSON around it."""
    try:
        found = json.loads(text)
        found = found.get("error", found.get("message", found))
        found = found.get("message", found) if isinstance(found, dict) else found
    except (json.JSONDecodeError, AttributeError):
        found = text
    return " ".join(str(found).split())[:SHOWN]
