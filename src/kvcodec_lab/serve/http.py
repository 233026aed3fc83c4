"""HTTP/1.1 and server-sent events over asyncio streams: as much of both as an OpenAI endpoint speaks.

A connection per request, so that nothing that a broken answer left behind meets the next one.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvcodec.errors import SpecError

PIECE = 1 << 16


class RequestError(Exception):
    """A request that gave no whole answer.

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
        If it is no http address.
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


class Response:
    """Status, headers and a body that is read as it comes."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.reason, self.headers = status, reason, headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes in whatever pieces the network brings.

        Raises
        ------
        RequestError
            ``cut`` if it ends before its length, ``malformed`` if its chunks are none.
        """
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            async for piece in self._chunks():
                yield piece
        elif "content-length" in self.headers:
            async for piece in self._exactly(int(self.headers["content-length"])):
                yield piece
        else:
            while piece := await self._reader.read(PIECE):
                yield piece

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def _exactly(self, left: int) -> AsyncIterator[bytes]:
        while left:
            piece = await self._reader.read(min(left, PIECE))
            if not piece:
                raise RequestError("cut", "the server hung up in the middle of its answer")
            left -= len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._reader.readline()
            if not line:
                raise RequestError("cut", "the server hung up in the middle of its answer")
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError:
                raise RequestError("malformed", f"a chunk of the answer begins with {line[:40]!r}") from None
            async for piece in self._exactly(size):
                yield piece
            await self._reader.readline()
            if size == 0:
                return


@contextlib.asynccontextmanager
async def request(endpoint: Endpoint, path: str, body: bytes | None = None) -> AsyncIterator[Response]:
    """Ask for ``path``; POST of JSON where there is a body.

    Raises
    ------
    RequestError
        ``connection`` or ``malformed``.
    """
    try:
        context = ssl.create_default_context() if endpoint.tls else None
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except OSError as error:
        raise RequestError("connection", f"{endpoint.url}: {error.strerror or error}") from error
    try:
        writer.write(_head(endpoint, path, body) + (body or b""))
        await writer.drain()
        yield await _response(reader)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise RequestError("connection", f"{endpoint.url} hung up ({type(error).__name__})") from error
    except ValueError as error:  # a line of headers or of chunks that never ends
        raise RequestError("malformed", f"the answer is not HTTP: {error}") from error
    finally:
        writer.close()
        # not wait_for: Python 3.11's loses an interrupt that comes as the connection closes, and the load goes on
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.wait_closed()


async def get(endpoint: Endpoint, path: str, timeout: float = 10.0) -> bytes | None:
    """Return the body of a page; None where there is none, whatever the reason."""
    try:
        async with asyncio.timeout(timeout), request(endpoint, path) as response:
            body = await response.read()
            return body if response.status == 200 else None
    except (RequestError, TimeoutError):
        return None


def _head(endpoint: Endpoint, path: str, body: bytes | None) -> bytes:
    host = endpoint.url.partition("//")[2].partition("/")[0]
    lines = [f"{'GET' if body is None else 'POST'} {endpoint.base}{path} HTTP/1.1", f"Host: {host}", "Accept: */*"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in endpoint.headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


async def _response(reader: asyncio.StreamReader) -> Response:
    line = (await reader.readline()).decode("latin-1")
    if not line:
        raise RequestError("connection", "the server hung up before it answered")
    version, _, rest = line.strip().partition(" ")
    status, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/") or not status.isdigit():
        raise RequestError("malformed", f"the answer begins with {line[:40]!r}, which is not HTTP")
    headers = {}
    while (line := (await reader.readline()).decode("latin-1")).strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if not line:
        raise RequestError("cut", "the server hung up among its headers")
    return Response(int(status), reason, headers, reader)


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
                raise RequestError("malformed", f"a line of the stream is no event: {line[:60]!r}")
        return found

    def end(self) -> list[str]:
        """Return the event that the stream's end completes, where a server leaves out the last empty line."""
        return self.feed(b"\n\n")
