"""One request: times against a server of known delays, and every way in which an answer can be broken."""

import asyncio

import pytest

from kvcodec.errors import SpecError
from kvcodec_lab.serve.client import Target
from kvcodec_lab.serve.http import Endpoint, Events, RequestError, endpoint_of, get
from lab.tests.bench.fake_openai import FIRST, GAP, Fake, running
from lab.tests.bench.fake_time import run_with


def complete(url, prompt=tuple(range(40)), output=6, timeout=20.0, want_ids=False, salt=""):
    target = Target(endpoint_of(url), "tiny", timeout, salt)
    return asyncio.run(target.complete(list(prompt), output, want_ids))


def timed(fake, output=6, timeout=20.0, salt="", before=0):
    """The last of several replies, on a clock of its own."""
    target = Target(Endpoint("127.0.0.1", 80), "tiny", timeout, salt)

    async def ask():
        for _ in range(before):
            await target.complete(list(range(40)), 1)
        return await target.complete(list(range(40)), output, want_ids=True)

    return run_with(fake.serve, ask())


@pytest.mark.parametrize("number", [0, 1], ids=["chunked", "until the end"])
def test_times_are_those_of_the_server(number):
    fake = Fake(tail=0.3)
    reply = timed(fake, salt="salt", before=number)
    assert reply.ok, reply.error
    assert (reply.output_tokens, reply.prompt_tokens, reply.cached_tokens) == (6, 40, 32 * number)
    assert reply.token_ids == [200, 201, 202, 203, 204, 205]
    assert reply.ttft == pytest.approx(FIRST)
    assert reply.gaps == pytest.approx([GAP] * 5)
    assert reply.latency == pytest.approx(FIRST + 5 * GAP)  # what comes behind the last token is no latency
    assert reply.ended - reply.started == pytest.approx(FIRST + 5 * GAP + 0.3)
    assert reply.tpot == pytest.approx(GAP)
    assert reply.tokens_per_s == pytest.approx(6 / (5 * GAP))
    asked = fake.seen[-1]
    assert asked["prompt"] == list(range(40))
    assert (asked["max_tokens"], asked["ignore_eos"], asked["stream"], asked["cache_salt"]) == (6, True, True, "salt")
    assert asked["stream_options"] == {"include_usage": True}


def test_one_token_has_no_time_per_token():
    with running(Fake(0.0, 0.0)) as url:
        reply = complete(url, output=1)
    assert reply.ok
    assert (reply.tpot, reply.tokens_per_s, reply.gaps) == (None, None, [])


def test_characters_split_over_pieces():
    with running(Fake(0.0, 0.0, lambda *_: "slow bytes")) as url:
        replies = [complete(url), complete(url)]
    assert [(r.ok, r.output_tokens) for r in replies] == [(True, 6)] * 2


def test_without_usage_tokens_are_counted_as_they_come():
    with running(Fake(0.0, 0.0, lambda *_: "no usage")) as url:
        assert complete(url).output_tokens == complete(url, want_ids=True).output_tokens == 6


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ("refused", "refused", "HTTP 400 Token id 9 is out of vocabulary"),
        ("hangs up", "connection", "hung up before it answered"),
        ("not http", "malformed", "is not HTTP: Bad status line"),
        ("cut", "cut", ""),
        ("not json", "malformed", "not JSON"),
        ("not events", "malformed", "not an event"),
        ("not utf-8", "malformed", "not UTF-8"),
        ("error", "error", "EngineCore encountered an issue"),
        ("short", "short", "5 tokens came of 6"),
    ],
)
def test_a_broken_answer_is_a_failed_request(wrong, kind, said):
    with running(Fake(0.0, 0.0, lambda *_: wrong)) as url:
        for reply in (complete(url), complete(url)):  # chunked, and until the end
            assert not reply.ok
            assert reply.error.kind == kind
            assert said in reply.error.text


def test_a_stalled_stream_is_given_up():
    reply = timed(Fake(0.0, 0.0, lambda *_: "stalls"), timeout=0.3)
    assert (reply.error.kind, reply.error.text) == ("timeout", "no whole answer in 0.3 s")
    assert reply.ended - reply.started == pytest.approx(0.3)


def test_a_server_that_does_not_answer_is_a_connection_error():
    reply = complete("http://127.0.0.1:9")
    assert reply.error.kind == "connection"
    assert "http://127.0.0.1:9" in reply.error.text
    assert asyncio.run(get(endpoint_of("http://127.0.0.1:9"), "/health")) is None


def test_a_last_event_without_a_token_is_no_token():
    """As llama.cpp closes: an event that says why, with no text."""

    class Closing(Fake):
        async def complete(self, asked, writer):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(asked["max_tokens"]):
                writer.write(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n')

    reply = timed(Closing())
    assert reply.ok
    assert (reply.output_tokens, len(reply.gaps)) == (6, 5)
    assert reply.ended - reply.started == pytest.approx(reply.latency + 0.05)


def test_events_split_at_every_byte():
    stream = ': ping\r\ndata: {"a": "é漢🙂"}\r\n\r\nevent: x\ndata: 1\ndata:2\n\n\ndata: [DONE]'.encode()
    for size in range(1, len(stream) + 1):
        events, found = Events(), []
        for i in range(0, len(stream), size):
            found += events.feed(stream[i : i + size])
        assert found + events.end() == ['{"a": "é漢🙂"}', "1\n2", "[DONE]"], size


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"Content-Length: 10\r\n\r\nfour", "cut"),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nfo", "cut"),
        (b"Transfer-Encoding: chunked\r\n\r\nfour\r\n", "malformed"),
        (b"Content-Le", "connection"),
    ],
)
def test_a_body_that_is_not_whole(body, kind):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + body)
        await writer.drain()
        writer.close()

    async def ask():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
            target = Target(endpoint, "tiny", 5.0)
            return await target.complete([1], 1), await get(endpoint, "/health")

    reply, body = asyncio.run(ask())
    assert (reply.error.kind, body) == (kind, None)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://gpu:8000/v1/", "http://gpu:8000"), ("localhost:8001", "http://localhost:8001"),
        ("https://host/proxy/v1", "https://host:443/proxy"), ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)  # fmt: skip
def test_addresses(text, url):
    assert endpoint_of(text).url == url


@pytest.mark.parametrize("text", ["ftp://host", "http://", "http://host:eight", ""])
def test_what_is_no_address(text):
    with pytest.raises(SpecError, match="is not the address of a server; write e"):
        endpoint_of(text)


def test_headers_are_sent_and_shown_nowhere():
    endpoint = endpoint_of("localhost:1", {"Authorization": "Bearer abc"})
    assert "abc" not in repr(endpoint)

    async def ask():
        got = []

        async def answer(reader, writer):
            got.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await get(Endpoint("127.0.0.1", port, headers=endpoint.headers), "/health")
        return got[0]

    assert b"Authorization: Bearer abc\r\n" in asyncio.run(ask())


def test_an_error_says_its_kind():
    assert str(RequestError("cut", "in its middle")) == "cut: in its middle"
