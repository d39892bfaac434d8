"""A server that sends exactly the bytes a test gives it, and a receiver that writes down what comes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from backends.client.upstream import UpstreamConnections
from backends.upstream_errors import UpstreamError
from tests.gateway.capture import Listener
from tests.gateway.capture import Peer as Connected

REQUEST = b"POST /v1/x HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n\r\n"
BODY = b"{}"


class Peer(Connected):
    """The server's side of one connection; `number` counts connections from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.number = number

    async def request(self) -> bytes:
        """One whole request, or b"" when the client closed."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await self.reader.readexactly(length)


Script = Callable[[Peer], Awaitable[None]]


class RawServer(Listener):
    """Talks on every connection as the script says."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self.connections = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._script(Peer(self.connections - 1, reader, writer))


class Recorder:
    """A Receiver that keeps everything and lets a test wait for the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.ends: list[UpstreamError | None] = []
        self.first_piece = asyncio.Event()
        self._ended = asyncio.Event()

    def head_received(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert self.status == 0, "two heads"
        self.status, self.headers = status, headers

    def body_received(self, data: bytes) -> None:
        assert self.status, "a body before the head"
        assert not self.ends, "a body after the end"
        self.pieces.append(data)
        self.first_piece.set()

    def completed(self) -> None:
        self.ends.append(None)
        self._ended.set()

    def failed(self, error: UpstreamError) -> None:
        self.ends.append(error)
        self._ended.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    async def end(self) -> UpstreamError | None:
        await self._ended.wait()
        assert len(self.ends) == 1, "more than one end"
        return self.ends[0]


def say(*parts: bytes, then: Script | None = None) -> Script:
    """Answer every request on every connection with these bytes."""

    async def script(peer: Peer) -> None:
        while await peer.request():
            for part in parts:
                await peer.send(part)
            if then is not None:
                await then(peer)
                return

    return script


async def close(peer: Peer) -> None:
    """End the connection in good order: the script returns."""


async def reset(peer: Peer) -> None:
    peer.reset()


async def hang(peer: Peer) -> None:
    await peer.gone()


Open = Callable[..., UpstreamConnections]


async def ask(
    pool: UpstreamConnections, head: bytes = REQUEST, body: bytes = BODY
) -> tuple[Recorder, UpstreamError | None]:
    recorder = Recorder()
    pool.send(head, body, recorder)
    return recorder, await recorder.end()
