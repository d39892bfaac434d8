"""What is written in one turn of the loop leaves at its end, in order, and nobody's trouble is anybody else's."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from backends.client.outbox import BatchedWriter, Outbox


class Line:
    """One connection: a writer at this end, a plain socket at the other."""

    def __init__(self, outbox: Outbox, transport: asyncio.Transport, peer: socket.socket) -> None:
        self.transport = transport
        self.writer = BatchedWriter(outbox, transport)
        self.peer = peer

    def there(self) -> bytes:
        """What has arrived by now. Loopback hands over what was sent before it goes on."""
        try:
            return self.peer.recv(65536)
        except BlockingIOError:
            return b"(nothing yet)"


@pytest.fixture
async def lines() -> AsyncIterator[list[Line]]:
    """Ten of them, of one outbox."""
    outbox, loop = Outbox(), asyncio.get_running_loop()
    made = []
    for _ in range(10):
        near, far = socket.socketpair()
        far.setblocking(False)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
        made.append(Line(outbox, transport, far))
    yield made
    for line in made:
        line.transport.abort()
        line.peer.close()
    await turn()


async def turn() -> None:
    """The next turn of the loop, and its end."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_is_large_leaves_at_once_with_all_before_it(lines: list[Line]) -> None:
    line, *_ = lines
    line.writer.write(b"a")
    line.writer.write(b"b" * 65535)
    assert line.there() == b"(nothing yet)"
    line.writer.write(b"c" * 65536)
    assert line.there()[:2] == b"ab"


async def test_what_a_turn_writes_leaves_at_its_end_in_order(lines: list[Line]) -> None:
    first, second, *_ = lines
    first.writer.write(b"1")
    second.writer.write(b"2")
    first.writer.write(b"3")
    assert (first.there(), second.there()) == (b"(nothing yet)", b"(nothing yet)")
    assert first.writer.unsent_bytes() == 2
    await turn()
    assert (first.there(), second.there()) == (b"13", b"2")
    assert first.writer.unsent_bytes() == 0
    first.writer.write(b"4")
    await turn()
    assert first.there() == b"4"


async def test_a_long_turn_holds_back_only_a_few(lines: list[Line]) -> None:
    for line in lines[:7]:
        line.writer.write(b"x")
    assert lines[0].there() == b"(nothing yet)"
    lines[7].writer.write(b"x")
    assert [line.there() for line in lines[:8]] == [b"x"] * 8
    lines[8].writer.write(b"y")
    assert lines[8].there() == b"(nothing yet)"
    await turn()
    assert lines[8].there() == b"y"


async def test_flushed_early_it_does_not_leave_twice(lines: list[Line]) -> None:
    line = lines[0]
    line.writer.write(b"1")
    line.writer.flush()
    assert line.there() == b"1"
    line.writer.write(b"2")
    await turn()
    assert line.there() == b"2"
    await turn()
    assert line.there() == b"(nothing yet)"


@pytest.mark.parametrize("end", ["close", "abort", "write_eof"])
async def test_what_was_written_before_the_end_still_leaves(lines: list[Line], end: str) -> None:
    line = lines[0]
    line.writer.write(b"last words")
    getattr(line.writer, end)()
    await turn()
    assert line.there() == b"last words"
    assert line.there() == b"", "and then the end"


async def test_a_connection_that_is_gone_takes_nothing_and_stops_nobody(lines: list[Line]) -> None:
    gone, other, *_ = lines
    gone.writer.write(b"1")
    other.writer.write(b"2")
    gone.transport.abort()
    await turn()
    assert (gone.there(), other.there()) == (b"", b"2")
    gone.writer.write(b"3")
    await turn()


async def test_a_write_that_fails_ends_its_own_connection_only(
    lines: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    broken, other, *_ = lines
    broken.transport.write_eof()  # behind the writer's back: a later write is an error
    broken.writer.write(b"1")
    other.writer.write(b"2")
    with caplog.at_level(logging.ERROR):
        await turn()
    assert "a write failed" in caplog.text
    assert broken.transport.is_closing()
    assert other.there() == b"2"


async def test_the_end_of_a_connection_that_the_peer_has_reset_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        BatchedWriter(Outbox(), transport).write_eof()
        transport.abort()
        await turn()
