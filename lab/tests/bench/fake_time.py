"""An event loop of its own time and its own network: what sleeps costs nothing, and a busy machine changes nothing.

The clock stands still while anybody has something to do, and then jumps to the next timer. Connections are pairs of
transports in this process, so no byte is ever on its way when the clock jumps. ``time.perf_counter`` is the same clock.
"""

import asyncio
import contextlib
import selectors
from unittest import mock


class _Clock(selectors.SelectSelector):
    """Waits by moving the time on."""

    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return super().select(0)


class _Pipe(asyncio.Transport):
    """One end of a connection; what is written reaches the other end's protocol in the loop's next turn."""

    def __init__(self, loop, protocol):
        super().__init__()
        self.loop, self.protocol, self.other, self.closing = loop, protocol, None, False

    def write(self, data):
        if not self.closing and not self.other.closing:
            self.loop.call_soon(self.other.protocol.data_received, bytes(data))

    def close(self):
        if not self.closing:
            self.closing = True
            self.loop.call_soon(self.protocol.connection_lost, None)
            self.loop.call_soon(self.other.end)

    def end(self):
        """Nothing more will come; who wants to write none the less says so."""
        if not self.closing and not self.protocol.eof_received():
            self.close()

    abort = close

    def is_closing(self):
        return self.closing

    def pause_reading(self):
        """Nothing to do: what is written is kept by the reader, however much it is."""

    resume_reading = pause_reading


class FakeTime(asyncio.SelectorEventLoop):
    """The loop; ``listen`` says who answers, at any address."""

    def __init__(self):
        self.clock = _Clock()
        super().__init__(self.clock)
        self.answers = None

    def time(self):
        return self.clock.now

    def listen(self, serve):
        """``serve(reader, writer)`` for every connection that is opened from now on."""
        self.answers = serve

    async def sock_connect(self, sock, address):
        if self.answers is None:
            raise ConnectionRefusedError(111, f"nobody listens at {address}")

    async def create_connection(self, protocol_factory, *, sock, **options):
        sock.close()  # it was never connected
        theirs = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=self), self.answers, loop=self)
        ends = [_Pipe(self, protocol) for protocol in (protocol_factory(), theirs)]
        for end, other in (ends, ends[::-1]):
            end.other = other
        for end in ends:
            end.protocol.connection_made(end)
        return ends[0], ends[0].protocol


@contextlib.contextmanager
def fake_time():
    """A ``FakeTime`` whose clock is everybody's ``time.perf_counter``."""
    with asyncio.Runner(loop_factory=FakeTime) as runner, mock.patch("time.perf_counter", runner.get_loop().time):
        yield runner


def run_with(serve, work):
    """What the coroutine ``work`` returns, with ``serve(reader, writer)`` as the network."""
    with fake_time() as runner:
        runner.get_loop().listen(serve)
        return runner.run(work)
