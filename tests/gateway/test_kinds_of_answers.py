"""An answer goes on as what it is, whatever its head calls it: events, sound, lines of JSON, text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.capture import DONE, Peer, Seen, Upstream, chunk, token, usage_event
from tests.gateway.live import MODEL, Starter, chat

HEAD = b"HTTP/1.1 200 OK\r\n%bTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [token("a"), token("b", "stop"), usage_event(11, 2), DONE]
SEEN = token("a") + token("b", "stop") + DONE
ROUTES = [{"path": "/v1/new", "treatment": "generate"}, {"path": "/v1/say", "treatment": "compute"}]
LINES = [b'{"message":{"content":"a"},"done":false}\n', b'{"message":{"content":"b"},"done":true}\n']


def typed(kind: bytes | None) -> bytes:
    return HEAD % (b"" if kind is None else b"Content-Type: %b\r\n" % kind)


class Slow(Upstream):
    """An engine that says the rest of its answer once the client has the first part."""

    def __init__(self, head: bytes, parts: list[bytes]) -> None:
        super().__init__(self._answer)
        self.has_first = asyncio.Event()
        self._head = head
        self._parts = parts

    async def _answer(self, seen: Seen, peer: Peer) -> None:
        first, *rest = self._parts
        await peer.send(self._head + chunk(first))
        await self.has_first.wait()
        for part in rest:
            await peer.send(chunk(part))
        await peer.send(b"0\r\n\r\n")


async def streamed(start: Starter, engine: Slow, path: str, body: Any) -> tuple[bytes, str, dict[str, Any]]:
    """The answer, of which the first part has come before the engine had said more; its kind; and the log line."""
    async with engine, start(engine.url, routes=ROUTES) as live:
        async with live.post(path, body) as response:
            assert response.status == 200
            first = await response.content.readany()
            assert first
            engine.has_first.set()
            got = first + await response.read()
        [line] = await live.lines(1)
        assert live.holds_nothing()
        return got, response.headers.get("content-type", ""), line


@pytest.mark.parametrize(
    "kind",
    [b"Text/Event-Stream", b"TEXT/EVENT-STREAM; Charset=UTF-8", b"text/plain", b"application/octet-stream",
     b"application/json", b"Application/JSON; charset=utf-8", None],
)  # fmt: skip
async def test_a_stream_of_events_is_one_by_any_name(start: Starter, kind: bytes | None) -> None:
    engine = Slow(typed(kind), EVENTS)
    got, seen_kind, line = await streamed(start, engine, "/v1/chat/completions", chat(stream=True))
    assert got == SEEN
    assert seen_kind == (kind or b"").decode()
    assert (line["outcome"], line["tokens_in"], line["tokens_out"]) == ("completed", 11, 2)


@pytest.mark.parametrize("first", [b": hi\n\n", b"\xef\xbb\xbf", b"\n", b"event: x\n", b"id: 1\n", b"retry: 5\n\n"])
async def test_a_stream_may_begin_in_any_way(start: Starter, first: bytes) -> None:
    engine = Slow(typed(b"application/json"), [first + EVENTS[0], *EVENTS[1:]])
    got, _, line = await streamed(start, engine, "/v1/chat/completions", chat(stream=True))
    assert got == first + SEEN
    assert line["outcome"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (b"audio/pcm", [b"\x01" * 4000] * 3),
        (b"Audio/MPEG", [b"ID3" * 900, b"\0" * 9]),
        (b"application/x-ndjson", LINES),
        (b"application/jsonl", LINES),
        (b"text/plain; charset=utf-8", [b"Once upon", b" a time"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/say", "/v1/new"])
async def test_what_is_no_json_goes_on_as_it_comes(
    start: Starter, path: str, stream: bool, kind: bytes, parts: list[bytes]
) -> None:
    body = {"model": MODEL, "input": "x", "prompt": "x", "stream": stream}
    got, seen_kind, line = await streamed(start, Slow(typed(kind), parts), path, body)
    assert (got, seen_kind) == (b"".join(parts), kind.decode())
    assert line["outcome"] == "completed"


@pytest.mark.parametrize("kind", [b"application/json", b"APPLICATION/JSON", b"application/problem+json; charset=utf-8"])
async def test_json_that_is_cut_is_a_failure_by_any_spelling(start: Starter, kind: bytes) -> None:
    engine = Slow(typed(kind), [b'{"choices":[', b"]"])
    engine.has_first.set()
    async with engine, start(engine.url) as live:
        for stream in (False, True):
            assert (await live.ask("/v1/chat/completions", chat(stream=stream))).status == 502


async def test_a_text_of_known_length_keeps_it(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello")

    async with Upstream(script) as upstream, start(upstream.url) as live:
        got = await live.ask("/v1/chat/completions", chat())
        assert (got.body, got.headers["content-length"]) == (b"hello", "5")


async def test_json_where_a_stream_was_asked_for_is_json(start: Starter) -> None:
    whole = b'{"data":"data:","usage":{"prompt_tokens":7,"completion_tokens":2}}'
    engine = Slow(typed(b"text/plain"), [whole[:8], whole[8:]])
    engine.has_first.set()
    async with engine, start(engine.url) as live:
        got = await live.ask("/v1/chat/completions", chat(stream=True))
        assert got.body == whole
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_in"], line["tokens_out"]) == ("completed", 7, 2)
