"""Whatever breaks HTTP, on either side of the gateway, ends in a clean refusal, and nothing behind it is believed."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.capture import Peer, Seen, Upstream, answer, replies
from tests.gateway.live import Starter, chat, raw_exchange
from tests.http.http_raw import status_of, statuses_of

PATH = "/v1/chat/completions"
OK = answer(b'{"id":"a","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
BODY = json.dumps(chat()).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Type: application/json\r\n"


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
