"""An answer in one piece that ends before its end is a failure that the client sees, however the engine framed it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from gateway.proxy.ending import Ending
from tests.gateway.capture import Peer, Seen, Upstream, answer, chunk
from tests.gateway.live import MODEL, Starter, chat

WHOLE = json.dumps({"choices": [{"message": {"content": "x" * 3000}}], "usage": {"prompt_tokens": 7}}).encode()
CUTS = {
    "nothing": b"",
    "amid a text": WHOLE[:1000],
    "amid a member": WHOLE[:-3],
    "after an inner object": WHOLE[: WHOLE.index(b"}") + 1],
    "without its last byte": WHOLE[:-1],
    "two at once": WHOLE + WHOLE,
}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "a length that is longer": lambda sent: b"Content-Length: %d\r\n\r\n%b" % (len(sent) + 9, sent),
    "a length that is right": lambda sent: b"Content-Length: %d\r\n\r\n%b" % (len(sent), sent),
    "chunks without an end": lambda sent: b"Transfer-Encoding: chunked\r\n\r\n" + (chunk(sent) if sent else b""),
    "chunks": lambda sent: b"Transfer-Encoding: chunked\r\n\r\n" + (chunk(sent) if sent else b"") + b"0\r\n\r\n",
    "the end of the connection": lambda sent: b"\r\n" + sent,
}
QUEUED: dict[str, Any] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/responses": {"model": MODEL, "input": "x"},
    "/v1/messages": {"model": MODEL, "max_tokens": 5, "messages": []},
    "/v1/embeddings": {"model": MODEL, "input": "x"},
    "/v1/rerank": {"model": MODEL, "query": "q", "documents": ["a"]},
    "/v1/new": {"model": MODEL},
}
BESIDE: dict[str, Any] = {"/tokenize": {"model": MODEL, "prompt": "x"}, "/v1/messages/count_tokens": {"model": MODEL}}
NEW = [{"path": "/v1/new", "treatment": "compute"}]


def says(body: bytes, framing: str, kind: bytes = b"application/json; charset=utf-8") -> Any:
    """A script that closes the connection after its answer, in two pieces."""

    async def script(seen: Seen, peer: Peer) -> None:
        raw = HEAD % kind + FRAMINGS[framing](body)
        middle = len(raw) * 2 // 3
        await peer.send(raw[:middle])
        await peer.send(raw[middle:])
        peer.writer.close()

    return script


@pytest.mark.parametrize("path", QUEUED)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_it_is_an_error_where_nothing_has_gone_out(start: Starter, path: str, framing: str) -> None:
    for cut in CUTS.values():
        async with Upstream(says(cut, framing)) as upstream, start(upstream.url, routes=NEW) as live:
            got = await live.ask(path, QUEUED[path])
            assert (got.status, "the engine broke off" in got.error["message"]) == (502, True)
            [line] = await live.lines(1)
            assert (line["outcome"], line["reason"]) == ("failed", "backend_failed")
            assert len(upstream.requests) == 1
            assert live.holds_nothing()


@pytest.mark.parametrize("path", [*QUEUED, *BESIDE])
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("cut", ["amid a text", "amid a member"])
async def test_it_breaks_off_where_some_has_gone_out(start: Starter, path: str, framing: str, cut: str) -> None:
    limits = {"response_buffer_bytes_max": 1024}  # so that it is relayed as it comes
    body = {**QUEUED, **BESIDE}[path]
    async with (
        Upstream(says(CUTS[cut] if path in BESIDE or cut != "amid a text" else WHOLE[:2000], framing)) as upstream,
        start(upstream.url, routes=NEW, limits=limits) as live,
    ):
        with pytest.raises(aiohttp.ClientError):
            await live.ask(path, body)
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("failed", "backend_failed")
        assert live.holds_nothing()


FINE: dict[str, tuple[bytes, bytes]] = {
    "JSON": (WHOLE, b"application/json"),
    "with space around it": (b"\n" + WHOLE + b"\r\n ", b"application/json"),
    "NaN": (b'{"logprobs":[NaN,-Infinity]}', b"application/json"),
    "half a surrogate pair": (b'{"text":"\\ud83d"}', b"application/json"),
    "no UTF-8": (b'{"text":"\xff"}', b"application/json"),
    "deep": (b"[" * 9000 + b"]" * 9000, b"application/json"),
    "a word": (b"null", b"application/json"),
    "of another shape": (b'{"choices":3,"usage":[]}', b"application/vnd.new+json"),
    "lines": (WHOLE + b"\n" + WHOLE, b"application/x-ndjson"),
    "sound": (b"[RIFF{", b"audio/mpeg"),
    "text": (b"{ said she", b"text/plain"),
}


def test_space_behind_an_answer_is_no_part_of_it() -> None:
    ending = Ending([(b"content-type", b"application/json")])
    for data, is_missing in ((b" \n", False), (b" {", True), (b'"a":1', True), (b"} ", False), (b"\r\n", False)):
        ending.come(data)
        assert ending.is_missing is is_missing


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/new", "/tokenize"])
@pytest.mark.parametrize("framing", ["a length that is right", "the end of the connection"])
@pytest.mark.parametrize(("body", "kind"), FINE.values(), ids=FINE)
@pytest.mark.parametrize("buffer", [1024, 1 << 20])
async def test_what_is_whole_or_no_json_passes(
    start: Starter, path: str, framing: str, body: bytes, kind: bytes, buffer: int
) -> None:
    limits = {"response_buffer_bytes_max": buffer}
    async with (
        Upstream(says(body, framing, kind)) as upstream,
        start(upstream.url, routes=NEW, limits=limits) as live,
    ):
        got = await live.ask(path, {**QUEUED, **BESIDE}[path])
        assert (got.status, got.body) == (200, body)
        assert [line["outcome"] for line in await live.lines(1)] == ["completed"]


async def test_what_passes_beside_the_queue_may_be_empty(start: Starter) -> None:
    async def script(seen: Seen, peer: Peer) -> None:
        await peer.send(answer(b""))

    async with Upstream(script) as upstream, start(upstream.url) as live:
        live.has_response()
        assert (await live.ask("/v1/responses/r1/cancel")).status == 200
