"""One gateway and one engine for many plays: what the engine sends is told; what client and log see is returned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from tests.gateway.capture import STREAM_END, Peer, Seen, Upstream, chunk, streamed
from tests.gateway.live import MODEL, Answer, Live, Starter, chat, until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/responses": {"model": MODEL, "input": "x"},
    "/v1/messages": {"model": MODEL, "max_tokens": 50, "messages": []},
    "/v1/embeddings": {"model": MODEL, "input": "x"},
    "/v1/rerank": {"model": MODEL, "query": "q", "documents": ["a"]},
    "/v1/new": {"model": MODEL},
    "/tokenize": {"model": MODEL, "prompt": "x"},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": []},
}
"""A body for each path; the last two pass beside the queue."""
BESIDE = ("/tokenize", "/v1/messages/count_tokens")
QUEUED = tuple(path for path in ASKED if path not in BESIDE)
STREAMED = QUEUED[:4]
_ROUTES = [{"path": "/v1/new", "treatment": "compute"}]

_WHOLE_HEAD = b"HTTP/1.1 200 OK\r\n%b"
_JSON = b"application/json; charset=utf-8"
_PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"


class Sent(NamedTuple):
    """What an engine sends, and whether it closes the connection then."""

    raw: bytes
    closes: bool = False
    later: bytes = b""
    """What follows once the client has something of `raw`."""


def stream(data: bytes) -> Sent:
    return Sent(streamed(data))


STREAMS: dict[str, Callable[[bytes], Sent]] = {
    "by a last chunk": stream,
    "by its length": lambda data: Sent(_LENGTH_HEAD % len(data) + data),
    "by the end of the connection": lambda data: Sent(_PLAIN_HEAD + data, closes=True),
}
"""How a stream may end, as far as HTTP goes."""
_FRAMINGS: dict[str, Callable[[bytes], bytes]] = {
    "a length that is longer": lambda data: b"Content-Length: %d\r\n\r\n%b" % (len(data) + 9, data),
    "a length that is right": lambda data: b"Content-Length: %d\r\n\r\n%b" % (len(data), data),
    "chunks without an end": lambda data: b"Transfer-Encoding: chunked\r\n\r\n" + (chunk(data) if data else b""),
    "chunks": lambda data: b"Transfer-Encoding: chunked\r\n\r\n" + (chunk(data) if data else b"") + b"0\r\n\r\n",
    "the end of the connection": lambda data: b"\r\n" + data,
}
FRAMINGS = tuple(_FRAMINGS)
"""How an answer in one piece may be framed; the first and third break off whatever is in them."""


def head_of(kind: bytes | None) -> bytes:
    """The first lines of an answer's head."""
    return _WHOLE_HEAD % (b"" if kind is None else b"Content-Type: %b\r\n" % kind)


def whole(framing: str, data: bytes, kind: bytes = _JSON) -> Sent:
    return Sent(head_of(kind) + _FRAMINGS[framing](data), closes=True)


def in_pieces(kind: bytes | None, first: bytes, *rest: bytes) -> Sent:
    """Chunks of any kind, of which the engine sends no more until the client has the first."""
    head = head_of(kind) + b"Transfer-Encoding: chunked\r\n\r\n"
    return Sent(head + chunk(first), later=b"".join(map(chunk, rest)) + STREAM_END)


@dataclass
class Played:
    """`answer`: None where the client's connection broke. `line`: of the access log."""

    answer: Answer | None
    line: dict[str, Any] = field(default_factory=dict)

    @property
    def got(self) -> Answer:
        assert self.answer is not None, "the connection broke"
        return self.answer

    @property
    def end(self) -> tuple[int | None, str, str]:
        """The client's status, and the outcome and reason of the log."""
        return self.answer and self.answer.status, self.line["outcome"], self.line["reason"]

    @property
    def tokens(self) -> tuple[int, int]:
        return self.line["tokens_in"], self.line["tokens_out"]


class Stage:
    """One gateway and one engine for many plays; each is of a tenant of its own."""

    def __init__(self, live: Live, engine: Upstream, next_sent: list[Sent], has_first: asyncio.Event) -> None:
        self.live = live
        self.engine = engine
        self._next = next_sent
        self._has_first = has_first

    async def play(self, path: str, sent: Sent, /, **fields: Any) -> Played:
        """Ask for a path with its body and these fields. The engine is asked once, and nothing is left behind."""

        async def ask(key: str) -> Answer:
            async with self.live.post(path, {**ASKED[path], **fields}, key=key) as response:
                first = await response.content.readany()
                self._has_first.set()
                answer = await Answer.of(response)
                answer.body = first + answer.body
                return answer

        return await self._played(sent, ask)

    async def fetch(self, path: str, sent: Sent) -> Played:
        """GET something of a response that the engine has."""

        def ask(key: str) -> Any:
            self.live.has_response(key=key)
            return self.live.get(path, key=key)

        return await self._played(sent, ask)

    async def _played(self, sent: Sent, ask: Callable[[str], Any]) -> Played:
        number = len(self.engine.requests)
        for pool in self.live.gateway.pools:
            for backend in pool.backends:
                pool.breaks.forget(backend)  # each play is the first of its kind
        self._next[:] = [sent]
        self._has_first.clear()
        try:
            answer = await ask(f"key-{number}")
        except aiohttp.ClientError:
            answer = None
        lines = await self.live.lines(number + 1)
        assert len(self.engine.requests) == len(lines) == number + 1
        await until(self.live.holds_nothing)
        return Played(answer, lines[-1])


@asynccontextmanager
async def stage(start: Starter, **limits: Any) -> AsyncIterator[Stage]:
    next_sent: list[Sent] = []
    has_first = asyncio.Event()

    async def script(seen: Seen, peer: Peer) -> None:
        [(raw, closes, later)] = next_sent
        middle = len(raw) * 2 // 3
        await peer.send(raw[:middle])
        await peer.send(raw[middle:])
        if later:
            await has_first.wait()
            await peer.send(later)
        if closes:
            peer.writer.close()

    async with Upstream(script) as engine, start(engine.url, routes=_ROUTES, limits=limits) as live:
        yield Stage(live, engine, next_sent, has_first)
