"""A client that reads slowly stops its own answer and nobody else's, and one that reads nothing is cut."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.certificates import Authority
from tests.gateway.capture import DONE, Upstream
from tests.gateway.live import Live, Starter, chat, events, until
from tests.kit.slow_readers import KERNEL_BYTES, PIECE, Floods, stuck, whole

HELD_BYTES_MAX = 65536 + 262144
"""Per stream: the high-water mark, and the one read of the backend that crosses it."""


class Reader:
    """A client with a small receive buffer that reads when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, live: Live, context: ssl.SSLContext | None = None, **fields: object) -> Reader:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        sock.connect(("127.0.0.1", live.gateway.port))
        name = None if context is None else "127.0.0.1"
        found = cls(*await asyncio.open_connection(sock=sock, ssl=context, server_hostname=name, limit=KERNEL_BYTES))
        body = json.dumps(chat(**fields)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
        head += b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        found.writer.write(head + body)
        return found

    def close(self) -> None:
        self.writer.transport.abort()


def held_bytes(live: Live) -> list[int]:
    """What waits in the gateway for each client."""
    return [connection._transport.get_write_buffer_size() for connection in live.server.connections]


class Spoken(NamedTuple):
    """What is spoken to clients: the section of the config, and a context that trusts it; None without TLS."""

    tls: dict[str, str] | None = None
    context: ssl.SSLContext | None = None


@asynccontextmanager
async def flooded(
    start: Starter, engine: Floods, spoken: Spoken, **limits: float
) -> AsyncIterator[tuple[Live, Upstream]]:
    async with Upstream(engine) as upstream:
        limits = {"response_buffer_bytes_max": 65536, **limits}
        async with start(upstream.url, tls=spoken.tls, trusting=spoken.context, limits=limits) as live:
            yield live, upstream


@pytest.fixture(params=["http", "https"])
def spoken(request: pytest.FixtureRequest, authority: Authority) -> Spoken:
    if request.param == "http":
        return Spoken()
    certificate, key = authority.sign("listener")
    return Spoken({"cert_file": certificate, "key_file": key}, authority.client())


@pytest.mark.parametrize("framed", [True, False], ids=["stream", "whole"])
async def test_a_slow_reader_stops_its_own_engine_and_no_other_request_and_loses_nothing(
    start: Starter, spoken: Spoken, framed: bool
) -> None:
    engine = Floods(pieces=2000, framed=framed)
    async with flooded(start, engine, spoken) as (live, _):
        slow = await Reader.of(live, spoken.context, stream=framed)
        [sent] = await stuck(engine, 1)
        assert sent < engine.pieces * len(PIECE)
        for _ in range(5):
            brief = await live.ask("/v1/chat/completions", chat(stream=True, user="brief"))
            assert (brief.status, len(events(brief.body))) == (200, 17)
        assert spoken.tls or 0 < max(held_bytes(live)) <= HELD_BYTES_MAX
        answer = await slow.reader.read()
        assert whole(answer, engine)
        assert not framed or DONE in answer
        slow.close()


@pytest.mark.parametrize("framed", [True, False], ids=["stream", "whole"])
async def test_a_client_that_reads_nothing_is_cut_and_pays_for_what_was_sent(
    start: Starter, quick_sweep: None, spoken: Spoken, framed: bool
) -> None:
    engine = Floods(pieces=1 << 30, framed=framed)
    async with flooded(start, engine, spoken, client_stall_s=0.2) as (live, upstream):
        slow = await Reader.of(live, spoken.context, stream=framed)
        [line] = await live.lines(1)
        assert (line["outcome"], line["reason"]) == ("abandoned", "client_disconnected")
        assert not framed or line["tokens_out"] > 0
        assert live.holds_nothing()
        await until(lambda: engine.gone == 1)  # the engine is told by a closed connection
        assert len(upstream.requests) == 1
        slow.close()


async def test_a_client_that_reads_a_little_now_and_then_is_not_cut(start: Starter, quick_sweep: None) -> None:
    stall_s, late_s, taken = 0.3, 0.3, b""
    while late_s >= stall_s:  # the machine was, so the client stalled
        engine = Floods(pieces=1000, framed=True)
        async with flooded(start, engine, Spoken(), client_stall_s=stall_s) as (live, _):
            slow, clock = await Reader.of(live, stream=True), asyncio.get_running_loop().time
            read_s = [clock()]
            await stuck(engine, 1)
            taken = b""
            while read_s[-1] < read_s[0] + 2 * stall_s:
                taken += await slow.reader.read(1 << 18)
                await asyncio.sleep(0.05)
                read_s.append(clock())
            taken += await slow.reader.read()
            slow.close()
        late_s = max(after - before for before, after in pairwise(read_s))
    assert whole(taken, engine)
