"""``packedkv bench serve URL``: sessions of several rounds against an OpenAI-compatible server (UltraQuant, Section 3).

The first prompt of a session is a prefix that all sessions share and a context of its own; every later one is the
previous prompt, its answer and the output of a tool. docs/bench-serve.md defines the metrics.
"""

import http.client
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from urllib.parse import urlsplit

import numpy as np

from packedkv.errors import KVError, SpecError
from packedkv_lab.bench.record import Recorder
from packedkv_lab.bench.timing import spread

FIRST_ID = 100
"""Ids below this are special tokens in most vocabularies."""


@dataclass(frozen=True)
class Server:
    """A running server; without a model, the first one that it lists; ``timeout``: between two pieces of an answer."""

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 1800.0

    def request(self, path: str, body: object = None) -> http.client.HTTPResponse:
        """Send one request; ``SpecError`` if the URL is no http address, ``KVError`` for no answer or an error."""
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise SpecError(f"{self.url!r} is not the address of a server; write e.g. http://localhost:8000.")
        connection = kinds[parts.scheme](parts.netloc, timeout=self.timeout)
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", **self.headers}
        base = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request("GET" if data is None else "POST", base + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise KVError(f"bench serve: {self.url} does not answer: {error}; start the server first.") from error
        if response.status != 200:
            said = response.read(400).decode(errors="replace")
            raise KVError(f"bench serve: {self.url}{path} returned HTTP {response.status}: {said}")
        return response


@dataclass(frozen=True)
class Sessions:
    """Concurrent sessions, and rounds of each; tokens of the prefix of all sessions, of the context of one session, of
    a tool's output and of an answer; seconds between an answer and the next round.
    """

    sessions: int
    rounds: int
    shared: int
    context: int
    turn: int
    answer: int
    pause: float = 0.0

    @property
    def name(self) -> str:
        """Name of the load in result rows."""
        return f"s{self.sessions}x{self.rounds}_p{self.shared}_c{self.context}_t{self.turn}_a{self.answer}"


@dataclass
class Reply:
    """Round, times in seconds and token counts of one request; ``error`` if it failed."""

    round: int
    known: int
    ttft: float = 0.0
    last: float = 0.0
    ids: list[int] = field(default_factory=list)
    cached: int | None = None
    error: str = ""


def complete(server: Server, model: str, prompt: list[int], output: int, reply: Reply) -> None:
    """Send a prompt of token ids and fill ``reply`` with times and tokens of the stream; an error is recorded."""
    asked = {"model": model, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0,
             "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}  # fmt: skip
    begin, count = time.perf_counter(), 0
    try:
        with server.request("/v1/completions", asked) as response:
            for line in response:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if event.get("error"):
                    raise KVError(str(event["error"]))
                if event.get("choices"):
                    reply.last = time.perf_counter() - begin
                    reply.ttft = reply.ttft or reply.last
                    reply.ids += event["choices"][0].get("token_ids") or []
                if usage := event.get("usage"):
                    count = int(usage["completion_tokens"])
                    reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    except (KVError, OSError, http.client.HTTPException, ValueError) as error:
        reply.error = str(error) or type(error).__name__
    if not reply.error and count < output:
        reply.error = f"{count} of {output} tokens came"


def play(server: Server, model: str, load: Sessions, number: int, seed: int, vocabulary: int) -> Iterator[Reply]:
    """Yield the replies of one session; its first failure ends it."""

    def ids(part: str, owner: int, tokens: int) -> list[int]:
        rng = np.random.default_rng([seed, zlib.crc32(f"{load.name} {part}".encode()), owner])
        drawn: list[int] = rng.integers(min(FIRST_ID, vocabulary - 1), vocabulary, tokens).tolist()
        return drawn

    prompt, known = ids("shared", 0, load.shared) + ids("context", 1 + number, load.context), 0
    for turn in range(1, load.rounds + 1):
        reply = Reply(turn, known)
        complete(server, model, prompt, load.answer, reply)
        yield reply
        if reply.error:
            return
        # the last token of an answer never runs through the model; a made-up answer is not in the cache at all
        real = len(reply.ids) == load.answer
        known = len(prompt) + (load.answer - 1 if real else 0)
        answer = reply.ids if real else ids(f"answer {turn}", 1 + number, load.answer)
        prompt = [*prompt, *answer, *ids(f"turn {turn}", 1 + number, load.turn)]
        time.sleep(load.pause if turn < load.rounds else 0)


def session_rows(server: Server, load: Sessions, recorder: Recorder, *, label: str, vocabulary: int = 30_000) -> None:
    """Send the load and write rows by round: times, residency, and how many requests were answered."""
    model = server.model or str(json.load(server.request("/v1/models"))["data"][0]["id"])
    begin = time.perf_counter()
    with ThreadPoolExecutor(load.sessions) as pool:
        played = pool.map(lambda i: list(play(server, model, load, i, recorder.seed, vocabulary)), range(load.sessions))
        replies = list(chain.from_iterable(played))
    wall = time.perf_counter() - begin
    good = [reply for reply in replies if not reply.error]

    def row(metric: str, unit: str, shape: str, values: list[float], **more: object) -> None:
        recorder.add(label, None, metric, unit, shape, spread(values), n=len(values), **more)

    errors = sorted({reply.error for reply in replies if reply.error})
    asked = load.sessions * load.rounds
    row("requests_done", "requests", load.name, [float(len(good))], requests=asked, errors=errors)
    row("output_tokens_per_s", "tokens/s", load.name, [len(good) * load.answer / wall])
    measures: dict[tuple[str, str], Callable[[Reply], float | None]] = {
        ("ttft_ms", "ms"): lambda r: 1e3 * r.ttft,
        ("tpot_ms", "ms"): lambda r: 1e3 * (r.last - r.ttft) / (load.answer - 1) if load.answer > 1 else None,
        ("prefix_residency", "share"): lambda r: min(1.0, r.cached / r.known) if r.cached is not None and r.known
        else None,
    }  # fmt: skip
    for turn in range(1, load.rounds + 1):
        for (metric, unit), measure in measures.items():
            values = [value for reply in good if reply.round == turn and (value := measure(reply)) is not None]
            if values:
                row(metric, unit, f"{load.name}_r{turn}", values)
