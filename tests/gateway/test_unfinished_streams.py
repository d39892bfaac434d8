"""A stream that ends without saying so is a broken one: an error that the client sees, charged for what came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.capture import (
    DONE,
    STREAM_END,
    STREAM_HEAD,
    Peer,
    Seen,
    Upstream,
    chunk,
    messages_stream,
    named,
    replies,
    responses_stream,
    token,
    usage_event,
)
from tests.gateway.live import MODEL, Starter, chat, events

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(stream=True),
    "/v1/completions": {"model": MODEL, "prompt": "x", "stream": True},
    "/v1/responses": {"model": MODEL, "input": "x", "stream": True},
    "/v1/messages": {"model": MODEL, "max_tokens": 50, "messages": [], "stream": True},
}
WHOLE: dict[str, list[bytes]] = {
    "/v1/chat/completions": [token("a"), token("b"), token("c"), token("", "stop"), usage_event(11, 3), DONE],
    "/v1/completions": [token("a"), token("b"), token("c"), token("", "stop"), usage_event(11, 3), DONE],
    "/v1/responses": responses_stream("a", "b", "c"),
    "/v1/messages": messages_stream("a", "b", "c"),
}
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "by a last chunk": lambda sent: STREAM_HEAD + chunk(sent) + STREAM_END,
    "by its length": lambda sent: LENGTH_HEAD % len(sent) + sent,
    "by the end of the connection": lambda sent: PLAIN_HEAD + sent,
}


def serves(raw: bytes) -> Callable[[Seen, Peer], Any]:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(raw)
        if raw.startswith(PLAIN_HEAD):
            peer.writer.close()

    return script


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_an_end_that_says_so_is_a_clean_one(start: Starter, path: str, framing: Any) -> None:
    sent = b"".join(WHOLE[path])
    async with Upstream(serves(framing(sent))) as upstream, start(upstream.url) as live:
        got = await live.ask(path, BODIES[path])
        assert b"error" not in got.body
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_in"], line["tokens_out"]) == ("completed", 11, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_an_end_after_all_choices_have_said_why_is_a_clean_one(start: Starter, path: str, framing: Any) -> None:
    """Many servers send no last event, and client libraries ask for none."""
    for sent in (b"".join(WHOLE[path][:-1]), b"".join(WHOLE[path][: -1 if path == "/v1/messages" else -2])):
        async with Upstream(serves(framing(sent))) as upstream, start(upstream.url) as live:
            for _ in range(6):
                assert (await live.ask(path, BODIES[path])).body == sent.replace(usage_event(11, 3), b"")
            assert {line["outcome"] for line in await live.lines(6)} == {"completed"}


def of_choice(index: int, text: str, finish: str | None = None) -> bytes:
    return token(text, finish).replace(b'"index":0', b'"index":%d' % index)


@pytest.mark.parametrize(
    ("sent", "is_whole"),
    [
        (of_choice(0, "a", "stop") + of_choice(1, "b", "length"), True),
        (of_choice(1, "b", "stop") + of_choice(0, "a") * 3 + of_choice(0, "", "stop"), True),
        (of_choice(0, "a", "stop") + of_choice(1, "b"), False),
        (of_choice(0, "a", "stop") + of_choice(0, "", "stop") + of_choice(1, "b"), False),
        (of_choice(0, "a", "") + of_choice(1, "b", ""), False),
    ],
)
async def test_each_choice_has_to_say_why(start: Starter, sent: bytes, is_whole: bool) -> None:
    async with Upstream(replies(STREAM_HEAD + chunk(sent) + STREAM_END)) as upstream, start(upstream.url) as live:
        got = await live.ask("/v1/chat/completions", chat(stream=True, n=2))
        assert (b"backend_failed" not in got.body) is is_whole


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("cut", ["after an event", "amid an event", "amid the last event", "without a last line end"])
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_an_end_that_does_not_is_an_error(start: Starter, path: str, cut: str, framing: Any) -> None:
    parts = WHOLE[path]
    tokens = max(at for at, part in enumerate(parts) if b'"c"' in part)
    kept = b"".join(parts[: tokens + 1])
    sent = {
        "after an event": kept,
        "amid an event": kept + parts[tokens][:-9],
        "amid the last event": b"".join(parts[:-1]) + parts[-1][:-5],
        "without a last line end": kept + parts[tokens][:-1],
    }[cut]
    async with Upstream(serves(framing(sent))) as upstream, start(upstream.url) as live:
        got = await live.ask(path, BODIES[path])
        assert got.status == 200
        for ending in (DONE, b"response.completed", b"message_stop"):
            assert ending not in got.body
        last = events(got.body)[-1]  # each event before it is whole JSON, too
        assert last["error"]["message"]
        if path == "/v1/messages":
            assert got.body.rpartition(b"event: ")[2].startswith(b"error\n")
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("failed", "backend_failed")
        assert line["tokens_in"] > 0
        assert line["tokens_out"] in (3, 4)
        assert live.holds_nothing()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("sent", [b"", b": keep-alive\n\n", b"data: {", b"\n\n"], ids=str)
async def test_a_stream_without_an_event_is_no_answer_and_costs_nothing(start: Starter, path: str, sent: bytes) -> None:
    raw = STREAM_HEAD + (chunk(sent) if sent else b"") + STREAM_END
    async with Upstream(replies(raw)) as upstream, start(upstream.url) as live:
        got = await live.ask(path, BODIES[path])
        assert b"backend_failed" in got.body
        assert got.status == (502 if sent in (b"", b"data: {") else 200)
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_in"], line["tokens_out"]) == ("failed", 0, 0)
        assert len(upstream.requests) == 1
        assert live.holds_nothing()


async def test_an_event_that_went_out_in_part_is_not_ended_for_the_engine(start: Starter) -> None:
    """What the client has of it cannot be taken back: only a broken connection shows that there is more."""
    sent = token("a") + token("x" * 400_000)[:-9]
    async with Upstream(replies(STREAM_HEAD + chunk(sent) + STREAM_END)) as upstream, start(upstream.url) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            with pytest.raises(Exception, match="payload is not completed"):
                await response.read()
        [line] = await live.lines(1)
        assert line["outcome"] == "failed"
        assert line["tokens_out"] >= 1
        assert live.holds_nothing()


FOREIGN = [b'data: {"type":"new","part":1}\n\n', b'event: x\ndata: {"part":2}\n\n', b"data: three\n\n"]


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_how_a_format_that_is_not_known_ends_is_not_known_either(start: Starter, first: int) -> None:
    sent = b"".join(FOREIGN[first:] + FOREIGN[:first])
    async with Upstream(replies(STREAM_HEAD + chunk(sent) + STREAM_END)) as upstream, start(upstream.url) as live:
        got = await live.ask("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
        assert got.body == sent
        [line] = await live.lines(1)
        assert (line["outcome"], line["tokens_out"]) == ("completed", 3)


@pytest.mark.parametrize("first", [0, 2])
async def test_one_event_that_is_not_known_makes_a_known_stream_no_other(start: Starter, first: int) -> None:
    sent = FOREIGN[first] + token("a") * 3
    async with Upstream(replies(STREAM_HEAD + chunk(FOREIGN[first]) + chunk(token("a") * 3) + STREAM_END)) as upstream:
        async with start(upstream.url) as live:
            got = await live.ask("/v1/chat/completions", chat(stream=True))
            assert got.body.startswith(sent)
            assert got.body.endswith(b'"code":"backend_failed"}}\n\n')
            assert (await live.lines(1))[0]["outcome"] == "failed"


async def test_a_stream_that_passes_without_admission_ends_as_it_ends(start: Starter) -> None:
    raw = STREAM_HEAD + chunk(named("response.created") + named("anything")) + STREAM_END
    async with Upstream(replies(raw)) as upstream, start(upstream.url) as live:
        live.has_response()
        got = await live.get("/v1/responses/r1?stream=true")
        assert got.body == named("response.created") + named("anything")
        assert (await live.lines(1))[0]["outcome"] == "completed"


async def test_a_client_that_leaves_amid_an_unfinished_stream_pays_once(start: Starter) -> None:
    gone = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(STREAM_HEAD + chunk(token("a") * 2))
        await gone.wait()
        await peer.send(STREAM_END)

    async with Upstream(script) as upstream, start(upstream.url) as live:
        async with live.post("/v1/chat/completions", chat(stream=True)) as response:
            await response.content.readexactly(len(token("a")))
        [line] = await live.lines(1)
        gone.set()
        assert (line["outcome"], line["tokens_out"]) == ("abandoned", 2)
        assert live.holds_nothing()
