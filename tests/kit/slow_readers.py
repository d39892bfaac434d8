"""An engine that sends as fast as it is read, and clients that do not read."""

from __future__ import annotations

import asyncio
import socket

from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, chunk, token
from tests.gateway.live import until

TEXT = "x" * 1000
PIECE = b"".join(token(TEXT) for _ in range(16))
KERNEL_BYTES = 65536


class Floods:
    """An engine that sends as fast as it is read, and counts what it has sent of each answer."""

    def __init__(self, pieces: int, *, framed: bool) -> None:
        self.pieces = pieces
        self.framed = framed
        self.sent: list[int] = []
        self.gone = 0

    async def __call__(self, seen: Seen, peer: Peer) -> None:
        brief = seen.json.get("user") == "brief"
        me = len(self.sent)
        self.sent.append(0)
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        peer.writer.transport.set_write_buffer_limits(high=KERNEL_BYTES)
        try:
            if brief or self.framed:
                await peer.send(STREAM_HEAD)
            else:
                length = b"Content-Length: %d\r\n\r\n" % (self.pieces * len(PIECE))
                await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + length)
            for _ in range(1 if brief else self.pieces):
                await peer.send(chunk(PIECE) if brief or self.framed else PIECE)
                self.sent[me] += len(PIECE)
            if brief or self.framed:
                await peer.send(chunk(DONE) + STREAM_END)
        except ConnectionError:
            self.gone += 1
            raise


def whole(answer: bytes, engine: Floods) -> bool:
    """Has all of the text come? The gateway's own chunks may part it anywhere."""
    return answer.partition(b"\r\n\r\n")[2].count(b"x") == engine.pieces * PIECE.count(b"x")


async def stuck(engine: Floods, answers: int) -> list[int]:
    """What was sent of each answer, once nothing more of any is taken."""
    await until(lambda: len(engine.sent) == answers and all(engine.sent))
    before: list[int] = []
    while before != engine.sent:
        before = list(engine.sent)
        for _ in range(2000):
            await asyncio.sleep(0)
    return before
