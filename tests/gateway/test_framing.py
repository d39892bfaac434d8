"""Whatever breaks HTTP, on either side of the gateway, ends in a clean refusal, and nothing behind it is believed."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.backends.corpus import ILL_FRAMED, TRUNCATED
from tests.gateway.capture import DONE, STREAM_HEAD, Peer, Seen, Upstream, answer, chunk, replies, token
from tests.gateway.live import Starter, chat, events, raw_exchange
from tests.http.corpus import REFUSED
from tests.http.http_raw import SMUGGLED, status_of, statuses_of

PATH = "/v1/chat/completions"
OK = answer(b'{"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
BODY = json.dumps(chat()).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"


class First:
    """Answers the first request with these bytes and all others well; counts connections that carried a request."""

    def __init__(self, raw: bytes, *, then_closes: bool = False) -> None:
        self.raw = raw
        self.then_closes = then_closes
        self.peers: list[Peer] = []

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        self.peers.append(peer)
        if len(self.peers) > 1:
            await peer.send(OK)
            return
        await peer.send(self.raw)
        if self.then_closes:
            peer.writer.close()
        else:
            await peer.gone()


@pytest.mark.parametrize("name", [name for name, raw in ILL_FRAMED.items() if not raw.startswith(b"HTTP/1.1 1")])
async def test_what_a_backend_frames_ill_is_a_502_and_its_connection_is_not_used_again(
    start: Starter, name: str
) -> None:
    script = First(ILL_FRAMED[name])
    async with Upstream(script) as upstream, start(upstream.url) as live:
        refused = await live.ask(PATH, chat())
        assert (refused.status, refused.error["code"]) == (502, "backend_failed")
        assert live.holds_nothing()
        assert (await live.ask(PATH, chat())).status == 200
        assert script.peers[0] is not script.peers[1]


@pytest.mark.parametrize("name", TRUNCATED)
async def test_an_answer_that_breaks_off_is_a_502(start: Starter, name: str) -> None:
    async with Upstream(First(TRUNCATED[name], then_closes=True)) as upstream, start(upstream.url) as live:
        refused = await live.ask(PATH, chat())
        assert (refused.status, refused.error["code"]) == (502, "backend_failed")
        assert (await live.ask(PATH, chat())).status == 200
        assert live.holds_nothing()


BROKEN_STREAMS = {
    "chunk size": b"zz\r\n",
    "chunk by bare LF": b"5\nhello\n",
    "chunk longer than it says": b"2\r\nhello\r\n0\r\n\r\n",
    "chunk extension without end": b"1;" + b"a" * 300_000,
    "last chunk by bare LF": b"0\n\n",
    "end of the connection": b"",
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_a_stream_whose_framing_breaks_ends_with_a_visible_error(start: Starter, name: str) -> None:
    go_on = asyncio.Event()
    peers: list[Peer] = []

    async def script(seen: Seen, peer: Peer) -> None:
        peers.append(peer)
        if not seen.json.get("stream"):
            await peer.send(OK)
            return
        await peer.send(STREAM_HEAD + chunk(token("a") * 3))
        await go_on.wait()
        await peer.send(BROKEN_STREAMS[name])
        if BROKEN_STREAMS[name]:
            await peer.gone()
        else:
            peer.writer.close()

    async with Upstream(script) as upstream, start(upstream.url) as live:
        async with live.post(PATH, chat(stream=True)) as response:
            assert await response.content.readexactly(3 * len(token("a"))) == token("a") * 3
            go_on.set()
            rest = await response.read()
        assert DONE not in rest
        assert [event["error"]["code"] for event in events(rest)] == ["backend_failed"]
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_out"]) == ("failed", 3)
        assert live.holds_nothing()
        assert (await live.ask(PATH, chat())).status == 200
        assert peers[0] is not peers[1]


async def test_bytes_behind_an_answer_reach_nobody(start: Starter) -> None:
    script = First(OK + answer(b'{"id":"evil"}'))
    async with Upstream(script) as upstream, start(upstream.url) as live:
        for _ in range(3):
            good = await live.ask(PATH, chat())
            assert (good.status, good.json["id"]) == (200, "a")
        assert script.peers[0] is not script.peers[1]


async def test_an_answer_to_a_request_that_was_never_sent_is_not_given_to_the_next(start: Starter) -> None:
    more = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(OK)
        if not more.is_set():
            more.set()
            await peer.send(answer(b'{"id":"evil"}'))

    async with Upstream(script) as upstream, start(upstream.url) as live:
        assert (await live.ask(PATH, chat())).json["id"] == "a"
        await more.wait()
        assert (await live.ask(PATH, chat())).json["id"] == "a"


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_client_frames_ill_never_reaches_a_backend(start: Starter, name: str) -> None:
    payload, status = REFUSED[name]
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        first = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        found = statuses_of(await raw_exchange(live.gateway.port, first + payload + SMUGGLED))
        assert found == [200, status]  # nothing behind it is answered
        assert [seen.line for seen in upstream.requests] == [b"POST /v1/chat/completions HTTP/1.1"]
        assert live.holds_nothing()


@pytest.mark.parametrize("sent", [0, 1, len(BODY) - 1])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_that_breaks_off_never_reaches_a_backend(start: Starter, sent: int, framing: str) -> None:
    if framing == "length":
        payload = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:sent]
    else:
        payload = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY[:sent]
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        writer.write(payload)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert (await live.ask(PATH, chat())).status == 200
        assert len(upstream.requests) == 1
        assert live.holds_nothing()


async def test_pipelined_requests_are_answered_in_their_order(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(answer(json.dumps({"id": seen.json["messages"][0]["content"]}).encode()))

    requests = b""
    for number in range(5):
        body = json.dumps(chat(f"n{number}")).encode()
        last = b"Connection: close\r\n" if number == 4 else b""
        requests += HEAD + last + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with Upstream(script) as upstream, start(upstream.url) as live:
        found = await raw_exchange(live.gateway.port, requests)
        assert statuses_of(found) == [200] * 5
        places = [found.index(b'{"id": "n%d"}' % number) for number in range(5)]
        assert places == sorted(places)
        assert len(upstream.requests) == 5


async def test_100_continue_is_answered_here_and_not_passed_on(start: Starter) -> None:
    async with Upstream(replies(OK)) as upstream, start(upstream.url) as live:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.gateway.port)
        writer.write(HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert status_of(await reader.read()) == 200
        writer.close()
        assert "expect" not in upstream.requests[0].headers


async def test_a_backend_cannot_switch_protocols(start: Starter) -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x02hi"
    async with Upstream(First(switch)) as upstream, start(upstream.url) as live:
        refused = await live.ask(PATH, chat())
        assert (refused.status, refused.error["code"]) == (502, "backend_failed")
        assert b"hi" not in refused.body
