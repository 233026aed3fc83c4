"""Requests to an OpenAI-compatible server (by aiohttp), and server-sent events.

One connection per request, so that a broken answer cannot affect the next request. aiohttp, because a client must not
be slower than the server that it times: an event of a stream takes it 30 us on one core, httpx 100 us.
"""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvcodec.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    import aiohttp


class RequestError(Exception):
    """A request without a complete answer.

    Parameters
    ----------
    kind : str
        ``connection`` (no server, or it hung up before an answer), ``refused`` (a status that is not 200), ``cut`` (the
        answer ends in its middle), ``malformed`` (not HTTP, not events, not JSON), ``error`` (the server says so in the
        stream), ``short`` (fewer tokens than asked for), ``timeout``.
    text : str
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens.

    Parameters
    ----------
    host : str
    port : int
    tls : bool
    base : str
        Path before every path asked for, without a slash at its end.
    headers : mapping
        Sent with every request; never written to a file.
    """

    host: str
    port: int
    tls: bool = False
    base: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The address without path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.tls}://{host}:{self.port}{self.base}"

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return self.host in ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def endpoint_of(url: str, headers: Mapping[str, str] | None = None) -> Endpoint:
    """Read a server's address; ``/v1`` at its end is what every path begins with anyway.

    >>> endpoint_of("http://gpu:8000/v1/").url
    'http://gpu:8000'

    Raises
    ------
    SpecError
        If it is not an http address.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(f"{url!r} is not the address of a server; write e.g. http://localhost:8000.")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, base, dict(headers or {}))


@contextlib.asynccontextmanager
async def session() -> AsyncIterator["aiohttp.ClientSession"]:
    """Return a client for one request; nothing of it is kept for the next.

    Raises
    ------
    UnsupportedError
        If aiohttp is not installed.
    """
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise UnsupportedError("bench serve needs aiohttp; run: pip install 'kvcodec[serve]'") from error
    # no compression, which would group several tokens into one piece
    headers, patient = {"Accept-Encoding": "identity"}, aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=patient, headers=headers
    ) as made:
        yield made


@contextlib.asynccontextmanager
async def request(
    client: "aiohttp.ClientSession", endpoint: Endpoint, path: str, body: bytes | None = None
) -> AsyncIterator["aiohttp.ClientResponse"]:
    """Ask for ``path``; POST of JSON where there is a body. What fails while the answer is read is raised here as well.

    Raises
    ------
    RequestError
        ``connection``, ``malformed`` or ``cut``.
    """
    import aiohttp

    kind = {} if body is None else {"Content-Type": "application/json"}
    asked = client.request(
        "GET" if body is None else "POST",
        endpoint.url + path,
        data=None if body is None else io.BytesIO(body),
        headers={**kind, **endpoint.headers},
        allow_redirects=False,
    )
    try:
        async with asked as response:
            yield response
    except aiohttp.ServerDisconnectedError as error:
        raise RequestError("connection", f"{endpoint.url} hung up before it answered") from error
    except aiohttp.ClientPayloadError as error:
        raise RequestError("cut", f"the server hung up in the middle of its answer: {error}") from error
    except (aiohttp.ClientResponseError, aiohttp.http.HttpProcessingError) as error:
        raise RequestError("malformed", f"the answer is not HTTP: {' '.join(error.message.split())}") from error
    except OSError as error:
        raise RequestError("connection", f"{endpoint.url}: {error.strerror or error}") from error
    except aiohttp.ClientError as error:
        raise RequestError("connection", f"{endpoint.url}: {type(error).__name__}: {error}") from error


async def get(endpoint: Endpoint, path: str, timeout: float = 10.0) -> bytes | None:
    """Return the body of a page; None if the request fails or the status is not 200."""
    try:
        async with asyncio.timeout(timeout), session() as client, request(client, endpoint, path) as response:
            body = await response.read()
            return body if response.status == 200 else None
    except (RequestError, TimeoutError):
        return None


class Events:
    """Bytes to the data of server-sent events.

    Lines are decoded when they are whole, so a character may be split anywhere.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that ``piece`` completes.

        Raises
        ------
        RequestError
            ``malformed`` if a line is not UTF-8 or has no field of an event.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for raw in lines:
            try:
                line = raw.rstrip(b"\r").decode()
            except UnicodeDecodeError as error:
                raise RequestError("malformed", f"an event is not UTF-8: {raw[:60]!r}") from error
            if not line:
                if self._data:
                    found.append("\n".join(self._data))
                self._data = []
                continue
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif name not in ("", "event", "id", "retry"):  # an empty name is a comment: a server's ping
                raise RequestError("malformed", f"a line of the stream is not an event: {line[:60]!r}")
        return found

    def end(self) -> list[str]:
        """Return the event that the stream's end completes, where a server leaves out the last empty line."""
        return self.feed(b"\n\n")
